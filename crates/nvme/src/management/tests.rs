use super::*;
use crate::opcode::admin;
use proptest::prelude::*;
use zerocopy::FromZeros;
use zerocopy::IntoBytes;
use zerocopy::little_endian::{U16, U32, U64};

const INVALID: Status = Status::INVALID_FIELD;

fn command(opcode: u8, nsid: u32, cdw10: u32) -> Sqe {
    Sqe::new(opcode, 0).with_nsid(nsid).with_cdw(10, cdw10)
}

fn create(change: impl Fn(&mut IdentifyNamespace)) -> Result<NamespaceManagement, Status> {
    let mut id = IdentifyNamespace::new_zeroed();
    (id.nsze, id.ncap) = (U64::new(1000), U64::new(1000));
    change(&mut id);
    NamespaceManagement::decode(&command(admin::NAMESPACE_MANAGEMENT, 0, 0), id.as_bytes())
}

#[test]
fn namespaces_to_create() {
    let new = |size_bytes, block_bytes, shared| {
        Ok(NamespaceManagement::Create(NewNamespace {
            size_bytes,
            block_bytes,
            shared,
        }))
    };
    assert_eq!(create(|_| ()), new(4_096_000, 4096, false));
    // The place of metadata, without metadata.
    assert_eq!(
        create(|id| (id.flbas, id.nmic) = (0x11, 1)),
        new(512_000, 512, true)
    );
    for flbas in [2, 0xF, 0x21, 0x40] {
        assert_eq!(create(|id| id.flbas = flbas), Err(Status::INVALID_FORMAT));
    }
    assert_eq!(create(|id| id.dps = 1), Err(Status::INVALID_FORMAT));
    assert_eq!(
        create(|id| (id.nsze, id.ncap) = Default::default()),
        Err(INVALID)
    );
    assert_eq!(create(|id| id.ncap = U64::new(1001)), Err(INVALID));
    let thin = Err(Status::THIN_PROVISIONING_NOT_SUPPORTED);
    assert_eq!(create(|id| id.ncap = U64::new(999)), thin);
    assert_eq!(create(|id| id.ncap = U64::new(0)), thin);
    let huge =
        |id: &mut IdentifyNamespace| (id.nsze, id.ncap) = (U64::new(1 << 55), U64::new(1 << 55));
    assert_eq!(create(huge), Err(Status::NAMESPACE_INSUFFICIENT_CAPACITY));
    assert_eq!(create(|id| id.anagrpid = U32::new(1)), Err(INVALID));
    assert_eq!(create(|id| id.nvmsetid = U16::new(1)), Err(INVALID));
    assert_eq!(create(|id| id.endgid = U16::new(1)), Err(INVALID));
    let sqe = command(admin::NAMESPACE_MANAGEMENT, 0, 0);
    for bytes in [0, 4095, 4097] {
        assert_eq!(
            NamespaceManagement::decode(&sqe, &vec![0; bytes]),
            Err(INVALID)
        );
    }
    assert_eq!(
        NamespaceManagement::decode(&sqe.with_cdw(11, 2 << 24), &[]),
        Err(Status::IO_COMMAND_SET_NOT_SUPPORTED)
    );
}

#[test]
fn namespaces_to_delete() {
    let delete = |nsid, cdw10| {
        NamespaceManagement::decode(&command(admin::NAMESPACE_MANAGEMENT, nsid, cdw10), &[])
    };
    let most = NSID_ALL - 1;
    assert_eq!(
        delete(most, 1),
        Ok(NamespaceManagement::Delete { nsid: most })
    );
    assert_eq!(delete(NSID_ALL, 1), Err(INVALID));
    assert_eq!(delete(0, 1), Err(Status::INVALID_NAMESPACE_OR_FORMAT));
    assert_eq!(delete(1, 2), Err(INVALID));
}

fn list(ids: &[u16]) -> Vec<u8> {
    let mut list: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
    list.resize(4096, 0);
    list
}

#[test]
fn controller_lists_are_ascending() {
    let decode = |nsid, cdw10, ids: &[u16]| {
        let sqe = command(admin::NAMESPACE_ATTACHMENT, nsid, cdw10);
        NamespaceAttachment::decode(&sqe, &list(ids))
    };
    let some = |attach, controllers: &[u16]| {
        Ok(NamespaceAttachment {
            attach,
            nsid: 70_000,
            controllers: controllers.to_vec(),
        })
    };
    assert_eq!(decode(70_000, 0, &[1, 0xFFEF]), some(true, &[0xFFEF]));
    assert_eq!(decode(70_000, 1, &[3, 0, 2, 9, 7]), some(false, &[0, 2, 9]));
    let all: Vec<u16> = (0..2047).collect();
    assert_eq!(
        decode(70_000, 0, &[&[2047], &all[..]].concat()),
        some(true, &all)
    );
    let bad = Err(Status::CONTROLLER_LIST_INVALID);
    for ids in [&[0][..], &[2, 5, 5], &[2, 5, 4], &[2048], &[u16::MAX]] {
        assert_eq!(decode(70_000, 0, ids), bad, "{ids:?}");
    }
    let full = [&[2048], &all[..], &[2047]].concat();
    assert_eq!(decode(70_000, 0, &full), bad);
    assert_eq!(decode(70_000, 2, &[1, 1]), Err(INVALID));
    assert_eq!(decode(NSID_ALL, 0, &[1, 1]), Err(INVALID));
    assert_eq!(
        decode(0, 0, &[1, 1]),
        Err(Status::INVALID_NAMESPACE_OR_FORMAT)
    );
    let sqe = command(admin::NAMESPACE_ATTACHMENT, 1, 0);
    // Short data.
    assert_eq!(NamespaceAttachment::decode(&sqe, &[1, 0, 7]), bad);
    assert_eq!(NamespaceAttachment::decode(&sqe, &[1]), Err(INVALID));
}

