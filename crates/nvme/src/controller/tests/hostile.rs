//! No command or recorded state causes a panic or an unusable state.

use super::*;
use proptest::prelude::*;
use zerocopy::{FromBytes, IntoBytes};

#[derive(Clone, Debug)]
enum Step {
    Command([u8; 64], Vec<u8>),
    Cc(u32),
    Connect([u8; 64], u16),
    Quiesced,
    NamespaceChanged(u32),
    DiscoveryChanged,
    List(u64, u64),
    Wait(u32),
}

/// Mostly known commands, to pass the first check.
fn command() -> impl Strategy<Value = [u8; 64]> {
    let known = prop_oneof![
        4 => proptest::sample::select(vec![0x02u8, 0x06, 0x08, 0x09, 0x0A, 0x0C, 0x18, 0x7F]),
        1 => any::<u8>(),
    ];
    let small = proptest::collection::vec(
        prop_oneof![3 => Just(0u8), 2 => 0u8..8, 1 => any::<u8>()],
        63,
    );
    (known, small, 0u8..0x90).prop_map(|(op, rest, selector)| {
        let mut raw = [0; 64];
        raw[0] = op;
        raw[1..].copy_from_slice(&rest);
        raw[40] = selector;
        raw
    })
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        12 => (command(), proptest::collection::vec(any::<u8>(), 0..600))
            .prop_map(|(sqe, data)| Step::Command(sqe, data)),
        3 => prop_oneof![
            Just(0x46_0001u32), Just(0x46_0000), Just(0x46_4001), any::<u32>()
        ].prop_map(Step::Cc),
        1 => (command(), any::<u16>()).prop_map(|(sqe, cntlid)| Step::Connect(sqe, cntlid & 7)),
        1 => Just(Step::Quiesced),
        1 => prop_oneof![0u32..70, any::<u32>()].prop_map(Step::NamespaceChanged),
        1 => Just(Step::DiscoveryChanged),
        1 => (0u64..9, prop_oneof![0u64..5, Just(u64::MAX)]).prop_map(|(g, n)| Step::List(g, n)),
        1 => any::<u32>().prop_map(Step::Wait),
    ]
}

proptest! {
    #[test]
    fn any_sequence_of_commands(
        kind in 0u8..4,
        namespaces in 1u32..70,
        steps in proptest::collection::vec(step(), 1..60),
    ) {
        let mut bench = match kind {
            0 => Bench::management(0),
            1 => Bench::management(1),
            2 => Bench::connected(ControllerConfig::discovery(3)),
            _ => Bench::connected(ControllerConfig { namespaces, ..config() }),
        };
        if kind > 1 {
            bench.set_cc(0x46_0001).unwrap();
        }
        let hostnqn = bench.controller.hostnqn();
        for step in steps {
            match step {
                Step::Command(raw, data) => {
                    let sqe = Sqe::read_from_bytes(&raw).unwrap();
                    let transfer = bench.controller.transfer(&sqe);
                    let outcome = bench.run_with(sqe, &data);
                    if let AdminOutcome::Complete { status, data_bytes, .. } = outcome {
                        prop_assert!(status.is_success() || data_bytes == 0);
                        // Only bugs cause it.
                        prop_assert_ne!(status, Status::INTERNAL_ERROR);
                        if data_bytes != 0 {
                            prop_assert_eq!(transfer, Ok(Transfer::ToHost(data_bytes)));
                        }
                    }
                }
                Step::Cc(value) => drop(bench.set_cc(value)),
                Step::Connect(raw, cntlid) => {
                    let sqe = Sqe::read_from_bytes(&raw).unwrap();
                    let data = ConnectData::new([5; 16], cntlid, &subsystem(), &host());
                    let _ = bench.controller.connect_io_queue(ConnectCommand::of(&sqe), &data);
                }
                Step::Quiesced => bench.controller.quiesced(),
                Step::NamespaceChanged(nsid) => bench.controller.namespace_changed(nsid),
                Step::DiscoveryChanged => bench.controller.discovery_is(bench.now_ns),
                Step::List(generation, entries) => {
                    bench.world.generation.set(generation);
                    bench.world.entries.set(entries);
                }
                Step::Wait(ms) => {
                    bench.now_ns += u64::from(ms) * MS;
                    bench.controller.expire(bench.now_ns);
                }
            }
            // One completion per request.
            let mut events = 0;
            while bench.controller.next_event().is_some() {
                events += 1;
                prop_assert!(events <= MAX_EVENT_REQUESTS);
            }
            let state = *bench.controller.state();
            let restored = Controller::restore(*bench.controller.config(), &state).unwrap();
            prop_assert_eq!(restored.state(), &state);
            prop_assert_eq!(restored.hostnqn(), hostnqn);
        }
    }

    #[test]
    fn any_recorded_state(
        at in proptest::collection::vec((0..size_of::<ControllerState>(), any::<u8>()), 0..12),
        commands in proptest::collection::vec(command(), 1..12),
    ) {
        let mut bench = Bench::ready();
        let mut raw = [0; size_of::<ControllerState>()];
        raw.copy_from_slice(bench.controller.state().as_bytes());
        for (at, value) in at {
            raw[at] = value;
        }
        let state = ControllerState::read_from_bytes(&raw).unwrap();
        if let Ok(controller) = Controller::restore(config(), &state) {
            bench.controller = controller;
            for raw in commands {
                let sqe = Sqe::read_from_bytes(&raw).unwrap();
                bench.run_with(sqe, &[0; 600]);
                bench.controller.next_event();
                bench.controller.expire(u64::MAX);
            }
            bench.controller.quiesced();
        }
    }
}

#[test]
fn states_that_lie_are_refused() {
    let bench = Bench::ready();
    let good = *bench.controller.state();
    assert!(Controller::restore(config(), &good).is_ok());
    let lie = |change: &dyn Fn(&mut ControllerState)| {
        let mut state = good;
        change(&mut state);
        Controller::restore(config(), &state).unwrap_err().0
    };
    assert_eq!(lie(&|s| s.cntlid = 4), "cntlid");
    assert_eq!(lie(&|s| s.csts |= 1 << 9), "csts");
    assert_eq!(lie(&|s| s.granted_io_queues = 0), "granted_io_queues");
    assert_eq!(lie(&|s| s.granted_io_queues = 65), "granted_io_queues");
    assert_eq!(lie(&|s| s.io_queues[1] = 1), "io_queues");
    assert_eq!(lie(&|s| s.event_slots[3] = 3), "event_slots");
    assert_eq!(lie(&|s| s.events_pending = 0x80), "events");
    assert_eq!(lie(&|s| s.changed_namespaces = 2), "changed_namespaces");
    assert_eq!(lie(&|s| s.changed_reported = 1), "changed_reported");
    assert_eq!(lie(&|s| s.acre = 2), "acre");
    assert_eq!(lie(&|s| s.reservation_mask = 1), "reservation_mask");
    assert_eq!(lie(&|s| s.reservation_queued = 8), "reservation_queue");
    assert_eq!(lie(&|s| s.reservation_queued = 1), "reservation_queue");
    assert_eq!(lie(&|s| s.ana_reported = 4), "ana_told");
    assert_eq!(lie(&|s| s.hostnqn = [b'x'; 256]), "hostnqn");
}
