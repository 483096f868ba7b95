//! The daemon's log.
//!
//! Purpose: lines for people or programs, on the terminal if there is one, else in a file that can't fill
//! the disk.
//! Design: `tracing` with its plain format, or one JSON object a line; `RUST_LOG` wins over the configured level. The file is
//! renamed to `<file>.1` when it has grown to its bound and a new one is begun, so at most two bounds
//! of log exist. A line that can't be written is dropped: the daemon goes on.
//! Not here: the engine's log, which never goes through this (its I/O path logs nothing).

use std::fs::{File, OpenOptions};
use std::io::{self, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::fmt::writer::BoxMakeWriter;

use crate::config::LogFormat;
use crate::failure::{Outcome, While};

/// How large a log file grows.
const FILE_MAX_BYTES: u64 = 8 << 20;

/// Sets up logging for this process: on stderr if that is a terminal, else in `file`.
pub(crate) fn start(level: &str, format: LogFormat, file: &Path) -> Outcome {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(level));
    let on_terminal = io::stderr().is_terminal();
    let writer = if on_terminal {
        BoxMakeWriter::new(io::stderr)
    } else {
        let file = BoundedLog::open(file, FILE_MAX_BYTES)
            .while_doing(format!("open the log {}", file.display()))?;
        BoxMakeWriter::new(file)
    };
    let log = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_target(false)
        .with_ansi(on_terminal)
        // It would be told on stderr with `eprintln!`, which panics when that is on the same full disk.
        .log_internal_errors(false)
        .with_writer(writer);
    match format {
        LogFormat::Text => log.init(),
        LogFormat::Json => log.json().flatten_event(true).init(),
    }
    Ok(())
}

/// A log file of bounded size.
struct BoundedLog(Mutex<Inner>);

struct Inner {
    path: PathBuf,
    file: File,
    len_bytes: u64,
    max_bytes: u64,
}

impl BoundedLog {
    fn open(path: &Path, max_bytes: u64) -> io::Result<Self> {
        if let Some(folder) = path.parent() {
            std::fs::create_dir_all(folder)?;
        }
        let file = append_to(path)?;
        let len_bytes = file.metadata()?.len();
        Ok(Self(Mutex::new(Inner {
            path: path.to_owned(),
            file,
            len_bytes,
            max_bytes,
        })))
    }
}

fn append_to(path: &Path) -> io::Result<File> {
    OpenOptions::new().append(true).create(true).open(path)
}

impl Inner {
    fn turn_over(&mut self) -> io::Result<()> {
        let mut old = self.path.clone().into_os_string();
        old.push(".1");
        std::fs::rename(&self.path, old)?;
        self.file = append_to(&self.path)?;
        self.len_bytes = 0;
        Ok(())
    }
}

/// One line on its way into the file.
struct Line<'a>(MutexGuard<'a, Inner>);

impl Write for Line<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let inner = &mut *self.0;
        if inner.len_bytes > 0 && inner.len_bytes + bytes.len() as u64 > inner.max_bytes {
            inner.turn_over()?;
        }
        let written = inner.file.write(bytes)?;
        inner.len_bytes += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl<'a> MakeWriter<'a> for BoundedLog {
    type Writer = Line<'a>;

    fn make_writer(&'a self) -> Line<'a> {
        Line(self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_stays_within_two_bounds_and_keeps_the_last_lines() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("log/a.log");
        for _restart in 0..3 {
            let log = BoundedLog::open(&path, 100).unwrap();
            for line in 0..50 {
                writeln!(log.make_writer(), "line {line}").unwrap();
            }
        }
        let now = std::fs::read_to_string(&path).unwrap();
        let before = std::fs::read_to_string(folder.path().join("log/a.log.1")).unwrap();
        assert!(
            now.len() <= 110 && before.len() <= 110,
            "{} {}",
            now.len(),
            before.len()
        );
        assert!(now.ends_with("line 49\n"), "{now}");
        assert_eq!(
            std::fs::read_dir(folder.path().join("log"))
                .unwrap()
                .count(),
            2
        );
    }
}
