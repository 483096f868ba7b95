//! Measures for `cargo xtask bench mi` how fast the out-of-band endpoint answers.
//!
//! Health polls and a bare echo over a Unix socket take turns, while 64 exports are under load at
//! depth 32. Then engines die and are replaced under a lighter load, and the longest answer counts.
//! Last, without load, the daemon's processor time for each command.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use forebay_initiator::mi::MiClient;
use forebay_nvme::mi::{ControllerHealthPoll, MiCommand};
use forebay_nvme::opcode::admin;
use forebay_tests::host::Habits;
use forebay_tests::lab::{Lab, LabOptions, MIB, MINUTE, Noticed};
use forebay_tests::out_of_band::{self, ALL_RIGHTS, command};

const EXPORTS: u8 = 64;
const DEPTH: usize = 32;
/// Commands per second of each export while engines die.
const PER_SECOND: u32 = 50;
/// The frames of a health poll and of its answer, in bytes.
const REQUEST_BYTES: usize = 30;
const ANSWER_BYTES: usize = 34;
const TICKS_PER_SECOND: f64 = 100.0;

fn main() -> Result<()> {
    let quick = std::env::args().any(|arg| arg == "--quick");
    let (polls, deaths, commands) = if quick {
        (2_000, 3, 10_000)
    } else {
        (20_000, 20, 50_000)
    };
    let mut options = LabOptions::volumes(0, 0);
    options.config = format!(
        "[engine]\nreactors = 1\n{}",
        out_of_band::table(ALL_RIGHTS, "")
    );
    options.volumes = (0..EXPORTS).map(|i| (format!("v{i}"), 4 * MIB)).collect();
    let mut lab = Lab::new(&options)?;
    let mut client = out_of_band::client(&lab.daemon)?;
    for host in &mut lab.hosts {
        host.fill()?;
        host.habits = habits(None);
    }
    let mut polled = Vec::new();
    let mut echoed = Vec::new();
    lab.during_load(Noticed::Nothing, |_, progress| {
        progress.more("every export is under load", 1000)?;
        let mut echo = Echo::start()?;
        for _ in 0..polls {
            polled.push(time(|| poll(&mut client))?);
            echoed.push(time(|| echo.exchange())?);
        }
        Ok(())
    })?;
    for host in &mut lab.hosts {
        host.habits = habits(Some(PER_SECOND));
    }
    let mut longest = Duration::ZERO;
    lab.during_load(Noticed::Nothing, |daemon, progress| {
        progress.more("every export is under load", 100)?;
        for _ in 0..deaths {
            let engine = daemon.kill_engine()?;
            let until = Instant::now() + Duration::from_secs(1);
            while Instant::now() < until {
                longest = longest.max(time(|| poll(&mut client))?);
                longest = longest.max(time(|| identify(&mut client))?);
            }
            daemon.wait_engine_after(engine.generation, MINUTE)?;
            std::thread::scope(|scope| -> Result<()> {
                let upgrade = scope.spawn(|| daemon.cli(&["upgrade"]));
                while !upgrade.is_finished() {
                    longest = longest.max(time(|| poll(&mut client))?);
                    longest = longest.max(time(|| identify(&mut client))?);
                }
                upgrade.join().expect("the upgrade").map(drop)
            })?;
        }
        Ok(())
    })?;
    let pid = lab.daemon.processes()?.daemon;
    let before = ticks(pid)?;
    for _ in 0..commands / 3 {
        poll(&mut client)?;
        identify(&mut client)?;
    }
    let seconds = (ticks(pid)? - before) as f64 / TICKS_PER_SECOND;
    lab.finish()?;
    for (name, values) in [("poll", &mut polled), ("echo", &mut echoed)] {
        values.sort_unstable();
        println!("{name}_p50_us {:.1}", percentile_us(values, 50));
        println!("{name}_p99_us {:.1}", percentile_us(values, 99));
    }
    println!(
        "poll_p99_latency_ratio {:.3}",
        percentile_us(&polled, 99) / percentile_us(&echoed, 99)
    );
    println!("deaths_and_upgrades {deaths}");
    println!("answer_max_ms {:.2}", longest.as_secs_f64() * 1e3);
    println!("daemon_cpu_us {:.1}", seconds * 1e6 / f64::from(commands));
    println!("exports {EXPORTS}");
    Ok(())
}

fn habits(per_second: Option<u32>) -> Habits {
    Habits {
        reads: 50,
        holes: 0,
        flushes: 0,
        fua: 0,
        longest_bytes: 4096,
        depth: DEPTH,
        per_second,
    }
}

fn time(act: impl FnOnce() -> Result<()>) -> Result<Duration> {
    let begun = Instant::now();
    act()?;
    Ok(begun.elapsed())
}

fn poll(client: &mut MiClient) -> Result<()> {
    let (_, health) = client.command(MiCommand::SubsystemHealth { clear: false })?;
    ensure!(health.len() == 8, "{health:?}");
    Ok(())
}

/// The two other polls of a management controller.
fn identify(client: &mut MiClient) -> Result<()> {
    let poll = ControllerHealthPoll {
        first: 0,
        entries: 255,
        functions: 7,
        all: true,
        changes: 0,
        clear: false,
    };
    client.command(MiCommand::ControllerHealth(poll))?;
    let smart = command(admin::GET_LOG_PAGE, u32::MAX, 0x02 | 127 << 16, 0);
    let (_, page) = client.admin_read(0, smart, 512)?;
    ensure!(page.len() == 512);
    Ok(())
}

/// A thread that answers bytes with bytes.
struct Echo(UnixStream);

impl Echo {
    fn start() -> Result<Self> {
        let (near, mut far) = UnixStream::pair()?;
        near.set_read_timeout(Some(MINUTE))?;
        std::thread::spawn(move || {
            let mut request = [0; REQUEST_BYTES];
            while far.read_exact(&mut request).is_ok() {
                if far.write_all(&[0; ANSWER_BYTES]).is_err() {
                    break;
                }
            }
        });
        Ok(Self(near))
    }

    fn exchange(&mut self) -> Result<()> {
        self.0.write_all(&[0; REQUEST_BYTES])?;
        Ok(self.0.read_exact(&mut [0; ANSWER_BYTES])?)
    }
}

/// User and system time of a process (proc(5)).
fn ticks(pid: u32) -> Result<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
    let (_, fields) = stat.rsplit_once(')').context("no ')' in a stat file")?;
    let fields: Vec<u64> = fields
        .split_whitespace()
        .map(|f| f.parse().unwrap_or(0))
        .collect();
    let times = fields.get(11).zip(fields.get(12));
    times.map(|(user, system)| user + system).context("times")
}

fn percentile_us(sorted: &[Duration], percent: usize) -> f64 {
    let at = (sorted.len().saturating_sub(1)) * percent / 100;
    sorted
        .get(at)
        .map_or(0.0, |value| value.as_secs_f64() * 1e6)
}
