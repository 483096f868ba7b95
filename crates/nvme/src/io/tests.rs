//! Decoding of I/O commands: bounds, flags, halves of fused operations.

use super::*;
use proptest::prelude::*;

const GEOMETRY: NamespaceGeometry = NamespaceGeometry {
    block_bytes: 4096,
    block_count: 1000,
    write_protected: false,
};
const MDTS: u32 = 128 * 1024;

fn rw(op: u8, lba: u64, blocks: u32) -> Sqe {
    Sqe::new(op, 1)
        .with_nsid(1)
        .with_cdw64(10, lba)
        .with_cdw(12, blocks - 1)
}
fn run(sqe: Sqe) -> Result<IoCommand, Status> {
    decode(&sqe, 1, &GEOMETRY, MDTS)
}

#[test]
fn ranges_end_where_the_namespace_ends() {
    assert_eq!(
        run(rw(nvm::READ, 999, 1)),
        Ok(IoCommand::Read {
            lba: 999,
            blocks: 1,
            fua: false
        })
    );
    for (lba, blocks) in [(999, 2), (1000, 1), (u64::MAX, 1), (u64::MAX - 7, 16)] {
        for op in [nvm::READ, nvm::WRITE, nvm::COMPARE, nvm::WRITE_ZEROES] {
            assert_eq!(
                run(rw(op, lba, blocks)),
                Err(Status::LBA_OUT_OF_RANGE.with_dnr()),
                "{op} {lba} {blocks}"
            );
        }
    }
}

#[test]
fn mdts_bounds_data_but_not_zeroes() {
    assert!(run(rw(nvm::WRITE, 0, 32)).is_ok());
    assert_eq!(
        run(rw(nvm::WRITE, 0, 33)),
        Err(Status::INVALID_FIELD.with_dnr())
    );
    let large = NamespaceGeometry {
        block_bytes: 512,
        block_count: 1 << 20,
        write_protected: false,
    };
    assert_eq!(
        decode(&rw(nvm::WRITE_ZEROES, 0, 65536), 1, &large, 4096),
        Ok(IoCommand::WriteZeroes {
            lba: 0,
            blocks: 65536,
            fua: false,
            deallocate: false
        })
    );
}

#[test]
fn flags() {
    let write = rw(nvm::WRITE, 5, 3);
    let with = |bits: u32| write.with_cdw(12, 2 | bits);
    assert_eq!(
        run(with(CDW12_FUA | 1 << 31)),
        Ok(IoCommand::Write {
            lba: 5,
            blocks: 3,
            fua: true
        })
    );
    assert_eq!(
        run(with(1 << 29)),
        Err(Status::INVALID_PROTECTION_INFORMATION.with_dnr())
    );
    assert_eq!(run(with(1 << 20)), Err(Status::INVALID_FIELD.with_dnr()));
    let zeroes = rw(nvm::WRITE_ZEROES, 5, 3).with_cdw(12, 2 | CDW12_DEAC | CDW12_FUA);
    assert_eq!(
        run(zeroes),
        Ok(IoCommand::WriteZeroes {
            lba: 5,
            blocks: 3,
            fua: true,
            deallocate: true
        })
    );
    let mut fused = write;
    fused.flags = 1;
    assert_eq!(run(fused), Err(Status::INVALID_FIELD.with_dnr()));
}

#[test]
fn namespaces() {
    let invalid = Err(Status::INVALID_NAMESPACE_OR_FORMAT.with_dnr());
    assert_eq!(
        run(Sqe::new(nvm::FLUSH, 1).with_nsid(1)),
        Ok(IoCommand::Flush)
    );
    assert_eq!(
        run(Sqe::new(nvm::FLUSH, 1).with_nsid(NSID_ALL)),
        Ok(IoCommand::Flush)
    );
    assert_eq!(run(Sqe::new(nvm::FLUSH, 1)), invalid);
    for op in [
        nvm::READ,
        nvm::WRITE,
        nvm::WRITE_ZEROES,
        nvm::DATASET_MANAGEMENT,
    ] {
        assert_eq!(run(rw(op, 0, 1).with_nsid(NSID_ALL)), invalid);
    }
    assert_eq!(run(rw(nvm::READ, 0, 1).with_nsid(2)), invalid);
    assert_eq!(run(rw(nvm::COMPARE, 0, 1).with_nsid(2)), invalid);
    for op in [nvm::COPY, nvm::VERIFY, 0x7F, 0xFF] {
        assert_eq!(run(rw(op, 0, 1)), Err(Status::INVALID_OPCODE.with_dnr()));
    }
}

