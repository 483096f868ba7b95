//! PRPs and SGLs.

use super::*;

pub(super) fn pieces(memory: &Flat, sqe: &Sqe, bytes: u32) -> Result<Vec<(u64, u32)>, Status> {
    let mut list = Vec::new();
    crate::pcie::data::pieces(sqe, bytes, memory, |address, len| {
        list.push((address, len));
        Ok(())
    })?;
    assert_eq!(list.iter().map(|(_, len)| len).sum::<u32>(), bytes);
    Ok(list)
}

#[test]
fn prps_are_pages_and_lists_of_pages() {
    let memory = Flat::new(4 << 20);
    let prps = |a, b| with_prps(Sqe::new(1, 1), a, b);
    assert_eq!(
        pieces(&memory, &prps(0x1200, 7), 512),
        Ok(vec![(0x1200, 512)])
    );
    let two = pieces(&memory, &prps(0x1200, 0x3000), 4096);
    assert_eq!(two, Ok(vec![(0x1200, 0xE00), (0x3000, 0x200)]));
    let odd = Err(Status::PRP_OFFSET_INVALID);
    assert_eq!(pieces(&memory, &prps(0x1202, 0), 512), odd);
    assert_eq!(pieces(&memory, &prps(0x1200, 0x3004), 4096), odd);
    // 512 KiB from the middle of a page: 129 entries in two lists.
    let entry = |n: u64| (0x10_0000 + n * 0x2000).to_le_bytes();
    let list = 0x8000 - 16;
    memory.put(list, &entry(0));
    memory.put(list + 8, &0xA000u64.to_le_bytes());
    for n in 1..128 {
        memory.put(0xA000 + (n - 1) * 8, &entry(n));
    }
    let long = pieces(&memory, &prps(0x1800, list), 512 << 10).unwrap();
    assert_eq!(
        (long.len(), long[1], long[128]),
        (129, (0x10_0000, 4096), (0x10_0000 + 127 * 0x2000, 0x800))
    );
    // Endless and inaccessible lists.
    memory.put(0xBFF8, &0xBFF8u64.to_le_bytes());
    assert_eq!(pieces(&memory, &prps(0x1000, 0xBFF8), 512 << 10), odd);
    assert_eq!(pieces(&memory, &prps(0x1000, 0xBFF4), 512 << 10), odd);
    let lost = Err(Status::DATA_TRANSFER_ERROR);
    assert_eq!(pieces(&memory, &prps(0x1000, 4 << 20), 512 << 10), lost);
    assert_eq!(
        pieces(&memory, &prps(0x1000, u64::MAX - 7), 512 << 10),
        lost
    );
    assert_eq!(pieces(&memory, &prps(3, 3), 0), Ok(vec![]));
}

fn descriptor(kind: u8, address: u64, length: u32) -> SglDescriptor {
    SglDescriptor {
        address: U64::new(address),
        length: U32::new(length),
        kind,
        ..SglDescriptor::new_zeroed()
    }
}

#[test]
fn sgls_are_blocks_and_segments_of_them() {
    let memory = Flat::new(1 << 20);
    let sgl = |kind, address, length| Sqe::new(1, 1).with_sgl(descriptor(kind, address, length));
    let (block, segment, last) = (0x00, 0x20, 0x30);
    assert_eq!(
        pieces(&memory, &sgl(block, 0x1003, 512), 512),
        Ok(vec![(0x1003, 512)])
    );
    let length = Err(Status::DATA_SGL_LENGTH_INVALID);
    assert_eq!(pieces(&memory, &sgl(block, 0x1000, 511), 512), length);
    let longer = pieces(&memory, &sgl(block, 0x1000, 4096), 512);
    assert_eq!(longer, Ok(vec![(0x1000, 512)]));
    let put = |at: u64, list: &[SglDescriptor]| memory.put(at, list.as_bytes());
    put(
        0x100,
        &[
            descriptor(block, 1, 100),
            descriptor(block, 9, 0),
            descriptor(segment, 0x200, 32),
        ],
    );
    put(
        0x200,
        &[descriptor(block, 3, 300), descriptor(last, 0x300, 16)],
    );
    put(0x300, &[descriptor(block, 5, 112)]);
    let chain = sgl(segment, 0x100, 48);
    assert_eq!(
        pieces(&memory, &chain, 512),
        Ok(vec![(1, 100), (3, 300), (5, 112)])
    );
    assert_eq!(pieces(&memory, &chain, 513), length);
    let wrong = Err(Status::INVALID_SGL_SEGMENT_DESCRIPTOR);
    // Misplaced blocks and segment descriptors.
    assert_eq!(pieces(&memory, &sgl(segment, 0x300, 16), 112), wrong);
    assert_eq!(pieces(&memory, &sgl(last, 0x200, 32), 300), wrong);
    assert_eq!(pieces(&memory, &sgl(segment, 0x100, 32), 100), wrong);
    assert_eq!(pieces(&memory, &sgl(last, 0x300, 0), 112), wrong);
    assert_eq!(pieces(&memory, &sgl(last, 0x300, 17), 112), wrong);
    put(0x400, &[descriptor(0x10, 0, 512)]);
    let kind = Err(Status::SGL_DESCRIPTOR_TYPE_INVALID);
    assert_eq!(pieces(&memory, &sgl(last, 0x400, 16), 512), kind);
    assert_eq!(pieces(&memory, &sgl(0x5A, 0, 512), 512), kind);
    put(0x500, &[descriptor(segment, 0x500, 16)]);
    let many = Err(Status::INVALID_NUMBER_OF_SGL_DESCRIPTORS);
    assert_eq!(pieces(&memory, &sgl(segment, 0x500, 16), 512), many);
    assert_eq!(pieces(&memory, &sgl(last, 0, !15), 512), many);
    assert_eq!(
        pieces(&memory, &sgl(last, 1 << 20, 16), 512),
        Err(Status::DATA_TRANSFER_ERROR)
    );
    let mut reserved = sgl(block, 0, 512);
    reserved.flags |= 0xC0;
    assert_eq!(pieces(&memory, &reserved, 512), Err(Status::INVALID_FIELD));
}
