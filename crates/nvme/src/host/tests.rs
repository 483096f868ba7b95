//! Tests of the queue: command life cycles, broken rules, arbitrary PDUs.

use proptest::prelude::*;

use super::*;
use crate::tcp::{C2hData, Frame, Pdu, PduError, R2t, Role, TcpParams, field};
use crate::{Cqe, SglDescriptor, Status};

fn queue() -> HostQueue {
    let params = TcpParams {
        max_in_capsule_bytes: 4096,
        ..TcpParams::before(Role::Host)
    };
    HostQueue::new(4, &params)
}

fn frame(pdu: Pdu) -> Frame {
    Frame {
        pdu,
        header_bytes: 24,
        data_bytes: 0,
        data_digest: false,
    }
}

fn data(cid: u16, offset_bytes: u32, length_bytes: u32, last: bool, success: bool) -> Frame {
    frame(Pdu::C2hData(C2hData {
        cid,
        offset_bytes,
        length_bytes,
        last,
        success,
    }))
}

fn r2t(cid: u16, offset_bytes: u32, length_bytes: u32) -> Frame {
    frame(Pdu::R2t(R2t {
        cid,
        ttag: 9,
        offset_bytes,
        length_bytes,
    }))
}

fn response(cid: u16, status: Status) -> Frame {
    frame(Pdu::CapsuleResp(Cqe::new(77, 0, 0, cid, status)))
}

fn completed(slot: u16, status: Status, result: u64) -> Event {
    Event::Completed(Completion {
        slot,
        status,
        result,
    })
}

#[test]
fn a_read_ends_with_its_data_or_with_a_response() {
    let mut queue = queue();
    let begun = queue
        .begin(command::read(1, 0, 16), HostTransfer::ToHost(8192))
        .unwrap();
    assert_eq!(begun.sqe.sgl(), SglDescriptor::transport(8192));
    assert_eq!(begun.in_capsule_bytes, 0);
    let cid = begun.sqe.cid();
    let first = queue.on_pdu(&data(cid, 0, 4096, false, false)).unwrap();
    assert!(matches!(first, Event::DataIn(d) if d.slot == begun.slot && d.offset_bytes == 0));
    assert_eq!(queue.data_received(begun.slot, true), None);
    queue.on_pdu(&data(cid, 4096, 4096, true, true)).unwrap();
    let end = queue.data_received(begun.slot, true).unwrap();
    assert_eq!((end.status, end.result), (Status::SUCCESS, 0));
    assert!(queue.on_pdu(&response(cid, Status::SUCCESS)).is_err());
    queue.release(begun.slot);
    assert_eq!(queue.in_flight(), 0);

    let begun = queue
        .begin(command::read(1, 0, 1), HostTransfer::ToHost(512))
        .unwrap();
    let cid = begun.sqe.cid();
    queue.on_pdu(&data(cid, 0, 512, true, false)).unwrap();
    assert_eq!(queue.data_received(begun.slot, false), None);
    assert_eq!(
        queue.on_pdu(&response(cid, Status::SUCCESS)),
        Ok(completed(begun.slot, Status::TRANSIENT_TRANSPORT_ERROR, 77))
    );
}

#[test]
fn a_write_travels_in_the_capsule_or_when_asked_for() {
    let mut queue = queue();
    let small = queue
        .begin(
            command::write(1, 0, 8, false),
            HostTransfer::ToController(4096),
        )
        .unwrap();
    assert_eq!(small.in_capsule_bytes, 4096);
    assert_eq!(small.sqe.sgl(), SglDescriptor::in_capsule(0, 4096));
    assert!(queue.on_pdu(&r2t(small.sqe.cid(), 0, 4096)).is_err());
    assert_eq!(
        queue.on_pdu(&response(small.sqe.cid(), Status::SUCCESS)),
        Ok(completed(small.slot, Status::SUCCESS, 77))
    );

    let large = queue
        .begin(
            command::write(1, 0, 20, false),
            HostTransfer::ToController(10240),
        )
        .unwrap();
    assert_eq!(large.in_capsule_bytes, 0);
    let cid = large.sqe.cid();
    let Ok(Event::DataOut(out)) = queue.on_pdu(&r2t(cid, 0, 10240)) else {
        panic!("an R2T must be answered");
    };
    let cut: Vec<_> = out
        .pdus(4096)
        .map(|p| (p.cid, p.ttag, p.offset_bytes, p.length_bytes, p.last))
        .collect();
    assert_eq!(
        cut,
        [
            (cid, 9, 0, 4096, false),
            (cid, 9, 4096, 4096, false),
            (cid, 9, 8192, 2048, true)
        ]
    );
    queue.r2t_answered(large.slot);
    assert_eq!(
        queue.on_pdu(&response(cid, Status::SUCCESS)),
        Ok(completed(large.slot, Status::SUCCESS, 77))
    );
}

#[test]
fn a_failed_command_may_end_early_but_a_success_may_not() {
    let mut queue = queue();
    for transfer in [HostTransfer::ToHost(512), HostTransfer::ToController(8192)] {
        let begun = queue.begin(command::read(1, 0, 1), transfer).unwrap();
        let cid = begun.sqe.cid();
        assert_eq!(
            queue
                .on_pdu(&response(cid, Status::SUCCESS))
                .unwrap_err()
                .error,
            PduError::SEQUENCE
        );
        assert!(
            queue
                .on_pdu(&response(cid, Status::LBA_OUT_OF_RANGE))
                .is_ok()
        );
    }
}

