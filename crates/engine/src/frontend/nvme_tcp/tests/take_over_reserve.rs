//! Reservations while engines and daemons die: each command counts once.
//!
//! Two hosts take turns with commands that mostly cannot be repeated, so each answer is known. The
//! daemon dies before it decides, before the commit, or before it answers.

use super::take_over::{Engine, SERVING, V, World};
use super::take_over_hosts::{Dice, Queue, patience};
use crate::upcall::Upcall;
use forebay_nvme::opcode::nvm;
use forebay_nvme::reservation::{self, ReservationCommand, Reservations};
use forebay_nvme::tcp::Pdu;
use forebay_nvme::{SglDescriptor, Sqe, Status};
use forebay_xlate::boundary::message::{ReserveAsk, ReserveToken};
use forebay_xlate::kill::arm_here;
use std::collections::VecDeque;
use std::sync::Arc;

/// A daemon; `durable` is its successor's state.
#[derive(Default)]
struct Daemon {
    durable: (Reservations, VecDeque<ReserveToken>),
    /// Requests without an answer yet.
    asked: Vec<ReserveAsk>,
    deaths: [u32; 3],
}

impl Daemon {
    /// Answers, or dies first.
    fn turn(&mut self, world: &mut World) {
        let Some(ask) = self.asked.first().copied() else {
            return;
        };
        // The next daemon gets it again.
        let dies = world.dice.usize(..4);
        if dies < 3 {
            self.deaths[dies] += 1;
        }
        if dies == 0 {
            return;
        }
        let (mut state, mut recent) = self.durable.clone();
        let status = if recent.contains(&ask.token) {
            Status::SUCCESS
        } else {
            let command = ReservationCommand::new(ask.action, ask.keys).unwrap();
            match state.apply(ask.host, &command) {
                Ok(applied) => {
                    if applied.changed {
                        recent.push_back(ask.token);
                    }
                    Status::SUCCESS
                }
                Err(status) => status,
            }
        };
        if dies == 1 {
            return;
        }
        while recent.len() > 8 {
            recent.pop_front();
        }
        self.durable = (state, recent);
        world.reservations = Arc::new(self.durable.0.clone());
        if dies == 2 {
            // The next daemon sends its state first.
            let state = world.reservations.clone();
            world.step(|engine, _| engine.set_reservations(&state));
            return;
        }
        self.asked.remove(0);
        let state = world.reservations.clone();
        world.step(|engine, _| {
            let Engine { core, frontend, .. } = engine;
            frontend.reserved(core, ask.token, V, status, &state);
        });
    }

    fn hear(&mut self, said: Vec<Upcall>) {
        for upcall in said {
            match upcall {
                Upcall::Reserve(ask) => self.asked.push(ask),
                other => panic!("{other:?}"),
            }
        }
    }
}

/// A command that is often valid in this state, and its keys.
fn some_command(dice: &mut Dice, state: &Reservations, host: usize) -> (u8, u32, [u64; 2]) {
    let id = |host: usize| [host as u8 + 1; 16];
    let key = |host: usize| {
        let mut all = state.registrants().iter();
        all.find(|r| r.host == id(host)).map_or(0, |r| r.key)
    };
    let fresh = 1 + dice.u64(..1 << 40);
    let rtype = 1 + dice.u32(..6);
    let other = key(1 - host);
    match dice.u64(..7) {
        0 | 1 => (nvm::RESERVATION_REGISTER, 0, [0, fresh]),
        2 => (nvm::RESERVATION_REGISTER, 1, [key(host), 0]),
        3 => (nvm::RESERVATION_REGISTER, 2, [key(host), fresh]),
        4 => (nvm::RESERVATION_ACQUIRE, rtype << 8, [key(host), 0]),
        5 => {
            let what = 1 + dice.u32(..2);
            (
                nvm::RESERVATION_ACQUIRE,
                what | rtype << 8,
                [key(host), other],
            )
        }
        _ => {
            let charge = state.reservation_type().map_or(1, |t| t as u32);
            let what = u32::from(dice.u64(..3) == 0);
            (nvm::RESERVATION_RELEASE, what | charge << 8, [key(host), 0])
        }
    }
}

fn run(seed: u64, commands: u32, mut point: impl FnMut(u32) -> Option<&'static str>) {
    let mut world = World::new(seed);
    let mut hosts: Vec<Vec<Queue>> = Vec::new();
    for host in 0..2u8 {
        world.host_id = [host + 1; 16];
        hosts.push(world.associate(1, host == 1));
    }
    let mut daemon = Daemon::default();
    let mut model = Reservations::default();
    let (mut good, mut refused) = (0, 0);
    for n in 0..commands {
        let host = world.dice.usize(..2);
        let (opcode, cdw10, keys) = some_command(&mut world.dice, &model, host);
        let queue = &mut hosts[host][1];
        let cid = n as u16 % 500;
        let in_capsule = world.dice.u64(..2) == 0;
        let bytes: Vec<u8> = keys.into_iter().flat_map(u64::to_le_bytes).collect();
        let mut sqe = Sqe::new(opcode, cid).with_nsid(1).with_cdw(10, cdw10);
        let data = &bytes[..reservation::key_bytes(reservation::action_of(&sqe)) as usize];
        sqe = sqe.with_sgl(match in_capsule {
            true => SglDescriptor::in_capsule(0, data.len() as u32),
            false => SglDescriptor::transport(data.len() as u32),
        });
        let wanted = ReservationCommand::new(reservation::action_of(&sqe), keys)
            .and_then(|command| model.apply([host as u8 + 1; 16], &command))
            .map_or_else(|status| status, |_| Status::SUCCESS);
        *(if wanted == Status::SUCCESS {
            &mut good
        } else {
            &mut refused
        }) += 1;
        queue.put(&sqe, if in_capsule { data } else { &[] });
        if n % 2 == 0 {
            world.kill_somewhere(point(n / 2));
        }
        let (mut answer, mut turns) = (None, 0);
        while answer.is_none() {
            turns += 1;
            patience(turns, "an answer");
            let generation = world.generation;
            let said = world.turn();
            if world.generation != generation {
                // The successor's reactors repeat all open requests.
                daemon.asked.clear();
            }
            daemon.hear(said);
            daemon.turn(&mut world);
            let queue = &mut hosts[host][1];
            for (pdu, _) in queue.exchange(&mut world.dice) {
                match pdu {
                    Pdu::R2t(r2t) => queue.answer(&r2t, data),
                    Pdu::CapsuleResp(cqe) => {
                        assert_eq!((cqe.cid(), answer), (cid, None), "answered once");
                        answer = Some(cqe.status());
                    }
                    other => panic!("{other:?}"),
                }
            }
        }
        assert_eq!(answer, Some(wanted), "{n}: {opcode:#x} {cdw10:#x} {keys:?}");
        assert_eq!(daemon.durable.0, model);
    }
    arm_here("over.adopted", 0);
    assert!(good > commands / 4 && refused > 0, "{good} {refused}");
    assert!(daemon.deaths.iter().all(|n| *n > 0) && world.generation > 5);
}

#[test]
fn reservations_survive_takeover() {
    run(1, 200, |_| None);
    run(2, 400, |n| {
        let io: Vec<_> = (SERVING.iter())
            .filter(|p| !["core", "admin", "aer"].iter().any(|no| p.starts_with(no)))
            .collect();
        Some(io[n as usize % io.len()])
    });
}
