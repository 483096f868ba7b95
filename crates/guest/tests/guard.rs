//! A missing page affects only its own mapping. Tests that kill the process run in a child.
#![allow(unsafe_code)]

use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::process::ExitStatusExt;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Release};

use forebay_guest::{Area, GuestMemory, Mapping, NewRegion, Pieces, guard};
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::io::Errno;

const CHILD: &str = "FOREBAY_TEST_GUARD";
const PAGE: u64 = 4096;

fn memory_file(bytes: u64) -> OwnedFd {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = rustix::fs::memfd_create("guest", flags).expect("memfd");
    rustix::fs::ftruncate(&file, bytes).expect("its length");
    file
}

fn shrink_from_outside(file: &OwnedFd, bytes: u64) {
    let path = format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd());
    let done = Command::new("truncate")
        .args(["-s", &bytes.to_string(), &path])
        .status()
        .expect("truncate runs");
    assert!(done.success());
}

fn area(file: &OwnedFd, from: u64, bytes: u64) -> Area {
    let mapping = Mapping::new(file.as_fd(), from, bytes, true).expect("maps");
    Area::of(&Arc::new(mapping)).expect("fits")
}

#[test]
fn a_file_that_is_shrunk_breaks_its_own_mapping_alone() {
    let (bad, good) = (memory_file(64 * PAGE), memory_file(64 * PAGE));
    let (broken, whole) = (area(&bad, 0, 64 * PAGE), area(&good, 0, 64 * PAGE));
    // Another mapping of the file, of a part that stays.
    let kept = area(&bad, 0, PAGE);
    for area in [&broken, &whole] {
        assert!(area.store_u64(0, 7, Release) && area.write(40 * PAGE as usize, b"there"));
    }
    shrink_from_outside(&bad, PAGE);
    let before = guard::breaks();
    assert!(!broken.mapping().is_broken());
    let mut bytes = [1; 5];
    assert!(broken.read(40 * PAGE as usize, &mut bytes));
    assert_eq!(bytes, [0; 5]);
    assert!(broken.mapping().is_broken() && guard::breaks() > before);
    assert!(broken.store_u32(63 * PAGE as usize, 9, Release));
    assert_eq!(broken.load_u32(63 * PAGE as usize, Acquire), Some(9));
    assert_eq!(broken.load_u64(0, Acquire), Some(0));
    assert_eq!(kept.load_u64(0, Acquire), Some(7));
    assert!(!kept.mapping().is_broken());
    assert_eq!(whole.load_u64(0, Acquire), Some(7));
    assert!(whole.read(40 * PAGE as usize, &mut bytes) && bytes == *b"there");
    assert!(!whole.mapping().is_broken());
    // A new mapping there is sound.
    drop(broken);
    assert!(!area(&good, PAGE, PAGE).mapping().is_broken());
}

#[test]
fn threads_that_touch_it_at_once_all_go_on() {
    let file = memory_file(256 * PAGE);
    let area = area(&file, 0, 256 * PAGE);
    shrink_from_outside(&file, 0);
    std::thread::scope(|scope| {
        for thread in 0..4_usize {
            let area = &area;
            scope.spawn(move || {
                for page in (thread..256).step_by(4) {
                    assert!(area.store_u64(page * PAGE as usize, 1, Release));
                }
            });
        }
    });
    assert!(area.mapping().is_broken());
}

#[test]
fn the_kernel_is_refused_and_nothing_breaks() {
    let file = memory_file(2 * PAGE);
    let mut memory = GuestMemory::default();
    memory
        .map(&NewRegion {
            guest_address: 0,
            user_address: 0,
            len_bytes: 2 * PAGE,
            writable: true,
            file: Some((file.as_fd(), 0)),
        })
        .expect("maps");
    let mut pieces = Pieces::new();
    pieces.push(&memory, PAGE, 4096, true).expect("is there");
    shrink_from_outside(&file, PAGE);
    let slices = pieces.slices().to_vec();
    let hold = pieces.take();
    let zeros = std::fs::File::open("/dev/zero").expect("opens");
    // SAFETY: `hold` lives until after the call.
    let buf = unsafe { slices[0].buf() };
    // SAFETY: the buffer is mapped for the call; its missing page is the test.
    let got = unsafe {
        let len = buf.len_bytes() as usize;
        libc::read(zeros.as_raw_fd(), buf.ptr().as_ptr().cast(), len)
    };
    let error = std::io::Error::last_os_error();
    assert_eq!(got, -1);
    assert_eq!(Errno::from_io_error(&error), Some(Errno::FAULT));
    assert!(!hold.is_broken() && !memory.is_broken());
    let mut byte = [1];
    assert!(memory.read(PAGE, &mut byte));
    assert!(byte == [0] && hold.is_broken() && memory.is_broken());
}

#[test]
fn a_sealed_file_is_known_to_stay() {
    let file = memory_file(PAGE);
    assert!(!area(&file, 0, PAGE).mapping().cannot_shrink());
    rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK).expect("seals");
    assert!(area(&file, 0, PAGE).mapping().cannot_shrink());
}

fn dies_of(how: &str) -> Option<i32> {
    let own = std::env::current_exe().expect("this program");
    let status = Command::new(own)
        .args(["--exact", "an_end_of_a_child", "--nocapture"])
        .env(CHILD, how)
        .status()
        .expect("runs");
    status.signal()
}

#[test]
fn a_foreign_fault_still_kills() {
    assert_eq!(dies_of("fault"), Some(libc::SIGBUS));
    assert_eq!(dies_of("sent"), Some(libc::SIGBUS));
    assert_eq!(dies_of("none"), None);
}

#[test]
fn an_end_of_a_child() {
    let Ok(how) = std::env::var(CHILD) else {
        return;
    };
    // The guard is installed and has handled a fault.
    let file = memory_file(PAGE);
    let ours = area(&file, 0, PAGE);
    shrink_from_outside(&file, 0);
    assert_eq!(ours.load_u8(0, Acquire), Some(0));
    match &how[..] {
        "fault" => {
            let file = memory_file(PAGE);
            // SAFETY: a new mapping at an address of the kernel's choice; the access should kill.
            unsafe {
                let ptr = libc::mmap(
                    std::ptr::null_mut(),
                    4096,
                    libc::PROT_READ,
                    libc::MAP_SHARED,
                    file.as_raw_fd(),
                    0,
                );
                assert_ne!(ptr, libc::MAP_FAILED);
                shrink_from_outside(&file, 0);
                ptr.cast::<u8>().read_volatile();
            }
        }
        "sent" => {
            // The standard library's handler removes itself at the first signal.
            for _ in 0..2 {
                // SAFETY: a signal to this thread.
                unsafe { libc::raise(libc::SIGBUS) };
            }
        }
        _ => {}
    }
}
