//! Work of this reactor that others do: one tenant's queue served by several reactors.
//!
//! **Design.** A volume's commands all stay on the reactor whose lane it is, its *home*: that takes, orders, translates and
//! ends them, and keeps a slice for each part of them that is at a device. What may go *away* is the carrying out of a slice
//! alone: the operation goes to another reactor, which gives it to the device with its own ring and says how it ended. To
//! home such a slice is at its device from when it is handed over until the answer is there: so whatever waits for
//! slices (revokes, flushes, what overlaps, resets, connections that close, the end of an export, a machine's memory) waits
//! for those as well, and nothing of an order has to be known elsewhere. Home says in the command's record which device
//! it goes to before it hands it over: a successor doesn't care who submitted it.
//!
//! Two bounded rings to each other reactor and two back ([`links`]): operations, and how they ended. What is unanswered
//! is never more than fits into one, so an answer always finds room. A device that is not there yet, or not the same one, is an answer
//! too: home does it itself.
//!
//! *Who*: [`Spread::OneToOne`]: nobody. [`Spread::OneToN`], the default: of those that have nothing of their own to do ([`idle`]),
//! whoever has the least of what home has handed over, if that is less than home has itself,
//! or than its part of what home began in its last turn; and only while home's own processor is not enough. Who has something of its own to do by then gives back what it has not begun.
//! So whoever is within their base feels no other reactor's burst, but for what is being done when they come.
//! That is only where home has a few in hand, or they wait for its processor, and a lane more than one:
//! at depth 1 nothing is gained. A reactor that sleeps is woken for more than that. As everywhere, a lane never has more away than it
//! leaves to all others, so a device that hangs holds up its own.
//!
//! **Not here:** flushes, jobs of the internal lane, what takes no ring and is over at once at depth 1.

pub(super) mod idle;

use super::{Core, MAX_SLICES, admit, kind};
use crate::bell::ReactorBell;
use crate::lane::LaneIndex;
use forebay_device::{Device, Errno, Finish, Op, Submitted};
use forebay_xlate::boundary::message::Spread;
use forebay_xlate::boundary::region::{RECORDS, bump};
use idle::{Need, Said};
use rtrb::{Consumer, Producer, RingBuffer};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::*};

/// What one reactor may have handed to another and not been answered.
const LINK_ENTRIES: usize = 128;
/// With fewer in hand a reactor does everything itself.
const FEW: usize = 4;
/// With fewer it doesn't wake another.
const FEW_ASLEEP: usize = 8;
/// What is done for others in a turn: with work of one's own, and without. With scheduling no more than a lane may begin in one,
/// so that whoever is within their base here waits for no other reactor's queue.
pub(super) const TURN: [usize; 2] = [8, 32];
/// The same without scheduling, where nobody says how long any of it takes.
pub(super) const TURN_BYTES: u64 = 256 << 10;

/// An operation that another reactor is to carry out.
struct Errand {
    /// Home's.
    slice: u32,
    device: u8,
    /// Which device home means by that.
    same: usize,
    /// Who is to blame should somebody die of it.
    blame: u64,
    op: Op,
}

/// How it ended.
enum Ended {
    Done,
    Failed(Errno),
    /// It can't be done there.
    NotHere,
    /// Who was to do it has work of its own by now.
    NotNow,
}

struct Answer {
    slice: u32,
    ended: Ended,
}

/// The way to another reactor, and from it.
pub struct Peer {
    errands_out: Producer<Errand>,
    answers_in: Consumer<Answer>,
    errands_in: Consumer<Errand>,
    answers_out: Producer<Answer>,
    bell: ReactorBell,
    /// What it has of ours.
    out: usize,
    /// Something was put there since it was last seen to be awake.
    tell: bool,
    /// What it says of itself.
    said: Arc<Said>,
    /// It had nothing of its own to do when that was last looked at.
    idle: bool,
}

