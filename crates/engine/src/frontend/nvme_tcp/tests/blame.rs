//! The blame word while a reactor works for other connections, or for none.

use super::rig::Rig;
use super::*;
use forebay_xlate::boundary::region::Blame;
use forebay_xlate::kill::{Killed, arm_here};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering::Relaxed;

fn blamed(rig: &Rig) -> Option<Blame> {
    Blame::of_word(rig.core.record().blame.load(Relaxed))
}

/// The blame of an engine that dies at this point.
fn blamed_at(rig: &mut Rig, point: &str) -> Option<Blame> {
    arm_here(point, 1);
    for _ in crate::patience::patiently() {
        match catch_unwind(AssertUnwindSafe(|| rig.turns(1))) {
            Ok(()) => {}
            Err(why) => {
                assert!(why.is::<Killed>());
                return blamed(rig);
            }
        }
    }
    panic!("{point} does not come");
}

#[test]
fn a_command_is_not_blamed_for_later_sends_or_receives() {
    for point in ["tx.sent", "rx.received"] {
        let mut rig = rig();
        rig.map_all();
        let (_admin, cntlid) = rig.admin();
        let mut host = rig.io(cntlid, 1, 32);
        rig.turns(3);
        host.say(&write_in_capsule(1, 0, 1), &[1; 4096]);
        if point == "rx.received" {
            rig.turns(50);
            assert_eq!(blamed(&rig), None, "nobody's turn is over");
            host.say(&write_in_capsule(2, 0, 1), &[1; 4096]);
        }
        let blamed = blamed_at(&mut rig, point).expect("the connection is");
        assert_eq!(blamed.slot, None, "{point}");
    }
}
