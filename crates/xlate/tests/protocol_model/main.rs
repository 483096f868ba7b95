//! A `stateright` model of the owner protocol: every interleaving within a [`Scenario`].
//!
//! Its parts are the real [`OwnerSide`], `GrantTable`, [`EngineSide`], `FaultTable`, `Drains`,
//! `Table` and `Word`. [`world`] lists the events: reactors sleep, commands park, devices hang,
//! processes die after any effect. `stateright`'s `eventually` overlooks cycles, so liveness is a
//! safety property ([`World::all_is_answered`]): in every quiet state all commands are answered. No
//! event repeats for ever, so each history gets there.
//!
//! Mutations of the code were found: grants without an entry, drains without acknowledgement or
//! fence, uncleared words, uncounted slices, plain-store claims and others. Not here: power
//! failures, commits and FLUSH, time.
//!
//! [`OwnerSide`]: forebay_xlate::owner_side::OwnerSide
//! [`EngineSide`]: forebay_xlate::engine_side::EngineSide

mod daemon;
mod engine;
mod freeze;
mod outside;
mod scenario;
mod space;
mod world;

use daemon::Wish;
use forebay_xlate::VolumeId;
use scenario::{Budget, Command, Kind, Scenario};
use stateright::{Checker, HasDiscoveries, Model, Property};
use world::{Action, World};

struct Protocol(Scenario);

impl Model for Protocol {
    type State = World;
    type Action = Action;

    fn init_states(&self) -> Vec<World> {
        vec![World::new(&self.0)]
    }

    fn actions(&self, world: &World, actions: &mut Vec<Action>) {
        world.actions(&self.0, actions);
    }

    fn next_state(&self, world: &World, action: Action) -> Option<World> {
        let mut next = world.clone();
        next.step(&self.0, action).then_some(next)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always("no place is used by two", |_, w: &World| w.nothing_reused()),
            Property::always("no step is wrong", |_, w: &World| w.wrong.is_none()),
            Property::always("grants are listed", |_, w: &World| w.grants_are_listed()),
            Property::always("all is answered", |m: &Self, w: &World| {
                w.all_is_answered(&m.0)
            }),
            Property::always("it ends", |_, w: &World| w.numbers() < 60),
            Property::always("what was written stays", |_, w: &World| {
                w.written_data_stays_mapped()
            }),
            Property::always("what was written is read", |_, w: &World| {
                w.written_data_is_readable() && w.the_last_write_is_read()
            }),
            Property::always("a frozen place stays as it is", |_, w: &World| {
                w.frozen_places_stay()
            }),
            Property::always("a frozen place is read-only", |_, w: &World| {
                w.frozen_places_are_read_only()
            }),
            Property::always("epochs agree", |_, w: &World| w.epochs_agree()),
        ]
    }
}

const A: VolumeId = VolumeId(1);
const B: VolumeId = VolumeId(2);

fn command(reactor: usize, volume: VolumeId, kind: Kind) -> Command {
    Command {
        reactor,
        volume,
        kind,
        after: None,
    }
}

/// A scenario that takes longer is too large.
const LIMIT: std::time::Duration = std::time::Duration::from_secs(600);

fn check(name: &str, scenario: Scenario) {
    let begin = std::time::Instant::now();
    let checker = Protocol(scenario).checker().threads(2);
    let checker = checker
        .finish_when(HasDiscoveries::Any)
        .timeout(LIMIT)
        .spawn_dfs()
        .join();
    println!(
        "{name}: {} states ({} steps), longest history {}, {:.1} s",
        checker.unique_state_count(),
        checker.state_count(),
        checker.max_depth(),
        begin.elapsed().as_secs_f64()
    );
    if let Some((property, path)) = checker.discoveries().into_iter().next() {
        let actions = path.into_actions();
        panic!("{name}: not so: {property}, after {actions:?}");
    }
    assert!(
        begin.elapsed() < LIMIT,
        "{name}: not every history was seen"
    );
}

fn one_extent(reactors: usize, commands: Vec<Command>, wishes: Vec<(VolumeId, Wish)>) -> Scenario {
    Scenario {
        reactors,
        devices: 1,
        max_drains: 2,
        commands,
        wishes,
        budget: Budget::default(),
    }
}

