//! The parts of a client's memory that are registered with the ring, so that transfers need no page
//! look-up. Their number is bounded; the rest is served unregistered. The ring forgets memory
//! before it is unmapped. **Not here:** pinning ([`crate::frontend::vm::registered`]).

use super::Client;
use crate::core::Core;
use crate::frontend::vm::registered::Ready;
use forebay_device::Registration;
use forebay_guest::Mapping;
use std::sync::Weak;
use std::sync::atomic::Ordering::Relaxed;

/// Limits per client: to forget one part scans all of the ring's.
pub(crate) const MAX_REGISTERED: usize = 64;
pub(crate) const MAX_REGISTERED_ENTRIES: usize = 512;

/// A registered part of a mapping; it holds one reference to the mapping.
pub(super) struct Registered {
    pub(super) mapping: Weak<Mapping>,
    name: Registration,
    entries: usize,
    bytes: u64,
}

impl Client {
    /// Starts to register new regions in the background: the one at an address, or all.
    pub(super) fn have_registered(&self, address: Option<u64>) {
        let Some(asker) = &self.place.asker else {
            return;
        };
        for region in self.memory.regions() {
            if address.is_none_or(|address| region.guest_address() == address)
                && let Some(mapping) = region.mapping()
            {
                asker.hold(mapping);
            }
        }
    }

    pub(in crate::frontend::vm) fn register(&mut self, core: &mut Core, ready: Ready) {
        let Ready {
            mapping, pinned, ..
        } = ready;
        let wanted = mapping.upgrade().is_some_and(|m| !m.is_retired());
        if !wanted {
            self.place.closer.close(pinned);
            return;
        }
        let (entries, bytes) = (pinned.entries(), pinned.bytes());
        let known: usize = self.registered.iter().map(|r| r.entries).sum();
        if self.registered.len() >= MAX_REGISTERED
            || known.saturating_add(entries) > MAX_REGISTERED_ENTRIES
        {
            self.place.closer.close(pinned);
            return;
        }
        match core.devices.register(pinned) {
            Ok(name) => self.registered.push(Registered {
                mapping,
                name,
                entries,
                bytes,
            }),
            Err(pinned) => self.place.closer.close(pinned),
        }
        self.show_registered(core);
    }

    /// Unregisters those that `which` selects; they must be unused.
    pub(super) fn unregister(&mut self, core: &mut Core, which: impl Fn(&Weak<Mapping>) -> bool) {
        for at in (0..self.registered.len()).rev() {
            if which(&self.registered[at].mapping) {
                let name = self.registered.swap_remove(at).name;
                // Unpinning much memory takes long.
                self.place.closer.close(core.devices.unregister(name));
            }
        }
        self.show_registered(core);
    }

    /// Unregisters all; none of its commands may be left.
    pub(in crate::frontend::vm) fn unregister_all(&mut self, core: &mut Core) {
        self.unregister(core, |_| true);
    }

    pub(in crate::frontend::vm) fn registered_bytes(&self) -> u64 {
        self.registered.iter().map(|r| r.bytes).sum()
    }

    #[cfg(test)]
    pub(in crate::frontend::vm) fn has_memory_registered(&self) -> bool {
        self.place.asker.is_some()
    }

    fn show_registered(&self, core: &Core) {
        let bytes = self.registered_bytes();
        if let Some(lane) = self.own_lane(core).and_then(|lane| core.lane(lane)) {
            lane.record().registered_bytes.store(bytes, Relaxed);
        }
    }
}
