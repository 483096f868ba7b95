//! A read-only volume's disk: drivers read it, and cannot change it.

use super::*;
use forebay_virtio::feature;

/// A rig with 1s in the first sectors; the next clients use a read-only volume with the same
/// grants.
fn protected(way: Way) -> Rig {
    let mut rig = Rig::new(4);
    let mut writer = rig.guest(way);
    let wrote = writer.offer(0, OUT, 0, Data::Out(&[1; 1024]));
    assert_eq!(writer.end(&mut rig, 0), (wrote, 0, 1));
    rig.volume = rig.volume.protected();
    rig.export_again();
    rig
}

fn try_all(rig: &mut Rig, guest: &mut guest::Guest) {
    let segment = segment(0, 1, 0);
    for (kind, data) in [
        (OUT, Data::Out(&[2; 512])),
        (DISCARD, Data::Out(&segment)),
        (WRITE_ZEROES, Data::Out(&segment)),
    ] {
        let refused = guest.offer(0, kind, 0, data);
        guest.kick(0);
        assert_eq!(guest.end(rig, 0), (refused, 1, 1), "{kind}");
    }
    let flush = guest.offer(0, FLUSH, 0, Data::None);
    assert_eq!(guest.end(rig, 0), (flush, 0, 1));
    let read = guest.offer(0, IN, 0, Data::In(1024));
    assert_eq!(guest.end(rig, 0), (read, 0, 1025));
    assert_eq!(guest.data(read, 1024), [1; 1024]);
}

#[test]
fn no_request_changes_a_read_only_disk() {
    for way in WAYS {
        let mut rig = protected(way);
        let mut guest = rig.guest(way);
        try_all(&mut rig, &mut guest);
        rig.die(None);
        rig.fence();
        try_all(&mut rig, &mut guest);
    }
}

#[test]
fn a_read_only_disk_offers_no_feature_that_writes() {
    let writes = feature::BLK_DISCARD | feature::BLK_WRITE_ZEROES;
    let mut rig = Rig::new(1);
    let offered = |rig: &mut Rig, guest: &guest::Guest| {
        let answer = guest.ask(rig, request::GET_FEATURES, &[]);
        u64::from_le_bytes(answer.try_into().unwrap()) & (writes | feature::BLK_RO)
    };
    let guest = rig.guest(PLAIN);
    assert_eq!(offered(&mut rig, &guest), writes);
    let mut rig = protected(PLAIN);
    let guest = rig.guest(PLAIN);
    assert_eq!(offered(&mut rig, &guest), feature::BLK_RO);
    rig.die(None);
    assert_eq!(offered(&mut rig, &guest), feature::BLK_RO);
}

/// No engine can have begun a write; but a driver may alter its request over a death.
#[test]
fn a_request_that_turns_into_a_write_is_not_begun_by_a_successor() {
    for way in WAYS {
        let mut rig = protected(way);
        let mut guest = rig.guest(way);
        rig.gate.hold();
        let altered = guest.offer(0, FLUSH, 0, Data::Out(&[2; 512]));
        rig.until("it is at the device", |rig| rig.gate.held() == 1);
        rig.die(None);
        let at = guest::Guest::request_at(altered);
        assert!(guest.vm.all.write(at, &OUT.to_le_bytes()));
        rig.fence();
        assert_eq!(guest.end(&mut rig, 0), (altered, 1, 1));
        try_all(&mut rig, &mut guest);
    }
}
