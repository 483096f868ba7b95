//! Every extent's state, and the allocator.
//!
//! **Design.** One byte per extent says its state; one bit per extent says whether it is clean and
//! another whether it may be laundered, so that both are found a word at a time, from a cursor on:
//! consecutive requests get consecutive extents. Counts per state are kept, not computed. **Not
//! here:** which volume has an extent, what is durable (`pool`, `owner`), where on the device it is.

use crate::runs::DeviceRun;
use forebay_xlate::types::DeviceIndex;

/// What an extent is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum ExtentState {
    /// Reads as zeros and belongs to nobody.
    Clean = 0,
    /// Reserved durably for a volume; perhaps granted, its mapping not yet durable.
    Reserved = 1,
    /// Mapped durably by a volume.
    Owned = 2,
    /// Freed, and may hold someone's bytes.
    Dirty = 3,
    /// Something may still write to it.
    Quarantined = 4,
    /// Dirty, and being zeroed now. Stored as dirty.
    Laundering = 5,
    /// Becomes dirty when its batch is durable: until then a crash brings its owner back. Stored as
    /// dirty.
    Freed = 6,
}

const STATES: usize = 7;

impl ExtentState {
    /// A state as the catalog has it.
    pub(crate) fn from_stored(byte: u8) -> Option<Self> {
        Some(match byte {
            0 => Self::Clean,
            1 => Self::Reserved,
            2 => Self::Owned,
            3 => Self::Dirty,
            4 => Self::Quarantined,
            _ => return None,
        })
    }

    fn from_memory(byte: u8) -> Self {
        match byte {
            5 => Self::Laundering,
            6 => Self::Freed,
            // Only `set` and the loader write these bytes; both write states.
            byte => Self::from_stored(byte).unwrap_or(Self::Quarantined),
        }
    }

    fn stored(self) -> u8 {
        match self {
            Self::Laundering | Self::Freed => Self::Dirty as u8,
            other => other as u8,
        }
    }
}

/// How many extents are in which state. Their sum is `total`.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Space {
    /// The size of an extent in bytes.
    pub extent_bytes: u64,
    /// All extents.
    pub total: u64,
    /// Free to use.
    pub clean: u64,
    /// Set aside for volumes, or granted and not yet durably mapped.
    pub reserved: u64,
    /// Mapped by volumes.
    pub owned: u64,
    /// Freed and not yet zeroed.
    pub dirty: u64,
    /// Not usable until something that hangs has ended.
    pub quarantined: u64,
}

impl Space {
    /// The pool's size in bytes.
    pub fn total_bytes(&self) -> u64 {
        self.total * self.extent_bytes
    }

    /// What volumes use, in bytes, reservations included.
    pub fn used_bytes(&self) -> u64 {
        (self.reserved + self.owned) * self.extent_bytes
    }

    /// What is free or will be once laundered, in bytes.
    pub fn free_bytes(&self) -> u64 {
        (self.clean + self.dirty) * self.extent_bytes
    }
}

/// One bit per extent, with a cursor and a count.
#[derive(Debug)]
struct Bits {
    words: Vec<u64>,
    set: u64,
    cursor: u64,
}

impl Bits {
    fn new(bits: u64) -> Self {
        Self {
            words: vec![0; bits.div_ceil(64) as usize],
            set: 0,
            cursor: 0,
        }
    }

    fn change(&mut self, at: u64, on: bool) {
        let word = &mut self.words[(at / 64) as usize];
        let mask = 1 << (at % 64);
        if (*word & mask != 0) != on {
            *word ^= mask;
            if on { self.set += 1 } else { self.set -= 1 }
        }
    }

    /// The first bit at or after `from` that is `on`.
    fn find(&self, from: u64, on: bool) -> Option<u64> {
        let mut index = (from / 64) as usize;
        let mut mask = !0u64 << (from % 64);
        while index < self.words.len() {
            let word = if on {
                self.words[index]
            } else {
                !self.words[index]
            } & mask;
            if word != 0 {
                return Some(index as u64 * 64 + u64::from(word.trailing_zeros()));
            }
            mask = !0;
            index += 1;
        }
        None
    }

