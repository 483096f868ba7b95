//! Commands of a dead engine that cannot begin again, and those that wait for them.

use super::super::inherit::Waiting;
use super::rig::{V, rig, rw};
use crate::core::{CommandRef, FenceSet, RecoveredSpan};
use crate::takeover::Next;
use forebay_nvme::Status;
use forebay_nvme::tcp::Pdu;

/// The older one's data was damaged; the younger one overlaps it.
#[test]
fn a_failed_recovered_command_blocks_no_other_command() {
    let mut rig = rig();
    rig.map_all();
    let (_admin, cntlid) = rig.admin();
    let mut host = rig.io(cntlid, 1, 32);
    let mut conns = rig.frontend.conns.iter().flatten();
    let (index, queue) = conns.next_back().map(|c| (c.index, c.queue)).unwrap();
    let span = |slot: u16| RecoveredSpan {
        volume: V,
        bytes: 0..4096,
        write: true,
        devices: FenceSet::None,
        command: Some(CommandRef::new(queue, slot)),
    };
    rig.core.recovered.recover(&[span(0), span(1)]);
    let conn = rig.frontend.conns[index as usize].as_mut().unwrap();
    for slot in 0..2 {
        let buffer = rig.core.staging.allocate(4096).unwrap();
        conn.charge.add(buffer.taken());
        conn.slots.claim_at(slot, 10 + slot, 0).unwrap();
        let s = conn.slots.get_mut(slot).unwrap();
        if slot == 0 {
            s.fate = Status::TRANSIENT_TRANSPORT_ERROR;
        }
        s.len_bytes = 4096;
        s.buffer = Some(buffer);
    }
    for slot in 0..2 {
        let waiting = Waiting {
            taken_ns: 0,
            conn: index,
            slot,
            sqe: rw(1, 10 + slot, 0, 1),
            next: Next::Begin {
                fenced: FenceSet::None,
            },
        };
        rig.frontend.go_on(&mut rig.core, waiting);
    }
    rig.frontend.mark_to_send(index);
    rig.turns(20);
    let mut heard = Vec::new();
    while let Some((Pdu::CapsuleResp(cqe), _)) = host.hear() {
        heard.push((cqe.cid(), cqe.status()));
    }
    let damaged = Status::TRANSIENT_TRANSPORT_ERROR;
    assert_eq!(heard, [(10, damaged), (11, Status::SUCCESS)]);
}
