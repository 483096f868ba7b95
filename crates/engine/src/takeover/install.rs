//! Writes the connections that continue into the successor's region and memory.
//!
//! **Design.** Queues, controllers and commands keep their slots; buffers, lists and keeps are
//! copies. The records look as if the successor's reactors had made them, so a later successor
//! needs no knowledge of this take-over. They are unused until `Resume`. **Not here:** the choice
//! ([`super::plan`]).

use super::plan::{Plan, PlannedController, PlannedQueue};
use super::snapshot::{OldCommand, OldQueue};
use super::{
    Closing, Inheritance, InheritedCommand, InheritedController, InheritedPart, InheritedQueue,
    Next, OldBytes, ServedLanes,
};
use crate::associations::{Association, Associations};
use crate::core::staging::StagingBuffer;
use crate::exports::ExportTable;
use crate::listener::ListenerTarget;
use crate::memory::{HeaderList, Memory};
use forebay_nvme::Nqn;
use forebay_xlate::boundary::message::ExportId;
use forebay_xlate::boundary::region::check::{BufferRef, Seed};
use forebay_xlate::boundary::region::queue::Kept;
use forebay_xlate::boundary::region::{
    CommandRecord, CommandState, ControllerConstants, ControllerContent, Item, QueueConstants,
    Region, Span, queue_use,
};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use zerocopy::IntoBytes;

#[derive(Clone, Copy)]
pub(crate) struct Successor<'a> {
    pub region: &'a Region,
    pub memory: &'static Memory,
    pub reactors: usize,
    pub lanes: &'a ServedLanes,
    /// Used by discovery controllers.
    pub exports: &'a ExportTable,
    pub associations: &'a Associations,
}

/// Carries out a plan for these `sockets`.
pub(super) fn install(
    mut plan: Plan,
    old: &(impl OldBytes + ?Sized),
    sockets: &[(u64, Arc<OwnedFd>)],
    new: Successor<'_>,
) -> Inheritance {
    let mut inheritance = Inheritance {
        parts: std::iter::repeat_with(InheritedPart::default)
            .take(new.reactors)
            .collect(),
        ..Inheritance::default()
    };
    let socket = |at: usize| {
        let (number, fd) = sockets.get(at)?;
        Some((*number, fd.clone()))
    };
    for controller in std::mem::take(&mut plan.controllers) {
        forebay_xlate::kill_point!("over.half");
        let places: Vec<(u32, usize)> = (controller.queues.iter())
            .map(|q| (q.old.queue, q.socket))
            .collect();
        match association(controller, old, &socket, new) {
            Some((reactor, controller, queues)) => {
                let Some(part) = inheritance.parts.get_mut(reactor) else {
                    continue;
                };
                let at = part.controllers.len();
                part.controllers.push(controller);
                inheritance.queues += queues.len() as u32;
                for mut queue in queues {
                    queue.controller = at;
                    inheritance.commands += queue.commands.len() as u32;
                    part.queues.push(queue);
                }
            }
            None => {
                for (queue, at) in places {
                    plan.spans.disown(queue);
                    if let Some(record) = new.region.queues().get(queue as usize) {
                        // The slot's next user must not find these.
                        for command in new.region.commands(queue as usize) {
                            command.state.store(CommandState::FREE.0, Relaxed);
                        }
                        record.used.store(queue_use::FREE, Release);
                    }
                    plan.closed.push((at, Closing::NoRoom));
                }
            }
        }
    }
    inheritance.after_fence = plan.spans.after_fence;
    let recovered = plan.spans.by_reactor(new.reactors);
    for (reactor, (part, recovered)) in inheritance.parts.iter_mut().zip(recovered).enumerate() {
        part.recovered = recovered;
        // Spans without a command have no other record.
        let orphans = part.recovered.iter().any(|span| span.command.is_none());
        if let Some(record) = new.region.reactors().get(reactor) {
            record.orphans.store(u64::from(orphans), Relaxed);
        }
    }
    inheritance.handshakes = plan.handshakes.into_iter().filter_map(socket).collect();
    inheritance.closed = (plan.closed.into_iter())
        .filter_map(|(at, why)| socket(at).map(|(number, fd)| (number, fd, why)))
        .collect();
    inheritance
}

