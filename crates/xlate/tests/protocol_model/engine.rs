//! The engine: control thread ([`EngineSide`]), reactors (mailbox and [`Drains`]), slices at the
//! devices.
//!
//! Lookup, claim, second lookup and submission are separate steps, which other threads interleave.
//! A reactor takes no post between them.

use crate::scenario::{Command, Kind, Stage};
use crate::world::World;
use forebay_xlate::boundary::message::{FaultAsk, GrantOf, Job};
use forebay_xlate::drain::{Drains, SliceSpan};
use forebay_xlate::engine_side::{Effect, EngineSide, ProtocolPost, ProtocolUpcall, Words};
use forebay_xlate::reactor_side::{Answer, Heard, Lookup, Parked, access};
use forebay_xlate::table::Table;
use forebay_xlate::{DeviceIndex, ExtentRange, Rights, VolumeId, Word};
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// The only extent of every volume.
pub(crate) const EXTENT: ExtentRange = ExtentRange::new(0, 1);

/// The epochs that a model's history may use; the next one after the last is the first.
pub(crate) const EPOCHS: u16 = 2;

/// The volumes' words and epochs; a step uses a real [`Table`].
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
pub(crate) struct Cache {
    pub words: BTreeMap<VolumeId, u64>,
    pub epochs: BTreeMap<VolumeId, u16>,
}

impl Cache {
    fn table(&self, volume: VolumeId) -> Option<Table> {
        let table = Table::new(1);
        table.install(EXTENT, Word::from_bits(*self.words.get(&volume)?));
        table.set_epoch(self.epochs.get(&volume).copied().unwrap_or(0));
        Some(table)
    }

    fn claim(&mut self, volume: VolumeId, seen: Word) {
        if let Some(table) = self.table(volume) {
            table.claim(0, seen);
            self.keep(volume, &table);
        }
    }

    /// Keeps the word as it is stored: an epoch matters only to a word that it makes writable.
    fn keep(&mut self, volume: VolumeId, table: &Table) {
        let stored = (0..EPOCHS).find_map(|epoch| {
            table.set_epoch(epoch);
            let word = table.lookup(0);
            word.claimed().writable().then(|| word.with_epoch(epoch))
        });
        let word = stored.unwrap_or_else(|| table.lookup(0));
        self.words.insert(volume, word.bits());
    }
}

impl Words for Cache {
    fn lookup(&self, volume: VolumeId, extent: u64) -> Option<Word> {
        Some(self.table(volume)?.lookup(extent))
    }

    fn install(&mut self, grant: &GrantOf) -> bool {
        let Some(table) = self.table(grant.volume) else {
            return false;
        };
        table.install(grant.range, Word::from_bits(grant.word));
        self.keep(grant.volume, &table);
        true
    }

    fn clear(&mut self, volume: VolumeId, range: ExtentRange) {
        if let Some(table) = self.table(volume) {
            table.clear(range);
            self.keep(volume, &table);
        }
    }

    fn freeze(&mut self, volume: VolumeId, epoch: u16) {
        self.epochs.insert(volume, epoch);
    }

    fn take_back(&mut self, volume: VolumeId, range: ExtentRange) -> Vec<ExtentRange> {
        let Some(table) = self.table(volume) else {
            return Vec::new();
        };
        let taken = table.take_back(range);
        self.keep(volume, &table);
        taken
    }

    fn count_preallocated(&self, volume: VolumeId, range: ExtentRange) -> u64 {
        self.table(volume)
            .map_or(0, |table| table.count_preallocated(range))
    }

    fn committed(&mut self, _: VolumeId, _: u64) {}

    fn is_committed(&self, _: VolumeId, _: u64) -> bool {
        true
    }
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Slice {
    pub command: usize,
    pub device: u8,
    pub span: SliceSpan,
}

/// A reactor's next step, before it takes a post.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum Next {
    /// Claim this preallocated word.
    Claim(u64),
    /// Look it up again.
    Look,
    /// Submit to the device with this word.
    Submit(u64),
}

#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
pub(crate) struct Reactor {
    pub mailbox: VecDeque<ProtocolPost>,
    pub upcalls: VecDeque<ProtocolUpcall>,
    pub asleep: bool,
    pub rung: bool,
    pub drains: Drains<4>,
    pub slices: Vec<Slice>,
    /// The command being translated.
    pub hand: Option<(usize, Next)>,
    /// Commands to translate before the next post.
    pub next: VecDeque<usize>,
    settles: Vec<(u64, u8, u64)>,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Engine {
    pub side: EngineSide,
    pub words: Cache,
    pub reactors: Vec<Reactor>,
    pub fenced: BTreeSet<u8>,
    /// The internal lane's zero-fills at the devices.
    pub lane: Vec<(u64, u8)>,
}

impl Engine {
    pub(crate) fn new(reactors: usize, max_drains: usize, volumes: &[VolumeId]) -> Self {
        Self {
            side: EngineSide::new(reactors, max_drains),
            words: Cache {
                words: volumes.iter().map(|v| (*v, 0)).collect(),
                epochs: BTreeMap::new(),
            },
            reactors: vec![Reactor::default(); reactors],
            fenced: BTreeSet::new(),
            lane: Vec::new(),
        }
    }
}

pub(crate) struct Around<'a> {
    pub commands: &'a [Command],
    pub stages: &'a mut Vec<Stage>,
    pub wrong: &'a mut Option<&'static str>,
}

