//! One tenant's queue served by several reactors.
//!
//! **Design.** A volume's commands stay on their home reactor, which orders, translates and ends them. Only the carrying out of a
//! slice may be offloaded: another reactor submits it to its own ring and reports the end. For the home reactor such a slice is
//! at its device until the answer comes, so revokes, flushes, resets and closes wait for it as for any other.
//! Each pair of reactors has two bounded rings ([`links`]). Unanswered operations never exceed one ring, so answers find room. A
//! helper whose device is missing or another one says so, and the home reactor does the work itself.
//! With [`Spread::OneToN`], helpers are idle reactors ([`idle`]); the least loaded is asked, and only while the home's processor is
//! short and the lane has several commands. A helper that gets work of its own gives back what it has not begun.
//! **Not here:** flushes, jobs of the internal lane, operations that end without a ring at depth 1.

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

/// What one reactor may have handed to another and not been answered.
const LINK_ENTRIES: usize = 128;
/// With fewer in hand a reactor does everything itself.
const FEW: usize = 4;
const FEW_ASLEEP: usize = 8;
/// What is done for others in a turn: with work of one's own, and without. With scheduling no more than a lane may begin in one,
/// so that whoever is within their base here waits for no other reactor's queue.
pub(crate) const TURN: [usize; 2] = [8, 32];
/// The same without scheduling, where nobody says how long any of it takes.
pub(crate) const TURN_BYTES: u64 = 256 << 10;

/// An operation that another reactor is to carry out.
struct Errand {
    slice: u32,
    device: u8,
    /// Which device home means by that.
    same: usize,
    /// Who is to blame should somebody die of it.
    blame: u64,
    op: Op,
}

pub(crate) enum Ended {
    Done,
    Failed(Errno),
    /// It can't be done there.
    NotHere,
    /// Who was to do it has work of its own by now.
    NotNow,
}

pub(crate) struct Answer {
    pub(crate) slice: u32,
    pub(crate) ended: Ended,
}

/// The way to another reactor, and from it.
pub struct Peer {
    errands_out: Producer<Errand>,
    answers_in: Consumer<Answer>,
    errands_in: Consumer<Errand>,
    answers_out: Producer<Answer>,
    bell: ReactorBell,
    out: usize,
    /// Something was put there since it was last seen to be awake.
    tell: bool,
    said: Arc<Said>,
    /// It had nothing of its own to do when that was last looked at.
    idle: bool,
}

pub(crate) struct Carrying {
    home: usize,
    errand: Errand,
}

/// What a reactor has of all others.
pub struct Links {
    peers: Vec<Peer>,
    said: Arc<Said>,
    /// How many of all reactors hand nothing over any more.
    quiet: Arc<AtomicUsize>,
}

