//! Pins reactors to their CPUs.
//!
//! The daemon does this from outside, by thread names, because a CPU may leave the cpuset or go
//! offline while an engine runs. Meanwhile the reactor runs on other CPUs.

use std::path::Path;

use rustix::process::Pid;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// Tells for each reactor whether it is pinned now.
pub(crate) fn pin(engine: u32, reactors: u16, cpus: &[u16]) -> Vec<(String, Result<(), String>)> {
    let threads = threads(engine);
    let numbered = (0..reactors).zip(cpus.iter().cycle());
    let pinned = numbered.filter_map(|(reactor, cpu)| {
        let name = format!("reactor-{reactor}");
        let (_, thread) = threads.iter().find(|(named, _)| *named == name)?;
        let part = format!("CPU {cpu} for reactor {reactor}");
        let trouble = pin_thread(*thread, usize::from(*cpu)).map_err(|error| {
            format!(
                "reactor {reactor} is not pinned to CPU {cpu}, and runs on any CPU: {error}; see `cpus` under [engine] \
                in forebay.toml; the daemon keeps retrying"
            )
        });
        Some((part, trouble))
    });
    pinned.collect()
}

fn pin_thread(thread: Pid, cpu: usize) -> Result<(), String> {
    if cpu >= CpuSet::MAX_CPU {
        return Err("there is no such CPU".to_owned());
    }
    let mut wanted = CpuSet::new();
    wanted.set(cpu);
    if sched_getaffinity(Some(thread)).is_ok_and(|now| now == wanted) {
        return Ok(());
    }
    sched_setaffinity(Some(thread), &wanted).map_err(|error| match error {
        rustix::io::Errno::INVAL => "it is offline or outside the cpuset".to_owned(),
        error => error.to_string(),
    })
}

fn threads(process: u32) -> Vec<(String, Pid)> {
    let folder = format!("/proc/{process}/task");
    let Ok(entries) = Path::new(&folder).read_dir() else {
        return Vec::new();
    };
    let thread = |entry: std::fs::DirEntry| {
        let number = entry.file_name().to_str()?.parse().ok()?;
        let name = std::fs::read_to_string(entry.path().join("comm")).ok()?;
        Some((name.trim().to_owned(), Pid::from_raw(number)?))
    };
    entries.flatten().filter_map(thread).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_cpu_is_reported_and_a_present_one_is_pinned() {
        let (stop, stopped) = std::sync::mpsc::channel::<()>();
        let reactor = std::thread::Builder::new()
            .name("reactor-0".to_owned())
            .spawn(move || stopped.recv());
        let before = sched_getaffinity(None).unwrap();
        let there = (0..CpuSet::MAX_CPU)
            .find(|cpu| before.is_set(*cpu))
            .unwrap();
        let there = u16::try_from(there).unwrap();
        let own = std::process::id();
        while threads(own).iter().all(|(name, _)| name != "reactor-0") {
            std::thread::yield_now();
        }
        for missing in [1000, u16::MAX] {
            let reported = pin(own, 1, &[missing]);
            let error = reported[0].1.as_ref().unwrap_err();
            assert!(error.contains(&format!("CPU {missing}")), "{error}");
        }
        assert_eq!(pin(own, 1, &[there])[0].1, Ok(()));
        let (_, thread) = threads(own)
            .into_iter()
            .find(|(name, _)| name == "reactor-0")
            .unwrap();
        assert_eq!(sched_getaffinity(Some(thread)).unwrap().count(), 1);
        drop(stop);
        let _ = reactor.unwrap().join();
    }
}
