//! Reports to clients and operators: invalid requests, unshared memory, too few queues.

use super::guest::{ALL, Data, PLAIN, table};
use super::rig::Rig;
use super::{IN, Offered, WAYS};
use crate::frontend::vm::protocol::UNSHARED;
use forebay_virtio::model::{GUEST_ADDRESS, USER_ADDRESS};
use forebay_virtio::vhost_user::message::request;
use rustix::event::{EventfdFlags, eventfd};
use std::os::fd::AsFd;

/// Where the invalid requests are.
const AT: usize = 1 << 20;

fn piece(from: usize, len: u32, writable: bool) -> Offered {
    Offered {
        address: GUEST_ADDRESS + (AT + from) as u64,
        len,
        writable,
    }
}

#[test]
fn a_wrong_chain_is_answered_where_its_status_is() {
    let header = piece(0, 16, false);
    let status = piece(16, 1, true);
    let outside = Offered {
        address: 0x1000,
        ..header
    };
    let chains = [
        vec![piece(0, 15, false), status],
        vec![outside, status],
        vec![status],
        vec![header, piece(4096, 0, true), status],
        vec![
            header,
            piece(4096, 512, true),
            piece(8192, 512, false),
            status,
        ],
        vec![header, status, piece(8192, 512, false)],
    ];
    for way in WAYS {
        let mut rig = Rig::new(4);
        let mut guest = rig.guest(way);
        for pieces in &chains {
            for indirect in [false, true] {
                assert!(guest.vm.all.write(AT, &[0; 16]));
                assert!(guest.vm.all.write(AT + 16, &[0xEE]));
                guest.drivers[0].offer(pieces, indirect).expect("room");
                guest.kick(0);
                rig.until("its end", |_| guest.drivers[0].has_used());
                assert!(guest.drivers[0].collect().is_some());
                let mut reported = [0];
                assert!(guest.vm.all.read(AT + 16, &mut reported));
                assert_eq!((reported, rig.left.len()), ([1], 0), "{way:?} {pieces:?}");
            }
        }
        guest.offer(0, IN, 0, Data::In(512));
        guest.kick(0);
        assert_eq!(guest.end(&mut rig, 0).1, 0);
    }
}

#[test]
fn unshared_memory_is_named() {
    // A table without descriptors.
    let mut rig = Rig::new(1);
    let guest = rig.guest(PLAIN);
    guest.send(request::SET_MEM_TABLE, &table(&[ALL]), &[]);
    rig.until("its end", |rig| !rig.left.is_empty());
    assert_eq!(rig.left.pop().expect("one").0, UNSHARED);
    // QEMU's behaviour: the VM's own memory is missing in the table.
    let guest = rig.guest(PLAIN);
    guest.ask(&mut rig, request::GET_VRING_BASE, &[0; 8]);
    let far = AT as u64;
    let other = [GUEST_ADDRESS + far, 4096, USER_ADDRESS + far, far];
    let file = [guest.vm.file.as_fd()];
    guest.ok(&mut rig, request::SET_MEM_TABLE, &table(&[other]), &file);
    let kick = eventfd(0, EventfdFlags::NONBLOCK).expect("a descriptor");
    guest.send(request::SET_VRING_KICK, &[0; 8], &[kick.as_fd()]);
    rig.until("its end", |rig| !rig.left.is_empty());
    assert_eq!(rig.left.pop().expect("one").0, UNSHARED);
    assert!(UNSHARED.contains("share=on"));
}

#[test]
fn a_hangup_after_the_queue_count_names_the_count() {
    let mut rig = Rig::new(1);
    let mut guest = rig.guest(PLAIN);
    let queues = guest.ask(&mut rig, request::GET_QUEUE_NUM, &[]);
    assert_eq!(queues, 1u64.to_le_bytes());
    drop(guest);
    rig.until("its end", |rig| !rig.left.is_empty());
    let why = rig.left.pop().expect("one").0;
    assert!(why.contains("num-queues="), "{why}");
    guest = rig.guest(PLAIN);
    drop(guest);
    rig.until("its end", |rig| !rig.left.is_empty());
    assert_eq!(rig.left.pop().expect("one").0, "it hung up");
}

#[test]
fn refused_memory_is_reported() {
    let mut rig = Rig::new(1);
    let guest = rig.guest(PLAIN);
    let beyond = [
        GUEST_ADDRESS + (1 << 40),
        1 << 30,
        USER_ADDRESS + (1 << 40),
        0,
    ];
    let mut payload = 0u64.to_le_bytes().to_vec();
    payload.extend(beyond.iter().flat_map(|word: &u64| word.to_le_bytes()));
    let file = [guest.vm.file.as_fd()];
    assert_eq!(
        guest.report(&mut rig, request::ADD_MEM_REG, &payload, &file),
        1
    );
    rig.turns();
    let reported = rig.refused.pop().expect("one");
    assert!(reported.contains("longer than its file"), "{reported}");
    assert!(rig.left.is_empty() && rig.refused.is_empty());
}