impl Engine {
    pub(crate) fn carry_out(
        &mut self,
        effects: Vec<Effect>,
        mut say: impl FnMut(forebay_xlate::boundary::message::FromEngine),
    ) {
        for effect in effects {
            match effect {
                Effect::Say(message) => say(message),
                Effect::Post(who, post) => {
                    for r in who.iter() {
                        let reactor = &mut self.reactors[r];
                        reactor.mailbox.push_back(post);
                        reactor.rung |= reactor.asleep;
                    }
                }
            }
        }
    }

    pub(crate) fn dispatch(&mut self, r: usize, c: usize, around: &mut Around<'_>) {
        let command = around.commands[c];
        let reactor = &mut self.reactors[r];
        reactor.asleep = false;
        if reactor.hand.is_some() {
            reactor.next.push_back(c);
            return;
        }
        if command.kind == Kind::Deallocate {
            reactor.upcalls.push_back(ProtocolUpcall::Release {
                io: c as u32,
                generation: 0,
                volume: command.volume,
                range: EXTENT,
            });
            around.stages[c] = Stage::Releasing;
            return;
        }
        let write = command.kind == Kind::Write;
        let word = self.words.lookup(command.volume, 0).expect("served");
        around.stages[c] = match access(word, write) {
            Lookup::Device(word) if !self.fenced.contains(&word.device().0) => Stage::DeviceWait,
            Lookup::Device(word) => {
                reactor.hand = Some((c, Next::Submit(word.bits())));
                Stage::Moving
            }
            Lookup::Claim => {
                reactor.hand = Some((c, Next::Claim(word.bits())));
                Stage::Moving
            }
            Lookup::Zeros => Stage::Done,
            Lookup::Park => {
                reactor.upcalls.push_back(ProtocolUpcall::Fault(FaultAsk {
                    volume: command.volume,
                    extent: 0,
                    write,
                    whole: false,
                }));
                Stage::Parked(Parked {
                    volume: command.volume,
                    extent: 0,
                    write,
                })
            }
        };
    }

    fn dispatch_next(&mut self, r: usize, around: &mut Around<'_>) {
        while self.reactors[r].hand.is_none()
            && let Some(c) = self.reactors[r].next.pop_front()
        {
            self.dispatch(r, c, around);
        }
    }

    pub(crate) fn go_on(&mut self, r: usize, around: &mut Around<'_>) -> Option<Slice> {
        let (c, next) = self.reactors[r].hand?;
        let command = around.commands[c];
        let word = match next {
            Next::Claim(seen) => {
                self.words.claim(command.volume, Word::from_bits(seen));
                self.reactors[r].hand = Some((c, Next::Look));
                return None;
            }
            Next::Look => {
                self.reactors[r].hand = None;
                self.dispatch(r, c, around);
                self.dispatch_next(r, around);
                return None;
            }
            Next::Submit(word) => word,
        };
        let reactor = &mut self.reactors[r];
        reactor.hand = None;
        let slice = Slice {
            command: c,
            device: Word::from_bits(word).device().0,
            span: SliceSpan {
                volume: command.volume,
                range: EXTENT,
                write: command.kind == Kind::Write,
                number: reactor.drains.begin(),
            },
        };
        reactor.slices.push(slice.clone());
        self.dispatch_next(r, around);
        Some(slice)
    }

    pub(crate) fn end(&mut self, r: usize, i: usize, around: &mut Around<'_>) -> Slice {
        let reactor = &mut self.reactors[r];
        reactor.asleep = false;
        let slice = reactor.slices.remove(i);
        let upcalls = &mut reactor.upcalls;
        reactor.drains.ended(&slice.span, |revoke| {
            upcalls.push_back(ProtocolUpcall::Drained { revoke });
        });
        around.stages[slice.command] = Stage::Done;
        self.check_settles(r);
        slice
    }

    fn check_settles(&mut self, r: usize) {
        let lane: Vec<u8> = self.lane.iter().map(|(_, d)| *d).collect();
        let Reactor {
            settles,
            slices,
            upcalls,
            ..
        } = &mut self.reactors[r];
        settles.retain(|(job, device, before)| {
            let busy = slices
                .iter()
                .any(|s| s.device == *device && s.span.number < *before)
                || r == 0 && lane.contains(device);
            if !busy {
                upcalls.push_back(ProtocolUpcall::Settled { job: *job });
            }
            busy
        });
    }

