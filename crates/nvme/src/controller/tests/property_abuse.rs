//! Hostile property accesses in any order, with take-overs in between.

use super::*;
use crate::fabrics::PropertyCommand;
use proptest::prelude::*;

/// The readable properties (offset, wide) (Base 2.0, 3.1.3, figure 33).
const READABLE: [(u32, bool); 5] = [
    (0x00, true),
    (0x08, false),
    (0x14, false),
    (0x1C, false),
    (0x68, false),
];
const CC: u32 = 0x14;

/// ATTRIB 2:0: 0 is 4 bytes, 1 is 8 bytes.
fn readable(offset: u32, attrib: u8) -> bool {
    attrib & 7 < 2 && READABLE.contains(&(offset, attrib & 7 == 1))
}

/// A model of CC and CSTS (Base 2.0, 3.1.3.5, 3.1.3.6, 3.6, 3.7).
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Reported {
    cc: u32,
    ready: bool,
    failed: bool,
    /// SHST.
    shutdown: u32,
    /// The owner must quiesce.
    owed: bool,
}

impl Reported {
    fn csts(&self) -> u32 {
        u32::from(self.ready) | u32::from(self.failed) << 1 | self.shutdown << 2
    }

    /// Writes CC; false if refused.
    fn write(&mut self, value: u32, io: bool) -> bool {
        let value = value & !(1 << 24);
        let (was, is) = (self.cc & 1 != 0, value & 1 != 0);
        let shn = |cc: u32| cc >> 14 & 3;
        let old_shn = shn(self.cc);
        if !was && is {
            if self.ready {
                return false;
            }
            let sizes = !io || (value >> 16 & 0xF, value >> 20 & 0xF) == (6, 4);
            let good =
                sizes && value >> 4 & 7 == 0 && value >> 7 & 0xF == 0 && value >> 11 & 7 == 0;
            // Enabling clears an earlier shutdown.
            *self = Self {
                cc: value & !(3 << 14),
                ready: good,
                failed: !good,
                ..Self::default()
            };
        } else if was && !is {
            self.cc = value & !(3 << 14) | old_shn << 14;
            self.owed = true;
        } else {
            // While enabled nothing else changes; a shutdown begins once.
            let base = if was { self.cc } else { value };
            let new_shn = if old_shn == 0 { shn(value) } else { old_shn };
            self.cc = base & !(3 << 14) | new_shn << 14;
            if old_shn == 0 && new_shn != 0 {
                let quiet = !was && !self.ready;
                self.shutdown = if quiet { 2 } else { 1 };
                self.owed |= !quiet;
            }
        }
        if !io && self.owed {
            self.quiesced();
        }
        true
    }

    fn quiesced(&mut self) {
        self.owed = false;
        if self.cc & 1 == 0 {
            *self = Self::default();
        } else if self.shutdown == 1 {
            self.shutdown = 2;
        }
    }
}

#[derive(Clone, Debug)]
enum Act {
    Get(u32, u8),
    Set(u32, u8, u64),
    Cc(u32),
    Quiesced,
    /// A take-over.
    Killed,
}

fn cc() -> impl Strategy<Value = u32> {
    prop_oneof![
        4 => Just(0x46_0001u32),
        3 => Just(0x46_0000),
        2 => Just(0x46_4001),
        2 => Just(0x46_8001),
        3 => (0u32..32).prop_map(|bit| 0x46_0001 ^ 1 << bit),
        1 => any::<u32>(),
    ]
}

fn act() -> impl Strategy<Value = Act> {
    let offset = || prop_oneof![4 => 0u32..0x70, 1 => any::<u32>(), 1 => Just(CC)];
    let attrib = || prop_oneof![3 => 0u8..2, 1 => any::<u8>()];
    prop_oneof![
        3 => (offset(), attrib()).prop_map(|(o, a)| Act::Get(o, a)),
        2 => (offset(), attrib(), any::<u64>()).prop_map(|(o, a, v)| Act::Set(o, a, v)),
        8 => cc().prop_map(Act::Cc),
        3 => Just(Act::Quiesced),
        3 => Just(Act::Killed),
    ]
}

fn get(bench: &mut Bench, offset: u32, attrib: u8) -> Result<u64, Status> {
    let mut sqe = PropertyCommand::get(1, offset, false).to_sqe();
    sqe = sqe.with_cdw(10, sqe.cdw(10) & !0xFF | u32::from(attrib));
    ended(bench.run(sqe))
}