/// Ways between all of them, in the order of their bells.
pub fn links(bells: &[ReactorBell]) -> Vec<Links> {
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
            let peer = |errands_out, answers_in, errands_in, answers_out, other: usize| Peer {
                errands_out,
                answers_in,
                errands_in,
                answers_out,
                bell: bells[other].clone(),
                out: 0,
                tell: false,
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

/// See the module's text.
#[derive(Default)]
pub struct Away {
    spread: Spread,
    peers: Vec<Peer>,
    said: Arc<Said>,
    /// This reactor said that it is at work; when its lanes last began something.
    at_work: bool,
    begun_ns: u64,
    looked_ns: u64,
    need: Need,
    is_helped: bool,
    quiet: Arc<AtomicUsize>,
    is_quiet: bool,
    pub(crate) out: usize,
    /// What was done here at once in this turn.
    done_now: usize,
    /// What was begun in this turn, wherever, and in the one before.
    begun: usize,
    begun_before: usize,
    pub(crate) carrying: Vec<Option<Carrying>>,
    pub(crate) free: Vec<u32>,
    /// Those that found no room in the ring.
    again: Vec<u32>,
    /// Whose work is taken first in the next turn.
    first: usize,
}

impl Away {
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

    /// Something was begun; `now`: and is done, which counts only while anything may be handed over.
    #[inline]
    pub(crate) fn began(&mut self, now: bool) {
        self.begun += 1;
        self.done_now += usize::from(now);
    }

    #[inline]
    pub(crate) fn has_peers(&self) -> bool {
        !self.peers.is_empty()
    }

    /// Operations of others that are in hand here.
    #[inline]
    fn in_hand(&self) -> usize {
        self.carrying.len() - self.free.len()
    }

    /// Whether somebody waits for this reactor's work on something that it hasn't seen, or that found no room.
    #[inline]
    pub(crate) fn must_turn(&self) -> bool {
        let waits = |p: &Peer| p.tell || !p.errands_in.is_empty();
        !self.again.is_empty() || self.peers.iter().any(waits)
    }

    /// Others may do something for this reactor, and it for them, unless it is told otherwise ([`Away::set_spread`]).
    pub fn link(&mut self, links: Links) {
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

    /// How queues are spread over reactors from now on. What is away comes back. Says how many processors are this
    /// reactor's while it is at work.
    pub(crate) fn set_spread(&mut self, spread: Spread, now_ns: u64) -> f32 {
        self.spread = match self.peers.is_empty() || self.is_quiet {
            true => Spread::OneToOne,
            false => spread,
        };
        self.rests(now_ns);
        self.need = Need::new(now_ns);
        // Nobody counted the turns, if nothing was handed over.
        (self.begun, self.begun_before, self.done_now) = (0, 0, 0);
        self.look(now_ns)
    }

    /// Nothing is handed over any more, whatever is said later of how queues are spread.
    pub fn be_quiet(&mut self) {
        if !std::mem::replace(&mut self.is_quiet, true) {
            self.quiet.fetch_add(1, SeqCst);
        }
    }

    /// Whether nobody needs this reactor any more.
    pub fn may_leave(&self) -> bool {
        self.quiet.load(SeqCst) > self.peers.len() && self.in_hand() == 0 && !self.must_turn()
            || self.peers.is_empty()
    }

    /// Whether there is nothing to take from others: neither work nor answers.
    pub fn nothing_from_others(&self) -> bool {
        let mut peers = self.peers.iter();
        peers.all(|p| p.errands_in.is_empty() && p.answers_in.is_empty())
    }

    /// This reactor had nothing to do in this turn.
    #[inline]
    pub(crate) fn is_idle(&mut self) {
        self.need.is_idle();
    }

    /// Operations that this reactor has at devices, whoever's. So many slices are in flight.
    #[inline]
    pub(crate) fn at_devices(&self, in_flight: usize) -> usize {
        in_flight - self.out + self.in_hand()
    }

    /// Whether a lane's next slice is another reactor's to carry out, and whose. Its command is one of `own_commands` that
    /// are counted in the lane; so many slices of this reactor are in flight. `moved_any`: something was over at once for the
    /// lane in this turn; so many of its commands wait for the processor.
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
        // What is done at once is never in hand: this turn will be as the one before.
        let (before, all) = (self.begun_before, 1 + self.peers.len());
        // Nor is what waits for the next turn's part of the processor; that there is more of it elsewhere is the very point.
        let hand = own.max(before).max(waits as usize);
        if hand < FEW || !is_deep || lane.away as usize >= room {
            return None;
        }
        let limit = own.max(before / all);
        let peers = self.peers.iter().enumerate();
        let peers = peers.map(|(at, p)| (at, p, p.out - p.answers_in.slots()));
        // Answers that are not taken yet hold their place.
        let has_room = |p: &Peer, left| left < limit && p.out < LINK_ENTRIES;
        let open = peers
            .filter(|(_, p, left)| has_room(p, *left) && (hand >= FEW_ASLEEP || !p.bell.sleeps()));
        open.filter(|(_, p, _)| p.idle)
            .min_by_key(|(.., left)| *left)
            .map(|(at, ..)| at)
    }

    /// Hands a slice over that has begun: what is to be said of it before it goes to its device is said. False: there was
    /// no room.
    pub(crate) fn hand_over(
        &mut self,
        helper: usize,
        index: u32,
        slice: &mut Slice,
        same: usize,
        blame: u64,
    ) -> bool {
        let errand = Errand {
            slice: index,
            device: slice.device,
            same,
            blame,
            op: slice.op,
        };
        let peer = &mut self.peers[helper];
        if peer.errands_out.push(errand).is_err() {
            return false;
        }
        slice.away = true;
        peer.out += 1;
        if !std::mem::replace(&mut peer.tell, true) {
            // It begins while the rest is prepared.
            peer.bell.ring();
        }
        self.out += 1;
        self.began(false);
        true
    }

    pub(crate) fn others(&self) -> usize {
        self.peers.len()
    }

    pub(crate) fn next_answer(&mut self, from: usize) -> Option<Answer> {
        let peer = &mut self.peers[from];
        let answer = peer.answers_in.pop().ok()?;
        peer.out -= 1;
        peer.idle &= !matches!(answer.ended, Ended::NotNow);
        Some(answer)
    }

    /// Carries out what others have handed over, so much in a turn, less if it was `busy` with its own, or gives it back; true
    /// if there was anything. So many slices of its own are in flight.
    pub(crate) fn carry_out(
        &mut self,
        busy: bool,
        qos: &Qos,
        devices: &mut DeviceRing,
        record: &ReactorRecord,
        (in_flight, now_ns): (usize, u64),
    ) -> bool {
        let mut work = Work {
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
            self.do_errand(place, &mut work);
        }
        let peers = self.peers.len();
        // In turns: none is always first.
        let first = self.first;
        self.first = (first + 1) % peers;
        let mut nothing = 0;
        let gives_back = self.gives_back(now_ns);
        for at in (0..peers).cycle().skip(first) {
            if left == 0 || left_ns <= 0 || left_bytes == 0 || nothing == peers {
                break;
            }
            let Ok(errand) = self.peers[at].errands_in.pop() else {
                nothing += 1;
                continue;
            };
            nothing = 0;
            any = true;
            if gives_back {
                self.answer(at, errand.slice, Ended::NotNow);
                continue;
            }
            left -= 1;
            match qos.errand_ns(&errand.op) {
                Some(ns) => left_ns = left_ns.saturating_sub(ns),
                None => left_bytes = left_bytes.saturating_sub(errand.op.len_bytes()),
            }
            self.take_errand(at, errand, &mut work);
        }
        any
    }

    fn take_errand(&mut self, home: usize, errand: Errand, work: &mut Work<'_>) {
        let served = work.devices.get(errand.device);
        let is_same = |d: &Arc<Device>| Arc::as_ptr(d).addr() == errand.same;
        let place = match served {
            Some(served) if is_same(&served.device) => self.free.pop(),
            _ => None,
        };
        let Some(place) = place else {
            self.answer(home, errand.slice, Ended::NotHere);
            return;
        };
        self.carrying[place as usize] = Some(Carrying { home, errand });
        bump(&work.record.carried_out, 1);
        self.do_errand(place, work);
    }

    /// Gives an operation of another reactor to its device, or what is left of it.
    fn do_errand(&mut self, place: u32, work: &mut Work<'_>) {
        let Some(Carrying { errand, .. }) = &mut self.carrying[place as usize] else {
            return;
        };
        work.blame(errand);
        let submitted =
            (work.devices).submit(errand.device, &mut errand.op, kind::AWAY, place.into());
        match submitted {
            Some(Submitted::Queued) => {
                let at_devices = self.at_devices(work.in_flight);
                work.devices.feed(at_devices);
            }
            Some(Submitted::Done(result)) => self.errand_ended(place, result, work),
            Some(Submitted::RingFull) => self.again.push(place),
            None => {}
        }
    }

    /// The ring says that an operation of another reactor has ended.
    pub(crate) fn completed(
        &mut self,
        place: usize,
        result: i32,
        devices: &mut DeviceRing,
        record: &ReactorRecord,
        (in_flight, now_ns): (usize, u64),
    ) {
        let mut work = Work {
            devices,
            record,
            in_flight,
            now_ns,
        };
        let Some(Some(Carrying { errand, .. })) = self.carrying.get_mut(place) else {
            return;
        };
        work.blame(errand);
        match work.devices.finish(errand.device, errand.op, result) {
            Some(Finish::Done) => self.errand_ended(place as u32, Ok(()), &mut work),
            Some(Finish::Failed(errno)) => self.errand_ended(place as u32, Err(errno), &mut work),
            Some(Finish::Again(op)) => {
                errand.op = op;
                self.do_errand(place as u32, &mut work);
            }
            None => {}
        }
    }

    fn errand_ended(&mut self, place: u32, result: Result<(), Errno>, work: &mut Work<'_>) {
        let Some(carrying) = self.carrying[place as usize].take() else {
            return;
        };
        self.free.push(place);
        work.devices.ended_ns = work.now_ns;
        let ended = result.map_or_else(Ended::Failed, |()| Ended::Done);
        self.answer(carrying.home, carrying.errand.slice, ended);
    }

    fn answer(&mut self, home: usize, slice: u32, ended: Ended) {
        let peer = &mut self.peers[home];
        let answered = peer.answers_out.push(Answer { slice, ended });
        debug_assert!(answered.is_ok(), "no more unanswered than there is room");
        peer.tell = true;
    }

    /// Wakes those for whom there is something, if they sleep.
    #[inline(never)]
    pub(crate) fn tell_others(&mut self) {
        for peer in &mut self.peers {
            if std::mem::take(&mut peer.tell) {
                peer.bell.ring();
            }
        }
    }
}

/// What it takes to carry out others' operations.
struct Work<'a> {
    devices: &'a mut DeviceRing,
    record: &'a ReactorRecord,
    in_flight: usize,
    now_ns: u64,
}

impl Work<'_> {
    /// Should the reactor die of what it does now, then whoever's command that is has it.
    fn blame(&self, errand: &Errand) {
        if RECORDS {
            self.record.blame.store(errand.blame, Relaxed);
        }
    }
}
