//! What outlives the daemon: the catalog, the grant table, the socket to the engine.
//!
//! Daemon steps act through [`Outside`], which can die after any effect. Between steps, the grant
//! table is a list.

use crate::engine::EXTENT;
use forebay_xlate::boundary::message::{GrantOf, ToEngine};
use forebay_xlate::grants::{Grant, GrantTable};
use forebay_xlate::shm::SharedMemory;
use forebay_xlate::{VolumeId, Word};
use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};

/// The state of a device's one extent.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum Extent {
    Clean,
    /// Reserved for a volume, mapped or not.
    Of(VolumeId),
    Dirty,
    Quarantined,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Pool {
    pub extents: Vec<Extent>,
    pub map: BTreeMap<VolumeId, u8>,
    /// Places that snapshots hold, the oldest first.
    pub frozen: BTreeMap<VolumeId, Vec<u8>>,
    /// Of the volumes that may be frozen.
    pub epochs: BTreeMap<VolumeId, u16>,
}

pub(crate) type Listed = Vec<(VolumeId, u64)>;

pub(crate) struct Outside<'a> {
    pub table: &'a mut GrantTable,
    pub durable: &'a mut Pool,
    pub to_engine: &'a mut VecDeque<ToEngine>,
    pub next_number: &'a mut u64,
    /// Effects until death.
    pub left: Option<u8>,
    pub dead: bool,
}

impl Outside<'_> {
    pub(crate) fn goes(&mut self) -> bool {
        match &mut self.left {
            Some(0) => self.dead = true,
            Some(left) => *left -= 1,
            None => {}
        }
        !self.dead
    }

    pub(crate) fn say(&mut self, message: ToEngine) {
        if self.goes() {
            self.to_engine.push_back(message);
        }
    }

    pub(crate) fn number(&mut self) -> u64 {
        *self.next_number += 1;
        *self.next_number
    }
}

thread_local! {
    static TABLE: RefCell<GrantTable> = RefCell::new({
        let memory = SharedMemory::anonymous("model", GrantTable::bytes(8)).unwrap();
        GrantTable::format(memory, 8, &[1; 16], &[2; 16]).unwrap()
    });
}

/// Runs a step on a real grant table with these entries.
pub(crate) fn with_table<T>(listed: &mut Listed, step: impl FnOnce(&mut GrantTable) -> T) -> T {
    TABLE.with_borrow_mut(|table| {
        for grant in table.iter().copied().collect::<Vec<_>>() {
            table.remove(grant.volume, grant.range).unwrap();
        }
        for &(volume, word) in &*listed {
            table.insert(entry(volume, Word::from_bits(word))).unwrap();
        }
        let result = step(table);
        *listed = table.iter().map(|g| (g.volume, g.word.bits())).collect();
        result
    })
}

pub(crate) fn entry(volume: VolumeId, word: Word) -> Grant {
    Grant {
        volume,
        range: EXTENT,
        word,
        epoch: 0,
        commit_sequence: 0,
    }
}

/// The grants in a message that store data.
pub(crate) fn grants_of(message: &ToEngine) -> impl Iterator<Item = &GrantOf> {
    let grants = match message {
        ToEngine::Grants { grants } => &grants[..],
        _ => &[],
    };
    grants.iter().filter(|grant| grant.range.count > 0)
}
