//! How connections and associations begin and end.
//!
//! **Design.** An admin queue's connection makes the controller; when it ends, all I/O queues of the
//! controller end with it. A closed connection is *drained* when the core has given back its last
//! command; a controller is gone with its last drained connection. Its host may be back before that: what
//! it has left at a device is waited for by what overlaps it ([`Core::orphan`]). A reset or shutdown
//! closes the I/O queues, waits for them to drain, flushes if it is a shutdown, and only then tells the
//! controller that it is quiet.
//!
//! All of this happens between the handling of two connections ([`Frontend::settle`]), never inside.
//!
//! **Not here:** who may connect at all ([`crate::door`]).

use super::conn::{Conn, Life};
use super::controllers::{Attached, Quiesce, take_controller_slot, take_queue_slot};
use super::{
    BLOCKED_LIMIT_NS, DATA_LIMIT_NS, Event, Frontend, IN_CAPSULE_BYTES, MAX_IO_ENTRIES, admin,
    command, controller_config, oldest_asked_ns,
};
use crate::associations::Association;
use crate::core::Core;
use crate::door::{NewConnection, NewKind, Target};
use crate::lane::LaneIndex;
use forebay_nvme::Cqe;
use forebay_nvme::controller::{AdminConnect, Controller, ControllerConfig, Refusal};
use forebay_nvme::fabrics::{self, ConnectCommand, ConnectData};
use forebay_nvme::tcp;
use forebay_xlate::boundary::message::ExportId;
use forebay_xlate::boundary::region::{
    QueueConstants, QueueIdentity, QueueRecord, bump, queue_use,
};
use rustix::event::epoll;
use rustix::net::SendFlags;
use std::sync::atomic::Ordering::{Relaxed, Release};

/// Connections of a lane that may wait for their last commands when a host connects: on a device that
/// hangs, one that comes back again and again would take all places.
pub(super) const MAX_DRAINING: usize = 64;

/// The place of a new queue.
struct Place {
    controller: u32,
    qid: u16,
    entries: u32,
    lane: Option<LaneIndex>,
    no_flow_control: bool,
}

impl Frontend {
    /// Takes a connection from the door, and answers its Connect.
    pub(crate) fn adopt(&mut self, core: &mut Core, new: NewConnection) {
        if self.stopping {
            return;
        }
        let NewConnection {
            fd,
            params,
            connect,
            data,
            kind,
            local,
            ..
        } = new;
        let adopted = match kind {
            NewKind::Admin {
                association,
                connect,
                target,
            } => self.adopt_admin(core, association, &connect, &target, local),
            NewKind::Io { cntlid } => {
                self.adopt_io(core, cntlid, ConnectCommand::of(&connect), &data)
            }
        };
        let refusal = match adopted {
            Ok(place) => match self.place(core, fd, params, connect.cid(), &place) {
                Ok(()) => return,
                Err((fd, refusal)) => {
                    self.undo(&place);
                    (fd, refusal)
                }
            },
            Err(refusal) => (fd, refusal),
        };
        // A fresh socket takes this much. What the host still sends is nothing: it waits for this.
        let (fd, refusal) = refusal;
        let mut out = [0; tcp::MAX_HEADER_BYTES];
        let cqe = Cqe::new(refusal.result, 0, 0, connect.cid(), refusal.status);
        let n = tcp::put_capsule_resp(&mut out, &params, &cqe);
        let _ = rustix::net::send(&fd, &out[..n], SendFlags::NOSIGNAL | SendFlags::DONTWAIT);
    }

    fn adopt_admin(
        &mut self,
        core: &Core,
        association: Association,
        connect: &AdminConnect,
        target: &Target,
        local: std::net::SocketAddr,
    ) -> Result<Place, Refusal> {
        let cntlid = association.cntlid();
        let (config, lane, export) = match target {
            Target::Discovery(_) => (ControllerConfig::discovery(cntlid), None, None),
            Target::Export(export) => {
                let index = core
                    .lane_of_export(*export)
                    .ok_or_else(Refusal::unknown_subsystem)?;
                let lane = core.lane(index).ok_or_else(Refusal::unknown_subsystem)?;
                let conns = self.conns.iter().flatten();
                let draining = conns
                    .filter(|c| c.life == Life::Draining && c.lane == Some(index))
                    .count();
                if draining > MAX_DRAINING {
                    return Err(Refusal::busy());
                }
                let config = controller_config(cntlid, Some(&lane.export))
                    .ok_or_else(Refusal::unknown_subsystem)?;
                (config, Some(index), Some(*export))
            }
        };
        let slot = take_controller_slot(&self.shared.region).ok_or_else(Refusal::busy)?;
        let attached = Attached {
            controller: Controller::new(config, connect, core.now_ns()),
            _association: association,
            lane,
            export,
            exports: match target {
                Target::Discovery(exports) => Some(exports.clone()),
                Target::Export(_) => None,
            },
            slot,
            admin: None,
            conns: Vec::new(),
            quiesce: Quiesce::No,
            blocks: lane
                .and_then(|l| core.lane(l))
                .map_or(0, |l| l.volume.blocks()),
            local,
        };
        attached.record(&self.shared.region);
        let entries = connect.entries;
        let no_flow_control = connect.disable_sq_flow_control;
        let controller = self.controllers.add(attached);
        Ok(Place {
            controller,
            qid: 0,
            entries,
            lane,
            no_flow_control,
        })
    }

