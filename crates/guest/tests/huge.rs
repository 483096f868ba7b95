//! Huge pages in a client's memory, in a program of its own: it reserves pages in the system
//! (`nr_hugepages`). Without pages or permission it only reports that.
#![allow(unsafe_code)]

use std::fs;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Release};

use forebay_guest::{Area, GuestMemory, MapError, Mapping, NewRegion, Pieces, guard};
use rustix::fs::{FallocateFlags, MemfdFlags};

const HUGE: u64 = 2 << 20;
const PAGES: u64 = 4;
const POOL: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB";

fn number(name: &str) -> Option<u64> {
    let text = fs::read_to_string(format!("{POOL}/{name}")).ok()?;
    text.trim().parse().ok()
}

/// Reserved pages, released on drop.
struct SetAside(u64);

impl SetAside {
    fn new() -> Option<Self> {
        let before = number("nr_hugepages")?;
        let own = Self(before);
        fs::write(format!("{POOL}/nr_hugepages"), (before + PAGES).to_string()).ok()?;
        (number("free_hugepages")? >= PAGES).then_some(own)
    }
}

impl Drop for SetAside {
    fn drop(&mut self) {
        let _ = fs::write(format!("{POOL}/nr_hugepages"), self.0.to_string());
    }
}

fn huge_file(pages: u64) -> Option<OwnedFd> {
    let flags = MemfdFlags::CLOEXEC
        | MemfdFlags::ALLOW_SEALING
        | MemfdFlags::HUGETLB
        | MemfdFlags::HUGE_2MB;
    let file = rustix::fs::memfd_create("guest", flags).ok()?;
    rustix::fs::ftruncate(&file, pages * HUGE).ok()?;
    Some(file)
}

#[test]
fn huge_pages_are_mapped_and_may_go_away() {
    let Some(_pages) = SetAside::new() else {
        println!("skipped: this system has no {PAGES} huge pages to give, or no right to ask");
        return;
    };
    let file = huge_file(PAGES).expect("huge pages are there");

    // A region that begins and ends within huge pages, and a neighbour that shares one.
    let mut memory = GuestMemory::default();
    for (guest_address, offset, len_bytes) in [(0, 0, HUGE + 4096), (1 << 32, HUGE + 4096, HUGE)] {
        memory
            .map(&NewRegion {
                guest_address,
                user_address: 0,
                len_bytes,
                writable: true,
                file: Some((file.as_fd(), offset)),
            })
            .expect("maps");
    }
    assert!(memory.write(HUGE + 4095, b"a"));
    assert!(memory.write(1 << 32, b"b"));
    assert!(!memory.write(HUGE + 4096, b"c"), "past the first one's end");
    let all = Arc::new(Mapping::new(file.as_fd(), 0, PAGES * HUGE, true).expect("maps"));
    let all = Area::of(&all).expect("fits");
    let mut two = [0; 2];
    assert!(all.read((HUGE + 4095) as usize, &mut two));
    assert_eq!(&two, b"ab");
    let mut pieces = Pieces::new();
    pieces
        .push(&memory, HUGE - 4096, 8192, true)
        .expect("is there");
    assert_eq!((pieces.count(), pieces.len_bytes()), (1, 8192));
    drop(pieces);
    let past = Mapping::new(file.as_fd(), PAGES * HUGE - 4096, 8192, true);
    assert!(matches!(
        past.expect_err("too long"),
        MapError::PastEnd { .. }
    ));

    // A hole reads as zeros and breaks nothing: the pool has a page for it.
    let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    rustix::fs::fallocate(&file, punch, HUGE, HUGE).expect("punches");
    assert!(all.read((HUGE + 4095) as usize, &mut two));
    assert_eq!(two, [0; 2]);
    let before = guard::breaks();
    assert!(!all.mapping().is_broken());

    let kept = Arc::new(Mapping::new(file.as_fd(), 4096, 4096, true).expect("maps"));
    let kept = Area::of(&kept).expect("fits");
    assert!(kept.store_u64(0, 7, Release));
    rustix::fs::ftruncate(&file, HUGE).expect("shrinks");
    assert_eq!(all.load_u64((PAGES * HUGE) as usize - 8, Acquire), Some(0));
    assert!(all.mapping().is_broken() && guard::breaks() > before);
    assert!(all.store_u64(HUGE as usize, 9, Release));
    assert_eq!(all.load_u64(HUGE as usize, Acquire), Some(9));
    assert_eq!(kept.load_u64(0, Acquire), Some(7));
    assert!(!kept.mapping().is_broken());
    assert!(memory.write(1 << 32, b"d") && memory.is_broken());
}
