//! The daemon's extents: faults, zero-fill, quarantine.

use crate::daemon::{Daemon, Op, Wish};
use crate::engine::{EXTENT, zero_filling};
use crate::outside::{Extent, Outside, entry};
use forebay_xlate::boundary::message::{FaultFailure, Job, ToEngine};
use forebay_xlate::owner_side::Refused;
use forebay_xlate::{DeviceIndex, ExtentIndex, Rights, VolumeId, Word};
use std::collections::BTreeSet;

fn place(device: u8) -> Word {
    Word::new(DeviceIndex(device), ExtentIndex(0), Rights::ReadWrite).unwrap()
}

impl Daemon {
    /// Unmaps an extent; a stale one may need quarantine.
    pub(crate) fn give_up(&mut self, volume: VolumeId, undrained: &BTreeSet<DeviceIndex>) {
        let mapped = self.pool.map.remove(&volume);
        for device in mapped.into_iter().chain(undrained.iter().map(|d| d.0)) {
            let hangs = undrained.contains(&DeviceIndex(device));
            self.pool.extents[usize::from(device)] = if hangs {
                self.quarantined.insert(device, self.talk.unwrap_or(0));
                if let Some((_, whole)) = self.settling.get_mut(&device) {
                    *whole = false;
                }
                Extent::Quarantined
            } else {
                Extent::Dirty
            };
        }
    }

    fn allocate(&mut self, volume: VolumeId, at: usize, out: &mut Outside<'_>) -> bool {
        if !out.goes() {
            return false;
        }
        self.pool.extents[at] = Extent::Of(volume);
        out.durable.extents[at] = Extent::Of(volume);
        self.pool.map.insert(volume, at as u8);
        true
    }

    pub(crate) fn map_preallocated(&mut self, volume: VolumeId, out: &mut Outside<'_>) {
        let mut extents = self.pool.extents.iter();
        let Some(at) = extents.position(|e| *e == Extent::Clean) else {
            return;
        };
        let free = self.side.free_run(volume, 0, 1) > 0 && !self.pool.map.contains_key(&volume);
        if !free || !self.reported || !self.allocate(volume, at, out) || !out.goes() {
            return;
        }
        let word = place(at as u8);
        let word = Word::preallocated(word.device(), word.extent()).unwrap();
        // If this fails, a later fault finds it mapped.
        if let Ok(grant) = self
            .side
            .grant(out.table, entry(volume, word), self.pool.epoch(volume))
        {
            out.say(ToEngine::Grants {
                grants: vec![grant],
            });
        }
    }

    pub(crate) fn answer(&mut self, volume: VolumeId, write: bool, out: &mut Outside<'_>) {
        if !self.reported || out.dead {
            return;
        }
        let frozen = self.pool.frozen.get(&volume).and_then(|all| all.last());
        let word = match self.pool.map.get(&volume) {
            Some(device) => place(*device),
            None if !write => frozen.map_or(Word::HOLE, |device| place(*device).read_only()),
            None => {
                let free = |e: &Extent| *e == Extent::Clean;
                let Some(at) = self.pool.extents.iter().position(free) else {
                    let soon = |e: &Extent| matches!(e, Extent::Dirty);
                    let gives_up = |op: &Op| !matches!(op.wish, Wish::Evict | Wish::Preallocation);
                    let freeing = self.ops.iter().any(gives_up);
                    if !self.pool.extents.iter().any(soon) && !freeing {
                        self.fail(volume, write, out);
                    }
                    return;
                };
                if !self.allocate(volume, at, out) {
                    return;
                }
                place(at as u8)
            }
        };
        if !out.goes() {
            return;
        }
        match self
            .side
            .grant(out.table, entry(volume, word), self.pool.epoch(volume))
        {
            Ok(grant) => {
                self.faults.remove(&(volume, write));
                out.say(ToEngine::Grants {
                    grants: vec![grant],
                });
            }
            Err(Refused::Elsewhere(_)) => {
                if !self.ops.iter().any(|op| op.volume == volume) {
                    self.begin(volume, Wish::Stale);
                }
            }
            Err(_) => {}
        }
    }

    pub(crate) fn fail(&mut self, volume: VolumeId, write: bool, out: &mut Outside<'_>) {
        self.faults.remove(&(volume, write));
        out.say(ToEngine::FaultFailed {
            volume,
            range: EXTENT,
            write,
            reason: FaultFailure::NoSpace,
        });
    }

    pub(crate) fn zero_fill(&mut self, out: &mut Outside<'_>) {
        let stale = self.ops.iter().any(|op| op.wish == Wish::Stale);
        if !self.reported || self.zero_filling.is_some() || stale || out.dead {
            return;
        }
        let dirty = |d: &u8| out.durable.extents[usize::from(*d)] == Extent::Dirty;
        let Some(device) = self.fenced.iter().copied().find(dirty) else {
            return;
        };
        if self.pool.extents[usize::from(device)] != Extent::Dirty {
            return;
        }
        let job = out.number();
        self.zero_filling = Some((job, device));
        let work = zero_filling(device);
        out.say(ToEngine::Job { job, work });
    }

    /// Frees quarantined extents whose device's requests have ended.
    pub(crate) fn settle_quarantined(&mut self, out: &mut Outside<'_>) {
        if !self.reported || out.dead {
            return;
        }
        for device in self.fenced.clone() {
            let quarantined = out.durable.extents[usize::from(device)] == Extent::Quarantined;
            if quarantined && !self.settling.contains_key(&device) {
                let job = out.number();
                self.settling.insert(device, (job, true));
                let work = Job::Settle {
                    device: DeviceIndex(device),
                };
                out.say(ToEngine::Job { job, work });
            }
        }
    }
}
