//! How clients go: by themselves, because their export is removed, because they were shut out.
//!
//! **Design.** Whoever goes is *drained*: nothing of it begins any more, what waits ends, and what is at devices is waited
//! for; only then everything of it is let go of, and the daemon is told. **Not here:** why they go.

use super::frontend::{Closing, Turn};
use super::{Life, Machine, Machines, REMOVAL_GRACE_NS, REMOVED};
use crate::core::Core;
use crate::mailbox::Upcall;
use forebay_nvme::Status;
use forebay_xlate::boundary::message::ExportId;
use rustix::event::epoll;
use rustix::net::Shutdown;

impl Machines {
    /// An export is removed: its client may go by itself for a moment, but starts no command any more. Gives
    /// how many of its commands have not ended.
    pub(crate) fn export_removed(&mut self, core: &mut Core, export: ExportId) -> u32 {
        let until = core.now_ns().saturating_add(REMOVAL_GRACE_NS);
        let mut left = 0;
        for at in 0..self.all.len() {
            let Some(machine) = &mut self.all[at] else {
                continue;
            };
            if machine.client.export.export != export || machine.life != Life::Open {
                continue;
            }
            machine.life = Life::Removed(until);
            if let Some(lane) = machine.client.lane.take() {
                core.orphan_machine(lane);
            }
            let Machine {
                client, frontend, ..
            } = &mut **machine;
            let stays = frontend.removed(&mut Turn { core, client });
            left += self.end_commands(core, at);
            if !stays {
                self.close(core, at, REMOVED);
            }
        }
        left
    }

    /// Closes all.
    pub(crate) fn close_all(&mut self, core: &mut Core) {
        self.stopping = true;
        for at in 0..self.all.len() {
            self.close(core, at, Closing("the engine stops"));
        }
    }

    /// Ends those of a client's commands that wait; how many are left.
    fn end_commands(&mut self, core: &mut Core, at: usize) -> u32 {
        let Some(Some(machine)) = self.all.get(at) else {
            return 0;
        };
        let mine = machine.client.owner(0);
        let left = core.end_waiting(Status::COMMAND_INTERRUPTED, |of, _, _| {
            of.conn == mine.conn && of.conn_generation == mine.conn_generation
        });
        // Those that ended just now are put away first.
        while let Some(done) = core.next_machine_done() {
            let owner = done.owner;
            if let Some(machine) = self.get(owner.conn, owner.conn_generation as u16) {
                let Machine {
                    client, frontend, ..
                } = machine;
                frontend.done(&mut Turn { core, client }, done);
            }
        }
        left
    }

    /// Shuts a client out.
    pub(super) fn close(&mut self, core: &mut Core, at: usize, why: Closing) {
        let Some(Some(machine)) = self.all.get_mut(at) else {
            return;
        };
        if matches!(machine.life, Life::Draining(_)) {
            return;
        }
        machine.life = Life::Draining(why);
        let _ = rustix::net::shutdown(&*machine.fd, Shutdown::Both);
        let _ = epoll::delete(&*self.epoll, &*machine.fd);
        let Machine {
            client, frontend, ..
        } = &mut **machine;
        frontend.close(&mut Turn { core, client });
        client.leave();
        let lane = client.lane;
        if let Some(lane) = lane {
            core.orphan_machine(lane);
        }
        machine.hide(core);
        self.drained(core, at, why);
    }

    /// Lets go of a client whose last command is back.
    pub(super) fn drained(&mut self, core: &mut Core, at: usize, why: Closing) {
        if self.end_commands(core, at) > 0 {
            return;
        }
        if let Some(machine) = self.all.get_mut(at).and_then(Option::take) {
            let Machine {
                mut client,
                talk,
                fd,
                frontend,
                ..
            } = *machine;
            drop(frontend);
            client.unregister_all(core);
            let (socket, export) = (client.socket, client.export.export);
            client.end();
            self.closer.close_suspect((talk.remains(), fd));
            core.upcall(Upcall::MachineLeft(socket, export, why));
        }
    }
}
