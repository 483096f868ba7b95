//! The longest time without a completion when an engine is killed, of volumes under load.
//!
//! A host at depth 1 uses an RBD volume, another one a local volume of the same engine, both over
//! NVMe/TCP. A daemon without a cluster has the local volume's pause alone.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Result;

use super::burst_client::{BLOCK, Host};
use super::ceph::{LOCAL_BYTES, Rig, local};
use super::forebay::{Forebay, Setup};
use super::measure::{Clock, Summary};
use super::once::{Measured, quiet_median};
use super::pool_load::{Command, Places, during_at, longest_gap_ms};

pub(super) const NAME: &str = "pause";
/// Of load before a death.
const BEFORE: Duration = Duration::from_millis(500);
/// Of load after the successor runs. A longer pause counts in full.
const AFTER: Duration = Duration::from_secs(2);

struct Pause {
    ms: f64,
    others_cores: f64,
}

impl Measured for Pause {
    fn others_cores(&self) -> f64 {
        self.others_cores
    }
}

/// When an engine was killed, and until when a pause counts.
struct Death {
    begun: Instant,
    ended: Instant,
    others_cores: f64,
}

impl Death {
    fn pause(&self, commands: &[Command]) -> Result<Pause> {
        Ok(Pause {
            ms: longest_gap_ms(commands, self.begun, self.ended)?,
            others_cores: self.others_cores,
        })
    }
}

fn deaths(quick: bool) -> usize {
    if quick { 3 } else { 10 }
}

/// A local volume of a daemon without a cluster.
pub(super) fn alone(program: &Path, quick: bool, summary: &mut Summary) -> Result<()> {
    let (mut forebay, _pool) = local(program, Setup::default())?;
    let mut pauses = Vec::new();
    for _ in 0..deaths(quick) {
        let (port, nqn) = (forebay.port, forebay.nqn.clone());
        let act = || kill(&mut forebay, &[]);
        let (death, commands) = during_at(1, || Host::tcp(port, &nqn), writes(LOCAL_BYTES), act)?;
        pauses.push(death.pause(&commands)?);
    }
    report(summary, "local_alone_write", &pauses);
    Ok(())
}

pub(super) fn run(rig: &mut Rig, quick: bool, summary: &mut Summary) -> Result<()> {
    let ceph = rig.ceph()?;
    for op in ["read", "write"] {
        let (mut remote, mut local) = (Vec::new(), Vec::new());
        for _ in 0..deaths(quick) {
            let (port, nqn) = (rig.forebay.port, rig.nqn.clone());
            let local_nqn = rig.forebay.nqn.clone();
            let places = match op {
                "read" => Places::Reads(rig.image_bytes / u64::from(BLOCK)),
                _ => writes(rig.image_bytes),
            };
            let act = || kill(&mut rig.forebay, &ceph);
            let beside = || {
                let connect = || Host::tcp(port, &local_nqn);
                during_at(1, connect, writes(LOCAL_BYTES), act)
            };
            let ((death, of_local), of_remote) =
                during_at(1, || Host::tcp(port, &nqn), places, beside)?;
            remote.push(death.pause(&of_remote)?);
            local.push(death.pause(&of_local)?);
        }
        report(summary, &format!("rbd_{op}"), &remote);
        report(summary, &format!("local_beside_rbd_{op}"), &local);
    }
    Ok(())
}

fn writes(bytes: u64) -> Places {
    Places::Random(bytes / u64::from(BLOCK))
}

/// `more`: further processes under test.
fn kill(forebay: &mut Forebay, more: &[u32]) -> Result<Death> {
    let before = others_during(forebay, more, BEFORE)?;
    let begun = Instant::now();
    forebay.replace_engine()?;
    let after = others_during(forebay, more, AFTER)?;
    Ok(Death {
        begun,
        ended: Instant::now(),
        others_cores: before.max(after),
    })
}

/// Other programs' user time; the engine's process must not change meanwhile.
fn others_during(forebay: &Forebay, more: &[u32], time: Duration) -> Result<f64> {
    let pids = [more, &forebay.processes()].concat();
    let clock = Clock::start(&pids)?;
    std::thread::sleep(time);
    Ok(clock.used()?.others_user_cores)
}

fn report(summary: &mut Summary, name: &str, pauses: &[Pause]) {
    let median_ms = quiet_median(summary, pauses, |pause| pause.ms);
    let longest_ms = pauses.iter().map(|pause| pause.ms).fold(0.0, f64::max);
    let undisturbed = pauses.iter().filter(|pause| pause.is_quiet()).count();
    println!(
        "an engine's death, {name:<22} pause {median_ms:>7.1} ms, longest {longest_ms:>7.1} ms; {undisturbed} of {} undisturbed",
        pauses.len()
    );
    summary.put(format!("{name}_{NAME}_ms"), median_ms);
    summary.put(format!("{name}_longest_{NAME}_ms"), longest_ms);
}
