//! Snapshots: the daemon's freeze of a volume, and the rules for frozen places.
//!
//! The owner holds the volume, freezes it, waits for its writes, commits, and lets go. A later write
//! gets a new place; the copy itself is not modelled. There are only [`EPOCHS`] epochs: before a
//! number comes again, the owner takes back all grants of the volume.

use crate::daemon::{Daemon, Wish};
use crate::engine::{EPOCHS, EXTENT, Ghost, Slice, device_of};
use crate::outside::{Outside, Pool};
use crate::world::World;
use forebay_xlate::boundary::message::{ToEngine, VolumeConfig};
use forebay_xlate::engine_side::Words as _;
use forebay_xlate::owner_side::{Stage, TakingId};
use forebay_xlate::{DeviceIndex, VolumeId};

impl Pool {
    pub(crate) fn epoch(&self, volume: VolumeId) -> u16 {
        self.epochs.get(&volume).copied().unwrap_or(0)
    }

    /// The age of a frozen place; 0 is the oldest.
    fn age(&self, volume: VolumeId, device: u8) -> Option<usize> {
        let frozen = self.frozen.get(&volume)?;
        frozen.iter().position(|d| *d == device)
    }

    pub(crate) fn is_frozen(&self, volume: VolumeId, device: u8) -> bool {
        self.age(volume, device).is_some()
    }

    /// Whether the volume reads from there, now or by a snapshot.
    pub(crate) fn holds(&self, volume: VolumeId, device: u8) -> bool {
        self.map.get(&volume) == Some(&device) || self.is_frozen(volume, device)
    }
}

impl Daemon {
    /// Sets the epochs of all volumes that may be frozen: of a failed freeze, the earlier one.
    pub(crate) fn say_epochs(&self, out: &mut Outside<'_>) {
        for volume in self.pool.epochs.keys() {
            self.say_epoch(*volume, out);
        }
    }

    fn say_epoch(&self, volume: VolumeId, out: &mut Outside<'_>) {
        let volume = VolumeConfig {
            volume,
            uuid: [0; 16],
            read_only: false,
            size_bytes: 4096,
            block_bytes: 4096,
            extent_bytes: 4096,
            epoch: self.pool.epoch(volume),
            image: None,
        };
        out.say(ToEngine::SetVolume { request: 0, volume });
    }

    pub(crate) fn advance_freeze(
        &mut self,
        at: usize,
        id: TakingId,
        out: &mut Outside<'_>,
    ) -> bool {
        let volume = self.ops[at].volume;
        let next = (self.pool.epoch(volume) + 1) % EPOCHS;
        match self.side.stage(id).cloned() {
            Some(Stage::Taken) => {
                let Some(talk) = self.talks_to() else {
                    return false;
                };
                if next == 0 && !self.ops[at].cleared {
                    // Not by what the table lists: it is ahead of the engine, if the daemon died
                    // between an entry and its message.
                    self.ops[at].clears = true;
                    return false;
                }
                let devices = self.pool.map.get(&volume).map(|d| DeviceIndex(*d));
                let revoke = out.number();
                self.ops[at].revoke = revoke;
                if (self.side)
                    .freezing(id, devices.into_iter().collect(), talk)
                    .is_ok()
                {
                    out.say(ToEngine::Revoke {
                        revoke,
                        volume,
                        range: EXTENT,
                        freeze: Some(next),
                        release: None,
                    });
                }
                false
            }
            Some(Stage::Asked { .. }) => {
                let fenced = &self.fenced;
                self.side.is_drained(id, |d| fenced.contains(&d.0));
                false
            }
            Some(Stage::Drained { .. }) => {
                if self.side.changed(id).is_ok() {
                    let place = self.pool.map.remove(&volume);
                    self.pool.frozen.entry(volume).or_default().extend(place);
                    self.pool.epochs.insert(volume, next);
                }
                false
            }
            Some(Stage::Durable) => {
                self.say_epoch(volume, out);
                !out.dead
            }
            Some(Stage::GivenUp { .. } | Stage::Changed) | None => false,
        }
    }

    /// The freeze timed out: the rights come back.
    pub(crate) fn fail_freeze(&mut self, at: usize, out: &mut Outside<'_>) {
        let (revoke, volume) = (self.ops[at].revoke, self.ops[at].volume);
        out.say(ToEngine::Abandon { revoke });
        self.say_epoch(volume, out);
        self.end_op(at);
    }

    pub(crate) fn is_freezing(&self, at: usize) -> bool {
        self.ops[at].wish == Wish::Freeze && !self.ops[at].clears
    }
}

impl World {
    fn pools(&self) -> impl Iterator<Item = &Pool> {
        let daemon = self.daemon.iter().map(|daemon| &daemon.pool);
        std::iter::once(&self.durable).chain(daemon)
    }

    /// By the catalog, or by a drained freeze that is not yet durable.
    pub(crate) fn is_frozen(&self, volume: VolumeId, device: u8) -> bool {
        self.pools().any(|pool| pool.is_frozen(volume, device))
    }

    fn in_flight(&self) -> impl Iterator<Item = &Slice> {
        let ghosts = self.ghosts.iter().filter_map(|ghost| match ghost {
            Ghost::Slice(slice) => Some(slice),
            Ghost::ZeroFill(_) => None,
        });
        let engine = self.engine.iter();
        engine.flat_map(|engine| engine.at_devices()).chain(ghosts)
    }

    /// No write is in flight to a frozen place, not even a dead engine's.
    pub(crate) fn frozen_places_stay(&self) -> bool {
        let mut writes = self.in_flight().filter(|slice| slice.span.write);
        writes.all(|slice| !self.is_frozen(slice.span.volume, slice.device))
    }

    /// Without a freeze or a message on its way, the engine has the owner's epochs: otherwise a write
    /// would fault for ever.
    pub(crate) fn epochs_agree(&self) -> bool {
        let (Some(daemon), Some(engine)) = (&self.daemon, &self.engine) else {
            return true;
        };
        if !self.talking || daemon.talks_to().is_none() || !self.to_engine.is_empty() {
            return true;
        }
        let freezing =
            |volume| (daemon.ops.iter()).any(|op| op.volume == volume && op.wish == Wish::Freeze);
        daemon.pool.epochs.iter().all(|(volume, epoch)| {
            let present = engine.words.epochs.get(volume).copied().unwrap_or(0);
            freezing(*volume) || present == *epoch
        })
    }

    /// No engine's word allows a write to a frozen place.
    pub(crate) fn frozen_places_are_read_only(&self) -> bool {
        self.words().all(|(volume, word)| {
            let device = device_of(word.bits());
            let writes = word.claimed().writable();
            !writes || device.is_none_or(|device| !self.is_frozen(volume, device))
        })
    }

    /// After a write to a new place has ended, no word names an older one.
    pub(crate) fn the_last_write_is_read(&self) -> bool {
        self.words().all(|(volume, word)| {
            let (Some(read), Some(written)) = (device_of(word.bits()), self.written.get(&volume))
            else {
                return true;
            };
            self.pools().all(|pool| {
                let (read, written) = (pool.age(volume, read), pool.age(volume, *written));
                read.is_none_or(|read| written.is_some_and(|written| read >= written))
            })
        })
    }

    /// The effective words of the engine.
    fn words(&self) -> impl Iterator<Item = (VolumeId, forebay_xlate::Word)> {
        self.engine.iter().flat_map(|engine| {
            let volumes = engine.words.words.keys();
            volumes.filter_map(|volume| Some((*volume, engine.words.lookup(*volume, 0)?)))
        })
    }
}
