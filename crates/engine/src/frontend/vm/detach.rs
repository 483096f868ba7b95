//! Detaches clients. A leaving client is *drained*: its waiting commands end, and those at devices
//! are waited for. Then its resources are released and the daemon is informed. **Not here:** why a
//! client leaves.

use super::protocol::{Closing, Turn};
use super::{Life, Vm, Vms};
use crate::core::Core;
use crate::upcall::Upcall;
use forebay_nvme::Status;
use rustix::event::epoll;
use rustix::net::Shutdown;

impl Vms {
    /// Ends a client's waiting commands; returns how many commands are left.
    pub(super) fn end_commands(&mut self, core: &mut Core, at: usize) -> u32 {
        let Some(Some(vm)) = self.all.get(at) else {
            return 0;
        };
        let mine = vm.client.owner(0);
        let left = core.end_waiting(Status::COMMAND_INTERRUPTED, |of, _, _| {
            of.conn == mine.conn && of.conn_generation == mine.conn_generation
        });
        while let Some(done) = core.next_ended(self.index) {
            let owner = done.owner;
            if let Some(vm) = self.get(owner.conn, owner.conn_generation as u16) {
                let Vm {
                    client, frontend, ..
                } = vm;
                frontend.done(&mut Turn { core, client }, done);
            }
        }
        left
    }

    pub(super) fn close(&mut self, core: &mut Core, at: usize, why: Closing) {
        let Some(Some(vm)) = self.all.get_mut(at) else {
            return;
        };
        if matches!(vm.life, Life::Draining(_)) {
            return;
        }
        vm.life = Life::Draining(why);
        let _ = rustix::net::shutdown(&*vm.fd, Shutdown::Both);
        let _ = epoll::delete(&*self.epoll, &*vm.fd);
        let Vm {
            client, frontend, ..
        } = &mut **vm;
        frontend.close(&mut Turn { core, client });
        client.detach();
        let lane = client.lane;
        if let Some(lane) = lane {
            core.recovered.orphan_vm(lane);
        }
        vm.hide(core);
        self.drained(core, at, why);
    }

    pub(super) fn drained(&mut self, core: &mut Core, at: usize, why: Closing) {
        if self.end_commands(core, at) > 0 {
            return;
        }
        if let Some(vm) = self.all.get_mut(at).and_then(Option::take) {
            let Vm {
                mut client,
                talk,
                fd,
                frontend,
                ..
            } = *vm;
            drop(frontend);
            client.unregister_all(core);
            let (socket, export) = (client.socket, client.export.export);
            client.end();
            self.closer.close_suspect((talk.remains(), fd));
            core.upcalls
                .push_back(Upcall::VmDetached(socket, export, why));
        }
    }
}
