//! Several reactors serve one tenant's queue.
//!
//! **Design.** The home reactor orders, translates and completes commands; others may only submit
//! its slices. Such a slice counts as at its device until the answer comes, so revokes, flushes,
//! resets and closes wait for it. Each pair of reactors has two bounded rings ([`links`]);
//! unanswered operations fit into one, so answers find room. With [`Spread::OneToN`] the least
//! loaded idle reactor ([`idle`]) helps, if the home's processor is short and the lane has several
//! commands. A helper without the device, or with own work, returns the operation. **Not here:**
//! flushes, internal jobs, operations at depth 1 that end without a ring.

pub(crate) mod idle;

use crate::bell::ReactorBell;
use crate::io::devices::{DeviceRing, kind};
use crate::io::slice::Slice;
use crate::lane::Lane;
use crate::qos::{Qos, TURN_NS};
use forebay_device::{Device, Errno, Finish, Op, Submitted};
use forebay_xlate::boundary::message::Spread;
use forebay_xlate::boundary::region::{RECORDS, ReactorRecord, bump};
use idle::{Need, Said};
use rtrb::{Consumer, Producer, RingBuffer};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::*};

/// Unanswered operations that one reactor may hand to another.
const LINK_ENTRIES: usize = 128;
/// With fewer operations, a reactor does all itself.
const FEW: usize = 4;
const FEW_ASLEEP: usize = 8;
/// Remote operations in a turn, with own work and without.
pub(crate) const TURN: [usize; 2] = [8, 32];
/// Bytes in a turn without scheduling, where times are unknown.
pub(crate) const TURN_BYTES: u64 = 256 << 10;

struct RemoteOp {
    slice: u32,
    device: u8,
    same: usize,
    blame: u64,
    op: Op,
}

pub(crate) enum RemoteResult {
    Done,
    Failed(Errno),
    NotHere,
    NotNow,
}

pub(crate) struct RemoteAnswer {
    pub(crate) slice: u32,
    pub(crate) ended: RemoteResult,
}

pub(crate) struct Peer {
    ops_out: Producer<RemoteOp>,
    answers_in: Consumer<RemoteAnswer>,
    ops_in: Consumer<RemoteOp>,
    answers_out: Producer<RemoteAnswer>,
    bell: ReactorBell,
    out: usize,
    report: bool,
    said: Arc<Said>,
    idle: bool,
}

pub(crate) struct RunningRemoteOp {
    home: usize,
    remote_op: RemoteOp,
}

/// A reactor's rings to all others.
pub(crate) struct Links {
    peers: Vec<Peer>,
    said: Arc<Said>,
    quiet: Arc<AtomicUsize>,
}

/// Makes all rings, in the order of the bells.
pub(crate) fn links(bells: &[ReactorBell]) -> Vec<Links> {
    let quiet = Arc::new(AtomicUsize::new(0));
    let said: Vec<Arc<Said>> = bells.iter().map(|_| Arc::default()).collect();
    let mut links: Vec<Links> = (said.iter())
        .map(|said| Links {
            peers: Vec::with_capacity(bells.len()),
            said: said.clone(),
            quiet: quiet.clone(),
        })
        .collect();
    for high in 0..bells.len() {
        for low in 0..high {
            let (to_low, at_low) = RingBuffer::new(LINK_ENTRIES);
            let (to_high, at_high) = RingBuffer::new(LINK_ENTRIES);
            let (from_low, answers_of_low) = RingBuffer::new(LINK_ENTRIES);
            let (from_high, answers_of_high) = RingBuffer::new(LINK_ENTRIES);
            let peer = |ops_out, answers_in, ops_in, answers_out, other: usize| Peer {
                ops_out,
                answers_in,
                ops_in,
                answers_out,
                bell: bells[other].clone(),
                out: 0,
                report: false,
                said: said[other].clone(),
                idle: false,
            };
            let of_high = peer(to_low, answers_of_low, at_high, from_high, low);
            let of_low = peer(to_high, answers_of_high, at_low, from_low, high);
            links[high].peers.push(of_high);
            links[low].peers.push(of_low);
        }
    }
    links
}

