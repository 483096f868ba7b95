//! Writes of whole shared extents, which need no copy.
//!
//! **Design.** A snapshot shares the extent, so a parked write goes to a new place, which no
//! translation names yet ([`Job::Overwrite`]). After the last byte the job ends, the command parks
//! again, and the owner grants the place. If the grant names another place, or comes from another
//! owner, the command writes the extent again. **Not here:** the owner's choice between copy and
//! overwrite.

use crate::io::command::Io;
use crate::io::lanes::Lanes;
use crate::io::parked::ParkedTable;
use crate::io::slab::{MAX_IOS, Slab};
use crate::upcall::Upcall;
use forebay_device::Errno;
use forebay_nvme::Status;
use forebay_xlate::boundary::message::Job;
use forebay_xlate::reactor_side::{Lookup, Parked, access};
use forebay_xlate::{Rights, Word};
use std::collections::VecDeque;

#[derive(Clone, Copy, Debug)]
struct Overwrite {
    job: u64,
    /// The shared extent.
    parked: Parked,
    /// Its new place.
    word: Word,
    /// Bytes that are not yet submitted.
    left: u64,
    /// The command's position before the overwrite.
    cursor: u64,
    piece_at: u8,
    /// The job has ended well: the command waits for the grant.
    is_written: bool,
    /// The owner that asked for it has gone.
    is_lost: bool,
}

/// Overwrites by the commands' places in the slab; a command has one at most.
#[derive(Debug)]
pub(crate) struct Overwrites {
    of: Box<[Option<Overwrite>]>,
    count: usize,
}

impl Overwrites {
    pub(crate) fn new() -> Self {
        Self {
            of: vec![None; MAX_IOS].into(),
            count: 0,
        }
    }

    #[inline]
    pub(crate) fn any(&self) -> bool {
        self.count > 0
    }

    /// Takes a parked command that writes the whole extent. `None`: there is none.
    pub(crate) fn begin(
        &mut self,
        job: u64,
        work: Job,
        (waiting, slab, lanes): (&mut ParkedTable, &mut Slab, &Lanes),
    ) -> Option<u32> {
        let Job::Overwrite {
            volume,
            extent,
            to,
            target,
        } = work
        else {
            return None;
        };
        let word = Word::new(to, target, Rights::ReadWrite)?;
        let parked = Parked {
            volume,
            extent,
            write: true,
        };
        let shift = |io: &Io| {
            let lane = lanes.get(io.lane).filter(|lane| !lane.removed);
            lane.map(|lane| lane.volume.extent_shift)
        };
        let covers = |io: &Io| shift(io).is_some_and(|shift| io.covers(extent, shift));
        let index = waiting.take_one(parked, slab, covers)?;
        let io = &slab[index as usize];
        self.end(index as usize);
        self.count += 1;
        self.of[index as usize] = Some(Overwrite {
            job,
            parked,
            word,
            left: shift(io).map_or(0, |shift| 1 << shift),
            cursor: io.cursor,
            piece_at: io.piece_at,
            is_written: false,
            is_lost: false,
        });
        Some(index)
    }

    fn end(&mut self, index: usize) -> Option<Overwrite> {
        let ended = self.of[index].take();
        self.count -= usize::from(ended.is_some());
        ended
    }

    /// Where the command writes the rest of this extent.
    pub(crate) fn place(&self, index: usize, extent: u64) -> Option<Word> {
        let open = self.of[index].as_ref()?;
        (open.parked.extent == extent && open.left > 0).then_some(open.word)
    }

    /// `bytes` more are submitted or done.
    pub(crate) fn wrote(&mut self, index: usize, bytes: u64) {
        if let Some(open) = &mut self.of[index] {
            open.left = open.left.saturating_sub(bytes);
        }
    }

    /// Ends the job of a command without slices if all is written. It then waits for the grant.
    pub(crate) fn written(
        &mut self,
        index: usize,
        io: &Io,
        upcalls: &mut VecDeque<Upcall>,
    ) -> Option<Parked> {
        let open = self.of[index].as_mut()?;
        if open.is_written || open.left > 0 || io.status != Status::SUCCESS {
            return None;
        }
        open.is_written = true;
        let (job, error) = (open.job, None);
        upcalls.push_back(Upcall::JobDone { job, error });
        Some(open.parked)
    }

    /// The command ends.
    pub(crate) fn gave_up(&mut self, index: usize, upcalls: &mut VecDeque<Upcall>) {
        if let Some(Overwrite {
            job,
            is_written: false,
            ..
        }) = self.end(index)
        {
            let error = Some(Errno::IO);
            upcalls.push_back(Upcall::JobDone { job, error });
        }
    }

    /// The owner answered. If the granted place does not hold the data, the command writes it
    /// again.
    pub(crate) fn answered(&mut self, index: usize, io: &mut Io, lanes: &Lanes) {
        let Some(ended) = self.end(index) else {
            return;
        };
        let table = lanes.get(io.lane).map(|lane| &lane.volume.table);
        let granted = table.map(|table| access(table.lookup(ended.parked.extent), true));
        let is_there = match granted {
            Some(Lookup::Device(word)) => ended.word.same_place(word),
            _ => false,
        };
        if ended.is_lost || !is_there {
            (io.cursor, io.piece_at) = (ended.cursor, ended.piece_at);
        }
    }

    /// The owner has gone: its successor does not know these places.
    pub(crate) fn hung_up(&mut self) {
        if self.any() {
            for open in self.of.iter_mut().flatten() {
                open.is_lost = true;
            }
        }
    }
}
