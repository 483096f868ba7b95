//! Starts commands whose bytes lie in a VM's memory.
//!
//! **Design.** Most commands on a device in memory, or on one that stores nothing, end at once,
//! without a place in the slab ([`Core::at_once`]). **Not here:** the devices' access
//! ([`crate::io::guest_memory`]).

#![allow(unsafe_code)]

use super::Core;
use crate::io::command::{IoOp, NewIo};
use crate::io::fused::Expected;
use crate::io::staging::MAX_TRANSFER_BYTES;
use crate::lane::LaneIndex;
use forebay_guest::Pieces;
use forebay_nvme::Status;
use forebay_nvme::reservation::Access;
use forebay_qos::cost::Operation;
use forebay_xlate::reactor_side::{self, access};

impl Core {
    /// Completes a read or write at once, if its device needs no ring, one extent covers it, and it
    /// waits for nothing. False: start it normally, also after an error, which is counted there.
    #[inline]
    pub(crate) fn at_once(&mut self, lane: LaneIndex, op: &IoOp, pieces: &Pieces) -> bool {
        let (offset, len_bytes, write) = match *op {
            IoOp::Read {
                offset_bytes,
                len_bytes,
            } => (offset_bytes, len_bytes, false),
            IoOp::Write {
                offset_bytes,
                len_bytes,
                fua: false,
            } => (offset_bytes, len_bytes, true),
            _ => return false,
        };
        let fits = len_bytes == pieces.len_bytes() && (write || pieces.is_writable());
        if !fits || self.recovered.any() || self.vms.moved_enough(lane) {
            return false;
        }
        let Some(of) = self.lanes.get(lane) else {
            return false;
        };
        if self.offload.is_helped() {
            let waits = self.qos.waits_for_processor(lane);
            let moved_any = self.vms.moved_any(lane);
            let in_flight = self.slices.in_flight();
            if (self.offload.helper(of, 0, in_flight, moved_any, waits)).is_some() {
                return false;
            }
        }
        let volume = &of.volume;
        let (extent, extent_bytes) = (offset >> volume.extent_shift, 1 << volume.extent_shift);
        let within = offset & (extent_bytes - 1);
        let is_let = of.vm_access == Access::ALL && !of.removed;
        if !is_let || within + u64::from(len_bytes) > extent_bytes {
            return false;
        }
        let reactor_side::Lookup::Device(word) = access(volume.table.lookup(extent), write) else {
            return false;
        };
        let Some(served) = self.devices.get(word.device().0) else {
            return false;
        };
        let config = &served.config;
        if word.extent().0 >= config.extents {
            return false;
        }
        let at =
            config.data_offset_bytes + word.extent().0 * u64::from(config.extent_bytes) + within;
        let Some(now) = served.device.now(at, len_bytes) else {
            return false;
        };
        let operation = match write {
            true => Operation::Write,
            false => Operation::Read,
        };
        if !self.qos.admit(lane, operation, len_bytes) {
            return false;
        }
        // SAFETY: `pieces` holds them and outlives this. For a read they are writable, as was
        // checked above.
        let bufs = pieces.slices().iter().map(|slice| unsafe { slice.buf() });
        if now.transfer(write, bufs).is_err() {
            return false;
        }
        self.vms.moves(lane, len_bytes);
        if self.offload.spreads() {
            self.offload.began(true);
        }
        true
    }

    /// Begins a VM's command. Its bytes lie in pieces (writable for a read), or in a buffer from
    /// its frontend. It comes back once, through [`Core::next_ended`], without buffer. It fails if
    /// longer than [`MAX_TRANSFER_BYTES`] or its pieces.
    ///
    /// # Errors
    /// The command, if there is no room now; its pieces are unchanged.
    pub(crate) fn start_vm_io(&mut self, mut new: NewIo, pieces: &mut Pieces) -> Result<(), NewIo> {
        if self.lanes.keeps_vms_from(new.lane, &new.op) {
            pieces.clear();
            self.refuse(new, Status::RESERVATION_CONFLICT.with_dnr());
            return Ok(());
        }
        let len_bytes = match new.op {
            IoOp::Read { len_bytes, .. } | IoOp::Write { len_bytes, .. } => {
                return self.start_direct(new, pieces, len_bytes);
            }
            IoOp::Compare { len_bytes, .. } => len_bytes,
            IoOp::Deallocate { ranges } => u32::from(ranges) * 16,
            IoOp::Flush | IoOp::WriteZeroes { .. } | IoOp::CompareAndWrite { .. } => 0,
        };
        if !self.may_start(new.lane) {
            return Err(new);
        }
        let has_bytes = len_bytes <= MAX_TRANSFER_BYTES.min(pieces.len_bytes());
        if new.buffer.is_none() && !has_bytes {
            pieces.clear();
            self.refuse(new, Status::INTERNAL_ERROR);
            return Ok(());
        }
        let copies = len_bytes > 0 && new.buffer.is_none();
        if copies {
            let Some(mut buffer) = self.staging.allocate(len_bytes) else {
                return Err(new);
            };
            // The length was checked above.
            let _ = pieces.read(0, buffer.as_mut_slice());
            new.buffer = Some(buffer);
        }
        let (lane, compares) = (new.lane, matches!(new.op, IoOp::Compare { .. }));
        let started = match compares {
            true => self.start_comparing(new, Expected::default()),
            false => self.start(new),
        };
        match started {
            Ok(()) if copies && compares => self.lanes.count_copied(lane, len_bytes),
            Ok(()) => {}
            Err(mut new) => {
                if copies && let Some(buffer) = new.buffer.take() {
                    self.staging.release(buffer);
                }
                return Err(new);
            }
        }
        pieces.clear();
        Ok(())
    }

    #[inline]
    fn start_direct(
        &mut self,
        new: NewIo,
        pieces: &mut Pieces,
        len_bytes: u32,
    ) -> Result<(), NewIo> {
        if !self.may_start(new.lane) {
            return Err(new);
        }
        if self.recovered.any() {
            self.end_orphans();
        }
        let Some(index) = self.slab.allocate() else {
            return Err(new);
        };
        // A command without enough memory fails.
        let fits = len_bytes <= MAX_TRANSFER_BYTES.min(pieces.len_bytes())
            && (pieces.is_writable() || !matches!(new.op, IoOp::Read { .. }));
        let count = match fits {
            true => self.vms.hold_pieces(index as usize, pieces),
            false => 0,
        };
        pieces.clear();
        self.begin(new, index, count);
        Ok(())
    }
}