fn set(bench: &mut Bench, offset: u32, attrib: u8, value: u64) -> Result<u64, Status> {
    let mut sqe = PropertyCommand::set(1, offset, false, value).to_sqe();
    sqe = sqe.with_cdw(10, sqe.cdw(10) & !0xFF | u32::from(attrib));
    ended(bench.run(sqe))
}

fn ended(outcome: AdminOutcome) -> Result<u64, Status> {
    match outcome {
        AdminOutcome::Complete { status, result, .. } if status.is_success() => Ok(result),
        AdminOutcome::Complete { status, .. } => {
            assert!(status.dnr());
            Err(status.code())
        }
        other => panic!("{other:?}"),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]
    #[test]
    fn nvme_property_abuse(
        discovery in any::<bool>(),
        acts in proptest::collection::vec(act(), 1..60),
    ) {
        let kind = match discovery {
            true => ControllerConfig::discovery(3),
            false => config(),
        };
        let mut bench = Bench::connected(kind);
        let mut reported = Reported::default();
        let constant: Vec<_> = [(0x00, 1), (0x08, 0), (0x68, 0)]
            .map(|(offset, attrib)| get(&mut bench, offset, attrib))
            .to_vec();
        for act in acts {
            match act {
                Act::Get(offset, attrib) => {
                    let found = get(&mut bench, offset, attrib);
                    prop_assert_eq!(found.is_ok(), readable(offset, attrib));
                }
                Act::Set(offset, attrib, value) if (offset, attrib & 7) != (CC, 0) => {
                    prop_assert_eq!(set(&mut bench, offset, attrib, value), Err(Status::INVALID_FIELD));
                }
                Act::Set(_, _, value) => {
                    let taken = reported.write(value as u32, !discovery);
                    prop_assert_eq!(set(&mut bench, CC, 0, value).is_ok(), taken);
                }
                Act::Cc(value) => {
                    let taken = reported.write(value, !discovery);
                    let done = set(&mut bench, CC, 0, value.into());
                    prop_assert_eq!(done.is_ok(), taken);
                    prop_assert!(taken || done == Err(Status::COMMAND_SEQUENCE_ERROR));
                }
                // May happen more than once.
                Act::Quiesced if reported.owed => {
                    reported.quiesced();
                    bench.controller.quiesced();
                }
                Act::Quiesced => {}
                Act::Killed => {
                    let state = *bench.controller.state();
                    let config = *bench.controller.config();
                    bench.controller = Controller::restore(config, &state).unwrap();
                }
            }
            prop_assert_eq!(get(&mut bench, CC, 0), Ok(u64::from(reported.cc)));
            prop_assert_eq!(get(&mut bench, 0x1C, 0), Ok(u64::from(reported.csts())));
            let now = [(0x00, 1), (0x08, 0), (0x68, 0)];
            let now = now.map(|(offset, attrib)| get(&mut bench, offset, attrib));
            prop_assert_eq!(&now[..], &constant[..]);
            let up = reported.cc & 1 != 0 && reported.ready && reported.shutdown == 0 && !reported.failed;
            prop_assert_eq!(bench.controller.ready(), up);
            let alive = ended(bench.run(Sqe::new(admin::KEEP_ALIVE, 1)));
            prop_assert_eq!(alive.is_ok(), up);
        }
    }
}

#[test]
fn every_place_and_width() {
    for mut bench in [
        Bench::ready(),
        Bench::discovery(),
        Bench::connected(config()),
    ] {
        let before = *bench.controller.state();
        for offset in (0..0x2000)
            .chain((0..32).map(|bit| 1 << bit))
            .chain([u32::MAX - 3])
        {
            for attrib in [0, 1, 2, 3, 7, 8, 0x80, 0xFF] {
                let readable = readable(offset, attrib);
                assert_eq!(
                    get(&mut bench, offset, attrib).is_ok(),
                    readable,
                    "{offset:#x} {attrib}"
                );
                if (offset, attrib & 7) != (CC, 0) {
                    let refused = Err(Status::INVALID_FIELD);
                    assert_eq!(set(&mut bench, offset, attrib, u64::MAX), refused);
                }
            }
        }
        assert_eq!(
            (bench.controller.state().cc, bench.controller.state().csts),
            (before.cc, before.csts)
        );
    }
}