fn changing_hands(reactors: usize) -> Scenario {
    let mut commands = vec![
        command(0, A, Kind::Write),
        command(reactors - 1, A, Kind::Write),
        command(0, B, Kind::Write),
    ];
    commands[2].after = Some(0);
    one_extent(reactors, commands, vec![(A, Wish::Free)])
}

#[test]
fn an_extent_changes_hands() {
    let mut scenario = changing_hands(2);
    scenario.budget.sleeps = 1;
    check("an extent changes hands", scenario);
}

#[test]
fn a_read_and_a_write_of_two_volumes() {
    let commands = vec![
        command(0, A, Kind::Read),
        command(1, A, Kind::Write),
        command(1, B, Kind::Write),
    ];
    check("questions", one_extent(2, commands, vec![]));
}

#[test]
fn a_process_dies() {
    let mut scenario = changing_hands(1);
    scenario.budget.daemon_deaths = 1;
    check("the daemon dies", scenario.clone());
    scenario.budget.daemon_deaths = 0;
    scenario.budget.engine_deaths = 1;
    check("the engine dies", scenario);
}

#[test]
fn both_processes_die() {
    let commands = vec![command(0, A, Kind::Write)];
    let mut scenario = one_extent(1, commands, vec![(A, Wish::Free)]);
    scenario.budget.daemon_deaths = 1;
    scenario.budget.engine_deaths = 1;
    check("both die", scenario);
}

#[test]
fn a_device_hangs() {
    let commands = vec![command(0, A, Kind::Write), command(0, B, Kind::Write)];
    let mut scenario = one_extent(1, commands, vec![(A, Wish::Free)]);
    scenario.budget.hangs = 1;
    scenario.budget.recoveries = 1;
    check("a device hangs and comes back", scenario.clone());
    scenario.budget.recoveries = 0;
    scenario.budget.daemon_deaths = 1;
    check("a device hangs, the daemon dies", scenario);
}

#[test]
fn a_revoke_is_given_up_unheard() {
    let commands = vec![command(0, A, Kind::Write)];
    let mut scenario = one_extent(1, commands, vec![(A, Wish::Free)]);
    scenario.budget.timeouts = 2;
    scenario.budget.daemon_deaths = 1;
    check("a revoke is given up, the daemon dies", scenario);
}

#[test]
fn a_hung_device_delays_no_other_device() {
    let mut commands = vec![command(0, A, Kind::Write), command(0, B, Kind::Write)];
    commands[1].after = Some(0);
    let mut scenario = one_extent(1, commands, vec![(A, Wish::Free), (B, Wish::Free)]);
    scenario.devices = 2;
    scenario.max_drains = 1;
    scenario.budget.hangs = 1;
    check("one of two devices hangs", scenario);
}

#[test]
fn a_deallocation_is_given_up_or_done() {
    let mut commands = vec![
        command(0, A, Kind::Write),
        command(0, A, Kind::Deallocate),
        command(0, A, Kind::Write),
    ];
    commands[1].after = Some(0);
    commands[2].after = Some(1);
    let mut scenario = one_extent(1, commands, vec![]);
    scenario.budget.interrupts = 1;
    check("a deallocation is given up", scenario.clone());
    scenario.budget.daemon_deaths = 1;
    check("a deallocation, the daemon dies", scenario.clone());
    scenario.budget.daemon_deaths = 0;
    scenario.budget.engine_deaths = 1;
    check("a deallocation, the engine dies", scenario);
}

#[test]
fn a_preallocated_extent_is_claimed_or_taken_back() {
    let commands = vec![
        command(0, A, Kind::Write),
        command(1, A, Kind::Write),
        command(0, B, Kind::Write),
    ];
    let wishes = vec![(A, Wish::Preallocation), (A, Wish::TakeBack)];
    check("a place ahead", one_extent(2, commands, wishes));
}

/// Another preallocation while a reactor holds the first word.
#[test]
fn a_preallocated_extent_comes_again() {
    let commands = vec![command(0, A, Kind::Write), command(1, A, Kind::Read)];
    let wishes = vec![
        (A, Wish::Preallocation),
        (A, Wish::TakeBack),
        (A, Wish::Preallocation),
    ];
    let mut scenario = one_extent(2, commands, wishes);
    scenario.devices = 2;
    scenario.budget.timeouts = 1;
    check("a place ahead comes again", scenario);
}

