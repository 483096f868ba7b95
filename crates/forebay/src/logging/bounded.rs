//! A log file of bounded size.
//!
//! At its bound, the file is renamed to `<file>.1`. A deleted or renamed file is made again. While
//! writing fails, lines go to stderr; the first is kept and written later.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tracing_subscriber::fmt::MakeWriter;

const POLL_INTERVAL: Duration = Duration::from_secs(1);

pub(super) struct BoundedLog(Mutex<Inner>);

struct Inner {
    path: PathBuf,
    file: Option<File>,
    is: (u64, u64),
    polled: Option<Instant>,
    len_bytes: u64,
    max_bytes: u64,
    unwritten: Vec<u8>,
}

impl BoundedLog {
    pub(super) fn new(path: &Path, max_bytes: u64) -> Self {
        Self(Mutex::new(Inner {
            path: path.to_owned(),
            file: None,
            is: (0, 0),
            polled: None,
            len_bytes: 0,
            max_bytes,
            unwritten: Vec::new(),
        }))
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Opens the file if needed; writes the kept lines.
    pub(super) fn open(&self) -> io::Result<()> {
        let mut inner = self.inner();
        inner.polled = None;
        inner.put(&[])
    }

    /// The next write opens its path again.
    pub(super) fn close(&self) {
        self.inner().file = None;
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
        let is = file.metadata()?;
        self.len_bytes = is.len();
        self.is = (is.dev(), is.ino());
        self.file = Some(file);
        Ok(())
    }

    fn turn_over(&mut self) -> io::Result<()> {
        let mut old = self.path.clone().into_os_string();
        old.push(".1");
        std::fs::rename(&self.path, old)?;
        self.open()
    }

    /// Closes a file that left its path.
    fn poll(&mut self) {
        if self.polled.is_some_and(|at| at.elapsed() < POLL_INTERVAL) {
            return;
        }
        self.polled = Some(Instant::now());
        let there = self.path.metadata().map(|is| (is.dev(), is.ino()));
        if there.ok() != Some(self.is) {
            self.file = None;
        }
    }

    fn put(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.poll();
        let before = std::mem::take(&mut self.unwritten);
        let mut written = self.append(&before);
        match &written {
            Ok(()) => written = self.append(bytes),
            Err(_) => self.unwritten = before,
        }
        if written.is_err() {
            self.file = None;
            if self.unwritten.is_empty() {
                self.unwritten = bytes.to_vec();
            }
        }
        written
    }

    fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        if self.file.is_none() {
            self.open()?;
        }
        if self.len_bytes > 0 && self.len_bytes + bytes.len() as u64 > self.max_bytes {
            self.turn_over()?;
        }
        let file = self.file.as_mut().ok_or(io::ErrorKind::NotFound)?;
        file.write_all(bytes)?;
        self.len_bytes += bytes.len() as u64;
        Ok(())
    }
}

pub(super) struct Line<'a>(MutexGuard<'a, Inner>);

impl Write for Line<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self.0.put(bytes) {
            Ok(()) => Ok(bytes.len()),
            Err(_) => io::stderr().write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl<'a> MakeWriter<'a> for BoundedLog {
    type Writer = Line<'a>;

    fn make_writer(&'a self) -> Line<'a> {
        Line(self.inner())
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
        writeln!(log.make_writer(), "kept").unwrap();
        writeln!(log.make_writer(), "elsewhere").unwrap();
        assert!(log.open().is_err());
        std::fs::remove_file(folder.path().join("log")).unwrap();
        log.open().unwrap();
        writeln!(log.make_writer(), "here").unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "kept\nhere\n");
    }

    #[test]
    fn a_log_that_is_not_at_its_path_is_begun_anew() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.log");
        let log = BoundedLog::new(&path, 100);
        writeln!(log.make_writer(), "first").unwrap();
        std::fs::rename(&path, folder.path().join("renamed")).unwrap();
        log.open().unwrap();
        writeln!(log.make_writer(), "second").unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "second\n");
        std::fs::remove_file(&path).unwrap();
        log.close();
        writeln!(log.make_writer(), "third").unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "third\n");
    }

    #[test]
    fn an_unwritable_log_is_reported_until_it_recovers() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.log");
        std::os::unix::fs::symlink("/dev/full", &path).unwrap();
        let log = BoundedLog::new(&path, 100);
        // A successful open proves nothing.
        log.open().unwrap();
        writeln!(log.make_writer(), "kept").unwrap();
        for _ in 0..2 {
            let error = log.open().unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::StorageFull);
        }
        std::fs::remove_file(&path).unwrap();
        log.open().unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "kept\n");
    }
}
