//! Write Zeroes and Deallocate.
//!
//! **Design.** Whole extents that may be given back are released: the owner revokes and unmaps them,
//! and they read as zeros. Within an extent the device punches (deallocate) or zeroes (write zeroes),
//! which for a sparse file gives the space back too. So at a volume's end within an extent: the volume
//! may have grown, and been written behind that end, by the time the owner would unmap the extent. Where
//! the owner can't release, write zeroes zeroes all the same, in place. A hole needs nothing, and nothing is allocated to be zeroed. **Not here:** laundering of released extents (the owner's, through [`super::jobs`]).

use super::Core;
use super::dispatch::Put;
use super::io::{IoOp, Stage, Token};
use crate::upcall::Upcall;
use forebay_device::Op;
use forebay_nvme::Status;
use forebay_xlate::boundary::region::{OpKind, bump};
use forebay_xlate::drain::SliceSpan;
use forebay_xlate::reactor_side::Parked;
use forebay_xlate::{ExtentRange, Rights};

/// The most words that are read for one release. Absent leaves of the table are not counted: most of them are unmapped,
/// and the owner releases only as many mapped extents as one transaction holds.
const MAX_RELEASE_EXTENTS: u64 = 4096;
/// Extents looked at in one go: a command may name the whole volume 256 times, and others have a right
/// to a turn.
const BUDGET: u64 = 4096;
/// What a step costs besides the extents that it looks at.
const STEP_COST: u64 = 16;
/// The longest piece that a device is asked to zero at once.
const MAX_ZERO_BYTES: u64 = 32 << 20;

/// (Offset, bytes) of a Dataset Management range.
pub(super) fn range_of(bytes: &[u8], block_bytes: u64) -> Option<(u64, u64)> {
    // NVM Command Set 3.2.3.1: context attributes (4), length in blocks (4), starting LBA (8).
    let blocks = u32::from_le_bytes(bytes.get(4..8)?.try_into().ok()?);
    let lba = u64::from_le_bytes(bytes.get(8..16)?.try_into().ok()?);
    Some((
        lba.checked_mul(block_bytes)?,
        u64::from(blocks) * block_bytes,
    ))
}

impl Core {
    /// The present range (offset, bytes) of a command; `None` when all are done.
    fn zero_range(&self, i: usize, block_bytes: u64) -> Option<(u64, u64, bool)> {
        let io = &self.ios[i];
        match io.op {
            IoOp::WriteZeroes {
                offset_bytes,
                len_bytes,
                deallocate,
                ..
            } => (io.range_index == 0).then_some((offset_bytes, len_bytes, deallocate)),
            IoOp::Deallocate { ranges } if io.range_index < ranges => {
                let (offset, len) = self.deallocated(i, io.range_index, block_bytes)?;
                Some((offset, len, true))
            }
            _ => None,
        }
    }

    /// A range (offset, bytes) of a Deallocate.
    pub(super) fn deallocated(&self, i: usize, range: u16, block_bytes: u64) -> Option<(u64, u64)> {
        let at = usize::from(range) * 16;
        let bytes = self.ios[i].buffer.as_ref()?.as_slice().get(at..at + 16)?;
        range_of(bytes, block_bytes)
    }

    pub(super) fn zero(&mut self, token: Token) {
        let i = token.index();
        let mut budget = BUDGET;
        while self.ios[i].status == Status::SUCCESS {
            if budget == 0 {
                // Taken up again at the end of this turn.
                self.set_aside(token, Stage::RingWait);
                return;
            }
            budget = budget.saturating_sub(STEP_COST);
            let io = &self.ios[i];
            let Some(lane) = self.lanes[io.lane.0 as usize].as_ref() else {
                self.ios[i].status = Status::INVALID_NAMESPACE_OR_FORMAT;
                break;
            };
            let volume = lane.volume.clone();
            let Some((offset, len, release)) =
                self.zero_range(i, u64::from(volume.config.block_bytes))
            else {
                break;
            };
            let cursor = io.cursor;
            if cursor >= len {
                if let IoOp::Deallocate { .. } = io.op {
                    // Its ranges are not known where a command's end is counted.
                    bump(&lane.record().ops[OpKind::Deallocate as usize].bytes, len);
                }
                self.ios[i].range_index += 1;
                self.ios[i].cursor = 0;
                continue;
            }
            if offset
                .checked_add(len)
                .is_none_or(|end| end > volume.config.size_bytes)
            {
                self.ios[i].status = Status::LBA_OUT_OF_RANGE;
                break;
            }
            let extent_bytes = 1u64 << volume.extent_shift;
            let at = offset + cursor;
            let left = len - cursor;
            let (extent, within) = (at >> volume.extent_shift, at & (extent_bytes - 1));
            let whole = if within != 0 {
                0
            } else {
                left >> volume.extent_shift
            };
            let word = volume.table.lookup(extent);
            if word.rights() == Some(Rights::Hole) {
                // As many as there are together, up to a bound.
                let bound = extent + budget.max(1).min((within + left).div_ceil(extent_bytes));
                let hole = |e: &u64| volume.table.lookup(*e).rights() == Some(Rights::Hole);
                let holes = (extent..bound).take_while(hole).count() as u64;
                budget = budget.saturating_sub(holes);
                self.ios[i].cursor += left.min((holes.max(1) << volume.extent_shift) - within);
                continue;
            }
            if release && whole > 0 {
                let count = volume.table.no_holes(extent, whole, MAX_RELEASE_EXTENTS);
                self.ios[i].releasing = left.min(count << volume.extent_shift);
                let generation = self.ios[i].generation;
                self.upcalls.push_back(Upcall::Release {
                    io: i as u32,
                    generation,
                    volume: volume.id(),
                    range: ExtentRange::new(extent, count),
                });
                self.set_aside(token, Stage::Releasing);
                return;
            }
            match word.rights() {
                Some(Rights::ReadWrite) => {}
                rights => {
                    // Unknown: ask where it is. Read-only: ask for the right to change it.
                    let parked = Parked {
                        volume: volume.id(),
                        extent,
                        write: rights.is_some(),
                    };
                    self.park(token, parked);
                    return;
                }
            }
            let mut n = left.min(extent_bytes - within);
            let mut run = 1;
            while !release
                && n < left.min(MAX_ZERO_BYTES)
                && volume.table.lookup(extent + run) == word.advance(run)
            {
                n = left.min(n + extent_bytes);
                run += 1;
            }
            let Some(device_at) = self.device_offset(word, within) else {
                self.set_aside(token, Stage::DeviceWait);
                return;
            };
            let op = if release {
                Op::punch(device_at, n)
            } else {
                Op::write_zeroes(device_at, n)
            };
            let span = SliceSpan {
                volume: volume.id(),
                range: ExtentRange::new(extent, run),
                write: true,
                number: 0,
            };
            match self.put(i, word, op, span) {
                Put::Ok => {
                    self.ios[i].cursor += n;
                }
                Put::NoRoom => {
                    self.set_aside(token, Stage::RingWait);
                    return;
                }
                Put::NoSlice => {
                    self.set_aside(token, Stage::SliceWait);
                    return;
                }
                Put::NoDevice => {
                    self.set_aside(token, Stage::DeviceWait);
                    return;
                }
                Put::Failed(errno) => self.device_failed(i, errno, true),
                Put::NoMemory => self.ios[i].status = Status::INTERNAL_ERROR,
            }
        }
        self.moved(token);
    }
}