/// One that is carried out here.
pub(super) struct Carrying {
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
pub(super) struct Away {
    spread: Spread,
    peers: Vec<Peer>,
    said: Arc<Said>,
    /// This reactor said that it is at work; when its lanes last began something.
    at_work: bool,
    begun_ns: u64,
    /// When it looked at what others say.
    looked_ns: u64,
    /// Whether anything is to be handed over.
    need: Need,
    /// Somebody may take something.
    is_helped: bool,
    quiet: Arc<AtomicUsize>,
    is_quiet: bool,
    /// Slices of ours that are away.
    pub(super) out: usize,
    /// What was done here at once in this turn.
    done_now: usize,
    /// What was begun in this turn, wherever, and in the one before.
    begun: usize,
    begun_before: usize,
    pub(super) carrying: Vec<Option<Carrying>>,
    pub(super) free: Vec<u32>,
    /// Those that found no room in the ring.
    again: Vec<u32>,
    /// Whose work is taken first in the next turn.
    first: usize,
}

impl Away {
    /// With nobody else.
    pub(super) fn new() -> Self {
        Self {
            spread: Spread::OneToOne,
            need: Need::new(0),
            ..Self::default()
        }
    }

    /// Whether reactors help each other.
    #[inline]
    pub(super) fn spreads(&self) -> bool {
        self.spread != Spread::OneToOne
    }

    /// Whether anything may be handed over now.
    #[inline]
    pub(super) fn is_helped(&self) -> bool {
        self.is_helped
    }

    /// Something was begun; `now`: and is done, which counts only while anything may be handed over.
    #[inline]
    pub(super) fn began(&mut self, now: bool) {
        self.begun += 1;
        self.done_now += usize::from(now);
    }

    /// Whether there are other reactors.
    #[inline]
    pub(super) fn has_peers(&self) -> bool {
        !self.peers.is_empty()
    }

    /// Operations of others that are in hand here.
    #[inline]
    fn in_hand(&self) -> usize {
        self.carrying.len() - self.free.len()
    }

    /// Whether somebody waits for this reactor's work on something that it hasn't seen, or that found no room.
    #[inline]
    pub(super) fn must_turn(&self) -> bool {
        let waits = |p: &Peer| p.tell || !p.errands_in.is_empty();
        !self.again.is_empty() || self.peers.iter().any(waits)
    }
}

impl Core {
    /// Others may do something for this reactor, and it for them, unless it is told otherwise.
    pub fn link(&mut self, links: Links) {
        let room = links.peers.len() * LINK_ENTRIES;
        self.away = Away {
            peers: links.peers,
            said: links.said,
            quiet: links.quiet,
            carrying: (0..room).map(|_| None).collect(),
            free: (0..room as u32).rev().collect(),
            again: Vec::with_capacity(room),
            ..Away::new()
        };
        self.set_spread(Spread::default());
    }

    /// How queues are spread over reactors from now on. What is away comes back.
    pub fn set_spread(&mut self, spread: Spread) {
        self.away.spread = match self.away.peers.is_empty() || self.away.is_quiet {
            true => Spread::OneToOne,
            false => spread,
        };
        self.away.rests(self.now_ns);
        self.away.need = Need::new(self.now_ns);
        // Nobody counted the turns, if nothing was handed over.
        let away = &mut self.away;
        (away.begun, away.begun_before, away.done_now) = (0, 0, 0);
        self.look_at_others();
    }

    /// Who may help is looked at, and what there is to give out here with their processors.
    pub(super) fn look_at_others(&mut self) {
        let processors = self.away.look(self.now_ns);
        if let Some(admission) = &mut self.admission {
            admission.set_processors(processors);
        }
    }

    /// Nothing is handed over any more.
    pub fn be_quiet(&mut self) {
        self.set_spread(Spread::OneToOne);
        if !std::mem::replace(&mut self.away.is_quiet, true) {
            self.away.quiet.fetch_add(1, SeqCst);
        }
    }

    /// Whether nobody needs this reactor any more.
    pub fn may_leave(&self) -> bool {
        let away = &self.away;
        away.quiet.load(SeqCst) > away.peers.len() && away.in_hand() == 0 && !away.must_turn()
            || away.peers.is_empty()
    }

    /// Whether there is nothing to take from others: neither work nor answers.
    pub fn nothing_from_others(&self) -> bool {
        let mut peers = self.away.peers.iter();
        peers.all(|p| p.errands_in.is_empty() && p.answers_in.is_empty())
    }

    /// This reactor has nothing to do.
    #[inline]
    pub fn is_idle(&mut self) {
        self.admission_is_idle();
        self.away.need.is_idle();
    }

    /// Operations that this reactor has at devices, whoever's.
    #[inline]
    pub(super) fn at_devices(&self) -> usize {
        MAX_SLICES - self.free_slices.len() - self.away.out + self.away.in_hand()
    }

