//! Connections across engines.
//!
//! **Design.** The daemon gets each accepted socket at once, under a permanent number, and its end.
//! A successor gathers a dead engine's sockets from the daemon, converts them ([`crate::takeover`])
//! and waits for `Resume`. If the daemon dies before, it stops, because it is unknown which
//! generation is valid.

use super::Control;
use super::vms::{self, Converted, Gathered};
use crate::exports::ExportTable;
use crate::frontend::nvme_tcp::TcpMessage;
use crate::frontend::{self, vm};
use crate::listener::{Listener, NewConnection, Outside, RefusedHost};
use crate::reactor::mailbox::{ControlEnd, Post};
use crate::takeover::{Inheritance, Pending, Successor, counters};
use forebay_xlate::boundary::message::{Blamed, ExportId, FromEngine};
use forebay_xlate::boundary::socket::Channel;
use forebay_xlate::kill_point;
use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering::Release;

const NO_DESCRIPTOR: &str = "this engine ran out of file descriptors";

#[derive(Debug, Default)]
pub(super) enum Handover {
    /// None, or finished.
    #[default]
    None,
    /// The numbers are connections without a descriptor.
    Gathering(u64, Pending, Vec<u64>, Vec<Gathered>),
    Converted(Inheritance, Vec<u64>, Converted),
}

pub(super) struct Sockets<'a> {
    /// A failed send shows at the channel's next event.
    channel: Option<&'a mut Channel>,
    sockets: &'a mut BTreeMap<u64, Arc<OwnedFd>>,
    mailboxes: &'a mut [ControlEnd],
}

impl Outside for Sockets<'_> {
    fn accepted(&mut self, socket: u64, fd: &Arc<OwnedFd>) {
        self.sockets.insert(socket, fd.clone());
        let Some(channel) = &mut self.channel else {
            return;
        };
        let _ = channel.send_shared(&FromEngine::Socket { socket }, vec![fd.clone()]);
    }

    fn gone(&mut self, socket: u64) {
        self.sockets.remove(&socket);
        if let Some(channel) = &mut self.channel {
            let _ = channel.send(&FromEngine::SocketGone { socket }, Vec::new());
        }
    }

    fn refused(&mut self, newest: RefusedHost, count: u32) {
        if let Some(channel) = &mut self.channel {
            let refused = FromEngine::HostRefused {
                host: newest.host,
                subsystem: newest.subsystem,
                why: newest.why.to_string(),
                count,
            };
            let _ = channel.send(&refused, Vec::new());
        }
    }

    fn route(&mut self, reactor: usize, connection: Box<NewConnection>) {
        if let Some(mailbox) = self.mailboxes.get_mut(reactor) {
            mailbox.post(Post::Frontend(Box::new(TcpMessage::Connection(connection))));
        }
    }
}

impl Control {
    pub(super) fn take_over(
        &mut self,
        request: u64,
        generation: u64,
        blamed: Option<Blamed>,
        descriptors: Vec<OwnedFd>,
    ) {
        let mut descriptors = descriptors.into_iter();
        let begun = match (descriptors.next(), descriptors.next()) {
            // An engine that serves has conflicting records.
            _ if self.listener.listeners().next().is_some()
                || !self.sockets.is_empty()
                || self.has_vms() =>
            {
                Err("this engine is already serving".to_string())
            }
            (None, _) => Err("no state region came".to_string()),
            (Some(region), memory) => Pending::new(generation, region, memory, blamed),
        };
        match begun {
            Ok(pending) => {
                self.handover = Handover::Gathering(request, pending, Vec::new(), Vec::new())
            }
            Err(error) => self.say(&FromEngine::Refused { request, error }),
        }
    }

    /// Adds connections of the dead engine. One without a descriptor ends.
    pub(super) fn gather(&mut self, sockets: Vec<u64>, descriptors: Vec<OwnedFd>) {
        let Handover::Gathering(_, pending, without, _) = &mut self.handover else {
            return;
        };
        let came = descriptors.len();
        for (socket, fd) in sockets.iter().zip(descriptors) {
            pending.add(*socket, fd);
        }
        without.extend(sockets.into_iter().skip(came));
    }

    pub(super) fn gather_vm(&mut self, socket: u64, export: ExportId, descriptors: Vec<OwnedFd>) {
        if let Handover::Gathering(_, _, _, vms) = &mut self.handover {
            vms.push(Gathered::new(socket, export, descriptors));
        }
    }

    /// Adds descriptors deposited by the last of these clients.
    pub(super) fn gather_deposits(&mut self, numbers: &[u32], descriptors: Vec<OwnedFd>) {
        if let Handover::Gathering(_, _, _, vms) = &mut self.handover
            && let Some(vm) = vms.last_mut()
        {
            vm.add(numbers, descriptors);
        }
    }

