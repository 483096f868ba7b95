//! The engine's side of the owner protocol, for its control thread.
//!
//! Pure: the owner's messages and the reactors' upcalls come in; [`Effect`]s go out, to be carried
//! out in order. Open questions, revokes and jobs are kept for the next daemon.
//!
//! **Revokes.** Words are cleared, or the epoch is set, at once, then every reactor drains, a bounded number of revokes
//! at a time. They take turns ([`EngineSide::rotate_revokes`]), as a hung device must not block the
//! others. A reactor's answer stays valid: no command starts under cleared words.

mod words;

pub use words::Words;

use crate::boundary::message::{
    FaultAsk, FaultFailure, FromEngine, GrantOf, Held, Job, MAX_BATCH, MAX_TAKE_BACK, ToEngine,
};
use crate::fault::{FaultTable, MAX_FAULTS, Wanted};
use crate::reactor_side::{Lookup, access};
use crate::reactors::ReactorSet;
use crate::types::{DeviceIndex, ExtentRange, VolumeId};
use crate::word::Word;
use std::collections::{BTreeMap, VecDeque};

fn counted(count: u64, preallocated: u64) -> FromEngine {
    FromEngine::PreallocatedCounted {
        count,
        preallocated,
    }
}

/// A post to a reactor.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum ProtocolPost {
    /// Faults in the range are answered: translate again.
    Granted(VolumeId, ExtentRange),
    /// Faults in the range, for writing or for reading, failed.
    FaultFailed(VolumeId, ExtentRange, bool, FaultFailure),
    /// The words are cleared, or the epoch is set: drain.
    Revoke {
        /// The revoke's number.
        revoke: u64,
        /// The volume.
        volume: VolumeId,
        /// The extents.
        range: ExtentRange,
        /// A freeze: reads go on.
        writes_only: bool,
    },
    /// The owner no longer waits for this drain.
    Abandon(u64),
    /// Answer this job when every request now at the device has ended.
    Settle(u64, DeviceIndex),
    /// More mappings are durable.
    Committed(VolumeId),
    /// A commit failed.
    CommitFailed(VolumeId, u64),
    /// A release is done: command, slot generation, number of extents.
    ReleaseDone(u32, u32, u64),
    /// The owner refused a release and changed nothing.
    ReleaseFailed(u32, u32),
    /// A release is cancelled before it took effect.
    ReleaseAbandoned(u32, u32),
    /// Work for the internal lane, or a [`Job::Overwrite`].
    Job(u64, Job),
    /// The daemon disconnected. The next one does not know the present overwrites.
    HungUp,
}

/// A reactor's message to the control thread.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum ProtocolUpcall {
    /// A translation miss.
    Fault(FaultAsk),
    /// A command waits for a commit.
    CommitWanted {
        /// The volume.
        volume: VolumeId,
        /// The commit sequence.
        sequence: u64,
    },
    /// A host or VM deallocates extents.
    Release {
        /// The command.
        io: u32,
        /// Its slot's generation.
        generation: u32,
        /// The volume.
        volume: VolumeId,
        /// The extents.
        range: ExtentRange,
    },
    /// A release timed out: cancel it, unless the owner has begun it.
    AbandonRelease {
        /// The command.
        io: u32,
        /// Its slot's generation.
        generation: u32,
    },
    /// This reactor has drained a revoke.
    Drained {
        /// The revoke's number.
        revoke: u64,
    },
    /// Every request from before [`ProtocolPost::Settle`] has ended.
    Settled {
        /// The job's number.
        job: u64,
    },
    /// The internal lane ended a job.
    JobDone {
        /// The job's number.
        job: u64,
        /// The error number on failure.
        errno: Option<i32>,
    },
}

