//! Daemon and engine die with commands in flight, and a VM reconnects with its rings and in-flight
//! region. Each command ends exactly once, with correct data.
//!
//! The device hangs, or delays at random so that commands end out of order. Content names its place
//! and version, so it shows which writes were executed.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use forebay_device::faulty::{self, Faults};
use forebay_initiator::verify::pattern;
use forebay_initiator::vm::vhost::{Vhost, VhostQueue};
use forebay_initiator::vm::{Disk, DiskStatus, Op, Options, Queue, Ring, Target};
use forebay_tests::daemon::{Daemon, DaemonOptions};
use forebay_tests::vm::{self, Frontend};
use forebay_tests::wait;

const MINUTE: Duration = Duration::from_secs(60);
const DEPTH: u16 = 16;
const QUEUES: u16 = 2;
const BYTES: u32 = 4096;
const SEED: u64 = 11;

struct Lane {
    queue: VhostQueue,
    number: u16,
    /// The version at each slot's place, or that of its write in flight.
    versions: Vec<u32>,
    /// The command of each slot.
    open: Vec<Option<Op>>,
    ended: u64,
}

impl Lane {
    fn offset(&self, slot: u16) -> u64 {
        u64::from(self.number * DEPTH + slot) * u64::from(BYTES)
    }

    /// All leave together.
    fn fill_up(&mut self) -> Result<()> {
        for slot in 0..DEPTH {
            let at = usize::from(slot);
            if self.open[at].is_some() {
                continue;
            }
            let offset_bytes = self.offset(slot);
            let bytes = BYTES;
            let mut data = [0xEE; BYTES as usize];
            let op = if (u64::from(slot) + self.ended).is_multiple_of(3) && self.versions[at] > 0 {
                Op::Read {
                    offset_bytes,
                    bytes,
                }
            } else {
                self.versions[at] += 1;
                pattern::fill(&mut data, SEED, offset_bytes / 512, self.versions[at]);
                Op::Write {
                    offset_bytes,
                    bytes,
                }
            };
            self.queue.put(slot, &data);
            self.queue.submit(slot, op)?;
            self.open[at] = Some(op);
        }
        self.queue.kick()?;
        Ok(())
    }

    /// The queue itself fails at an unexpected completion.
    fn collect(&mut self) -> Result<u64> {
        let mut done = Vec::new();
        self.queue.poll(&mut done)?;
        for done in &done {
            let at = usize::from(done.slot);
            let op = self.open[at].take().context("it ended twice")?;
            ensure!(
                done.ended == DiskStatus::Well,
                "{op:?} ended {:?}",
                done.ended
            );
            if let Op::Read { .. } = op {
                self.holds(done.slot)?;
            }
        }
        self.ended += done.len() as u64;
        Ok(done.len() as u64)
    }

    /// Checks a slot's data against its place.
    fn holds(&self, slot: u16) -> Result<()> {
        let mut data = [0; BYTES as usize];
        self.queue.get(slot, &mut data);
        let version = self.versions[usize::from(slot)];
        for (sector, content) in (self.offset(slot) / 512..).zip(data.chunks(512)) {
            ensure!(
                pattern::holds(content, SEED, sector, version),
                "sector {sector}: {}, not version {version}",
                pattern::read(content)
            );
        }
        Ok(())
    }

    /// Reads every place.
    fn poll(&mut self) -> Result<()> {
        for slot in 0..DEPTH {
            let offset_bytes = self.offset(slot);
            let bytes = BYTES;
            self.queue.put(slot, &[0xEE; BYTES as usize]);
            let op = Op::Read {
                offset_bytes,
                bytes,
            };
            self.queue.submit(slot, op)?;
            self.open[usize::from(slot)] = Some(op);
        }
        self.queue.kick()?;
        Ok(())
    }
}

struct Scene {
    daemon: Daemon,
    disk: Vhost,
    lanes: Vec<Lane>,
}

impl Scene {
    fn new(ring: Ring, indirect: bool) -> Result<Self> {
        let daemon = Daemon::start(&DaemonOptions {
            config: "[devices]\nallow_faulty = true\n".into(),
            ..DaemonOptions::default()
        })?;
        let device = format!(
            "faulty:{}/pool.img?size=1G&seed=1",
            daemon.folder().display()
        );
        daemon.create_pool(&["--device", &device])?;
        daemon.cli(&["tenant", "create", "t"])?;
        let target = vm::export(&daemon, "v", "64M", Frontend::VhostUser)?;
        // Map all extents now, because a hanging device would block that.
        vm::fill(&target, 1 << 20, 3)?;
        let Target::VhostUser(path) = &target else {
            anyhow::bail!("another target");
        };
        let options = Options {
            queues: QUEUES,
            depth: DEPTH,
            ring,
            indirect,
            limit: MINUTE,
            ..Options::default()
        };
        let mut disk = wait::until("a connection", MINUTE, || {
            Ok(Vhost::connect(path, &options).ok())
        })?;
        ensure!(disk.has_inflight_region(), "no in-flight region");
        let queues = (0..).zip(disk.take_vhost_queues());
        let lanes = queues.map(|(number, queue)| Lane {
            queue,
            number,
            versions: vec![0; usize::from(DEPTH)],
            open: vec![None; usize::from(DEPTH)],
            ended: 0,
        });
        Ok(Self {
            daemon,
            lanes: lanes.collect(),
            disk,
        })
    }

    fn faults(&self, faults: &Faults) -> Result<()> {
        Ok(faulty::set(&self.daemon.folder().join("pool.img"), faults)?)
    }

