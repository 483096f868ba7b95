//! Decides which connections continue after a take-over.
//!
//! **Design.** Each queue is converted by itself, then each association: it ends if a queue is
//! damaged or the admin queue is missing. What ends leaves spans ([`super::spans`]). Without side
//! effects, the plan is the same however often a successor dies. **Not here:** the successor's
//! region ([`super::install`]).

use super::counters::{NoFacts, SocketFacts};
use super::queue::{Converted, convert_queue};
use super::snapshot::OldQueue;
use super::spans::Spans;
use super::{Closing, FenceSet, Next, OldBytes, ServedLane, ServedLanes};
use crate::frontend::nvme_tcp::{controller_config, params_of_word};
use forebay_nvme::controller::{Controller, ControllerState};
use forebay_xlate::boundary::message::{Blamed, ExportId};
use forebay_xlate::boundary::region::{
    CommandStage, ControllerConstants, MAX_CONTROLLERS, MAX_QUEUES, QueueConstants, Region,
    queue_use,
};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::Ordering::{Acquire, Relaxed};
use zerocopy::FromBytes;

/// Bytes that the listener sends before it reads a Connect.
const IC_RESP_BYTES: u64 = 128;

pub(super) struct PlannedQueue {
    pub socket: usize,
    pub old: OldQueue,
    pub converted: Converted,
}

pub(super) struct PlannedController {
    pub slot: u32,
    pub constants: ControllerConstants,
    pub controller: Controller,
    /// Namespace size, as last reported to the host.
    pub blocks: u64,
    pub lane: Option<ServedLane>,
    /// The admin queue first.
    pub queues: Vec<PlannedQueue>,
}

pub(super) struct Plan {
    pub controllers: Vec<PlannedController>,
    /// Sockets from which nothing was read.
    pub handshakes: Vec<usize>,
    pub closed: Vec<(usize, Closing)>,
    pub spans: Spans,
}

struct Checked {
    queue: u32,
    constants: Option<QueueConstants>,
    socket: Option<usize>,
    fate: Result<(OldQueue, Converted), Closing>,
}

/// `sockets`: numbers and counters of those that the daemon held.
pub(super) fn plan(
    region: &Region,
    memory: &(impl OldBytes + ?Sized),
    sockets: &[(u64, Result<SocketFacts, NoFacts>)],
    blamed: Option<Blamed>,
    lanes: &ServedLanes,
    now_ns: u64,
) -> Plan {
    let mut held = BTreeMap::new();
    for (at, (socket, _)) in sockets.iter().enumerate() {
        held.entry(*socket).or_insert(at);
    }
    let mut all: Vec<Checked> = (0..MAX_QUEUES as u32)
        .filter_map(|queue| check(region, memory, queue, sockets, &held, blamed))
        .collect();
    one_queue_each(&mut all);

    let mut plan = Plan {
        controllers: Vec::new(),
        handshakes: Vec::new(),
        closed: Vec::new(),
        spans: Spans::new(lanes),
    };
    let mut claimed = BTreeSet::new();
    let mut of: BTreeMap<u32, Vec<Checked>> = BTreeMap::new();
    for checked in all {
        match checked.constants {
            Some(constants) => of.entry(constants.controller).or_default().push(checked),
            None => plan
                .spans
                .orphans(region, memory, checked.queue, None, None),
        }
    }
    for (slot, queues) in of {
        claimed.extend(queues.iter().filter_map(|q| q.socket));
        association(region, memory, slot, queues, lanes, now_ns, &mut plan);
    }
    // Two records may name one socket.
    let queues = plan.controllers.iter().flat_map(|c| &c.queues);
    let mut fates: BTreeSet<usize> = queues.map(|q| q.socket).collect();
    plan.closed.retain(|(at, _)| fates.insert(*at));
    for (at, (socket, facts)) in sockets.iter().enumerate() {
        if claimed.contains(&at) {
            continue;
        }
        match facts {
            _ if blamed == Some(Blamed::Handshake { socket: *socket }) => {
                plan.closed.push((at, Closing::Blamed));
            }
            // Any other bytes had refused the host.
            Ok(facts) if facts.consumed == 0 && matches!(facts.accepted, 0 | IC_RESP_BYTES) => {
                plan.handshakes.push(at);
            }
            Ok(_) => plan.closed.push((at, Closing::Unrecorded)),
            Err(why) => plan.closed.push((at, (*why).into())),
        }
    }
    plan
}

