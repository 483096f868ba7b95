//! Serves VMs within their base between the quanta of lanes above theirs: [`AT_ONCE`] after each
//! quantum, in turn. A poll costs one load. **Not here:** how much a lane may begin in a turn
//! ([`crate::core`]); TCP hosts, where a poll is a system call.

use super::protocol::Turn;
use super::{Life, Vm, Vms, blame};
use crate::core::Core;

/// VMs to poll after a quantum, of at most `MOST` within their base.
pub(super) const AT_ONCE: usize = 4;
pub(super) const MOST: usize = 64;

impl Vm {
    pub(super) fn has_rung(&self) -> bool {
        !matches!(self.life, Life::Draining(_)) && self.frontend.has_rung()
    }
}

impl Vms {
    /// Lists the VMs within their base, if any lane bursts.
    pub(super) fn note_calm(&mut self, core: &Core) {
        self.calm.clear();
        if !core.qos.any_bursts() {
            return;
        }
        let all = self.all.len();
        for _ in 0..all.min(MOST) {
            self.calm_at = (self.calm_at + 1) % all;
            let Some(vm) = &self.all[self.calm_at] else {
                continue;
            };
            let lane = vm.client.lane;
            if vm.frontend.is_active() && lane.is_some_and(|lane| core.qos.is_calm(lane)) {
                self.calm.push(self.calm_at as u32);
            }
        }
    }

    pub(super) fn serve_calm(&mut self, core: &mut Core, index: u32) {
        let Some(Some(vm)) = self.all.get_mut(index as usize) else {
            return;
        };
        let Vm {
            client, frontend, ..
        } = &mut **vm;
        blame(core, client);
        let any = frontend.poll(&mut Turn { core, client });
        core.blame(None);
        if client.interrupts.any()
            && let Some(signals) = &mut self.signals
        {
            client.flush(core, signals);
            signals.flush();
        }
        let is_calm = client.lane.is_some_and(|lane| core.qos.is_calm(lane));
        if !any || !is_calm {
            // Its commands cannot begin in this turn.
            self.calm.retain(|calm| *calm != index);
        }
    }
}