    pub(crate) fn zero_fill_ends(&mut self, i: usize) -> u8 {
        let (job, device) = self.lane.remove(i);
        self.reactors[0].asleep = false;
        let done = ProtocolUpcall::JobDone { job, errno: None };
        self.reactors[0].upcalls.push_back(done);
        self.check_settles(0);
        device
    }

    pub(crate) fn take_post(&mut self, r: usize, around: &mut Around<'_>) {
        let Some(post) = self.reactors[r].mailbox.pop_front() else {
            return;
        };
        let reactor = &mut self.reactors[r];
        match post {
            ProtocolPost::Granted(volume, range) => {
                self.answer(r, volume, range, Answer::Granted, around);
            }
            ProtocolPost::FaultFailed(volume, range, write, reason) => {
                self.answer(r, volume, range, Answer::Failed { write, reason }, around);
            }
            ProtocolPost::Revoke {
                revoke,
                volume,
                range,
                writes_only,
            } => {
                let in_flight: Vec<_> = reactor.slices.iter().map(|s| s.span).collect();
                if reactor
                    .drains
                    .post(revoke, volume, range, writes_only, in_flight.into_iter())
                {
                    reactor
                        .upcalls
                        .push_back(ProtocolUpcall::Drained { revoke });
                }
            }
            ProtocolPost::Abandon(revoke) => reactor.drains.abandon(revoke),
            ProtocolPost::Settle(job, device) => {
                let before = reactor.drains.begin();
                reactor.settles.push((job, device.0, before));
                self.check_settles(r);
            }
            ProtocolPost::Job(job, Job::ZeroFill { device, .. }) => self.lane.push((job, device.0)),
            ProtocolPost::ReleaseDone(io, ..) => around.stages[io as usize] = Stage::Done,
            ProtocolPost::ReleaseFailed(io, _) | ProtocolPost::ReleaseAbandoned(io, _) => {
                around.stages[io as usize] = Stage::Failed
            }
            ProtocolPost::Job(..)
            | ProtocolPost::HungUp
            | ProtocolPost::Committed(_)
            | ProtocolPost::CommitFailed(..) => {
                *around.wrong = Some("a post that this model never asks for");
            }
        }
    }

    fn answer(
        &mut self,
        r: usize,
        volume: VolumeId,
        range: ExtentRange,
        answer: Answer,
        around: &mut Around<'_>,
    ) {
        for c in 0..around.commands.len() {
            if around.commands[c].reactor != r {
                continue;
            }
            let Stage::Parked(parked) = around.stages[c] else {
                continue;
            };
            match parked.hear(volume, range, answer) {
                Heard::Stay => {}
                Heard::Translate => self.reactors[r].next.push_back(c),
                Heard::Fail(_) => around.stages[c] = Stage::Failed,
            }
        }
        self.dispatch_next(r, around);
    }

    /// Commands that waited for a device's fence continue.
    pub(crate) fn pass_fence(&mut self, device: u8, around: &mut Around<'_>) {
        self.fenced.insert(device);
        for c in 0..around.commands.len() {
            if around.stages[c] == Stage::DeviceWait {
                let r = around.commands[c].reactor;
                self.reactors[r].next.push_back(c);
                self.dispatch_next(r, around);
            }
        }
    }

    pub(crate) fn at_devices(&self) -> impl Iterator<Item = &Slice> {
        self.reactors.iter().flat_map(|r| &r.slices)
    }
}

/// A dead engine's request at a device.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(crate) enum Ghost {
    Slice(Slice),
    ZeroFill(u8),
}

impl Ghost {
    pub(crate) fn device(&self) -> u8 {
        match self {
            Ghost::Slice(slice) => slice.device,
            Ghost::ZeroFill(device) => *device,
        }
    }
}

impl World {
    /// Kills the engine: its requests at the devices remain.
    pub(crate) fn kill_engine(&mut self) {
        let Some(engine) = self.engine.take() else {
            return;
        };
        self.ghosts
            .extend(engine.at_devices().map(|slice| Ghost::Slice(slice.clone())));
        let zero_filling = engine.lane.iter().map(|(_, d)| Ghost::ZeroFill(*d));
        self.ghosts.extend(zero_filling);
        self.to_engine.clear();
        for stage in &mut self.stages {
            if !matches!(stage, Stage::Done | Stage::Failed) {
                *stage = Stage::Idle;
            }
        }
    }
}

/// The device that a word names, preallocated or not.
pub(crate) fn device_of(word: u64) -> Option<u8> {
    let word = Word::from_bits(word).claimed();
    match word.rights() {
        Some(Rights::Read | Rights::ReadWrite) => Some(word.device().0),
        _ => None,
    }
}

pub(crate) fn zero_filling(device: u8) -> Job {
    Job::ZeroFill {
        device: DeviceIndex(device),
        extents: EXTENT,
    }
}
