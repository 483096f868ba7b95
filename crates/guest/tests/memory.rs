//! Guest memory: lookup, limits and holds.
#![allow(unsafe_code)]

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use forebay_guest::{GuestMemory, Limits, MAX_PIECES, MapError, NewRegion, PieceError, Pieces};
use proptest::prelude::*;
use rustix::fs::MemfdFlags;
use rustix::io::Errno;

const PAGE: u64 = 4096;

fn memory_file(bytes: u64) -> OwnedFd {
    let file = rustix::fs::memfd_create("guest", MemfdFlags::CLOEXEC).expect("memfd");
    rustix::fs::ftruncate(&file, bytes).expect("its length");
    file
}

fn region(file: BorrowedFd<'_>, guest_address: u64, offset: u64, len_bytes: u64) -> NewRegion<'_> {
    NewRegion {
        guest_address,
        user_address: guest_address | 1 << 46,
        len_bytes,
        writable: true,
        file: Some((file, offset)),
    }
}

#[test]
fn invalid_memory_regions_are_refused() {
    let mut memory = GuestMemory::default();
    let file = memory_file(4 * PAGE);
    let map = |memory: &mut GuestMemory, fd: BorrowedFd<'_>, offset, len| {
        memory
            .map(&region(fd, 0, offset, len))
            .map_err(|e| e.to_string())
    };
    let (pipe, _other) = rustix::pipe::pipe().expect("pipe");
    let refused = map(&mut memory, pipe.as_fd(), 0, PAGE);
    assert_eq!(refused, Err(MapError::NotMemory.to_string()));
    let slow = std::fs::File::open("/proc/self/maps").expect("opens");
    let refused = map(&mut memory, slow.as_fd(), 0, PAGE);
    assert_eq!(refused, Err(MapError::NotMemory.to_string()));
    let file_bytes = 4 * PAGE;
    for (offset, len, error) in [
        (0, 0, MapError::BadRange),
        (0, 4 * PAGE + 1, MapError::PastEnd { file_bytes }),
        (4 * PAGE, 1, MapError::PastEnd { file_bytes }),
        (u64::MAX, 2, MapError::BadRange),
        (1 << 62, PAGE, MapError::BadRange),
        (u64::MAX - PAGE + 1, PAGE, MapError::BadRange),
    ] {
        let refused = map(&mut memory, file.as_fd(), offset, len);
        assert_eq!(refused, Err(error.to_string()), "{len} at {offset}");
    }
    let end = NewRegion {
        guest_address: u64::MAX - PAGE + 2,
        ..region(file.as_fd(), 0, 0, PAGE)
    };
    assert_eq!(memory.map(&end), Err(MapError::BadRange));
    let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&file));
    let only_read = std::fs::File::open(path).expect("opens");
    let refused = memory.map(&region(only_read.as_fd(), 0, 0, PAGE));
    assert_eq!(refused, Err(MapError::System(Errno::ACCESS)));
    assert!(memory.regions().is_empty());
    let new = NewRegion {
        writable: false,
        ..region(only_read.as_fd(), 0, 0, PAGE)
    };
    memory.map(&new).expect("maps");
    assert!(memory.read(0, &mut [0; 8]) && !memory.write(0, &[1]));
    let area = memory.area(0, 64).expect("is there");
    assert!(!area.store_u8(0, 1, Relaxed) && !area.write(0, &[1]));
    let mut pieces = Pieces::new();
    assert_eq!(pieces.push(&memory, 0, 8, true), Err(PieceError::NotMapped));
    pieces.clear();
    pieces.push(&memory, 0, 8, false).expect("is there");
    assert!(!pieces.is_writable() && !pieces.write(0, &[1]));
}

