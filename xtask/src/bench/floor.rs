//! How soon this machine wakes anybody at all.
//!
//! Purpose: the first command after a pause finds its target asleep; what of its latency is the machine's own is told apart by
//! the least that there is: a thread that sleeps on an eventfd on the target's processor, rung from the client's after the
//! same pause, and seen by looking at a word of memory.
//! Not here: what a target adds.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use rustix::event::{EventfdFlags, eventfd};
use rustix::thread::{CpuSet, sched_setaffinity};

use super::machine::CLIENT_CPU;
use super::measure::median;
use super::tcp::TARGET_CPU;

fn pin(cpu: usize) -> Result<()> {
    let mut set = CpuSet::new();
    set.set(cpu);
    sched_setaffinity(None, &set).with_context(|| format!("no processor {cpu}"))
}

/// The median of so many wakes after a pause each, in us.
pub(super) fn wake_us(pause: Duration, times: u32) -> Result<f64> {
    let bell = Arc::new(eventfd(0, EventfdFlags::CLOEXEC)?);
    let seen = Arc::new(AtomicU32::new(0));
    let sleeper = {
        let (bell, seen) = (bell.clone(), seen.clone());
        std::thread::spawn(move || -> Result<()> {
            pin(TARGET_CPU)?;
            for _ in 0..times {
                rustix::io::read(&*bell, &mut [0u8; 8])?;
                seen.fetch_add(1, SeqCst);
            }
            Ok(())
        })
    };
    // On a thread of its own, so that nobody else of this process stays on that processor.
    let ringer = std::thread::spawn(move || -> Result<Vec<f64>> {
        pin(CLIENT_CPU)?;
        let mut all = Vec::new();
        for number in 0..times {
            std::thread::sleep(pause);
            let begun = Instant::now();
            rustix::io::write(&*bell, &1u64.to_ne_bytes())?;
            while seen.load(SeqCst) == number && begun.elapsed() < Duration::from_secs(10) {
                std::hint::spin_loop();
            }
            all.push(begun.elapsed().as_nanos() as f64 / 1000.0);
        }
        Ok(all)
    });
    let all = ringer
        .join()
        .ok()
        .context("the ringing thread panicked")??;
    sleeper
        .join()
        .ok()
        .context("the sleeping thread panicked")??;
    Ok(median(all))
}
