//! Puts a volume under load, over any frontend: one queue, polled. A failed command ends the
//! calibration.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use forebay_control::model::Export;
use forebay_initiator::vm::{self, Disk, DiskStatus, Op, Queue, Target};
use forebay_initiator::{Done, IoOp, IoQueue, Options, Session, Wait, dsm_ranges};
use forebay_qos::cost::Transport;

use crate::failure::{Failure, Outcome, While};

pub(super) const HOST: &str = "nqn.2026-01.io.forebay:calibrate";
/// Commands in flight, unless a greater depth is faster.
const DEPTH: u16 = 32;
/// The smallest usable queue of all frontends.
const MOST_DEPTH: u16 = 255;
const MOST_BYTES: usize = 8 << 20;
pub(super) const LARGEST: u32 = 128 << 10;
const STALL_LIMIT: Duration = Duration::from_secs(30);
/// Time without a completion before the connection is checked.
const POLL: Duration = Duration::from_millis(200);
const SOCKET_LIMIT: Duration = Duration::from_secs(10);

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum LoadKind {
    /// Sequential writes, each location once.
    Fill,
    Read,
    Write,
    Flush,
    /// One block each.
    Deallocate,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Load {
    pub(super) kind: LoadKind,
    /// Per command.
    pub(super) bytes: u32,
    /// Their range.
    pub(super) first: u64,
    pub(super) span: u64,
    pub(super) time: Duration,
    pub(super) depth: u16,
}

pub(super) fn first_depth(bytes: u32) -> u16 {
    match bytes {
        LARGEST.. => DEPTH / 2,
        _ => DEPTH,
    }
}

pub(super) fn deeper(depth: u16, bytes: u32) -> Option<u16> {
    let most = (MOST_BYTES / bytes.max(1) as usize).min(MOST_DEPTH.into()) as u16;
    let next = (2 * depth).min(most);
    (next > depth).then_some(next)
}

/// A slot's buffer: only small commands reach high slots.
fn slot_bytes(slot: u16) -> usize {
    (MOST_BYTES / (usize::from(slot) + 1)).min(LARGEST as usize)
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Counted {
    pub(super) ops: u64,
    pub(super) elapsed: Duration,
}

trait LoadQueue {
    fn submit(&mut self, slot: u16, op: Op) -> Outcome;
    /// Sends prepared commands; adds the slots of ended ones.
    fn turn(&mut self, free: &mut Vec<u16>) -> Outcome;
    /// Whether the engine still holds its end, if known.
    fn is_open(&self) -> bool {
        true
    }
    fn close(self: Box<Self>) -> Outcome;
}

pub(super) struct Drive {
    lane: Box<dyn LoadQueue>,
    random: fastrand::Rng,
}

impl Drive {
    pub(super) fn connect(frontend: Transport, export: &Export) -> Outcome<Self> {
        let lane: Box<dyn LoadQueue> = match frontend {
            Transport::Tcp => Box::new(Tcp::connect(export)?),
            Transport::Pcie | Transport::Vhost => Box::new(VmDisk::connect(frontend, export)?),
        };
        Ok(Self {
            lane,
            random: fastrand::Rng::with_seed(0),
        })
    }

    /// Runs the load until its time is over, or each location is written.
    pub(super) fn load(&mut self, load: &Load) -> Outcome<Counted> {
        let depth = load.depth;
        let step = u64::from(load.bytes.max(4096));
        let places = (load.span / step).max(1);
        let mut free: Vec<u16> = (0..depth).collect();
        let (mut ops, mut next) = (0, 0);
        let begun = Instant::now();
        let mut moved = begun;
        loop {
            let now = Instant::now();
            let more = now < begun + load.time;
            while more
                && !(load.kind == LoadKind::Fill && next == places)
                && let Some(slot) = free.pop()
            {
                let place = if load.kind == LoadKind::Fill {
                    next
                } else {
                    self.random.u64(..places)
                };
                next += 1;
                let (offset_bytes, bytes) = (load.first + place * step, load.bytes);
                let op = match load.kind {
                    LoadKind::Fill | LoadKind::Write => Op::Write {
                        offset_bytes,
                        bytes,
                    },
                    LoadKind::Read => Op::Read {
                        offset_bytes,
                        bytes,
                    },
                    LoadKind::Flush => Op::Flush,
                    LoadKind::Deallocate => Op::Discard {
                        offset_bytes,
                        bytes: 4096,
                    },
                };
                self.lane.submit(slot, op)?;
            }
            if free.len() == usize::from(depth) {
                break;
            }
            let before = free.len();
            self.lane.turn(&mut free)?;
            if free.len() > before {
                ops += (free.len() - before) as u64;
                moved = now;
            } else {
                let stalled = now.saturating_duration_since(moved);
                if stalled > POLL && !self.lane.is_open() {
                    return Err(Failure::new("the engine closed the connection"));
                }
                if stalled > STALL_LIMIT {
                    return Err(Failure::new(format!(
                        "no command completed for {} s",
                        STALL_LIMIT.as_secs()
                    )));
                }
                // The engine may need this processor.
                std::thread::yield_now();
            }
        }
        Ok(Counted {
            ops,
            elapsed: begun.elapsed(),
        })
    }

    pub(super) fn close(self) -> Outcome {
        self.lane.close()
    }
}

/// Incompressible data.
fn content(bytes: usize) -> Vec<u8> {
    let words = (0..bytes as u64 / 8).map(|i| (i + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    words
        .flat_map(|word| word.rotate_left(17).to_le_bytes())
        .collect()
}

struct Tcp {
    session: Session,
    queue: IoQueue,
    buffers: Vec<Option<Vec<u8>>>,
    done: Vec<Done>,
}

impl Tcp {
    fn connect(export: &Export) -> Outcome<Self> {
        let address = export.addresses.first();
        let address = address.ok_or_else(|| Failure::new("the daemon has no NVMe/TCP listener"))?;
        let address: SocketAddr = address
            .parse()
            .while_doing(format!("use the address {address}"))?;
        let options = Options {
            io_queues: 1,
            queue_entries: u32::from(MOST_DEPTH) + 1,
            ..Options::default()
        };
        let failed = |error: forebay_initiator::Error| Failure::new(error.to_string());
        let mut session = Session::connect(address, &export.nqn, HOST, &options).map_err(failed)?;
        if session.queue_depth() < usize::from(MOST_DEPTH) {
            return Err(Failure::new(format!(
                "the queue depth is {}, not {MOST_DEPTH}",
                session.queue_depth()
            )));
        }
        let queue = session.open_queue(export.nsid).map_err(failed)?;
        Ok(Self {
            session,
            queue,
            buffers: (0..MOST_DEPTH)
                .map(|slot| Some(content(slot_bytes(slot))))
                .collect(),
            done: Vec::new(),
        })
    }
}

impl LoadQueue for Tcp {
    fn submit(&mut self, slot: u16, op: Op) -> Outcome {
        let block = self.queue.block_bytes();
        let lba = |offset: u64| offset / u64::from(block);
        let buffer = self.buffers.get_mut(usize::from(slot));
        let mut buffer = buffer
            .and_then(Option::take)
            .unwrap_or_else(|| content(LARGEST as usize));
        let op = match op {
            Op::Read {
                offset_bytes,
                bytes,
            } => IoOp::Read {
                lba: lba(offset_bytes),
                blocks: bytes / block,
            },
            Op::Write {
                offset_bytes,
                bytes,
            } => IoOp::Write {
                lba: lba(offset_bytes),
                blocks: bytes / block,
                fua: false,
            },
            Op::WriteZeroes { .. } | Op::Flush => IoOp::Flush,
            Op::Discard {
                offset_bytes,
                bytes,
            } => {
                let ranges = dsm_ranges(&[(lba(offset_bytes), bytes / block)]);
                buffer[..ranges.len()].copy_from_slice(&ranges);
                IoOp::Deallocate { ranges: 1 }
            }
        };
        let refused = self.queue.submit(&op, slot.into(), buffer);
        refused.map_err(|refused| Failure::new(format!("{op:?}: {:?}", refused.reason)))
    }

    fn turn(&mut self, free: &mut Vec<u16>) -> Outcome {
        let limit = Duration::from_millis(20);
        let polled = self.queue.poll(&mut self.done, Wait::Block, limit);
        polled.map_err(|error| Failure::new(error.to_string()))?;
        for done in self.done.drain(..) {
            if !done.status.is_success() {
                return Err(Failure::new(format!("a command failed: {:?}", done.status)));
            }
            if let Some(buffer) = self.buffers.get_mut(done.tag as usize) {
                *buffer = Some(done.buf);
            }
            free.push(done.tag as u16);
        }
        Ok(())
    }

    fn close(self: Box<Self>) -> Outcome {
        drop(self.queue);
        let closed = self.session.close();
        closed.map_err(|error| Failure::new(error.to_string()))
    }
}

struct VmDisk {
    disk: Box<dyn Disk>,
    queue: Box<dyn Queue>,
    done: Vec<vm::DiskCompletion>,
}

impl VmDisk {
    fn connect(frontend: Transport, export: &Export) -> Outcome<Self> {
        let path = export.socket.as_deref();
        let path = PathBuf::from(path.ok_or_else(|| Failure::new("the export has no socket"))?);
        let target = match frontend {
            Transport::Vhost => Target::VhostUser(path.clone()),
            Transport::Pcie | Transport::Tcp => Target::VfioUser(path.clone()),
        };
        let options = vm::Options {
            depth: MOST_DEPTH,
            slot_bytes: LARGEST as usize,
            ..vm::Options::default()
        };
        let until = Instant::now() + SOCKET_LIMIT;
        let mut disk = loop {
            match vm::connect(&target, &options) {
                Ok(disk) => break disk,
                Err(_) if !path.exists() && Instant::now() < until => {
                    std::thread::sleep(Duration::from_millis(20));
                }
                Err(error) => return Err(Failure::new(error.to_string())),
            }
        };
        let queue = disk.take_queues().pop();
        let queue = queue.ok_or_else(|| Failure::new("the disk has no queue"))?;
        let data = content(LARGEST as usize);
        for slot in 0..MOST_DEPTH {
            queue.put(slot, &data[..slot_bytes(slot)]);
        }
        Ok(Self {
            disk,
            queue,
            done: Vec::new(),
        })
    }
}

impl LoadQueue for VmDisk {
    fn submit(&mut self, slot: u16, op: Op) -> Outcome {
        let submitted = self.queue.submit(slot, op);
        submitted.map_err(|error| Failure::new(error.to_string()))
    }

    fn turn(&mut self, free: &mut Vec<u16>) -> Outcome {
        let failed = |error: vm::Error| Failure::new(error.to_string());
        self.queue.kick().map_err(failed)?;
        self.queue.poll(&mut self.done).map_err(failed)?;
        for done in self.done.drain(..) {
            if done.ended != DiskStatus::Well {
                return Err(Failure::new(format!("a command failed: {:?}", done.ended)));
            }
            free.push(done.slot);
        }
        Ok(())
    }

    fn is_open(&self) -> bool {
        self.disk.is_open()
    }

    fn close(self: Box<Self>) -> Outcome {
        drop(self.queue);
        let closed = self.disk.close();
        closed.map_err(|error| Failure::new(error.to_string()))
    }
}
