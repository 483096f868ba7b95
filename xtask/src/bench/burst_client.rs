//! Many tenants' hosts in one thread.
//!
//! With two processors, threads would compete and distort the victim's latency. So one thread polls
//! all connections, and polls the victim between any few commands of others. Latency is from
//! submission to the poll that sees the completion.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use forebay_initiator::vm::{self, Disk, DiskStatus, Op, Queue, Target};
use forebay_initiator::{Done, IoOp, IoQueue, Options, Session, Wait};

/// Command size in bytes.
pub(super) const BLOCK: u32 = 4096;
/// Slots per connection.
pub(super) const DEPTH: u16 = 128;
/// Others' commands between two polls of the victim.
const FEW: usize = 8;
const LIMIT: Duration = Duration::from_secs(30);

// Few, and not moved during a measurement.
#[allow(clippy::large_enum_variant)]
pub(super) enum Host {
    Machine {
        queue: Box<dyn Queue>,
        done: Vec<vm::DiskCompletion>,
        _disk: Box<dyn Disk>,
    },
    Tcp {
        queue: IoQueue,
        buffers: Vec<Option<Vec<u8>>>,
        done: Vec<Done>,
        _session: Session,
    },
}

impl Host {
    pub(super) fn vm(socket: &Path) -> Result<Self> {
        Self::machine(&Target::VfioUser(socket.to_owned()), false)
    }

    /// `interrupts`: for [`Host::wait`].
    pub(super) fn machine(target: &Target, interrupts: bool) -> Result<Self> {
        let options = vm::Options {
            depth: DEPTH,
            slot_bytes: BLOCK as usize,
            interrupts,
            ..vm::Options::default()
        };
        let until = Instant::now() + LIMIT;
        let mut disk = loop {
            match vm::connect(target, &options) {
                Ok(disk) => break disk,
                Err(_) if Instant::now() < until => std::thread::sleep(Duration::from_millis(20)),
                Err(error) => return Err(error).context("connect to a VM's disk"),
            }
        };
        let queue = disk.take_queues().pop().context("a disk without queues")?;
        Ok(Self::Machine {
            queue,
            done: Vec::new(),
            _disk: disk,
        })
    }

    pub(super) fn tcp(port: u16, nqn: &str) -> Result<Self> {
        let options = Options {
            io_queues: 1,
            queue_entries: u32::from(DEPTH) + 1,
            ..Options::default()
        };
        let address = ([127, 0, 0, 1], port).into();
        let host = "nqn.2026-01.io.forebay:bench";
        let mut session = Session::connect(address, nqn, host, &options)?;
        Ok(Self::Tcp {
            queue: session.open_queue(1)?,
            buffers: vec![Some(vec![0x5a; BLOCK as usize]); usize::from(DEPTH)],
            done: Vec::new(),
            _session: session,
        })
    }

    pub(super) fn submit(&mut self, slot: u16, is_read: bool, place: u64) -> Result<()> {
        match self {
            Self::Machine { queue, .. } => {
                let (offset_bytes, bytes) = (place * u64::from(BLOCK), BLOCK);
                let op = match is_read {
                    true => Op::Read {
                        offset_bytes,
                        bytes,
                    },
                    false => Op::Write {
                        offset_bytes,
                        bytes,
                    },
                };
                Ok(queue.submit(slot, op)?)
            }
            Self::Tcp { queue, buffers, .. } => {
                let (lba, blocks) = (place, 1);
                let op = match is_read {
                    true => IoOp::Read { lba, blocks },
                    false => IoOp::Write {
                        lba,
                        blocks,
                        fua: false,
                    },
                };
                let buffer = buffers[usize::from(slot)].take().context("a busy slot")?;
                let submitted = queue.submit(&op, slot.into(), buffer);
                submitted.map_err(|refused| anyhow::anyhow!("{:?}", refused.reason))
            }
        }
    }

    pub(super) fn kick(&mut self) -> Result<()> {
        match self {
            Self::Machine { queue, .. } => Ok(queue.kick()?),
            // Sent by the next poll.
            Self::Tcp { .. } => Ok(()),
        }
    }

