//! Write Zeroes and Deallocate.
//!
//! **Design.** Whole extents that may be deallocated are released: the owner unmaps them, and they
//! read as zeros. Within an extent the device punches (Deallocate) or zeroes (Write Zeroes), which
//! also frees space in a sparse file. A volume's last, partial extent is never released: the volume
//! may grow and be written there before the owner unmaps it. If the owner cannot release, Write
//! Zeroes zeroes in place. A Ceph image's extents are never released: its cluster frees what the
//! device punches. **Not here:** zero-fill of released extents (the owner's, through
//! [`crate::io::jobs`]).

use crate::io::command::{Io, IoOp, Stage};
use crate::io::submit::{NextStep, Submission};
use forebay_device::Op;
use forebay_nvme::Status;
use forebay_xlate::boundary::region::{OpKind, bump};
use forebay_xlate::drain::SliceSpan;
use forebay_xlate::reactor_side::Parked;
use forebay_xlate::{ExtentRange, Rights};

/// Words read for one release. Absent leaves do not count: most are unmapped, and the owner
/// releases only what one transaction holds.
const MAX_RELEASE_EXTENTS: u64 = 4096;
/// For fairness: a command may name the whole volume 256 times.
const BUDGET: u64 = 4096;
/// Cost of a step, in extents.
const STEP_COST: u64 = 16;
const MAX_ZERO_BYTES: u64 = 32 << 20;

pub(crate) fn range_of(bytes: &[u8], block_bytes: u64) -> Option<(u64, u64)> {
    // (Offset, bytes). NVM Command Set 3.2.3.1: context attributes (4), length in blocks (4),
    // starting LBA (8).
    let blocks = u32::from_le_bytes(bytes.get(4..8)?.try_into().ok()?);
    let lba = u64::from_le_bytes(bytes.get(8..16)?.try_into().ok()?);
    Some((
        lba.checked_mul(block_bytes)?,
        u64::from(blocks) * block_bytes,
    ))
}

impl Io {
    /// (Offset, bytes, whether to deallocate); `None` when all are done.
    fn zero_range(&self, block_bytes: u64) -> Option<(u64, u64, bool)> {
        match self.op {
            IoOp::WriteZeroes {
                offset_bytes,
                len_bytes,
                deallocate,
                ..
            } => (self.range_index == 0).then_some((offset_bytes, len_bytes, deallocate)),
            IoOp::Deallocate { ranges } if self.range_index < ranges => {
                let (offset, len) = self.deallocated(self.range_index, block_bytes)?;
                Some((offset, len, true))
            }
            _ => None,
        }
    }

    /// (Offset, bytes) of a range.
    pub(crate) fn deallocated(&self, range: u16, block_bytes: u64) -> Option<(u64, u64)> {
        let at = usize::from(range) * 16;
        let bytes = self.buffer.as_ref()?.as_slice().get(at..at + 16)?;
        range_of(bytes, block_bytes)
    }
}

impl Submission<'_> {
    pub(crate) fn zero(&mut self) -> NextStep {
        let mut budget = BUDGET;
        let block_bytes = u64::from(self.lane.volume.config.block_bytes);
        while self.io.status == Status::SUCCESS {
            if budget == 0 {
                // Continued at the end of this turn.
                return NextStep::Wait(Stage::RingWait);
            }
            budget = budget.saturating_sub(STEP_COST);
            let Some((offset, len, release)) = self.io.zero_range(block_bytes) else {
                break;
            };
            let cursor = self.io.cursor;
            if cursor >= len {
                if let IoOp::Deallocate { .. } = self.io.op {
                    // A Deallocate's end, where others are counted, does not know its ranges.
                    let ops = &self.lane.record().ops;
                    bump(&ops[OpKind::Deallocate as usize].bytes, len);
                }
                self.io.range_index += 1;
                self.io.cursor = 0;
                continue;
            }
            let end = offset.checked_add(len);
            if end.is_none_or(|end| end > self.lane.volume.config.size_bytes) {
                self.io.status = Status::LBA_OUT_OF_RANGE;
                break;
            }
            if let Some(next) = self.zero_step(offset + cursor, len - cursor, release, &mut budget)
            {
                return next;
            }
        }
        NextStep::Submitted
    }

    /// Zeroes or releases up to `left` bytes from `at`.
    fn zero_step(
        &mut self,
        at: u64,
        left: u64,
        release: bool,
        budget: &mut u64,
    ) -> Option<NextStep> {
        let volume = &self.lane.volume;
        let extent_bytes = 1u64 << volume.extent_shift;
        let (extent, within) = (at >> volume.extent_shift, at & (extent_bytes - 1));
        let word = volume.table.lookup(extent);
        if word.rights() == Some(Rights::Hole) {
            let bound = extent + (*budget).max(1).min((within + left).div_ceil(extent_bytes));
            let hole = |e: &u64| volume.table.lookup(*e).rights() == Some(Rights::Hole);
            let holes = (extent..bound).take_while(hole).count() as u64;
            *budget = budget.saturating_sub(holes);
            self.io.cursor += left.min((holes.max(1) << volume.extent_shift) - within);
            return None;
        }
        let whole = match within {
            0 => left >> volume.extent_shift,
            _ => 0,
        };
        let has_image = volume.config.image.is_some();
        if release && whole > 0 && !has_image {
            let count = volume.table.no_holes(extent, whole, MAX_RELEASE_EXTENTS);
            self.io.releasing = left.min(count << volume.extent_shift);
            return Some(NextStep::Release(ExtentRange::new(extent, count)));
        }
        match word.rights() {
            Some(Rights::ReadWrite) => {}
            // Ask for its place, or for the right to write.
            rights => {
                return Some(NextStep::Park(Parked {
                    volume: volume.id(),
                    extent,
                    write: rights.is_some(),
                }));
            }
        }
        let mut n = left.min(extent_bytes - within);
        let mut run = 1;
        while (!release || has_image)
            && n < left.min(MAX_ZERO_BYTES)
            && volume.table.lookup(extent + run) == word.advance(run)
        {
            n = left.min(n + extent_bytes);
            run += 1;
        }
        let span = SliceSpan {
            volume: volume.id(),
            range: ExtentRange::new(extent, run),
            write: true,
            number: 0,
        };
        let Some(device_at) = self.devices.offset_of(word, within) else {
            return Some(NextStep::Wait(Stage::DeviceWait));
        };
        let op = match release {
            true => Op::punch(device_at, n),
            false => Op::write_zeroes(device_at, n),
        };
        let put = self.put(word, op, span);
        self.after(put, n, true)
    }
}
