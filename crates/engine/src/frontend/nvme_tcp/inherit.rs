//! Continues a dead engine's connections from this engine's converted records
//! ([`crate::takeover`]).
//!
//! Every command continues, the oldest first: its data comes, it begins again, or its answer waits
//! for the socket. The core's list of recovered I/O keeps the order of writes.

use super::command::{self, Capsule, Source};
use super::conn::{Conn, NewConn};
use super::controllers::{Attached, Quiesce};
use super::fused;
use super::record::{self, QueueRecords};
use super::rx::Rx;
use super::send_lists::List;
use super::shared::Shared;
use super::slots::{SlotStage, Work};
use super::tx::{Item, Tx};
use super::{
    IN_CAPSULE_BYTES, MAX_IO_ENTRIES, MDTS_BYTES, NvmeTcp, TcpTurn, TurnEvent, admin, r2t,
};
use crate::core::Core;
use crate::core::staging::{StagingBuffer, Taken};
use crate::listener::ListenerTarget;
use crate::takeover::{InheritedCommand, InheritedController, InheritedPart, InheritedQueue, Next};
use crate::upcall::Upcall;
use forebay_nvme::controller::{Ana, ControllerConfig};
use forebay_nvme::{Nqn, Sqe, Status};
use forebay_xlate::boundary::message::ExportConfig;
use forebay_xlate::boundary::region::queue::Kept;
use forebay_xlate::boundary::region::{self, Asked};
use forebay_xlate::kill_point;
use rustix::net::Shutdown;

/// Without an export: a discovery controller. `None`: invalid export name.
pub(crate) fn controller_config(
    cntlid: u16,
    export: Option<&ExportConfig>,
) -> Option<ControllerConfig> {
    let Some(export) = export else {
        return Some(ControllerConfig::discovery(cntlid));
    };
    Some(ControllerConfig {
        max_queue_entries: MAX_IO_ENTRIES,
        mdts_bytes: MDTS_BYTES,
        in_capsule_bytes: IN_CAPSULE_BYTES,
        ..ControllerConfig::io(cntlid, Nqn::parse(&export.nqn).ok()?, &export.serial)
    })
}

pub(super) struct Waiting {
    pub taken_ns: u64,
    pub conn: u32,
    pub slot: u16,
    pub sqe: Sqe,
    pub next: Next,
}

impl NvmeTcp {
    pub(crate) fn inherit(&mut self, core: &mut Core, part: InheritedPart) {
        core.recovered.recover(&part.recovered);
        let controllers: Vec<u32> = (part.controllers.into_iter())
            .map(|controller| self.inherit_controller(controller))
            .collect();
        for controller in &controllers {
            if let Some(attached) = self.controllers.get_mut(*controller) {
                attached.learn(core, &self.ports);
            }
        }
        let mut waiting = Vec::new();
        let mut ended = Vec::new();
        for queue in part.queues {
            let controller = controllers.get(queue.controller).copied();
            match controller
                .map(|controller| self.inherit_queue(core, controller, queue, &mut waiting))
            {
                Some(Ok(())) => kill_point!("over.inherited"),
                Some(Err(index)) => ended.push(index),
                None => {}
            }
        }
        kill_point!("over.listening");
        // Admin commands first: they are few, and need memory that others might use up.
        waiting.sort_by_key(|w| (self.is_io(w.conn), w.taken_ns));
        for waiting in waiting {
            self.go_on(core, waiting);
        }
        for index in ended {
            self.close(core, index);
        }
        self.refuse_waiting(core, Status::RESERVATION_CONFLICT.with_dnr());
        for controller in controllers {
            self.poll_controller(core, controller);
        }
        for index in 0..self.conns.len() {
            self.mark_to_send(index as u32);
        }
        self.settle(core);
        self.send_all(core, &mut |_| false);
    }

    fn is_io(&self, index: u32) -> bool {
        let conn = self.conns.get(index as usize).and_then(Option::as_ref);
        conn.is_some_and(|conn| conn.qid > 0)
    }

