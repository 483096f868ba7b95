//! Records with arbitrary words.

use super::*;

/// All words of a queue's records, and of its association.
fn words(dead: &Dead, queue: u32, controller: u32) -> Vec<&AtomicU64> {
    let region = dead.region.memory();
    let at = |cell: *const u64| cell as usize;
    let base = at((&raw const dead.region.header().generation).cast()) - 16;
    let place = |from: usize, len: usize| {
        region
            .cells::<AtomicU64>(from - base, len / 8)
            .unwrap()
            .iter()
    };
    let q = &dead.region.queues()[queue as usize];
    let c = &dead.region.controllers()[controller as usize];
    let commands = &dead.region.commands(queue as usize)[..8];
    let items = &dead.region.items(queue as usize)[..4];
    place(at((&raw const *q).cast()), size_of_val(q))
        .chain(place(at(commands.as_ptr().cast()), size_of_val(commands)))
        .chain(place(at(items.as_ptr().cast()), size_of_val(items)))
        .chain(place(at((&raw const *c).cast()), 64 + 2 * 416))
        .collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, ..ProptestConfig::default() })]
    /// Damage in one association leaves the others unchanged, and yields only buffers of its own
    /// commands.
    #[test]
    fn damage_ends_one_association_at_most(
        changes in proptest::collection::vec((any::<prop::sample::Index>(), any::<u64>(), 0u8..4, 0usize..3), 1..6),
        consumed in 0u64..6000,
        accepted in 0u64..6000,
    ) {
        let mut dead = Dead::new();
        for (slot, first) in [(2, 10), (5, 20), (6, 30)] {
            dead.association(slot, first, 2);
            for queue in first..first + 3 {
                let mut end = CONNECTED;
                for slot in 0..5u16 {
                    end += 72;
                    let number = 2 + u64::from(slot);
                    let command = dead.command(queue, slot, number, end, block_write(slot, number));
                    if slot == 3 {
                        let state = CommandState::taken(number).with_stage(CommandStage::Asked);
                        command.state.store(state.0, Relaxed);
                    }
                }
                let record = &dead.region.queues()[queue as usize];
                record.number.store(6, Relaxed);
                record.taken.store(end, Relaxed);
                dead.answer(queue, ANSWERED, 1, 100);
                dead.answer(queue, ANSWERED + 124, 0, 0);
            }
        }
        let end = CONNECTED + 5 * 72;
        let all: Vec<u32> = [10, 20, 30].iter().flat_map(|q| *q..q + 3).collect();
        let mut sockets = facts(&all, end, ANSWERED + 50);
        let before = plan(&dead.region, &dead, &sockets, None, &lanes(), 5);
        prop_assert_eq!(summary(&before), (all.clone(), vec![]));
        let of = |plan: &Plan, slot: u32| {
            let found = plan.controllers.iter().find(|c| c.slot == slot);
            format!("{:?}", found.map(|c| (c.constants, &c.controller.state().cc, c.queues.iter().map(|q| format!("{:?}", (&q.old, &q.converted))).collect::<Vec<_>>())))
        };
        let good = [of(&before, 2), of(&before, 6)];

        for (index, value, kind, queue) in &changes {
            let all = words(&dead, 20 + *queue as u32, 5);
            let word = all[index.index(all.len())];
            match kind {
                0 => { word.fetch_xor(1 << (value % 64), Relaxed); }
                1 => { word.fetch_xor(0xff << (value % 57), Relaxed); }
                2 => word.store(value % 7000, Relaxed),
                _ => word.store(*value, Relaxed),
            }
        }
        // The kernel's counters are trusted, but may contradict the records.
        if consumed % 3 == 0 {
            let facts = SocketFacts { consumed, accepted };
            sockets[4].1 = Ok(facts);
        }
        let after = plan(&dead.region, &dead, &sockets, None, &lanes(), 5);
        prop_assert_eq!([of(&after, 2), of(&after, 6)], good);
        for queue in after.controllers.iter().flat_map(|c| &c.queues) {
            for (command, _) in &queue.converted.commands {
                let own = buffer(u64::from(queue.old.queue) * 256 + command.number);
                prop_assert!(command.buffer.is_none_or(|b| b == own));
                prop_assert!(usize::from(command.slot) < MAX_QUEUE_ENTRIES);
            }
        }
        // Every socket has exactly one outcome.
        let live = after.controllers.iter().flat_map(|c| &c.queues).map(|q| q.socket);
        let mut fates: Vec<usize> = live.chain(after.closed.iter().map(|c| c.0)).chain(after.handshakes.clone()).collect();
        fates.sort_unstable();
        prop_assert_eq!(fates, (0..sockets.len()).collect::<Vec<_>>());
    }
}