#[derive(Default)]
pub(crate) struct Offload {
    spread: Spread,
    peers: Vec<Peer>,
    said: Arc<Said>,
    at_work: bool,
    begun_ns: u64,
    checked_ns: u64,
    need: Need,
    is_helped: bool,
    quiet: Arc<AtomicUsize>,
    is_quiet: bool,
    pub(crate) out: usize,
    done_now: usize,
    begun: usize,
    begun_before: usize,
    pub(crate) carrying: Vec<Option<RunningRemoteOp>>,
    pub(crate) free: Vec<u32>,
    again: Vec<u32>,
    first: usize,
}

impl Offload {
    pub(crate) fn new() -> Self {
        Self {
            spread: Spread::OneToOne,
            need: Need::new(0),
            ..Self::default()
        }
    }

    #[inline]
    pub(crate) fn spreads(&self) -> bool {
        self.spread != Spread::OneToOne
    }

    #[inline]
    pub(crate) fn is_helped(&self) -> bool {
        self.is_helped
    }

    #[inline]
    pub(crate) fn began(&mut self, now: bool) {
        self.begun += 1;
        self.done_now += usize::from(now);
    }

    #[inline]
    pub(crate) fn has_peers(&self) -> bool {
        !self.peers.is_empty()
    }

    #[inline]
    fn in_hand(&self) -> usize {
        self.carrying.len() - self.free.len()
    }

    #[inline]
    pub(crate) fn must_turn(&self) -> bool {
        let waits = |p: &Peer| p.report || !p.ops_in.is_empty();
        !self.again.is_empty() || self.peers.iter().any(waits)
    }

    pub(crate) fn link(&mut self, links: Links) {
        let room = links.peers.len() * LINK_ENTRIES;
        *self = Self {
            peers: links.peers,
            said: links.said,
            quiet: links.quiet,
            carrying: (0..room).map(|_| None).collect(),
            free: (0..room as u32).rev().collect(),
            again: Vec::with_capacity(room),
            ..Self::new()
        };
    }

    /// Returns the processors that this reactor has at work.
    pub(crate) fn set_spread(&mut self, spread: Spread, now_ns: u64) -> f32 {
        self.spread = match self.peers.is_empty() || self.is_quiet {
            true => Spread::OneToOne,
            false => spread,
        };
        self.rests(now_ns);
        self.need = Need::new(now_ns);
        // Turns were not counted while nothing was handed over.
        (self.begun, self.begun_before, self.done_now) = (0, 0, 0);
        self.check(now_ns)
    }

    /// Stops handing over operations.
    pub(crate) fn be_quiet(&mut self) {
        if !std::mem::replace(&mut self.is_quiet, true) {
            self.quiet.fetch_add(1, SeqCst);
        }
    }

    /// Whether no reactor needs this one.
    pub(crate) fn is_drained(&self) -> bool {
        self.quiet.load(SeqCst) > self.peers.len() && self.in_hand() == 0 && !self.must_turn()
            || self.peers.is_empty()
    }

    pub(crate) fn nothing_from_others(&self) -> bool {
        let mut peers = self.peers.iter();
        peers.all(|p| p.ops_in.is_empty() && p.answers_in.is_empty())
    }

    #[inline]
    pub(crate) fn is_idle(&mut self) {
        self.need.is_idle();
    }

    #[inline]
    pub(crate) fn at_devices(&self, in_flight: usize) -> usize {
        in_flight - self.out + self.in_hand()
    }