    fn adopt_io(
        &mut self,
        core: &mut Core,
        cntlid: u16,
        command: &ConnectCommand,
        data: &ConnectData,
    ) -> Result<Place, Refusal> {
        let unknown = || {
            let (status, result) = fabrics::invalid_parameter(true, ConnectData::OFFSET_CNTLID);
            Refusal { status, result }
        };
        let living =
            |(_, a): &(u32, &Attached)| a.controller.cntlid() == cntlid && a.admin.is_some();
        let (controller, attached) = self.controllers.iter().find(living).ok_or_else(unknown)?;
        // An earlier connection of this queue may have ended, and we not have seen it yet.
        let qid = command.qid.get();
        let same = attached.conns.iter().copied().find(|c| {
            self.conns
                .get(*c as usize)
                .is_some_and(|c| c.as_ref().is_some_and(|c| c.qid == qid))
        });
        if let Some(same) = same {
            self.visit(core, same);
            self.settle(core);
        }
        let attached = self.controllers.get_mut(controller).ok_or_else(unknown)?;
        let queue = attached.controller.connect_io_queue(command, data)?;
        Ok(Place {
            controller,
            qid: queue.qid,
            entries: queue.entries,
            lane: attached.lane,
            no_flow_control: queue.disable_sq_flow_control,
        })
    }

    /// Gives a queue its place among the connections and in the state region.
    fn place(
        &mut self,
        core: &mut Core,
        fd: std::os::fd::OwnedFd,
        params: tcp::TcpParams,
        cid: u16,
        place: &Place,
    ) -> Result<(), (std::os::fd::OwnedFd, Refusal)> {
        let Some(queue) = take_queue_slot(&self.shared.region) else {
            return Err((fd, Refusal::busy()));
        };
        let record = &self.shared.region.queues()[queue as usize];
        let constants = QueueConstants {
            controller: self.controllers.get(place.controller).map_or(0, |a| a.slot),
            identity: QueueIdentity {
                qid: place.qid,
                entries: place.entries.min(MAX_IO_ENTRIES) as u16,
                no_flow_control: place.no_flow_control,
            },
            params: 0,
            socket: 0,
            reactor: self.reactor as u32,
            keep: queue,
        };
        let key = self.shared.region.header().key.load(Relaxed);
        record.put_constants(key, queue, &constants);
        record.number.store(0, Relaxed);
        record.used.store(queue_use::LIVE, Release);
        let at = self
            .conns
            .iter()
            .position(Option::is_none)
            .unwrap_or(self.conns.len());
        self.generation = (self.generation + 1) & 0x00ff_ffff;
        let params = tcp::TcpParams {
            // Both kinds of queue announce the same.
            max_in_capsule_bytes: IN_CAPSULE_BYTES,
            ..params
        };
        let mut conn = Box::new(Conn::new(
            at as u32,
            self.generation,
            fd,
            params,
            self.shared.clone(),
            queue,
            place.controller,
            place.qid,
            place.entries.min(MAX_IO_ENTRIES) as u16,
            place.lane,
            place.no_flow_control,
        ));
        let watched = conn.fd.as_ref().map(|fd| {
            epoll::add(
                &self.epoll,
                fd,
                epoll::EventData::new_u64(conn.key()),
                epoll::EventFlags::IN,
            )
        });
        if !matches!(watched, Some(Ok(())))
            && let Some(fd) = conn.fd.take()
        {
            free_queue(record);
            return Err((fd, Refusal::busy()));
        }
        let cntlid = match self.controllers.get_mut(place.controller) {
            Some(attached) => {
                attached.conns.push(at as u32);
                if place.qid == 0 {
                    attached.admin = Some(at as u32);
                }
                attached.publish(&self.shared.region);
                attached.controller.cntlid()
            }
            None => 0,
        };
        if let Some(lane) = place.lane.and_then(|l| core.lane(l)) {
            bump(&lane.record().connections, 1);
        }
        conn.answer_connect(cid, cntlid);
        conn.active = true;
        conn.listed = true;
        if at == self.conns.len() {
            self.conns.push(None);
            // The lists of connections never have to grow on the way.
            let room = self.conns.len() + 1;
            self.active.reserve(room.saturating_sub(self.active.len()));
            self.dirty.reserve(room.saturating_sub(self.dirty.len()));
            self.shared.pool.borrow_mut().reserve(room);
            self.events
                .reserve((4 * room).saturating_sub(self.events.len()));
        }
        self.conns[at] = Some(conn);
        self.active.push(at as u32);
        self.send(core, at as u32);
        self.settle(core);
        Ok(())
    }

