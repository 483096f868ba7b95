//! Which records count after each step, and after a death within it.

use super::*;
use crate::io::records::keep_for_ever;
use forebay_nvme::tcp::{IcReq, Offer};
use forebay_xlate::boundary::region::QueueIdentity;
use forebay_xlate::kill;
use std::sync::Arc;

fn records() -> (QueueRecords, &'static Region) {
    let region = keep_for_ever(&Arc::new(Region::anonymous(1).unwrap()));
    (QueueRecords::new(region, 9, 2).unwrap(), region)
}

/// Carries `step` out up to a kill point.
fn until(point: &str, step: impl FnOnce()) {
    kill::arm_here(point, 1);
    let died = std::panic::catch_unwind(std::panic::AssertUnwindSafe(step));
    assert!(died.is_err(), "{point} was not reached");
}

#[test]
fn params_come_back_and_nonsense_does_not() {
    let request = IcReq {
        pfv: 0,
        hpda: 7,
        header_digest: true,
        data_digest: false,
        max_r2t: 2,
    };
    let (params, _) = TcpParams::accept(&request, &Offer::default()).unwrap();
    let word = params_word(&params);
    assert_eq!(params_of_word(word), Some(params));
    for bad in [0, u64::MAX, word | 16, word & !0xff00, word | 3 << 8] {
        assert_eq!(params_of_word(bad), None, "{bad:x}");
    }
}

#[test]
fn a_command_counts_when_all_of_it_is_there() {
    let (records, region) = records();
    let seed = Seed::commands(region.header().key.load(Relaxed), 9);
    let buffer = BufferRef {
        offset_bytes: 1 << 20,
        len_bytes: 4096,
    };
    let new = NewCommand {
        sqe: &[1, 2, 3, 4, 5, 6, 7, 8],
        number: 77,
        end: 1234,
        taken_ns: 5,
        buffer: Some(buffer),
    };
    let c = &region.commands(9)[3];
    until("rx.record", || records.record_command(3, &new, false));
    assert_eq!(c.state(), CommandState::FREE);
    records.record_command(3, &new, false);
    assert_eq!(CommandState::open(c.state.load(Relaxed), 77), Ok(c.state()));
    assert!(c.is_sound(seed, 3) && !c.is_sound(seed, 4));
    assert_eq!(c.buffer_ref(seed, 3), Ok(Some(buffer)));
    assert_eq!(c.sqe_words(), [1, 0, 0, 0, 5, 6, 7, 0]);
    records.record_command(3, &new, true);
    assert_eq!(c.sqe_words(), *new.sqe);
    records.end_command(3);
    assert_eq!(c.state(), CommandState::FREE);
}

#[test]
fn the_command_that_is_being_taken_is_to_blame() {
    let (records, region) = records();
    let new = |number| NewCommand {
        sqe: &[0; 8],
        number,
        end: 72 * number,
        taken_ns: 0,
        buffer: None,
    };
    let blamed = |slot| Some(Blame { queue: 9, slot });
    records.record_command(4, &new(1), false);
    records.took_pdu(1, 72);
    records.blame_stream();
    assert_eq!(region.blamed(2), blamed(None), "what is being looked at");
    records.record_command(3, &new(2), false);
    assert_eq!(region.blamed(2), blamed(Some(3)));
    records.took_pdu(2, 144);
    assert_eq!(region.blamed(2), blamed(None));
    records.blame(4);
    assert_eq!(region.blamed(2), blamed(Some(4)));
    records.blame_nobody();
    assert_eq!(region.blamed(2), None);
}

#[test]
fn a_queue_counts_when_all_of_it_is_there() {
    let (records, region) = records();
    let constants = QueueConstants {
        controller: 1,
        identity: QueueIdentity {
            qid: 3,
            entries: 128,
            no_flow_control: true,
        },
        params: 55,
        socket: 66,
        reactor: 2,
        keep: 4,
    };
    let (q, key) = (&region.queues()[9], region.header().key.load(Relaxed));
    until("place.taken", || records.make(&constants, 1, 1200, 128));
    assert_eq!(q.used.load(Relaxed), queue_use::MADE);
    assert_eq!(q.constants(key, 9), Some(constants));
    assert_eq!(q.constants(key, 8), None);
    records.live();
    assert_eq!(q.used.load(Relaxed), queue_use::LIVE);
    q.socket.store(67, Relaxed);
    assert_eq!(q.constants(key, 9), None);
}

#[test]
fn an_intent_names_its_base_before_its_queue() {
    let (records, region) = records();
    let r = &region.reactors()[2];
    until("rx.base", || records.intend(1000));
    assert_eq!(
        (r.rx_queue.load(Relaxed), r.rx_base.load(Relaxed)),
        (0, 1000)
    );
    records.intend(1000);
    assert_eq!(r.rx_queue.load(Relaxed), 1000 << 16 | 10);
}

#[test]
fn data_is_there_when_the_stream_says_so() {
    let (records, region) = records();
    let q = &region.queues()[9];
    let data = InData {
        begin: 500,
        end: 604,
        slot: 8,
        offset_bytes: 4096,
        digest: true,
    };
    q.taken.store(476, Relaxed);
    until("data.header", || records.begin_data(&data));
    let taken = q.taken.load(Relaxed);
    assert_eq!(q.data(taken), None, "the header is not taken yet");
    let (begin, end) = (q.data_begin.load(Relaxed), q.data_end.load(Relaxed));
    assert_eq!((taken, begin, end), (476, 500, 604));
    records.begin_data(&data);
    assert_eq!(q.data(q.taken.load(Relaxed)), Some(data));
    let asked = Asked::Whole(4196);
    records.data_pdu_ends(8, asked, true);
    assert_eq!(q.data(q.taken.load(Relaxed)), Some(data));
    records.placed(604);
    assert_eq!(q.data(q.taken.load(Relaxed)), None);
    let c = &region.commands(9)[8];
    assert_eq!(c.asked.load(Relaxed), asked.word());
    assert!(c.state().damaged());
}

#[test]
fn a_command_that_is_merely_taken_has_no_buffer_that_is_yet_to_be_filled() {
    let (records, region) = records();
    let new = NewCommand {
        sqe: &[0; 8],
        number: 3,
        end: 72,
        taken_ns: 0,
        buffer: None,
    };
    let c = &region.commands(9)[1];
    let buffer = BufferRef {
        offset_bytes: 1 << 20,
        len_bytes: 65536,
    };
    let at = AskedAt { at: 24, r2ts: 1 };
    for point in ["r2t.recorded", "r2t.published"] {
        records.record_command(1, &new, false);
        until(point, || records.asked(1, buffer, CommandStage::Asked, at));
        let taken = c.state().stage() == Some(CommandStage::Taken);
        assert_eq!(taken, c.buffer.load(Relaxed) == 0, "{point}");
        assert_eq!(c.asked_at.load(Relaxed), 24);
    }
}

#[test]
fn kept_bytes_are_named_when_their_place_is_known() {
    let (records, region) = records();
    let q = &region.queues()[9];
    records.keep(
        Kept {
            which: 0,
            bytes: 10,
        },
        100,
    );
    records.keep(
        Kept {
            which: 1,
            bytes: 20,
        },
        200,
    );
    let kept = Kept::of_word(q.kept.load(Relaxed));
    assert_eq!(
        kept,
        Kept {
            which: 1,
            bytes: 20
        }
    );
    let at: Vec<u64> = q.kept_at.iter().map(|a| a.load(Relaxed)).collect();
    assert_eq!(at, [100, 200], "the older one stays true");
}