#[test]
fn regions_neither_overlap_nor_exceed_their_limits() {
    let file = memory_file(16 * PAGE);
    let mut memory = GuestMemory::new(Limits {
        regions: 3,
        bytes: 8 * PAGE,
    });
    memory
        .map(&region(file.as_fd(), 4 * PAGE, 0, 2 * PAGE))
        .expect("maps");
    for (at, len) in [(3, 2), (5, 1), (4, 2), (0, 5), (5, 4)] {
        let refused = memory.map(&region(file.as_fd(), at * PAGE, 0, len * PAGE));
        assert_eq!(refused, Err(MapError::Overlaps), "{len} at {at}");
    }
    let long = memory.map(&region(file.as_fd(), 8 * PAGE, 0, 7 * PAGE));
    assert_eq!(
        long,
        Err(MapError::TooLong {
            limit_bytes: 8 * PAGE
        })
    );
    let nowhere = NewRegion {
        file: None,
        ..region(file.as_fd(), 6 * PAGE, 0, PAGE)
    };
    memory.map(&nowhere).expect("is known");
    assert!(memory.area(6 * PAGE, 8).is_none() && !memory.read(6 * PAGE, &mut [0]));
    memory.map(&region(file.as_fd(), 0, 0, PAGE)).expect("maps");
    let many = memory.map(&region(file.as_fd(), 9 * PAGE, 0, PAGE));
    assert_eq!(many, Err(MapError::TooMany { limit: 3 }));
    let begins: Vec<u64> = memory
        .regions()
        .iter()
        .map(|r| r.guest_address() / PAGE)
        .collect();
    assert_eq!(begins, [0, 4, 6]);
    assert!(memory.unmap(4 * PAGE, PAGE).is_none() && memory.unmap(5 * PAGE, 9).is_none());
    assert!(memory.unmap(0, 0).is_none() && memory.unmap(u64::MAX, 2).is_none());
    assert_eq!(memory.regions().len(), 3);
    let gone = memory.unmap(2 * PAGE, 20 * PAGE).expect("whole ones");
    assert!(gone.regions() == 2 && gone.is_free());
    let bad = [
        region(file.as_fd(), 0, 0, PAGE),
        region(file.as_fd(), 0, 0, PAGE),
    ];
    assert!(matches!(memory.replace(&bad), Err(MapError::Overlaps)));
    assert_eq!(memory.regions().len(), 1);
    let gone = memory.replace(&bad[1..]).expect("maps");
    assert!(gone.is_free());
}

#[test]
fn addresses_lead_to_their_bytes() {
    let file = memory_file(16 * PAGE);
    let mut memory = GuestMemory::default();
    // Adjacent for the guest but not in the file; and one that begins within a page.
    let odd = region(file.as_fd(), 1 << 40, 100, 1000);
    let two = [
        region(file.as_fd(), 0x10000, 8 * PAGE, PAGE),
        region(file.as_fd(), 0x11000, 2 * PAGE, PAGE),
    ];
    for new in two.iter().chain([&odd]) {
        memory.map(new).expect("maps");
    }
    assert!(memory.write(0x10ffe, &[1, 2, 3, 4]));
    let mut bytes = [0; 4];
    rustix::io::pread(&file, &mut bytes[..2], 9 * PAGE - 2).expect("reads");
    rustix::io::pread(&file, &mut bytes[2..], 2 * PAGE).expect("reads");
    assert_eq!(bytes, [1, 2, 3, 4]);
    assert!(memory.read(0x10ffe, &mut bytes) && bytes == [1, 2, 3, 4]);
    assert!(!memory.read(0x11ffe, &mut bytes) && !memory.read(0xffff, &mut bytes));
    assert!(!memory.read(u64::MAX - 1, &mut bytes) && memory.read(u64::MAX, &mut []));
    assert!(memory.write((1 << 40) + 998, &[7, 8]) && !memory.write((1 << 40) + 999, &[7, 8]));
    rustix::io::pread(&file, &mut bytes[..2], 1098).expect("reads");
    // The one that ends outside is partly written.
    assert_eq!(bytes[..2], [7, 7]);
    let area = memory.area(0x10000, PAGE as usize).expect("is there");
    assert!(memory.area(0x10000, PAGE as usize + 1).is_none());
    assert!(area.store_u16(10, 0x1234, Release));
    assert_eq!(area.load_u8(10, Relaxed), Some(0x34));
    assert_eq!(area.load_u16(10, Acquire), Some(0x1234));
    assert_eq!(area.load_u16(11, Acquire), None);
    assert_eq!(area.load_u32(4094, Acquire), None);
    assert_eq!(area.load_u64(usize::MAX - 6, Acquire), None);
    assert!(!area.store_u64(4092, 1, Release) && area.store_u64(4088, 1, Release));
    let user = memory.area_of_user(1 << 46 | 0x1100a, 2).expect("is there");
    assert!(user.store_u16(0, 5, Release));
    assert_eq!(
        memory.guest_address_of_user(1 << 46 | 0x1100a),
        Some(0x1100a)
    );
    assert!(memory.read(0x1100a, &mut bytes[..1]) && bytes[0] == 5);
    assert!(memory.area_of_user(0x1100a, 2).is_none());
}