    /// The reactor for a lane's next slice. `waits`: commands that wait for the processor.
    pub(crate) fn helper(
        &self,
        lane: &Lane,
        own_commands: u32,
        in_flight: usize,
        moved_any: bool,
        waits: u32,
    ) -> Option<usize> {
        let own = in_flight - self.out + self.done_now;
        let is_deep = lane.in_flight > own_commands || moved_any;
        let room = self.peers.len() * LINK_ENTRIES - self.out;
        // Operations that end at once are never in hand: the last turn's number stands for them.
        let (before, all) = (self.begun_before, 1 + self.peers.len());
        // Commands that wait for processor time are not in hand either.
        let hand = own.max(before).max(waits as usize);
        if hand < FEW || !is_deep || lane.remote as usize >= room {
            return None;
        }
        let limit = own.max(before / all);
        let peers = self.peers.iter().enumerate();
        let peers = peers.map(|(at, p)| (at, p, p.out - p.answers_in.slots()));
        // Answers not yet taken hold their place.
        let has_room = |p: &Peer, left| left < limit && p.out < LINK_ENTRIES;
        let open = peers
            .filter(|(_, p, left)| has_room(p, *left) && (hand >= FEW_ASLEEP || !p.bell.sleeps()));
        open.filter(|(_, p, _)| p.idle)
            .min_by_key(|(.., left)| *left)
            .map(|(at, ..)| at)
    }

    /// The command's record must name the device; false if there was no room.
    pub(crate) fn offer(
        &mut self,
        helper: usize,
        index: u32,
        slice: &mut Slice,
        same: usize,
        blame: u64,
    ) -> bool {
        let remote_op = RemoteOp {
            slice: index,
            device: slice.device,
            same,
            blame,
            op: slice.op,
        };
        let peer = &mut self.peers[helper];
        if peer.ops_out.push(remote_op).is_err() {
            return false;
        }
        slice.remote = true;
        peer.out += 1;
        if !std::mem::replace(&mut peer.report, true) {
            peer.bell.ring();
        }
        self.out += 1;
        self.began(false);
        true
    }

    pub(crate) fn others(&self) -> usize {
        self.peers.len()
    }

    pub(crate) fn next_answer(&mut self, from: usize) -> Option<RemoteAnswer> {
        let peer = &mut self.peers[from];
        let answer = peer.answers_in.pop().ok()?;
        peer.out -= 1;
        peer.idle &= !matches!(answer.ended, RemoteResult::NotNow);
        Some(answer)
    }

    /// Carries out some remote operations, or returns them; true if any.
    pub(crate) fn carry_out(
        &mut self,
        busy: bool,
        qos: &Qos,
        devices: &mut DeviceRing,
        record: &ReactorRecord,
        (in_flight, now_ns): (usize, u64),
    ) -> bool {
        let mut work = RemoteWork {
            devices,
            record,
            in_flight,
            now_ns,
        };
        let mut left = TURN[usize::from(!busy)];
        let mut left_ns = TURN_NS;
        let mut left_bytes = TURN_BYTES;
        let mut any = false;
        for _ in 0..self.again.len() {
            let place = self.again.swap_remove(0);
            any = true;
            self.execute_remote_op(place, &mut work);
        }
        let peers = self.peers.len();
        // Round-robin.
        let first = self.first;
        self.first = (first + 1) % peers;
        let mut nothing = 0;
        let gives_back = self.gives_back(now_ns);
        for at in (0..peers).cycle().skip(first) {
            if left == 0 || left_ns <= 0 || left_bytes == 0 || nothing == peers {
                break;
            }
            let Ok(remote_op) = self.peers[at].ops_in.pop() else {
                nothing += 1;
                continue;
            };
            nothing = 0;
            any = true;
            if gives_back {
                self.answer(at, remote_op.slice, RemoteResult::NotNow);
                continue;
            }
            left -= 1;
            match qos.remote_op_ns(&remote_op.op) {
                Some(ns) => left_ns = left_ns.saturating_sub(ns),
                None => left_bytes = left_bytes.saturating_sub(remote_op.op.len_bytes()),
            }
            self.accept_remote_op(at, remote_op, &mut work);
        }
        any
    }

