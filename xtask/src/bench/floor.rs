//! The minimum wake latency of this machine, to compare with a target's first command after a
//! pause.
//!
//! A thread on the target's processor sleeps on an eventfd; the client's processor signals it and
//! polls a word of memory.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use rustix::event::{EventfdFlags, eventfd};
use rustix::thread::{CpuSet, sched_setaffinity};

use super::measure::median;
use super::tcp::TARGET_CPU;
use super::vm::CLIENT_CPU;

fn pin(cpu: usize) -> Result<()> {
    let mut set = CpuSet::new();
    set.set(cpu);
    sched_setaffinity(None, &set).with_context(|| format!("no processor {cpu}"))
}

/// Median of `times` wakes, in us.
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
    // A separate thread, so that no other thread of this process is pinned.
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
