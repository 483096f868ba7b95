//! Arbitrary guest memory: rings, tables, requests and inflight region.
//!
//! The input has a ring selector, a four-byte base, and memory. The device takes requests, returns
//! them and resumes from its inflight region. No panic; no more chains than ring entries; pieces
//! are nonempty and do not overflow; accepted requests are within the disk.

#![no_main]

use forebay_virtio::blk::{self, Disk, Work};
use forebay_virtio::model::{Driver, Layout, Vm};
use forebay_virtio::queue::Queue;
use forebay_virtio::ring::{Chain, RingFeatures};
use libfuzzer_sys::fuzz_target;

const SIZE: u16 = 8;
const BYTES: usize = 8192;
const DISK: Disk = Disk {
    sectors: 4096,
    block_bytes: 4096,
    read_only: false,
    queues: 1,
    granule_bytes: 65536,
};

thread_local! {
    static VM: Vm = Vm::new(BYTES as u64);
}

fn look(vm: &Vm, chain: &Chain) {
    for piece in chain.readable().iter().chain(chain.writable()) {
        assert!(piece.len > 0 && piece.address.checked_add(u64::from(piece.len)).is_some());
    }
    let Ok(request) = blk::parse(chain, &vm.memory, &DISK) else {
        return;
    };
    let data: u64 = request.data(chain).map(|piece| u64::from(piece.len)).sum();
    assert_eq!(data, u64::from(request.data_bytes));
    let (offset, len) = match request.work {
        Ok(Work::In { offset_bytes } | Work::Out { offset_bytes }) => (offset_bytes, data),
        Ok(
            Work::Discard {
                offset_bytes,
                len_bytes,
            }
            | Work::WriteZeroes {
                offset_bytes,
                len_bytes,
                ..
            },
        ) => (offset_bytes, len_bytes),
        _ => return,
    };
    assert!(len > 0 && (offset | len) % 4096 == 0);
    assert!(offset.checked_add(len).is_some_and(|end| end <= DISK.sectors * 512));
}

fuzz_target!(|bytes: &[u8]| {
    let Some((head, memory)) = bytes.split_first_chunk::<5>() else {
        return;
    };
    let features = RingFeatures {
        event_idx: head[0] & 2 != 0,
        indirect: head[0] & 4 != 0,
    };
    VM.with(|vm| {
        let mut all = vec![0; BYTES];
        let n = memory.len().min(BYTES);
        all[..n].copy_from_slice(&memory[..n]);
        assert!(vm.all.write(0, &all));
        let driver = Driver::new(&vm.all, Layout::new(0, SIZE), SIZE, head[0] & 1 != 0, features);
        let mut config = driver.config(&vm.memory);
        config.base = u32::from_le_bytes([head[1], head[2], head[3], head[4]]);
        let mut chain = Chain::default();
        for life in 0..2 {
            let Ok(mut queue) = Queue::new(&config) else {
                return;
            };
            let mut tags = Vec::new();
            while let Ok(Some(tag)) = queue.next_left(&vm.memory, &mut chain) {
                look(vm, &chain);
                tags.push(tag);
            }
            while let Ok(Some(tag)) = queue.pop(&vm.memory, &mut chain) {
                look(vm, &chain);
                tags.push(tag);
            }
            assert!(tags.len() <= usize::from(SIZE));
            for (i, tag) in tags.into_iter().enumerate() {
                let _ = queue.again(tag, &vm.memory, &mut chain);
                if i % 2 == life {
                    queue.put(tag, 1);
                }
            }
            queue.publish();
            queue.wants_call();
            let _ = queue.arm();
            queue.disarm();
            config.base = queue.base();
        }
    });
});