#[test]
fn preallocated_extents_and_a_process_dies() {
    let commands = vec![command(0, A, Kind::Write), command(0, B, Kind::Write)];
    let wishes = vec![(A, Wish::Preallocation), (A, Wish::TakeBack)];
    let mut scenario = one_extent(1, commands, wishes);
    scenario.budget.daemon_deaths = 1;
    check("a place ahead, the daemon dies", scenario.clone());
    scenario.budget.daemon_deaths = 0;
    scenario.budget.engine_deaths = 1;
    check("a place ahead, the engine dies", scenario);
}

#[test]
fn a_preallocated_extent_is_deallocated_or_revoked() {
    let mut commands = vec![
        command(0, A, Kind::Write),
        command(0, A, Kind::Deallocate),
        command(0, B, Kind::Write),
    ];
    commands[1].after = Some(0);
    let wishes = vec![(A, Wish::Preallocation), (A, Wish::TakeBack)];
    check("deallocated", one_extent(1, commands.clone(), wishes));
    commands[1] = command(1, A, Kind::Write);
    let wishes = vec![(A, Wish::Preallocation), (A, Wish::Free)];
    check("revoked", one_extent(2, commands, wishes));
}

#[test]
fn a_grant_is_evicted() {
    let mut commands = vec![command(0, A, Kind::Write), command(1, A, Kind::Write)];
    commands[1].after = Some(0);
    let mut scenario = one_extent(2, commands, vec![(A, Wish::Evict)]);
    scenario.budget.daemon_deaths = 1;
    check("a grant is evicted, the daemon dies", scenario.clone());
    scenario.budget.daemon_deaths = 0;
    scenario.budget.engine_deaths = 1;
    check("a grant is evicted, the engine dies", scenario);
}

fn snapshot(reactors: usize, devices: u8, snapshots: usize) -> Scenario {
    let commands = vec![
        command(0, A, Kind::Write),
        command(reactors - 1, A, Kind::Write),
    ];
    let mut scenario = one_extent(reactors, commands, vec![(A, Wish::Freeze); snapshots]);
    scenario.devices = devices;
    scenario
}

#[test]
fn a_volume_is_frozen() {
    let mut scenario = snapshot(2, 2, 1);
    scenario.commands.push(command(1, A, Kind::Read));
    scenario.budget.sleeps = 1;
    check("a volume is frozen", scenario.clone());
    scenario.budget.sleeps = 0;
    scenario.budget.timeouts = 1;
    check("a freeze times out", scenario);
}

#[test]
fn a_volume_is_frozen_and_a_process_dies() {
    let mut scenario = snapshot(1, 2, 1);
    scenario.budget.engine_deaths = 1;
    check("a freeze, the engine dies", scenario.clone());
    scenario.budget.engine_deaths = 0;
    scenario.budget.daemon_deaths = 1;
    scenario.budget.timeouts = 1;
    check("a freeze, the daemon dies", scenario.clone());
    scenario.budget.timeouts = 0;
    scenario.budget.engine_deaths = 1;
    scenario.commands[1].after = Some(0);
    check("a freeze, both die", scenario);
}

#[test]
fn a_volume_is_frozen_on_a_hung_device() {
    let mut scenario = snapshot(1, 2, 1);
    scenario.budget.hangs = 1;
    scenario.budget.recoveries = 1;
    check("a freeze, a device hangs", scenario);
}

/// The second snapshot's epoch is the first one's number.
#[test]
fn epochs_wrap() {
    let mut scenario = snapshot(1, 3, 2);
    scenario.commands.push(command(0, A, Kind::Read));
    check("epochs wrap", scenario.clone());
    scenario.commands.remove(2);
    scenario.commands[1].after = Some(0);
    scenario.budget.daemon_deaths = 1;
    check("epochs wrap, the daemon dies", scenario.clone());
    scenario.budget.daemon_deaths = 0;
    scenario.budget.engine_deaths = 1;
    check("epochs wrap, the engine dies", scenario);
}

#[test]
fn a_preallocated_extent_is_frozen() {
    let commands = vec![command(0, A, Kind::Write), command(1, A, Kind::Write)];
    let wishes = vec![(A, Wish::Preallocation), (A, Wish::Freeze)];
    let mut scenario = one_extent(2, commands, wishes);
    scenario.devices = 2;
    check("a place ahead is frozen", scenario);
}