/// An action for the caller to carry out.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum Effect {
    /// Send this to the owner, if one is connected.
    Say(FromEngine),
    /// Post this to these reactors.
    Post(ReactorSet, ProtocolPost),
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
struct OpenRelease {
    reactor: usize,
    io: u32,
    generation: u32,
    volume: VolumeId,
    range: ExtentRange,
    /// Its revoke came in the present conversation.
    begun: bool,
    /// How many extents, from the range's start, that revoke covers.
    extents: u64,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
struct OpenRevoke {
    revoke: u64,
    volume: VolumeId,
    range: ExtentRange,
    /// The new epoch; the words stay.
    freeze: Option<u16>,
    waiting: ReactorSet,
    /// Reactors have had it for a whole turn.
    aged: bool,
}

/// The engine's protocol state; see the module.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct EngineSide {
    reactors: usize,
    max_drains: usize,
    faults: FaultTable,
    /// Faults refused because the fault table was full.
    refused: u64,
    /// Faults to send at the turn's end.
    asks: Vec<FaultAsk>,
    commits: BTreeMap<VolumeId, u64>,
    releases: BTreeMap<u64, OpenRelease>,
    next_release: u64,
    /// Revokes that reactors are draining.
    draining: Vec<OpenRevoke>,
    /// Revokes that wait for room at the reactors.
    held: VecDeque<OpenRevoke>,
    /// Jobs, with the reactors that have not answered.
    jobs: BTreeMap<u64, (Job, ReactorSet)>,
}

impl EngineSide {
    /// `max_drains`: revokes that a reactor drains at once ([`crate::drain::MAX_DRAINS`]).
    pub fn new(reactors: usize, max_drains: usize) -> Self {
        Self {
            reactors,
            max_drains,
            faults: FaultTable::default(),
            refused: 0,
            asks: Vec::new(),
            commits: BTreeMap::new(),
            releases: BTreeMap::new(),
            next_release: 1,
            draining: Vec::new(),
            held: VecDeque::new(),
            jobs: BTreeMap::new(),
        }
    }

    /// Handles a message of the owner; returns it if it concerns something else.
    pub fn hear(
        &mut self,
        message: ToEngine,
        words: &mut impl Words,
        out: &mut Vec<Effect>,
    ) -> Option<ToEngine> {
        let all = ReactorSet::first(self.reactors);
        match message {
            ToEngine::Grants { grants } => self.install(grants, words, out),
            ToEngine::FaultFailed {
                volume,
                range,
                write,
                reason,
            } => {
                let asked = self.faults.failed(volume, range, write);
                let post = ProtocolPost::FaultFailed(volume, range, write, reason);
                self.post(asked, post, out);
            }
            ToEngine::Revoke {
                revoke,
                volume,
                range,
                freeze,
                release,
            } => {
                let open = OpenRevoke {
                    revoke,
                    volume,
                    range,
                    freeze,
                    waiting: all,
                    aged: false,
                };
                self.revoke(open, release, words, out);
            }
            ToEngine::TakeBack {
                revoke,
                volume,
                mut range,
            } => {
                range.count = range.count.min(MAX_TAKE_BACK);
                let taken = words.take_back(volume, range);
                out.push(Effect::Say(FromEngine::TookBack { revoke, taken }));
            }
            ToEngine::CountPreallocated {
                count,
                volume,
                mut range,
            } => {
                range.count = range.count.min(MAX_TAKE_BACK);
                let preallocated = words.count_preallocated(volume, range);
                out.push(Effect::Say(counted(count, preallocated)));
            }
            ToEngine::Abandon { revoke } => self.abandon(revoke, out),
            ToEngine::Committed { volume, sequence } => {
                words.committed(volume, sequence);
                self.commit_answered(volume, sequence);
                self.post(all, ProtocolPost::Committed(volume), out);
            }
            ToEngine::CommitFailed { volume, sequence } => {
                self.commit_answered(volume, sequence);
                self.post(all, ProtocolPost::CommitFailed(volume, sequence), out);
            }
            ToEngine::ReleaseDone { release } => {
                let done =
                    |r: &OpenRelease| ProtocolPost::ReleaseDone(r.io, r.generation, r.extents);
                self.release_ended(release, done, out);
            }
            ToEngine::ReleaseFailed { release } => {
                let failed = |r: &OpenRelease| ProtocolPost::ReleaseFailed(r.io, r.generation);
                self.release_ended(release, failed, out);
            }
            ToEngine::Job { job, work } => self.begin_job(job, work, out),
            other => return Some(other),
        }
        None
    }

