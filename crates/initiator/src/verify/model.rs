//! The versions that each block may hold.
//!
//! A block's writes are numbered, with at most one in flight. *Issued* is the newest,
//! *acknowledged* the newest that must be there now, *flushed* the newest that must survive
//! anything. A flush covers blocks acknowledged before its submission.

/// The data that survives the target's death.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Promise {
    /// Acknowledged writes: only processes die, not the target's cache.
    Acknowledged,
    /// Flushed data, as a volatile write cache allows (Base 5.27.1.4).
    Flushed,
}

#[derive(Debug)]
pub(crate) struct Model {
    promise: Promise,
    issued: Vec<u32>,
    acknowledged: Vec<u32>,
    flushed: Vec<u32>,
    in_flight: Vec<u64>,
    /// Acknowledged since the last flush was submitted, each once.
    unflushed: Vec<u32>,
    is_unflushed: Vec<u64>,
    /// Covered by the flush in flight: block, version.
    flushing: Vec<(u32, u32)>,
}

impl Model {
    pub(crate) fn new(blocks: u32, promise: Promise) -> Self {
        let n = blocks as usize;
        Self {
            promise,
            issued: vec![0; n],
            acknowledged: vec![0; n],
            flushed: vec![0; n],
            in_flight: vec![0; n.div_ceil(64)],
            unflushed: Vec::new(),
            is_unflushed: vec![0; n.div_ceil(64)],
            flushing: Vec::new(),
        }
    }

    pub(crate) fn blocks(&self) -> u32 {
        self.issued.len() as u32
    }

    pub(crate) fn is_in_flight(&self, block: u32) -> bool {
        self.in_flight[block as usize / 64] >> (block % 64) & 1 != 0
    }

    pub(crate) fn issued(&self, block: u32) -> u32 {
        self.issued[block as usize]
    }

    pub(crate) fn acknowledged(&self, block: u32) -> u32 {
        self.acknowledged[block as usize]
    }

    pub(crate) fn flushed(&self, block: u32) -> u32 {
        self.flushed[block as usize]
    }

    /// Returns the version. The block must not be in flight.
    pub(crate) fn issue(&mut self, block: u32) -> u32 {
        self.in_flight[block as usize / 64] |= 1 << (block % 64);
        self.issued[block as usize] += 1;
        self.issued[block as usize]
    }

    /// A failed write may or may not be there.
    pub(crate) fn end(&mut self, block: u32, well: bool) {
        self.in_flight[block as usize / 64] &= !(1 << (block % 64));
        if well {
            self.acknowledged[block as usize] = self.issued[block as usize];
            self.note_unflushed(block);
        }
    }

    /// At most one is in flight.
    pub(crate) fn flush_begins(&mut self) {
        self.is_unflushed.fill(0);
        for block in self.unflushed.drain(..) {
            let version = self.acknowledged[block as usize];
            self.flushing.push((block, version));
        }
    }

    pub(crate) fn flush_ends(&mut self, well: bool) {
        for (block, version) in std::mem::take(&mut self.flushing) {
            if well {
                let flushed = &mut self.flushed[block as usize];
                *flushed = version.max(*flushed);
            } else {
                self.note_unflushed(block);
            }
        }
    }

    fn note_unflushed(&mut self, block: u32) {
        let (word, bit) = (block as usize / 64, 1 << (block % 64));
        if self.is_unflushed[word] & bit == 0 {
            self.is_unflushed[word] |= bit;
            self.unflushed.push(block);
        }
    }

    /// Writes stay in flight, because they are repeated.
    pub(crate) fn connection_lost(&mut self) {
        self.flush_ends(false);
        if self.promise == Promise::Flushed {
            self.unflushed.clear();
            self.is_unflushed.fill(0);
            self.acknowledged.clone_from(&self.flushed);
        }
    }

    /// Later reads must not be older.
    pub(crate) fn seen(&mut self, block: u32, version: u32) {
        let acknowledged = &mut self.acknowledged[block as usize];
        if version > *acknowledged {
            *acknowledged = version;
            self.note_unflushed(block);
        }
    }

    pub(crate) fn touched(&self) -> u64 {
        self.issued.iter().filter(|&&version| version > 0).count() as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flush_covers_writes_acknowledged_before_it() {
        let mut model = Model::new(100, Promise::Flushed);
        for block in [1, 2] {
            assert_eq!(model.issue(block), 1);
        }
        model.end(1, true);
        model.flush_begins();
        model.end(2, true);
        assert_eq!(model.issue(1), 2);
        model.end(1, true);
        model.flush_ends(true);
        assert_eq!((model.flushed(1), model.acknowledged(1)), (1, 2));
        assert_eq!((model.flushed(2), model.acknowledged(2)), (0, 1));
        model.connection_lost();
        assert_eq!((model.acknowledged(1), model.issued(1)), (1, 2));
        assert_eq!((model.acknowledged(2), model.issued(2)), (0, 1));
        // A later flush does not make lost data durable.
        model.flush_begins();
        model.flush_ends(true);
        assert_eq!((model.flushed(1), model.flushed(2)), (1, 0));
    }

    #[test]
    fn a_failed_flush_covers_nothing_and_the_next_covers_it() {
        let mut model = Model::new(1, Promise::Acknowledged);
        model.issue(0);
        model.end(0, true);
        model.flush_begins();
        model.connection_lost();
        assert_eq!((model.flushed(0), model.acknowledged(0)), (0, 1));
        model.flush_begins();
        model.flush_ends(true);
        assert_eq!(model.flushed(0), 1);
    }

    #[test]
    fn a_write_in_flight_or_failed_raises_nothing() {
        let mut model = Model::new(65, Promise::Acknowledged);
        model.issue(64);
        assert!(model.is_in_flight(64) && !model.is_in_flight(0));
        model.end(64, false);
        assert!(!model.is_in_flight(64));
        assert_eq!((model.issued(64), model.acknowledged(64)), (1, 0));
        model.seen(64, 1);
        assert_eq!((model.touched(), model.acknowledged(64)), (1, 1));
    }
}
