//! Records of changes that survive restarts and kills.
//!
//! Each record is a line of JSON in one of two files in the state folder, so that ordinary changes
//! can't displace destructive ones. A full file is renamed to `<file>.1`. A thread writes, and
//! syncs destructive changes. Unreadable lines are skipped, because a crash may have truncated one.

use std::fs::{File, OpenOptions};
use std::io::{self, BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use tokio::sync::oneshot;

use crate::model::events::Event;

/// A larger file is renamed.
const FILE_MAX_BYTES: u64 = 2 << 20;
const WAITING_MAX: usize = 1024;
const CHANGES: &str = "changes.jsonl";
const DESTRUCTIVE: &str = "destructive.jsonl";

struct JournalLine {
    text: String,
    destructive: bool,
    written: oneshot::Sender<()>,
}

#[derive(Debug)]
pub(crate) struct Journal(SyncSender<JournalLine>);

#[derive(Debug, Default)]
pub(crate) struct Kept {
    pub(crate) changes: Vec<Event>,
    pub(crate) destructive: Vec<Event>,
}

impl Journal {
    pub(crate) fn open(folder: &Path) -> io::Result<(Self, Kept)> {
        let (changes, destructive) = (folder.join(CHANGES), folder.join(DESTRUCTIVE));
        let kept = Kept {
            changes: read(&changes),
            destructive: read(&destructive),
        };
        let (sender, lines) = sync_channel(WAITING_MAX);
        std::thread::Builder::new()
            .name("journal".to_owned())
            .spawn(move || write_all(&lines, Book::new(changes), Book::new(destructive)))?;
        Ok((Self(sender), kept))
    }

    /// The receiver fails if the disk is full or broken.
    pub(crate) fn write(&self, event: &Event, destructive: bool) -> Option<oneshot::Receiver<()>> {
        let (written, done) = oneshot::channel();
        let text = serde_json::to_string(event).ok()?;
        let line = JournalLine {
            text,
            destructive,
            written,
        };
        self.0.try_send(line).ok().map(|()| done)
    }
}

fn write_all(lines: &Receiver<JournalLine>, mut changes: Book, mut destructive: Book) {
    while let Ok(line) = lines.recv() {
        let book = match line.destructive {
            true => &mut destructive,
            false => &mut changes,
        };
        match book.append(&line.text, line.destructive) {
            Ok(()) => drop(line.written.send(())),
            Err(error) => {
                book.file = None;
                tracing::warn!(path = %book.path.display(), %error, "a change could not be recorded");
            }
        }
    }
}

fn aside(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".1");
    name.into()
}

/// One of the files, opened at the first write.
struct Book {
    path: PathBuf,
    file: Option<File>,
    bytes: u64,
}

impl Book {
    fn new(path: PathBuf) -> Self {
        Self {
            path,
            file: None,
            bytes: 0,
        }
    }

    fn open(&mut self) -> io::Result<()> {
        let mut file = OpenOptions::new()
            .read(true)
            .append(true)
            .create(true)
            .mode(0o600)
            .open(&self.path)?;
        self.bytes = file.seek(SeekFrom::End(0))?;
        if self.bytes > 0 {
            let mut last = [0];
            file.seek(SeekFrom::End(-1))?;
            file.read_exact(&mut last)?;
            if last != *b"\n" {
                file.write_all(b"\n")?;
            }
        }
        self.file = Some(file);
        Ok(())
    }

    fn append(&mut self, text: &str, sync: bool) -> io::Result<()> {
        if self.file.is_none() {
            self.open()?;
        }
        let bytes = text.len() as u64 + 1;
        if self.bytes > 0 && self.bytes + bytes > FILE_MAX_BYTES {
            self.file = None;
            std::fs::rename(&self.path, aside(&self.path))?;
            self.open()?;
        }
        let Some(file) = &mut self.file else {
            return Ok(());
        };
        file.write_all(format!("{text}\n").as_bytes())?;
        self.bytes += bytes;
        if sync { file.sync_data() } else { Ok(()) }
    }
}

fn read(path: &Path) -> Vec<Event> {
    let mut events = Vec::new();
    for path in [aside(path), path.to_owned()] {
        let Ok(file) = File::open(&path) else {
            continue;
        };
        // A larger file is not ours; this bounds the memory for it.
        let lines = BufReader::new(file.take(2 * FILE_MAX_BYTES)).lines();
        let lines = lines.map_while(Result::ok);
        events.extend(lines.filter_map(|line| serde_json::from_str::<Event>(&line).ok()));
    }
    events
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::events::EventKind;

    fn event(sequence: u64) -> Event {
        Event {
            at: String::new(),
            message: "x".repeat(4000),
            ..Event::new((sequence, 7), EventKind::Changed)
        }
    }

    fn write(journal: &Journal, sequence: u64, destructive: bool) {
        let done = journal.write(&event(sequence), destructive).unwrap();
        done.blocking_recv().unwrap();
    }

    #[test]
    fn the_newest_are_kept_and_destructive_ones_apart() {
        let folder = tempfile::tempdir().unwrap();
        let (journal, kept) = Journal::open(folder.path()).unwrap();
        assert!(kept.changes.is_empty() && kept.destructive.is_empty());
        write(&journal, 1, true);
        for sequence in 2..3000 {
            write(&journal, sequence, false);
        }
        drop(journal);
        let (_, kept) = Journal::open(folder.path()).unwrap();
        assert_eq!(kept.destructive, [event(1)]);
        assert_eq!(kept.changes.last(), Some(&event(2999)));
        assert!(kept.changes.is_sorted_by_key(|event| event.sequence));
        assert!(
            (500..1100).contains(&kept.changes.len()),
            "{}",
            kept.changes.len()
        );
        let files = std::fs::read_dir(folder.path()).unwrap();
        let bytes: u64 = files
            .map(|file| file.unwrap().metadata().unwrap().len())
            .sum();
        assert!(bytes <= 3 * FILE_MAX_BYTES, "{bytes}");
    }

    #[test]
    fn a_line_that_was_cut_short_harms_no_other() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(CHANGES);
        let whole = serde_json::to_string(&event(1)).unwrap();
        std::fs::write(&path, format!("{whole}\nnonsense\n{}", &whole[..100])).unwrap();
        let (journal, kept) = Journal::open(folder.path()).unwrap();
        assert_eq!(kept.changes, [event(1)]);
        write(&journal, 2, false);
        let (_, kept) = Journal::open(folder.path()).unwrap();
        assert_eq!(kept.changes, [event(1), event(2)]);
    }
}