    /// A queue that found no place.
    fn undo(&mut self, place: &Place) {
        if place.qid == 0 {
            self.controllers
                .remove(place.controller, &self.shared.region);
        } else if let Some(attached) = self.controllers.get_mut(place.controller) {
            attached.controller.io_queue_gone(place.qid);
        }
    }

    /// Closes a connection's socket; the rest of it follows in [`Frontend::settle`].
    pub(super) fn close(&mut self, core: &mut Core, index: u32) {
        let Some(Some(conn)) = self.conns.get_mut(index as usize) else {
            return;
        };
        if conn.life == Life::Draining {
            return;
        }
        conn.shut(core);
        if let Some(lane) = conn.lane.and_then(|l| core.lane(l)) {
            bump(&lane.record().connections, u64::MAX);
        }
        self.events.push(Event::Closed(index));
    }

    /// Settles what concerns more than one connection.
    pub(super) fn settle(&mut self, core: &mut Core) {
        while let Some(event) = self.events.pop() {
            match event {
                Event::Closed(index) => self.closed(core, index),
                Event::Drained(index) => self.drained(index),
                Event::Quiesce(controller) => self.quiesce(core, controller),
                Event::Flushed(controller) => {
                    if let Some(attached) = self.controllers.get_mut(controller)
                        && attached.quiesce == Quiesce::Flushing
                    {
                        self.quiesced(core, controller);
                    }
                }
            }
        }
    }

    fn closed(&mut self, core: &mut Core, index: u32) {
        let Some(Some(conn)) = self.conns.get(index as usize) else {
            return;
        };
        let (controller, admin, quiet) = (conn.controller, conn.qid == 0, conn.in_flight == 0);
        if admin && let Some(attached) = self.controllers.get_mut(controller) {
            attached.admin = None;
            for other in attached.conns.clone() {
                self.close(core, other);
            }
        }
        if quiet {
            self.events.push(Event::Drained(index));
        }
    }

    fn drained(&mut self, index: u32) {
        let Some(place) = self.conns.get_mut(index as usize) else {
            return;
        };
        if !place
            .as_ref()
            .is_some_and(|c| c.life == Life::Draining && c.in_flight == 0)
        {
            return;
        }
        let Some(conn) = place.take() else { return };
        debug_assert_eq!(
            (conn.slots.used(), conn.held.bytes, conn.receiving),
            (0, 0, 0)
        );
        for record in self.shared.region.commands(conn.queue as usize) {
            if record.state.load(Relaxed) != 0 {
                record.state.store(0, Relaxed);
            }
        }
        free_queue(&self.shared.region.queues()[conn.queue as usize]);
        self.active.retain(|i| *i != index);
        self.dirty.retain(|i| *i != index);
        let Some(attached) = self.controllers.get_mut(conn.controller) else {
            return;
        };
        attached.conns.retain(|i| *i != index);
        if conn.qid != 0 {
            attached.controller.io_queue_gone(conn.qid);
            attached.publish(&self.shared.region);
        }
        if attached.conns.is_empty() {
            self.controllers
                .remove(conn.controller, &self.shared.region);
        } else if attached.quiesce != Quiesce::No {
            self.events.push(Event::Quiesce(conn.controller));
        }
    }

    /// Carries a reset or shutdown on.
    fn quiesce(&mut self, core: &mut Core, controller: u32) {
        let Some(attached) = self.controllers.get_mut(controller) else {
            return;
        };
        let (Quiesce::Draining { flush }, Some(admin)) = (attached.quiesce, attached.admin) else {
            return;
        };
        let others: Vec<u32> = attached
            .conns
            .iter()
            .copied()
            .filter(|c| *c != admin)
            .collect();
        if !others.is_empty() {
            for other in others {
                self.close(core, other);
            }
            return;
        }
        let lane = attached.lane.filter(|_| flush);
        match (
            lane,
            self.conns.get_mut(admin as usize).and_then(Option::as_mut),
        ) {
            // Without room in the core, the next tick tries again.
            (Some(lane), Some(conn)) => {
                if command::start_internal_flush(conn, core, lane) {
                    attached.quiesce = Quiesce::Flushing;
                }
            }
            _ => self.quiesced(core, controller),
        }
    }

