//! Identify and controller lists.

use super::*;

#[test]
fn identify_says_what_a_pcie_controller_has() {
    let mut bench = Bench::ready();
    assert_eq!(bench.admin(&identify(1)), OK);
    let id = bench.memory.get(DATA, 4096);
    assert_eq!(id[..2], VENDOR_ID.to_le_bytes());
    assert_eq!(
        u16::from_le_bytes([id[256], id[257]]) & (1 << 8 | 1 << 7),
        1 << 8 | 1 << 7
    );
    assert_eq!((id[76], id[77], id[111]), (0b10, 7, 1));
    assert_eq!(
        u32::from_le_bytes([id[536], id[537], id[538], id[539]]),
        1 | 1 << 18
    );
    assert_eq!(
        (id[520], id[522]),
        (0b1101, 0),
        "no reservations, nothing fused"
    );
    assert!(id[1792..1808].iter().all(|b| *b == 0), "nothing of fabrics");
    // Across pages; by SGL.
    let two = with_prps(identify(1), DATA + 0x800, DATA + 0x8000);
    assert_eq!(bench.admin(&two), OK);
    assert_eq!(bench.memory.get(DATA + 0x8000, 0x800), id[0x800..]);
    let sgl = identify(1).with_sgl(SglDescriptor::in_capsule(0, 4096));
    assert_eq!(bench.admin(&sgl), done(Status::INVALID_FIELD));
    let outside = with_prps(identify(1), 4 << 20, 0);
    assert_eq!(bench.admin(&outside), done(Status::DATA_TRANSFER_ERROR));
    for opcode in [crate::opcode::FABRICS, admin::KEEP_ALIVE, 0x80, 0xC0] {
        assert_eq!(
            bench.admin(&Sqe::new(opcode, 1)),
            done(Status::INVALID_OPCODE)
        );
    }
    let hostid = with_prps(Sqe::new(admin::GET_FEATURES, 1).with_cdw(10, 0x81), DATA, 0);
    assert_eq!(bench.admin(&hostid), done(Status::INVALID_FIELD));
}

#[test]
fn controller_lists_show_sixty_four_controllers() {
    let mut bench = Bench::ready();
    let lists = |bench: &mut Bench, cns: u32, from: u32| {
        let sqe = identify(cns | from << 16).with_nsid(1);
        (bench.admin(&sqe), bench.memory.get(DATA, 4096))
    };
    let (status, list) = lists(&mut bench, 0x13, 0);
    assert_eq!((status, &list[..6]), (OK, &[1, 0, 3, 0, 0, 0][..]));
    assert_eq!(lists(&mut bench, 0x15, 0).1[0], 0);
    // FRSM and GRAN: nothing is flexible.
    let (_, primary) = lists(&mut bench, 0x14, 0);
    for at in [32, 64] {
        assert_eq!(primary[at..at + 10], [0; 10]);
        assert_eq!(primary[at + 10..at + 16], [65, 0, 0, 0, 0, 0]);
    }
    bench.world.controllers = (3..67)
        .map(|cntlid| SubsystemController {
            cntlid,
            online: cntlid % 2 == 1,
        })
        .collect();
    for cns in [0x12, 0x13] {
        let (status, list) = lists(&mut bench, cns, 60);
        assert_eq!((status, list[0], list[2], list[14]), (OK, 7, 60, 66));
    }
    let (_, primary) = lists(&mut bench, 0x14, 0);
    let number = |at: usize| u32::from_le_bytes(primary[at..at + 4].try_into().unwrap());
    assert_eq!(
        (primary[0], primary[4], number(32), number(36)),
        (3, 3, 63 * 65, 63 * 65)
    );
    assert_eq!(
        (number(64), number(68), primary[42]),
        (63 * 65, 63 * 65, 65)
    );
    let (_, list) = lists(&mut bench, 0x15, 0);
    assert_eq!(
        (list[0], list[32], list[34], list[36], list[40], list[42]),
        (63, 4, 3, 0, 0, 65)
    );
    assert_eq!((list[64], list[68], list[72]), (5, 1, 0));
    let manage = |bench: &mut Bench, cdw10: u32, cdw11: u32| {
        let sqe = Sqe::new(admin::VIRTUALIZATION_MANAGEMENT, 4);
        bench.admin(&sqe.with_cdw(10, cdw10).with_cdw(11, cdw11))
    };
    let unknown = done(Status::INVALID_CONTROLLER_IDENTIFIER);
    assert_eq!(manage(&mut bench, 0x8 | 5 << 16, 65), OK);
    let resources = done(Status::INVALID_NUMBER_OF_CONTROLLER_RESOURCES);
    assert_eq!(manage(&mut bench, 0x8 | 5 << 16, 3), resources);
    assert_eq!(
        manage(&mut bench, 0x8 | 2 << 8 | 5 << 16, 65),
        done(Status::INVALID_RESOURCE_IDENTIFIER)
    );
    assert_eq!(manage(&mut bench, 0x8 | 99 << 16, 65), unknown);
    assert_eq!(manage(&mut bench, 0x9 | 5 << 16, 0), OK);
    let state = done(Status::INVALID_SECONDARY_CONTROLLER_STATE);
    assert_eq!(manage(&mut bench, 0x7 | 5 << 16, 0), state);
    assert_eq!(manage(&mut bench, 0x7 | 4 << 16, 0), OK);
    assert_eq!(manage(&mut bench, 0x1 | 3 << 16, 0), OK);
    assert_eq!(manage(&mut bench, 0x1 | 4 << 16, 0), unknown);
    assert_eq!(manage(&mut bench, 0x5, 0), done(Status::INVALID_FIELD));
    bench.world.controllers[0].cntlid = 1;
    assert_eq!(
        manage(&mut bench, 0x9 | 5 << 16, 0),
        done(Status::INVALID_OPCODE)
    );
    assert_eq!(lists(&mut bench, 0x14, 0).0, done(Status::INVALID_FIELD));
}
