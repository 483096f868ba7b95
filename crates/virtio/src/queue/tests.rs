use super::*;
use crate::model::{Driver, GUEST_ADDRESS, Layout, Offered, Vm};
use proptest::prelude::*;
use std::collections::BTreeMap;

const SIZE: u16 = 8;

struct Pair {
    vm: Vm,
    driver: Driver,
    queue: Queue,
    /// By tag, the chain's number, which the address tells.
    taken: BTreeMap<u16, u64>,
    chain: Chain,
    wanted: BTreeMap<u64, (Vec<Offered>, u32)>,
    given_back: BTreeMap<u64, u32>,
}

fn pair(packed: bool, features: RingFeatures) -> Pair {
    let vm = Vm::new(1 << 16);
    let layout = Layout::new(0, SIZE);
    let driver = Driver::new(&vm.all, layout, SIZE, packed, features);
    let queue = Queue::new(&driver.config(&vm.memory)).expect("a queue");
    Pair {
        vm,
        driver,
        queue,
        taken: BTreeMap::new(),
        chain: Chain::default(),
        wanted: BTreeMap::new(),
        given_back: BTreeMap::new(),
    }
}

impl Pair {
    fn offer(&mut self, readable: usize, writable: usize, indirect: bool) {
        let number = self.wanted.len() as u64 + self.given_back.len() as u64;
        let pieces: Vec<Offered> = (0..readable + writable)
            .map(|i| Offered {
                address: GUEST_ADDRESS + number * 4096 + i as u64,
                len: 1 + i as u32,
                writable: i >= readable,
            })
            .collect();
        if let Some(given) = self.driver.offer(&pieces, indirect) {
            assert_eq!(given, number);
            self.wanted.insert(number, (pieces, 0));
        }
    }

    fn took(&mut self, tag: u16) {
        let first = self.chain.readable().first();
        let first = first.or(self.chain.writable().first()).expect("a piece");
        let number = (first.address - GUEST_ADDRESS) / 4096;
        let (pieces, _) = &self.wanted[&number];
        let got: Vec<Offered> = (self.chain.readable().iter().map(|p| (p, false)))
            .chain(self.chain.writable().iter().map(|p| (p, true)))
            .map(|(p, writable)| Offered {
                address: p.address,
                len: p.len,
                writable,
            })
            .collect();
        assert_eq!(&got, pieces);
        assert!(self.taken.insert(tag, number).is_none(), "a tag in use");
    }

    fn take(&mut self) -> bool {
        let taken = (self.queue).pop(&self.vm.memory, &mut self.chain);
        let Some(tag) = taken.expect("a sound ring") else {
            return false;
        };
        self.took(tag);
        true
    }

    fn put(&mut self, which: usize) {
        let nth = which % self.taken.len().max(1);
        if let Some(tag) = self.taken.keys().nth(nth).copied() {
            let number = self.taken.remove(&tag).expect("it is there");
            let written = number as u32 + 1;
            self.wanted.get_mut(&number).expect("offered").1 = written;
            self.queue.put(tag, written);
        }
    }

    fn collect(&mut self) {
        while let Some((number, written)) = self.driver.collect() {
            let (_, wanted) = self.wanted.remove(&number).expect("collected once");
            assert_eq!(wanted, written);
            self.given_back.insert(number, written);
        }
    }

    fn restart(&mut self) {
        let config = self.driver.config(&self.vm.memory);
        self.queue = Queue::new(&config).expect("a queue");
        self.taken.clear();
        while let Some(tag) =
            (self.queue.next_left(&self.vm.memory, &mut self.chain)).expect("a sound region")
        {
            self.took(tag);
        }
        assert_eq!(usize::from(self.queue.in_flight()), self.taken.len());
    }

    fn finish(&mut self) {
        while self.take() {}
        while !self.taken.is_empty() {
            self.put(0);
        }
        self.queue.publish();
        self.collect();
        assert!(self.wanted.is_empty(), "not returned: {:?}", self.wanted);
        assert_eq!(self.driver.outstanding(), 0);
        assert_eq!(self.queue.in_flight(), 0);
    }
}

#[derive(Clone, Copy, Debug)]
enum Act {
    Offer(usize, usize, bool),
    Take,
    Put(usize),
    Publish,
    Collect,
    Restart,
}

