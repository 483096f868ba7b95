//! Get and Set Features.

use super::*;
use crate::NSID_ALL;
use crate::feature::*;

#[test]
fn mandatory_features_of_an_io_controller() {
    let mut bench = Bench::ready();
    for (fid, cdw11, value) in [
        (ARBITRATION, 0, 0),
        (POWER_MANAGEMENT, 0, 0),
        (TEMPERATURE_THRESHOLD, 0, 0xFFFF),
        (TEMPERATURE_THRESHOLD, 1 << 20, 0),
        (VOLATILE_WRITE_CACHE, 0, 1),
        (NUMBER_OF_QUEUES, 0, 0x3F_003F),
        (WRITE_ATOMICITY, 0, 0),
        (ASYNC_EVENT_CONFIGURATION, 0, 0),
        (KEEP_ALIVE_TIMER, 0, 5000),
        (INTERRUPT_COALESCING, 0, 0),
    ] {
        assert_eq!(bench.ok(get_feature(fid, cdw11)), value, "{fid:#x}");
    }
    for fid in [0x00, 0x03, 0x09, 0x0C, 0x0E, 0x10, 0x84, 0xC0] {
        assert_eq!(
            bench.fails(get_feature(fid, 0)),
            Status::INVALID_FIELD,
            "{fid:#x}"
        );
        assert_eq!(
            bench.fails(set_feature(fid, 0)),
            Status::INVALID_FIELD,
            "{fid:#x}"
        );
    }
}

#[test]
fn a_discovery_controller_has_few() {
    let mut bench = Bench::discovery();
    assert_eq!(bench.ok(get_feature(KEEP_ALIVE_TIMER, 0)), 5000);
    bench.ok(set_feature(ASYNC_EVENT_CONFIGURATION, 1 << 31));
    for fid in [
        ARBITRATION,
        VOLATILE_WRITE_CACHE,
        NUMBER_OF_QUEUES,
        HOST_IDENTIFIER,
    ] {
        assert_eq!(
            bench.fails(get_feature(fid, 1)),
            Status::INVALID_FIELD,
            "{fid:#x}"
        );
    }
    let status = bench.fails(set_feature(ASYNC_EVENT_CONFIGURATION, 0x100));
    assert_eq!(status, Status::INVALID_FIELD);
}

#[test]
fn feature_settings_are_read_back() {
    let mut bench = Bench::ready();
    for (fid, cdw11, get11, value) in [
        (ARBITRATION, 0x0102_0304, 0, 0x0102_0304),
        (TEMPERATURE_THRESHOLD, 350, 0, 350),
        (
            TEMPERATURE_THRESHOLD,
            1 << 20 | 0xF << 16 | 270,
            1 << 20,
            270,
        ),
        (VOLATILE_WRITE_CACHE, 1, 0, 1),
        (WRITE_ATOMICITY, 1, 0, 1),
        (ASYNC_EVENT_CONFIGURATION, 0x11F, 0, 0x11F),
    ] {
        bench.ok(set_feature(fid, cdw11));
        assert_eq!(bench.ok(get_feature(fid, get11)), value, "{fid:#x}");
    }
}

#[test]
fn invalid_feature_settings_are_refused() {
    let mut bench = Bench::ready();
    for (fid, cdw11, status) in [
        (VOLATILE_WRITE_CACHE, 0, Status::FEATURE_NOT_CHANGEABLE),
        (POWER_MANAGEMENT, 1, Status::INVALID_FIELD),
        (TEMPERATURE_THRESHOLD, 1 << 16, Status::INVALID_FIELD),
        (TEMPERATURE_THRESHOLD, 2 << 20, Status::INVALID_FIELD),
        (ASYNC_EVENT_CONFIGURATION, 1 << 9, Status::INVALID_FIELD),
        (ASYNC_EVENT_CONFIGURATION, 1 << 31, Status::INVALID_FIELD),
        (NUMBER_OF_QUEUES, 0xFFFF, Status::INVALID_FIELD),
        (NUMBER_OF_QUEUES, 0xFFFF_0000, Status::INVALID_FIELD),
    ] {
        assert_eq!(
            bench.fails(set_feature(fid, cdw11)),
            status,
            "{fid:#x} {cdw11:#x}"
        );
    }
    let status = bench.fails_with(set_feature(HOST_IDENTIFIER, 1), &[1; 16]);
    assert_eq!(status, Status::COMMAND_SEQUENCE_ERROR);
    let save = set_feature(ARBITRATION, 0).with_cdw(10, 1 << 31 | 1);
    assert_eq!(bench.fails(save), Status::FEATURE_NOT_SAVEABLE);
    let select = get_feature(ARBITRATION, 0).with_cdw(10, 3 << 8 | 1);
    assert_eq!(bench.fails(select), Status::INVALID_FIELD);
    let mine = set_feature(ARBITRATION, 0).with_nsid(1);
    assert_eq!(bench.fails(mine), Status::FEATURE_NOT_NAMESPACE_SPECIFIC);
    bench.ok(set_feature(ARBITRATION, 0).with_nsid(NSID_ALL));
}

