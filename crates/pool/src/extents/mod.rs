//! Every extent's state, and the search for free ones.
//!
//! A byte per extent holds its state; two bits say whether it is clean, or may be zero-filled.
//! Searches go by words from a cursor on, so consecutive requests get consecutive extents. Offline
//! devices give none.
//!
//! **Not here:** an extent's volume, the choice of the device (`placement`), durability
//! (`journal`).

pub(crate) mod allocator;
pub(crate) mod placement;
pub(crate) mod quarantine;
pub(crate) mod reservations;
pub(crate) mod runs;
pub(crate) mod space;

use forebay_xlate::types::DeviceIndex;
use runs::DeviceRun;
use space::Space;

/// Whether a device can be used, as the caller says.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DeviceHealth {
    /// Present and working.
    Online,
    /// Not present (yet).
    Missing,
    /// Present, with errors: serves mapped extents, gets nothing new.
    Failing,
    /// Present, but unusable.
    Failed,
}

/// An extent's state.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum ExtentState {
    /// Free, and reads as zeros.
    Clean = 0,
    /// Reserved durably for a volume, perhaps granted.
    Reserved = 1,
    /// Mapped durably by a volume.
    Owned = 2,
    /// Freed; may hold old data.
    Dirty = 3,
    /// A write to it may be in flight.
    Quarantined = 4,
    /// Dirty, and being zeroed. Stored as dirty.
    ZeroFilling = 5,
    /// Becomes dirty when its batch is durable; until then a crash restores its owner. Stored as
    /// dirty.
    Freed = 6,
}

const STATES: usize = 7;

impl ExtentState {
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
            5 => Self::ZeroFilling,
            6 => Self::Freed,
            // Only `set` and the loader write these bytes.
            byte => Self::from_stored(byte).unwrap_or(Self::Quarantined),
        }
    }

    fn stored(self) -> u8 {
        match self {
            Self::ZeroFilling | Self::Freed => Self::Dirty as u8,
            other => other as u8,
        }
    }
}

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

    fn set_word(&mut self, index: usize, word: u64) {
        self.words[index] = word;
        self.set += u64::from(word.count_ones());
    }

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

    /// From the cursor on, around the end.
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

#[derive(Debug)]
struct DeviceExtents {
    states: Vec<u8>,
    clean: Bits,
    dirty: Bits,
    counts: [u64; STATES],
    health: DeviceHealth,
    /// Extents that changed hands since a check began.
    moved: Option<Vec<u64>>,
}

impl DeviceExtents {
    fn new(states: Vec<u8>) -> Self {
        let count = states.len() as u64;
        let mut device = Self {
            clean: Bits::new(count),
            dirty: Bits::new(count),
            counts: [0; STATES],
            health: DeviceHealth::Online,
            moved: None,
            states,
        };
        for (word, states) in device.states.chunks(64).enumerate() {
            let (mut clean, mut dirty) = (0u64, 0u64);
            for (bit, byte) in states.iter().enumerate() {
                let state = ExtentState::from_memory(*byte);
                device.counts[state as usize] += 1;
                clean |= u64::from(state == ExtentState::Clean) << bit;
                dirty |= u64::from(state == ExtentState::Dirty) << bit;
            }
            device.clean.set_word(word, clean);
            device.dirty.set_word(word, dirty);
        }
        device
    }

    fn is_online(&self) -> bool {
        self.health == DeviceHealth::Online
    }

    fn count(&self, state: ExtentState) -> u64 {
        self.counts[state as usize]
    }

    fn all_dirty(&self) -> u64 {
        self.count(ExtentState::Dirty)
            + self.count(ExtentState::ZeroFilling)
            + self.count(ExtentState::Freed)
    }

    fn mark_allocated(&mut self, run: DeviceRun) {
        if let Some(moved) = &mut self.moved {
            for at in run.first.0..run.end() {
                moved[(at / 64) as usize] |= 1 << (at % 64);
            }
        }
    }
}

#[derive(Debug)]
pub(crate) struct Extents {
    devices: Vec<DeviceExtents>,
    extent_bytes: u64,
}

impl Extents {
    pub(crate) fn new(extent_bytes: u64) -> Self {
        Self {
            devices: Vec::new(),
            extent_bytes,
        }
    }

    pub(crate) fn add_device(&mut self, states: Vec<u8>) {
        self.devices.push(DeviceExtents::new(states));
    }

    fn device(&self, device: DeviceIndex) -> Option<&DeviceExtents> {
        self.devices.get(usize::from(device.0))
    }

    pub(crate) fn devices(&self) -> usize {
        self.devices.len()
    }

    pub(crate) fn set_health(&mut self, device: DeviceIndex, health: DeviceHealth) -> bool {
        let found = self.devices.get_mut(usize::from(device.0));
        found.map(|device| device.health = health).is_some()
    }

    pub(crate) fn health(&self, device: DeviceIndex) -> DeviceHealth {
        self.device(device)
            .map_or(DeviceHealth::Missing, |device| device.health)
    }