    fn poll(&mut self, slots: &mut Vec<u16>) -> Result<()> {
        self.take_ended(slots, None)
    }

    /// Sleeps until a command ends, or for the limit; takes the slots of those that ended.
    pub(super) fn wait(&mut self, slots: &mut Vec<u16>, limit: Duration) -> Result<()> {
        self.take_ended(slots, Some(limit))
    }

    fn take_ended(&mut self, slots: &mut Vec<u16>, sleep: Option<Duration>) -> Result<()> {
        match self {
            Self::Machine { queue, done, .. } => {
                if queue.poll(done)? == 0
                    && let Some(limit) = sleep
                {
                    queue.wait(limit)?;
                    queue.poll(done)?;
                }
                for done in done.drain(..) {
                    if done.ended != DiskStatus::Well {
                        bail!("a command failed: {:?}", done.ended);
                    }
                    slots.push(done.slot);
                }
            }
            Self::Tcp {
                queue,
                buffers,
                done,
                ..
            } => {
                let how = sleep.map_or(Wait::Spin, |_| Wait::Block);
                queue.poll(done, how, sleep.unwrap_or_default())?;
                for done in done.drain(..) {
                    if !done.status.is_success() {
                        bail!("a command failed: {:?}", done.status);
                    }
                    buffers[done.tag as usize] = Some(done.buf);
                    slots.push(done.tag as u16);
                }
            }
        }
        Ok(())
    }
}

/// A connection's load.
#[derive(Clone, Copy)]
pub(super) enum Does {
    /// At this depth, without a limit.
    All(u16),
    /// This many a second, at most this depth.
    Pace(u16, f64),
    /// A pause, then this many at once, then nothing.
    Wake(Duration, u16),
}

#[derive(Default)]
pub(super) struct Did {
    pub(super) ops: u64,
    /// Latencies in ns, unsorted; empty for [`Does::All`].
    pub(super) times: Vec<u32>,
    pub(super) seconds: f64,
}

impl Did {
    pub(super) fn iops(&self) -> f64 {
        self.ops as f64 / self.seconds.max(1e-9)
    }

    pub(super) fn mean_us(&self) -> f64 {
        let sum: f64 = self.times.iter().map(|ns| f64::from(*ns)).sum();
        sum / self.times.len().max(1) as f64 / 1000.0
    }

    pub(super) fn part_us(&self, part: f64) -> f64 {
        let mut times = self.times.clone();
        times.sort_unstable();
        let at = ((times.len() as f64 * part) as usize).min(times.len().saturating_sub(1));
        times.get(at).map_or(0.0, |ns| f64::from(*ns) / 1000.0)
    }
}

pub(super) struct Stream {
    pub(super) host: Host,
    pub(super) places: u64,
}

struct Running {
    does: Does,
    free: Vec<u16>,
    depth: u16,
    begun: Vec<Instant>,
    due: Instant,
    left: u64,
    did: Did,
}

impl Running {
    fn new(does: Does, now: Instant) -> Self {
        let (depth, due, left) = match does {
            Does::All(depth) | Does::Pace(depth, _) => (depth, now, u64::MAX),
            Does::Wake(pause, many) => (many, now + pause, many.into()),
        };
        Self {
            does,
            free: (0..depth).collect(),
            depth,
            begun: vec![now; usize::from(depth)],
            due,
            left,
            did: Did::default(),
        }
    }

    fn reap(&mut self, host: &mut Host, slots: &mut Vec<u16>) -> Result<()> {
        if self.free.len() == usize::from(self.depth) {
            return Ok(());
        }
        slots.clear();
        host.poll(slots)?;
        self.did.ops += slots.len() as u64;
        if !matches!(self.does, Does::All(_)) && !slots.is_empty() {
            let now = Instant::now();
            let times = slots.iter().map(|slot| {
                let time = now - self.begun[usize::from(*slot)];
                u32::try_from(time.as_nanos()).unwrap_or(u32::MAX)
            });
            self.did.times.extend(times);
        }
        self.free.append(slots);
        Ok(())
    }

