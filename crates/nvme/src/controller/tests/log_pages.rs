//! Log pages other than Discovery.

use super::*;
use crate::feature;
use crate::log_page::*;

fn dword(page: &[u8], index: usize) -> u32 {
    u32::from_le_bytes(page[index * 4..index * 4 + 4].try_into().unwrap())
}

#[test]
fn the_supported_lists_match_the_implementation() {
    for mut bench in [Bench::ready(), Bench::discovery()] {
        let logs = bench.data(get_log(SUPPORTED_LOG_PAGES, 0, 1024));
        for lid in 0..=255u8 {
            match dword(&logs, lid.into()) {
                0 => assert_eq!(bench.fails(get_log(lid, 0, 4)), Status::INVALID_FIELD),
                bits => {
                    assert_eq!(bits, SUPPORTED);
                    bench.data(get_log(lid, 0, 4));
                }
            }
        }
        let features = bench.data(get_log(FEATURES_SUPPORTED_AND_EFFECTS, 0, 1024));
        for fid in 0..=255u8 {
            // CDW11 1: 128-bit Host Identifier.
            let known = !matches!(
                bench.run(get_feature(fid, 1)),
                AdminOutcome::Complete { status, .. } if status.code() == Status::INVALID_FIELD
            );
            assert_eq!(
                dword(&features, fid.into()) & SUPPORTED != 0,
                known,
                "{fid:#x}"
            );
        }
        let commands = bench.data(get_log(COMMANDS_SUPPORTED_AND_EFFECTS, 0, 4096));
        for op in 0..=255u8 {
            let known = op != opcode::FABRICS
                && !matches!(
                    bench.run(Sqe::new(op, 1)),
                    AdminOutcome::Complete { status, .. } if status.code() == Status::INVALID_OPCODE
                );
            assert_eq!(
                dword(&commands, op.into()) & SUPPORTED != 0,
                known,
                "{op:#x}"
            );
        }
        let io = bench.controller.config().kind == ControllerKind::Io;
        let geometry = NamespaceGeometry {
            block_bytes: 512,
            block_count: 8,
            write_protected: false,
        };
        for op in 0..=255u8 {
            let sqe = Sqe::new(op, 1).with_nsid(1);
            let unknown = Err(Status::INVALID_OPCODE.with_dnr());
            let known = io && crate::io::decode(&sqe, 1, &geometry, 8192) != unknown;
            assert_eq!(
                dword(&commands, 256 + usize::from(op)) & SUPPORTED != 0,
                known,
                "{op:#x}"
            );
        }
    }
}

#[test]
fn pieces_of_a_page() {
    let mut bench = Bench::ready();
    let whole = bench.data(get_log(COMMANDS_SUPPORTED_AND_EFFECTS, 0, 4096));
    let piece = bench.data(get_log(COMMANDS_SUPPORTED_AND_EFFECTS, 1020, 64));
    assert_eq!(piece, whole[1020..1084]);
    // Past the end zeros; bad offsets are refused.
    let tail = bench.data(get_log(SMART_HEALTH, 508, 64));
    assert!(tail.len() == 64 && tail.iter().all(|&b| b == 0));
    bench.data(get_log(SMART_HEALTH, 512, 4));
    for offset in [516, 510, u64::MAX - 3, 1 << 32] {
        assert_eq!(
            bench.fails(get_log(SMART_HEALTH, offset, 4)),
            Status::INVALID_FIELD
        );
    }
    let index = get_log(SMART_HEALTH, 0, 4).with_cdw(14, 1 << 23);
    assert_eq!(bench.fails(index), Status::INVALID_FIELD);
    let zoned = get_log(COMMANDS_SUPPORTED_AND_EFFECTS, 0, 4).with_cdw(14, 2 << 24);
    assert_eq!(bench.fails(zoned), Status::IO_COMMAND_SET_NOT_SUPPORTED);
}

#[test]
fn mdts_bounds_log_pages() {
    let mut bench = Bench::ready();
    assert_eq!(
        bench.data(get_log(SMART_HEALTH, 0, 512 << 10)).len(),
        512 << 10
    );
    for bytes in [(512 << 10) + 4, 1 << 30] {
        let sqe = get_log(SMART_HEALTH, 0, bytes);
        assert_eq!(
            bench.controller.transfer(&sqe),
            Err(Status::INVALID_FIELD.with_dnr())
        );
        assert_eq!(bench.fails(sqe), Status::INVALID_FIELD);
    }
    let most = Sqe::new(admin::GET_LOG_PAGE, 1)
        .with_cdw(10, u32::MAX)
        .with_cdw(11, u32::MAX);
    assert_eq!(
        bench.controller.transfer(&most),
        Err(Status::INVALID_FIELD.with_dnr())
    );
}

#[test]
fn smart_health() {
    let mut bench = Bench::ready();
    let page = bench.data(get_log(SMART_HEALTH, 0, 512));
    assert_eq!((page[0], page[3]), (0, 100));
    // 512,001 bytes round up to two units.
    assert_eq!((page[32], page[48], page[80]), (2, 0, 9));
    bench.data(get_log(SMART_HEALTH, 0, 512).with_nsid(0));
    assert_eq!(
        bench.fails(get_log(SMART_HEALTH, 0, 512).with_nsid(1)),
        Status::INVALID_FIELD
    );
}

#[test]
fn temperature_thresholds() {
    let mut bench = Bench::ready();
    let under = 1 << 20;
    for (thresholds, warning) in [
        ([311, under | 309], 0),
        ([310, under | 309], TEMPERATURE_WARNING),
        ([311, under | 310], TEMPERATURE_WARNING),
        ([0xFFFF, under], 0),
    ] {
        for threshold in thresholds {
            bench.ok(set_feature(feature::TEMPERATURE_THRESHOLD, threshold));
        }
        let page = bench.data(get_log(SMART_HEALTH, 0, 512));
        assert_eq!(page[0], warning, "{thresholds:?}");
    }
}

#[test]
fn firmware_slot() {
    let mut bench = Bench::ready();
    let page = bench.data(get_log(FIRMWARE_SLOT, 0, 512));
    assert_eq!(page[0], 1);
    assert_eq!(page[8..16], bench.controller.config().firmware);
    assert!(page[16..].iter().all(|&b| b == 0));
}

#[test]
fn errors_newest_first() {
    let mut bench = Bench::ready();
    assert!(
        bench
            .data(get_log(ERROR_INFORMATION, 0, 256))
            .iter()
            .all(|&b| b == 0)
    );
    for lba in 1..=6 {
        bench.controller.record_error(ErrorReport {
            sqid: 2,
            cid: 7,
            status: Status::UNRECOVERED_READ_ERROR,
            lba,
            nsid: 1,
        });
    }
    let page = bench.data(get_log(ERROR_INFORMATION, 0, 256));
    let counts: Vec<u8> = page.chunks(64).map(|entry| entry[0]).collect();
    assert_eq!(counts, [6, 5, 4, 3]);
    assert_eq!(page[8..16], [2, 0, 7, 0, 0x02, 0x05, 0xFF, 0xFF]);
    assert_eq!((page[16], page[24]), (6, 1));
    assert_eq!(bench.data(get_log(SMART_HEALTH, 0, 512))[176], 6);
}