type SocketAt<'a> = &'a dyn Fn(usize) -> Option<(u64, Arc<OwnedFd>)>;

/// `None` without room, which only damage can cause.
fn association(
    planned: PlannedController,
    old: &(impl OldBytes + ?Sized),
    socket: SocketAt<'_>,
    new: Successor<'_>,
) -> Option<(usize, InheritedController, Vec<InheritedQueue>)> {
    let PlannedController {
        slot,
        constants,
        controller,
        blocks,
        lane,
        queues,
    } = planned;
    let reactor = match &lane {
        Some(lane) => lane.served.reactor,
        None => slot as usize % new.reactors.max(1),
    };
    let (target, subsystem) = match constants.export {
        Some(export) => (
            ListenerTarget::Export(ExportId(export)),
            controller.subnqn(),
        ),
        None => (
            ListenerTarget::Discovery(new.exports.clone()),
            Nqn::discovery(),
        ),
    };
    let association: Association = new.associations.resume(
        constants.cntlid,
        reactor,
        subsystem,
        controller.hostnqn(),
        controller.state().hostid,
    )?;
    let record = new.region.controllers().get(slot as usize)?;
    (record.used.compare_exchange(0, 1, AcqRel, Acquire)).ok()?;
    let key = new.region.header().key.load(Relaxed);
    let lane_index = lane.as_ref().map(|lane| lane.lane);
    let constants = ControllerConstants {
        lane: lane_index.map(|lane| lane.0),
        ..constants
    };
    record.put_constants(key, slot, &constants);
    let mut state = [0; _];
    for (to, from) in state
        .iter_mut()
        .zip(controller.state().as_bytes().chunks_exact(8))
    {
        *to = u64::from_le_bytes(from.try_into().unwrap_or_default());
    }
    let published = queues.first().map_or(0, |q| q.converted.sent.published);
    let content = ControllerContent {
        sequence: 1,
        valid_from: published,
        blocks,
        state,
    };
    record.put_state(key, slot, &content);
    let queues: Option<Vec<InheritedQueue>> = queues
        .into_iter()
        .map(|planned| queue(planned, reactor, old, socket, new))
        .collect();
    let Some(queues) = queues else {
        record.used.store(0, Release);
        return None;
    };
    let controller = InheritedController {
        slot,
        association,
        target,
        lane: lane_index,
        controller: Box::new(controller),
        local: constants.local,
        blocks,
    };
    Some((reactor, controller, queues))
}

fn queue(
    planned: PlannedQueue,
    reactor: usize,
    old: &(impl OldBytes + ?Sized),
    socket: SocketAt<'_>,
    new: Successor<'_>,
) -> Option<InheritedQueue> {
    let PlannedQueue {
        socket: at,
        old: was,
        converted,
    } = planned;
    let (number, fd) = socket(at)?;
    let queue = was.queue;
    let record = new.region.queues().get(queue as usize)?;
    let mut keep = new.memory.take_keep()?;
    let free = (queue_use::FREE, queue_use::MADE);
    (record
        .used
        .compare_exchange(free.0, free.1, AcqRel, Acquire))
    .ok()?;
    let key = new.region.header().key.load(Relaxed);
    let constants = QueueConstants {
        socket: number,
        reactor: reactor as u32,
        keep: keep.index(),
        ..was.constants
    };
    record.put_constants(key, queue, &constants);

    keep.put(0, &converted.unread);
    let kept = Kept {
        which: 0,
        bytes: converted.unread.len() as u32,
    };
    record.kept_at[0].store(converted.taken, Relaxed);
    record.kept.store(kept.word(), Relaxed);
    record.number.store(converted.number, Relaxed);
    record.taken.store(converted.taken, Relaxed);
    if let Some(data) = &converted.data {
        record.put_data(data);
    }

    let (list, items) = unsent_items(&was, converted.sent.items, key, old, new)?;
    if !items.is_empty() {
        let span = Span {
            list: list.index(),
            first: 0,
            tail: items.len() as u16,
        };
        record.tx_span.store(span.word(), Relaxed);
    }
    record.tx_at.store(converted.sent.published, Relaxed);

    let seed = Seed::commands(key, queue);
    let mut commands = Vec::with_capacity(converted.commands.len());
    for (from, next) in converted.commands {
        commands.push(command(queue, seed, from, next, old, new)?);
    }
    record.used.store(queue_use::LIVE, Release);
    Some(InheritedQueue {
        queue,
        controller: 0,
        constants,
        fd,
        number: converted.number,
        taken: converted.taken,
        in_socket: converted.in_socket,
        keep,
        kept_bytes: kept.bytes,
        data: converted.data,
        list,
        items,
        skip_bytes: converted.sent.skip,
        published: converted.sent.published,
        commands,
    })
}

