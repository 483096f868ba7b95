//! Runs jobs concurrently, so that waiting tests overlap with computing ones.
//!
//! Jobs start in order whenever part of the machine was idle, up to [`MOST`] at once. Guests are
//! limited, and measurements run alone at the end.

use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

/// Each job may hold a guest's memory.
const MOST: usize = 8;
const MOST_GUESTS: usize = 2;
/// Measuring time before another job starts.
const POLL: Duration = Duration::from_millis(500);
/// Idle share of all processors that starts another job.
const IDLE_SHARE: f64 = 0.2;

/// Which jobs may run beside this one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Company {
    Any,
    /// Any, but few guests.
    Guest,
    /// None.
    Alone,
}

pub(crate) struct Job<T> {
    pub(crate) company: Company,
    pub(crate) work: Box<dyn FnOnce() -> T + Send>,
}

/// Runs all jobs; `take` receives each result.
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
            match results.recv_timeout(POLL / 5) {
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

/// The first job that may start beside `running`.
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

/// Processor times since a point in time.
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

    /// Whether enough was idle; false within [`POLL`].
    fn is_idle(&mut self) -> bool {
        if self.since.elapsed() < POLL {
            return false;
        }
        let before = std::mem::replace(self, Self::now());
        let (Some((all, idle)), Some((all_before, idle_before))) = (self.ticks, before.ticks)
        else {
            return true; // no /proc/stat
        };
        let all = all.saturating_sub(all_before).max(1);
        idle.saturating_sub(idle_before) as f64 / all as f64 >= IDLE_SHARE
    }
}

/// Total and idle ticks (proc_stat(5)).
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
