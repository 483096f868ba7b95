//! The internal lane: the owner's zero-fill, copy and flush jobs.
//!
//! **Design.** Zero-fills and copies have places of their own, and a limit of operations at a
//! device ([`Places`]), so that tenants' commands run between. No device takes the last place, so a
//! hung one does not block others. Zero-fill punches: extents read as zeros, and a sparse file
//! shrinks. A copy reads a piece into its place's buffer, then writes it. **Not here:** when an
//! extent counts as clean or copied (the owner flushes, then commits).

use crate::io::devices::{DeviceRing, kind};
use crate::io::settle::{EndedAtDevice, Settles};
use crate::upcall::Upcall;
use forebay_device::mem::StaticRegion;
use forebay_device::{Errno, Finish, Op, Submitted};
use forebay_xlate::boundary::message::{DeviceConfig, Job};
use forebay_xlate::{DeviceIndex, ExtentRange};
use std::collections::VecDeque;
use std::ops::Range;

/// The places of a kind of jobs, and its most operations at a device.
struct Places {
    range: Range<usize>,
    of_device: usize,
}

const ZERO_FILLS: Places = Places {
    range: 0..32,
    of_device: 2,
};
const COPIES: Places = Places {
    range: 32..MAX_ACTIVE,
    of_device: 8,
};
pub(crate) const MAX_ACTIVE: usize = 64;
const ZERO_PIECE_BYTES: u64 = 16 << 20;
const COPY_PIECE_BYTES: u64 = 512 << 10;
/// Moved in a turn by copies that end at once: about 100 microseconds.
const COPY_TURN_BYTES: u64 = 512 << 10;

/// Device bytes that are still to be zeroed, read or written.
#[derive(Debug)]
pub(crate) struct Stretch {
    device: u8,
    next: u64,
    end: u64,
}

impl Stretch {
    /// `None`: beyond the device's end, or nothing.
    pub(crate) fn of(config: &DeviceConfig, extents: ExtentRange) -> Option<Self> {
        let at = |extent: u64| config.data_offset_bytes + extent * u64::from(config.extent_bytes);
        (extents.count > 0 && extents.end() <= config.extents).then(|| Self {
            device: config.device.0,
            next: at(extents.first),
            end: at(extents.end()),
        })
    }

    fn left(&self) -> u64 {
        self.end - self.next
    }

    fn take(&mut self, bytes: u64) -> u64 {
        self.next += bytes;
        self.next - bytes
    }
}

#[derive(Debug)]
struct Active {
    job: u64,
    /// A copy's source. It is ahead of the target by the piece that the buffer holds.
    from: Option<Stretch>,
    to: Stretch,
    /// The operation at the device, or to be submitted.
    op: Option<(u8, Op)>,
    at_device: bool,
}

impl Active {
    /// Bytes in the buffer, to be written.
    fn pending(&self) -> u64 {
        let from = self.from.as_ref();
        from.map_or(0, |from| self.to.left() - from.left())
    }

    /// The device of the present or next operation.
    fn device(&self) -> u8 {
        match (&self.op, &self.from) {
            (Some((device, _)), _) => *device,
            (None, Some(from)) if self.pending() == 0 => from.device,
            _ => self.to.device,
        }
    }

    /// `None`: all is done; if something is left, its buffer is missing.
    fn next_op(&mut self, place: usize, buffers: Option<&StaticRegion>) -> Option<(u8, Op)> {
        let (device, pending) = (self.device(), self.pending());
        let left = self.to.left();
        if left == 0 {
            return None;
        }
        let Some(from) = &mut self.from else {
            let piece = ZERO_PIECE_BYTES.min(left);
            return Some((device, Op::punch(self.to.take(piece), piece)));
        };
        let at = place.checked_sub(COPIES.range.start)? * COPY_PIECE_BYTES as usize;
        let piece = if pending > 0 {
            pending
        } else {
            left.min(COPY_PIECE_BYTES)
        };
        let buf = buffers?.buf(at, piece as u32)?;
        Some(match pending {
            0 => (device, Op::read(from.take(piece), buf)),
            _ => (device, Op::write(self.to.take(piece), buf)),
        })
    }
}

#[derive(Debug)]
pub(crate) struct Jobs {
    pub(crate) queue: VecDeque<(u64, Job)>,
    /// Something changed since the last pass.
    check: bool,
    active: [Option<Active>; MAX_ACTIVE],
    /// Number of active jobs.
    count: usize,
    /// After the last copy that moved at once.
    first: usize,
    /// What copies may still move at once in this turn; whether one waits for the next.
    turn_bytes: u64,
    again: bool,
    /// A piece for each place of copies, made for the first copy.
    buffers: Option<StaticRegion>,
}

impl Jobs {
    pub(crate) fn new() -> Self {
        Self {
            queue: VecDeque::new(),
            check: false,
            active: std::array::from_fn(|_| None),
            count: 0,
            first: 0,
            turn_bytes: 0,
            again: false,
            buffers: None,
        }
    }

    /// A copy counts where its present operation is: its other device must not seem to hang.
    pub(crate) fn at_device(&self, device: DeviceIndex) -> [bool; MAX_ACTIVE] {
        let here = |a: &Active| a.at_device && a.device() == device.0;
        std::array::from_fn(|i| self.active[i].as_ref().is_some_and(here))
    }

    #[cfg(test)]
    pub(crate) fn any(&self) -> bool {
        !self.queue.is_empty() || self.count > 0
    }

    pub(crate) fn poll_again(&mut self) {
        self.check = true;
    }