    fn inherit_controller(&mut self, inherited: InheritedController) -> u32 {
        let (export, exports) = match inherited.target {
            ListenerTarget::Export(export) => (Some(export), None),
            ListenerTarget::Discovery(exports) => (None, Some(exports)),
        };
        let attached = Attached {
            controller: *inherited.controller,
            association: inherited.association,
            lane: inherited.lane,
            export,
            exports,
            slot: inherited.slot,
            admin: None,
            conns: Vec::new(),
            quiesce: Quiesce::No,
            blocks: inherited.blocks,
            local: inherited.local,
            ana: Ana::default(),
        };
        // The dead engine's grant is lost. The state says which queues are connected.
        attached.association.keep_at_least(attached.io_queues());
        self.controllers.add(attached)
    }

    /// `Err` names a connection that must end.
    fn inherit_queue(
        &mut self,
        core: &mut Core,
        controller: u32,
        inherited: InheritedQueue,
        waiting: &mut Vec<Waiting>,
    ) -> Result<(), u32> {
        let shared = self.shared.clone();
        let constants = inherited.constants;
        let records = QueueRecords::new(shared.region, inherited.queue, self.reactor);
        let (Some(records), Some(params)) = (records, record::params_of_word(constants.params))
        else {
            // The conversion accepts no such queue. It has no index yet.
            let _ = rustix::net::shutdown(&inherited.fd, Shutdown::Both);
            core.upcalls.push_back(Upcall::SocketGone(constants.socket));
            return Ok(());
        };
        let (index, generation) = self.next_place();
        let sent = (inherited.published, inherited.skip_bytes);
        let list = List::new(inherited.list, shared.region);
        let (tx, charge) = inherit_tx(&shared, list, inherited.items, sent);
        let kept = Kept {
            which: 0,
            bytes: inherited.kept_bytes,
        };
        let data = inherited.data;
        let rx = Rx::inherit(inherited.taken, inherited.keep, kept, data.as_ref());
        let identity = constants.identity;
        let attached = self.controllers.get_mut(controller);
        let no_flow_control = attached.is_some() && identity.no_flow_control;
        let lane = attached.and_then(|attached| attached.join(index, identity.qid));
        let mut conn = Box::new(Conn::new(
            &shared,
            NewConn {
                index,
                generation,
                fd: inherited.fd.clone(),
                socket: constants.socket,
                params,
                records,
                controller,
                qid: identity.qid,
                entries: identity.entries,
                lane,
                no_flow_control,
                number: inherited.number,
                rx,
                tx,
            },
        ));
        for taken in charge {
            conn.charge.add(taken);
        }
        let mut sound = true;
        let halves: Vec<(u64, u16, u8)> = (inherited.commands.iter())
            .filter(|c| conn.qid > 0 && c.next != Next::Answered)
            .map(|c| (c.number, c.slot, c.sqe.fuse()))
            .collect();
        for command in inherited.commands {
            match inherit_command(&mut conn, core, command) {
                Some(command) => waiting.extend(command),
                None => sound = false,
            }
        }
        conn.pairs
            .inherit(&mut conn.restrictions, &halves, inherited.number);
        if let Some(data) = data {
            let (rx, of) = conn.inbound();
            sound &= rx.inherit_data(of, &data, inherited.taken);
        }
        r2t::inherited(&mut conn);
        let watched = conn.socket.begin_watch(&conn.shared.epoll);
        self.seat(core, conn);
        let consumed = self.consume(&inherited.fd, inherited.in_socket as usize);
        if watched.is_err() || !consumed || !sound {
            return Err(index);
        }
        Ok(())
    }