fn act() -> impl Strategy<Value = Act> {
    prop_oneof![
        4 => (0usize..4, 0usize..4, any::<bool>()).prop_map(|(r, w, i)| Act::Offer(r, w + usize::from(r == 0), i)),
        4 => Just(Act::Take),
        4 => (0usize..8).prop_map(Act::Put),
        3 => Just(Act::Publish),
        2 => Just(Act::Collect),
        1 => Just(Act::Restart),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn each_chain_comes_back_once(
        packed in any::<bool>(),
        acts in proptest::collection::vec(act(), 1..200),
    ) {
        let features = RingFeatures { event_idx: false, indirect: true };
        let mut pair = pair(packed, features);
        for act in acts {
            match act {
                Act::Offer(r, w, i) => pair.offer(r, w, i),
                Act::Take => { pair.take(); }
                Act::Put(which) => pair.put(which),
                Act::Publish => { pair.queue.publish(); }
                Act::Collect => pair.collect(),
                Act::Restart => pair.restart(),
            }
        }
        pair.finish();
    }

    #[test]
    fn no_notification_is_missed(
        packed in any::<bool>(),
        event_idx in any::<bool>(),
        rounds in proptest::collection::vec((1usize..6, 1usize..6, any::<bool>()), 1..80),
    ) {
        let features = RingFeatures { event_idx, indirect: false };
        let mut pair = pair(packed, features);
        let mut device_sleeps = !pair.queue.arm().expect("a sound ring");
        let mut driver_sleeps = false;
        let mut calls = 0;
        for (offers, takes, lazy) in rounds {
            for _ in 0..offers {
                pair.offer(1, 1, false);
            }
            // A sleeping side is told; the other polls.
            let kicked = pair.driver.must_kick();
            let more = pair.queue.in_flight() < pair.driver.outstanding() as u16
                && !pair.driver.has_used();
            prop_assert!(!device_sleeps || kicked || !more);
            if kicked || !device_sleeps {
                device_sleeps = false;
                pair.queue.disarm();
                for _ in 0..takes {
                    pair.take();
                }
                for _ in 0..takes {
                    pair.put(0);
                }
                let shown = pair.queue.publish();
                let called = pair.queue.wants_call();
                calls += usize::from(called);
                prop_assert!(called || !(shown && driver_sleeps));
                if called {
                    driver_sleeps = false;
                }
                if !lazy {
                    while pair.queue.arm().expect("a sound ring") {
                        pair.take();
                    }
                    device_sleeps = true;
                }
            }
            if !driver_sleeps {
                pair.driver.want_call(false);
                pair.collect();
                if lazy {
                    pair.driver.want_call(true);
                    driver_sleeps = !pair.driver.has_used();
                }
            }
        }
        prop_assert!(calls > 0);
    }

    #[test]
    fn any_bytes_are_survived(
        packed in any::<bool>(),
        event_idx in any::<bool>(),
        bytes in proptest::collection::vec(any::<u8>(), 1024),
        plain in any::<bool>(),
        base in any::<u32>(),
    ) {
        let mut pair = pair(packed, RingFeatures { event_idx, indirect: true });
        let layout = Layout::new(0, SIZE);
        let end = if plain { layout.inflight } else { layout.tables };
        let end = end.min(bytes.len());
        prop_assert!(pair.vm.all.write(0, &bytes[..end]));
        let mut config = pair.driver.config(&pair.vm.memory);
        config.base = base;
        let Ok(mut queue) = Queue::new(&config) else { return Ok(()); };
        let (memory, chain) = (&pair.vm.memory, &mut pair.chain);
        let mut tags = Vec::new();
        while let Ok(Some(tag)) = queue.next_left(memory, chain) {
            tags.push(tag);
        }
        for _ in 0..64 {
            match queue.pop(memory, chain) {
                Ok(Some(tag)) => tags.push(tag),
                _ => break,
            }
        }
        prop_assert!(tags.len() <= usize::from(SIZE));
        for tag in tags {
            let _ = queue.again(tag, memory, chain);
            queue.put(tag, 1);
            queue.put(tag, 1);
        }
        queue.publish();
        queue.wants_call();
        let _ = queue.arm();
        queue.disarm();
        queue.base();
    }
}

#[test]
fn a_ring_goes_on_from_its_base() {
    for packed in [false, true] {
        let mut pair = pair(packed, RingFeatures::default());
        for _ in 0..21 {
            pair.offer(1, 1, false);
            pair.finish();
        }
        let base = pair.queue.base();
        let expected = if packed { 2 | 2 << 16 } else { 21 };
        // 42 descriptors in a ring of 8: five passes and two more, so the wrap counters are 0.
        assert_eq!(base, expected);
        // A new region: only the base is known.
        let blank = vec![0; crate::inflight::queue_bytes(SIZE)];
        let layout = Layout::new(0, SIZE);
        assert!(pair.vm.all.write(layout.inflight, &blank));
        let mut config = pair.driver.config(&pair.vm.memory);
        config.base = base;
        pair.queue = Queue::new(&config).expect("a queue");
        pair.offer(1, 1, false);
        pair.finish();
        assert_eq!(pair.given_back.len(), 22);
    }
}
