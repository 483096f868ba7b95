//! A fixed run whose instructions `cargo xtask bench recording` counts.
//!
//! Only [`counted_turn`] is counted (by its name), once all is warm. `FOREBAY_COST` selects the
//! run: `read:8:1000` for 1000 times eight reads of 4 KiB on a null device; `read:8:1000::admitted`
//! adds a tenant with ample budget.

use super::rig::{Host, Rig, rig_on, rw, write_in_capsule};
use crate::frontend::Frontend;
use forebay_nvme::tcp::Pdu;
use forebay_xlate::boundary::message::ExportId;
use std::sync::atomic::Ordering::Relaxed;

const VARIABLE: &str = "FOREBAY_COST";
/// Enough rounds that the idle admin queue has left the active list.
const WARM_ROUNDS: u64 = 2500;

#[test]
fn batches_are_executed() {
    let wanted = std::env::var(VARIABLE).unwrap_or("write:8:1".into());
    let mut words = wanted.split(':');
    let is_write = words.next() == Some("write");
    let mut number = || words.next().and_then(|word| word.parse().ok()).unwrap();
    let (batch, rounds): (u64, u64) = (number(), number());
    let admitted = words.nth(1) == Some("admitted");
    let mut rig = rig_on("null");
    rig.map_all();
    let (_admin, cntlid) = rig.admin();
    let mut host = rig.io(cntlid, 1, 128);
    for round in 0..WARM_ROUNDS + rounds {
        for i in 0..batch {
            let (cid, lba) = (i as u16, (round * 7 + i * 5) % 4096);
            match is_write {
                true => host.say(&write_in_capsule(cid, lba, 1), &[1; 4096]),
                false => host.say(&rw(2, cid, lba, 1), &[]),
            }
        }
        if admitted {
            rig.core.admit_plenty(round);
            rig.frontend.shares_changed(&rig.core);
        }
        match round < WARM_ROUNDS {
            true => turn(&mut rig),
            false => counted_turn(&mut rig),
        }
        assert_eq!(answers(&mut host), batch);
    }
    let lane = rig.core.lanes.of_export(ExportId(1)).unwrap();
    let record = rig.core.lane(lane).unwrap().record();
    assert_eq!(record.throttled_ops.load(Relaxed), 0);
}

/// One suffices: a null device completes at once.
fn turn(rig: &mut Rig) {
    rig.core.begin_turn();
    rig.core.reap();
    rig.frontend.poll(&mut rig.core, &mut |_| false);
    rig.core.end_turn();
}

#[inline(never)]
fn counted_turn(rig: &mut Rig) {
    turn(std::hint::black_box(rig));
}

fn answers(host: &mut Host) -> u64 {
    let mut count = 0;
    while let Some((pdu, _)) = host.hear() {
        count += match pdu {
            Pdu::C2hData(data) => u64::from(data.success),
            Pdu::CapsuleResp(_) => 1,
            other => panic!("{other:?}"),
        };
    }
    count
}