type Items = Vec<(Item, Option<StagingBuffer>)>;

/// Writes the unsent items, from this one on.
fn unsent_items(
    was: &OldQueue,
    from: usize,
    key: u64,
    old: &(impl OldBytes + ?Sized),
    new: Successor<'_>,
) -> Option<(HeaderList, Items)> {
    let seed = Seed::items(key, was.queue);
    let unsent = was.items.items.get(from..)?;
    let mut list = new.memory.take_list()?;
    let records = new.region.items(usize::from(list.index()));
    let mut items = Vec::with_capacity(unsent.len());
    let mut header_at = 0;
    for (place, from) in (0u16..).zip(unsent) {
        let header = was.items.header(from);
        // This buffer was only held until the answer was sent.
        let buffer = from.buffer.filter(|_| from.data_bytes > 0);
        let buffer = copy(old, buffer, new.memory)?;
        let item = Item {
            header_at: header_at as u16,
            buffer: buffer.as_ref().map(StagingBuffer::reference),
            ..*from
        };
        (list.bytes_mut())
            .get_mut(header_at..header_at + header.len())?
            .copy_from_slice(header);
        (records.get(usize::from(place))?).put(seed, place, item.words());
        header_at += header.len();
        items.push((item, buffer));
    }
    Some((list, items))
}

fn command(
    queue: u32,
    seed: Seed,
    from: OldCommand,
    next: Next,
    old: &(impl OldBytes + ?Sized),
    new: Successor<'_>,
) -> Option<InheritedCommand> {
    // Answered commands need no data.
    let buffer = match next {
        Next::Answered | Next::Poisoned | Next::Kept => None,
        Next::Begin { .. } | Next::Passed { .. } | Next::Data { .. } => {
            copy(old, from.buffer, new.memory)?
        }
    };
    let to = new
        .region
        .commands(queue as usize)
        .get(usize::from(from.slot))?;
    let words: [u64; 8] = zerocopy::transmute!(from.sqe);
    for (to, from) in to.sqe.iter().zip(words) {
        to.store(from, Relaxed);
    }
    to.number.store(from.number, Relaxed);
    to.end.store(from.end, Relaxed);
    to.taken_ns.store(from.taken_ns, Relaxed);
    let check = CommandRecord::check_of(seed, from.slot, &words, from.number, from.end);
    to.check.store(check, Relaxed);
    let word = |b: &StagingBuffer| b.reference().word(seed, from.slot, from.number);
    to.buffer.store(buffer.as_ref().map_or(0, word), Relaxed);
    to.asked.store(from.asked.word(), Relaxed);
    to.asked_at.store(from.asked_at.word(), Relaxed);
    to.state.store(from.state.0, Release);
    Some(InheritedCommand {
        slot: from.slot,
        number: from.number,
        sqe: from.sqe,
        taken_ns: from.taken_ns,
        damaged: from.state.damaged(),
        next,
        buffer,
    })
}

/// Copies a buffer's bytes; `Some(None)` for no buffer.
fn copy(
    old: &(impl OldBytes + ?Sized),
    buffer: Option<BufferRef>,
    memory: &'static Memory,
) -> Option<Option<StagingBuffer>> {
    let Some(from) = buffer else {
        return Some(None);
    };
    let mut to = StagingBuffer::inherited(memory, from.len_bytes)?;
    old.read(from.offset_bytes, to.as_mut_slice())?;
    Some(Some(to))
}
