//! A reactor's records in the state region: devices that a command may have reached, and the
//! command to blame.
//!
//! **Design.** References last as long as the process, so commands count none. **Not here:** the
//! layout ([`forebay_xlate::boundary::region`]).

use crate::io::command::CommandRef;
use forebay_xlate::boundary::region::{
    CommandRecord, MAX_QUEUE_ENTRIES, MAX_QUEUES, RECORDS, ReactorRecord, Region,
};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

/// An engine has one region until its process ends, so references to it need no count.
pub(crate) fn keep_for_ever(region: &Arc<Region>) -> &'static Region {
    Box::leak(Box::new(region.clone()))
}

pub(crate) struct Records {
    pub(crate) reactor: &'static ReactorRecord,
    pub(crate) commands: &'static [CommandRecord; MAX_QUEUES * MAX_QUEUE_ENTRIES],
}

impl Records {
    pub(crate) fn new(region: &Arc<Region>, reactor: usize) -> Self {
        let region = keep_for_ever(region);
        Self {
            reactor: &region.reactors()[reactor],
            commands: region.commands_in_a_row(),
        }
    }

    /// The command to blame if the reactor dies from here on; 0: no tenant's.
    #[inline]
    pub(crate) fn blame(&self, word: u64) {
        if RECORDS {
            self.reactor.blame.store(word, Relaxed);
        }
    }

    /// A compare-and-write has compared; only its write is left.
    pub(crate) fn passes(&self, command: CommandRef) {
        if !command.is_vm() {
            self.commands[command.place()].pass();
        }
    }

    /// A successor must expect the command at this device.
    #[inline]
    pub(crate) fn submits(&self, command: CommandRef, device: u8) {
        if !command.is_vm() {
            self.commands[command.place()].submit_to(device);
        }
    }
}