/// Converts a queue; `None` if it belongs to no association.
fn check(
    region: &Region,
    memory: &(impl OldBytes + ?Sized),
    queue: u32,
    sockets: &[(u64, Result<SocketFacts, NoFacts>)],
    held: &BTreeMap<u64, usize>,
    blamed: Option<Blamed>,
) -> Option<Checked> {
    let record = region.queues().get(queue as usize)?;
    let used = record.used.load(Acquire);
    let key = region.header().key.load(Relaxed);
    let constants = record.constants(key, queue);
    let socket = constants.and_then(|c| held.get(&c.socket).copied());
    let facts = socket.and_then(|at| Some(sockets.get(at)?.1));
    let fate = match used {
        queue_use::LIVE => match facts {
            _ if constants.is_none() => Err(Closing::Damaged),
            None => Err(Closing::Ended),
            Some(Err(why)) => Err(why.into()),
            Some(Ok(facts)) => convert(region, memory, queue, facts, blamed),
        },
        queue_use::LEAVING => Err(Closing::Leaving),
        // Nothing was read, or the constants are its predecessor's.
        queue_use::MADE if !matches!(facts, Some(Ok(f)) if f.consumed > 0) => return None,
        // Freed only after its socket's shutdown, or before anything is read.
        queue_use::FREE if !matches!(facts, Some(Ok(f)) if f.consumed > 0) => return None,
        _ => Err(Closing::Damaged),
    };
    Some(Checked {
        queue,
        constants,
        socket,
        fate,
    })
}

fn convert(
    region: &Region,
    memory: &(impl OldBytes + ?Sized),
    queue: u32,
    facts: SocketFacts,
    blamed: Option<Blamed>,
) -> Result<(OldQueue, Converted), Closing> {
    let slot = match blamed {
        Some(Blamed::Queue { queue: q, slot }) if q == queue => Some(slot),
        _ => None,
    };
    if slot == Some(None) {
        return Err(Closing::Blamed);
    }
    let old = OldQueue::read(region, memory, queue).map_err(|_| Closing::Damaged)?;
    if params_of_word(old.constants.params).is_none() {
        return Err(Closing::Damaged);
    }
    let converted =
        convert_queue(&old, memory, facts, slot.flatten()).map_err(|_| Closing::Damaged)?;
    Ok((old, converted))
}

fn one_queue_each(all: &mut [Checked]) {
    let (mut sockets, mut ids) = (BTreeMap::new(), BTreeMap::new());
    for at in 0..all.len() {
        let (Ok(_), Some(constants)) = (&all[at].fate, all[at].constants) else {
            continue;
        };
        let id = (constants.controller, constants.identity.qid);
        let others = [sockets.insert(constants.socket, at), ids.insert(id, at)];
        for other in others.into_iter().flatten() {
            all[other].fate = Err(Closing::Damaged);
            all[at].fate = Err(Closing::Damaged);
        }
    }
}

fn association(
    region: &Region,
    memory: &(impl OldBytes + ?Sized),
    slot: u32,
    queues: Vec<Checked>,
    lanes: &ServedLanes,
    now_ns: u64,
    plan: &mut Plan,
) {
    let key = region.header().key.load(Relaxed);
    let record = (region.controllers()).get(slot as usize);
    let constants = record.and_then(|r| r.constants(key, slot));
    let lane = constants
        .and_then(|c| c.export)
        .and_then(|export| lanes.get(&ExportId(export)));
    let end = |plan: &mut Plan, queue: u32, qid: u16, socket: Option<usize>, why: Closing| {
        plan.closed.extend(socket.map(|at| (at, why)));
        // Admin commands never reach a device.
        if qid > 0 {
            let of = constants.as_ref();
            plan.spans.orphans(region, memory, queue, of, lane);
        }
    };
    let worst = queues.iter().find_map(|q| match q.fate {
        Err(why @ (Closing::Damaged | Closing::Blamed)) => Some(why),
        _ => None,
    });
    let mut live = Vec::new();
    for checked in queues {
        match checked.fate {
            Ok((old, converted)) => live.push(PlannedQueue {
                socket: checked.socket.unwrap_or(usize::MAX),
                old,
                converted,
            }),
            Err(why) => {
                let qid = checked.constants.map_or(1, |c| c.identity.qid);
                end(plan, checked.queue, qid, checked.socket, why);
            }
        }
    }
    live.sort_by_key(|q| q.old.constants.identity.qid);
    let restored = match worst {
        Some(why) => Err(why),
        None => restore(region, slot, constants, lane, &mut live, now_ns),
    };
    match restored {
        Ok((constants, controller, blocks)) => {
            for queue in &live {
                plan.spans.recover(memory, queue, lane);
            }
            plan.controllers.push(PlannedController {
                slot,
                constants,
                controller,
                blocks,
                lane: lane.cloned(),
                queues: live,
            });
        }
        Err(why) => {
            for queue in live {
                let qid = queue.old.constants.identity.qid;
                end(plan, queue.old.queue, qid, Some(queue.socket), why);
            }
        }
    }
}

