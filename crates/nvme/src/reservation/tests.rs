//! The rules against a second implementation, examples, report bytes and damaged states.

use super::*;
use crate::Sqe;
use crate::opcode::nvm;
use proptest::prelude::*;

const HOSTS: usize = 4;

fn host(n: usize) -> HostId {
    [n as u8 + 1; 16]
}

fn register(rrega: u32, iekey: bool, cptpl: u32) -> u32 {
    let opcode = u32::from(nvm::RESERVATION_REGISTER) << 16;
    opcode | rrega | u32::from(iekey) << 3 | cptpl << 30
}

fn acquire(racqa: u32, rtype: u32) -> u32 {
    u32::from(nvm::RESERVATION_ACQUIRE) << 16 | racqa | rtype << 8
}

fn release(rrela: u32, rtype: u32) -> u32 {
    u32::from(nvm::RESERVATION_RELEASE) << 16 | rrela | rtype << 8
}

/// A model with one row per host.
#[derive(Clone, Debug, Default, PartialEq)]
struct Table {
    keys: [u64; HOSTS],
    rtype: u32,
    /// Unused for types 5 and 6.
    holder: usize,
    generation: u32,
    ptpl: bool,
    reported: Vec<(usize, u8)>,
}

const OK: u16 = 0;
const CONFLICT: u16 = 0x83;
const INVALID: u16 = 0x02;

impl Table {
    fn is_holder(&self, h: usize) -> bool {
        match self.rtype {
            0 => false,
            5 | 6 => self.keys[h] != 0,
            _ => self.holder == h,
        }
    }

    /// Drops rows, and the reservation with its last holder.
    fn drop_rows(&mut self, rows: &[usize]) {
        let held_before = (0..HOSTS).any(|h| self.is_holder(h));
        rows.iter().for_each(|&h| self.keys[h] = 0);
        let holder_left = match self.rtype {
            5 | 6 => self.keys.iter().any(|&k| k != 0),
            _ => self.keys[self.holder] != 0,
        };
        if held_before && !holder_left {
            self.rtype = 0;
        }
    }

    fn publish_rows(&mut self, rows: impl Iterator<Item = usize>, but: usize, what: u8) {
        self.reported
            .extend(rows.filter(|&h| h != but).map(|h| (h, what)));
    }

    fn run(&mut self, h: usize, action: u32, keys: [u64; 2]) -> u16 {
        let before = self.clone();
        let status = self.try_run(h, action, keys);
        if status != OK {
            *self = before;
        }
        status
    }