    /// The next run of set bits from the cursor on (around the end), at most `max` long.
    fn next_run(&mut self, max: u64) -> Option<(u64, u64)> {
        if self.set == 0 || max == 0 {
            return None;
        }
        let first = self
            .find(self.cursor, true)
            .or_else(|| self.find(0, true))?;
        let end = self
            .find(first, false)
            .unwrap_or(self.words.len() as u64 * 64);
        let count = (end - first).min(max);
        self.cursor = first + count;
        Some((first, count))
    }
}

/// One device's extents.
#[derive(Debug)]
struct Device {
    states: Vec<u8>,
    clean: Bits,
    dirty: Bits,
}

/// All extents of the pool.
#[derive(Debug)]
pub(crate) struct Extents {
    devices: Vec<Device>,
    counts: [u64; STATES],
    extent_bytes: u64,
}

impl Extents {
    pub(crate) fn new(extent_bytes: u64) -> Self {
        Self {
            devices: Vec::new(),
            counts: [0; STATES],
            extent_bytes,
        }
    }

    /// Adds the next device with the stored states of its extents.
    pub(crate) fn add_device(&mut self, states: Vec<u8>) {
        let count = states.len() as u64;
        let mut device = Device {
            clean: Bits::new(count),
            dirty: Bits::new(count),
            states,
        };
        for (at, byte) in device.states.iter().enumerate() {
            let state = ExtentState::from_memory(*byte);
            self.counts[state as usize] += 1;
            match state {
                ExtentState::Clean => device.clean.change(at as u64, true),
                ExtentState::Dirty => device.dirty.change(at as u64, true),
                _ => {}
            }
        }
        self.devices.push(device);
    }

    /// An extent's state; none beyond the device.
    pub(crate) fn get(&self, device: DeviceIndex, extent: u64) -> Option<ExtentState> {
        let states = &self.devices.get(usize::from(device.0))?.states;
        states
            .get(usize::try_from(extent).ok()?)
            .map(|byte| ExtentState::from_memory(*byte))
    }

    /// Whether all of a run exists and is in a state that `wanted` accepts.
    pub(crate) fn all(&self, run: DeviceRun, wanted: impl Fn(ExtentState) -> bool) -> bool {
        let Some(device) = self.devices.get(usize::from(run.device.0)) else {
            return false;
        };
        run.count > 0
            && run.end() <= device.states.len() as u64
            && device.states[run.first.0 as usize..run.end() as usize]
                .iter()
                .all(|byte| wanted(ExtentState::from_memory(*byte)))
    }

    /// Puts a run, which exists, into a state.
    pub(crate) fn set(&mut self, run: DeviceRun, state: ExtentState) {
        let device = &mut self.devices[usize::from(run.device.0)];
        for at in run.first.0..run.end() {
            let byte = &mut device.states[at as usize];
            self.counts[ExtentState::from_memory(*byte) as usize] -= 1;
            self.counts[state as usize] += 1;
            *byte = state as u8;
            device.clean.change(at, state == ExtentState::Clean);
            device.dirty.change(at, state == ExtentState::Dirty);
        }
    }

    pub(crate) fn count(&self, state: ExtentState) -> u64 {
        self.counts[state as usize]
    }

    pub(crate) fn space(&self) -> Space {
        Space {
            extent_bytes: self.extent_bytes,
            total: self.counts.iter().sum(),
            clean: self.count(ExtentState::Clean),
            reserved: self.count(ExtentState::Reserved),
            owned: self.count(ExtentState::Owned),
            dirty: self.count(ExtentState::Dirty)
                + self.count(ExtentState::Laundering)
                + self.count(ExtentState::Freed),
            quarantined: self.count(ExtentState::Quarantined),
        }
    }

    /// Takes the next run of clean extents, from the device with the most of them: it is reserved.
    pub(crate) fn take_clean(&mut self, max: u64) -> Option<DeviceRun> {
        self.take(max, ExtentState::Reserved, false)
    }

    /// Takes the next run of extents that may be laundered, and marks them so.
    pub(crate) fn take_dirty(&mut self, max: u64) -> Option<DeviceRun> {
        self.take(max, ExtentState::Laundering, true)
    }

