//! Takes a command from step to step. A step returns the next one ([`NextStep`]). **Not here:** slices
//! ([`crate::io::submit`]), flushes ([`crate::io::flush`]).

use super::Core;
use crate::io::command::{IoOp, Stage, Token};
use crate::io::settle::EndedAtDevice;
use crate::io::submit::{CommandTransfer, NextStep, Submission};
use crate::upcall::Upcall;
use forebay_device::Errno;
use forebay_nvme::Status;
use forebay_xlate::kill_point;

impl Core {
    pub(super) fn dispatch(&mut self, token: Token) {
        let i = token.index();
        let io = &mut self.slab[i];
        let lane = self.lanes.get_mut(io.lane);
        let Some(lane) = lane.filter(|lane| !lane.removed) else {
            // The volume may have another export by now.
            self.fail(token, Status::INVALID_NAMESPACE_OR_FORMAT);
            return;
        };
        let transfer = match io.op {
            IoOp::Flush => return self.begin_flush(token),
            IoOp::WriteZeroes { .. } | IoOp::Deallocate { .. } => None,
            IoOp::Compare { .. } | IoOp::CompareAndWrite { .. } => match self.fused.next(i, io) {
                Some(transfer) => Some(transfer),
                None => {
                    self.begin_flush(token);
                    if self.slab[i].stage == Stage::Flushing {
                        kill_point!("fused.flushing");
                    }
                    return;
                }
            },
            op => CommandTransfer::of(&op),
        };
        let mut submission = Submission {
            index: i,
            io,
            lane,
            devices: &mut self.devices,
            slices: &mut self.slices,
            offload: &mut self.offload,
            vms: &mut self.vms,
            staging: &mut self.staging,
            qos: &mut self.qos,
            overwrites: &mut self.overwrites,
            records: &self.records,
            now_ns: self.clock.now_ns,
        };
        let next = match transfer {
            Some(transfer) => submission.transfer(transfer),
            None => submission.zero(),
        };
        match next {
            NextStep::Submitted => self.after_slices(token),
            NextStep::Park(parked) => self.parked.park(
                token,
                parked,
                &mut self.slab,
                &self.lanes,
                self.clock.now_ns,
                &mut self.upcalls,
            ),
            NextStep::Wait(stage) => (self.waits).push(token, stage, &mut self.slab, &self.clock),
            NextStep::Release(range) => {
                let Some(volume) = self.lanes.volume_of(&self.slab[i]) else {
                    return self.fail(token, Status::INVALID_NAMESPACE_OR_FORMAT);
                };
                self.upcalls.push_back(Upcall::Release {
                    io: i as u32,
                    generation: self.slab[i].generation,
                    volume,
                    range,
                });
                (self.waits).push(token, Stage::Releasing, &mut self.slab, &self.clock);
            }
        }
    }

    pub(super) fn slice_ended(&mut self, index: usize, result: Result<(), Errno>) {
        let Some(slice) = self.slices.end(index) else {
            return;
        };
        let now_ns = self.clock.now_ns;
        self.devices.ended(slice.device, now_ns);
        if slice.begun_ns != 0 {
            self.qos.slice_ended(&slice, result.is_ok(), now_ns);
        }
        let io = &mut self.slab[slice.io as usize];
        if slice.bounced {
            let into = result.is_ok() && !slice.span.write;
            (self.vms).bounce_ended(index, io.lane, into, &mut self.staging);
        }
        if let Err(errno) = result {
            (self.devices).count_error(slice.device, &slice.op, errno, now_ns);
        }
        self.slices.drained(&slice.span, &mut self.upcalls);
        let ended = EndedAtDevice::Slice(slice.span.number);
        (self.settles).ended(slice.device, ended, &mut self.upcalls);
        io.slices -= 1;
        self.waits.slices_freed = true;
        if let Some(lane) = self.lanes.get_mut(io.lane) {
            lane.slices -= 1;
        }
        if let Err(errno) = result {
            io.device_failed(errno, slice.span.write, self.lanes.get(io.lane));
        }
        // Otherwise it checks the count when it resumes.
        if io.slices == 0 && io.stage == Stage::AtDevices {
            self.after_slices(Token::of(slice.io));
        }
    }

    pub(super) fn after_slices(&mut self, token: Token) {
        let io = &mut self.slab[token.index()];
        if io.slices > 0 {
            io.stage = Stage::AtDevices;
            token.entrust();
            return;
        }
        if self.overwrites.any()
            && let Some(parked) = (self.overwrites).written(token.index(), io, &mut self.upcalls)
        {
            return self.parked.park(
                token,
                parked,
                &mut self.slab,
                &self.lanes,
                self.clock.now_ns,
                &mut self.upcalls,
            );
        }
        let fua = match io.op {
            IoOp::Write { fua, .. } | IoOp::WriteZeroes { fua, .. } => fua,
            _ => false,
        };
        let zeroed = matches!(io.op, IoOp::WriteZeroes { .. });
        let lane = io.lane;
        if io.status == Status::SUCCESS
            && fua
            && (self.lanes.get(lane)).is_some_and(|l| zeroed || l.volume.uncommitted() != 0)
        {
            self.begin_flush(token);
        } else {
            self.finish(token);
        }
    }
}
