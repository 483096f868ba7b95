//! Work that runs side by side.
//!
//! Purpose: tests that mostly wait (guests, kills, timers) run beside those that compute, so that the
//! processors are busy until the end.
//! Design: jobs start in order. Another one starts when a part of the machine was idle for a moment,
//! up to [`MOST`] at a time. Guests run two at a time; what measures the machine runs alone, at the end.
//! Not here: what the jobs do.

use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

/// How many jobs run at the same time: each may hold a guest's memory.
const MOST: usize = 8;
const MOST_GUESTS: usize = 2;
/// The machine is looked at for so long before another job starts.
const LOOK: Duration = Duration::from_millis(500);
/// Another job starts if this share of all processors was idle.
const IDLE_SHARE: f64 = 0.2;

/// With whom a job can run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Company {
    /// Any other job.
    Any,
    /// Any other job, but few of this kind.
    Guest,
    /// Nobody.
    Alone,
}

/// Something to do.
pub(crate) struct Job<T> {
    /// With whom.
    pub(crate) company: Company,
    /// What.
    pub(crate) work: Box<dyn FnOnce() -> T + Send>,
}

/// Does it all; `take` gets each result as it comes.
pub(crate) fn run<T: Send>(jobs: Vec<Job<T>>, mut take: impl FnMut(T)) {
    let (mut alone, mut waiting): (Vec<_>, Vec<_>) = jobs
        .into_iter()
        .partition(|job| job.company == Company::Alone);
    waiting.append(&mut alone);
    let mut running: Vec<Company> = Vec::new();
    let (sender, results) = mpsc::channel();
    let mut load = Load::now();
    std::thread::scope(|scope| {
        while !waiting.is_empty() || !running.is_empty() {
            let is_room = running.is_empty() || load.is_idle();
            if is_room && let Some(at) = next(&waiting, &running) {
                let job = waiting.remove(at);
                running.push(job.company);
                let sender = sender.clone();
                scope.spawn(move || {
                    let result = (job.work)();
                    let _ = sender.send((job.company, result));
                });
                load = Load::now();
            }
            match results.recv_timeout(LOOK / 5) {
                Ok((company, result)) => {
                    if let Some(at) = running.iter().position(|other| *other == company) {
                        running.swap_remove(at);
                    }
                    take(result);
                }
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {}
            }
        }
    });
}

/// The first of `waiting` that can start beside `running`.
fn next<T>(waiting: &[Job<T>], running: &[Company]) -> Option<usize> {
    if running.len() >= MOST || running.contains(&Company::Alone) {
        return None;
    }
    let guests = running
        .iter()
        .filter(|company| **company == Company::Guest)
        .count();
    waiting.iter().position(|job| match job.company {
        Company::Any => true,
        Company::Guest => guests < MOST_GUESTS,
        Company::Alone => running.is_empty(),
    })
}

/// What the processors did since a moment ago.
struct Load {
    since: Instant,
    ticks: Option<(u64, u64)>,
}

impl Load {
    fn now() -> Self {
        Self {
            since: Instant::now(),
            ticks: ticks(),
        }
    }

    /// Whether enough of the machine was idle; false before it was looked at for long enough.
    fn is_idle(&mut self) -> bool {
        if self.since.elapsed() < LOOK {
            return false;
        }
        let before = std::mem::replace(self, Self::now());
        let (Some((all, idle)), Some((all_before, idle_before))) = (self.ticks, before.ticks)
        else {
            return true; // no such file: another system
        };
        let all = all.saturating_sub(all_before).max(1);
        idle.saturating_sub(idle_before) as f64 / all as f64 >= IDLE_SHARE
    }
}

/// All ticks of all processors, and the idle ones (proc_stat(5)).
fn ticks() -> Option<(u64, u64)> {
    let text = std::fs::read_to_string("/proc/stat").ok()?;
    let fields = text.lines().next()?.split_whitespace().skip(1);
    let fields: Vec<u64> = fields.filter_map(|field| field.parse().ok()).collect();
    // user nice system idle iowait irq softirq steal
    let idle = fields.get(3)? + fields.get(4)?;
    Some((fields.iter().take(8).sum(), idle))
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    #[test]
    fn everything_is_done_and_what_runs_alone_comes_last() {
        let done = Mutex::new(Vec::new());
        let companies = [Company::Alone, Company::Any, Company::Guest, Company::Any];
        let jobs = companies.iter().enumerate().map(|(number, company)| Job {
            company: *company,
            work: Box::new(move || number),
        });
        run(jobs.collect(), |number| done.lock().unwrap().push(number));
        let mut done = done.into_inner().unwrap();
        assert_eq!(done.pop(), Some(0));
        done.sort_unstable();
        assert_eq!(done, [1, 2, 3]);
    }

    #[test]
    fn guests_are_few_and_alone_is_alone() {
        let jobs = |companies: &[Company]| -> Vec<Job<()>> {
            let job = |company: &Company| Job {
                company: *company,
                work: Box::new(|| ()),
            };
            companies.iter().map(job).collect()
        };
        use Company::{Alone, Any, Guest};
        assert_eq!(next(&jobs(&[Guest, Any]), &[Guest]), Some(0));
        assert_eq!(next(&jobs(&[Guest, Any]), &[Guest, Guest]), Some(1));
        assert_eq!(next(&jobs(&[Guest]), &[Guest, Any, Guest]), None);
        assert_eq!(next(&jobs(&[Alone]), &[Any]), None);
        assert_eq!(next(&jobs(&[Alone]), &[]), Some(0));
        assert_eq!(next(&jobs(&[Any]), &[Alone]), None);
        assert_eq!(next(&jobs(&[Any]), &[Any; MOST]), None);
    }
}