    pub(super) fn convert(&mut self) {
        let (request, pending, without, vms) = match std::mem::take(&mut self.handover) {
            Handover::Gathering(request, pending, without, vms) => (request, pending, without, vms),
            other => {
                self.handover = other;
                return;
            }
        };
        let blamed = pending.blamed();
        let mut inheritance = pending.convert(Successor {
            region: &self.region,
            memory: self.memory,
            reactors: self.mailboxes.len(),
            lanes: &self.lanes.served(&self.volumes),
            exports: &self.exports,
            associations: self.listener.associations(),
        });
        let vms = vms::convert(
            vms,
            &self.lanes.served(&self.volumes),
            blamed,
            &mut inheritance,
        );
        let mut closed: BTreeMap<String, u32> = BTreeMap::new();
        for (_, _, _, why) in &vms.closed {
            *closed.entry(why.0.to_string()).or_default() += 1;
        }
        for (_, _, why) in &inheritance.closed {
            *closed.entry(why.to_string()).or_default() += 1;
        }
        if !without.is_empty() {
            let count = u32::try_from(without.len()).unwrap_or(u32::MAX);
            closed.insert(NO_DESCRIPTOR.to_string(), count);
        }
        self.say(&FromEngine::Converted {
            request,
            queues: inheritance.queues,
            commands: inheritance.commands,
            vms: inheritance.parts.iter().map(|p| p.vms.len() as u32).sum(),
            closed: closed.into_iter().collect(),
        });
        self.handover = Handover::Converted(inheritance, without, vms);
    }

    /// From here on this engine's records are valid.
    pub(super) fn resume(&mut self) -> Result<(), String> {
        let (inheritance, without, vms) = match std::mem::take(&mut self.handover) {
            Handover::Converted(inheritance, without, vms) => (inheritance, without, vms),
            other => {
                self.handover = other;
                return Err("there is no converted state to resume".to_string());
            }
        };
        self.region.header().resumed.store(1, Release);
        kill_point!("over.resumed");
        // Devices come first, unless an unrecorded operation may still land.
        match inheritance.after_fence {
            false => self.serve_devices(&inheritance.served),
            true => self.expect_devices(&inheritance.served),
        }
        for part in &inheritance.parts {
            self.resume_vms(&part.vms);
        }
        for (mailbox, mut part) in self.mailboxes.iter_mut().zip(inheritance.parts) {
            let sockets = part.queues.iter();
            let sockets = sockets.map(|queue| (queue.constants.socket, queue.fd.clone()));
            self.sockets.extend(sockets);
            let clients = std::mem::take(&mut part.vms);
            let mut messages: Vec<frontend::FrontendMessage> =
                vec![Box::new(TcpMessage::Inherit(Box::new(part)))];
            for client in clients {
                messages.push(Box::new(vm::VmMessage::Client(Box::new(client))));
            }
            mailbox.post(Post::Inherit(messages));
            mailbox.flush();
            kill_point!("over.inherited");
        }
        for (socket, fd) in inheritance.handshakes {
            self.sockets.insert(socket, fd.clone());
            let welcomed = counters::read(&fd).is_ok_and(|facts| facts.accepted > 0);
            let (listener, exports, mut out) = self.listener_and_outside();
            listener.readmit(socket, fd, welcomed, exports, &mut out);
        }
        for (socket, fd, _) in inheritance.closed {
            // The daemon holds it too.
            let _ = rustix::net::shutdown(&fd, rustix::net::Shutdown::Both);
            self.say(&FromEngine::SocketGone { socket });
        }
        self.close_vms(vms);
        // The daemon has the only descriptors.
        for socket in without {
            self.say(&FromEngine::SocketGone { socket });
        }
        Ok(())
    }

    /// The daemon died, so its decision is unknown.
    pub(super) fn give_up_handover(&mut self) {
        if !matches!(self.handover, Handover::None) {
            self.handover = Handover::None;
            self.stop();
        }
    }

    pub(super) fn listener_and_outside(&mut self) -> (&mut Listener, &ExportTable, Sockets<'_>) {
        let outside = Sockets {
            channel: self.link.channel.as_mut().filter(|_| self.link.greeted),
            sockets: &mut self.sockets,
            mailboxes: &mut self.mailboxes,
        };
        (&mut self.listener, &self.exports, outside)
    }

    pub(super) fn socket_gone(&mut self, socket: u64) {
        self.sockets.remove(&socket);
        self.say(&FromEngine::SocketGone { socket });
    }
}
