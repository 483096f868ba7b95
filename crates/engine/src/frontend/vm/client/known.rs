//! What of a client's memory the ring knows.
//!
//! Purpose: parts of it that are held ([`crate::frontend::vm::registered`]) are named to the ring, so that transfers need not look up
//! pages; the ring forgets them before the memory goes.
//! Design: bounded for each client. What is not known is served all the same.
//! Not here: holding.

use super::Client;
use crate::core::Core;
use crate::frontend::vm::registered::Ready;
use forebay_device::Registration;
use forebay_guest::Mapping;
use std::sync::Weak;
use std::sync::atomic::Ordering::Relaxed;

/// What a ring knows of one client at most, in parts and in their entries: to forget one looks at all of the ring's.
pub(crate) const MAX_REGISTERED: usize = 64;
pub(crate) const MAX_REGISTERED_ENTRIES: usize = 512;

/// A part of a mapping that the ring knows; it holds the mapping once.
pub(super) struct Registered {
    pub(super) mapping: Weak<Mapping>,
    name: Registration,
    entries: usize,
    bytes: u64,
}

impl Client {
    /// Has regions that are new registered, in the background: that at an address, or all.
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

    /// Has the ring know a part of its memory that is held, if it is still wanted.
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
            // The rest is served unregistered.
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
            // It is served unregistered.
            Err(pinned) => self.place.closer.close(pinned),
        }
        self.show_registered(core);
    }

    /// Has the ring forget those of which this says so: of nothing that is still used.
    pub(super) fn unregister(&mut self, core: &mut Core, which: impl Fn(&Weak<Mapping>) -> bool) {
        for at in (0..self.registered.len()).rev() {
            if which(&self.registered[at].mapping) {
                let name = self.registered.swap_remove(at).name;
                // To let go of much takes its time.
                self.place.closer.close(core.devices.unregister(name));
            }
        }
        self.show_registered(core);
    }

    /// The same with all of them: none of its commands are left.
    pub(in crate::frontend::vm) fn unregister_all(&mut self, core: &mut Core) {
        self.unregister(core, |_| true);
    }

    /// How much of its memory the ring knows.
    pub(in crate::frontend::vm) fn registered_bytes(&self) -> u64 {
        self.registered.iter().map(|r| r.bytes).sum()
    }

    /// Whether its memory is to be registered at all.
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
