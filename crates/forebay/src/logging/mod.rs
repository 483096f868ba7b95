//! The daemon's log, by `tracing`: to the terminal or a bounded file, and under systemd to the
//! journal (`JOURNAL_STREAM`). `RUST_LOG` overrides the configured level.

mod bounded;
mod lines;

use std::io::{self, IsTerminal};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, Layer, Registry, reload};

use crate::config::LogFormat;
use bounded::BoundedLog;
use lines::Lines;

const FILE_MAX_BYTES: u64 = 8 << 20;

type Output = Box<dyn Layer<Registry> + Send + Sync>;

pub(crate) struct Log {
    file: Option<(PathBuf, &'static BoundedLog)>,
    set_filter: Box<dyn Fn(EnvFilter)>,
}

impl Log {
    pub(crate) fn set_level(&self, level: &str) {
        (self.set_filter)(filter(level));
    }

    /// The next line opens its path again.
    pub(crate) fn close(&self) {
        if let Some((_, file)) = &self.file {
            file.close();
        }
    }

    /// Opens the file, if any, and writes the kept lines.
    pub(crate) fn open(&self) -> Result<(), String> {
        let Some((path, file)) = &self.file else {
            return Ok(());
        };
        file.open().map_err(|error| {
            format!(
                "can't write to the log {}: {error}; messages go to stderr until the log can be written again",
                path.display()
            )
        })
    }
}

fn filter(level: &str) -> EnvFilter {
    EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(level))
}

pub(crate) fn start(level: &str, format: LogFormat, file: &Path) -> Log {
    let (filter, handle) = reload::Layer::new(filter(level));
    let mut log = Log {
        file: None,
        set_filter: Box::new(move |filter| _ = handle.reload(filter)),
    };
    let mut outputs: Vec<Output> = Vec::new();
    if io::stderr().is_terminal() {
        outputs.push(output(Lines::new(format), true, io::stderr));
    } else {
        let bounded: &'static _ = Box::leak(Box::new(BoundedLog::new(file, FILE_MAX_BYTES)));
        log.file = Some((file.to_owned(), bounded));
        // The daemon reports a failure and retries.
        let _ = log.open();
        outputs.push(output(Lines::new(format), false, || bounded.make_writer()));
        let named = std::env::var("JOURNAL_STREAM");
        if named.is_ok_and(|named| is_stream(&named, io::stderr())) {
            outputs.push(output(Lines::for_journal(format), false, io::stderr));
        }
    }
    tracing_subscriber::registry()
        .with(outputs)
        .with(filter)
        .init();
    log
}

fn output<W>(lines: Lines, ansi: bool, writer: W) -> Output
where
    W: for<'a> MakeWriter<'a> + Send + Sync + 'static,
{
    tracing_subscriber::fmt::layer()
        .with_ansi(ansi)
        // tracing's `eprintln!` panics if stderr is on the same full disk.
        .log_internal_errors(false)
        .with_writer(writer)
        .event_format(lines)
        .boxed()
}

/// Whether this is systemd's stream, named `DEVICE:INODE` (systemd.exec(5)).
fn is_stream(named: &str, stream: impl AsFd) -> bool {
    let is = rustix::fs::fstat(stream).map(|is| format!("{}:{}", is.st_dev, is.st_ino));
    is.is_ok_and(|is| is == named)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_journal_is_known_by_its_stream() {
        let file = tempfile::tempfile().unwrap();
        let other = tempfile::tempfile().unwrap();
        let is = rustix::fs::fstat(&file).unwrap();
        let named = format!("{}:{}", is.st_dev, is.st_ino);
        assert!(is_stream(&named, &file));
        for (named, stream) in [(&*named, &other), ("", &file), ("8:x", &file)] {
            assert!(!is_stream(named, stream), "{named}");
        }
    }
}
