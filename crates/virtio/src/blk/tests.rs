use super::*;
use crate::model::{GUEST_ADDRESS, Vm};

const DISK: Disk = Disk {
    sectors: 1024,
    block_bytes: 4096,
    read_only: false,
    queues: 3,
    granule_bytes: 65536,
};

struct Case {
    vm: Vm,
    chain: Chain,
}

/// Readable bytes cut at `cuts`, and writable pieces of these lengths.
fn case(readable: &[u8], cuts: &[usize], writable: &[u32]) -> Case {
    let vm = Vm::new(1 << 16);
    let mut chain = Chain::default();
    let mut from = 0;
    for cut in cuts.iter().copied().chain([readable.len()]) {
        if cut > from {
            // Gaps between pieces, so that nothing works by chance.
            let at = 2 * from;
            assert!(vm.all.write(at, &readable[from..cut]));
            chain.push(GUEST_ADDRESS + at as u64, (cut - from) as u32, false);
            from = cut;
        }
    }
    let mut at = GUEST_ADDRESS + 32768;
    for len in writable {
        chain.push(at, *len, true);
        at += u64::from(*len) + 64;
    }
    Case { vm, chain }
}

fn header(kind: u32, sector: u64) -> Vec<u8> {
    let mut bytes = kind.to_le_bytes().to_vec();
    bytes.extend(0u32.to_le_bytes());
    bytes.extend(sector.to_le_bytes());
    bytes
}

impl Case {
    fn parse_on(&self, disk: &Disk) -> Result<Request, BlkError> {
        parse(&self.chain, &self.vm.memory, disk)
    }

    fn work(&self) -> Result<Work, BlkStatus> {
        self.parse_on(&DISK).expect("a request").work
    }
}

#[test]
fn borders_of_descriptors_say_nothing() {
    let mut readable = header(T_OUT, 8);
    readable.extend([7; 4096]);
    for cuts in [&[16][..], &[1, 15, 17], &[8, 4000], &[]] {
        let case = case(&readable, cuts, &[1]);
        let request = case.parse_on(&DISK).expect("a request");
        assert_eq!(request.work, Ok(Work::Out { offset_bytes: 4096 }));
        assert_eq!(request.data_bytes, 4096);
        let mut all = Vec::new();
        for piece in request.data(&case.chain) {
            let mut bytes = vec![0; piece.len as usize];
            assert!(case.vm.memory.read(piece.address, &mut bytes));
            all.extend(bytes);
        }
        assert_eq!(all, [7; 4096]);
    }
    for writable in [&[4096, 1][..], &[4097], &[1, 4095, 1], &[4095, 2]] {
        let case = case(&header(T_IN, 0), &[], writable);
        let request = case.parse_on(&DISK).expect("a request");
        let last = case.chain.writable().last().expect("one");
        let end = last.address + u64::from(last.len);
        assert_eq!(request.status_address, end - 1);
        assert_eq!(
            (request.data_bytes, request.work),
            (4096, Ok(Work::In { offset_bytes: 0 }))
        );
        let data: u32 = request.data(&case.chain).map(|piece| piece.len).sum();
        assert_eq!(data, 4096);
        let last = request.data(&case.chain).last().expect("a piece");
        assert!(last.address + u64::from(last.len) <= request.status_address);
    }
}

#[test]
fn a_request_without_a_status_byte_breaks_the_device() {
    let no_status = case(&header(T_FLUSH, 0), &[], &[]);
    assert_eq!(no_status.parse_on(&DISK), Err(BlkError::NoStatus));
}

#[test]
fn bad_requests_get_an_error_in_their_status_byte() {
    let short = case(&header(T_IN, 0)[..15], &[], &[513]);
    let mut outside = case(&[], &[], &[]);
    outside.chain.push(8, 16, false);
    outside.chain.push(GUEST_ADDRESS, 1, true);
    let mut disordered = case(&header(T_IN, 0), &[], &[4096, 1]);
    disordered.chain.push(GUEST_ADDRESS, 1, false);
    let mut empty = case(&header(T_IN, 0), &[], &[4096, 1]);
    empty.chain.push(GUEST_ADDRESS, 0, true);
    for wrong in [short, outside, disordered, empty] {
        let last = wrong.chain.writable().last().expect("one");
        let expected = Request {
            work: Err(BlkStatus::IoErr),
            status_address: last.address + u64::from(last.len) - 1,
            data_bytes: 0,
        };
        assert_eq!(wrong.parse_on(&DISK), Ok(expected));
    }
}