    fn try_run(&mut self, h: usize, action: u32, [crkey, second]: [u64; 2]) -> u16 {
        let opcode = (action >> 16) as u8;
        let iekey = action & 8 != 0;
        let rtype = action >> 8 & 0xFF;
        let rows =
            |keys: &[u64; HOSTS]| -> Vec<usize> { (0..HOSTS).filter(|&h| keys[h] != 0).collect() };
        if opcode == nvm::RESERVATION_REGISTER {
            match action & 7 {
                _ if action >> 30 == 1 => return INVALID,
                0 if self.keys[h] == 0 && second == 0 => return INVALID,
                0 if self.keys[h] == 0 => self.keys[h] = second,
                0 if self.keys[h] == second => {}
                0 => return CONFLICT,
                1 if self.keys[h] == 0 => return CONFLICT,
                1 if !iekey && self.keys[h] != crkey => return CONFLICT,
                1 => {
                    let old = self.rtype;
                    self.drop_rows(&[h]);
                    if self.rtype == 0 && (old == 3 || old == 4) {
                        self.publish_rows(rows(&self.keys).into_iter(), h, 2);
                    }
                }
                2 if !iekey && (self.keys[h] == 0 || self.keys[h] != crkey) => return CONFLICT,
                2 if second == 0 => return INVALID,
                2 => self.keys[h] = second,
                _ => return INVALID,
            }
            match action >> 30 {
                2 => self.ptpl = false,
                3 => self.ptpl = true,
                _ => {}
            }
            self.generation += 1;
            return OK;
        }
        if iekey {
            return INVALID;
        }
        let acquires = opcode == nvm::RESERVATION_ACQUIRE;
        if acquires && (!(1..=6).contains(&rtype) || action & 7 > 2) || !acquires && action & 7 > 1
        {
            return INVALID;
        }
        if self.keys[h] == 0 || self.keys[h] != crkey {
            return CONFLICT;
        }
        match (acquires, action & 7) {
            (true, 0) if self.rtype == 0 => (self.rtype, self.holder) = (rtype, h),
            (true, 0) if self.is_holder(h) && self.rtype == rtype => {}
            (true, 0) => return CONFLICT,
            (true, _) => {
                self.generation += 1;
                let with_key: Vec<usize> = (0..HOSTS)
                    .filter(|&o| second != 0 && self.keys[o] == second)
                    .collect();
                let others: Vec<usize> = rows(&self.keys).into_iter().filter(|&o| o != h).collect();
                let all = matches!(self.rtype, 5 | 6);
                let (gone, becomes) = if self.rtype == 0 {
                    (with_key, None)
                } else if all && second == 0 {
                    (others, Some(rtype))
                } else if all && with_key.is_empty() {
                    return CONFLICT;
                } else if !all && second == 0 {
                    return INVALID;
                } else if !all && self.keys[self.holder] == second {
                    (
                        with_key.into_iter().filter(|&o| o != h).collect(),
                        Some(rtype),
                    )
                } else {
                    (with_key, None)
                };
                let old = self.rtype;
                self.drop_rows(&gone);
                self.publish_rows(gone.into_iter(), h, 1);
                if let Some(rtype) = becomes {
                    (self.rtype, self.holder) = (rtype, h);
                }
                if old != 0 && self.rtype != old {
                    self.publish_rows(rows(&self.keys).into_iter(), h, 2);
                }
            }
            (false, 0) if self.rtype == 0 => {}
            (false, 0) if self.rtype != rtype => return INVALID,
            (false, 0) if !self.is_holder(h) => {}
            (false, 0) => {
                let old = std::mem::take(&mut self.rtype);
                if old > 2 {
                    self.publish_rows(rows(&self.keys).into_iter(), h, 2);
                }
            }
            (false, _) => {
                self.generation += 1;
                let gone = rows(&self.keys);
                self.rtype = 0;
                self.keys = [0; HOSTS];
                self.publish_rows(gone.into_iter(), h, 3);
            }
        }
        OK
    }

    /// Figure "Command Behavior in the Presence of a Reservation".
    fn may(&self, h: usize) -> (bool, bool) {
        // (Read, write) of holder, registrant and others.
        let table = [
            [(true, true); 3],
            [(true, true), (true, false), (true, false)],
            [(true, true), (false, false), (false, false)],
            [(true, true), (true, true), (true, false)],
            [(true, true), (true, true), (false, false)],
            [(true, true), (true, true), (true, false)],
            [(true, true), (true, true), (false, false)],
        ];
        let role = match (self.is_holder(h), self.keys[h] != 0) {
            (true, _) => 0,
            (_, true) => 1,
            _ => 2,
        };
        table[self.rtype as usize][role]
    }
}

