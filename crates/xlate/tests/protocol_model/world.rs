//! Both processes, and the possible events.

use crate::daemon::{Daemon, Wish as WishOf};
use crate::engine::{Around, Engine, Ghost, Slice, device_of};
use crate::outside::{Extent, Listed, Outside, Pool, grants_of, with_table};
use crate::scenario::{Budget, Command, Kind, Scenario, Stage};
use forebay_xlate::boundary::message::{FromEngine, ToEngine};
use forebay_xlate::engine_side::{ProtocolUpcall, Words as _};
use forebay_xlate::{Rights, VolumeId, Word};
use std::collections::{BTreeMap, BTreeSet, VecDeque};

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(crate) struct World {
    pub listed: Listed,
    pub durable: Pool,
    pub daemon: Option<Daemon>,
    pub engine: Option<Engine>,
    pub generation: u64,
    pub to_engine: VecDeque<ToEngine>,
    pub to_owner: VecDeque<FromEngine>,
    /// The living daemon and engine are connected.
    pub talking: bool,
    pub ghosts: Vec<Ghost>,
    pub hung: BTreeSet<u8>,
    pub stages: Vec<Stage>,
    pub wished: Vec<bool>,
    pub left: Budget,
    next_number: u64,
    /// The device of a volume's data, unless freed since.
    pub written: BTreeMap<VolumeId, u8>,
    /// A forbidden act of the last step.
    pub wrong: Option<&'static str>,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum Action {
    // Events of the environment, which may never happen.
    Issue(usize),
    Wish(usize),
    Sleep(usize),
    Hang(u8),
    Recover(u8),
    Interrupt(usize),
    TimeOut(usize),
    KillDaemon,
    KillEngine,
    // Events that happen in the end.
    Wake(usize),
    TakePost(usize),
    Submit(usize),
    End(usize, usize),
    ZeroFillEnds(usize),
    GhostEnds(usize),
    ControlHears,
    ControlTakes(usize),
    RotateRevokes,
    /// The daemon dies after this number of effects.
    OwnerHears(Option<u8>),
    Commit(Option<u8>),
    /// Timeouts because of a hung device.
    HangTimeOut(usize),
    HangFault,
    HangInherited,
    StartDaemon,
    StartEngine,
    Greet(Option<u8>),
    HangUp,
    Fence(u8),
}

impl Action {
    fn is_environment(self) -> bool {
        use Action::*;
        matches!(
            self,
            Issue(_) | Wish(_) | Sleep(_) | Hang(_) | Recover(_) | Interrupt(_) | TimeOut(_)
        ) || matches!(self, KillDaemon | KillEngine)
            || matches!(self, OwnerHears(Some(_)) | Commit(Some(_)) | Greet(Some(_)))
    }
}

impl World {
    pub(crate) fn new(scenario: &Scenario) -> Self {
        let durable = Pool {
            extents: vec![Extent::Clean; usize::from(scenario.devices)],
            map: BTreeMap::new(),
            frozen: BTreeMap::new(),
            epochs: scenario.freezes().map(|volume| (volume, 0)).collect(),
        };
        let mut listed = Listed::new();
        let daemon = with_table(&mut listed, |table| Daemon::start(&durable, table));
        let volumes = scenario.volumes();
        let mut engine = Engine::new(scenario.reactors, scenario.max_drains, &volumes);
        engine.fenced = (0..scenario.devices).collect();
        let mut world = Self {
            listed,
            durable,
            daemon: Some(daemon),
            engine: Some(engine),
            generation: 1,
            to_engine: VecDeque::new(),
            to_owner: VecDeque::new(),
            talking: false,
            ghosts: Vec::new(),
            hung: BTreeSet::new(),
            stages: vec![Stage::Idle; scenario.commands.len()],
            wished: vec![false; scenario.wishes.len()],
            left: scenario.budget,
            next_number: 0,
            written: BTreeMap::new(),
            wrong: None,
        };
        world.greet(None);
        world
    }