    pub(crate) fn must_turn(&self) -> bool {
        self.again || self.check && !self.queue.is_empty()
    }

    /// A free place of these, unless one of the devices has enough to do.
    fn place(&self, places: &Places, devices: &[u8]) -> Option<usize> {
        let active = &self.active[places.range.clone()];
        let free = active.iter().filter(|a| a.is_none()).count();
        let has_room = |device: &u8| {
            let here = active.iter().flatten().filter(|a| a.device() == *device);
            here.count() < places.of_device.min(free)
        };
        let at = active.iter().position(Option::is_none)?;
        devices
            .iter()
            .all(has_room)
            .then(|| places.range.start + at)
    }

    pub(crate) fn start(&mut self, job: u64, work: Job) {
        self.queue.push_back((job, work));
        self.check = true;
    }

    pub(crate) fn take_queued(&mut self) -> usize {
        match std::mem::take(&mut self.check) {
            true => self.queue.len(),
            false => 0,
        }
    }

    fn begin(&mut self, place: usize, job: u64, from: Option<Stretch>, to: Stretch) {
        self.active[place] = Some(Active {
            job,
            from,
            to,
            op: None,
            at_device: false,
        });
        self.count += 1;
    }

    /// False if the device has enough to do.
    pub(crate) fn zero_fill(&mut self, job: u64, extents: Stretch) -> bool {
        let Some(place) = self.place(&ZERO_FILLS, &[extents.device]) else {
            return false;
        };
        self.begin(place, job, None, extents);
        true
    }

    /// Copies a stretch to another of the same length. False if a device has enough to do.
    ///
    /// # Errors
    /// The stretches don't fit, or there is no memory for the first copy.
    pub(crate) fn copy(&mut self, job: u64, from: Stretch, to: Stretch) -> Result<bool, Errno> {
        let overlap = from.device == to.device && from.next < to.end && to.next < from.end;
        if from.left() != to.left() || overlap {
            return Err(Errno::INVAL);
        }
        let Some(place) = self.place(&COPIES, &[from.device, to.device]) else {
            return Ok(false);
        };
        if self.buffers.is_none() {
            let bytes = COPIES.range.len() * COPY_PIECE_BYTES as usize;
            let buffers = StaticRegion::anonymous(bytes).map_err(|_| Errno::NOMEM)?;
            self.buffers = Some(buffers);
        }
        self.begin(place, job, Some(from), to);
        Ok(true)
    }

    pub(crate) fn advance_all(
        &mut self,
        devices: &mut DeviceRing,
        now_ns: u64,
        upcalls: &mut VecDeque<Upcall>,
    ) {
        self.turn_bytes = COPY_TURN_BYTES;
        self.again = false;
        if self.count > 0 {
            let first = self.first;
            for place in (first..MAX_ACTIVE).chain(0..first) {
                self.advance(place, devices, now_ns, upcalls);
            }
        }
    }

    fn advance(
        &mut self,
        place: usize,
        devices: &mut DeviceRing,
        now_ns: u64,
        upcalls: &mut VecDeque<Upcall>,
    ) {
        while let Some(active) = self.active[place].as_mut() {
            if active.at_device {
                return;
            }
            if active.op.is_none() {
                if active.from.is_some() && active.to.left() > 0 && self.turn_bytes == 0 {
                    self.again = true;
                    return;
                }
                active.op = active.next_op(place, self.buffers.as_ref());
            }
            let Some((device, op)) = active.op.as_mut() else {
                let error = (active.to.left() > 0).then_some(Errno::INVAL);
                self.end(place, error, upcalls);
                return;
            };
            match devices.queue(*device, op, kind::JOB, place as u64) {
                Some(Submitted::Queued) => active.at_device = true,
                Some(Submitted::RingFull | Submitted::NotReady) | None => return,
                Some(Submitted::Done(Ok(()))) => {
                    if active.from.is_some() {
                        self.turn_bytes = self.turn_bytes.saturating_sub(op.len_bytes());
                        self.first = (place + 1) % MAX_ACTIVE;
                    }
                    active.op = None;
                }
                Some(Submitted::Done(Err(errno))) => {
                    devices.count_error(*device, op, errno, now_ns);
                    self.end(place, Some(errno), upcalls);
                }
            }
        }
    }

    fn end(&mut self, place: usize, error: Option<Errno>, upcalls: &mut VecDeque<Upcall>) {
        if let Some(active) = self.active[place].take() {
            self.count -= 1;
            self.check = true;
            upcalls.push_back(Upcall::JobDone {
                job: active.job,
                error,
            });
        }
    }

    pub(crate) fn completed(
        &mut self,
        place: usize,
        result: i32,
        devices: &mut DeviceRing,
        settles: &mut Settles,
        now_ns: u64,
        upcalls: &mut VecDeque<Upcall>,
    ) {
        let Some(active) = self.active.get_mut(place).and_then(Option::as_mut) else {
            return;
        };
        let Some((device, op)) = active.op.take() else {
            return;
        };
        active.at_device = false;
        match devices.finish(device, op, result) {
            Some(Finish::Done) | None => settles.ended(device, EndedAtDevice::Job(place), upcalls),
            Some(Finish::Again(op)) => active.op = Some((device, op)),
            Some(Finish::Failed(errno)) => {
                devices.count_error(device, &op, errno, now_ns);
                settles.ended(device, EndedAtDevice::Job(place), upcalls);
                self.end(place, Some(errno), upcalls);
            }
        }
        self.advance(place, devices, now_ns, upcalls);
    }
}
