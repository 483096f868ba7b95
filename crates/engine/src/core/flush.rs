//! FLUSH, and the tail of FUA: devices first, then the owner's commit.
//!
//! **Design.** A device has at most one flush running in a reactor; whoever asks while it runs waits
//! for the next one, which all of them share, so flushes of many tenants are merged. A flush covers
//! the devices that the volume was ever let write to, and no others: one that is missing, failed or
//! not yet fenced holds up only those who have data there. They wait for it as any command does that
//! needs it, and for the flush itself, [`super::OWNER_WAIT_LIMIT_NS`] in all, and then end with Command
//! Interrupted, which the host may retry. A volume with nothing uncommitted ends here, without the daemon (`shared/design.md`,
//! "Order of durability").
//!
//! **Not here:** the internal lane's flushes are jobs, but share the running flush.

use super::io::{Stage, Token};
use super::settle::Ended;
use super::{Core, MAX_IOS, kind};
use crate::upcall::Upcall;
use forebay_device::{Errno, Finish, Op, Submitted};
use forebay_nvme::Status;
use forebay_xlate::DeviceIndex;

/// Who waits for a device's flush.
#[derive(Clone, Copy, Debug)]
pub(super) enum Waiter {
    /// A command of the slab.
    Io(u32),
    /// A job of the internal lane.
    Job(u64),
}

#[derive(Debug)]
pub(super) enum Running {
    No,
    /// To be submitted when the ring has room.
    Wanted,
    /// At the device.
    Yes(Op),
}

#[derive(Debug)]
struct DeviceFlush {
    running: Running,
    now: Vec<Waiter>,
    next: Vec<Waiter>,
}

/// Each device's flush.
#[derive(Debug)]
pub(super) struct Flusher {
    devices: Vec<DeviceFlush>,
    retry: bool,
}

impl Flusher {
    pub(super) fn new() -> Self {
        let each = |_| DeviceFlush {
            running: Running::No,
            now: Vec::new(),
            next: Vec::new(),
        };
        Self {
            devices: (0..256).map(each).collect(),
            retry: false,
        }
    }

    /// Whether any flush is running or wanted.
    pub(super) fn is_busy(&self) -> bool {
        let idle = |flush: &DeviceFlush| matches!(flush.running, Running::No);
        !self.devices.iter().all(idle)
    }

    /// How far a device's flush is.
    pub(super) fn running(&self, device: DeviceIndex) -> &Running {
        &self.devices[usize::from(device.0)].running
    }
}

impl Core {
    /// Starts flushing for a command whose data is written.
    pub(super) fn begin_flush(&mut self, token: Token) {
        let i = token.index();
        let io = &mut self.ios[i];
        if io.status != Status::SUCCESS {
            self.finish(token);
            return;
        }
        let Some(lane) = self.lanes[io.lane.0 as usize].as_ref() else {
            io.status = Status::INVALID_NAMESPACE_OR_FORMAT;
            self.finish(token);
            return;
        };
        // Before the devices are chosen and flushed: what is granted later is not this command's
        // business.
        let commit = lane.volume.uncommitted();
        let written = lane.volume.written_devices();
        let served = |d: DeviceIndex| self.devices[usize::from(d.0)].is_some();
        if !written.clone().all(served) {
            self.set_aside(token, Stage::DeviceWait);
            return;
        }
        let io = &mut self.ios[i];
        io.commit = commit;
        io.stage = Stage::Flushing;
        io.flushes = 1;
        let index = token.entrust();
        for device in written {
            self.ios[i].flushes += 1;
            self.ask_flush(usize::from(device.0), Waiter::Io(index));
        }
        self.flushed(index, None);
    }

    /// Asks for a flush of a device that begins after now.
    pub(super) fn ask_flush(&mut self, device: usize, waiter: Waiter) {
        let flush = &mut self.flusher.devices[device];
        for list in [&mut flush.now, &mut flush.next] {
            if list.capacity() == 0 {
                // Once for each device, when it is first flushed: not per command.
                list.reserve_exact(MAX_IOS + 64);
            }
        }
        match flush.running {
            Running::No => {
                flush.now.push(waiter);
                self.run_flush(device);
            }
            Running::Wanted => flush.now.push(waiter),
            Running::Yes(_) => flush.next.push(waiter),
        }
    }

