//! Compare-and-write while engines die: each reported write happened once.
//!
//! All queues count in one block, by pairs that expect the last value and write the next. If a
//! landed pair were repeated, its compare would fail, and the block would exceed the hosts' sum.

use super::take_over::{Engine, SERVING, World};
use super::take_over_hosts::{BLOCK, Queue, patience};
use forebay_nvme::tcp::Pdu;
use forebay_nvme::{SglDescriptor, Sqe, Status};
use forebay_xlate::kill::arm_here;

/// The counter block, beyond those of other tests.
const COUNTER: u64 = 700;
const FUSED: &[&str] = &[
    "fused.flushing",
    "fused.compared",
    "fused.passed",
    "fused.put",
];

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Doing {
    Nothing,
    Read,
    /// The first's identifier, and its status once answered.
    Pair(u16, Option<Status>),
}

struct Counting {
    queue: Queue,
    doing: Doing,
    /// The block's last known content: count and tag of the write.
    seen: [u64; 2],
    read: Vec<u8>,
    counted: u64,
    failed: u64,
    tag: u64,
}

fn block([count, tag]: [u64; 2]) -> Vec<u8> {
    let words = (0..u64::from(BLOCK) / 8).map(|i| match i {
        1 => tag,
        _ => count,
    });
    words.flat_map(u64::to_le_bytes).collect()
}

impl Counting {
    fn rw(&mut self, opcode: u8, fuse: u8, fua: bool, in_capsule: bool, data: &[u8]) -> u16 {
        let cid = self.queue.next_cid;
        self.queue.next_cid = (cid + 1) % 500;
        let sgl = match in_capsule {
            true => SglDescriptor::in_capsule(0, BLOCK),
            false => SglDescriptor::transport(BLOCK),
        };
        let mut sqe = Sqe::new(opcode, cid)
            .with_nsid(1)
            .with_cdw64(10, COUNTER)
            .with_cdw(12, u32::from(fua) << 30)
            .with_sgl(sgl);
        sqe.flags |= fuse;
        self.queue.put(&sqe, if in_capsule { data } else { &[] });
        cid
    }

    fn next(&self) -> [u64; 2] {
        [self.seen[0] + 1, self.tag]
    }

    fn go_on(&mut self, world: &mut World, begin: bool) {
        if self.doing == Doing::Nothing && begin {
            if world.dice.u64(..3) == 0 || self.failed % 2 == 1 {
                self.failed += self.failed % 2;
                self.read.clear();
                self.rw(2, 0, false, false, &[]);
                self.doing = Doing::Read;
            } else {
                self.tag += 1;
                let (was, is) = (block(self.seen), block(self.next()));
                let (a, b) = (world.dice.u64(..3) > 0, world.dice.u64(..3) > 0);
                let fua = world.dice.u64(..4) == 0;
                let first = self.rw(5, 1, fua, a, &was);
                self.rw(1, 2, false, b, &is);
                self.doing = Doing::Pair(first, None);
            }
        }
        for (pdu, data) in self.queue.exchange(&mut world.dice) {
            match (pdu, self.doing) {
                (Pdu::C2hData(c2h), Doing::Read) => {
                    self.read.extend(data);
                    if c2h.success {
                        self.has_read();
                    }
                }
                (Pdu::CapsuleResp(cqe), Doing::Read) => {
                    assert_eq!(cqe.status(), Status::SUCCESS);
                    self.has_read();
                }
                (Pdu::R2t(r2t), Doing::Pair(first, _)) => {
                    let data = match r2t.cid == first {
                        true => block(self.seen),
                        false => block(self.next()),
                    };
                    self.queue.answer(&r2t, &data);
                }
                (Pdu::CapsuleResp(cqe), Doing::Pair(first, None)) => {
                    assert_eq!(cqe.cid(), first, "in their order");
                    self.doing = Doing::Pair(first, Some(cqe.status()));
                }
                (Pdu::CapsuleResp(cqe), Doing::Pair(_, Some(compared))) => {
                    match (compared, cqe.status()) {
                        (Status::SUCCESS, Status::SUCCESS) => {
                            self.counted += 1;
                            self.seen = self.next();
                        }
                        (Status::COMPARE_FAILURE, Status::ABORTED_FAILED_FUSED) => {
                            self.failed += 1 + self.failed % 2;
                        }
                        other => panic!("{other:?}"),
                    }
                    self.doing = Doing::Nothing;
                }
                other => panic!("{other:?}"),
            }
        }
    }

    fn has_read(&mut self) {
        let word = |at: usize| u64::from_le_bytes(self.read[at..at + 8].try_into().unwrap());
        let seen = [word(0), word(8)];
        assert!(self.read == block(seen), "a torn block");
        assert!(seen[0] >= self.seen[0], "the counter falls");
        self.seen = seen;
        self.doing = Doing::Nothing;
    }
}

fn count(seed: u64, deaths: u32, mut point: impl FnMut(u32) -> Option<&'static str>) {
    let mut world = World::new(seed);
    let mut queues = world.associate(2, false);
    queues.extend(world.associate(2, true));
    let mut hosts: Vec<Counting> = (1..)
        .zip(queues)
        .map(|(host, queue)| Counting {
            queue,
            doing: Doing::Nothing,
            seen: [0; 2],
            read: Vec::new(),
            counted: 0,
            failed: 0,
            tag: host << 32,
        })
        .collect();
    // Admin queues stay idle.
    let is_io = |host: &&mut Counting| host.queue.qid > 0;
    for round in 0..deaths {
        let armed = world.generation;
        let point = point(round);
        world.kill_somewhere(point);
        let mut turns = 0;
        let all = |hosts: &[Counting]| hosts.iter().map(|host| host.counted).sum::<u64>();
        let before = all(&hosts);
        while world.generation == armed || all(&hosts) == before {
            turns += 1;
            patience(turns, point.unwrap_or("this turn"));
            for host in hosts.iter_mut().filter(is_io) {
                host.go_on(&mut world, true);
            }
            world.step(Engine::turn);
        }
    }
    arm_here("over.adopted", 0);
    let mut turns = 0;
    while hosts.iter().any(|host| host.doing != Doing::Nothing) {
        turns += 1;
        patience(turns, "the end of every command");
        for host in hosts.iter_mut().filter(is_io) {
            host.go_on(&mut world, false);
        }
        world.step(Engine::turn);
    }
    let counted: u64 = hosts.iter().map(|host| host.counted).sum();
    let last = &mut hosts[1];
    last.failed = 1;
    while last.failed == 1 || last.doing != Doing::Nothing {
        last.go_on(&mut world, true);
        if last.failed != 1 && last.doing == Doing::Nothing {
            break;
        }
        world.step(Engine::turn);
    }
    assert_eq!(last.seen[0], counted);
    assert!(counted >= u64::from(deaths), "{counted} in {deaths} lives");
}

#[test]
fn compare_and_write_not_repeated() {
    count(1, 60, |n| Some(FUSED[n as usize % FUSED.len()]));
    count(2, 2 * SERVING.len() as u32, |n| match n % 3 {
        0 => None,
        _ => SERVING
            .iter()
            .filter(|p| !p.starts_with("admin") && !p.starts_with("aer"))
            .nth(world_point(n))
            .copied(),
    });
}

fn world_point(n: u32) -> usize {
    n as usize * 7 % 22
}
