//! Arbitrary doorbells, guest memory and recorded states.

use super::data::pieces;
use super::*;
use crate::pcie::queue::{Cq, Sq, near, place};
use proptest::prelude::*;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    /// No command is taken twice or too early, and no unseen completion is overwritten.
    #[test]
    fn cursors_keep_to_their_queue(
        sq_entries in 2u32..40,
        cq_entries in 2u32..40,
        steps in proptest::collection::vec((0u8..4, 0u32..50), 1..200),
    ) {
        let mut sq = Sq::new(sq_entries, 1, 0);
        let mut cq = Cq::new(cq_entries, None, 0, 0);
        let mut unseen = 0u32;
        for (step, value) in steps {
            match step {
                0 => prop_assert_eq!(sq.set_tail(value).is_err(), value >= sq_entries),
                1 => {
                    let (from, run) = sq.run();
                    prop_assert!(from + run <= sq_entries && run < sq_entries);
                    let n = run.min(cq.room()).min(value);
                    sq.consume(n);
                    (0..n).for_each(|_| cq.reserve());
                }
                2 => {
                    for _ in 0..cq.reserved().min(value) {
                        prop_assert_eq!(cq.next(), place(cq_entries, cq.posted()));
                        cq.post();
                        unseen += 1;
                    }
                    prop_assert!(unseen < cq_entries);
                }
                _ => {
                    let before = cq.head();
                    if cq.set_head(value).is_ok() {
                        unseen -= (value + cq_entries - before) % cq_entries;
                    }
                }
            }
            let again = Sq::new(sq_entries, 1, sq.taken());
            prop_assert_eq!(again.head(), sq.head());
            let again = Cq::new(cq_entries, None, cq.posted(), cq.head());
            prop_assert_eq!((again.next(), again.room()), (cq.next(), cq.room() + cq.reserved().min(cq_entries - 1 - unseen)));
            prop_assert_eq!(near(cq.posted(), cq.posted() as u32 + 3), cq.posted() + 3);
        }
    }

    #[test]
    fn any_data_pointer_gives_what_the_command_moves_or_an_error(
        dptr: [u8; 16],
        flags: u8,
        bytes in 0u32..600_000,
        seed: u64,
    ) {
        let memory = Flat::new(64 << 10);
        let mut x = seed | 1;
        for at in 0..(64 << 7) {
            x = x.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            memory.put(at * 8, &(x >> 40 & !0xFFF).to_le_bytes());
        }
        let mut sqe = Sqe::new(1, 1);
        sqe.flags = flags;
        sqe.dptr = dptr;
        sqe.dptr[3..8].fill(0);
        let _ = pieces(&memory, &sqe, bytes);
    }

    #[test]
    fn any_state_is_refused_or_can_be_gone_on_with(bytes in proptest::collection::vec(any::<u8>(), 64), at in 0usize..6000) {
        let mut bench = Bench::ready();
        bench.create_cq(1, 64);
        let mut state = *bench.function.state();
        let raw = state.as_mut_bytes();
        let at = at.min(raw.len() - 64);
        raw[at..at + 64].copy_from_slice(&bytes);
        if let Ok(function) = Function::restore(config(), &state) {
            bench.function = function;
            if bench.function.ready() {
                bench.admin(&identify(1));
                bench.create_sq(1, 64, 1);
            }
        }
    }
}