    /// Whether mapped extents are reachable.
    pub(crate) fn is_served(&self, device: DeviceIndex) -> bool {
        matches!(
            self.health(device),
            DeviceHealth::Online | DeviceHealth::Failing
        )
    }

    pub(crate) fn is_online(&self, device: DeviceIndex) -> bool {
        self.health(device) == DeviceHealth::Online
    }

    pub(crate) fn get(&self, device: DeviceIndex, extent: u64) -> Option<ExtentState> {
        let states = &self.device(device)?.states;
        states
            .get(usize::try_from(extent).ok()?)
            .map(|byte| ExtentState::from_memory(*byte))
    }

    /// Whether all of a run exists and `wanted` accepts each state.
    pub(crate) fn all(&self, run: DeviceRun, wanted: impl Fn(ExtentState) -> bool) -> bool {
        let Some(device) = self.device(run.device) else {
            return false;
        };
        run.count > 0
            && run.end() <= device.states.len() as u64
            && device.states[run.first.0 as usize..run.end() as usize]
                .iter()
                .all(|byte| wanted(ExtentState::from_memory(*byte)))
    }

    /// The run must exist.
    pub(crate) fn set(&mut self, run: DeviceRun, state: ExtentState) {
        let device = &mut self.devices[usize::from(run.device.0)];
        device.mark_allocated(run);
        for at in run.first.0..run.end() {
            let byte = &mut device.states[at as usize];
            let before = ExtentState::from_memory(*byte);
            *byte = state as u8;
            device.counts[before as usize] -= 1;
            device.counts[state as usize] += 1;
            if before == ExtentState::Clean || state == ExtentState::Clean {
                device.clean.change(at, state == ExtentState::Clean);
            }
            if before == ExtentState::Dirty || state == ExtentState::Dirty {
                device.dirty.change(at, state == ExtentState::Dirty);
            }
        }
    }

    /// A run changed hands without changing its state.
    pub(crate) fn mark_allocated(&mut self, run: DeviceRun) {
        if let Some(device) = self.devices.get_mut(usize::from(run.device.0)) {
            device.mark_allocated(run);
        }
    }

    /// Begins to record changes of hands.
    pub(crate) fn note_moves(&mut self) {
        for device in &mut self.devices {
            device.moved = Some(vec![0; device.states.len().div_ceil(64)]);
        }
    }

    /// Whether an extent changed hands since `note_moves`.
    pub(crate) fn has_moved(&self, device: DeviceIndex, extent: u64) -> bool {
        let moved = self.device(device).and_then(|device| device.moved.as_ref());
        moved
            .and_then(|moved| moved.get((extent / 64) as usize))
            .is_none_or(|word| word & (1 << (extent % 64)) != 0)
    }

    /// Which of 64 extents are owned or reserved.
    pub(crate) fn used_word(&self, device: DeviceIndex, word: u64) -> u64 {
        let states = self.device(device).map_or(&[][..], |device| &device.states);
        let from = (word as usize * 64).min(states.len());
        let to = (from + 64).min(states.len());
        let used = [ExtentState::Owned as u8, ExtentState::Reserved as u8];
        let bits = states[from..to].iter().enumerate();
        bits.fold(0, |all, (bit, byte)| {
            all | (u64::from(used.contains(byte)) << bit)
        })
    }

    /// A contradiction between a device's states and its counters and bits.
    pub(crate) fn contradiction(&self, device: DeviceIndex) -> Option<String> {
        let device = self.device(device)?;
        let fresh = DeviceExtents::new(device.states.clone());
        if fresh.counts != device.counts {
            return Some(format!(
                "its extents are counted as {:?} but are {:?}",
                device.counts, fresh.counts
            ));
        }
        let same = |a: &Bits, b: &Bits| a.words == b.words && a.set == b.set;
        let sound = same(&fresh.clean, &device.clean) && same(&fresh.dirty, &device.dirty);
        (!sound).then(|| "its free extents differ from those listed".to_owned())
    }

    #[cfg(test)]
    pub(crate) fn miscount(&mut self) {
        self.devices[0].counts.swap(0, 1);
    }

    pub(crate) fn count(&self, state: ExtentState) -> u64 {
        self.devices.iter().map(|device| device.count(state)).sum()
    }

    pub(crate) fn clean_on(&self, device: DeviceIndex) -> u64 {
        self.device(device)
            .filter(|device| device.is_online())
            .map_or(0, |device| device.clean.set)
    }

    pub(crate) fn clean_online(&self) -> u64 {
        let online = self.devices.iter().filter(|device| device.is_online());
        online.map(|device| device.clean.set).sum()
    }

    pub(crate) fn dirty_online(&self) -> u64 {
        let online = self.devices.iter().filter(|device| device.is_online());
        online.map(DeviceExtents::all_dirty).sum()
    }

