//! A fixed run whose instructions `cargo xtask bench instructions` counts.
//!
//! `FOREBAY_COST` selects kind, depth, rounds and doorbells: `read:8:1000:mapped`; with
//! `:admitted`, for a tenant with ample budget. See `frontend::nvme_tcp::tests::cost`.

use super::*;

/// Rounds before the counted ones.
const WARM_ROUNDS: u64 = 100;

#[test]
fn commands_are_executed() {
    let wanted = std::env::var("FOREBAY_COST").unwrap_or("write:8:1:mapped".into());
    let words: Vec<&str> = wanted.split(':').collect();
    let opcode = match words[0] {
        "read" => nvm::READ,
        _ => nvm::WRITE,
    };
    let (batch, rounds): (u64, u64) = (words[1].parse().unwrap(), words[2].parse().unwrap());
    let doorbells = match words.get(3) {
        Some(&"shadow") => Doorbells::Shadow,
        _ => Doorbells::Mapped,
    };
    let (mut rig, mut driver, mut pair) = ready("null", doorbells);
    for round in 0..WARM_ROUNDS + rounds {
        for i in 0..batch {
            let (lba, at) = ((round * 7 + i * 5) % 256, DATA + i * BLOCK);
            driver.queue(&mut pair, &io(opcode, i as u16, lba, at));
        }
        driver.ring(8, pair.tail);
        if words.get(4) == Some(&"admitted") {
            rig.admit_plenty(round);
        }
        match round < WARM_ROUNDS {
            true => rig.bare_turn(),
            false => counted_turn(&mut rig),
        }
        for _ in 0..batch {
            let cqe = driver.next(&mut pair).expect("it is done at once");
            assert!(cqe.status().is_success());
        }
    }
    assert_eq!(rig.throttled(0), [0; 3]);
}

#[inline(never)]
fn counted_turn(rig: &mut Rig) {
    std::hint::black_box(rig).bare_turn();
}
