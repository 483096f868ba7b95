//! A machine's memory, registered with its reactor's ring.
//!
//! **Purpose.** Requests in registered memory cost the kernel less ([`forebay_device::Pinned`]); but to hold a machine's
//! memory takes long.
//!
//! **Design.** So it is served at once, unregistered, and a thread beside the reactor holds it part by part, a part of
//! each mapping in turn. When it is through with a mapping, the reactor has its ring know all that is held of it. Only what is
//! there is held ([`forebay_guest::Mapping::present`]), so a mapping is looked at again while some of it is missing,
//! first soon and then seldom. What can't be held (too little may be, or it is read only) stays unregistered, which a
//! gauge of the export shows. What is held is let go of before an unmapping is answered.
//!
//! A page that is held stays what it is though its file may give it up (a balloon): a device would write to one that nobody
//! has. So only what its client promises to keep is registered, as a DMA mapping is.
//!
//! **Not here:** what is done with it ([`forebay_device::ring::Ring`]).

use forebay_device::Pinned;
use forebay_guest::Mapping;
use rustix::thread::CpuSet;
use std::collections::VecDeque;
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering::*};
use std::sync::{Arc, Weak, mpsc};
use std::time::{Duration, Instant};

/// What is looked at, and held, at once, at least: meanwhile nothing of the process can be mapped or unmapped.
const STEP_BYTES: usize = 64 << 20;
/// Steps for a mapping at most, while that makes none longer than an entry may be. Half of the entries is left for
/// what lies in pieces.
const STEPS: usize = forebay_device::MAX_ENTRIES as usize / 2;
/// Shorter parts are left out, but for a whole mapping.
const LEAST_BYTES: usize = 2 << 20;
/// What a mapping is held by at most: each was one look at it.
const MOST: u32 = 16;
/// How often one is looked at at most: about an hour.
const LOOKS: u32 = 64;
/// The first wait until it is looked at again; the longest is 64 times as long.
const AGAIN: Duration = Duration::from_secs(1);

/// Which client of a reactor.
pub(super) type Who = (u32, u16);

/// Memory that is held for a client.
pub(super) struct Ready {
    pub who: Who,
    pub mapping: Weak<Mapping>,
    pub pinned: Pinned,
}

/// See the module's text. A reactor has one; the thread ends with it and its clients.
pub(super) struct Registrar {
    jobs: mpsc::Sender<RegisterJob>,
    ready: mpsc::Receiver<Ready>,
    waiting: Arc<AtomicUsize>,
}

impl Registrar {
    /// Starts the thread, on these processors, and not on the one that is its starter's own.
    ///
    /// # Errors
    /// The system's.
    pub(super) fn start(cpus: Option<CpuSet>) -> io::Result<Self> {
        let (jobs, asked) = mpsc::channel();
        let (held, ready) = mpsc::channel();
        let waiting = Arc::new(AtomicUsize::new(0));
        let count = waiting.clone();
        std::thread::Builder::new()
            .name("registrar".into())
            .spawn(move || {
                if let Some(cpus) = cpus {
                    // Should it fail, it is but slower.
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

    /// What is held since the last time.
    #[inline]
    pub(super) fn next(&self) -> Option<Ready> {
        if self.waiting.load(Relaxed) == 0 {
            return None;
        }
        let ready = self.ready.try_recv().ok()?;
        self.waiting.fetch_sub(1, Relaxed);
        Some(ready)
    }

    /// For a client.
    pub(super) fn for_client(&self, who: Who) -> Asker {
        Asker {
            jobs: self.jobs.clone(),
            who,
        }
    }
}

/// Asks for a client's memory to be held.
#[derive(Debug)]
pub(super) struct Asker {
    jobs: mpsc::Sender<RegisterJob>,
    who: Who,
}

impl Asker {
    /// Has a mapping held, sooner or later.
    pub(super) fn hold(&self, mapping: &Arc<Mapping>) {
        if !mapping.is_writable() {
            return;
        }
        // Without the thread it stays as it is.
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

/// A mapping that is being held.
#[derive(Debug)]
struct RegisterJob {
    who: Who,
    mapping: Weak<Mapping>,
    /// What comes next of it.
    at: usize,
    /// What is held, sorted.
    covered: Vec<Range<usize>>,
    pinned: Option<Pinned>,
    rounds: u32,
    /// How often something was.
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
                if let Some(wait) = job.next_look() {
                    job.due = Instant::now() + wait;
                    later.push(job);
                }
            }
            Step::Over => {}
        }
    }
}

impl RegisterJob {
    /// Begins anew; how long to wait before. `None`: it is left as it is.
    fn next_look(&mut self) -> Option<Duration> {
        self.at = 0;
        let wait = AGAIN * (1 << self.rounds.min(6));
        self.rounds += 1;
        (self.held < MOST && self.rounds < LOOKS).then_some(wait)
    }

    /// Holds what is there of the next part.
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
                // What the kernel refuses once it will refuse again.
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
                // The next look finds it.
                return Ok(());
            }
            mapping.pin(range.clone(), pinned)?;
        }
        let at = self.covered.partition_point(|r| r.start < range.start);
        self.covered.insert(at, range);
        Ok(())
    }
}

/// What is held at once of a mapping that is so long.
fn step_bytes(all: usize) -> usize {
    let step = all.div_ceil(STEPS).next_multiple_of(LEAST_BYTES);
    step.clamp(STEP_BYTES, forebay_device::MAX_ENTRY_BYTES)
}

/// What of a range is in none of these.
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
    fn what_is_never_all_there_is_not_looked_at_for_ever() {
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
        let waits: Vec<Duration> = std::iter::from_fn(|| sparse.next_look()).take(99).collect();
        assert_eq!(waits.len() as u32, LOOKS - 1);
        assert_eq!((waits[0], waits[1]), (AGAIN, 2 * AGAIN));
        assert_eq!(waits.iter().max(), Some(&(64 * AGAIN)));
        let mut scattered = job();
        scattered.held = MOST;
        assert_eq!(scattered.next_look(), None);
    }

    #[test]
    fn gaps_are_what_is_not_covered() {
        assert_eq!(gaps(&[], 0..9), [0..9]);
        assert_eq!(gaps(&[0..2, 4..5, 5..6, 8..20], 0..9), [2..4, 6..8]);
        assert_eq!(gaps(&[0..2, 12..14], 3..9), [3..9]);
        assert!(gaps(&[0..20], 3..9).is_empty());
        assert_eq!(gaps(&[1..4], 3..9), [4..9]);
    }
}