#[test]
fn pieces_are_what_lies_together() {
    let file = memory_file(600 * PAGE);
    let mut memory = GuestMemory::default();
    for (at, from) in [(0, 0), (4, 16), (8, 32), (12, 48), (16, 64)] {
        let new = region(file.as_fd(), at * PAGE, from * PAGE, 4 * PAGE);
        memory.map(&new).expect("maps");
    }
    let lens = |pieces: &Pieces| -> Vec<u32> {
        pieces
            .slices()
            .iter()
            .map(|slice| slice.len_bytes())
            .collect()
    };
    let mut pieces = Pieces::new();
    for (at, len) in [(100, 4), (104, 3992), (4096, 4096), (3 * 4096, 8)] {
        pieces.push(&memory, at, len, true).expect("is there");
    }
    assert_eq!(lens(&pieces), [8092, 8]);
    pieces.clear();
    pieces
        .push(&memory, PAGE, 17 * 4096, true)
        .expect("is there");
    assert_eq!(pieces.len_bytes(), 17 * 4096);
    assert_eq!(
        lens(&pieces),
        [3 * 4096, 4 * 4096, 4 * 4096, 4 * 4096, 2 * 4096]
    );
    assert!(pieces.write(3 * 4096 - 1, &[1, 2, 3]) && memory.read(4 * PAGE - 1, &mut [0; 3]));
    let mut bytes = [0; 3];
    assert!(memory.read(4 * PAGE - 1, &mut bytes) && bytes == [1, 2, 3]);
    assert!(pieces.read(17 * 4096 - 3, &mut bytes) && !pieces.read(17 * 4096 - 2, &mut bytes));
    assert!(!pieces.read(u32::MAX, &mut bytes));
    let hold = pieces.take();
    assert_eq!((pieces.count(), pieces.len_bytes()), (0, 0));
    let gone = memory.unmap(16 * PAGE, 4 * PAGE).expect("whole");
    assert!(!gone.is_free(), "a command has it");
    drop(hold);
    assert!(gone.is_free());
    pieces.push(&memory, 0, 512, true).expect("is there");
    pieces.push(&memory, 8 * PAGE, 512, true).expect("is there");
    pieces.push(&memory, 512, 512, true).expect("is there");
    assert_eq!(lens(&pieces), [512, 512, 512]);
    assert!(memory.unmap(4 * PAGE, 4 * PAGE).expect("whole").is_free());
    let area = memory.area(12 * PAGE, 8).expect("is there");
    let gone = memory.unmap_all();
    assert!(!gone.is_free());
    pieces.clear();
    assert!(area.store_u8(0, 1, Relaxed));
    drop(area);
    assert!(!gone.is_free(), "kept for the next command");
    pieces.let_go();
    assert!(gone.is_free());
    let new = region(file.as_fd(), 0, 0, 600 * PAGE);
    memory.map(&new).expect("maps");
    for at in 0..MAX_PIECES as u64 {
        pieces
            .push(&memory, at * 2 * PAGE, 4096, true)
            .expect("room");
    }
    let last = MAX_PIECES as u64 * 2 * PAGE;
    assert_eq!(
        pieces.push(&memory, last, 1, true),
        Err(PieceError::TooMany)
    );
    let next = (MAX_PIECES as u64 * 2 - 1) * PAGE;
    pieces
        .push(&memory, next, 4, true)
        .expect("it is one with the last");
    assert_eq!(
        pieces.push(&memory, 600 * PAGE - 4, 8, true),
        Err(PieceError::TooMany)
    );
    assert_eq!(
        pieces.push(&memory, u64::MAX, 8, true),
        Err(PieceError::NotMapped)
    );
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn reads_and_writes_are_as_of_one_memory(
        steps in prop::collection::vec((0u64..40 * 64, 1usize..700, any::<u8>()), 1..40),
        order in Just([3usize, 0, 4, 1, 2]).prop_shuffle(),
    ) {
        // Regions of 512 bytes, one missing, shuffled in the file.
        let file = memory_file(4 * PAGE);
        let mut memory = GuestMemory::default();
        for (at, place) in order.iter().enumerate().filter(|(at, _)| *at != 3) {
            let new = region(file.as_fd(), at as u64 * 512, *place as u64 * 512, 512);
            memory.map(&new).expect("maps");
        }
        let there = |at: u64| at < 5 * 512 && at / 512 != 3;
        let mut model = vec![0u8; 6000];
        for (at, len, byte) in steps {
            let range = at..at + len as u64;
            let good = range.clone().all(there);
            let mut pieces = Pieces::new();
            let pushed = pieces.push(&memory, at, len as u32, true);
            prop_assert_eq!(pushed.is_ok(), good);
            if good {
                let bytes = vec![byte; len];
                let written = match byte % 2 {
                    0 => pieces.write(0, &bytes),
                    _ => memory.write(at, &bytes),
                };
                prop_assert!(written);
                model[at as usize..at as usize + len].fill(byte);
            } else {
                prop_assert!(!memory.read(at, &mut vec![0; len]));
            }
        }
        for at in (0..5 * 512u64).filter(|at| there(*at)) {
            let mut byte = [0];
            prop_assert!(memory.read(at, &mut byte));
            prop_assert_eq!(byte[0], model[at as usize]);
        }
    }
}