/// Restores the controller as of the last answer that its host gets.
fn restore(
    region: &Region,
    slot: u32,
    constants: Option<ControllerConstants>,
    lane: Option<&ServedLane>,
    live: &mut [PlannedQueue],
    now_ns: u64,
) -> Result<(ControllerConstants, Controller, u64), Closing> {
    let admin = live
        .first_mut()
        .filter(|q| q.old.constants.identity.qid == 0)
        .ok_or(Closing::NoAdmin)?;
    let constants = constants.ok_or(Closing::Damaged)?;
    debug_assert!((slot as usize) < MAX_CONTROLLERS);
    let record = region
        .controllers()
        .get(slot as usize)
        .filter(|r| r.used.load(Relaxed) == 1)
        .ok_or(Closing::Damaged)?;
    if constants.export.is_some() && lane.is_none() {
        return Err(Closing::NotServed);
    }
    let key = region.header().key.load(Relaxed);
    let content = record
        .state(key, slot, admin.converted.sent.published)
        .ok_or(Closing::Damaged)?;
    let bytes: Vec<u8> = content.state.iter().flat_map(|w| w.to_le_bytes()).collect();
    let mut state = ControllerState::read_from_bytes(&bytes).map_err(|_| Closing::Damaged)?;
    event_requests(&mut state, &mut admin.converted);
    // The host gets the full keep-alive time again.
    state.keep_alive_from_ns = now_ns;
    state.io_queues = [0; 2];
    for queue in live {
        let qid = u32::from(queue.old.constants.identity.qid);
        if let Some(bit) = qid.checked_sub(1) {
            let word = state.io_queues.get_mut(bit as usize / 64);
            *word.ok_or(Closing::Damaged)? |= 1 << (bit % 64);
        }
    }
    let lane_of = lane.map(|lane| &*lane.served.config);
    let config = controller_config(constants.cntlid, lane_of).ok_or(Closing::NotServed)?;
    let controller = Controller::restore(config, &state).map_err(|_| Closing::Damaged)?;
    let admitted = lane.is_none_or(|lane| lane.served.allows(controller.hostnqn().as_str()));
    if !admitted {
        return Err(Closing::NotServed);
    }
    Ok((constants, controller, content.blocks))
}

/// A request is kept if both its slot and the controller have it. Others begin again, or have
/// ended.
fn event_requests(state: &mut ControllerState, admin: &mut Converted) {
    let mut known = BTreeSet::new();
    for (command, next) in &mut admin.commands {
        if *next != Next::Kept {
            continue;
        }
        let cid = command.sqe.cid();
        let has = |(slot, of): (&u8, &u16)| *slot != 0 && *of == cid;
        if state.event_slots.iter().zip(&state.event_cids).any(has) {
            known.insert(cid);
        } else {
            command.state = command.state.with_stage(CommandStage::Taken);
            *next = Next::Begin {
                fenced: FenceSet::None,
            };
        }
    }
    for (slot, cid) in state.event_slots.iter_mut().zip(state.event_cids) {
        if !known.contains(&cid) {
            *slot = 0;
        }
    }
}

impl PlannedQueue {
    pub(super) fn commands(&self) -> impl Iterator<Item = &(super::snapshot::OldCommand, Next)> {
        self.converted.commands.iter()
    }
}
