//! Cursors of queues: where the next entry is taken from, or put.
//!
//! Purpose: heads, tails and phases (Base 2.0, 3.3.1), for queues of any size. Design: what a doorbell says is
//! judged before it counts; the count of entries since the queue was made never falls, and says index and phase.
//! A command is taken only when its completion has a place, so a completion queue is never full. Does NOT
//! touch memory.

/// A doorbell's value that can't be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InvalidValue;

/// A submission queue's cursors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sq {
    entries: u32,
    /// Its completion queue.
    pub cqid: u16,
    head: u32,
    tail: u32,
    taken: u64,
}

impl Sq {
    /// Of a queue from which so many commands were taken.
    pub fn new(entries: u32, cqid: u16, taken: u64) -> Self {
        let entries = entries.max(2);
        let head = (taken % u64::from(entries)) as u32;
        Self {
            entries,
            cqid,
            head,
            tail: head,
            taken,
        }
    }

    /// Its entries.
    #[inline]
    pub fn entries(&self) -> u32 {
        self.entries
    }
    /// SQ Head Pointer.
    #[inline]
    pub fn head(&self) -> u16 {
        self.head as u16
    }
    /// The tail, as last told.
    #[inline]
    pub fn tail(&self) -> u32 {
        self.tail
    }
    /// Commands taken since it was made.
    #[inline]
    pub fn taken(&self) -> u64 {
        self.taken
    }
    /// Whether there is nothing to take.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.head == self.tail
    }

    /// The tail doorbell says this.
    ///
    /// # Errors
    /// The queue isn't so long; what is waiting stays as it was.
    #[inline]
    pub fn set_tail(&mut self, tail: u32) -> Result<(), InvalidValue> {
        if tail >= self.entries {
            return Err(InvalidValue);
        }
        self.tail = tail;
        Ok(())
    }

    /// What waits in one run: the index of the first, and how many.
    #[inline]
    pub fn run(&self) -> (u32, u32) {
        let end = if self.tail < self.head {
            self.entries
        } else {
            self.tail
        };
        (self.head, end - self.head)
    }

    /// So many of the run are taken.
    #[inline]
    pub fn take(&mut self, count: u32) {
        self.taken += u64::from(count);
        self.head += count;
        if self.head >= self.entries {
            self.head -= self.entries;
        }
    }
}

/// A completion queue's cursors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cq {
    entries: u32,
    /// Its vector, if it interrupts.
    pub vector: Option<u16>,
    head: u32,
    tail: u32,
    phase: bool,
    posted: u64,
    /// Entries that the host may not have seen.
    unseen: u32,
    /// Places for commands that were taken.
    reserved: u32,
}

impl Cq {
    /// Of a queue to which so many completions were posted, of which the host has seen all up to `head` (as
    /// its doorbell says: hostile).
    pub fn new(entries: u32, vector: Option<u16>, posted: u64, head: u32) -> Self {
        let entries = entries.max(2);
        let (index, phase) = place(entries, posted);
        let head = if head < entries { head } else { index };
        Self {
            entries,
            vector,
            head,
            tail: index,
            phase,
            posted,
            unseen: (index + entries - head) % entries,
            reserved: 0,
        }
    }

    /// Its entries.
    #[inline]
    pub fn entries(&self) -> u32 {
        self.entries
    }
    /// Completions posted since it was made.
    #[inline]
    pub fn posted(&self) -> u64 {
        self.posted
    }
    /// The host's head, as last told.
    #[inline]
    pub fn head(&self) -> u32 {
        self.head
    }
    /// Commands whose completion it will get.
    #[inline]
    pub fn reserved(&self) -> u32 {
        self.reserved
    }

    /// How many more commands may be taken for it.
    #[inline]
    pub fn room(&self) -> u32 {
        (self.entries - 1).saturating_sub(self.unseen + self.reserved)
    }

    /// A command was taken whose completion goes here.
    #[inline]
    pub fn reserve(&mut self) {
        self.reserved += 1;
    }

    /// The head doorbell says this.
    ///
    /// # Errors
    /// It passes what was posted, or the queue's end.
    #[inline]
    pub fn set_head(&mut self, head: u32) -> Result<(), InvalidValue> {
        if head == self.head {
            return Ok(());
        }
        if head >= self.entries {
            return Err(InvalidValue);
        }
        let seen = (head + self.entries - self.head) % self.entries;
        self.unseen = self.unseen.checked_sub(seen).ok_or(InvalidValue)?;
        self.head = head;
        Ok(())
    }

    /// Where the next completion goes, its index and its phase tag.
    #[inline]
    pub fn next(&self) -> (u32, bool) {
        (self.tail, self.phase)
    }

    /// The completion of a command that was taken is posted there.
    #[inline]
    pub fn post(&mut self) {
        self.reserved = self.reserved.saturating_sub(1);
        self.unseen += 1;
        self.posted += 1;
        self.tail += 1;
        if self.tail == self.entries {
            self.tail = 0;
            self.phase = !self.phase;
        }
    }
}

/// Index and phase tag of the completion of this number, from 0, in a queue of so many entries.
pub fn place(entries: u32, number: u64) -> (u32, bool) {
    let entries = u64::from(entries.max(1));
    (
        (number % entries) as u32,
        (number / entries).is_multiple_of(2),
    )
}

/// The whole of a number of which the lower half is known, near another.
pub fn near(known: u64, low: u32) -> u64 {
    known.wrapping_add_signed(i64::from(low.wrapping_sub(known as u32) as i32))
}