#[test]
fn error_recovery_is_a_namespaces() {
    let mut bench = Bench::ready();
    let get = |nsid| get_feature(ERROR_RECOVERY, 0).with_nsid(nsid);
    let set = |nsid, time| set_feature(ERROR_RECOVERY, time).with_nsid(nsid);
    assert_eq!(bench.ok(get(1)), 0);
    bench.ok(set(1, 50));
    assert_eq!(bench.ok(get(1)), 50);
    bench.ok(set(NSID_ALL, 60));
    assert_eq!(bench.ok(get(1)), 60);
    for sqe in [get(0), get(NSID_ALL), get(2), set(0, 1), set(2, 1)] {
        assert_eq!(bench.fails(sqe), Status::INVALID_NAMESPACE_OR_FORMAT);
    }
    // DULBE.
    assert_eq!(bench.fails(set(1, 1 << 16)), Status::INVALID_FIELD);
    bench.world.present.set(false);
    for sqe in [get(1), set(1, 1)] {
        assert_eq!(bench.fails(sqe), Status::INVALID_FIELD);
    }
}

#[test]
fn number_of_queues() {
    let mut bench = Bench::ready();
    assert_eq!(
        bench.ok(set_feature(NUMBER_OF_QUEUES, 0x0007_0003)),
        0x3_0003
    );
    assert_eq!(bench.controller.granted_io_queues(), 4);
    assert_eq!(
        bench.ok(set_feature(NUMBER_OF_QUEUES, 0x0001_0009)),
        0x1_0001
    );
    assert_eq!(
        bench.ok(set_feature(NUMBER_OF_QUEUES, 0xFFFE_FFFE)),
        0x3F_003F
    );
    assert_eq!(bench.ok(get_feature(NUMBER_OF_QUEUES, 0)), 0x3F_003F);
    assert_eq!(bench.ok(set_feature(NUMBER_OF_QUEUES, 0)), 0);
}

#[test]
fn host_identifier_is_the_one_of_connect() {
    let mut bench = Bench::ready();
    assert_eq!(bench.data(get_feature(HOST_IDENTIFIER, 1)), [5; 16]);
    assert_eq!(
        bench.fails(get_feature(HOST_IDENTIFIER, 0)),
        Status::INVALID_FIELD
    );
}

#[test]
fn command_interrupted_is_for_hosts_that_know_it() {
    let mut bench = Bench::ready();
    assert_eq!(
        bench.controller.interrupted_status(),
        Status::NAMESPACE_NOT_READY
    );
    let mut host = [0; 512];
    host[0] = 1;
    // Newer hosts set bytes unknown here.
    host[2] = 1;
    let set = set_feature(HOST_BEHAVIOR_SUPPORT, 0);
    assert_eq!(bench.controller.transfer(&set), Ok(Transfer::FromHost(512)));
    assert_eq!(
        bench.fails_with(set, &host[..511]),
        Status::DATA_SGL_LENGTH_INVALID
    );
    assert!(matches!(
        bench.run_with(set, &host),
        AdminOutcome::Complete {
            status: Status::SUCCESS,
            ..
        }
    ));
    let status = bench.controller.interrupted_status();
    assert_eq!(status.code(), Status::COMMAND_INTERRUPTED);
    assert_eq!((status.0 >> 11 & 3, status.dnr()), (1, false));
    let got = bench.data(get_feature(HOST_BEHAVIOR_SUPPORT, 0));
    assert_eq!((got.len(), got[0], got[2]), (512, 1, 0));
    host[0] = 2;
    assert_eq!(bench.fails_with(set, &host), Status::INVALID_FIELD);
}