    pub(crate) fn actions(&self, scenario: &Scenario, all: &mut Vec<Action>) {
        use Action::*;
        let left = self.left;
        if let Some(engine) = &self.engine {
            for (c, command) in scenario.commands.iter().enumerate() {
                let ended = |c: usize| matches!(self.stages[c], Stage::Done | Stage::Failed);
                let busy = engine.reactors[command.reactor].hand.is_some();
                if !busy && self.stages[c] == Stage::Idle && command.after.is_none_or(ended) {
                    all.push(Issue(c));
                }
                if self.stages[c] == Stage::Releasing && left.interrupts > 0 {
                    all.push(Interrupt(c));
                }
            }
            for (r, reactor) in engine.reactors.iter().enumerate() {
                if reactor.asleep {
                    if reactor.rung {
                        all.push(Wake(r));
                    }
                } else if reactor.hand.is_some() {
                    all.push(Submit(r));
                } else if !reactor.mailbox.is_empty() {
                    all.push(TakePost(r));
                } else if left.sleeps > 0 {
                    all.push(Sleep(r));
                }
                let ends = |i: &usize| !self.hung.contains(&reactor.slices[*i].device);
                all.extend((0..reactor.slices.len()).filter(ends).map(|i| End(r, i)));
                if !reactor.upcalls.is_empty() {
                    all.push(ControlTakes(r));
                }
            }
            let ends = |i: &usize| !self.hung.contains(&engine.lane[*i].1);
            all.extend((0..engine.lane.len()).filter(ends).map(ZeroFillEnds));
            if !self.to_engine.is_empty() {
                all.push(ControlHears);
            }
            // Messages are read faster than turns pass.
            let mut mailboxes = engine.reactors.iter();
            let read = mailboxes.all(|r| r.mailbox.is_empty() && r.upcalls.is_empty());
            if engine.side.holds_back() && read {
                all.push(RotateRevokes);
            }
            for device in 0..scenario.devices {
                let gone = |g: &Ghost| g.device() != device;
                if !engine.fenced.contains(&device) && self.ghosts.iter().all(gone) {
                    all.push(Fence(device));
                }
            }
            if left.engine_deaths > 0 {
                all.push(KillEngine);
            }
        } else {
            all.push(StartEngine);
        }
        let ends = |i: &usize| !self.hung.contains(&self.ghosts[*i].device());
        all.extend((0..self.ghosts.len()).filter(ends).map(GhostEnds));
        for device in 0..scenario.devices {
            if left.hangs > 0 {
                all.push(Hang(device));
            }
            if left.recoveries > 0 && self.hung.contains(&device) {
                all.push(Recover(device));
            }
        }
        let Some(daemon) = &self.daemon else {
            all.push(StartDaemon);
            return;
        };
        let cuts = if left.daemon_deaths > 0 { 4 } else { 1 };
        let cuts = (0..cuts).map(|k| (k > 0).then_some(k));
        if !self.to_owner.is_empty() {
            all.extend(cuts.clone().map(OwnerHears));
        }
        if daemon.uncommitted(&self.durable) {
            all.extend(cuts.clone().map(Commit));
        }
        if self.engine.is_some() && !self.talking && daemon.talk.is_none() {
            all.extend(cuts.map(Greet));
        }
        if !self.talking && daemon.talk.is_some() {
            all.push(HangUp);
        }
        for (w, (volume, wish)) in scenario.wishes.iter().enumerate() {
            let mapped = daemon.pool.map.contains_key(volume)
                || *wish == WishOf::Freeze && daemon.pool.frozen.contains_key(volume);
            if !self.wished[w] && mapped == (*wish != WishOf::Preallocation) {
                all.push(Wish(w));
            }
        }
        for at in daemon.may_time_out() {
            let still = self.to_engine.is_empty() && self.to_owner.is_empty();
            if !self.hung.is_empty() && still {
                all.push(HangTimeOut(at));
            }
            if left.timeouts > 0 {
                all.push(TimeOut(at));
            }
        }
        let stuck = |(_, d): (u64, u8)| self.hung.contains(&d);
        if !daemon.faults.is_empty() && daemon.zero_filling.is_some_and(stuck) {
            all.push(HangFault);
        }
        if !self.hung.is_empty() && daemon.waits_for_inherited() {
            all.push(HangInherited);
        }
        if left.daemon_deaths > 0 {
            all.push(KillDaemon);
        }
    }