fn any_action() -> impl Strategy<Value = u32> {
    // Mostly successful registrations, for a useful state.
    prop_oneof![
        4 => Just(register(0, false, 0)),
        4 => (0u32..4, any::<bool>(), 0u32..4).prop_map(|(r, i, p)| register(r, i, p)),
        6 => (0u32..4, 0u32..8).prop_map(|(a, t)| acquire(a, t)),
        3 => (0u32..3, 0u32..8).prop_map(|(a, t)| release(a, t)),
        1 => (0u32..3, 1u32..7).prop_map(|(a, t)| acquire(a, t) | 8),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]
    #[test]
    fn the_rules_agree_with_a_table(
        commands in prop::collection::vec((0..HOSTS, any_action(), 0u64..4, 0u64..4), 1..40),
    ) {
        let mut state = Reservations::default();
        let mut table = Table::default();
        for (h, action, crkey, second) in commands {
            // Mostly the right key, as refusals change nothing.
            let crkey = if crkey == 3 { 3 } else { table.keys[h] };
            let keys = [crkey, second];
            let before = state.clone();
            let status = match ReservationCommand::new(action, keys) {
                Ok(command) => state.apply(host(h), &command),
                Err(status) => Err(status),
            };
            let wanted = table.run(h, action, keys);
            match status {
                Ok(applied) => {
                    prop_assert_eq!(OK, wanted);
                    prop_assert_eq!(applied.changed, before != state);
                }
                Err(status) => {
                    prop_assert_eq!(status.code().0, wanted, "{:#x}", action);
                    prop_assert!(status.dnr());
                    prop_assert_eq!(&before, &state);
                }
            }
            prop_assert!(state.is_sound());
            prop_assert_eq!(state.reservation_type().map_or(0, |t| t as u32), table.rtype);
            prop_assert_eq!(state.generation(), table.generation);
            prop_assert_eq!(state.ptpl(), table.ptpl);
            for h in 0..HOSTS {
                prop_assert_eq!(state.key_of(&host(h)).unwrap_or(0), table.keys[h]);
                prop_assert_eq!(state.holds(&host(h)), table.is_holder(h));
                let access = state.access(&host(h));
                prop_assert_eq!((access.read, access.write), table.may(h));
            }
            let mut reported: Vec<_> = state
                .notices_from(0)
                .iter()
                .map(|n| (usize::from(n.host[0]) - 1, n.kind as u8))
                .collect();
            // The order within a command is arbitrary.
            let mut wanted = table.reported.split_off(table.reported.len() - reported.len());
            prop_assert_eq!(table.reported.len() as u64 + reported.len() as u64, state.notices_end());
            table.reported.extend(wanted.iter().copied());
            reported.sort_unstable();
            wanted.sort_unstable();
            prop_assert_eq!(reported, wanted);
        }
        let bytes = postcard::to_stdvec(&state).unwrap();
        prop_assert_eq!(postcard::from_bytes::<Reservations>(&bytes).unwrap(), state);
    }

    #[test]
    fn damage_is_refused_or_sound(
        bytes in prop::collection::vec(any::<u8>(), 0..80),
        flip in any::<prop::sample::Index>(),
    ) {
        if let Ok(state) = postcard::from_bytes::<Reservations>(&bytes) {
            prop_assert!(state.is_sound());
        }
        let mut good = postcard::to_stdvec(&held_by_two()).unwrap();
        let at = flip.index(good.len() * 8);
        good[at / 8] ^= 1 << (at % 8);
        if let Ok(state) = postcard::from_bytes::<Reservations>(&good) {
            prop_assert!(state.is_sound());
        }
    }
}

fn run(state: &mut Reservations, h: usize, action: u32, keys: [u64; 2]) -> Result<bool, Status> {
    let command = ReservationCommand::new(action, keys)?;
    state
        .apply(host(h), &command)
        .map(|applied| applied.changed)
}

fn held_by_two() -> Reservations {
    let mut state = Reservations::default();
    assert_eq!(run(&mut state, 0, register(0, false, 3), [0, 7]), Ok(true));
    assert_eq!(run(&mut state, 1, register(0, false, 0), [0, 9]), Ok(true));
    assert_eq!(run(&mut state, 0, acquire(0, 3), [7, 0]), Ok(true));
    state
}