#[test]
fn each_broken_rule_is_named() {
    let mut queue = queue();
    let read = queue
        .begin(command::read(1, 0, 8), HostTransfer::ToHost(4096))
        .unwrap();
    let write = queue
        .begin(
            command::write(1, 0, 16, false),
            HostTransfer::ToController(8192),
        )
        .unwrap();
    let (rd, wr) = (read.sqe.cid(), write.sqe.cid());
    let mut refuse = |frame: &Frame, error: PduError| {
        assert_eq!(queue.on_pdu(frame).expect_err("refused").error, error);
    };
    refuse(
        &data(rd ^ 8, 0, 512, false, false),
        PduError::field(field::CCCID),
    );
    refuse(
        &data(rd, 512, 512, false, false),
        PduError::field(field::DATAO),
    );
    refuse(
        &data(rd, 0, 4100, false, false),
        PduError::DATA_OUT_OF_RANGE,
    );
    refuse(
        &data(wr, 0, 512, false, false),
        PduError::field(field::CCCID),
    );
    refuse(&r2t(rd, 0, 512), PduError::field(field::CCCID));
    refuse(&r2t(wr, 4, 512), PduError::field(field::DATAO));
    refuse(&r2t(wr, 0, 8196), PduError::DATA_OUT_OF_RANGE);
    queue.on_pdu(&r2t(wr, 0, 4096)).unwrap();
    let error = queue.on_pdu(&r2t(wr, 4096, 4096)).unwrap_err().error;
    assert_eq!(error, PduError::LIMIT_EXCEEDED);
    queue.r2t_answered(write.slot);
    queue.on_pdu(&r2t(wr, 4096, 4096)).unwrap();
    queue.on_pdu(&data(rd, 0, 2048, true, false)).unwrap();
    let error = queue
        .on_pdu(&data(rd, 2048, 2048, true, false))
        .unwrap_err()
        .error;
    assert_eq!(error, PduError::SEQUENCE);
    let read = queue
        .begin(command::read(1, 0, 8), HostTransfer::ToHost(4096))
        .unwrap();
    let error = queue
        .on_pdu(&data(read.sqe.cid(), 0, 2048, true, true))
        .unwrap_err()
        .error;
    assert_eq!(error, PduError::field(field::FLAGS));
}

#[test]
fn a_queue_is_never_overfilled_and_slots_wait_for_release() {
    let mut queue = queue();
    let mut begun = vec![];
    while let Some(b) = queue.begin(command::flush(1), HostTransfer::None) {
        begun.push(b);
    }
    assert_eq!(begun.len(), 4);
    queue
        .on_pdu(&response(begun[0].sqe.cid(), Status::SUCCESS))
        .unwrap();
    assert!(queue.begin(command::flush(1), HostTransfer::None).is_none());
    queue.release(begun[0].slot);
    let again = queue.begin(command::flush(1), HostTransfer::None).unwrap();
    assert_eq!(again.slot, begun[0].slot);
    // A late response does not end the new command.
    assert!(
        queue
            .on_pdu(&response(begun[0].sqe.cid(), Status::SUCCESS))
            .is_err()
    );
}

proptest! {
    /// No PDU causes a panic, data outside a buffer, or a second completion.
    #[test]
    fn a_lying_controller_gets_nowhere(steps in proptest::collection::vec((0u8..6, 0u16..12, 0u32..5, 0u32..5, any::<bool>(), any::<bool>()), 1..200)) {
        let mut queue = queue();
        let mut open: [Option<HostTransfer>; 4] = [None; 4];
        for (kind, cid, offset, length, last, success) in steps {
            let (offset, length) = (offset * 2048, length * 2048);
            let event = match kind {
                0 | 1 => {
                    let transfer = [HostTransfer::None, HostTransfer::ToHost(8192), HostTransfer::ToController(8192), HostTransfer::ToController(4096)][usize::from(cid % 4)];
                    if let Some(begun) = queue.begin(command::flush(1), transfer) {
                        prop_assert!(open[usize::from(begun.slot)].replace(transfer).is_none());
                    }
                    continue;
                }
                2 | 3 => queue.on_pdu(&data(cid, offset, length, last, success)),
                4 => queue.on_pdu(&r2t(cid, offset, length)),
                _ => queue.on_pdu(&response(cid, if success { Status::SUCCESS } else { Status::INTERNAL_ERROR })),
            };
            let ended = match event {
                Ok(Event::DataIn(d)) => {
                    let Some(HostTransfer::ToHost(n)) = open[usize::from(d.slot)] else { panic!("data for no reader") };
                    prop_assert!(d.offset_bytes + d.length_bytes <= n);
                    queue.data_received(d.slot, true)
                }
                Ok(Event::DataOut(d)) => {
                    let Some(HostTransfer::ToController(n)) = open[usize::from(d.slot)] else { panic!("R2T for no writer") };
                    prop_assert!(d.r2t.offset_bytes + d.r2t.length_bytes <= n);
                    prop_assert_eq!(d.pdus(4096).map(|p| p.length_bytes).sum::<u32>(), d.r2t.length_bytes);
                    queue.r2t_answered(d.slot);
                    None
                }
                Ok(Event::Completed(c)) => Some(c),
                Ok(Event::Terminated(_)) | Err(_) => None,
            };
            if let Some(c) = ended {
                prop_assert!(open[usize::from(c.slot)].take().is_some());
                queue.release(c.slot);
            }
            prop_assert_eq!(usize::from(queue.in_flight()), open.iter().flatten().count());
        }
    }
}