    pub(super) fn go_on(&mut self, core: &mut Core, waiting: Waiting) {
        let Waiting {
            conn: index,
            slot,
            sqe,
            next,
            ..
        } = waiting;
        let Some(Some(conn)) = self.conns.get_mut(index as usize) else {
            return;
        };
        if (conn.slots.get(slot)).is_none_or(|s| s.stage == SlotStage::Answering) {
            // It was answered with the other half of its pair.
            return;
        }
        conn.records.blame(slot);
        let mut turn = TcpTurn {
            core,
            controllers: &mut self.controllers,
            events: &mut self.events,
        };
        let went_on = match next {
            Next::Poisoned => {
                let status = Status::INTERNAL_ERROR.with_dnr();
                conn.fail_other_half(turn.core, slot);
                conn.answer(turn.core, slot, status, 0, None, 0);
                Some(())
            }
            _ if conn.qid == 0 => admin_again(conn, &mut turn, slot, &sqe),
            _ => io_again(conn, &mut turn, slot, &sqe, next),
        };
        if went_on.is_none() {
            self.close(core, index);
        }
    }

    /// Continues a controller's reset or shutdown, and sends pending events.
    fn poll_controller(&mut self, core: &mut Core, index: u32) {
        let Some(attached) = self.controllers.get_mut(index) else {
            return;
        };
        let Some(Some(admin)) = attached.admin.and_then(|a| self.conns.get_mut(a as usize)) else {
            return;
        };
        let blocks = attached
            .lane
            .and_then(|l| core.lane(l))
            .map(|l| l.volume.blocks());
        if let Some(blocks) = blocks.filter(|blocks| *blocks != attached.blocks) {
            attached.blocks = blocks;
            attached.controller.namespace_changed(command::NSID);
        }
        attached.poll_list();
        admin.deliver_events(core, attached);
        let (cc, csts) = (attached.controller.cc(), attached.controller.csts());
        attached.quiesce = if csts.shst() == 1 {
            Quiesce::Draining { flush: true }
        } else if csts.rdy() && !cc.en() {
            Quiesce::Draining { flush: false }
        } else {
            Quiesce::No
        };
        if attached.quiesce != Quiesce::No {
            self.events.push(TurnEvent::Quiesce(index));
        }
    }
}

/// Gives a command its slot. `Some(Some(_))`: it continues later; `None`: it cannot.
fn inherit_command(
    conn: &mut Conn,
    core: &mut Core,
    inherited: InheritedCommand,
) -> Option<Option<Waiting>> {
    let InheritedCommand {
        slot,
        sqe,
        number,
        taken_ns,
        damaged,
        next,
        buffer,
        ..
    } = inherited;
    if let Some(buffer) = &buffer {
        conn.charge.add(buffer.taken());
    }
    if conn.slots.claim_at(slot, sqe.cid(), taken_ns).is_err() {
        if let Some(buffer) = buffer {
            conn.give_buffer(core, buffer);
        }
        return None;
    }
    let s = conn.slots.get_mut(slot)?;
    if damaged {
        s.fate = Status::TRANSIENT_TRANSPORT_ERROR;
    }
    s.len_bytes = buffer.as_ref().map_or(0, |b| b.len() as u32);
    s.buffer = buffer;
    match next {
        Next::Answered => s.stage = SlotStage::Answering,
        Next::Kept => s.stage = SlotStage::Kept,
        Next::Data { asked, r2ts } => {
            s.stage = SlotStage::Receiving;
            s.by_r2t = true;
            s.tag = r2t::tag_of(number);
            s.asked_ns = core.now_ns();
            match asked {
                Asked::Whole(bytes) => s.received_bytes = bytes,
                Asked::Parts(dwords) => {
                    s.tag |= r2t::SEVERAL;
                    conn.parts.inherit(slot, dwords, r2ts);
                }
            }
            conn.charge.asked();
            let work = work(conn, core, slot, &sqe);
            conn.slots.get_mut(slot)?.work = work?;
        }
        Next::Begin { .. } | Next::Passed { .. } | Next::Poisoned => {
            return Some(Some(Waiting {
                taken_ns,
                conn: conn.index,
                slot,
                sqe,
                next,
            }));
        }
    }
    Some(None)
}