    fn begin(&mut self, stream: &mut Stream, random: &mut fastrand::Rng) -> Result<bool> {
        let timed = !matches!(self.does, Does::All(_));
        if self.free.is_empty() || self.left == 0 {
            return Ok(false);
        }
        let mut now = self.due;
        if timed {
            now = Instant::now();
            if now < self.due {
                return Ok(false);
            }
        }
        let mut most = FEW;
        match self.does {
            Does::All(_) => {}
            // Makes up for a short delay, up to the depth.
            Does::Pace(_, rate) => {
                most = (now.duration_since(self.due).as_secs_f64() * rate) as usize + 1
            }
            Does::Wake(_, many) => most = many.into(),
        }
        let mut begun = 0;
        for _ in 0..most {
            let Some(slot) = self.free.pop() else { break };
            let place = random.u64(..stream.places);
            if timed {
                self.begun[usize::from(slot)] = now;
            }
            stream.host.submit(slot, true, place)?;
            self.left -= 1;
            begun += 1;
        }
        if begun > 0 {
            stream.host.kick()?;
            if timed {
                // TCP sends on a poll.
                self.reap(&mut stream.host, &mut Vec::new())?;
            }
        }
        if let Does::Pace(depth, rate) = self.does {
            let every = Duration::from_secs_f64(1.0 / rate);
            let least = now.checked_sub(every * u32::from(depth)).unwrap_or(now);
            self.due = (self.due + every * begun).max(least);
        }
        Ok(begun > 0)
    }
}

/// Runs the loads; the first is the victim's.
pub(super) fn run(
    streams: &mut [Stream],
    does: &[(usize, Does)],
    time: Duration,
) -> Result<Vec<Did>> {
    let begun = Instant::now();
    let end = begun + time;
    let mut all: Vec<Running> = (does.iter())
        .map(|(_, does)| Running::new(*does, begun))
        .collect();
    let (mut slots, mut random) = (Vec::with_capacity(256), fastrand::Rng::with_seed(1));
    let mut ended = None;
    let mut turn = 0u32;
    loop {
        turn += 1;
        let mut now = begun;
        if turn.is_multiple_of(16) {
            now = Instant::now();
        }
        if now >= end && ended.is_none() {
            ended = Some(now);
            for running in &mut all {
                running.did.seconds = (now - begun).as_secs_f64();
                running.left = 0;
            }
        }
        let mut in_flight = 0;
        for at in 0..all.len() {
            let stream = &mut streams[does[at].0];
            all[at].reap(&mut stream.host, &mut slots)?;
            while all[at].begin(&mut streams[does[at].0], &mut random)? {
                // The victim must not wait for this thread.
                if at > 0 {
                    let victim = &mut streams[does[0].0];
                    all[0].reap(&mut victim.host, &mut slots)?;
                    all[0].begin(victim, &mut random)?;
                }
                if !matches!(all[at].does, Does::All(_)) {
                    break;
                }
            }
            in_flight += usize::from(all[at].depth) - all[at].free.len();
        }
        if let Some(ended) = ended {
            if in_flight == 0 {
                break;
            }
            if now > ended + LIMIT {
                bail!("{in_flight} commands did not complete");
            }
        }
    }
    Ok(all.into_iter().map(|running| running.did).collect())
}

pub(super) fn fill(stream: &mut Stream) -> Result<()> {
    let (mut next, mut free) = (0, (0..32u16).collect::<Vec<_>>());
    let begun = Instant::now();
    while next < stream.places || free.len() < 32 {
        while next < stream.places
            && let Some(slot) = free.pop()
        {
            stream.host.submit(slot, false, next)?;
            next += 1;
        }
        stream.host.kick()?;
        let mut slots = Vec::new();
        stream.host.poll(&mut slots)?;
        free.append(&mut slots);
        if begun.elapsed() > LIMIT {
            bail!("a volume was not written within {} s", LIMIT.as_secs());
        }
    }
    Ok(())
}