    /// Keeps all slots busy meanwhile.
    fn work(&mut self, commands: u64) -> Result<()> {
        let mut ended = 0;
        self.until("commands", |lanes| {
            for lane in lanes {
                ended += lane.collect()?;
                lane.fill_up()?;
            }
            Ok(ended >= commands)
        })
    }

    /// Waits until nothing is in flight.
    fn drain(&mut self) -> Result<()> {
        self.until("the end of all", |lanes| {
            let mut left = 0;
            for lane in lanes {
                lane.collect()?;
                left += lane.queue.in_flight();
            }
            Ok(left == 0)
        })
    }

    fn until(&mut self, what: &str, mut so: impl FnMut(&mut [Lane]) -> Result<bool>) -> Result<()> {
        let lanes = &mut self.lanes;
        let waited = wait::until(what, MINUTE, || Ok(so(lanes)?.then_some(())));
        let left: Vec<_> = self.lanes.iter().map(|lane| &lane.open).collect();
        let waited = waited.with_context(|| format!("in flight: {left:?}"));
        waited.map_err(|error| self.daemon.with_logs(error))
    }

    /// Waits until the engine has all commands.
    fn all_taken(&mut self) -> Result<()> {
        wait::until("the engine has all commands", MINUTE, || {
            let lane = vm::lane(&self.daemon)?;
            let taken = lane["in_flight"].as_u64().context("in_flight")?;
            Ok((taken == u64::from(QUEUES * DEPTH)).then_some(()))
        })
    }

    /// Returns the number of commands in flight.
    fn die(&mut self) -> Result<u16> {
        self.daemon.kill_all()?;
        wait::until("the end of the connection", MINUTE, || {
            Ok((!self.disk.is_open()).then_some(()))
        })?;
        let mut left = 0;
        for lane in &mut self.lanes {
            lane.collect()?;
            left += lane.queue.in_flight();
        }
        Ok(left)
    }

    fn connect_again(&mut self) -> Result<()> {
        let mut queues: Vec<VhostQueue> = Vec::new();
        let mut rest = Vec::new();
        for lane in self.lanes.drain(..) {
            queues.push(lane.queue);
            rest.push((lane.number, lane.versions, lane.open, lane.ended));
        }
        let disk = &mut self.disk;
        let mut last = None;
        let connected = wait::until("a connection", MINUTE, || {
            match disk.reconnect(&mut queues) {
                Ok(()) => Ok(Some(())),
                Err(error) => {
                    last = Some(error);
                    Ok(None)
                }
            }
        });
        let connected = connected.with_context(|| format!("the last attempt: {last:?}"));
        connected.map_err(|error| self.daemon.with_logs(error))?;
        let lanes = queues.into_iter().zip(rest);
        let lanes = lanes.map(|(queue, (number, versions, open, ended))| Lane {
            queue,
            number,
            versions,
            open,
            ended,
        });
        self.lanes = lanes.collect();
        Ok(())
    }

    /// Reads all places, and checks that no completion repeats.
    fn finish(mut self) -> Result<()> {
        self.drain()?;
        for lane in &mut self.lanes {
            lane.poll()?;
        }
        self.drain()?;
        drop(self.lanes);
        Box::new(self.disk).close()?;
        self.daemon.pool_check()?;
        self.daemon.stop()
    }
}

const WAYS: [(Ring, bool); 4] = [
    (Ring::Split, true),
    (Ring::Split, false),
    (Ring::Packed, true),
    (Ring::Packed, false),
];

/// All slots of all queues are in flight, across one death and across two.
#[test]
fn both_die_with_every_slot_in_flight() -> Result<()> {
    for (ring, indirect) in WAYS {
        let hang = Faults {
            hang: true,
            ..Faults::default()
        };
        let mut scene = Scene::new(ring, indirect)?;
        // So that the rings have wrapped and stand at an odd position.
        scene.work(301)?;
        for deaths in [1, 2] {
            scene.drain()?;
            scene.faults(&hang)?;
            for lane in &mut scene.lanes {
                lane.fill_up()?;
            }
            for _ in 0..deaths {
                scene.faults(&hang)?;
                scene.all_taken()?;
                let left = scene.die()?;
                ensure!(left == QUEUES * DEPTH, "{left} were in flight");
                scene.faults(&Faults::default())?;
                scene.daemon.start_again()?;
                if deaths == 2 {
                    scene.faults(&hang)?;
                }
                scene.connect_again()?;
            }
            scene.faults(&Faults::default())?;
            scene
                .drain()
                .with_context(|| format!("{ring:?}, indirect: {indirect}"))?;
            scene.work(100)?;
        }
        scene
            .finish()
            .with_context(|| format!("{ring:?}, indirect: {indirect}"))?;
    }
    Ok(())
}

/// Commands end out of order around each death, and the guest submits meanwhile.
#[test]
fn both_die_while_commands_end_out_of_order() -> Result<()> {
    for (ring, indirect) in WAYS {
        let late = Faults {
            delay_ppm: 500_000,
            delay_ms: 300,
            ..Faults::default()
        };
        let mut scene = Scene::new(ring, indirect)?;
        let mut over = 0;
        for death in 0..4 {
            scene.faults(&late)?;
            scene.work(50 + 7 * death)?;
            over += scene.die()?;
            scene.faults(&Faults::default())?;
            for lane in &mut scene.lanes {
                lane.fill_up()?;
            }
            scene.daemon.start_again()?;
            scene.connect_again()?;
            scene
                .drain()
                .with_context(|| format!("{ring:?}, indirect: {indirect}, death {death}"))?;
        }
        println!("{ring:?}, indirect: {indirect}: {over} commands were in flight at a death");
        scene
            .finish()
            .with_context(|| format!("{ring:?}, indirect: {indirect}"))?;
    }
    Ok(())
}