    /// Whether a lane's next slice is another reactor's to carry out, and whose. Its command is one of so many that
    /// are counted in the lane.
    #[cold]
    #[inline(never)]
    pub(super) fn whose(&self, lane: LaneIndex, own_commands: u32) -> Option<usize> {
        let own = MAX_SLICES - self.free_slices.len() - self.away.out + self.away.done_now;
        let of = self.lanes.get(lane.0 as usize)?.as_ref()?;
        let is_deep = of.in_flight > own_commands || self.machines.moved_any(lane);
        let room = self.away.peers.len() * LINK_ENTRIES - self.away.out;
        // What is done at once is never in hand: this turn will be as the one before.
        let (before, all) = (self.away.begun_before, 1 + self.away.peers.len());
        // Nor is what waits for the next turn's part of the processor; that there is more of it elsewhere is the very point.
        let waits = self.admission.as_ref();
        let waits = waits.map_or(0, |a| a.waits_for_processor(lane)) as usize;
        let hand = own.max(before).max(waits);
        if hand < FEW || !is_deep || of.away as usize >= room {
            return None;
        }
        let limit = own.max(before / all);
        let peers = self.away.peers.iter().enumerate();
        let peers = peers.map(|(at, p)| (at, p, p.out - p.answers_in.slots()));
        // Answers that are not taken yet hold their place.
        let has_room = |p: &Peer, left| left < limit && p.out < LINK_ENTRIES;
        let open = peers
            .filter(|(_, p, left)| has_room(p, *left) && (hand >= FEW_ASLEEP || !p.bell.sleeps()));
        open.filter(|(_, p, _)| p.idle)
            .min_by_key(|(.., left)| *left)
            .map(|(at, ..)| at)
    }

    /// Hands a slice over that has begun: what is to be said of it before it goes to its device is said.
    pub(super) fn hand_over(&mut self, at: usize, index: usize) {
        let Some(slice) = self.slices[index].as_mut() else {
            return;
        };
        let io = &self.ios[slice.io as usize];
        let served = self.devices[usize::from(slice.device)].as_ref();
        let errand = Errand {
            slice: index as u32,
            device: slice.device,
            same: served.map_or(0, |served| Arc::as_ptr(&served.device).addr()),
            blame: io.record.blame(),
            op: slice.op,
        };
        let lane = io.lane;
        let peer = &mut self.away.peers[at];
        if peer.errands_out.push(errand).is_err() {
            // It never has more than there is room for.
            self.submit_again(index);
            return;
        }
        slice.away = true;
        peer.out += 1;
        if !std::mem::replace(&mut peer.tell, true) {
            // It begins while the rest is prepared.
            peer.bell.ring();
        }
        self.away.out += 1;
        if let Some(lane) = self.lanes[lane.0 as usize].as_mut() {
            lane.away += 1;
        }
        self.away.began(false);
        bump(&self.record().handed_over, 1);
    }

    /// Takes what others have carried out; true if there was anything.
    #[inline(never)]
    pub(super) fn take_answers(&mut self) -> bool {
        let mut any = false;
        for at in 0..self.away.peers.len() {
            while let Ok(answer) = self.away.peers[at].answers_in.pop() {
                any = true;
                let peer = &mut self.away.peers[at];
                peer.out -= 1;
                peer.idle &= !matches!(answer.ended, Ended::NotNow);
                self.answered(answer);
            }
        }
        any
    }

    fn answered(&mut self, answer: Answer) {
        let index = answer.slice as usize;
        let slice = self.slices.get_mut(index).and_then(Option::as_mut);
        let Some(slice) = slice.filter(|slice| slice.away) else {
            return;
        };
        slice.away = false;
        self.away.out -= 1;
        let io = slice.io;
        self.blame(Some(io));
        let lane = self.ios[io as usize].lane;
        if let Some(lane) = self.lanes[lane.0 as usize].as_mut() {
            lane.away -= 1;
        }
        match answer.ended {
            Ended::Done => self.slice_ended(index, None),
            Ended::Failed(errno) => self.slice_ended(index, Some(errno)),
            Ended::NotHere | Ended::NotNow => self.submit_again(index),
        }
    }

