//! A host that writes or reads 4 KiB, and notes when each command began and ended.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use rustix::thread::{CpuSet, sched_setaffinity};

use super::burst_client::{BLOCK, Host};
use super::once::CLIENT_CPU;

const DEPTH: u16 = 32;
/// Time limit of a command.
const LIMIT: Duration = Duration::from_secs(60);
const TURN: Duration = Duration::from_millis(20);

/// Where to write or read; a place is 4 KiB, counted from the volume's start.
pub(super) enum Places {
    /// Writes to any place below.
    Random(u64),
    /// Reads of any place below.
    Reads(u64),
    /// Writes to each once.
    Each(Vec<u64>),
}

/// The first place of each `stride_bytes`, in random order if `scattered`.
pub(super) fn once_per(stride_bytes: u64, volume_bytes: u64, scattered: bool) -> Vec<u64> {
    let places = stride_bytes / u64::from(BLOCK);
    let mut all: Vec<u64> = (0..volume_bytes / stride_bytes)
        .map(|extent| extent * places)
        .collect();
    if scattered {
        fastrand::Rng::with_seed(1).shuffle(&mut all);
    }
    all
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Command {
    pub(super) begun: Instant,
    pub(super) ended: Instant,
}

/// Runs commands until `over` or the last place; returns them in the order of their ends.
fn run(host: &mut Host, depth: u16, mut places: Places, over: &AtomicBool) -> Result<Vec<Command>> {
    let is_read = matches!(places, Places::Reads(_));
    let mut random = fastrand::Rng::with_seed(2);
    let mut free: Vec<u16> = (0..depth).collect();
    let mut begun = vec![Instant::now(); usize::from(depth)];
    let mut writes = Vec::with_capacity(1 << 20);
    let mut slots = Vec::with_capacity(usize::from(depth));
    if let Places::Each(all) = &mut places {
        all.reverse();
    }
    let mut last_end = Instant::now();
    loop {
        let now = Instant::now();
        while !over.load(Relaxed)
            && let Some(slot) = free.last().copied()
        {
            let place = match &mut places {
                Places::Random(below) | Places::Reads(below) => Some(random.u64(..*below)),
                Places::Each(all) => all.pop(),
            };
            let Some(place) = place else { break };
            free.pop();
            begun[usize::from(slot)] = now;
            host.submit(slot, is_read, place)?;
        }
        if free.len() == usize::from(depth) {
            return Ok(writes);
        }
        host.kick()?;
        host.wait(&mut slots, TURN)?;
        let ended = Instant::now();
        if !slots.is_empty() {
            last_end = ended;
        }
        ensure!(
            ended - last_end < LIMIT,
            "no command ended within {LIMIT:?}"
        );
        let begun = |slot: &u16| begun[usize::from(*slot)];
        writes.extend(slots.iter().map(|slot| Command {
            begun: begun(slot),
            ended,
        }));
        free.append(&mut slots);
    }
}

/// Runs `act` while a host writes or reads.
pub(super) fn during<T>(
    connect: impl FnOnce() -> Result<Host> + Send,
    places: Places,
    act: impl FnOnce() -> Result<T>,
) -> Result<(T, Vec<Command>)> {
    during_at(DEPTH, connect, places, act)
}

/// [`during`], at this depth.
pub(super) fn during_at<T>(
    depth: u16,
    connect: impl FnOnce() -> Result<Host> + Send,
    places: Places,
    act: impl FnOnce() -> Result<T>,
) -> Result<(T, Vec<Command>)> {
    let over = AtomicBool::new(false);
    let (connected, wait) = mpsc::channel();
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            pin()?;
            let mut host = connect()?;
            connected.send(())?;
            run(&mut host, depth, places, &over)
        });
        // Without it, the writer's error follows.
        let acted = wait.recv().context("the host ended").and_then(|()| act());
        over.store(true, Relaxed);
        let written = writer.join().expect("a host does not panic");
        match (acted, written) {
            (_, Err(error)) => Err(error.context("a host's commands")),
            (acted, Ok(writes)) => Ok((acted?, writes)),
        }
    })
}

/// Writes each of the places.
pub(super) fn write_each(
    connect: impl FnOnce() -> Result<Host> + Send,
    places: Vec<u64>,
) -> Result<Vec<Command>> {
    let never = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            pin()?;
            run(&mut connect()?, DEPTH, Places::Each(places), &never)
        });
        writer.join().expect("a host does not panic")
    })
}

/// Keeps the calling thread on the clients' processor.
pub(super) fn pin() -> Result<()> {
    let mut cpus = CpuSet::new();
    cpus.set(CLIENT_CPU);
    Ok(sched_setaffinity(None, &cpus)?)
}

/// The longest time without an end that overlaps this time.
pub(super) fn longest_gap_ms(writes: &[Command], from: Instant, to: Instant) -> Result<f64> {
    let pairs = writes
        .windows(2)
        .filter(|pair| pair[1].ended > from && pair[0].ended < to);
    let longest = pairs.map(|pair| pair[1].ended - pair[0].ended).max();
    Ok(longest.context("no command ended")?.as_secs_f64() * 1e3)
}

/// The longest write that was in flight during this time.
pub(super) fn longest_write_ms(writes: &[Command], from: Instant, to: Instant) -> Result<f64> {
    let there = writes.iter().filter(|w| w.ended > from && w.begun < to);
    let longest = there.map(|write| write.ended - write.begun).max();
    Ok(longest.context("no write was in flight")?.as_secs_f64() * 1e3)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gaps_and_writes_of_a_time() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let write = |begun, ended| Command {
            begun: at(begun),
            ended: at(ended),
        };
        let writes = [write(0, 10), write(5, 11), write(10, 40), write(11, 41)];
        let gap = |from, to| longest_gap_ms(&writes, at(from), at(to)).unwrap().round();
        let longest = |from, to| longest_write_ms(&writes, at(from), at(to)).unwrap().round();
        assert!((gap(20, 21) - 29.0).abs() < 0.1);
        assert!((gap(0, 11) - 1.0).abs() < 0.1);
        assert!((longest(20, 21) - 30.0).abs() < 0.1);
        assert!((longest(0, 2) - 10.0).abs() < 0.1);
        assert!(longest_gap_ms(&writes, at(50), at(60)).is_err());
    }

    #[test]
    fn places_once_per_extent() {
        let all = once_per(64 << 10, 1 << 20, true);
        assert_eq!(all.len(), 16);
        assert!(!all.is_sorted());
        assert!(all.iter().all(|place| place % 16 == 0));
    }
}
