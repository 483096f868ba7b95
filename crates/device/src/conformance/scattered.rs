//! Operations on several pieces of memory, on every kind of device.
#![allow(unsafe_code)]

use std::io;

use rustix::io::Errno;

use super::driver::{Driver, PIECES, Rng, SLOT_BYTES, random_bytes};
use crate::device::Device;
use crate::fixed::{MAX_ENTRY_BYTES, Pinned};
use crate::mem::{Buf, StaticRegion};
use crate::op::{Finish, Op};
use crate::vectors::Bufs;

/// Pieces (slot, start, length); the first slot's number selects the list.
pub(super) fn list(driver: &mut Driver, pieces: &[(u32, u32, u32)]) -> Bufs {
    let list = pieces[0].0 as usize;
    for (at, (slot, from, len)) in pieces.iter().enumerate() {
        let whole = driver.buf(*slot, SLOT_BYTES);
        let buf = whole.slice(*from, *len).expect("inside");
        assert!(driver.lists.set(list, at, buf));
    }
    // SAFETY: all were just set, of memory that is never unmapped; each list has one operation at a
    // time.
    unsafe { driver.lists.bufs(list, 0, pieces.len()) }.expect("a list")
}

impl Driver {
    /// Pieces (start, length) of one slot, in this order.
    pub fn pieces(&mut self, slot: u32, pieces: &[(u32, u32)]) -> Bufs {
        let pieces = pieces.iter().map(|(from, len)| (slot, *from, *len));
        list(self, &pieces.collect::<Vec<_>>())
    }
}

impl Pinned {
    /// Pins the start of a region once more, as another entry.
    pub fn again(&mut self, region: &StaticRegion) -> io::Result<()> {
        let len = region.len_bytes().min(MAX_ENTRY_BYTES);
        let ptr = region.at(0, len).ok_or(Errno::INVAL)?;
        // SAFETY: mapped forever, readable and writable.
        unsafe { self.pin(ptr, len) }
    }
}

pub(super) fn in_pieces(
    driver: &mut Driver,
    list: u64,
    buf: Buf,
    block: usize,
    rng: &mut Rng,
) -> Option<Bufs> {
    if rng.u64(..2) == 0 {
        return None;
    }
    let (list, block) = (list as usize, block as u32);
    let mut count = 0;
    let mut from = 0;
    while from < buf.len_bytes() {
        let left = buf.len_bytes() - from;
        let some = block * (1 + rng.u32(..8));
        let len = if count + 1 == PIECES {
            left
        } else {
            some.min(left)
        };
        assert!(driver.lists.set(list, count, buf.slice(from, len)?));
        (count, from) = (count + 1, from + len);
    }
    // SAFETY: as in `list`.
    unsafe { driver.lists.bufs(list, 0, count) }
}

pub(super) fn bad_pieces_are_refused(driver: &mut Driver, device: &Device) {
    let info = device.info().clone();
    let block = info.block_bytes;
    let refused = Some(Err(Errno::INVAL));
    let odd = list(driver, &[(1, 0, block), (2, 0, block / 2)]);
    assert_eq!(driver.start(device, Op::read_pieces(0, odd), 1), refused);
    let two = list(driver, &[(1, 0, block), (2, 0, block)]);
    let last = info.capacity_bytes - u64::from(block);
    assert_eq!(
        driver.start(device, Op::write_pieces(last, two), 1),
        refused
    );
    if info.memory_align_bytes > 1 {
        for crooked in [
            [(1, 0, block), (2, 1, block)],
            [(1, 0, block / 2), (2, 0, block + block / 2)],
        ] {
            let op = Op::read_pieces(0, list(driver, &crooked));
            assert!(!device.takes(&op));
            assert_eq!(driver.start(device, op, 1), refused);
        }
    }
    assert_eq!(driver.ring.queued(), 0, "a refused operation was queued");
}

