//! VM memory that is registered with the ring.
#![allow(clippy::single_range_in_vec_init)]

use super::guest::{MEMORY, numbers, read, scattered, vm, write};
use super::*;
use forebay_device::Pinned;

/// Registers a VM's memory; `None` if the kernel cannot.
fn register(b: &mut Bench, m: &super::guest::Vm) -> Option<Vec<Registration>> {
    let mut names = Vec::new();
    for region in m.memory.regions() {
        let mapping = region.mapping().unwrap();
        let mut pinned = Pinned::new(mapping.clone()).unwrap();
        let all = 0..mapping.whole_bytes();
        let there = mapping.present(all.clone());
        assert!(there.iter().eq([&all]), "all was written: {there:?}");
        mapping.pin(all, &mut pinned).unwrap();
        match b.core.devices.register(pinned) {
            Ok(name) => names.push(name),
            Err(_) => {
                println!("skipped: registered memory needs Linux 6.13");
                return None;
            }
        }
    }
    Some(names)
}

#[test]
fn registered_memory_is_read_and_written_as_any_other() {
    let (mut b, mut m) = (bench(), vm());
    for (extent, at) in [(0, 50), (1, 51), (2, 10), (3, 90), (4, 91), (5, 92), (6, 7)] {
        b.grant(extent, at, Rights::ReadWrite, 1);
    }
    assert!(m.memory.write(0, &vec![1; MEMORY as usize]));
    let Some(names) = register(&mut b, &m) else {
        return;
    };
    let scattered = scattered();
    let one = vec![(64 * 4096, 3 * EXTENT as u32)];
    let both = vec![(MEMORY / 2 - 4096, 8192)];
    for (pieces, known) in [(scattered, None), (one, Some(true)), (both, None)] {
        let len: u32 = pieces.iter().map(|p| p.1).sum();
        let data = numbers(u64::from(len));
        m.put(&pieces, &data);
        let before = b.core.devices.fixed_requests();
        assert_eq!(b.run_of(&mut m, write(4096, len), &pieces), Status::SUCCESS);
        assert!(b.read(4096, len) == data);
        m.put(&pieces, &vec![0; data.len()]);
        assert_eq!(b.run_of(&mut m, read(4096, len), &pieces), Status::SUCCESS);
        assert!(m.get(&pieces) == data);
        if known == Some(true) {
            assert!(b.core.devices.fixed_requests() - before >= 2);
        }
    }
    assert_eq!((b.copied_bytes(), b.core.staging.out()), (0, 0));
    // After unregistering it is used as before.
    for name in names {
        assert!(b.core.devices.unregister(name).is_some());
    }
    let before = b.core.devices.fixed_requests();
    assert_eq!(
        b.run_of(&mut m, read(0, 4096), &[(0, 4096)]),
        Status::SUCCESS
    );
    assert_eq!(b.core.devices.fixed_requests(), before);
    assert!(m.unmap().is_free());
}

#[test]
fn truncated_registered_memory_is_harmless() {
    let (mut b, mut m) = (bench(), vm());
    b.grant(0, 1, Rights::ReadWrite, 4);
    assert!(m.memory.write(0, &vec![7; MEMORY as usize]));
    let Some(names) = register(&mut b, &m) else {
        return;
    };
    rustix::fs::ftruncate(m.file(), 0).unwrap();
    // The kernel holds the pages, which have no other user.
    let lost = [(MEMORY / 2, 8192)];
    assert_eq!(b.run_of(&mut m, write(0, 8192), &lost), Status::SUCCESS);
    assert_eq!(b.read(0, 8192), [7; 8192]);
    assert_eq!(b.run_of(&mut m, read(0, 8192), &lost), Status::SUCCESS);
    assert_eq!(b.errors(), 0);
    let gone = m.unmap();
    assert!(!gone.is_free() && gone.is_free_but_for(|_| 1));
    for name in names {
        assert!(b.core.devices.unregister(name).is_some());
    }
    assert!(gone.is_free());
}

#[test]
fn untouched_memory_is_not_pinned() {
    let m = vm();
    let mapping = m.memory.regions()[0].mapping().unwrap().clone();
    let all = 0..mapping.whole_bytes();
    assert!(mapping.present(all.clone()).is_empty());
    assert!(m.memory.write(5 * 4096, b"x") && m.memory.write(6 * 4096, b"x"));
    assert_eq!(mapping.present(all.clone()), [5 * 4096..7 * 4096]);
    assert!(mapping.present(0..5 * 4096).is_empty());
    assert_eq!(mapping.present(6 * 4096..all.end), [6 * 4096..7 * 4096]);
    // Another's memory, or addresses outside it, cannot be pinned.
    let mut others = Pinned::new(Arc::new(())).unwrap();
    assert!(mapping.pin(0..4096, &mut others).is_err());
    let mut ours = Pinned::new(mapping.clone()).unwrap();
    assert!(mapping.pin(0..all.end + 4096, &mut ours).is_err());
}
