//! What is paid for ahead is seen by nobody.

use super::*;
use crate::cost::{FRONTENDS, OPERATIONS, Profile};

/// The lengths that are asked for: one is no whole number of blocks, one longer than any row.
const LENGTHS: [u32; 5] = [4096, 4096, 8192, 1000, 1 << 20];
const TENANTS: usize = 3;

struct Draw(u64);

impl Draw {
    fn below(&mut self, count: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 16) % count
    }

    fn of<T: Copy>(&mut self, all: &[T]) -> T {
        all[self.below(all.len() as u64) as usize]
    }

    fn budget(&mut self) -> Budget {
        let base = 1000 + self.below(200_000);
        budget(base, base * (1 + self.below(3)), Burst::Metered)
    }

    fn costs(&mut self) -> CostTable {
        let mut line = || (self.below(2000) as f64, self.below(100) as f64 / 1000.0);
        CostTable::new([(); 3].map(|()| [(); 3].map(|()| Profile::line(line(), line(), 96))))
    }
}

/// The same twice: one of them charges each I/O when it comes.
struct Both {
    short: Scheduler,
    plain: Scheduler,
    open: [Option<Frontend>; TENANTS],
}

impl Both {
    fn each(&mut self, mut what: impl FnMut(&mut Scheduler)) {
        what(&mut self.short);
        what(&mut self.plain);
    }

    fn open(&mut self, lane: usize, frontend: Frontend) {
        self.each(|one| one.open(lane, frontend));
        self.open[lane] = Some(frontend);
    }

    fn shut(&mut self, lane: usize) {
        self.each(|one| one.shut(lane));
        self.open[lane] = None;
    }

    /// What [`Scheduler::pass`] says of the plain one.
    fn plainly(&mut self, lane: usize, cost: Option<&Units>) -> Option<bool> {
        let purse = &mut self.plain.lanes[lane].purse;
        self.open[lane]?;
        let cost = cost?;
        if !purse.left_mut().take(cost) {
            return None;
        }
        let part_ns = purse.part_ns();
        purse.set_part_ns(part_ns - cost[Resource::Cpu]);
        Some(part_ns <= cost[Resource::Cpu])
    }

    fn assert_alike(&self) {
        for (short, plain) in self.short.lanes.iter().zip(&self.plain.lanes) {
            assert_eq!(short.purse.left(), plain.purse.left());
            assert_eq!(short.purse.part_ns(), plain.purse.part_ns());
            assert_eq!(short.used(), plain.used());
        }
        for tenant in 0..TENANTS {
            assert_eq!(self.short.seen(tenant), self.plain.seen(tenant));
        }
    }
}

/// Whatever comes in whatever order, and whatever is changed meanwhile: the short way says what it would say if it charged each I/O
/// when it comes, and at any time what is left is the same.
#[test]
fn the_short_way_charges_what_the_table_says() {
    // I/Os that passed, those that were paid for ahead, those that used a part up, those that did not pass.
    let mut counts = [0u32; 4];
    for seed in 1..60u64 {
        let mut draw = Draw(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15));
        let mut costs = draw.costs();
        let budgets = [(); TENANTS].map(|()| draw.budget());
        let make = || Bench::new(&budgets, params()).scheduler;
        let mut both = Both {
            short: make(),
            plain: make(),
            open: [None; TENANTS],
        };
        let (mut lane, mut operation, mut len) = (0, Operation::Read, 4096);
        for _ in 0..3000 {
            let other = draw.below(TENANTS as u64) as usize;
            match draw.below(48) {
                0 => both.each(|one| one.turn(1)),
                1 => {
                    let budget = draw.budget();
                    both.each(|one| one.set_budget(other, &budget, &costs));
                }
                2 | 3 => both.open(other, draw.of(&FRONTENDS)),
                4 => both.shut(other),
                5 if draw.below(8) == 0 => {
                    (0..TENANTS).for_each(|lane| both.shut(lane));
                    costs = draw.costs();
                }
                6 => {
                    // Some are used up to the last bit.
                    let frontend = both.open[other].unwrap_or(Frontend::Tcp);
                    let part_ns = match draw.below(2) {
                        0 => draw.below(60_000) as i32 - 5000,
                        _ => 8 * costs.of(frontend, operation, len)[Resource::Cpu],
                    };
                    both.each(|one| one.set_part_ns(other, part_ns));
                }
                7 => both.each(|one| one.begin_batch(other)),
                8 => {
                    let cost = costs.of(Frontend::Tcp, Operation::Other, 0);
                    both.each(|one| one.owe(other, &cost));
                }
                9..=12 => lane = other,
                13..=18 => operation = draw.of(&OPERATIONS),
                19..=22 => len = draw.of(&LENGTHS),
                _ => {}
            }
            let before = both.short.lanes[lane].purse.clone();
            let frontend = both.open[lane].unwrap_or(Frontend::Tcp);
            let cost = costs.row(frontend.kinds(), operation, len).copied();
            let said = both.plainly(lane, cost.as_ref());
            assert_eq!(both.short.pass(lane, &costs, operation, len), said);
            counts[0] += u32::from(said.is_some());
            counts[1] += u32::from(before.is_paid_for(operation, len));
            counts[2] += u32::from(said == Some(true));
            counts[3] += u32::from(said.is_none());
            if said.is_none() {
                let cost = costs.of(frontend, operation, len);
                let admitted = [&mut both.short, &mut both.plain].map(|one| one.admit(lane, &cost));
                assert_eq!(admitted[0], admitted[1]);
            }
            // Not each time: what is looked at is not changed by it.
            if draw.below(4) == 0 {
                both.assert_alike();
            }
        }
    }
    assert!(counts.iter().all(|count| *count > 5000), "{counts:?}");
}