    /// Nothing of a controller's I/O is left: it may say so to its host.
    fn quiesced(&mut self, core: &mut Core, controller: u32) {
        let Some(attached) = self.controllers.get_mut(controller) else {
            return;
        };
        attached.quiesce = Quiesce::No;
        attached.controller.quiesced();
        let Some(Some(conn)) = attached.admin.and_then(|a| self.conns.get_mut(a as usize)) else {
            return;
        };
        if !attached.controller.cc().en() {
            // After a reset, event requests end without an answer (Base 2.0, 3.7.2).
            conn.drop_kept(core);
        }
        admin::deliver(conn, core, attached);
        let index = conn.index;
        self.mark_dirty(index);
    }

    /// Time limits; call it about ten times a second.
    pub(crate) fn tick(&mut self, core: &mut Core) {
        let now = core.now_ns();
        for index in 0..self.conns.len() {
            let Some(conn) = self.conns[index].as_mut() else {
                continue;
            };
            let late = match conn.life {
                Life::Draining => false,
                Life::Leaving { until_ns } => now >= until_ns,
                Life::Open => {
                    let past =
                        |since_ns: u64, limit_ns: u64| now >= since_ns.saturating_add(limit_ns);
                    (conn.blocked_since_ns > 0 && past(conn.blocked_since_ns, BLOCKED_LIMIT_NS))
                        || (conn.receiving > 0
                            && oldest_asked_ns(conn)
                                .is_some_and(|asked| past(asked, DATA_LIMIT_NS)))
                }
            };
            if late {
                self.close(core, index as u32);
            }
        }
        let mut expired = Vec::new();
        for (index, attached) in self.controllers.iter_mut() {
            if let Some(admin) = attached.admin
                && attached.controller.expire(now)
            {
                expired.push(admin);
            }
            if let Quiesce::Draining { .. } = attached.quiesce {
                self.events.push(Event::Quiesce(index));
            }
        }
        for admin in expired {
            self.close(core, admin);
        }
        self.settle(core);
        self.send_all(core);
    }

    /// An export shows something else now: hosts hear of a new size, and those that may no longer
    /// connect are disconnected.
    pub(crate) fn export_changed(&mut self, core: &mut Core, export: ExportId) {
        let mut unwelcome = Vec::new();
        let mut told = Vec::new();
        for (_, attached) in self
            .controllers
            .iter_mut()
            .filter(|(_, a)| a.export == Some(export))
        {
            let Some(lane) = attached.lane.and_then(|l| core.lane(l)) else {
                continue;
            };
            let Some(admin) = attached.admin else {
                continue;
            };
            let host = attached.controller.hostnqn();
            if !lane.export.any_host && !lane.export.hosts.iter().any(|h| h == host.as_str()) {
                unwelcome.push(admin);
                continue;
            }
            let blocks = lane.volume.blocks();
            if blocks != attached.blocks {
                attached.blocks = blocks;
                attached.controller.namespace_changed(command::NSID);
                if let Some(Some(conn)) = self.conns.get_mut(admin as usize) {
                    admin::deliver(conn, core, attached);
                    told.push(admin);
                }
            }
        }
        self.finish(core, &unwelcome, &told);
    }

    /// An export is removed: its hosts are disconnected.
    pub(crate) fn export_removed(&mut self, core: &mut Core, export: ExportId) {
        let of = self
            .controllers
            .iter()
            .filter(|(_, a)| a.export == Some(export));
        let unwelcome: Vec<u32> = of.filter_map(|(_, a)| a.admin).collect();
        self.finish(core, &unwelcome, &[]);
    }

    /// The list of exports changed: hosts that asked discovery to tell them hear of it.
    pub(crate) fn discovery_changed(&mut self, core: &mut Core) {
        let mut told = Vec::new();
        for (_, attached) in self
            .controllers
            .iter_mut()
            .filter(|(_, a)| a.export.is_none())
        {
            attached.controller.discovery_changed();
            if let Some(admin) = attached.admin
                && let Some(Some(conn)) = self.conns.get_mut(admin as usize)
            {
                admin::deliver(conn, core, attached);
                told.push(admin);
            }
        }
        self.finish(core, &[], &told);
    }

    /// Closes every connection, and takes no more.
    pub(crate) fn close_all(&mut self, core: &mut Core) {
        self.stopping = true;
        for index in 0..self.conns.len() {
            self.close(core, index as u32);
        }
        self.settle(core);
    }

    fn finish(&mut self, core: &mut Core, unwelcome: &[u32], told: &[u32]) {
        for index in told {
            self.send(core, *index);
        }
        for index in unwelcome {
            self.close(core, *index);
        }
        self.settle(core);
    }
}

fn free_queue(record: &QueueRecord) {
    record.used.store(0, Release);
}