pub(super) fn places(block: u32) -> Vec<(u32, u32, u32)> {
    let pieces = [
        (5, 3, 1),
        (2, 0, 4),
        (2, 8, 2),
        (9, 1, 1),
        (4, 16, 8),
        (3, 2, 3),
    ];
    let in_bytes = |(slot, from, len)| (slot, from * block, len * block);
    pieces.map(in_bytes).to_vec()
}

pub(super) fn bytes_of(driver: &Driver, pieces: &[(u32, u32, u32)]) -> Vec<u8> {
    let of = |(slot, from, len): &(u32, u32, u32)| {
        let all = driver.bytes(*slot, (from + len) as usize);
        all[*from as usize..].to_vec()
    };
    pieces.iter().flat_map(of).collect()
}

pub(super) fn fill(driver: &Driver, pieces: &[(u32, u32, u32)], bytes: &[u8]) {
    let mut rest = bytes;
    for (slot, from, len) in pieces {
        let (now, later) = rest.split_at(*len as usize);
        let mut all = driver.bytes(*slot, *from as usize);
        all.extend_from_slice(now);
        driver.fill(*slot, &all);
        rest = later;
    }
}

pub(super) fn pieces_are_read_and_written(driver: &mut Driver, device: &Device, from: u64) {
    let block = device.info().block_bytes;
    let mut rng = Rng::with_seed(31);
    let mut places = places(block);
    if device.info().memory_align_bytes == 1 {
        // Then only the sum must be aligned.
        places.extend([(6, 1, block - 3), (7, 5, 3)]);
    }
    for count in 1..=places.len() {
        let places = &places[..count];
        let len: u32 = places.iter().map(|place| place.2).sum();
        if !len.is_multiple_of(block) {
            continue;
        }
        let bytes = random_bytes(&mut rng, len as usize);
        fill(driver, places, &bytes);
        let op = Op::write_pieces(from, list(driver, places));
        let op = if count % 2 == 0 { op.with_dsync() } else { op };
        assert_eq!(op.len_bytes(), u64::from(len));
        driver.run(device, op).expect("write");
        assert!(driver.read(device, from, len as usize) == bytes);
        fill(driver, places, &vec![0; len as usize]);
        let op = Op::read_pieces(from, list(driver, places));
        driver.run(device, op).expect("read");
        assert!(bytes_of(driver, places) == bytes, "{count} pieces");
    }
}

pub(super) fn a_rest_goes_where_it_should(driver: &mut Driver, device: &Device, from: u64) {
    let block = device.info().block_bytes;
    let places = places(block);
    let blocks: u32 = places.iter().map(|place| place.2 / block).sum();
    let bytes = random_bytes(&mut Rng::with_seed(32), (blocks * block) as usize);
    driver.write(device, from, &bytes);
    for done in 1..blocks {
        fill(driver, &places, &vec![0xee; bytes.len()]);
        let mut op = Op::read_pieces(from, list(driver, &places));
        if device.backend.request(&mut op).is_none() {
            return;
        }
        let done = (done * block) as usize;
        let Finish::Again(rest) = device.finish(op, done as i32) else {
            panic!("there is a rest");
        };
        driver.run(device, rest).expect("read");
        let found = bytes_of(driver, &places);
        assert!(found[..done].iter().all(|byte| *byte == 0xee), "{done}");
        assert!(found[done..] == bytes[done..], "{done}");
    }
}

/// A device that discards data leaves the reader's pieces as they were.
pub(super) fn nothing_is_put_there(driver: &mut Driver, device: &Device, from: u64) {
    let places = places(device.info().block_bytes);
    let bytes = random_bytes(
        &mut Rng::with_seed(33),
        places.iter().map(|place| place.2 as usize).sum(),
    );
    fill(driver, &places, &bytes);
    let op = Op::write_pieces(from, list(driver, &places));
    driver.run(device, op).expect("write");
    let before = random_bytes(&mut Rng::with_seed(35), bytes.len());
    fill(driver, &places, &before);
    let op = Op::read_pieces(from, list(driver, &places));
    driver.run(device, op).expect("read");
    assert!(bytes_of(driver, &places) == before);
}