    fn take(&mut self, max: u64, state: ExtentState, dirty: bool) -> Option<DeviceRun> {
        let (index, device) = self
            .devices
            .iter_mut()
            .enumerate()
            .max_by_key(|(at, device)| {
                let bits = if dirty { &device.dirty } else { &device.clean };
                (bits.set, std::cmp::Reverse(*at))
            })?;
        let bits = if dirty {
            &mut device.dirty
        } else {
            &mut device.clean
        };
        let (first, count) = bits.next_run(max)?;
        // A pool has at most 256 devices.
        let run = DeviceRun::new(DeviceIndex(index as u8), first, count);
        self.set(run, state);
        Some(run)
    }

    /// All runs in a state. Looks at every extent.
    pub(crate) fn runs_in(&self, state: ExtentState) -> Vec<DeviceRun> {
        let mut runs: Vec<DeviceRun> = Vec::new();
        if self.count(state) == 0 {
            return runs;
        }
        for (index, device) in self.devices.iter().enumerate() {
            let index = DeviceIndex(index as u8);
            for (at, _) in device
                .states
                .iter()
                .enumerate()
                .filter(|(_, byte)| **byte == state as u8)
            {
                match runs.last_mut() {
                    Some(run) if run.device == index && run.end() == at as u64 => run.count += 1,
                    _ => runs.push(DeviceRun::new(index, at as u64, 1)),
                }
            }
        }
        runs
    }

    /// A chunk of states as the catalog stores them.
    pub(crate) fn stored_chunk(&self, device: u64, chunk: u64, per_chunk: u64) -> Vec<u8> {
        let Some(device) = self.devices.get(device as usize) else {
            return Vec::new();
        };
        let from = (chunk * per_chunk).min(device.states.len() as u64);
        let to = (from + per_chunk).min(device.states.len() as u64);
        device.states[from as usize..to as usize]
            .iter()
            .map(|byte| ExtentState::from_memory(*byte).stored())
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const D0: DeviceIndex = DeviceIndex(0);

    fn extents(count: usize) -> Extents {
        let mut extents = Extents::new(65536);
        extents.add_device(vec![0; count]);
        extents
    }

    #[test]
    fn requests_in_a_row_are_contiguous() {
        let mut extents = extents(200);
        assert_eq!(extents.take_clean(70), Some(DeviceRun::new(D0, 0, 70)));
        assert_eq!(extents.take_clean(10), Some(DeviceRun::new(D0, 70, 10)));
        // Not reused while there is more ahead.
        extents.set(DeviceRun::new(D0, 0, 70), ExtentState::Clean);
        assert_eq!(extents.take_clean(500), Some(DeviceRun::new(D0, 80, 120)));
        assert_eq!(extents.take_clean(500), Some(DeviceRun::new(D0, 0, 70)));
        assert_eq!(extents.take_clean(1), None);
        assert_eq!(extents.space().reserved, 200);
    }

    #[test]
    fn only_dirty_is_laundered_and_counts_hold() {
        let mut extents = extents(130);
        extents.set(DeviceRun::new(D0, 5, 3), ExtentState::Freed);
        assert_eq!(
            extents.take_dirty(10),
            None,
            "freed, its batch not yet durable"
        );
        extents.set(DeviceRun::new(D0, 5, 3), ExtentState::Dirty);
        extents.set(DeviceRun::new(D0, 128, 2), ExtentState::Dirty);
        assert_eq!(extents.take_dirty(2), Some(DeviceRun::new(D0, 5, 2)));
        assert_eq!(extents.take_dirty(9), Some(DeviceRun::new(D0, 7, 1)));
        assert_eq!(extents.take_dirty(9), Some(DeviceRun::new(D0, 128, 2)));
        assert_eq!(extents.take_dirty(9), None);
        let space = extents.space();
        assert_eq!((space.dirty, space.clean, space.total), (5, 125, 130));
        assert_eq!(extents.stored_chunk(0, 0, 8), [0, 0, 0, 0, 0, 3, 3, 3]);
    }

    #[test]
    fn the_emptiest_device_first() {
        let mut extents = extents(10);
        extents.add_device(vec![0; 20]);
        assert_eq!(extents.take_clean(15).unwrap().device, DeviceIndex(1));
        assert_eq!(extents.take_clean(15).unwrap().device, D0);
    }
}
