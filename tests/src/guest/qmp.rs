//! QEMU's monitor (QMP), for hot-plug. Events are dropped.
//!
//! `device_del` of a vfio-user device is not used: QEMU 10.1 to 11.1 aborts
//! (`memory_region_del_subregion`, if the device has MSI-X).

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

const LIMIT: Duration = Duration::from_secs(120);

/// A connection to a monitor.
#[derive(Debug)]
pub struct Qmp {
    stream: BufReader<UnixStream>,
}

impl Qmp {
    /// Connects to a QEMU's socket.
    pub fn connect(socket: &Path) -> Result<Self> {
        let stream = UnixStream::connect(socket).context("QEMU's monitor")?;
        let mut qmp = Self {
            stream: BufReader::new(stream),
        };
        qmp.wait("greeting", |message| message.get("QMP").is_some())?;
        qmp.execute("qmp_capabilities", json!({}))?;
        Ok(qmp)
    }

    /// Executes a command and returns its result.
    pub fn execute(&mut self, command: &str, arguments: Value) -> Result<Value> {
        let line = json!({ "execute": command, "arguments": arguments });
        writeln!(self.stream.get_mut(), "{line}").context("QEMU's monitor")?;
        let answered = |message: &Value| message.get("event").is_none();
        let answer = self.wait(command, answered)?;
        match answer.get("return") {
            Some(value) => Ok(value.clone()),
            None => bail!("QEMU refused {command}: {answer}"),
        }
    }

    fn wait(&mut self, what: &str, is_it: impl Fn(&Value) -> bool) -> Result<Value> {
        let end = Instant::now() + LIMIT;
        let mut line = String::new();
        loop {
            let left = end.saturating_duration_since(Instant::now());
            let left = left.max(Duration::from_millis(1));
            self.stream.get_ref().set_read_timeout(Some(left))?;
            line.clear();
            let read = self.stream.read_line(&mut line);
            let bytes = read.with_context(|| format!("QEMU did not report {what}"))?;
            if bytes == 0 {
                bail!("QEMU exited instead of {what}");
            }
            let message: Value = serde_json::from_str(&line).with_context(|| line.clone())?;
            if is_it(&message) {
                return Ok(message);
            }
        }
    }
}