    fn run_flush(&mut self, device: usize) {
        let Some(served) = self.devices[device].as_ref() else {
            return;
        };
        let mut op = Op::flush();
        let submitted = served.device.submit(
            &mut self.ring,
            &mut op,
            kind::FLUSH << kind::SHIFT | device as u64,
        );
        let flush = &mut self.flusher.devices[device];
        match submitted {
            Submitted::Queued => flush.running = Running::Yes(op),
            Submitted::RingFull => {
                flush.running = Running::Wanted;
                self.flusher.retry = true;
            }
            Submitted::Done(result) => self.flush_ended(device, result.err()),
        }
    }

    pub(super) fn retry_flushes(&mut self) {
        if std::mem::take(&mut self.flusher.retry) {
            for device in 0..256 {
                if matches!(self.flusher.devices[device].running, Running::Wanted) {
                    self.run_flush(device);
                }
            }
        }
    }

    pub(super) fn flush_completed(&mut self, device: usize, result: i32) {
        let Some(Running::Yes(op)) = self.flusher.devices.get(device).map(|f| &f.running) else {
            return;
        };
        let Some(served) = self.devices[device].as_ref() else {
            return;
        };
        match served.device.finish(*op, result) {
            Finish::Done => self.flush_ended(device, None),
            Finish::Failed(errno) => self.flush_ended(device, Some(errno)),
            Finish::Again(_) => self.run_flush(device),
        }
    }

    fn flush_ended(&mut self, device: usize, error: Option<Errno>) {
        if let Some(errno) = error {
            self.count_error(device as u8, &Op::flush(), errno);
        }
        self.settled(device as u8, Ended::Flush);
        let flush = &mut self.flusher.devices[device];
        flush.running = Running::No;
        let mut ended = std::mem::take(&mut flush.now);
        flush.now = std::mem::take(&mut flush.next);
        if !flush.now.is_empty() {
            self.run_flush(device);
        }
        for waiter in ended.drain(..) {
            match waiter {
                Waiter::Io(index) => self.flushed(index, error),
                Waiter::Job(job) => self.upcalls.push_back(Upcall::JobDone { job, error }),
            }
        }
        let flush = &mut self.flusher.devices[device];
        if flush.next.capacity() == 0 {
            flush.next = ended;
        } else if flush.now.capacity() == 0 {
            flush.now = ended;
        }
    }

    /// Ends commands whose devices have not flushed in time: a FLUSH has nothing that a device could
    /// still touch, and may be tried again.
    pub(super) fn tick_flushes(&mut self, now: u64) {
        if !self.flusher.is_busy() {
            return;
        }
        for index in 0..self.ios.len() as u32 {
            let io = &mut self.ios[index as usize];
            if io.stage != Stage::Flushing || io.deadline_ns > now {
                continue;
            }
            io.flushes = 0;
            for flush in &mut self.flusher.devices {
                for list in [&mut flush.now, &mut flush.next] {
                    list.retain(|waiter| !matches!(waiter, Waiter::Io(other) if *other == index));
                }
            }
            self.fail(Token::take(index), Status::COMMAND_INTERRUPTED);
        }
    }

    /// One of a command's device flushes ended.
    fn flushed(&mut self, index: u32, error: Option<Errno>) {
        if let Some(errno) = error {
            self.device_failed(index as usize, errno, true);
        }
        let io = &mut self.ios[index as usize];
        io.flushes -= 1;
        if io.flushes > 0 {
            return;
        }
        let token = Token::take(index);
        let (lane, commit) = (io.lane, io.commit);
        let ok = io.status == Status::SUCCESS;
        let Some(lane) = self.lanes[lane.0 as usize].as_mut() else {
            self.finish(token);
            return;
        };
        if !ok || lane.volume.is_committed(commit) {
            self.finish(token);
            return;
        }
        if lane.commit_asked < commit {
            lane.commit_asked = commit;
            let volume = lane.volume.id();
            self.upcalls.push_back(Upcall::CommitWanted {
                volume,
                sequence: commit,
            });
        }
        self.set_aside(token, Stage::Committing);
    }
}
