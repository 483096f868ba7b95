//! Attaches a connection: from the listener to a working queue.
//!
//! The controller checks the Connect, then the queue is recorded and its answer published. Only
//! then are the host's first bytes consumed, at which the listener merely peeked. So after a death
//! the listener begins again with all bytes in the socket, or the queue continues. **Not here:**
//! access control ([`crate::listener`]).

use super::conn::{Conn, Life, NewConn};
use super::controllers::{Attached, Quiesce, claim_controller_slot, claim_queue_slot};
use super::record::{self, QueueRecords};
use super::restrictions;
use super::rx::Rx;
use super::tx::Tx;
use super::{IN_CAPSULE_BYTES, MAX_IO_ENTRIES, NvmeTcp, controller_config, lose_the_vanished};
use crate::associations::Association;
use crate::core::Core;
use crate::exports;
use crate::lane::LaneIndex;
use crate::listener::{ListenerTarget, NewConnection, NewKind};
use crate::memory::Keep;
use crate::upcall::Upcall;
use forebay_nvme::Cqe;
use forebay_nvme::controller::{AdminConnect, Ana, Controller, ControllerConfig, Refusal};
use forebay_nvme::fabrics::{self, ConnectCommand, ConnectData};
use forebay_nvme::tcp;
use forebay_xlate::boundary::region::{QueueConstants, QueueIdentity, bump};
use forebay_xlate::kill_point;
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, Shutdown};
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// Draining connections per lane when a host connects. On a hung device, a host that reconnects
/// repeatedly would use up all queues.
pub(super) const MAX_DRAINING: usize = 64;

struct QueuePlace {
    controller: u32,
    qid: u16,
    entries: u32,
    lane: Option<LaneIndex>,
    no_flow_control: bool,
}

struct Arrival {
    socket: u64,
    fd: Arc<OwnedFd>,
    params: tcp::TcpParams,
    cid: u16,
    /// Bytes that the listener peeked at.
    consumed: usize,
    /// Bytes that the listener sent.
    said: usize,
}

fn leave(core: &mut Core, socket: u64, fd: &OwnedFd) {
    // Others have the socket too, so closing ours would not end the connection.
    let _ = rustix::net::shutdown(fd, Shutdown::Write);
    core.upcalls.push_back(Upcall::SocketGone(socket));
}

impl NvmeTcp {
    pub(crate) fn attach(&mut self, core: &mut Core, new: NewConnection) {
        let NewConnection {
            socket,
            fd,
            params,
            connect,
            data,
            kind,
            local,
            consumed,
            said,
        } = new;
        if self.stopping {
            leave(core, socket, &fd);
            return;
        }
        let adopted = match kind {
            NewKind::Admin {
                association,
                connect,
                target,
            } => self.adopt_admin(core, association, &connect, &target, local),
            NewKind::Io { cntlid } => {
                self.adopt_io(core, cntlid, ConnectCommand::of(&connect), &data, local)
            }
        };
        let arrival = Arrival {
            socket,
            fd: fd.clone(),
            params,
            cid: connect.cid(),
            consumed,
            said,
        };
        let refusal = match adopted {
            Ok(place) => match self.place(core, arrival, &place) {
                Ok(()) => return,
                Err(refusal) => {
                    self.undo(&place);
                    refusal
                }
            },
            Err(refusal) => refusal,
        };
        // Unread bytes would turn the close into a reset, which may overtake the refusal. A fresh
        // socket has room for the refusal, and the host sends nothing before it.
        self.consume(&fd, consumed);
        let mut out = [0; tcp::MAX_HEADER_BYTES];
        let cqe = Cqe::new(refusal.result, 0, 0, connect.cid(), refusal.status);
        let n = tcp::put_capsule_resp(&mut out, &params, &cqe);
        let _ = rustix::net::send(&fd, &out[..n], SendFlags::NOSIGNAL | SendFlags::DONTWAIT);
        leave(core, socket, &fd);
    }

