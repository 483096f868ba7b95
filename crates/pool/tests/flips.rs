//! One flipped bit anywhere in label and catalog. With two copies it is repaired and reported; with
//! one, an error or the correct content. Never a panic.

mod common;

use common::{
    pools::{AREA, DEVICE_BYTES, add_volume, create_on, open_on, volumes},
    powercut::Power,
};
use forebay_pool::ErrorKind;
use proptest::prelude::*;
use std::sync::OnceLock;

/// A label's second copy; and an area's headers and checksum tables, with two slots each for two
/// tables.
const SECOND_LABEL: u64 = 512 << 10;
const META_BYTES: u64 = 6 * 4096;

struct Made {
    power: Power,
    expected: Vec<String>,
    /// Label and catalog blocks in use.
    used: Vec<u64>,
}

fn made() -> &'static Made {
    static MADE: OnceLock<Made> = OnceLock::new();
    MADE.get_or_init(|| {
        let power = Power::new(&[DEVICE_BYTES; 2]);
        let (mut pool, catalog) = create_on(&power, &[0, 1], false).unwrap();
        for n in 0..60 {
            assert!(add_volume(&mut pool, &catalog, &format!("volume-{n}")));
        }
        let expected = volumes(&pool);
        std::mem::forget(catalog);
        let used = power.stores()[0].used_blocks();
        Made {
            expected,
            used: used.into_iter().filter(|at| *at < AREA.end).collect(),
            power,
        }
    })
}

/// With the other device, and alone.
fn check(which: usize, offset: u64, bit: u8) {
    let made = made();
    let power = made.power.after_kill();
    power.stores()[which].flip(offset, bit);
    let opened = open_on(&power, &[0, 1]).unwrap();
    assert_eq!(volumes(&opened.pool), made.expected, "{offset} on {which}");
    assert!(opened.missing.is_empty());
    opened.catalog.scrub().unwrap();
    let health = opened.catalog.health();
    assert!(health.is_whole(), "{offset} on {which}");
    // Blocks that the database no longer needs may be bad unnoticed.
    let is_ours = [0, SECOND_LABEL]
        .iter()
        .any(|at| (*at..at + 4096).contains(&offset))
        || (AREA.start..AREA.start + META_BYTES).contains(&offset);
    assert!(
        !is_ours || health.repaired_blocks > 0 && !health.notes.is_empty(),
        "{offset} on {which}: nothing is said of it: {health:?}"
    );
    drop(opened);
    let again = open_on(&power, &[which]).unwrap();
    assert_eq!(volumes(&again.pool), made.expected, "{offset} on {which}");
    drop(again);
    let power = made.power.after_kill();
    power.stores()[which].flip(offset, bit);
    match open_on(&power, &[which]) {
        Ok(opened) => assert_eq!(volumes(&opened.pool), made.expected, "{offset} on {which}"),
        Err(error) => assert!(
            matches!(error.kind, ErrorKind::Damaged | ErrorKind::Invalid),
            "{offset} on {which}: {error}"
        ),
    }
}

#[test]
fn a_flipped_bit_in_any_block_costs_nothing() {
    let made = made();
    assert!(made.used.len() > 20, "{}", made.used.len());
    for (nth, block) in made.used.iter().enumerate() {
        check(nth % 2, block + (nth as u64 * 797) % 4096, nth as u8);
    }
}

#[test]
fn a_broken_label_is_mended_and_reported() {
    for copy in [0, SECOND_LABEL] {
        let power = made().power.after_kill();
        power.stores()[1].flip(copy + 50, 3);
        let opened = open_on(&power, &[0, 1]).unwrap();
        assert!(
            opened
                .notes
                .iter()
                .any(|note| note.contains("label") && note.contains("repaired"))
        );
        let health = opened.catalog.health();
        assert!(health.notes.iter().any(|note| note.contains("label")));
        assert_eq!(health.repaired_blocks, 1, "{health:?}");
        drop(opened);
        assert_eq!(
            power.stores()[1].peek(0),
            power.stores()[1].peek(SECOND_LABEL)
        );
    }
    // With both copies of its label broken, the device is unknown, and the pool goes on.
    let power = made().power.after_kill();
    power.stores()[1].flip(50, 3);
    power.stores()[1].flip(SECOND_LABEL + 50, 3);
    let opened = open_on(&power, &[0, 1]).unwrap();
    assert_eq!(opened.missing.len(), 1);
    assert!(
        opened
            .notes
            .iter()
            .any(|note| note.contains("label fails its checksum"))
    );
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn a_flipped_bit_at_any_offset_costs_nothing(block in any::<prop::sample::Index>(), at in 0u64..4096, bit in 0u8..8, which in 0usize..2) {
        let used = &made().used;
        check(which, used[block.index(used.len())] + at, bit);
    }
}
