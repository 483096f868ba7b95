//! The daemon: a real [`OwnerSide`] over a real [`GrantTable`], and a minimal owner.
//!
//! Each device has one extent, with a durable and a present state. [`Daemon::progress`] advances
//! all operations. Outside effects go through [`Outside`], which can die after any.

use crate::engine::{EXTENT, device_of};
use crate::outside::{Extent, Outside, Pool};
use forebay_xlate::boundary::message::{FaultAsk, FromEngine, Held, Job, ToEngine};
use forebay_xlate::grants::GrantTable;
use forebay_xlate::owner_side::{OwnerSide, Stage, TakingId};
use forebay_xlate::shm::SharedMemory;
use forebay_xlate::{DeviceIndex, VolumeId};
use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::AsFd;

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum Wish {
    /// The owner frees the volume's extent.
    Free,
    /// The owner only revokes the grant.
    Evict,
    /// A host deallocates: the engine's generation and number.
    Release(u64, u64),
    /// A listed grant that the pool does not know.
    Stale,
    /// The owner preallocates the volume's extent.
    Preallocation,
    /// The owner takes a preallocated extent back.
    TakeBack,
    /// The owner takes a snapshot.
    Freeze,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Op {
    pub volume: VolumeId,
    pub wish: Wish,
    pub taking: Option<TakingId>,
    pub revoke: u64,
    /// A freeze whose epoch comes again first takes all grants back; it has done so.
    pub clears: bool,
    pub cleared: bool,
    /// The request and settles sent with `Abandon`.
    heard: u64,
    settles: Vec<(u64, u8)>,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Daemon {
    pub side: OwnerSide,
    pub pool: Pool,
    /// The connected engine, and whether it knows all grants.
    pub talk: Option<u64>,
    pub reported: bool,
    pub fenced: BTreeSet<u8>,
    inherited: BTreeSet<u64>,
    pub faults: BTreeSet<(VolumeId, bool)>,
    pub ops: Vec<Op>,
    pub zero_filling: Option<(u64, u8)>,
    /// Settles for quarantined extents; false: more were quarantined since.
    pub settling: BTreeMap<u8, (u64, bool)>,
    /// The engine that may have requests there.
    pub quarantined: BTreeMap<u8, u64>,
}

impl Daemon {
    /// Starts with only the catalog and the grant table.
    pub(crate) fn start(durable: &Pool, table: &GrantTable) -> Self {
        // Mapped as a successor does, with an unfinished write.
        let fd = table.memory().fd().try_clone_to_owned().unwrap();
        let memory = SharedMemory::from_fd(fd.as_fd().try_clone_to_owned().unwrap()).unwrap();
        let adopted = GrantTable::adopt(memory, &[1; 16], &[2; 16]).unwrap();
        let mut pool = durable.clone();
        let mut stale = Vec::new();
        for grant in adopted.expect("ours").iter() {
            let Some(device) = device_of(grant.word.bits()) else {
                continue;
            };
            let here = usize::from(device);
            if pool.is_frozen(grant.volume, device) {
                continue;
            }
            match pool.map.get(&grant.volume) {
                Some(at) if *at == device => {}
                None if pool.extents[here] == Extent::Of(grant.volume) => {
                    pool.map.insert(grant.volume, device);
                }
                _ => stale.push(grant.volume),
            }
        }
        let mut daemon = Self {
            side: OwnerSide::default(),
            pool,
            talk: None,
            reported: false,
            fenced: BTreeSet::new(),
            inherited: BTreeSet::new(),
            faults: BTreeSet::new(),
            ops: Vec::new(),
            zero_filling: None,
            settling: BTreeMap::new(),
            quarantined: BTreeMap::new(),
        };
        for volume in stale {
            daemon.begin(volume, Wish::Stale);
            // At once: no new conversation may be told of it.
            let taking = daemon.side.begin_take_back(volume, EXTENT);
            daemon.ops.iter_mut().for_each(|op| {
                if op.volume == volume {
                    op.taking = taking;
                }
            });
        }
        daemon
    }

    pub(crate) fn begin(&mut self, volume: VolumeId, wish: Wish) {
        self.ops.push(Op {
            volume,
            wish,
            taking: None,
            revoke: 0,
            clears: false,
            cleared: false,
            heard: 0,
            settles: Vec::new(),
        });
    }

    pub(crate) fn greet(
        &mut self,
        generation: u64,
        held: impl Iterator<Item = Held>,
        fenced: &BTreeSet<u8>,
    ) {
        self.talk = Some(generation);
        self.reported = false;
        self.fenced = fenced.clone();
        self.inherited = held
            .filter_map(|held| match held {
                Held::Revoke(number) | Held::Job(number, _) => Some(number),
                _ => None,
            })
            .collect();
    }

    pub(crate) fn hang_up(&mut self) {
        self.talk = None;
        self.reported = false;
        self.fenced.clear();
        self.inherited.clear();
        self.zero_filling = None;
        self.settling.clear();
        for op in &mut self.ops {
            op.settles.clear();
            if let Some(id) = op.taking {
                self.side.gone(id);
            }
        }
        self.forget_unanswered();
    }

    /// Drops unanswered attempts to take extents back.
    fn forget_unanswered(&mut self) {
        while let Some(at) = self.ops.iter().position(|op| self.is_unanswered(op)) {
            self.end_op(at);
        }
    }

    fn is_unanswered(&self, op: &Op) -> bool {
        let asked = op.wish == Wish::TakeBack && op.revoke > 0;
        asked && self.stage(op) == Some(&Stage::Taken)
    }

    pub(crate) fn give_inherited_up(&mut self, out: &mut Outside<'_>) {
        for revoke in std::mem::take(&mut self.inherited) {
            out.say(ToEngine::Abandon { revoke });
        }
    }

    pub(crate) fn waits_for_inherited(&self) -> bool {
        !self.inherited.is_empty()
    }

    pub(crate) fn hear(&mut self, message: FromEngine, out: &mut Outside<'_>) {
        match message {
            FromEngine::Faults { faults } => {
                for FaultAsk { volume, write, .. } in faults {
                    self.faults.insert((volume, write));
                }
            }
            FromEngine::Release {
                release, volume, ..
            } => {
                let wish = Wish::Release(self.talk.unwrap_or(0), release);
                if !self.ops.iter().any(|op| op.wish == wish) {
                    self.begin(volume, wish);
                }
            }
            FromEngine::RevokeDone { revoke } => {
                self.inherited.remove(&revoke);
                let generation = self.talk.unwrap_or(0);
                for op in self.ops.iter().filter(|op| op.revoke == revoke) {
                    if let Some(id) = op.taking {
                        self.side.acknowledged(id, generation);
                    }
                }
            }
            FromEngine::TookBack { revoke, taken } => {
                if let Some(at) = self.ops.iter().position(|op| op.revoke == revoke) {
                    let id = self.ops[at].taking;
                    let parts = id.map(|id| self.side.took_back(id, &taken));
                    if !matches!(parts, Some(Ok(parts)) if !parts.is_empty()) {
                        self.end_op(at);
                    }
                }
            }
            FromEngine::RevokeRefused { revoke } => {
                if let Some(at) = self.ops.iter().position(|op| op.revoke == revoke) {
                    self.end_op(at);
                }
            }
            FromEngine::Done { request, .. } => {
                let generation = self.talk.unwrap_or(0);
                for op in self.ops.iter().filter(|op| op.heard == request) {
                    if let Some(id) = op.taking {
                        self.side.heard(id, generation);
                    }
                }
            }
            FromEngine::JobDone { job, .. } => self.job_done(job, out),
            FromEngine::DeviceReady { device } => {
                self.fenced.insert(device.0);
                // Requests of earlier engines there have ended.
                let generation = self.talk.unwrap_or(0);
                if self
                    .quarantined
                    .get(&device.0)
                    .is_some_and(|g| *g < generation)
                {
                    self.end_quarantine(device.0, out);
                }
            }
            _ => {}
        }
    }

    fn job_done(&mut self, job: u64, out: &mut Outside<'_>) {
        self.inherited.remove(&job);
        if let Some((_, device)) = self.zero_filling.filter(|(number, _)| *number == job) {
            self.zero_filling = None;
            self.settle_extent(device, Extent::Dirty, Extent::Clean, out);
        }
        let generation = self.talk.unwrap_or(0);
        for op in &mut self.ops {
            let device = op.settles.iter().find(|(number, _)| *number == job);
            if let (Some((_, device)), Some(id)) = (device, op.taking) {
                self.side.settled(id, DeviceIndex(*device), generation);
                op.settles.retain(|(number, _)| *number != job);
            }
        }
        let settled = self.settling.iter().find(|(_, (number, _))| *number == job);
        if let Some((&device, &(_, whole))) = settled {
            self.settling.remove(&device);
            if whole {
                self.end_quarantine(device, out);
            }
        }
    }

    fn end_quarantine(&mut self, device: u8, out: &mut Outside<'_>) {
        self.settle_extent(device, Extent::Quarantined, Extent::Dirty, out);
        self.quarantined.remove(&device);
    }

    fn settle_extent(&mut self, device: u8, from: Extent, to: Extent, out: &mut Outside<'_>) {
        let at = usize::from(device);
        if out.durable.extents[at] == from && out.goes() {
            self.pool.extents[at] = to;
            out.durable.extents[at] = to;
        }
    }

    pub(crate) fn end_op(&mut self, at: usize) {
        let op = self.ops.remove(at);
        if let Some(id) = op.taking {
            self.side.let_go(id);
        }
    }

    pub(crate) fn uncommitted(&self, durable: &Pool) -> bool {
        self.pool != *durable
            || self
                .ops
                .iter()
                .any(|op| self.stage(op) == Some(&Stage::Changed))
    }

    fn stage(&self, op: &Op) -> Option<&Stage> {
        self.side.stage(op.taking?)
    }

    pub(crate) fn commit(&mut self, out: &mut Outside<'_>) {
        if !out.goes() {
            return;
        }
        *out.durable = self.pool.clone();
        for op in &self.ops {
            if let Some(id) = op.taking {
                let _ = self.side.durable(id);
            }
        }
    }

    pub(crate) fn may_time_out(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.ops.len()).filter(|at| {
            let stage = self.stage(&self.ops[*at]);
            let unanswered = self.is_unanswered(&self.ops[*at]);
            unanswered || matches!(stage, Some(Stage::Asked { .. } | Stage::GivenUp { .. }))
        })
    }

    pub(crate) fn time_out(&mut self, at: usize, out: &mut Outside<'_>) {
        let Some(id) = self.ops[at].taking else {
            return;
        };
        if self.is_unanswered(&self.ops[at]) {
            self.end_op(at);
            return;
        }
        if self.is_freezing(at) {
            self.fail_freeze(at, out);
            return;
        }
        let fenced = self.fenced.clone();
        if matches!(self.side.stage(id), Some(Stage::GivenUp { .. })) {
            self.side.settle(id, |d| fenced.contains(&d.0));
            return;
        }
        if !self.side.give_up(id) {
            self.side.settle(id, |d| fenced.contains(&d.0));
            return;
        }
        out.say(ToEngine::Abandon {
            revoke: self.ops[at].revoke,
        });
        // Any request that is answered after all before it.
        let request = out.number();
        self.ops[at].heard = request;
        let volume = self.ops[at].volume;
        out.say(ToEngine::RemoveVolume { request, volume });
        for device in self.side.devices(id) {
            if fenced.contains(&device.0) {
                let job = out.number();
                let work = Job::Settle { device };
                self.ops[at].settles.push((job, device.0));
                out.say(ToEngine::Job { job, work });
            }
        }
    }

    pub(crate) fn progress(&mut self, out: &mut Outside<'_>) {
        loop {
            let before = (self.clone(), out.to_engine.len());
            self.republish(out);
            let mut at = 0;
            while at < self.ops.len() && !out.dead {
                if self.advance(at, out) {
                    self.end_op(at);
                } else {
                    at += 1;
                }
            }
            for (volume, write) in self.faults.clone() {
                self.answer(volume, write, out);
            }
            self.zero_fill(out);
            self.settle_quarantined(out);
            if out.dead || before == (self.clone(), out.to_engine.len()) {
                return;
            }
        }
    }

    /// Sends every grant, after the engine has ended what an earlier daemon began.
    fn republish(&mut self, out: &mut Outside<'_>) {
        if self.talk.is_none() || self.reported || !self.inherited.is_empty() {
            return;
        }
        self.say_epochs(out);
        let grants = self.side.republish(out.table);
        if !grants.is_empty() {
            out.say(ToEngine::Grants { grants });
        }
        self.reported = true;
    }

    /// The engine that knows all grants.
    pub(crate) fn talks_to(&self) -> Option<u64> {
        self.talk.filter(|_| self.reported)
    }

    fn advance(&mut self, at: usize, out: &mut Outside<'_>) -> bool {
        let Op {
            volume,
            wish,
            taking,
            ..
        } = self.ops[at];
        if wish == Wish::Preallocation {
            self.map_preallocated(volume, out);
            return true;
        }
        let Some(id) = taking else {
            self.ops[at].taking = self.side.begin_take_back(volume, EXTENT);
            return false;
        };
        if self.is_freezing(at) {
            return self.advance_freeze(at, id, out);
        }
        let (generation, release) = match wish {
            Wish::Release(generation, release) => (Some(generation), Some(release)),
            _ => (None, None),
        };
        let fenced = &self.fenced;
        match self.side.stage(id).cloned() {
            Some(Stage::Taken) if wish == Wish::TakeBack => {
                if self.ops[at].revoke > 0 {
                    return false;
                }
                if self.talk.is_none() || !self.reported {
                    return true;
                }
                let revoke = out.number();
                self.ops[at].revoke = revoke;
                out.say(ToEngine::TakeBack {
                    revoke,
                    volume,
                    range: EXTENT,
                });
                false
            }
            Some(Stage::Taken) => {
                if release.is_none() && self.side.unlisted(id, out.table).is_ok() {
                    return false;
                }
                let Some(talk) = self.talks_to() else {
                    return false;
                };
                if generation.is_some_and(|generation| generation != talk) {
                    // Hosts may have written there by a later engine.
                    return true;
                }
                let revoke = out.number();
                self.ops[at].revoke = revoke;
                if self.side.asked(id, out.table, talk).is_ok() {
                    out.say(ToEngine::Revoke {
                        revoke,
                        volume,
                        range: EXTENT,
                        freeze: None,
                        release,
                    });
                }
                false
            }
            Some(Stage::Asked { .. }) => {
                self.side.is_drained(id, |d| fenced.contains(&d.0));
                false
            }
            Some(Stage::GivenUp { heard, settled, .. }) => {
                if heard && self.side.devices(id).iter().all(|d| settled.contains(d)) {
                    self.side.settle(id, |d| fenced.contains(&d.0));
                }
                false
            }
            Some(Stage::Drained { undrained }) => {
                let mapped = self.pool.map.get(&volume);
                let evicts = matches!(wish, Wish::Evict | Wish::Freeze);
                if evicts && out.durable.map.get(&volume) != mapped {
                    // Until it is durable, only the table knows it.
                    return false;
                }
                if evicts || wish == Wish::Stale && undrained.is_empty() {
                    // Evicting a grant on a hung device changes nothing.
                    let ended = !out.goes()
                        || !undrained.is_empty()
                        || self.side.forget(id, out.table).is_ok();
                    if wish != Wish::Freeze || out.dead || !undrained.is_empty() {
                        return ended;
                    }
                    self.side.let_go(id);
                    self.ops[at].taking = None;
                    (self.ops[at].clears, self.ops[at].cleared) = (false, true);
                    return false;
                }
                self.give_up(volume, &undrained);
                let _ = self.side.changed(id);
                false
            }
            Some(Stage::Durable) => {
                if !out.goes() {
                    return false;
                }
                let forgotten = self.side.forget(id, out.table).is_ok();
                if let Some(release) = release.filter(|_| self.talk == generation) {
                    out.say(ToEngine::ReleaseDone { release });
                }
                forgotten
            }
            Some(Stage::Changed) | None => false,
        }
    }
}