    fn post(&self, who: ReactorSet, post: ProtocolPost, out: &mut Vec<Effect>) {
        if !who.is_empty() {
            out.push(Effect::Post(who, post));
        }
    }

    fn release_ended(
        &mut self,
        release: u64,
        post: impl FnOnce(&OpenRelease) -> ProtocolPost,
        out: &mut Vec<Effect>,
    ) {
        if let Some(open) = self.releases.remove(&release) {
            let post = post(&open);
            self.post(ReactorSet::one(open.reactor), post, out);
        }
    }

    fn commit_answered(&mut self, volume: VolumeId, sequence: u64) {
        let wanted = self.commits.get(&volume);
        if wanted.is_some_and(|wanted| *wanted <= sequence) {
            self.commits.remove(&volume);
        }
    }

    fn post_revokes(&mut self, out: &mut Vec<Effect>) {
        while self.draining.len() < self.max_drains
            && let Some(open) = self.held.pop_front()
        {
            let post = ProtocolPost::Revoke {
                revoke: open.revoke,
                volume: open.volume,
                range: open.range,
                writes_only: open.freeze.is_some(),
            };
            self.post(open.waiting, post, out);
            self.draining.push(open);
        }
    }

    /// Replaces the revokes that reactors had at the last call by waiting ones. Call it about every
    /// 0.2 s.
    pub fn rotate_revokes(&mut self, out: &mut Vec<Effect>) {
        if self.held.is_empty() {
            return;
        }
        let aged: Vec<_> = self.draining.extract_if(.., |open| open.aged).collect();
        for open in &mut self.draining {
            open.aged = true;
        }
        for mut open in aged {
            self.post(open.waiting, ProtocolPost::Abandon(open.revoke), out);
            open.aged = false;
            self.held.push_back(open);
        }
        self.post_revokes(out);
    }

    /// Whether [`EngineSide::rotate_revokes`] has work.
    pub fn holds_back(&self) -> bool {
        !self.held.is_empty()
    }

