//! Runs jobs in parallel with one progress bar.
//!
//! The wait ends at an interrupt, the daemon's death, a stall or a failed job. The other threads
//! then end with the process or the daemon.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use indicatif::ProgressBar;

use crate::failure::{Failure, Outcome, While};
use crate::progress;

const POLL: Duration = Duration::from_millis(100);
/// The limit without progress: commands may be retried for this long.
const STALL_LIMIT: Duration = Duration::from_secs(60);

/// A job's progress, in parts of a million.
#[derive(Clone)]
pub(super) struct Share(Arc<AtomicU32>);

impl Share {
    pub(super) fn set(&self, fraction: f64) {
        self.0
            .store((fraction.clamp(0.0, 1.0) * 1e6) as u32, Ordering::Relaxed);
    }

    fn get(&self) -> f64 {
        f64::from(self.0.load(Ordering::Relaxed)) / 1e6
    }
}

pub(super) type BenchJob<T> = Box<dyn FnOnce(&Share) -> Outcome<T> + Send>;

/// Results are in the jobs' order. `watch` is polled; its error ends the wait.
pub(super) fn together<T: Send + 'static>(
    jobs: Vec<BenchJob<T>>,
    bar: &ProgressBar,
    watch: &mut dyn FnMut() -> Outcome,
) -> Outcome<Vec<T>> {
    let (sender, results) = channel();
    let mut shares = Vec::new();
    let mut done: Vec<Option<T>> = Vec::new();
    for (index, job) in jobs.into_iter().enumerate() {
        let share = Share(Arc::default());
        shares.push(share.clone());
        done.push(None);
        let sender = sender.clone();
        std::thread::Builder::new()
            .name(format!("job-{index}"))
            .spawn(move || drop(sender.send((index, job(&share)))))
            .while_doing("start a thread")?;
    }
    drop(sender);
    let mut moved = (0.0, Instant::now());
    while done.iter().any(Option::is_none) {
        watch()?;
        match results.recv_timeout(POLL) {
            Ok((index, result)) => {
                let result = result?;
                if let Some(place) = done.get_mut(index) {
                    *place = Some(result);
                }
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => {
                return Err(Failure::new(
                    "a thread exited without a result: this is a bug",
                ));
            }
        }
        let sum: f64 = shares.iter().map(Share::get).sum();
        if sum > moved.0 {
            moved = (sum, Instant::now());
        }
        if moved.1.elapsed() > STALL_LIMIT {
            return Err(Failure::new(format!(
                "no progress for {} s",
                STALL_LIMIT.as_secs()
            )));
        }
        progress::set(bar, sum / shares.len().max(1) as f64);
    }
    Ok(done.into_iter().flatten().collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::interrupt::Interrupt;

    fn run(jobs: Vec<BenchJob<u32>>) -> Outcome<Vec<u32>> {
        together(jobs, &ProgressBar::hidden(), &mut || Ok(()))
    }

    fn endless() -> BenchJob<u32> {
        Box::new(|_| {
            std::thread::park_timeout(Duration::from_secs(3600));
            Ok(0)
        })
    }

    #[test]
    fn results_are_in_the_jobs_order() {
        let slow: BenchJob<u32> = Box::new(|share| {
            share.set(0.5);
            std::thread::sleep(Duration::from_millis(50));
            Ok(1)
        });
        assert_eq!(run(vec![slow, Box::new(|_| Ok(2))]).unwrap(), [1, 2]);
        assert!(run(Vec::new()).unwrap().is_empty());
    }

    #[test]
    fn a_failure_does_not_wait_for_the_others() {
        let error = run(vec![endless(), Box::new(|_| Err(Failure::new("broken")))]);
        assert_eq!(error.unwrap_err().to_string(), "broken");
    }

    #[test]
    fn an_interrupt_ends_the_wait() {
        let interrupt = Interrupt::never();
        interrupt.raise();
        let error = together(vec![endless()], &ProgressBar::hidden(), &mut || {
            interrupt.check()
        });
        assert_eq!(error.unwrap_err().to_string(), "interrupted");
    }
}
