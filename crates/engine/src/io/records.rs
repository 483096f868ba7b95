//! What a reactor says of itself and of its commands in the state region.
//!
//! **Purpose.** A successor reads from there which devices a command may have reached, and which command an engine died of.
//! **Design.** The references live as long as the process: nothing on the path of a command counts references.
//! **Not here:** the layout ([`forebay_xlate::boundary::region`]), and the words of a command itself (its frontend's).

use crate::io::command::CommandRef;
use crate::records::keep_for_ever;
use forebay_xlate::boundary::region::{
    CommandRecord, MAX_QUEUE_ENTRIES, MAX_QUEUES, RECORDS, ReactorRecord, Region,
};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

/// See the module's text.
pub(crate) struct Records {
    pub(crate) reactor: &'static ReactorRecord,
    /// Those of all queues' commands.
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

    /// What the reactor works on from here on, should it die of it: 0 is no tenant's.
    #[inline]
    pub(crate) fn blame(&self, word: u64) {
        if RECORDS {
            self.reactor.blame.store(word, Relaxed);
        }
    }

    /// A compare-and-write has compared, and only its write is left.
    pub(crate) fn passes(&self, command: CommandRef) {
        if !command.is_machine() {
            self.commands[command.place()].pass();
        }
    }

    /// A successor must reckon with a command at this device.
    #[inline]
    pub(crate) fn submits(&self, command: CommandRef, device: u8) {
        if !command.is_machine() {
            self.commands[command.place()].submit_to(device);
        }
    }
}