    fn open_revokes(&self) -> impl Iterator<Item = u64> + '_ {
        self.draining.iter().chain(&self.held).map(|r| r.revoke)
    }

    fn abandon(&mut self, revoke: u64, out: &mut Vec<Effect>) {
        self.held.retain(|held| held.revoke != revoke);
        if let Some(at) = self.draining.iter().position(|open| open.revoke == revoke) {
            let open = self.draining.remove(at);
            self.post(open.waiting, ProtocolPost::Abandon(revoke), out);
            self.post_revokes(out);
        }
    }

    fn install(&mut self, grants: Vec<GrantOf>, words: &mut impl Words, out: &mut Vec<Effect>) {
        for grant in grants {
            if !words.install(&grant) {
                continue;
            }
            let (volume, range) = (grant.volume, grant.range);
            let writable = Word::from_bits(grant.word).claimed().writable();
            let asked = self.faults.granted(volume, range, writable);
            self.post(asked, ProtocolPost::Granted(volume, range), out);
        }
    }

    fn revoke(
        &mut self,
        open: OpenRevoke,
        release: Option<u64>,
        words: &mut impl Words,
        out: &mut Vec<Effect>,
    ) {
        let (revoke, volume, range) = (open.revoke, open.volume, open.range);
        if self.open_revokes().any(|other| other == revoke) {
            return;
        }
        if let Some(number) = release {
            match self.releases.get_mut(&number) {
                Some(asked) => {
                    asked.begun = true;
                    asked.extents = range.count;
                }
                None => {
                    out.push(Effect::Say(FromEngine::RevokeRefused { revoke }));
                    return;
                }
            }
        }
        match open.freeze {
            Some(epoch) => words.freeze(volume, epoch),
            None => words.clear(volume, range),
        }
        self.held.push_back(open);
        self.post_revokes(out);
    }

    fn begin_job(&mut self, job: u64, work: Job, out: &mut Vec<Effect>) {
        if self.jobs.contains_key(&job) {
            return;
        }
        let (who, post) = match work {
            Job::Settle { device } => (
                ReactorSet::first(self.reactors),
                ProtocolPost::Settle(job, device),
            ),
            Job::Overwrite { volume, extent, .. } => {
                let waiting = self.faults.waiting(volume, extent, true).iter().next();
                let Some(reactor) = waiting else {
                    out.push(Effect::Say(FromEngine::JobDone {
                        job,
                        errno: Some(rustix::io::Errno::NOENT.raw_os_error()),
                    }));
                    return;
                };
                (ReactorSet::one(reactor), ProtocolPost::Job(job, work))
            }
            // The internal lane runs on reactor 0.
            _ => (ReactorSet::one(0), ProtocolPost::Job(job, work)),
        };
        self.jobs.insert(job, (work, who));
        self.post(who, post, out);
    }

    fn want(&mut self, reactor: usize, ask: FaultAsk, words: &impl Words, out: &mut Vec<Effect>) {
        let back = ReactorSet::one(reactor);
        let FaultAsk {
            volume,
            extent,
            write,
            ..
        } = ask;
        let Some(word) = words.lookup(volume, extent) else {
            return;
        };
        let range = ExtentRange::new(extent, 1);
        if access(word, write) != Lookup::Park {
            // The grant came meanwhile.
            self.post(back, ProtocolPost::Granted(volume, range), out);
            return;
        }
        match self.faults.want(volume, extent, write, reactor) {
            Wanted::Ask => self.asks.push(ask),
            Wanted::Asked => {}
            Wanted::Refused => {
                self.refused += 1;
                let post = ProtocolPost::FaultFailed(volume, range, write, FaultFailure::Busy);
                self.post(back, post, out);
            }
        }
    }

    /// Handles a reactor's message; [`EngineSide::end_turn`] sends its faults.
    pub fn upcall(
        &mut self,
        reactor: usize,
        upcall: ProtocolUpcall,
        words: &impl Words,
        out: &mut Vec<Effect>,
    ) {
        let back = ReactorSet::one(reactor);
        match upcall {
            ProtocolUpcall::Fault(ask) => self.want(reactor, ask, words, out),
            ProtocolUpcall::CommitWanted { volume, sequence } => {
                if words.is_committed(volume, sequence) {
                    self.post(back, ProtocolPost::Committed(volume), out);
                    return;
                }
                let wanted = self.commits.entry(volume).or_default();
                *wanted = sequence.max(*wanted);
                out.push(Effect::Say(FromEngine::CommitWanted { volume, sequence }));
            }
            ProtocolUpcall::Release {
                io,
                generation,
                volume,
                range,
            } => {
                let release = self.next_release;
                self.next_release += 1;
                let open = OpenRelease {
                    reactor,
                    io,
                    generation,
                    volume,
                    range,
                    begun: false,
                    extents: range.count,
                };
                self.releases.insert(release, open);
                out.push(Effect::Say(FromEngine::Release {
                    release,
                    volume,
                    range,
                }));
            }
            ProtocolUpcall::AbandonRelease { io, generation } => {
                let ours = |r: &OpenRelease| {
                    r.reactor == reactor && r.io == io && r.generation == generation
                };
                let open = self.releases.iter().find(|(_, r)| ours(r));
                if let Some((&number, release)) = open
                    && !release.begun
                {
                    self.releases.remove(&number);
                    self.post(back, ProtocolPost::ReleaseAbandoned(io, generation), out);
                }
            }
            ProtocolUpcall::Drained { revoke } => self.drained(reactor, revoke, out),
            ProtocolUpcall::Settled { job } => {
                if let Some((Job::Settle { .. }, waiting)) = self.jobs.get_mut(&job) {
                    waiting.remove(reactor);
                    if waiting.is_empty() {
                        self.jobs.remove(&job);
                        out.push(Effect::Say(FromEngine::JobDone { job, errno: None }));
                    }
                }
            }
            ProtocolUpcall::JobDone { job, errno } => {
                self.jobs.remove(&job);
                out.push(Effect::Say(FromEngine::JobDone { job, errno }));
            }
        }
    }

    fn drained(&mut self, reactor: usize, revoke: u64, out: &mut Vec<Effect>) {
        let mut open = self.draining.iter_mut().chain(&mut self.held);
        let Some(open) = open.find(|open| open.revoke == revoke) else {
            return;
        };
        open.waiting.remove(reactor);
        if open.waiting.is_empty() {
            self.draining.retain(|open| open.revoke != revoke);
            self.held.retain(|open| open.revoke != revoke);
            out.push(Effect::Say(FromEngine::RevokeDone { revoke }));
            self.post_revokes(out);
        }
    }

    /// Ends a turn: sends the faults collected in it.
    pub fn end_turn(&mut self, out: &mut Vec<Effect>) {
        Self::ask(&self.asks, out);
        self.asks.clear();
    }

    fn ask(asks: &[FaultAsk], out: &mut Vec<Effect>) {
        out.extend(asks.chunks(MAX_BATCH).map(|faults| {
            let faults = faults.to_vec();
            Effect::Say(FromEngine::Faults { faults })
        }));
    }

    /// Revokes and jobs that an earlier conversation left open.
    pub fn held(&self) -> impl Iterator<Item = Held> + '_ {
        let jobs = self
            .jobs
            .iter()
            .map(|(job, (work, _))| Held::Job(*job, *work));
        self.open_revokes().map(Held::Revoke).chain(jobs)
    }

    /// Repeats every unanswered fault, commit and release to a new owner.
    pub fn ask_again(&mut self, out: &mut Vec<Effect>) {
        self.asks.clear();
        let ask = |(volume, extent, write)| FaultAsk {
            volume,
            extent,
            write,
            whole: false,
        };
        let refused = std::mem::take(&mut self.refused);
        if refused > 0 {
            let text = format!(
                "{refused} faults were refused, and their commands interrupted: more than \
                 {MAX_FAULTS} waited for an answer while no daemon was running"
            );
            out.push(Effect::Say(FromEngine::Notice { text }));
        }
        let asks: Vec<_> = self.faults.outstanding().map(ask).collect();
        Self::ask(&asks, out);
        for (&volume, &sequence) in &self.commits {
            out.push(Effect::Say(FromEngine::CommitWanted { volume, sequence }));
        }
        for (&release, open) in &self.releases {
            out.push(Effect::Say(FromEngine::Release {
                release,
                volume: open.volume,
                range: open.range,
            }));
        }
    }

    /// Ends the conversation. Releases may be cancelled again: the words are cleared, so later
    /// writes fault.
    pub fn hung_up(&mut self, out: &mut Vec<Effect>) {
        self.post(ReactorSet::first(self.reactors), ProtocolPost::HungUp, out);
        for release in self.releases.values_mut() {
            release.begun = false;
        }
    }

    /// Forgets a removed volume.
    pub fn forget(&mut self, volume: VolumeId) {
        self.faults.forget(volume);
        self.asks.retain(|ask| ask.volume != volume);
        self.commits.remove(&volume);
    }

    /// Faults that the owner has not answered.
    pub fn faults_outstanding(&self) -> usize {
        self.faults.len()
    }
}

#[cfg(test)]
mod tests;
