//! Asymmetric Namespace Access (Base 2.0, 8.1): log page and event.
//!
//! One group holds all namespaces; the owner sets its state. A host is notified if the state
//! differs from the last one reported, even by a predecessor. The owner refuses the commands.

use super::{AdminEnv, Controller, ControllerConfig, events};
use crate::log_page::{AnaDescriptor, AnaHeader};
use crate::{Status, feature};
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromZeros, IntoBytes};

pub(super) const GROUP: u32 = 1;
/// ANATT: maximum seconds of a change.
pub(super) const TRANSITION_SECONDS: u8 = 10;
/// ANACAP: bits 0–2 the states below, bit 6 fixed groups.
pub(super) const CAPABILITIES: u8 = 0b0100_0111;
/// LSP bit 0: omit namespaces.
const GROUPS_ONLY: u32 = 1 << 8;

/// State of a group (Base 2.0, 8.1.3).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u8)]
pub enum AnaState {
    /// The best path.
    #[default]
    Optimized = 1,
    /// Usable, but other paths are better.
    NonOptimized = 2,
    /// Unusable: commands end with Asymmetric Access Inaccessible.
    Inaccessible = 3,
}

/// The group's current state on this controller.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ana {
    /// Its state.
    pub state: AnaState,
    /// Number of changes.
    pub changes: u64,
}

impl Controller {
    /// Sets the state; the host is notified if it saw another.
    pub fn ana_is(&mut self, state: AnaState) {
        let reported = std::mem::replace(&mut self.state.ana_reported, state as u8);
        if reported != 0 && reported != state as u8 {
            self.state.raise(events::EVENT_ANA, feature::AEC_ANA_CHANGE);
        }
    }

    pub(super) fn ana_log(
        &mut self,
        cdw10: u32,
        offset: u64,
        retain: bool,
        out: &mut [u8],
        env: &dyn AdminEnv,
    ) -> Result<(), Status> {
        super::log_pages::part(&self.config.ana_page(cdw10, env), offset, out)?;
        if !retain {
            self.state.clear_event(events::EVENT_ANA);
        }
        Ok(())
    }
}

impl ControllerConfig {
    pub(super) fn ana_page(&self, cdw10: u32, env: &dyn AdminEnv) -> Vec<u8> {
        let ana = env.ana();
        let mut header = AnaHeader::new_zeroed();
        header.change_count = U64::new(ana.changes);
        header.groups = U16::new(1);
        let active = (1..=self.namespaces).filter(|nsid| env.namespace(*nsid).is_some());
        let nsids: Vec<U32> = match cdw10 & GROUPS_ONLY {
            0 => active.map(U32::new).collect(),
            _ => Vec::new(),
        };
        let mut group = AnaDescriptor::new_zeroed();
        group.group = U32::new(GROUP);
        group.nsids = U32::new(nsids.len() as u32);
        group.change_count = U64::new(ana.changes);
        group.state = ana.state as u8;
        [header.as_bytes(), group.as_bytes(), nsids.as_bytes()].concat()
    }
}