#[test]
fn report_has_the_bytes_of_the_specification() {
    let state = held_by_two();
    let cntlid = |h: &HostId| if *h == host(1) { 0x1234 } else { NO_CONTROLLER };
    let mut out = [0xEE; 200];
    assert_eq!(
        state.report(false, cntlid, &mut out),
        Err(Status::HOST_IDENTIFIER_INCONSISTENT_FORMAT.with_dnr())
    );
    state.report(true, cntlid, &mut out).unwrap();
    assert_eq!(out[..10], [2, 0, 0, 0, 3, 2, 0, 0, 0, 1]);
    assert_eq!(out[64..67], [0xFF, 0xFF, 1]);
    assert_eq!(out[72..80], 7u64.to_le_bytes());
    assert_eq!(out[80..96], host(0));
    assert_eq!(out[128..131], [0x34, 0x12, 0]);
    assert_eq!(out[144..160], host(1));
    // Nothing is written past the end; a short buffer truncates.
    assert_eq!(out[192..], [0xEE; 8]);
    let mut short = [0; 68];
    state.report(true, cntlid, &mut short).unwrap();
    assert_eq!(short, out[..68]);
    assert_eq!(MAX_REPORT_BYTES, 64 * 129);
}

#[test]
fn hosts_without_identifier_have_no_reservations() {
    let mut state = held_by_two();
    let command = ReservationCommand::new(register(0, false, 0), [0, 5]).unwrap();
    let refused = state.apply(NO_HOST, &command);
    assert_eq!(
        refused,
        Err(Status::HOST_IDENTIFIER_NOT_INITIALIZED.with_dnr())
    );
    let access = state.access(&NO_HOST);
    assert!(access.read && !access.write);
}

#[test]
fn registrants_are_limited_and_all_can_be_notified() {
    let mut state = Reservations::default();
    let id = |n: usize| {
        [
            (n >> 8) as u8,
            n as u8,
            1,
            0,
            0,
            0,
            0,
            0,
            0,
            0,
            0,
            0,
            0,
            0,
            0,
            0,
        ]
    };
    let command = ReservationCommand::new(register(0, false, 0), [0, 5]).unwrap();
    for n in 0..MAX_REGISTRANTS {
        assert!(state.apply(id(n), &command).is_ok());
    }
    assert!(state.apply(id(500), &command).is_err());
    let hold = ReservationCommand::new(acquire(0, 6), [5, 0]).unwrap();
    state.apply(id(3), &hold).unwrap();
    let preempt = ReservationCommand::new(acquire(2, 1), [5, 0]).unwrap();
    state.apply(id(3), &preempt).unwrap();
    assert_eq!(state.registrants().len(), 1);
    assert_eq!(state.notices_from(0).len(), MAX_REGISTRANTS - 1);
    assert_eq!(state.notices_from(126).len(), 1);
    assert!(state.notices_from(127).is_empty() && state.notices_from(u64::MAX).is_empty());
}

#[test]
fn power_loss_keeps_what_persists() {
    let mut state = held_by_two();
    assert!(!state.power_loss());
    let off = ReservationCommand::new(action_of_persistence(false), [0; 2]).unwrap();
    assert_eq!(state.apply(host(3), &off), Ok(Applied { changed: true }));
    assert_eq!(state.apply(host(3), &off), Ok(Applied { changed: false }));
    assert!(state.power_loss() && state.is_sound());
    assert_eq!(
        (state.registrants().len(), state.reservation_type()),
        (0, None)
    );
    assert!(!state.power_loss());
}

#[test]
fn actions_are_what_commands_say() {
    let sqe = Sqe::new(nvm::RESERVATION_ACQUIRE, 1).with_cdw(10, 0x3FFF_0302 | 0xF0);
    assert_eq!(action_of(&sqe), acquire(2, 3));
    assert_eq!(key_bytes(action_of(&sqe)), 16);
    assert_eq!(key_bytes(release(0, 1)), 8);
    assert_eq!(keys_of(&[1, 0, 0, 0, 0, 0, 0, 0]), [1, 0]);
    assert_eq!(keys_of(&[0; 7]), [0, 0]);
    let unknown = ReservationCommand::new(u32::from(nvm::READ) << 16, [0; 2]);
    assert_eq!(unknown, Err(Status::INVALID_OPCODE.with_dnr()));
}