    /// Reads what the listener peeked at; false when the connection has ended.
    pub(super) fn consume(&mut self, fd: &OwnedFd, mut bytes: usize) -> bool {
        while bytes > 0 {
            let n = bytes.min(self.buffer.len());
            match rustix::net::recv(fd, &mut self.buffer[..n], RecvFlags::DONTWAIT) {
                Ok((_, n)) if n > 0 => bytes -= n,
                Err(Errno::INTR) => {}
                _ => return false,
            }
        }
        true
    }

    fn adopt_admin(
        &mut self,
        core: &Core,
        association: Association,
        connect: &AdminConnect,
        target: &ListenerTarget,
        local: std::net::SocketAddr,
    ) -> Result<QueuePlace, Refusal> {
        let cntlid = association.cntlid();
        let (config, lane, export) = match target {
            ListenerTarget::Discovery(_) => (ControllerConfig::discovery(cntlid), None, None),
            ListenerTarget::Export(export) => {
                let index = core
                    .lanes
                    .of_export(*export)
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
        let slot = claim_controller_slot(self.shared.region).ok_or_else(Refusal::busy)?;
        let mut attached = Attached {
            controller: Controller::new(config, connect, core.now_ns()),
            association,
            lane,
            export,
            exports: match target {
                ListenerTarget::Discovery(exports) => Some(exports.clone()),
                ListenerTarget::Export(_) => None,
            },
            slot,
            admin: None,
            conns: Vec::new(),
            quiesce: Quiesce::No,
            blocks: lane
                .and_then(|l| core.lane(l))
                .map_or(0, |l| l.volume.blocks()),
            local,
            ana: Ana::default(),
        };
        if let Some(lane) = lane.and_then(|l| core.lane(l)) {
            attached.controller.skip_notices(&lane.reservations);
        }
        attached.learn(core, &self.ports);
        attached.poll_list();
        attached.record(self.shared.region);
        let entries = connect.entries;
        let no_flow_control = connect.disable_sq_flow_control;
        let controller = self.controllers.add(attached);
        Ok(QueuePlace {
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
        local: std::net::SocketAddr,
    ) -> Result<QueuePlace, Refusal> {
        let unknown = || {
            let (status, result) = fabrics::invalid_parameter(true, ConnectData::OFFSET_CNTLID);
            Refusal { status, result }
        };
        let living =
            |(_, a): &(u32, &Attached)| a.controller.cntlid() == cntlid && a.admin.is_some();
        let (controller, attached) = self.controllers.iter().find(living).ok_or_else(unknown)?;
        // A controller belongs to the port of its admin queue (Base 2.0, 6.3).
        let port = |address| exports::port_of(&self.ports, address).map(|p| p.id);
        if port(local) != port(attached.local) {
            return Err(unknown());
        }
        // An earlier connection of this queue may have ended unnoticed.
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
        if !attached.association.has_room_for(attached.io_queues()) {
            attached.controller.io_queue_gone(queue.qid);
            return Err(Refusal::busy());
        }
        Ok(QueuePlace {
            controller,
            qid: queue.qid,
            entries: queue.entries,
            lane: attached.lane,
            no_flow_control: queue.disable_sq_flow_control,
        })
    }

    fn reserve_queue(&self) -> Result<(QueueRecords, Keep), Refusal> {
        let shared = &self.shared;
        let queue = claim_queue_slot(shared.region).ok_or_else(Refusal::busy)?;
        let records = QueueRecords::new(shared.region, queue, self.reactor);
        let records = records.ok_or_else(Refusal::busy)?;
        // There are as many of these as queues.
        let Some(keep) = shared.memory.take_keep() else {
            records.free(0);
            return Err(Refusal::busy());
        };
        let connections = self.conns.len() + 1;
        let mut pool = shared.pool.borrow_mut();
        if !pool.grow(shared.memory, shared.region, connections) {
            records.free(0);
            return Err(Refusal::busy());
        }
        Ok((records, keep))
    }

    /// Records a queue and gives it an index.
    ///
    /// Until it is *live*, a successor's listener begins again: nothing is consumed, and only the
    /// ICResp was sent. After that, the Connect's answer is already published and is sent once.
    fn place(
        &mut self,
        core: &mut Core,
        arrival: Arrival,
        place: &QueuePlace,
    ) -> Result<(), Refusal> {
        let shared = self.shared.clone();
        let (records, keep) = self.reserve_queue()?;
        let params = tcp::TcpParams {
            // Admin and I/O queues announce the same.
            max_in_capsule_bytes: IN_CAPSULE_BYTES,
            ..arrival.params
        };
        let entries = place.entries.min(MAX_IO_ENTRIES) as u16;
        let constants = QueueConstants {
            controller: self.controllers.get(place.controller).map_or(0, |a| a.slot),
            identity: QueueIdentity {
                qid: place.qid,
                entries,
                no_flow_control: place.no_flow_control,
            },
            params: record::params_word(&params),
            socket: arrival.socket,
            reactor: self.reactor as u32,
            keep: keep.index(),
        };
        let (taken, tx_at) = (arrival.consumed as u64, arrival.said as u64);
        // The Connect was the first command.
        records.make(&constants, 1, taken, tx_at);
        let (index, generation) = self.next_place();
        let mut conn = Box::new(Conn::new(
            &shared,
            NewConn {
                index,
                generation,
                fd: arrival.fd.clone(),
                socket: arrival.socket,
                params,
                records,
                controller: place.controller,
                qid: place.qid,
                entries,
                lane: place.lane,
                no_flow_control: place.no_flow_control,
                number: 1,
                rx: Rx::new(taken, keep),
                tx: Tx::new(tx_at),
            },
        ));
        if conn.socket.begin_watch(&conn.shared.epoll).is_err() {
            shared.pool.borrow_mut().shrink();
            records.free(0);
            return Err(Refusal::busy());
        }
        let cntlid = match self.controllers.get_mut(place.controller) {
            Some(attached) => {
                attached.join(index, place.qid);
                let admin = attached.admin.filter(|_| place.qid != 0);
                if let Some(Some(admin)) = admin.and_then(|a| self.conns.get_mut(a as usize)) {
                    attached.publish(admin);
                }
                attached.controller.cntlid()
            }
            None => 0,
        };
        conn.answer_connect(arrival.cid, cntlid);
        records.live();
        self.seat(core, conn);
        if !self.consume(&arrival.fd, arrival.consumed) {
            self.close(core, index);
        }
        kill_point!("place.consumed");
        self.send(core, index);
        kill_point!("place.answered");
        self.settle(core);
        Ok(())
    }

    /// A free index among the connections, and its generation.
    pub(super) fn next_place(&mut self) -> (u32, u32) {
        let free = self.conns.iter().position(Option::is_none);
        self.generation = (self.generation + 1) & 0x00ff_ffff;
        (free.unwrap_or(self.conns.len()) as u32, self.generation)
    }

    pub(super) fn seat(&mut self, core: &Core, mut conn: Box<Conn>) {
        conn.restrictions |=
            restrictions::restrictions_of_new(core, &self.controllers, conn.controller);
        if let Some(lane) = conn.lane.and_then(|l| core.lane(l)) {
            bump(&lane.record().connections, 1);
        }
        if let Some(lane) = conn.lane {
            self.shared.is_of(lane, core);
        }
        if let (Some(fd), Some(attached)) = (&conn.socket.fd, self.controllers.get(conn.controller))
        {
            // Fails if the socket has ended meanwhile.
            let _ = lose_the_vanished(fd, attached.controller.kato_ms());
        }
        let index = conn.index;
        conn.visits.active = true;
        conn.visits.listed = true;
        if index as usize == self.conns.len() {
            self.conns.push(None);
            // So these lists never grow on the I/O path.
            let room = self.conns.len() + 1;
            self.active.reserve(room.saturating_sub(self.active.len()));
            self.dirty.reserve(room.saturating_sub(self.dirty.len()));
            self.events
                .reserve((4 * room).saturating_sub(self.events.len()));
        }
        if let Some(seat) = self.conns.get_mut(index as usize) {
            *seat = Some(conn);
        }
        self.active.push(index);
    }

    fn undo(&mut self, place: &QueuePlace) {
        if place.qid == 0 {
            self.controllers
                .remove(place.controller, self.shared.region);
        } else if let Some(attached) = self.controllers.get_mut(place.controller) {
            attached.controller.io_queue_gone(place.qid);
        }
    }
}