    pub(crate) fn space(&self) -> Space {
        let mut all = Space::default();
        for device in &self.devices {
            let one = self.space_of(device);
            all.extent_bytes = one.extent_bytes;
            all.total += one.total;
            all.clean += one.clean;
            all.reserved += one.reserved;
            all.owned += one.owned;
            all.dirty += one.dirty;
            all.quarantined += one.quarantined;
            all.unavailable += one.unavailable;
        }
        all
    }

    fn space_of(&self, device: &DeviceExtents) -> Space {
        let (clean, dirty) = (device.count(ExtentState::Clean), device.all_dirty());
        Space {
            extent_bytes: self.extent_bytes,
            total: device.states.len() as u64,
            clean,
            reserved: device.count(ExtentState::Reserved),
            owned: device.count(ExtentState::Owned),
            dirty,
            quarantined: device.count(ExtentState::Quarantined),
            unavailable: if device.is_online() { 0 } else { clean + dirty },
            spare: 0,
            preallocated: 0,
            promised: 0,
        }
    }

    pub(crate) fn device_space(&self, device: DeviceIndex) -> Option<Space> {
        self.device(device).map(|device| self.space_of(device))
    }

    pub(crate) fn take_clean(&mut self, device: DeviceIndex, max: u64) -> Option<DeviceRun> {
        self.take(device, max, ExtentState::Reserved)
    }

    pub(crate) fn take_dirty(&mut self, device: DeviceIndex, max: u64) -> Option<DeviceRun> {
        self.take(device, max, ExtentState::ZeroFilling)
    }

    fn take(&mut self, index: DeviceIndex, max: u64, state: ExtentState) -> Option<DeviceRun> {
        let device = self
            .devices
            .get_mut(usize::from(index.0))
            .filter(|device| device.is_online())?;
        let bits = if state == ExtentState::ZeroFilling {
            &mut device.dirty
        } else {
            &mut device.clean
        };
        let (first, count) = bits.next_run(max)?;
        let run = DeviceRun::new(index, first, count);
        self.set(run, state);
        Some(run)
    }

    /// Looks at every extent.
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
        assert_eq!(extents.take_clean(D0, 70), Some(DeviceRun::new(D0, 0, 70)));
        assert_eq!(extents.take_clean(D0, 10), Some(DeviceRun::new(D0, 70, 10)));
        // Not reused yet.
        extents.set(DeviceRun::new(D0, 0, 70), ExtentState::Clean);
        assert_eq!(
            extents.take_clean(D0, 500),
            Some(DeviceRun::new(D0, 80, 120))
        );
        assert_eq!(extents.take_clean(D0, 500), Some(DeviceRun::new(D0, 0, 70)));
        assert_eq!(extents.take_clean(D0, 1), None);
        assert_eq!(extents.space().reserved, 200);
    }

    #[test]
    fn only_dirty_extents_are_zero_filled_and_counts_match() {
        let mut extents = extents(130);
        extents.set(DeviceRun::new(D0, 5, 3), ExtentState::Freed);
        assert_eq!(
            extents.take_dirty(D0, 10),
            None,
            "freed, its batch not yet durable"
        );
        extents.set(DeviceRun::new(D0, 5, 3), ExtentState::Dirty);
        extents.set(DeviceRun::new(D0, 128, 2), ExtentState::Dirty);
        assert_eq!(extents.take_dirty(D0, 2), Some(DeviceRun::new(D0, 5, 2)));
        assert_eq!(extents.take_dirty(D0, 9), Some(DeviceRun::new(D0, 7, 1)));
        assert_eq!(extents.take_dirty(D0, 9), Some(DeviceRun::new(D0, 128, 2)));
        assert_eq!(extents.take_dirty(D0, 9), None);
        let space = extents.space();
        assert_eq!((space.dirty, space.clean, space.total), (5, 125, 130));
        assert_eq!(extents.stored_chunk(0, 0, 8), [0, 0, 0, 0, 0, 3, 3, 3]);
    }

    #[test]
    fn nothing_is_taken_from_a_device_that_is_away() {
        let mut extents = extents(10);
        extents.add_device(vec![0; 20]);
        extents.set(DeviceRun::new(D0, 3, 2), ExtentState::Dirty);
        assert!(extents.set_health(D0, DeviceHealth::Failed));
        assert_eq!((extents.clean_online(), extents.dirty_online()), (20, 0));
        assert_eq!(extents.take_clean(D0, 1), None);
        assert_eq!(extents.take_dirty(D0, 1), None);
        assert_eq!(extents.space().unavailable, 10);
        extents.set_health(D0, DeviceHealth::Online);
        assert_eq!(extents.take_dirty(D0, 5), Some(DeviceRun::new(D0, 3, 2)));
        assert_eq!(extents.take_clean(D0, 5), Some(DeviceRun::new(D0, 0, 3)));
        assert!(!extents.set_health(DeviceIndex(2), DeviceHealth::Online));
    }
}