#[test]
fn transfers_lie_within_the_disk_and_are_whole_blocks() {
    let read = |sector, bytes| case(&header(T_IN, sector), &[], &[bytes, 1]).work();
    assert_eq!(
        read(1016, 4096),
        Ok(Work::In {
            offset_bytes: 1016 * 512
        })
    );
    for (sector, bytes) in [
        (1017, 4096),
        (1024, 4096),
        (1016, 8192),
        (u64::MAX, 4096),
        (1 << 55, 4096),
        (1, 4096),
        (0, 512),
        (0, 4095),
    ] {
        assert_eq!(
            read(sector, bytes),
            Err(BlkStatus::IoErr),
            "{sector} {bytes}"
        );
    }
    let refused = case(&header(T_IN, 1), &[], &[4096, 1]);
    let request = refused.parse_on(&DISK).expect("a request");
    assert_eq!(
        (request.data_bytes, request.data(&refused.chain).count()),
        (0, 0)
    );
    let none = case(&header(T_IN, 0), &[], &[1]);
    assert_eq!(none.work(), Err(BlkStatus::IoErr));
    let mut write = header(T_OUT, 0);
    write.extend([0; 4096]);
    let write = case(&write, &[], &[1]);
    assert_eq!(write.work(), Ok(Work::Out { offset_bytes: 0 }));
}

#[test]
fn a_read_only_disk_refuses_what_writes() {
    let mut write = header(T_OUT, 0);
    write.extend([0; 4096]);
    let write = case(&write, &[], &[1]);
    let read_only = Disk {
        read_only: true,
        ..DISK
    };
    let refused = write.parse_on(&read_only).expect("a request");
    assert_eq!(
        (refused.work, refused.data_bytes),
        (Err(BlkStatus::IoErr), 0)
    );
    let writes = feature::BLK_DISCARD | feature::BLK_WRITE_ZEROES;
    let changed = DISK.features() ^ read_only.features();
    assert_eq!(changed, writes | feature::BLK_RO);
    assert_eq!(DISK.features() & writes, writes);
    for kind in [T_DISCARD, T_WRITE_ZEROES] {
        let mut bytes = header(kind, 0);
        bytes.extend([0; 8]);
        bytes.extend(8u64.to_le_bytes());
        let zero = case(&bytes, &[], &[1]);
        assert!(zero.work().is_ok());
        let refused = zero.parse_on(&read_only).expect("a request");
        assert_eq!(refused.work, Err(BlkStatus::IoErr));
    }
}

#[test]
fn other_requests() {
    assert_eq!(case(&header(T_FLUSH, 9), &[], &[1]).work(), Ok(Work::Flush));
    assert_eq!(
        case(&header(T_GET_ID, 0), &[], &[20, 1]).work(),
        Ok(Work::GetId)
    );
    for kind in [2, 3, 10, 14, 16, u32::MAX] {
        assert_eq!(
            case(&header(kind, 0), &[], &[1]).work(),
            Err(BlkStatus::Unsupported)
        );
    }
    let segment = |kind, sector: u64, sectors: u32, flags: u32, extra: usize| {
        let mut bytes = header(kind, 0);
        bytes.extend(sector.to_le_bytes());
        bytes.extend(sectors.to_le_bytes());
        bytes.extend(flags.to_le_bytes());
        bytes.resize(bytes.len() + extra, 0);
        case(&bytes, &[20], &[1]).work()
    };
    let (offset_bytes, len_bytes) = (4096, 8192);
    assert_eq!(
        segment(T_DISCARD, 8, 16, 0, 0),
        Ok(Work::Discard {
            offset_bytes,
            len_bytes
        })
    );
    for unmap in [false, true] {
        assert_eq!(
            segment(T_WRITE_ZEROES, 8, 16, u32::from(unmap), 0),
            Ok(Work::WriteZeroes {
                offset_bytes,
                len_bytes,
                unmap
            })
        );
    }
    assert_eq!(segment(T_DISCARD, 8, 16, 1, 0), Err(BlkStatus::Unsupported));
    assert_eq!(
        segment(T_WRITE_ZEROES, 8, 16, 2, 0),
        Err(BlkStatus::Unsupported)
    );
    for (sector, sectors, extra) in [
        (1016, 16, 0),
        (u64::MAX, 16, 0),
        (8, 0, 0),
        (8, u32::MAX, 0),
        (1, 8, 0),
        (0, 1, 0),
        (8, 16, 1),
        (8, 16, 16),
    ] {
        assert_eq!(
            segment(T_DISCARD, sector, sectors, 0, extra),
            Err(BlkStatus::IoErr)
        );
    }
}

#[test]
fn the_configuration_space_is_the_specifications() {
    let config = DISK.config(true);
    let at = |from: usize, bytes: usize| {
        let mut word = [0; 8];
        word[..bytes].copy_from_slice(&config[from..from + bytes]);
        u64::from_le_bytes(word)
    };
    assert_eq!((at(0, 8), at(12, 4), at(20, 4)), (1024, 126, 4096));
    assert_eq!((at(32, 1), at(34, 2)), (1, 3));
    assert_eq!((at(36, 4), at(40, 4), at(44, 4)), (1 << 22, 1, 128));
    assert_eq!((at(48, 4), at(52, 4), at(56, 1)), (1 << 22, 1, 1));
    assert_eq!(DISK.config(false)[CONFIG_WRITEBACK], 0);
}