    /// Whether only the environment can act.
    pub(crate) fn is_quiet(&self, scenario: &Scenario) -> bool {
        let mut all = Vec::new();
        self.actions(scenario, &mut all);
        all.iter().all(|action| action.is_environment())
    }

    /// A daemon step and all possible progress. False: it ends before its planned death.
    fn daemon_step(
        &mut self,
        cut: Option<u8>,
        step: impl FnOnce(&mut Daemon, &mut Outside<'_>),
    ) -> bool {
        let Some(mut daemon) = self.daemon.take() else {
            return false;
        };
        let Self {
            listed,
            durable,
            to_engine,
            next_number,
            ..
        } = self;
        // Messages without a listener are lost.
        let mut lost = VecDeque::new();
        let to_engine = if self.talking { to_engine } else { &mut lost };
        let dead = with_table(listed, |table| {
            let mut outside = Outside {
                table,
                durable,
                to_engine,
                next_number,
                left: cut,
                dead: false,
            };
            step(&mut daemon, &mut outside);
            daemon.progress(&mut outside);
            outside.dead
        });
        if dead {
            self.daemon_died();
        } else {
            self.daemon = Some(daemon);
        }
        dead == cut.is_some()
    }

    fn daemon_died(&mut self) {
        self.daemon = None;
        self.talking = false;
        self.to_owner.clear();
        self.left.daemon_deaths -= 1;
    }

    fn greet(&mut self, cut: Option<u8>) -> bool {
        let Some(engine) = &mut self.engine else {
            return false;
        };
        // Unread messages of an earlier daemon are lost.
        self.to_engine.clear();
        self.to_owner.clear();
        self.talking = true;
        // It concerns overwrites, which this model does not make.
        engine.side.hung_up(&mut Vec::new());
        let mut again = Vec::new();
        engine.side.ask_again(&mut again);
        let held: Vec<_> = engine.side.held().collect();
        let fenced = engine.fenced.clone();
        engine.carry_out(again, |message| self.to_owner.push_back(message));
        let generation = self.generation;
        self.daemon_step(cut, |daemon, _| {
            daemon.greet(generation, held.into_iter(), &fenced);
        })
    }

    fn control_hears(&mut self) {
        let (Some(engine), Some(message)) = (&mut self.engine, self.to_engine.pop_front()) else {
            return;
        };
        let mut effects = Vec::new();
        match engine.side.hear(message, &mut engine.words, &mut effects) {
            Some(ToEngine::RemoveVolume { request, .. }) => {
                let error = None;
                self.to_owner.push_back(FromEngine::Done { request, error });
            }
            Some(ToEngine::SetVolume { volume, .. }) => {
                engine.words.freeze(volume.volume, volume.epoch);
            }
            Some(_) => self.wrong = Some("a message that this model never says"),
            None => {}
        }
        let talking = self.talking;
        engine.carry_out(effects, |message| {
            if talking {
                self.to_owner.push_back(message);
            }
        });
    }

    pub(crate) fn step(&mut self, scenario: &Scenario, action: Action) -> bool {
        use Action::*;
        let mut said = Vec::new();
        let mut around = Around {
            commands: &scenario.commands,
            stages: &mut self.stages,
            wrong: &mut self.wrong,
        };
        let commands = &scenario.commands;
        match (action, &mut self.engine) {
            (Issue(c), Some(engine)) => engine.dispatch(commands[c].reactor, c, &mut around),
            (Interrupt(c), Some(engine)) => {
                self.left.interrupts -= 1;
                let abandon = ProtocolUpcall::AbandonRelease {
                    io: c as u32,
                    generation: 0,
                };
                let reactor = &mut engine.reactors[commands[c].reactor];
                reactor.upcalls.push_back(abandon);
            }
            (Sleep(r), Some(engine)) => {
                self.left.sleeps -= 1;
                engine.reactors[r].asleep = true;
                engine.reactors[r].rung = false;
            }
            (Wake(r), Some(engine)) => {
                engine.reactors[r].asleep = false;
                engine.reactors[r].rung = false;
            }
            (TakePost(r), Some(engine)) => engine.take_post(r, &mut around),
            (Submit(r), Some(engine)) => {
                if let Some(slice) = engine.go_on(r, &mut around) {
                    self.check_submitted(&slice);
                }
            }
            (End(r, i), Some(engine)) => {
                let slice = engine.end(r, i, &mut around);
                self.note_written(scenario, &slice);
            }
            (ZeroFillEnds(i), Some(engine)) => _ = engine.zero_fill_ends(i),
            (Fence(device), Some(engine)) => {
                engine.pass_fence(device, &mut around);
                let device = forebay_xlate::DeviceIndex(device);
                said.push(FromEngine::DeviceReady { device });
            }
            (ControlTakes(r), Some(engine)) => {
                let mut effects = Vec::new();
                while let Some(upcall) = engine.reactors[r].upcalls.pop_front() {
                    engine.side.upcall(r, upcall, &engine.words, &mut effects);
                }
                engine.side.end_turn(&mut effects);
                engine.carry_out(effects, |message| said.push(message));
            }
            (RotateRevokes, Some(engine)) => {
                let mut effects = Vec::new();
                engine.side.rotate_revokes(&mut effects);
                engine.carry_out(effects, |message| said.push(message));
            }
            (KillEngine, _) => {
                self.left.engine_deaths -= 1;
                self.kill_engine();
                self.talking = false;
            }
            (StartEngine, None) => {
                self.generation += 1;
                let volumes = scenario.volumes();
                let engine = Engine::new(scenario.reactors, scenario.max_drains, &volumes);
                self.engine = Some(engine);
            }
            (ControlHears, _) => self.control_hears(),
            (GhostEnds(i), _) => _ = self.ghosts.remove(i),
            (Hang(device), _) => {
                self.left.hangs -= 1;
                self.hung.insert(device);
            }
            (Recover(device), _) => {
                self.left.recoveries -= 1;
                self.hung.remove(&device);
            }
            (KillDaemon, _) => self.daemon_died(),
            (StartDaemon, _) => {
                let durable = self.durable.clone();
                let start = |table: &mut _| Daemon::start(&durable, table);
                self.daemon = Some(with_table(&mut self.listed, start));
            }
            (Greet(cut), _) => return self.greet(cut),
            (HangUp, _) => {
                self.to_owner.clear();
                return self.daemon_step(None, |daemon, _| daemon.hang_up());
            }
            (OwnerHears(cut), _) => {
                let Some(message) = self.to_owner.pop_front() else {
                    return false;
                };
                return self.daemon_step(cut, |daemon, out| daemon.hear(message, out));
            }
            (Commit(cut), _) => return self.daemon_step(cut, Daemon::commit),
            (Wish(w), _) => {
                self.wished[w] = true;
                let (volume, wish) = scenario.wishes[w];
                return self.daemon_step(None, |daemon, _| daemon.begin(volume, wish));
            }
            (TimeOut(at) | HangTimeOut(at), _) => {
                if matches!(action, TimeOut(_)) {
                    self.left.timeouts -= 1;
                }
                return self.daemon_step(None, |daemon, out| daemon.time_out(at, out));
            }
            (HangFault, _) => {
                return self.daemon_step(None, |daemon, out| {
                    if let Some(&(volume, write)) = daemon.faults.first() {
                        daemon.fail(volume, write, out);
                    }
                });
            }
            (HangInherited, _) => {
                return self.daemon_step(None, Daemon::give_inherited_up);
            }
            _ => return false,
        }
        if self.talking {
            self.to_owner.extend(said);
        }
        true
    }

    fn lists(&self, volume: VolumeId, device: u8) -> bool {
        let here = |(v, word): &(VolumeId, u64)| *v == volume && device_of(*word) == Some(device);
        self.listed.iter().any(here)
    }

    fn check_submitted(&mut self, slice: &Slice) {
        let extent = self.durable.extents[usize::from(slice.device)];
        let volume = slice.span.volume;
        let reads_frozen = !slice.span.write && self.is_frozen(volume, slice.device);
        if !self.lists(volume, slice.device) && extent != Extent::Quarantined && !reads_frozen {
            self.wrong = Some("a slice was submitted under a grant whose revoke is through");
        }
    }

    fn note_written(&mut self, scenario: &Scenario, slice: &Slice) {
        let volume = slice.span.volume;
        let gives_up = |(c, command): (usize, &Command)| {
            let ended = matches!(self.stages[c], Stage::Done | Stage::Failed);
            command.kind == Kind::Deallocate && command.volume == volume && !ended
        };
        let deallocated = scenario.commands.iter().enumerate().any(gives_up);
        let wished = scenario
            .wishes
            .iter()
            .any(|(v, wish)| *v == volume && *wish == WishOf::Free);
        if slice.span.write && !deallocated && !wished {
            self.written.insert(volume, slice.device);
        }
    }

    /// Each device's extent is used by one volume only.
    pub(crate) fn nothing_reused(&self) -> bool {
        let mut users: BTreeMap<u8, Option<VolumeId>> = BTreeMap::new();
        let mut alone =
            |device: u8, who: Option<VolumeId>| *users.entry(device).or_insert(who) == who;
        let engine = self.engine.iter();
        let slices = engine.clone().flat_map(Engine::at_devices);
        let left = self.ghosts.iter().filter_map(|ghost| match ghost {
            Ghost::Slice(slice) => Some(slice),
            Ghost::ZeroFill(_) => None,
        });
        for slice in slices.chain(left) {
            let volume = slice.span.volume;
            let extent = self.durable.extents[usize::from(slice.device)];
            let its_own = extent == Extent::Of(volume) || extent == Extent::Quarantined;
            if !its_own || !alone(slice.device, Some(volume)) {
                return false;
            }
        }
        let lane = engine.flat_map(|e| e.lane.iter().map(|(_, d)| *d));
        let left = self.ghosts.iter().filter_map(|ghost| match ghost {
            Ghost::ZeroFill(device) => Some(*device),
            Ghost::Slice(_) => None,
        });
        lane.chain(left).all(|device| {
            let extent = self.durable.extents[usize::from(device)];
            alone(device, None) && !matches!(extent, Extent::Of(_))
        })
    }

    /// Every used grant is listed, or has been copied from; each location once.
    pub(crate) fn grants_are_listed(&self) -> bool {
        let places: Vec<_> = self
            .listed
            .iter()
            .filter_map(|(_, w)| device_of(*w))
            .collect();
        let once: BTreeSet<_> = places.iter().collect();
        let words = self.engine.iter().flat_map(|engine| {
            let words = engine.words.words.iter();
            words.filter_map(|(v, word)| Some((*v, device_of(*word)?)))
        });
        let said = self.to_engine.iter().flat_map(grants_of);
        let mut granted = words.chain(said.filter_map(|g| Some((g.volume, device_of(g.word)?))));
        let is_known =
            |(volume, device)| self.lists(volume, device) || self.is_frozen(volume, device);
        once.len() == places.len() && granted.all(is_known)
    }

    /// In a quiet state, commands wait only for hung devices.
    pub(crate) fn all_is_answered(&self, scenario: &Scenario) -> bool {
        if !self.is_quiet(scenario) {
            return true;
        }
        let hangs = !self.hung.is_empty();
        let commands = self.stages.iter().all(|stage| match stage {
            Stage::Idle | Stage::Done | Stage::Failed => true,
            Stage::Moving | Stage::DeviceWait => hangs,
            Stage::Parked(_) | Stage::Releasing => false,
        });
        let owner = self.daemon.as_ref();
        commands && owner.is_some_and(|d| d.ops.is_empty() && d.faults.is_empty())
    }

    pub(crate) fn numbers(&self) -> u64 {
        self.next_number
    }

    /// Written data never reads as a hole.
    pub(crate) fn written_data_is_readable(&self) -> bool {
        let hole = |word: Option<Word>| word.is_some_and(|w| w.rights() == Some(Rights::Hole));
        let mut engine = self.engine.iter();
        engine.all(|engine| {
            let mut written = self.written.keys();
            !written.any(|volume| hole(engine.words.lookup(*volume, 0)))
        })
    }

    /// Written data stays until it is freed.
    pub(crate) fn written_data_stays_mapped(&self) -> bool {
        self.written.iter().all(|(volume, device)| {
            let at = self.durable.map.get(volume);
            match &self.daemon {
                Some(daemon) => daemon.pool.holds(*volume, *device),
                None if self.durable.holds(*volume, *device) => true,
                None => at.is_none() && self.lists(*volume, *device),
            }
        })
    }
}
