//! Cuts the power of a [`crate::kind::volatile`] device: leaves what a power cut might have left,
//! chosen by a seed.
//!
//! Durable changes are applied to the stable file; each other one whole, not at all, or in some of
//! its sectors. Then the visible file becomes equal to the stable one. The device's users must be
//! dead, which is checked. Its switches (hang, fail) stay.

use std::io;
use std::path::Path;
use std::time::{Duration, Instant};

use fastrand::Rng;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use crate::fence::lock_holders;
use crate::kind::volatile::journal::{HEADER_BYTES, JournalRecord, WriteJournal};
use crate::kind::volatile::{journal_path, stable_path, write_all, zero};

/// The unit of a torn write.
pub const SECTOR_BYTES: u64 = 512;
const LET_GO: Duration = Duration::from_secs(5);
const COPY_BYTES: u64 = 1 << 20;

/// What a cut did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Cut {
    /// Writes and zeroings that were durable.
    pub durable: u64,
    /// Others that were kept whole.
    pub kept: u64,
    /// Others that were lost whole.
    pub dropped: u64,
    /// Others of which some sectors were kept.
    pub torn: u64,
    /// Flushes that had ended.
    pub flushes: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fate {
    Kept,
    Dropped,
    Torn,
}

#[derive(Debug, Clone, Copy)]
struct CachedChange {
    at: u64,
    offset_bytes: u64,
    len_bytes: u64,
    durable: bool,
}

/// Cuts the power of the device at path `device`. Fails if the device is in use.
pub fn cut(device: &Path, seed: u64) -> io::Result<Cut> {
    wait_until_unused(device)?;
    let open = |path: &Path| rustix::fs::open(path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty());
    let visible = open(device)?;
    let stable = open(&stable_path(device))?;
    let mut journal = WriteJournal::new(open(&journal_path(device))?);
    let (changes, flushes) = changes(&journal)?;
    let mut result = Cut {
        flushes,
        ..Cut::default()
    };
    let mut dice = Rng::with_seed(seed);
    let keep_percent = [0, 100, 10, 50, 90, 50][dice.usize(..6)];
    let torn_percent = [0, 10, 40][dice.usize(..3)];
    for change in &changes {
        let fate = match change.durable {
            true => Fate::Kept,
            false if (1..100).contains(&keep_percent) && dice.u64(..100) < torn_percent => {
                Fate::Torn
            }
            false if dice.u64(..100) < keep_percent => Fate::Kept,
            false => Fate::Dropped,
        };
        *match (change.durable, fate) {
            (true, _) => &mut result.durable,
            (_, Fate::Kept) => &mut result.kept,
            (_, Fate::Dropped) => &mut result.dropped,
            (_, Fate::Torn) => &mut result.torn,
        } += 1;
        apply(&journal, &stable, change, fate, &mut dice)?;
    }
    for change in &changes {
        copy(&stable, &visible, change.offset_bytes, change.len_bytes)?;
    }
    journal.clear()?;
    Ok(result)
}

fn wait_until_unused(device: &Path) -> io::Result<()> {
    let begin = Instant::now();
    loop {
        let holders = lock_holders(device).map_err(io::Error::other)?;
        match holders.first() {
            None => return Ok(()),
            Some(holder) if begin.elapsed() > LET_GO => {
                return Err(io::Error::other(format!(
                    "{}: {holder} still uses it",
                    device.display()
                )));
            }
            Some(_) => std::thread::sleep(Duration::from_millis(2)),
        }
    }
}

/// All changes in order, and the number of flushes that ended.
fn changes(journal: &WriteJournal) -> io::Result<(Vec<CachedChange>, u64)> {
    let mut changes: Vec<CachedChange> = Vec::new();
    let (mut at, mut flushes, mut words) = (HEADER_BYTES, 0, Vec::new());
    // All `changes` before this index are durable.
    let mut durable_to = 0;
    while let Some(read) = journal.read(at)? {
        let change = |offset_bytes, len_bytes| CachedChange {
            at: read.at,
            offset_bytes,
            len_bytes,
            durable: false,
        };
        match read.record(&mut words) {
            Some(JournalRecord::Write {
                offset_bytes,
                bytes,
            }) => changes.push(change(offset_bytes, bytes.len() as u64)),
            Some(JournalRecord::Zero {
                offset_bytes,
                len_bytes,
            }) => changes.push(change(offset_bytes, len_bytes)),
            Some(JournalRecord::Flush { before, but }) => {
                flushes += 1;
                for change in &mut changes[durable_to..] {
                    change.durable |= change.at < before && !but.contains(&change.at);
                }
            }
            Some(JournalRecord::Durable { at }) => {
                if let Ok(index) = changes.binary_search_by_key(&at, |change| change.at) {
                    changes[index].durable = true;
                }
            }
            None => {
                return Err(io::Error::other("the journal has a record of unknown kind"));
            }
        }
        while changes.get(durable_to).is_some_and(|change| change.durable) {
            durable_to += 1;
        }
        at = read.end();
    }
    Ok((changes, flushes))
}

fn apply(
    journal: &WriteJournal,
    stable: &rustix::fd::OwnedFd,
    change: &CachedChange,
    fate: Fate,
    dice: &mut Rng,
) -> Result<(), Errno> {
    if fate == Fate::Dropped {
        return Ok(());
    }
    let read = journal.read(change.at)?.ok_or(Errno::IO)?;
    let mut words = Vec::new();
    let bytes = match read.record(&mut words) {
        Some(JournalRecord::Write { bytes, .. }) => Some(bytes),
        _ => None,
    };
    let end = change.len_bytes;
    let mut from = 0;
    while from < end {
        let to = match fate {
            Fate::Torn => end.min(from + SECTOR_BYTES * (1 + dice.u64(..16))),
            _ => end,
        };
        if fate != Fate::Torn || dice.u64(..2) == 0 {
            let at = change.offset_bytes + from;
            match bytes {
                Some(bytes) => write_all(stable, at, &bytes[from as usize..to as usize])?,
                None => zero(stable, at, to - from)?,
            }
        }
        from = to;
    }
    Ok(())
}

fn copy(
    from: &rustix::fd::OwnedFd,
    to: &rustix::fd::OwnedFd,
    offset_bytes: u64,
    len_bytes: u64,
) -> Result<(), Errno> {
    let end = offset_bytes + len_bytes;
    let mut at = offset_bytes;
    while at < end {
        let mut bytes = vec![0; COPY_BYTES.min(end - at) as usize];
        let n = match rustix::io::pread(from, &mut bytes, at) {
            Ok(0) => return Err(Errno::IO),
            Err(Errno::INTR) => continue,
            other => other?,
        };
        let bytes = &bytes[..n];
        match bytes.iter().all(|byte| *byte == 0) {
            true => zero(to, at, n as u64)?,
            false => write_all(to, at, bytes)?,
        }
        at += n as u64;
    }
    Ok(())
}
