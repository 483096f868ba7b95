//! A VM's memory, registered with its reactor's ring, so that requests cost the kernel less
//! ([`forebay_device::Pinned`]).
//!
//! Pinning takes long, so a helper thread pins mappings part by part while the client is served
//! unregistered. Only present pages are pinned ([`forebay_guest::Mapping::present`]), so incomplete
//! mappings are tried again, ever more rarely. Memory that cannot be pinned (a limit, or read-only)
//! stays unregistered; a gauge of the export shows it.
//!
//! A pinned page stays even when its file gives it up (a balloon), and a device would then write to
//! a stale page. So only memory that the client promises to keep, as with a DMA mapping, is
//! registered.

use forebay_device::Pinned;
use forebay_guest::Mapping;
use rustix::thread::CpuSet;
use std::collections::VecDeque;
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering::*};
use std::sync::{Arc, Weak, mpsc};
use std::time::{Duration, Instant};

/// The least range to examine and pin at once: meanwhile the process cannot map or unmap anything.
const STEP_BYTES: usize = 64 << 20;
/// Steps per mapping, unless a step would exceed an entry's limit. The other half of the entries is
/// left for fragments.
const STEPS: usize = forebay_device::MAX_ENTRIES as usize / 2;
/// Shorter ranges are skipped, unless they are a whole mapping.
const LEAST_BYTES: usize = 2 << 20;
/// Pins per mapping.
const MOST: u32 = 16;
/// Rounds per mapping: about an hour.
const POLLS: u32 = 64;
/// The first wait before a new round; the longest is 64 times as long.
const AGAIN: Duration = Duration::from_secs(1);

pub(super) type Who = (u32, u16);

pub(super) struct Ready {
    pub who: Who,
    pub mapping: Weak<Mapping>,
    pub pinned: Pinned,
}

/// One per reactor. Its thread ends with it and its clients.
pub(super) struct Registrar {
    jobs: mpsc::Sender<RegisterJob>,
    ready: mpsc::Receiver<Ready>,
    waiting: Arc<AtomicUsize>,
}

impl Registrar {
    /// Starts the thread on these processors, not on the reactor's own.
    pub(super) fn start(cpus: Option<CpuSet>) -> io::Result<Self> {
        let (jobs, asked) = mpsc::channel();
        let (held, ready) = mpsc::channel();
        let waiting = Arc::new(AtomicUsize::new(0));
        let count = waiting.clone();
        std::thread::Builder::new()
            .name("registrar".into())
            .spawn(move || {
                if let Some(cpus) = cpus {
                    // A failure only costs speed.
                    let _ = rustix::thread::sched_setaffinity(None, &cpus);
                }
                work(&asked, &held, &count);
            })?;
        Ok(Self {
            jobs,
            ready,
            waiting,
        })
    }

    #[inline]
    pub(super) fn next(&self) -> Option<Ready> {
        if self.waiting.load(Relaxed) == 0 {
            return None;
        }
        let ready = self.ready.try_recv().ok()?;
        self.waiting.fetch_sub(1, Relaxed);
        Some(ready)
    }

    pub(super) fn for_client(&self, who: Who) -> Asker {
        Asker {
            jobs: self.jobs.clone(),
            who,
        }
    }
}

#[derive(Debug)]
pub(super) struct Asker {
    jobs: mpsc::Sender<RegisterJob>,
    who: Who,
}

impl Asker {
    /// Pins a mapping in the background.
    pub(super) fn hold(&self, mapping: &Arc<Mapping>) {
        if !mapping.is_writable() {
            return;
        }
        let _ = self.jobs.send(RegisterJob {
            who: self.who,
            mapping: Arc::downgrade(mapping),
            at: 0,
            covered: Vec::new(),
            pinned: None,
            rounds: 0,
            held: 0,
            due: Instant::now(),
        });
    }
}

#[derive(Debug)]
struct RegisterJob {
    who: Who,
    mapping: Weak<Mapping>,
    at: usize,
    covered: Vec<Range<usize>>,
    pinned: Option<Pinned>,
    rounds: u32,
    held: u32,
    due: Instant,
}

enum Step {
    Again,
    Later,
    Over,
}

fn work(asked: &mpsc::Receiver<RegisterJob>, held: &mpsc::Sender<Ready>, waiting: &AtomicUsize) {
    let (mut now, mut later): (VecDeque<RegisterJob>, Vec<RegisterJob>) = Default::default();
    loop {
        let new = if !now.is_empty() {
            asked
                .try_recv()
                .map_err(|e| e == mpsc::TryRecvError::Disconnected)
        } else if let Some(due) = later.iter().map(|job| job.due).min() {
            let wait = due.saturating_duration_since(Instant::now());
            (asked.recv_timeout(wait)).map_err(|e| e == mpsc::RecvTimeoutError::Disconnected)
        } else {
            asked.recv().map_err(|_| true)
        };
        match new {
            Ok(job) => now.push_back(job),
            Err(true) => return,
            Err(false) => {}
        }
        let time = Instant::now();
        let (due, not_yet) = later.into_iter().partition(|job| job.due <= time);
        later = not_yet;
        now.extend::<Vec<RegisterJob>>(due);
        let Some(mut job) = now.pop_front() else {
            continue;
        };
        let step = job.step();
        if !matches!(step, Step::Again)
            && let Some(pinned) = job.pinned.take()
        {
            job.held += 1;
            let (who, mapping) = (job.who, job.mapping.clone());
            let ready = Ready {
                who,
                mapping,
                pinned,
            };
            if held.send(ready).is_err() {
                return;
            }
            waiting.fetch_add(1, Relaxed);
        }
        match step {
            Step::Again => now.push_back(job),
            Step::Later => {
                if let Some(wait) = job.next_poll() {
                    job.due = Instant::now() + wait;
                    later.push(job);
                }
            }
            Step::Over => {}
        }
    }
}

