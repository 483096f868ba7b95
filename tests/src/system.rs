//! Measures, stops and kills processes by pid, and finds free ports.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use rustix::process::{Pid, Signal, kill_process};
pub use xtask::ports::free_ports;

/// CPU time of a process, user and system.
pub fn cpu_time(pid: u32) -> Result<Duration> {
    // proc_pid_stat(5): utime is field 14, stime field 15, in clock ticks; field 3 follows the
    // name.
    let path = format!("/proc/{pid}/stat");
    let stat = std::fs::read_to_string(&path).context(path)?;
    let fields: Vec<&str> = stat
        .rsplit_once(')')
        .map(|(_, rest)| rest.split_whitespace().collect())
        .unwrap_or_default();
    let ticks = |field: usize| -> Result<u64> {
        let text = fields.get(field - 3).context("a short /proc/PID/stat")?;
        Ok(text.parse()?)
    };
    let ticks = ticks(14)? + ticks(15)?;
    let per_second = rustix::param::clock_ticks_per_second();
    Ok(Duration::from_millis(ticks * 1000 / per_second.max(1)))
}

/// Resident memory of a process.
pub fn resident_bytes(pid: u32) -> Result<u64> {
    let path = format!("/proc/{pid}/status");
    let status = std::fs::read_to_string(&path).context(path)?;
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("VmRSS:"))
        .context("no VmRSS: the process has ended")?;
    let kib: u64 = line.trim().trim_end_matches(" kB").parse()?;
    Ok(kib * 1024)
}

/// Space that a file takes on its filesystem, without holes.
pub fn allocated_bytes(file: &Path) -> Result<u64> {
    use std::os::unix::fs::MetadataExt;
    let metadata = std::fs::metadata(file).with_context(|| file.display().to_string())?;
    Ok(metadata.blocks() * 512)
}

/// `kill -9` of a process.
pub fn kill_by_pid(pid: u32) -> Result<()> {
    kill(pid, Signal::KILL)
}

/// Stops a process, or continues it.
pub fn hold_by_pid(pid: u32, hold: bool) -> Result<()> {
    kill(pid, if hold { Signal::STOP } else { Signal::CONT })
}

pub(crate) fn kill(pid: u32, signal: Signal) -> Result<()> {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
    kill_process(pid.context("no such process")?, signal).context("cannot kill it")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;

    #[test]
    fn a_process_is_measured() {
        let own = std::process::id();
        assert!(resident_bytes(own).unwrap() > 100_000);
        let mut sum = 0_u64;
        let before = cpu_time(own).unwrap();
        while cpu_time(own).unwrap() <= before {
            sum = std::hint::black_box(sum.wrapping_mul(31).wrapping_add(1));
        }
        assert!(cpu_time(u32::MAX >> 2).is_err());
    }

    #[test]
    fn holes_take_no_space() {
        let folder = tempfile::tempdir_in(std::env::temp_dir()).unwrap();
        let path = folder.path().join("sparse");
        let file = File::create(&path).unwrap();
        file.set_len(1 << 30).unwrap();
        assert!(allocated_bytes(&path).unwrap() < 1 << 20);
    }
}