    fn accept_remote_op(&mut self, home: usize, remote_op: RemoteOp, work: &mut RemoteWork<'_>) {
        let served = work.devices.get(remote_op.device);
        let is_same = |d: &Arc<Device>| Arc::as_ptr(d).addr() == remote_op.same;
        let place = match served {
            Some(served) if is_same(&served.device) => self.free.pop(),
            _ => None,
        };
        let Some(place) = place else {
            self.answer(home, remote_op.slice, RemoteResult::NotHere);
            return;
        };
        self.carrying[place as usize] = Some(RunningRemoteOp { home, remote_op });
        bump(&work.record.carried_out, 1);
        self.execute_remote_op(place, work);
    }

    fn execute_remote_op(&mut self, place: u32, work: &mut RemoteWork<'_>) {
        let Some(RunningRemoteOp { remote_op, .. }) = &mut self.carrying[place as usize] else {
            return;
        };
        work.blame(remote_op);
        let submitted = (work.devices).queue(
            remote_op.device,
            &mut remote_op.op,
            kind::REMOTE,
            place.into(),
        );
        match submitted {
            Some(Submitted::Queued) => {
                let at_devices = self.at_devices(work.in_flight);
                work.devices.feed(at_devices);
            }
            Some(Submitted::Done(result)) => self.remote_op_ended(place, result, work),
            Some(Submitted::RingFull) => self.again.push(place),
            // Its home waits.
            Some(Submitted::NotReady) => self.end_remote_op(place, RemoteResult::NotHere),
            None => {}
        }
    }

    pub(crate) fn completed(
        &mut self,
        place: usize,
        result: i32,
        devices: &mut DeviceRing,
        record: &ReactorRecord,
        (in_flight, now_ns): (usize, u64),
    ) {
        let mut work = RemoteWork {
            devices,
            record,
            in_flight,
            now_ns,
        };
        let Some(Some(RunningRemoteOp { remote_op, .. })) = self.carrying.get_mut(place) else {
            return;
        };
        work.blame(remote_op);
        match work.devices.finish(remote_op.device, remote_op.op, result) {
            Some(Finish::Done) => self.remote_op_ended(place as u32, Ok(()), &mut work),
            Some(Finish::Failed(errno)) => {
                self.remote_op_ended(place as u32, Err(errno), &mut work)
            }
            Some(Finish::Again(op)) => {
                remote_op.op = op;
                self.execute_remote_op(place as u32, &mut work);
            }
            None => {}
        }
    }

    fn remote_op_ended(
        &mut self,
        place: u32,
        result: Result<(), Errno>,
        work: &mut RemoteWork<'_>,
    ) {
        if let Some(RunningRemoteOp { remote_op, .. }) = &self.carrying[place as usize] {
            work.devices.ended(remote_op.device, work.now_ns);
        }
        let ended = result.map_or_else(RemoteResult::Failed, |()| RemoteResult::Done);
        self.end_remote_op(place, ended);
    }

    fn end_remote_op(&mut self, place: u32, ended: RemoteResult) {
        if let Some(carrying) = self.carrying[place as usize].take() {
            self.free.push(place);
            self.answer(carrying.home, carrying.remote_op.slice, ended);
        }
    }

    fn answer(&mut self, home: usize, slice: u32, ended: RemoteResult) {
        let peer = &mut self.peers[home];
        let answered = peer.answers_out.push(RemoteAnswer { slice, ended });
        debug_assert!(answered.is_ok(), "no more unanswered than there is room");
        peer.report = true;
    }

    #[inline(never)]
    pub(crate) fn ring_others(&mut self) {
        for peer in &mut self.peers {
            if std::mem::take(&mut peer.report) {
                peer.bell.ring();
            }
        }
    }
}

struct RemoteWork<'a> {
    devices: &'a mut DeviceRing,
    record: &'a ReactorRecord,
    in_flight: usize,
    now_ns: u64,
}

impl RemoteWork<'_> {
    fn blame(&self, remote_op: &RemoteOp) {
        if RECORDS {
            self.record.blame.store(remote_op.blame, Relaxed);
        }
    }
}
