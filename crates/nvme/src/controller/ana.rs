//! Asymmetric Namespace Access (Base 2.0, 8.1): how well a controller reaches its namespaces.
//!
//! Purpose: the ANA log page and its event. Design: one group for all namespaces of a subsystem, whose
//! state on this controller the owner says; a host is told when it is another than what it was told
//! last, whoever told it. Does NOT refuse commands: the owner does, who sees them all.

use super::{AdminEnv, Controller, ControllerConfig, events};
use crate::log_page::{AnaDescriptor, AnaHeader};
use crate::{Status, feature};
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromZeros, IntoBytes};

/// The only group.
pub(super) const GROUP: u32 = 1;
/// ANATT: seconds that a change takes at the most.
pub(super) const TRANSITION_SECONDS: u8 = 10;
/// ANACAP: bits 0 to 2 the states below, bit 6 a namespace never changes its group.
pub(super) const CAPABILITIES: u8 = 0b0100_0111;
/// LSP bit 0: groups without their namespaces.
const GROUPS_ONLY: u32 = 1 << 8;

/// The state of a group (Base 2.0, 8.1.3), as the log page has it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u8)]
pub enum AnaState {
    /// As good as it gets.
    #[default]
    Optimized = 1,
    /// Usable, but others are better.
    NonOptimized = 2,
    /// Of no use: commands end with Asymmetric Access Inaccessible.
    Inaccessible = 3,
}

/// The group as it is on this controller now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ana {
    /// Its state.
    pub state: AnaState,
    /// How often that has changed: never falls.
    pub changes: u64,
}

impl Controller {
    /// The group's state, at the start and whenever it may have changed: a host that was told another
    /// is told.
    pub fn ana_is(&mut self, state: AnaState) {
        let told = std::mem::replace(&mut self.state.ana_told, state as u8);
        if told != 0 && told != state as u8 {
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
    /// The ANA log page.
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