#[test]
fn pieces_of_an_image() {
    let decode = |numd, offset, bytes| {
        let sqe = command(admin::FIRMWARE_DOWNLOAD, 0, numd).with_cdw(11, offset);
        FirmwareDownload::decode(&sqe, &vec![0; bytes])
    };
    let piece = |offset_bytes, length_bytes| {
        Ok(FirmwareDownload {
            offset_bytes,
            length_bytes,
        })
    };
    assert_eq!(decode(1023, 1024, 4096), piece(4096, 4096));
    assert_eq!(decode(0, u32::MAX, 4), piece(u64::from(u32::MAX) * 4, 4));
    for (numd, bytes) in [(1023, 4092), (1023, 4100), (u32::MAX, 0), (0, 0)] {
        assert_eq!(decode(numd, 0, bytes), Err(INVALID));
    }
}

#[test]
fn commits_of_slots() {
    let decode = |slot: u32, action: u32| {
        FirmwareCommit::decode(&command(admin::FIRMWARE_COMMIT, 0, slot | action << 3))
    };
    let commit = |slot, action| Ok(FirmwareCommit { slot, action });
    assert_eq!(decode(2, 0), commit(2, CommitAction::Replace));
    assert_eq!(decode(0, 1), commit(2, CommitAction::ReplaceAndSelect));
    assert_eq!(decode(1, 2), commit(1, CommitAction::Select));
    assert_eq!(decode(1, 3), commit(1, CommitAction::Activate));
    assert_eq!(decode(0, 3), commit(2, CommitAction::Activate));
    for (slot, action) in [(1, 0), (1, 1), (3, 0), (7, 3)] {
        assert_eq!(decode(slot, action), Err(Status::INVALID_FIRMWARE_SLOT));
    }
    for action in 4..8 {
        assert_eq!(decode(2, action), Err(INVALID));
    }
}

#[test]
fn formats_of_one_namespace() {
    let decode = |nsid, cdw10| FormatNvm::decode(&command(admin::FORMAT_NVM, nsid, cdw10));
    let format = |block_bytes, erase| {
        Ok(FormatNvm {
            nsid: 9,
            block_bytes,
            erase,
        })
    };
    assert_eq!(decode(9, 0), format(4096, false));
    // MSET and PIL, without metadata.
    assert_eq!(decode(9, 1 << 9 | 1 << 8 | 1 << 4 | 1), format(512, true));
    for ses in 2..8 {
        assert_eq!(decode(9, ses << 9), Err(INVALID));
    }
    for cdw10 in [2, 1 << 12, 1 << 13, 1 << 5, 1 << 7] {
        assert_eq!(decode(9, cdw10), Err(Status::INVALID_FORMAT), "{cdw10:#x}");
    }
    assert_eq!(decode(NSID_ALL, 1 << 9), Err(INVALID));
    assert_eq!(decode(0, 1 << 9), Err(Status::INVALID_NAMESPACE_OR_FORMAT));
}

proptest! {
    #[test]
    fn any_bytes(
        raw in any::<[u8; 32]>(),
        small in 0u32..16,
        data in proptest::collection::vec(any::<u8>(), 0..5000),
        whole in any::<bool>(),
    ) {
        let mut sqe = Sqe::new_zeroed();
        sqe.as_mut_bytes()[32..].copy_from_slice(&raw);
        let mut data = data;
        if whole {
            data.resize(4096, 0);
        }
        for sqe in [sqe, sqe.with_nsid(1).with_cdw(10, small)] {
            if let Ok(NamespaceManagement::Create(new)) = NamespaceManagement::decode(&sqe, &data) {
                prop_assert!(new.size_bytes >= u64::from(new.block_bytes));
            }
            if let Ok(attachment) = NamespaceAttachment::decode(&sqe, &data) {
                let count = attachment.controllers.len();
                prop_assert!((1..=MOST_CONTROLLERS).contains(&count) && count * 2 < data.len());
            }
            if let Ok(piece) = FirmwareDownload::decode(&sqe, &data) {
                prop_assert_eq!(piece.length_bytes, data.len());
            }
            if let Ok(commit) = FirmwareCommit::decode(&sqe) {
                prop_assert!((1..=2).contains(&commit.slot));
            }
            if let Ok(format) = FormatNvm::decode(&sqe) {
                prop_assert!(BLOCK_BYTES.contains(&format.block_bytes));
            }
        }
    }
}
