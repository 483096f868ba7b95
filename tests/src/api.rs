//! A fast client of the daemon's API: HTTP/1.1 by hand over one connection.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

const LIMIT: Duration = Duration::from_secs(60);

/// A connection to the API.
#[derive(Debug)]
pub struct Api {
    stream: BufReader<UnixStream>,
}

impl Api {
    /// Connects to a daemon's socket.
    pub fn connect(socket: &Path) -> Result<Self> {
        let stream = UnixStream::connect(socket)?;
        stream.set_read_timeout(Some(LIMIT))?;
        stream.set_write_timeout(Some(LIMIT))?;
        let stream = BufReader::new(stream);
        Ok(Self { stream })
    }

    /// Sends a request, also with an invalid body. Returns status and JSON.
    pub fn call(&mut self, method: &str, path: &str, body: &str) -> Result<(u16, Value)> {
        let request = format!(
            "{method} {path} HTTP/1.1\r\nhost: forebay\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        );
        self.stream.get_mut().write_all(request.as_bytes())?;
        let status = self.line()?;
        let status = status.split(' ').nth(1).context("a status")?.parse()?;
        let mut length = None;
        loop {
            let line = self.line()?.to_ascii_lowercase();
            if line.is_empty() {
                break;
            }
            if let Some(value) = line.strip_prefix("content-length:") {
                length = Some(value.trim().parse()?);
            }
        }
        let mut answer = vec![0; length.context("no length of the answer")?];
        self.stream.read_exact(&mut answer)?;
        let answer = serde_json::from_slice(&answer)
            .with_context(|| format!("{method} {path} {body}: status {status}"))?;
        Ok((status, answer))
    }

    /// [`call`](Self::call) that fails unless the request succeeds.
    pub fn must(&mut self, method: &str, path: &str, body: &str) -> Result<Value> {
        let (status, answer) = self.call(method, path, body)?;
        ensure!(status < 300, "{method} {path} {body}: {status} {answer}");
        Ok(answer)
    }

    fn line(&mut self) -> Result<String> {
        let mut line = String::new();
        ensure!(
            self.stream.read_line(&mut line)? > 0,
            "the daemon closed the connection"
        );
        Ok(line.trim_end().to_owned())
    }
}