impl RegisterJob {
    /// Starts a new round; returns the wait before it. `None`: no further round.
    fn next_poll(&mut self) -> Option<Duration> {
        self.at = 0;
        let wait = AGAIN * (1 << self.rounds.min(6));
        self.rounds += 1;
        (self.held < MOST && self.rounds < POLLS).then_some(wait)
    }

    /// Pins the present pages of the next part.
    fn step(&mut self) -> Step {
        let mapping = self.mapping.upgrade();
        let Some(mapping) = mapping.filter(|m| !m.is_retired() && !m.is_broken()) else {
            self.pinned = None;
            return Step::Over;
        };
        let all = mapping.whole_bytes();
        let part = self.at..(self.at + step_bytes(all)).min(all);
        for gap in gaps(&self.covered, part.clone()) {
            for range in mapping.present(gap) {
                if range.len() < LEAST_BYTES.min(all) {
                    continue;
                }
                // A refusal of the kernel would repeat.
                if self.hold(&mapping, range).is_err() {
                    return Step::Over;
                }
            }
        }
        self.at = part.end;
        if self.at < all {
            return Step::Again;
        }
        match self.covered.iter().map(|range| range.len()).sum::<usize>() < all {
            true => Step::Later,
            false => Step::Over,
        }
    }

    fn hold(&mut self, mapping: &Arc<Mapping>, range: Range<usize>) -> io::Result<()> {
        if self.pinned.is_none() {
            self.pinned = Some(Pinned::new(mapping.clone())?);
        }
        if let Some(pinned) = &mut self.pinned {
            if pinned.entries() >= forebay_device::MAX_ENTRIES as usize {
                return Ok(());
            }
            mapping.pin(range.clone(), pinned)?;
        }
        let at = self.covered.partition_point(|r| r.start < range.start);
        self.covered.insert(at, range);
        Ok(())
    }
}

fn step_bytes(all: usize) -> usize {
    let step = all.div_ceil(STEPS).next_multiple_of(LEAST_BYTES);
    step.clamp(STEP_BYTES, forebay_device::MAX_ENTRY_BYTES)
}

/// The parts of a range that none of these cover.
fn gaps(covered: &[Range<usize>], range: Range<usize>) -> Vec<Range<usize>> {
    let mut from = range.start;
    let mut gaps = Vec::new();
    for covered in covered {
        if from < covered.start.min(range.end) {
            gaps.push(from..covered.start.min(range.end));
        }
        from = from.max(covered.end);
    }
    if from < range.end {
        gaps.push(from..range.end);
    }
    gaps
}

#[cfg(test)]
#[allow(clippy::single_range_in_vec_init)]
mod tests {
    use super::*;

    #[test]
    fn steps_are_short_and_not_too_many() {
        assert_eq!(step_bytes(4096), STEP_BYTES);
        assert_eq!(step_bytes(8 << 30), STEP_BYTES);
        for all in [(8 << 30) + 1, 64 << 30, 128 << 30] {
            let step = step_bytes(all);
            assert!(step > STEP_BYTES && step <= forebay_device::MAX_ENTRY_BYTES);
            assert!(all.div_ceil(step) <= STEPS && step.is_multiple_of(LEAST_BYTES));
        }
        assert_eq!(step_bytes(1 << 40), forebay_device::MAX_ENTRY_BYTES);
    }

    #[test]
    fn sparse_memory_is_polled_a_limited_number_of_times() {
        let job = || RegisterJob {
            who: (0, 0),
            mapping: Weak::new(),
            at: 0,
            covered: Vec::new(),
            pinned: None,
            rounds: 0,
            held: 0,
            due: Instant::now(),
        };
        let mut sparse = job();
        let waits: Vec<Duration> = std::iter::from_fn(|| sparse.next_poll()).take(99).collect();
        assert_eq!(waits.len() as u32, POLLS - 1);
        assert_eq!((waits[0], waits[1]), (AGAIN, 2 * AGAIN));
        assert_eq!(waits.iter().max(), Some(&(64 * AGAIN)));
        let mut scattered = job();
        scattered.held = MOST;
        assert_eq!(scattered.next_poll(), None);
    }

    #[test]
    fn gaps_are_the_uncovered_ranges() {
        assert_eq!(gaps(&[], 0..9), [0..9]);
        assert_eq!(gaps(&[0..2, 4..5, 5..6, 8..20], 0..9), [2..4, 6..8]);
        assert_eq!(gaps(&[0..2, 12..14], 3..9), [3..9]);
        assert!(gaps(&[0..20], 3..9).is_empty());
        assert_eq!(gaps(&[1..4], 3..9), [4..9]);
    }
}
