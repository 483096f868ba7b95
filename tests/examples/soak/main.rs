//! The run `troubles` of `cargo xtask soak`: random faults from a seed, while hosts judge every
//! byte.
//!
//! Single troubles (`troubles`) alternate with storms (`storm`), on a pool of two `faulty:`
//! devices. Effects beyond a trouble's tolerance are errors. At the end everything is read back and
//! the pool is checked.

mod storm;
mod troubles;
mod victim;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::time::{Duration, Instant};

use anyhow::{Context, Error, Result, bail, ensure};
use forebay_tests::host::{Dice, Host, Load};
use forebay_tests::lab::{Lab, LabOptions, MIB};
use forebay_tests::shadow::Promise;

use crate::troubles::Troubles;
use crate::victim::Victim;

const HOSTS: u8 = 4;
const VOLUME_BYTES: u64 = 48 * MIB;

pub(crate) struct Shared {
    over: AtomicBool,
    /// Connections may be lost.
    may_lose: AtomicBool,
    commands: Vec<AtomicU64>,
}

fn main() -> Result<()> {
    let mut args = std::env::args().skip(1);
    let (mut minutes, mut seed) = (5.0, 1);
    while let Some(arg) = args.next() {
        let value = args
            .next()
            .with_context(|| format!("{arg} needs a value"))?;
        match arg.as_str() {
            "--minutes" => minutes = value.parse::<f64>()?,
            "--seed" => seed = value.parse::<u64>()?,
            other => bail!("unknown argument '{other}'; there are: --minutes N, --seed N"),
        }
    }
    println!("seed {seed}");
    let end = Instant::now() + Duration::from_secs_f64(minutes * 60.0);
    let device = |i| format!("faulty:FOLDER/device{i}?size=2G&seed={}", seed + i);
    let mut lab = Lab::new(&LabOptions {
        config: "[engine]\nreactors = 2\nstuck_s = 2\n[devices]\nallow_faulty = true\n".into(),
        devices: vec![device(0), device(1)],
        ..LabOptions::volumes(HOSTS, VOLUME_BYTES)
    })?;
    let shared = Shared {
        over: AtomicBool::new(false),
        may_lose: AtomicBool::new(false),
        commands: lab.hosts.iter().map(|_| AtomicU64::new(0)).collect(),
    };
    let devices: Vec<_> = (0..2)
        .map(|i| lab.daemon.folder().join(format!("device{i}")))
        .collect();
    let mut troubles = Troubles {
        victim: Victim::new(&lab.daemon, lab.address, &devices)?,
        devices,
        hosts: lab
            .hosts
            .iter()
            .map(|host| (host.tolerates.clone(), host.cut.clone()))
            .collect(),
        address: lab.address,
        daemon: &mut lab.daemon,
        dice: Dice::with_seed(seed),
        shared: &shared,
        survived: BTreeMap::new(),
        volumes: 0,
    };
    let hosts = &mut lab.hosts;
    let (ran, loads) = std::thread::scope(|scope| {
        let threads: Vec<_> = hosts
            .iter_mut()
            .enumerate()
            .map(|(number, host)| {
                let shared = &shared;
                scope.spawn(move || {
                    let worked = work(host, number, shared);
                    if let Err(error) = &worked {
                        eprintln!("host {number}: {error:#}");
                        shared.over.store(true, SeqCst);
                    }
                    worked
                })
            })
            .collect();
        let ran = troubles.all(end);
        shared.over.store(true, SeqCst);
        let loads: Vec<Result<Load>> = threads
            .into_iter()
            .map(|thread| thread.join().expect("a host does not panic"))
            .collect();
        (ran, loads)
    });
    for (what, times) in &troubles.survived {
        println!("{times:>8}  {what}");
    }
    let loads = loads.into_iter().collect::<Result<Vec<_>>>();
    if let Err(error) = &ran {
        eprintln!("{error:#}");
    }
    let loads = loads.map_err(|error| lab.daemon.with_logs(error))?;
    ran?;
    let sum = |of: fn(&Load) -> u64| loads.iter().map(of).sum::<u64>();
    println!("{:>8}  commands judged", sum(|load| load.commands));
    println!("{:>8}  flushes among them", sum(|load| load.flushes));
    println!(
        "{:>8}  ended by a device's error",
        sum(|load| load.device_errors)
    );
    println!("{:>8}  put off", sum(|load| load.interrupted));
    lab.check()?;
    lab.daemon.stop()?;
    println!("no byte lost or wrong, no error unexplained (seed {seed})");
    Ok(())
}

/// Loads until `over`, with reconnects if allowed.
fn work(host: &mut Host, number: usize, shared: &Shared) -> Result<Load> {
    let mut all = Load::default();
    while !shared.over.load(SeqCst) {
        let before = shared.commands[number].load(SeqCst);
        let load = host.load(|ended| {
            shared.commands[number].store(before + ended, SeqCst);
            !shared.over.load(SeqCst)
        })?;
        all.commands += load.commands;
        all.flushes += load.flushes;
        all.interrupted += load.interrupted;
        all.device_errors += load.device_errors;
        if load.lost {
            ensure!(
                shared.may_lose.load(SeqCst),
                "a connection was lost for no reason: {load:?}"
            );
            // Reading back may meet the next death.
            while let Err(error) = host.verify(Promise::Acknowledged) {
                ensure!(shared.may_lose.load(SeqCst) && is_lost(&error), error);
            }
        }
    }
    Ok(all)
}

fn is_lost(error: &Error) -> bool {
    let error = error.downcast_ref::<forebay_initiator::Error>();
    error.is_some_and(forebay_initiator::Error::is_connection_lost)
}
