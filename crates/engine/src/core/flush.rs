//! FLUSH, and the end of FUA: devices first, then the owner's commit.
//!
//! **Design.** A flush covers only devices that its volume was ever allowed to write to, so a
//! missing or failed one delays no other volume. Without uncommitted mappings it ends without the
//! daemon (the owner protocol's order of durability). **Not here:** merged flushes
//! ([`crate::io::flush`]).

use super::Core;
use crate::io::command::{Stage, Token};
use crate::io::flush::Waiter;
use crate::io::settle::EndedAtDevice;
use crate::upcall::Upcall;
use forebay_device::{Errno, Op};
use forebay_nvme::Status;

impl Core {
    pub(super) fn begin_flush(&mut self, token: Token) {
        let i = token.index();
        let io = &mut self.slab[i];
        if io.status != Status::SUCCESS {
            self.finish(token);
            return;
        }
        let Some(lane) = self.lanes.get(io.lane) else {
            io.status = Status::INVALID_NAMESPACE_OR_FORMAT;
            self.finish(token);
            return;
        };
        // Read first: later grants do not concern this command.
        let commit = lane.volume.uncommitted();
        let written = lane.volume.written_devices();
        if !self.devices.has_all(written.clone()) {
            (self.waits).push(token, Stage::DeviceWait, &mut self.slab, &self.clock);
            return;
        }
        let io = &mut self.slab[i];
        io.commit = commit;
        io.stage = Stage::Flushing;
        io.flushes = 1;
        let index = token.entrust();
        for device in written {
            self.slab[i].flushes += 1;
            let waiter = Waiter::Io(index);
            if let Some(result) = self.flusher.ask(device.0, waiter, &mut self.devices) {
                self.flush_ended(device.0, result);
            }
        }
        self.flushed(index, Ok(()));
    }

    pub(super) fn flush_ended(&mut self, device: u8, result: Result<(), Errno>) {
        if let Err(errno) = result {
            let now_ns = self.clock.now_ns;
            (self.devices).count_error(device, &Op::flush(), errno, now_ns);
        }
        (self.settles).ended(device, EndedAtDevice::Flush, &mut self.upcalls);
        let (mut ended, next) = self.flusher.ended(device, &mut self.devices);
        if let Some(result) = next {
            self.flush_ended(device, result);
        }
        for waiter in ended.drain(..) {
            match waiter {
                Waiter::Io(index) => self.flushed(index, result),
                Waiter::Job(job) => self.upcalls.push_back(Upcall::JobDone {
                    job,
                    error: result.err(),
                }),
            }
        }
        self.flusher.keep(device, ended);
    }

    fn flushed(&mut self, index: u32, result: Result<(), Errno>) {
        let io = &mut self.slab[index as usize];
        if let Err(errno) = result {
            io.device_failed(errno, true, self.lanes.get(io.lane));
        }
        io.flushes -= 1;
        if io.flushes > 0 {
            return;
        }
        let token = Token::of(index);
        let (lane, commit) = (io.lane, io.commit);
        let ok = io.status == Status::SUCCESS;
        let Some(lane) = self.lanes.get_mut(lane) else {
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
        (self.waits).push(token, Stage::Committing, &mut self.slab, &self.clock);
    }
}
