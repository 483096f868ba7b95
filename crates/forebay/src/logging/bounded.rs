//! A log file that can't fill the disk.
//!
//! Purpose and design: the file is renamed to `<file>.1` when it has grown to its bound and a new one is begun, so at most two
//! bounds of log exist. A line that can't be written is dropped: the daemon goes on. While the file can't be opened, lines
//! go to stderr.
//! Not here: what a line looks like.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use tracing_subscriber::fmt::MakeWriter;

/// A log file of bounded size.
pub(super) struct BoundedLog(Mutex<Inner>);

struct Inner {
    path: PathBuf,
    file: Option<File>,
    len_bytes: u64,
    max_bytes: u64,
}

impl BoundedLog {
    /// Of this file, which is not open yet.
    pub(super) fn new(path: &Path, max_bytes: u64) -> Self {
        Self(Mutex::new(Inner {
            path: path.to_owned(),
            file: None,
            len_bytes: 0,
            max_bytes,
        }))
    }

    /// Opens the file, unless it is open.
    pub(super) fn open(&self) -> io::Result<()> {
        let mut inner = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match inner.file {
            Some(_) => Ok(()),
            None => inner.open(),
        }
    }
}

fn append_to(path: &Path) -> io::Result<File> {
    OpenOptions::new().append(true).create(true).open(path)
}

impl Inner {
    fn open(&mut self) -> io::Result<()> {
        if let Some(folder) = self.path.parent() {
            std::fs::create_dir_all(folder)?;
        }
        let file = append_to(&self.path)?;
        self.len_bytes = file.metadata()?.len();
        self.file = Some(file);
        Ok(())
    }

    fn turn_over(&mut self) -> io::Result<()> {
        let mut old = self.path.clone().into_os_string();
        old.push(".1");
        std::fs::rename(&self.path, old)?;
        self.file = None;
        self.open()
    }
}

/// One line on its way into the file.
pub(super) struct Line<'a>(MutexGuard<'a, Inner>);

impl Write for Line<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let inner = &mut *self.0;
        if inner.len_bytes > 0 && inner.len_bytes + bytes.len() as u64 > inner.max_bytes {
            inner.turn_over()?;
        }
        let Some(file) = &mut inner.file else {
            return io::stderr().write(bytes);
        };
        let written = file.write(bytes)?;
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
            let log = BoundedLog::new(&path, 100);
            log.open().unwrap();
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
    #[test]
    fn a_log_that_can_not_be_opened_is_opened_later() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("log/a.log");
        std::fs::write(folder.path().join("log"), "in the way").unwrap();
        let log = BoundedLog::new(&path, 100);
        assert!(log.open().is_err());
        writeln!(log.make_writer(), "elsewhere").unwrap();
        std::fs::remove_file(folder.path().join("log")).unwrap();
        log.open().unwrap();
        writeln!(log.make_writer(), "here").unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "here\n");
    }
}