#[test]
fn fused_halves() {
    let half = |op: u8, fuse: u8, blocks: u32| {
        let mut sqe = rw(op, 5, blocks);
        sqe.flags |= fuse;
        decode_fused(&sqe, 1, &GEOMETRY, MDTS)
    };
    let first = half(nvm::COMPARE, FUSE_FIRST, 1).unwrap();
    let second = half(nvm::WRITE, FUSE_SECOND, 1).unwrap();
    assert!(fuses_with(&first, &second) && !fuses_with(&second, &first));
    let other = run(rw(nvm::WRITE, 6, 1)).unwrap();
    assert!(!fuses_with(&first, &other));
    let exceeded = Err(Status::ATOMIC_WRITE_UNIT_EXCEEDED.with_dnr());
    assert_eq!(half(nvm::COMPARE, FUSE_FIRST, 2), exceeded);
    assert_eq!(half(nvm::WRITE, FUSE_SECOND, 2), exceeded);
    for (op, fuse) in [
        (nvm::COMPARE, FUSE_SECOND),
        (nvm::WRITE, FUSE_FIRST),
        (nvm::READ, FUSE_FIRST),
        (nvm::WRITE, 3),
        (nvm::FLUSH, FUSE_SECOND),
        (nvm::WRITE, 0),
    ] {
        let refused = half(op, fuse, 1);
        assert_eq!(
            refused,
            Err(Status::INVALID_FIELD.with_dnr()),
            "{op} {fuse}"
        );
    }
}

#[test]
fn reservation_commands() {
    let invalid = Err(Status::INVALID_FIELD.with_dnr());
    let register = Sqe::new(nvm::RESERVATION_REGISTER, 1).with_nsid(1);
    let command = run(register.with_cdw(10, 3 << 30)).unwrap();
    let action = reservation::action_of(&register.with_cdw(10, 3 << 30));
    assert_eq!(command, IoCommand::Reserve { action });
    assert_eq!(command.transfer(&GEOMETRY), Transfer::FromHost(16));
    assert_eq!(run(register.with_cdw(10, 1 << 30)), invalid);
    assert_eq!(run(register.with_cdw(10, 3)), invalid);
    let acquire = Sqe::new(nvm::RESERVATION_ACQUIRE, 1).with_nsid(1);
    assert!(run(acquire.with_cdw(10, 0x0102)).is_ok());
    for bits in [0, 0x0700, 0x0103, 0x0108] {
        assert_eq!(run(acquire.with_cdw(10, bits)), invalid, "{bits:x}");
    }
    let release = Sqe::new(nvm::RESERVATION_RELEASE, 1).with_nsid(1);
    let bytes = run(release).unwrap().transfer(&GEOMETRY);
    assert_eq!(bytes, Transfer::FromHost(8));
    assert_eq!(run(release.with_cdw(10, 1 << 3)), invalid);
    let report = Sqe::new(nvm::RESERVATION_REPORT, 1).with_nsid(1);
    let asked = run(report.with_cdw(10, 31).with_cdw(11, 1)).unwrap();
    assert_eq!(
        asked,
        IoCommand::ReservationReport {
            extended: true,
            len_bytes: 128
        }
    );
    assert_eq!(asked.transfer(&GEOMETRY), Transfer::ToHost(128));
    for dwords in [u32::MAX, MDTS / 4] {
        assert_eq!(run(report.with_cdw(10, dwords)), invalid);
    }
}

fn range(lba: u64, blocks: u32) -> DsmRange {
    DsmRange {
        starting_lba: U64::new(lba),
        length_blocks: U32::new(blocks),
        ..DsmRange::default()
    }
}

#[test]
fn deallocate_ranges() {
    let dsm = Sqe::new(nvm::DATASET_MANAGEMENT, 1)
        .with_nsid(1)
        .with_cdw(10, 2);
    assert_eq!(run(dsm), Ok(IoCommand::Hint { ranges: 3 }));
    let command = run(dsm.with_cdw(11, DSM_AD)).unwrap();
    assert_eq!(command, IoCommand::Deallocate { ranges: 3 });
    assert_eq!(command.transfer(&GEOMETRY), Transfer::FromHost(48));

    let list = [range(10, 5), range(1000, 0), range(999, 1)];
    let got: Vec<_> = dsm_ranges(list.as_bytes(), 3, &GEOMETRY).unwrap().collect();
    assert_eq!(got, [(10, 5), (999, 1)]);
    let list = [range(10, 5), range(0, 1), range(999, 2)];
    assert_eq!(
        dsm_ranges(list.as_bytes(), 3, &GEOMETRY).err(),
        Some(Status::LBA_OUT_OF_RANGE.with_dnr())
    );
    assert_eq!(
        dsm_ranges(&list.as_bytes()[..47], 3, &GEOMETRY).err(),
        Some(Status::DATA_SGL_LENGTH_INVALID.with_dnr())
    );
}

