//! Head, tail and phase of queues (Base 2.0, 3.3.1); queue memory is elsewhere.
//!
//! Doorbell values are validated. Entry counts since creation only grow and determine index and
//! phase. A command is taken only if its completion has room, so completion queues never fill up.

/// An impossible doorbell value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InvalidValue;

/// Cursors of a submission queue.
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
    /// A queue after `taken` commands.
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

    /// Queue size.
    #[inline]
    pub fn entries(&self) -> u32 {
        self.entries
    }
    /// SQ head pointer.
    #[inline]
    pub fn head(&self) -> u16 {
        self.head as u16
    }
    /// The last tail doorbell value.
    #[inline]
    pub fn tail(&self) -> u32 {
        self.tail
    }
    /// Commands taken since creation.
    #[inline]
    pub fn taken(&self) -> u64 {
        self.taken
    }
    /// Whether no command waits.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.head == self.tail
    }

    /// Applies a tail doorbell. On error nothing changes.
    #[inline]
    pub fn set_tail(&mut self, tail: u32) -> Result<(), InvalidValue> {
        if tail >= self.entries {
            return Err(InvalidValue);
        }
        self.tail = tail;
        Ok(())
    }

    /// The first contiguous run of commands: index and length.
    #[inline]
    pub fn run(&self) -> (u32, u32) {
        let end = if self.tail < self.head {
            self.entries
        } else {
            self.tail
        };
        (self.head, end - self.head)
    }

    /// Takes `count` commands of the run.
    #[inline]
    pub fn consume(&mut self, count: u32) {
        self.taken += u64::from(count);
        self.head += count;
        if self.head >= self.entries {
            self.head -= self.entries;
        }
    }
}

/// Cursors of a completion queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cq {
    entries: u32,
    /// Its interrupt vector, if any.
    pub vector: Option<u16>,
    head: u32,
    tail: u32,
    phase: bool,
    posted: u64,
    /// Entries that the host may not have seen.
    unseen: u32,
    /// Room for commands taken.
    reserved: u32,
}

impl Cq {
    /// A queue after `posted` completions. `head` is the host's doorbell value, which is untrusted.
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

    /// Queue size.
    #[inline]
    pub fn entries(&self) -> u32 {
        self.entries
    }
    /// Completions posted since creation.
    #[inline]
    pub fn posted(&self) -> u64 {
        self.posted
    }
    /// The last head doorbell value.
    #[inline]
    pub fn head(&self) -> u32 {
        self.head
    }
    /// Commands whose completions are due.
    #[inline]
    pub fn reserved(&self) -> u32 {
        self.reserved
    }

    /// Commands that may still be taken.
    #[inline]
    pub fn room(&self) -> u32 {
        (self.entries - 1).saturating_sub(self.unseen + self.reserved)
    }

    /// Reserves room for a command's completion.
    #[inline]
    pub fn reserve(&mut self) {
        self.reserved += 1;
    }

    /// Applies a head doorbell. It must not pass the last posted entry.
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

    /// Index and phase tag of the next completion.
    #[inline]
    pub fn next(&self) -> (u32, bool) {
        (self.tail, self.phase)
    }

    /// Posts a reserved completion.
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

/// Index and phase tag of completion `number`, from 0.
pub fn place(entries: u32, number: u64) -> (u32, bool) {
    let entries = u64::from(entries.max(1));
    (
        (number % entries) as u32,
        (number / entries).is_multiple_of(2),
    )
}

/// The number near `known` with these lower 32 bits.
pub fn near(known: u64, low: u32) -> u64 {
    known.wrapping_add_signed(i64::from(low.wrapping_sub(known as u32) as i32))
}
