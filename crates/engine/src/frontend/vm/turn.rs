//! Implements [`Frontend`] for VMs: each call goes over the clients. After a turn with work, rings
//! are not polled for [`REST_TURNS`] turns.

use super::between_quanta::AT_ONCE;
use super::protocol::{Closing, Turn};
use super::{Life, REMOVAL_GRACE_NS, REMOVED, RETRY_NS, Vm, VmMessage, Vms};
use crate::core::Core;
use crate::frontend::{Beside, Frontend};
use forebay_xlate::boundary::message::ExportId;

/// The driver needs longer than this to queue more, and polling takes the cache line away from it.
const REST_TURNS: u32 = 2;
/// The longest sleep while a detached client's commands are outstanding.
const DRAINING_RETRY_NS: u64 = 100_000_000;

impl Frontend for Vms {
    fn poll(&mut self, core: &mut Core, _beside: Beside<'_>) -> bool {
        if self.rest > 0 && !core.has_ended(self.index) && !core.qos.has_ready() {
            self.rest -= 1;
            return false;
        }
        let any = self.poll_all(core);
        if any {
            self.rest = REST_TURNS;
        }
        any
    }

    fn poll_after_sleep(&mut self, core: &mut Core) -> bool {
        // Most likely a VM's doorbell ended the sleep; serve it before the caches fill with other
        // work.
        self.poll_all(core)
    }

    fn poll_between(&mut self, core: &mut Core) -> bool {
        for _ in 0..AT_ONCE.min(self.calm.len()) {
            self.calm_next = match self.calm_next + 1 {
                next if next < self.calm.len() => next,
                _ => 0,
            };
            let index = self.calm[self.calm_next];
            let vm = self.all.get(index as usize);
            if vm.is_some_and(|m| m.as_ref().is_some_and(|m| m.has_rung())) {
                self.serve_calm(core, index);
                return true;
            }
        }
        false
    }

    fn sockets_ready(&mut self, core: &mut Core, keys: &[u64]) {
        let index = self.index;
        for key in keys.iter().filter(|key| index.has_key(**key)) {
            let (index, generation) = ((key >> 16) as u32 & 0xFF_FFFF, (key >> 40) as u16);
            let Some(vm) = self.get(index, generation) else {
                continue;
            };
            match (key & 0xFFFF) as usize {
                0 => vm.talk.ready(),
                _ if matches!(vm.life, Life::Draining(_)) => {}
                what => {
                    let Vm {
                        client, frontend, ..
                    } = vm;
                    frontend.ready(&mut Turn { core, client }, what - 1);
                }
            }
        }
    }

    fn is_idle(&self) -> bool {
        let busy = |m: &Vm| {
            !matches!(m.life, Life::Draining(_))
                && (m.client.closing.is_some()
                    || m.client.interrupts.any()
                    || m.asks()
                    || m.talk.is_active() && !m.talk.must_retry())
        };
        !self.all.iter().flatten().any(|m| busy(m))
    }

    fn arm(&mut self, core: &mut Core) -> bool {
        let mut may = true;
        for vm in self.all.iter_mut().flatten() {
            if matches!(vm.life, Life::Draining(_)) {
                continue;
            }
            let Vm {
                client, frontend, ..
            } = &mut **vm;
            may &= frontend.arm(&mut Turn { core, client });
        }
        may && !core.has_ended(self.index)
    }

    fn prefers_polling(&self) -> bool {
        // A VM that must ring pays more for it than polling costs.
        self.count() > 0
    }

    fn retry_within_ns(&self) -> Option<u64> {
        let retries = |m: &Vm| !matches!(m.life, Life::Draining(_)) && m.talk.must_retry();
        if self.all.iter().flatten().any(|m| retries(m)) {
            return Some(RETRY_NS);
        }
        let mut all = self.all.iter().flatten();
        all.any(|m| matches!(m.life, Life::Draining(_)))
            .then_some(DRAINING_RETRY_NS)
    }

    fn next_deadline_ns(&self) -> Option<u64> {
        let of = |m: &Vm| {
            let removed = match m.life {
                Life::Open => None,
                Life::Removed(until) => Some(until),
                Life::Draining(_) => return None,
            };
            let deadlines = [removed, m.talk.deadline_ns(), m.frontend.deadline_ns()];
            deadlines.into_iter().flatten().min()
        };
        self.all.iter().flatten().filter_map(|m| of(m)).min()
    }

    fn tick(&mut self, core: &mut Core) {
        let now = core.now_ns();
        for at in 0..self.all.len() {
            let Some(vm) = &mut self.all[at] else {
                continue;
            };
            match vm.life {
                Life::Draining(why) => {
                    self.drained(core, at, why);
                    continue;
                }
                Life::Removed(until) if now >= until => vm.client.fail(REMOVED),
                _ => {}
            }
            let is_late = |limit: Option<u64>| limit.is_some_and(|limit| now >= limit);
            if is_late(vm.talk.deadline_ns()) || is_late(vm.frontend.deadline_ns()) {
                core.blame(None);
                vm.talk.ready();
                vm.talk(core);
            }
            if is_late(vm.talk.deadline_ns()) {
                let why = vm.talk.overdue();
                vm.client.fail(why);
            }
            vm.client.is_heard = vm.talk.hears();
            let Vm {
                client, frontend, ..
            } = &mut **vm;
            frontend.tick(&mut Turn { core, client });
            vm.show(core);
        }
    }

    fn accept(
        &mut self,
        core: &mut Core,
        message: crate::frontend::FrontendMessage,
    ) -> Result<(), crate::frontend::FrontendMessage> {
        match *message.downcast::<VmMessage>()? {
            VmMessage::Client(new) => self.adopt(core, *new),
            VmMessage::Deposited(socket, last, kept) => self.deposited(socket, last, kept),
        }
        Ok(())
    }

    fn export_changed(&mut self, core: &mut Core, export: ExportId) -> u32 {
        for vm in self.all.iter_mut().flatten() {
            if vm.client.export.export == export && vm.life == Life::Open {
                let Vm {
                    client, frontend, ..
                } = &mut **vm;
                frontend.changed(&mut Turn { core, client });
            }
        }
        0
    }

    fn export_removed(&mut self, core: &mut Core, export: ExportId) -> u32 {
        let until = core.now_ns().saturating_add(REMOVAL_GRACE_NS);
        let mut left = 0;
        for at in 0..self.all.len() {
            let Some(vm) = &mut self.all[at] else {
                continue;
            };
            if vm.client.export.export != export || vm.life != Life::Open {
                continue;
            }
            vm.life = Life::Removed(until);
            if let Some(lane) = vm.client.lane.take() {
                core.recovered.orphan_vm(lane);
            }
            let Vm {
                client, frontend, ..
            } = &mut **vm;
            let stays = frontend.removed(&mut Turn { core, client });
            left += self.end_commands(core, at);
            if !stays {
                self.close(core, at, REMOVED);
            }
        }
        left
    }

    fn close_all(&mut self, core: &mut Core) {
        self.stopping = true;
        for at in 0..self.all.len() {
            self.close(core, at, Closing("the engine is stopping"));
        }
    }

    fn count(&self) -> usize {
        self.all.iter().flatten().count()
    }
}