    /// Carries out what others have handed over, so much in a turn, less if it was `busy` with its own, or gives it back; true
    /// if there was anything.
    pub fn carry_out(&mut self, busy: bool) -> bool {
        if self.away.peers.is_empty() {
            return false;
        }
        let mut left = TURN[usize::from(!busy)];
        let admission = self.admission.as_ref();
        let mut left_ns = admission.map_or(i32::MAX, |_| admit::TURN_NS);
        let mut left_bytes = TURN_BYTES;
        let mut any = false;
        for _ in 0..self.away.again.len() {
            let place = self.away.again.swap_remove(0);
            any = true;
            self.do_errand(place);
        }
        let peers = self.away.peers.len();
        // In turns: none is always first.
        let first = self.away.first;
        self.away.first = (first + 1) % peers;
        let mut nothing = 0;
        let gives_back = self.away.gives_back(self.now_ns);
        for at in (0..peers).cycle().skip(first) {
            if left == 0 || left_ns <= 0 || left_bytes == 0 || nothing == peers {
                break;
            }
            let Ok(errand) = self.away.peers[at].errands_in.pop() else {
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
            match &self.admission {
                Some(admission) => {
                    left_ns = left_ns.saturating_sub(admission.errand_ns(&errand.op));
                }
                None => left_bytes = left_bytes.saturating_sub(errand.op.len_bytes()),
            }
            self.take_errand(at, errand);
        }
        any
    }

    fn take_errand(&mut self, home: usize, errand: Errand) {
        let served = self.devices[usize::from(errand.device)].as_ref();
        let is_same = |d: &Arc<Device>| Arc::as_ptr(d).addr() == errand.same;
        let place = match served {
            Some(served) if is_same(&served.device) => self.away.free.pop(),
            _ => None,
        };
        let Some(place) = place else {
            self.answer(home, errand.slice, Ended::NotHere);
            return;
        };
        self.away.carrying[place as usize] = Some(Carrying { home, errand });
        bump(&self.record().carried_out, 1);
        self.do_errand(place);
    }

    /// Gives an operation of another reactor to its device, or what is left of it.
    fn do_errand(&mut self, place: u32) {
        let Some(Carrying { errand, .. }) = &mut self.away.carrying[place as usize] else {
            return;
        };
        if RECORDS {
            self.record.blame.store(errand.blame, Relaxed);
        }
        let Some(served) = &self.devices[usize::from(errand.device)] else {
            return;
        };
        let data = kind::AWAY << kind::SHIFT | u64::from(place);
        match served.device.submit(&mut self.ring, &mut errand.op, data) {
            Submitted::Queued => self.feed_devices(),
            Submitted::Done(result) => self.errand_ended(place, result.err()),
            Submitted::RingFull => self.away.again.push(place),
        }
    }

    /// The ring says that an operation of another reactor has ended.
    pub(super) fn away_completed(&mut self, place: usize, result: i32) {
        let Some(Some(Carrying { errand, .. })) = self.away.carrying.get_mut(place) else {
            return;
        };
        if RECORDS {
            self.record.blame.store(errand.blame, Relaxed);
        }
        let Some(served) = &self.devices[usize::from(errand.device)] else {
            return;
        };
        match served.device.finish(errand.op, result) {
            Finish::Done => self.errand_ended(place as u32, None),
            Finish::Failed(errno) => self.errand_ended(place as u32, Some(errno)),
            Finish::Again(op) => {
                errand.op = op;
                self.do_errand(place as u32);
            }
        }
    }

    fn errand_ended(&mut self, place: u32, error: Option<Errno>) {
        let Some(carrying) = self.away.carrying[place as usize].take() else {
            return;
        };
        self.away.free.push(place);
        self.slice_ended_ns = self.now_ns;
        let ended = error.map_or(Ended::Done, Ended::Failed);
        self.answer(carrying.home, carrying.errand.slice, ended);
    }

    fn answer(&mut self, home: usize, slice: u32, ended: Ended) {
        let peer = &mut self.away.peers[home];
        let answered = peer.answers_out.push(Answer { slice, ended });
        debug_assert!(answered.is_ok(), "no more unanswered than there is room");
        peer.tell = true;
    }

    /// Wakes those for whom there is something, if they sleep.
    #[inline(never)]
    pub(super) fn tell_others(&mut self) {
        for peer in &mut self.away.peers {
            if std::mem::take(&mut peer.tell) {
                peer.bell.ring();
            }
        }
    }
}
