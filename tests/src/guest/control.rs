//! Runs commands in a guest concurrently, with time limits.
//!
//! A command is a line `run ID BASE64` to the agent (`init.sh`). Its answer is a line
//! `end ID CODE LENGTH` and the output. If the stream ends, every wait fails.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

const OUTPUT_LIMIT_BYTES: u64 = 16 << 20;
const LINE_LIMIT_BYTES: u64 = 256;

/// Result of a command.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Output {
    /// Its exit code.
    pub code: i32,
    /// Its output, from both streams.
    pub text: String,
}

/// A command that runs in the guest.
#[derive(Debug)]
pub struct Job {
    id: u64,
    command: String,
    state: Arc<Shared>,
}

impl Job {
    /// Waits for its end.
    pub fn wait(self, limit: Duration) -> Result<Output> {
        self.state
            .wait(limit, |state| state.ended.remove(&self.id))
            .with_context(|| format!("in the guest: {}", self.command))
    }

    /// Whether it has ended.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        self.state.lock().ended.contains_key(&self.id)
    }
}

#[derive(Debug, Default)]
struct State {
    ready: bool,
    ended: HashMap<u64, Output>,
    /// Why the stream ended.
    gone: Option<String>,
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<T>(&self, limit: Duration, mut take: impl FnMut(&mut State) -> Option<T>) -> Result<T> {
        let end = Instant::now() + limit;
        let mut state = self.lock();
        loop {
            if let Some(value) = take(&mut state) {
                return Ok(value);
            }
            if let Some(why) = &state.gone {
                bail!("the guest is gone: {why}");
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                bail!("no answer within {} s", limit.as_secs());
            }
            state = self
                .changed
                .wait_timeout(state, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }

    fn change(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.lock());
        self.changed.notify_all();
    }
}

/// The connection to a guest's agent.
#[derive(Debug)]
pub struct Control {
    writer: Option<Mutex<UnixStream>>,
    next_id: AtomicU64,
    state: Arc<Shared>,
}

impl Control {
    /// Before the connection exists, every use fails.
    pub(super) fn unconnected() -> Self {
        Self {
            writer: None,
            next_id: AtomicU64::new(1),
            state: Arc::default(),
        }
    }

    pub(super) fn start(stream: UnixStream) -> Result<Self> {
        let mut control = Self::unconnected();
        let reader = BufReader::new(stream.try_clone()?);
        let state = Arc::clone(&control.state);
        std::thread::spawn(move || {
            let why = read_answers(reader, &state)
                .err()
                .map_or("its control port was closed".to_owned(), |error| {
                    format!("{error:#}")
                });
            state.change(|state| state.gone = Some(why));
        });
        control.writer = Some(Mutex::new(stream));
        Ok(control)
    }

    pub(super) fn wait_ready(&self, limit: Duration) -> Result<()> {
        self.state
            .wait(limit, |state| state.ready.then_some(()))
            .context("waiting for the guest's agent")
    }

    pub(super) fn spawn(&self, command: &str) -> Result<Job> {
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        self.send(&format!("run {id} {}\n", base64(command.as_bytes())))?;
        Ok(Job {
            id,
            command: command.to_owned(),
            state: Arc::clone(&self.state),
        })
    }

    pub(super) fn power_off(&self) -> Result<()> {
        self.send("off 0 -\n")
    }

    fn send(&self, line: &str) -> Result<()> {
        let writer = self.writer.as_ref().context("no connection to the guest")?;
        writer
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .write_all(line.as_bytes())
            .context("the guest is gone")
    }
}

fn read_answers(mut reader: impl BufRead, shared: &Shared) -> Result<()> {
    loop {
        let mut line = String::new();
        let read = reader
            .by_ref()
            .take(LINE_LIMIT_BYTES)
            .read_line(&mut line)?;
        if read == 0 {
            return Ok(());
        }
        let words: Vec<&str> = line.split_whitespace().collect();
        match words[..] {
            ["ready"] => shared.change(|state| state.ready = true),
            ["end", id, code, length] => {
                let (id, code, length) = (id.parse()?, code.parse()?, length.parse::<u64>()?);
                if length > OUTPUT_LIMIT_BYTES {
                    bail!("a command printed {length} bytes");
                }
                let mut bytes = Vec::new();
                reader.by_ref().take(length).read_to_end(&mut bytes)?;
                if (bytes.len() as u64) < length {
                    bail!("its control port was closed in the middle of an answer");
                }
                let text = String::from_utf8_lossy(&bytes).into_owned();
                shared.change(|state| {
                    state.ended.insert(id, Output { code, text });
                });
            }
            _ => bail!("its agent sent {line:?}"),
        }
    }
}

/// RFC 4648, section 4.
fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for chunk in bytes.chunks(3) {
        let byte = |i: usize| u32::from(chunk.get(i).copied().unwrap_or(0));
        let group = byte(0) << 16 | byte(1) << 8 | byte(2);
        for i in 0..4 {
            if i <= chunk.len() {
                let digit = (group >> (18 - 6 * i)) & 63;
                text.push(char::from(DIGITS[digit as usize]));
            } else {
                text.push('=');
            }
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base64_as_the_rfc_has_it() {
        // RFC 4648, section 10.
        for (bytes, text) in [
            ("", ""),
            ("f", "Zg=="),
            ("fo", "Zm8="),
            ("foo", "Zm9v"),
            ("foob", "Zm9vYg=="),
            ("fooba", "Zm9vYmE="),
            ("foobar", "Zm9vYmFy"),
        ] {
            assert_eq!(base64(bytes.as_bytes()), text);
        }
    }

    #[test]
    fn answers_are_matched_to_their_commands() {
        let shared = Shared::default();
        read_answers(&b"ready\nend 2 0 4\nend\nend 1 7 0\n"[..], &shared).unwrap();
        let state = shared.lock();
        assert!(state.ready);
        let output = |code, text: &str| Output {
            code,
            text: text.to_owned(),
        };
        assert_eq!(state.ended[&2], output(0, "end\n"));
        assert_eq!(state.ended[&1], output(7, ""));
    }

    #[test]
    fn bad_answers_are_errors() {
        for bad in [
            "rubbish\n",
            "end 1 0\n",
            "end x 0 0\n",
            "end 1 0 99999999999\n",
            "end 1 0 5\nabc",
        ] {
            let shared = Shared::default();
            assert!(read_answers(bad.as_bytes(), &shared).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn waiting_ends_when_the_guest_is_gone() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let control = Control::start(ours).unwrap();
        let job = control.spawn("true").unwrap();
        drop(theirs);
        let error = job.wait(Duration::from_secs(60)).unwrap_err();
        assert!(format!("{error:#}").contains("gone"), "{error:#}");
    }
}
