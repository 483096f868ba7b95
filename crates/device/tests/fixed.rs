//! Registered memory: requests in it work, whatever else is or was registered.

mod support;

use std::sync::Arc;

use forebay_device::mem::StaticRegion;
use forebay_device::ring::{Completion, Ring, RingOptions, Wake};
use forebay_device::{
    Device, Finish, MAX_ENTRIES, Op, OpenOptions, Pinned, Registration, Submitted,
};

const PAGE: usize = 4096;

struct Rig {
    ring: Ring,
    device: Device,
    _file: tempfile::NamedTempFile,
}

impl Rig {
    fn new() -> Self {
        let file = support::scratch_file(1 << 20);
        let spec = file.path().to_str().expect("UTF-8").parse().expect("spec");
        Self {
            ring: Ring::new(&RingOptions::default()).expect("io_uring works here"),
            device: Device::open(&spec, &OpenOptions::default()).expect("opens"),
            _file: file,
        }
    }

    fn run(&mut self, mut op: Op) -> Finish {
        let submitted = self.device.queue(&mut self.ring, &mut op, 1);
        assert_eq!(submitted, Submitted::Queued);
        let mut done = [Completion::default(); 1];
        while self.ring.drain(&mut done) == 0 {
            let wake = self.ring.wait(1, Some(std::time::Duration::from_secs(60)));
            assert_ne!(wake.expect("waits"), Wake::TimedOut);
        }
        self.device.finish(op, done[0].result)
    }

    /// Writes a page and reads it back; returns whether its memory was registered.
    fn goes_through(&mut self, memory: &StaticRegion, at: usize, mark: u8) -> bool {
        let before = self.ring.fixed_requests();
        let buf = memory.buf(at, PAGE as u32).expect("inside");
        assert!(memory.copy_in(at, &[mark; PAGE]));
        assert!(matches!(self.run(Op::write(0, buf)), Finish::Done));
        assert!(memory.copy_in(at, &[0; PAGE]));
        assert!(matches!(self.run(Op::read(0, buf)), Finish::Done));
        let mut bytes = [0; PAGE];
        assert!(memory.copy_out(at, &mut bytes));
        assert_eq!(bytes, [mark; PAGE]);
        match self.ring.fixed_requests() - before {
            0 => false,
            2 => true,
            other => panic!("{other} of two"),
        }
    }

    /// `None`: the kernel can't.
    fn register(&mut self, memory: &StaticRegion) -> Option<Registration> {
        let pinned = Pinned::of_region(memory).expect("can be held");
        match self.ring.register(pinned) {
            Ok(name) => Some(name),
            Err((_, error)) => {
                support::skip("registered memory", &error.to_string());
                None
            }
        }
    }
}

fn memory(pages: usize) -> StaticRegion {
    StaticRegion::anonymous(pages * PAGE).expect("memory")
}

#[test]
fn registered_memory_is_used_until_it_is_unregistered() {
    let mut rig = Rig::new();
    let (ours, other) = (memory(8), memory(8));
    assert!(!rig.goes_through(&ours, 0, 1));
    let Some(name) = rig.register(&ours) else {
        return;
    };
    assert!(rig.goes_through(&ours, 0, 2) && rig.goes_through(&ours, 7 * PAGE, 3));
    assert!(!rig.goes_through(&other, 0, 4));
    let second = rig.register(&other).expect("as the first");
    assert!(rig.goes_through(&other, PAGE, 5) && rig.goes_through(&ours, PAGE, 6));
    let pinned = rig.ring.unregister(name).expect("it was known");
    assert_eq!((pinned.bytes(), pinned.entries()), (8 * PAGE as u64, 1));
    assert!(rig.ring.unregister(name).is_none());
    assert!(!rig.goes_through(&ours, 0, 7) && rig.goes_through(&other, 0, 8));
    drop(pinned);
    assert!(rig.goes_through(&other, 0, 9));
    assert!(rig.ring.unregister(second).is_some());
    assert!(!rig.goes_through(&other, 0, 10));
}

#[test]
fn pinned_memory_lives_until_it_is_unregistered() {
    let mut rig = Rig::new();
    let keeps = Arc::new(());
    let empty = Pinned::new(keeps.clone()).expect("a ring");
    let refused = rig.ring.register(empty);
    assert!(refused.is_err(), "nothing is in it");
    assert_eq!(Arc::strong_count(&keeps), 2, "it was given back");
    drop(refused);
    assert_eq!(Arc::strong_count(&keeps), 1);
    let mut pinned = Pinned::new(keeps.clone()).expect("a ring");
    pinned.again(&memory(4)).expect("can be held");
    let Ok(name) = rig.ring.register(pinned) else {
        return;
    };
    assert_eq!(Arc::strong_count(&keeps), 2);
    drop(rig.ring.unregister(name).expect("it was known"));
    assert_eq!(Arc::strong_count(&keeps), 1);
}

#[test]
fn a_full_table_refuses_and_its_gaps_are_used_again() {
    const TABLE: usize = 1 << 14;
    let mut rig = Rig::new();
    let mut all = Vec::new();
    let each = MAX_ENTRIES as usize;
    // Two pages each, every entry the same one, so that little memory makes many entries.
    let many = |memory: &StaticRegion| {
        let mut pinned = Pinned::of_region(memory).expect("can be held");
        while pinned.entries() < each {
            pinned.again(memory).expect("can be held");
        }
        pinned
    };
    for number in 0..TABLE / each {
        let memory = memory(2);
        match rig.ring.register(many(&memory)) {
            Ok(name) => all.push((name, memory)),
            Err((_, error)) if number == 0 => {
                return support::skip("registered memory", &error.to_string());
            }
            Err((_, error)) => panic!("{number}: {error}"),
        }
    }
    let one_more = memory(2);
    let refused = rig.ring.register(many(&one_more));
    assert!(refused.is_err(), "there is no room");
    assert!(!rig.goes_through(&one_more, 0, 99));
    for (mark, (_, memory)) in all.iter().enumerate() {
        assert!(rig.goes_through(memory, PAGE, mark as u8));
    }
    let (gone, old) = all.remove(3);
    assert!(rig.ring.unregister(gone).is_some());
    let new = rig.ring.register(many(&one_more)).expect("there is room");
    assert!(rig.goes_through(&one_more, 0, 100) && !rig.goes_through(&old, 0, 101));
    for (mark, (_, memory)) in all.iter().enumerate() {
        assert!(rig.goes_through(memory, PAGE, mark as u8), "{mark}");
    }
    assert!(rig.ring.unregister(new).is_some());
}