fn inherit_tx(
    shared: &Shared,
    mut list: List,
    items: Vec<(region::Item, Option<StagingBuffer>)>,
    (published, skip_bytes): (u64, u64),
) -> (Tx, Vec<Taken>) {
    let mut charge = Vec::new();
    for (item, buffer) in items {
        charge.extend(buffer.as_ref().map(|b| b.taken()));
        list.items.push_back(Item::inherited(&item, buffer));
    }
    if list.items.is_empty() {
        shared.pool.borrow_mut().give_list(list);
        (Tx::new(published), charge)
    } else {
        (Tx::inherit(list, published, skip_bytes as usize), charge)
    }
}

/// A command that is checked again has its data elsewhere.
static NO_DATA: [u8; IN_CAPSULE_BYTES as usize] = [0; IN_CAPSULE_BYTES as usize];

/// The command's capsule, as if resent. Missing in-capsule data was damaged.
fn capsule<'a>(sqe: &'a Sqe, has_data: bool) -> Capsule<'a> {
    Capsule {
        sqe,
        data: &NO_DATA,
        intact: has_data,
        end: 0,
    }
}

fn work(conn: &Conn, core: &Core, slot: u16, sqe: &Sqe) -> Option<Work> {
    if conn.qid == 0 {
        return Some(Work::Admin(Box::new(*sqe)));
    }
    let judged = fused::judge(conn, core, &capsule(sqe, true)).ok()?;
    let len_bytes = conn.slots.get(slot)?.len_bytes;
    (judged.len_bytes == len_bytes).then_some(judged.work)
}

fn io_again(
    conn: &mut Conn,
    turn: &mut TcpTurn<'_>,
    slot: u16,
    sqe: &Sqe,
    next: Next,
) -> Option<()> {
    let s = conn.slots.get(slot)?;
    let (has_data, fate, bytes) = (s.buffer.is_some(), s.fate, s.len_bytes);
    let judged = match fused::judge(conn, turn.core, &capsule(sqe, has_data)) {
        Ok(_) if fate != Status::SUCCESS => Err(fate),
        Ok(judged) if has_data && judged.len_bytes != bytes => return None,
        judged => judged,
    };
    let judged = match judged {
        Ok(judged) => judged,
        Err(status) => {
            conn.fail_other_half(turn.core, slot);
            conn.refuse(turn.core, slot, status);
            return Some(());
        }
    };
    let s = conn.slots.get_mut(slot)?;
    s.work = judged.work;
    if let Next::Passed { .. } = next {
        fused::passed(&mut s.work);
    }
    s.len_bytes = judged.len_bytes;
    s.by_r2t = matches!(judged.source, Source::Host);
    if has_data {
        command::data_is_there(conn, turn, slot);
    } else {
        conn.begin_or_wait(turn.core, slot);
    }
    Some(())
}

fn admin_again(conn: &mut Conn, turn: &mut TcpTurn<'_>, slot: u16, sqe: &Sqe) -> Option<()> {
    let s = conn.slots.get(slot)?;
    let data = s.buffer.as_ref().map(|b| b.as_slice().to_vec());
    let fate = s.fate;
    let attached = turn.controllers.get(conn.controller)?;
    let judged = match attached.controller.transfer(sqe) {
        Ok(_) if fate != Status::SUCCESS => Err(fate),
        Ok(transfer) => command::admin_source(&capsule(sqe, data.is_some()), transfer)
            .map(|source| (transfer, source.is_none())),
        Err(status) => Err(status),
    };
    match (judged, data) {
        (Err(status), _) => conn.answer(turn.core, slot, status, 0, None, 0),
        (Ok((transfer, true)), None) => {
            let s = conn.slots.get_mut(slot)?;
            s.work = Work::Admin(Box::new(*sqe));
            s.len_bytes = transfer.bytes();
            s.by_r2t = true;
            conn.begin_or_wait(turn.core, slot);
        }
        (Ok(_), data) => {
            let data = data.unwrap_or_default();
            return admin::again(conn, turn, slot, sqe, &data).ok();
        }
    }
    Some(())
}