#[test]
fn a_write_protected_namespace_keeps_its_data() {
    let protected = NamespaceGeometry {
        write_protected: true,
        ..GEOMETRY
    };
    let run = |sqe: Sqe| decode(&sqe, 1, &protected, MDTS);
    let refused = Err(Status::NAMESPACE_IS_WRITE_PROTECTED.with_dnr());
    let dsm = Sqe::new(nvm::DATASET_MANAGEMENT, 1).with_nsid(1);
    for lba in [0, 1000] {
        assert_eq!(run(rw(nvm::WRITE, lba, 1)), refused);
        assert_eq!(run(rw(nvm::WRITE_ZEROES, lba, 1)), refused);
    }
    assert_eq!(run(dsm.with_cdw(11, DSM_AD | 1)), refused);
    let other = rw(nvm::WRITE, 0, 1).with_nsid(2);
    let unknown = Status::INVALID_NAMESPACE_OR_FORMAT.with_dnr();
    assert_eq!(run(other), Err(unknown));
    let flush = Sqe::new(nvm::FLUSH, 1).with_nsid(NSID_ALL);
    let report = Sqe::new(nvm::RESERVATION_REPORT, 1).with_nsid(1);
    let register = Sqe::new(nvm::RESERVATION_REGISTER, 1).with_nsid(1);
    for sqe in [
        rw(nvm::READ, 0, 1),
        rw(nvm::COMPARE, 0, 1),
        dsm.with_cdw(11, 3),
        flush,
        report,
        register,
    ] {
        let allowed = run(sqe);
        assert!(allowed.is_ok(), "{sqe:?}: {allowed:?}");
        assert_eq!(allowed, decode(&sqe, 1, &GEOMETRY, MDTS));
    }
    let half = |op, fuse| {
        let mut sqe = rw(op, 0, 1);
        sqe.flags |= fuse;
        decode_fused(&sqe, 1, &protected, MDTS)
    };
    assert!(half(nvm::COMPARE, FUSE_FIRST).is_ok());
    assert_eq!(half(nvm::WRITE, FUSE_SECOND), refused);
}

proptest! {
    #[test]
    fn whatever_decodes_is_in_bounds(
        raw in any::<[[u8; 32]; 2]>(),
        op in prop_oneof![any::<u8>(), 0u8..10],
        plain in any::<bool>(),
        shift in 9u32..17,
        block_count in any::<u64>(),
        mdts in any::<u32>(),
        write_protected in any::<bool>(),
    ) {
        let mut sqe = Sqe::read_from_bytes(raw.as_flattened()).unwrap();
        sqe.opcode = op;
        if plain {
            sqe.flags = 0x40;
            sqe = sqe.with_nsid(1).with_cdw(12, sqe.cdw(12) & 0xF00F_FFFF & !(0xF << 26));
        }
        let geometry = NamespaceGeometry { block_bytes: 1 << shift, block_count, write_protected };
        if let Ok(command) = decode(&sqe, 1, &geometry, mdts) {
            match command {
                IoCommand::Read { lba, blocks, .. }
                | IoCommand::Write { lba, blocks, .. }
                | IoCommand::Compare { lba, blocks, .. } => {
                    prop_assert!(u128::from(lba) + u128::from(blocks) <= u128::from(block_count));
                    let bytes = u64::from(blocks) << shift;
                    prop_assert!(bytes <= u64::from(mdts));
                    prop_assert_eq!(u64::from(command.transfer(&geometry).bytes()), bytes);
                }
                IoCommand::WriteZeroes { lba, blocks, .. } => {
                    prop_assert!(u128::from(lba) + u128::from(blocks) <= u128::from(block_count));
                }
                IoCommand::Deallocate { ranges } | IoCommand::Hint { ranges } => {
                    prop_assert!((1..=256).contains(&ranges));
                }
                IoCommand::Flush | IoCommand::Reserve { .. } => {}
                IoCommand::ReservationReport { len_bytes, .. } => {
                    prop_assert!(len_bytes <= mdts && len_bytes.is_multiple_of(4));
                }
            }
        }
    }

    #[test]
    fn dsm_data_of_any_kind(data in proptest::collection::vec(any::<u8>(), 0..4200), ranges in 1u16..=256) {
        if let Ok(list) = dsm_ranges(&data, ranges, &GEOMETRY) {
            for (lba, blocks) in list {
                prop_assert!(blocks > 0 && lba + u64::from(blocks) <= 1000);
            }
        }
    }
}
