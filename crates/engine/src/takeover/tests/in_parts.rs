//! A command with several R2Ts, after a death at each moment.

use super::*;
use forebay_xlate::boundary::region::{AskedAt, R2T_PART_BYTES as PART};

const LEN: u32 = 300 << 10;
const SLOT: u16 = 2;

/// Queue 4 with one command of three parts, of which `dwords` came; returns the end of its stream.
fn asked(dwords: [u16; 4]) -> (Dead, u64) {
    let dead = Dead::new();
    dead.queue(4, 0, 1);
    let end = CONNECTED + 72;
    dead.command(4, SLOT, 2, end, block_write(17, 8));
    dead.ask_in_parts(4, SLOT, LEN, dwords);
    let record = &dead.region.queues()[4];
    record.number.store(2, Relaxed);
    record.taken.store(end, Relaxed);
    (dead, end)
}

fn asked_at(dead: &Dead, at: u64, r2ts: u8) {
    let word = AskedAt { at, r2ts }.word();
    dead.region.commands(4)[usize::from(SLOT)]
        .asked_at
        .store(word, Relaxed);
}

fn next(dead: &Dead, consumed: u64) -> Result<Next, Damage> {
    dead.convert(4, consumed, ANSWERED).map(|c| c.commands[0].1)
}

#[test]
fn an_r2t_that_was_not_published_is_none() {
    let dwords = [7, 0, 0, 0];
    let (dead, end) = asked(dwords);
    let came = Asked::Parts(dwords);
    for r2ts in 2..=3 {
        asked_at(&dead, ANSWERED, r2ts);
        assert_eq!(next(&dead, end), Ok(Next::Data { asked: came, r2ts }));
        asked_at(&dead, ANSWERED + 24, r2ts);
        let before = Next::Data {
            asked: came,
            r2ts: r2ts - 1,
        };
        assert_eq!(next(&dead, end), Ok(before));
        // The successor's own record.
        let c = dead.convert(4, end, ANSWERED).unwrap();
        let at = AskedAt {
            at: ANSWERED,
            r2ts: r2ts - 1,
        };
        assert_eq!(c.commands[0].0.asked_at, at);
    }
    // The first R2T: all data is requested again.
    asked_at(&dead, ANSWERED + 24, 1);
    let fenced = FenceSet::None;
    assert_eq!(next(&dead, end), Ok(Next::Begin { fenced }));
}

#[test]
fn a_part_counts_in_whole_pdus() {
    let full = (PART / 4) as u16;
    let (dead, end) = asked([full, 2, 0, 0]);
    let record = &dead.region.queues()[4];
    let data = InData {
        begin: end + 24,
        end: end + 24 + 4096,
        slot: SLOT,
        offset_bytes: PART + 8,
        digest: false,
    };
    record.put_data(&data);
    for (dwords, taken) in [
        (2, data.begin),
        (2, data.begin + 512),
        (1026, data.begin + 512),
    ] {
        // Its last piece may be counted but not placed.
        dead.ask_in_parts(4, SLOT, LEN, [full, dwords, 0, 0]);
        record.taken.store(taken, Relaxed);
        let c = dead.convert(4, taken, ANSWERED).unwrap();
        assert_eq!((c.taken, c.data), (taken, Some(data)));
        let came = Asked::Parts([full, 2, 0, 0]);
        assert_eq!(
            c.commands[0].1,
            Next::Data {
                asked: came,
                r2ts: 3
            }
        );
    }
    record.taken.store(data.end, Relaxed);
    let came = Asked::Parts([full, 1026, 0, 0]);
    assert_eq!(
        next(&dead, data.end),
        Ok(Next::Data {
            asked: came,
            r2ts: 3
        })
    );
    // Data beyond the part's end.
    let over = InData {
        offset_bytes: 2 * PART - 8,
        ..data
    };
    record.put_data(&over);
    record.taken.store(data.begin, Relaxed);
    assert!(next(&dead, data.begin).is_err());
}

#[test]
fn data_without_an_r2t_is_damage() {
    let full = (PART / 4) as u16;
    let rest = ((LEN - 2 * PART) / 4) as u16;
    let (all, end) = asked([full, full, rest, 0]);
    let fenced = FenceSet::None;
    assert_eq!(next(&all, end), Ok(Next::Begin { fenced }));
    for dwords in [
        [full + 1, 0, 0, 0],
        [0, 0, rest + 1, 0],
        [0, 0, 0, 1],
        [full, full, rest, 1],
    ] {
        let (dead, end) = asked(dwords);
        assert!(next(&dead, end).is_err(), "{dwords:?}");
    }
    let (dead, end) = asked([0, 0, 0, 0]);
    asked_at(&dead, ANSWERED, 4);
    assert!(next(&dead, end).is_err(), "more R2Ts than parts");
    let (dead, end) = asked([0, 0, 5, 0]);
    asked_at(&dead, ANSWERED, 2);
    assert!(
        next(&dead, end).is_err(),
        "of a part that was not asked for"
    );
}
