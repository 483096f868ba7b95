//! `hot_path_does_not_allocate`: a warm reactor serves reads, writes and flushes without
//! allocations (design rule 1). The allocator counts those of the reactor's thread, found by name.
#![allow(unsafe_code)]

mod common;

use common::{EXTENT_BYTES, HANG, HOST, TestEngine};
use forebay_initiator::load::{Amount, LoadSpec, run};
use forebay_qos::cost::default_profiles;
use forebay_xlate::boundary::message::{
    Budget, CostProfile, GrantOf, NodeCapacity, Scheduling, Spread, TenantId, ToEngine,
};
use forebay_xlate::{DeviceIndex, ExtentIndex, ExtentRange, VolumeId, Word};
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering::SeqCst};
use std::time::Instant;

/// The thread whose allocations are counted.
static WATCHED: AtomicI32 = AtomicI32::new(0);
/// A second one.
static ALSO: AtomicI32 = AtomicI32::new(0);
static COUNT: AtomicU64 = AtomicU64::new(0);
/// Show where the first allocation comes from (`FOREBAY_SHOW_ALLOCATION=1`).
static SHOW: AtomicBool = AtomicBool::new(false);
/// One test at a time: there is one counter.
static ALONE: Mutex<()> = Mutex::new(());

struct Counting;

fn note() {
    let watched = WATCHED.load(SeqCst);
    if watched == 0 {
        return;
    }
    let this = rustix::thread::gettid().as_raw_nonzero().get();
    if this == watched || this == ALSO.load(SeqCst) {
        COUNT.fetch_add(1, SeqCst);
        if SHOW.load(SeqCst) && WATCHED.swap(0, SeqCst) != 0 {
            eprintln!("{}", std::backtrace::Backtrace::force_capture());
        }
    }
}

// SAFETY: every call goes to the system's allocator unchanged; counting allocates nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        note();
        // SAFETY: the caller keeps alloc's contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        note();
        // SAFETY: the caller keeps dealloc's contract.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn reactor_thread() -> i32 {
    thread("reactor-0")
}

fn thread(name: &str) -> i32 {
    for entry in std::fs::read_dir("/proc/self/task").unwrap() {
        let path = entry.unwrap().path();
        let comm = std::fs::read_to_string(path.join("comm")).unwrap_or_default();
        if comm.trim() == name {
            return path.file_name().unwrap().to_str().unwrap().parse().unwrap();
        }
    }
    panic!("no reactor thread");
}

fn load(
    engine: &TestEngine,
    nqn: &str,
    read_percent: u8,
    block_bytes: u32,
    depth: u16,
) -> LoadSpec {
    LoadSpec {
        read_percent,
        block_bytes,
        queue_depth: depth,
        queues: 2,
        amount: Amount::Bytes(48 << 20),
        ..LoadSpec::new(engine.address, nqn, HOST)
    }
}

/// Gives its tenant a small budget, so that most of the load waits for a window.
fn limit(engine: &mut TestEngine) {
    let scheduling = Scheduling {
        policy: Default::default(),
        params: vec![],
        capacity: NodeCapacity::UNLIMITED,
        costs: default_profiles().map(|row| row.each_ref().map(CostProfile::from)),
    };
    engine.order(|request| ToEngine::SetScheduling {
        request,
        scheduling: Some(Box::new(scheduling)),
    });
    engine.order(|request| ToEngine::SetTenantBudget {
        request,
        tenant: TenantId(1),
        budget: Some(Budget::fixed(5000)),
        credit: [0; 2],
        guaranteed: true,
    });
    engine.order(|request| ToEngine::SetVolumeBudget {
        request,
        volume: VolumeId(1),
        tenant: TenantId(1),
        budget: None,
    });
}

fn counted(kind: &str, limited: bool) {
    let _alone = ALONE
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner);
    let mut engine = TestEngine::start(kind, 128 << 20, 1);
    engine.volume(1, 32 << 20, 4096);
    let nqn = engine.export(1, &[]);
    // Warms up: grants, and lists at their largest.
    for (read_percent, block_bytes) in [(0, 65536), (50, 4096), (50, 65536)] {
        run(
            &load(&engine, &nqn, read_percent, block_bytes, 32),
            &mut |_| {},
        )
        .unwrap();
    }
    if limited {
        limit(&mut engine);
    }
    // Connects and disconnects allocate, so counting is limited to the middle of a run.
    let mut cases = vec![(50u8, 4096u32), (50, 65536)];
    let until = Instant::now() + HANG;
    while let Some(&(read_percent, block_bytes)) = cases.first() {
        let (mut begun, mut counted) = (false, None);
        let spec = LoadSpec {
            amount: Amount::Duration(std::time::Duration::from_secs(2)),
            ..load(&engine, &nqn, read_percent, block_bytes, 32)
        };
        let report = run(&spec, &mut |at| {
            if at.fraction > 0.3 && !begun {
                begun = true;
                COUNT.store(0, SeqCst);
                WATCHED.store(reactor_thread(), SeqCst);
            } else if at.fraction > 0.8 && counted.is_none() {
                WATCHED.store(0, SeqCst);
                counted = Some(COUNT.load(SeqCst));
            }
        })
        .unwrap();
        WATCHED.store(0, SeqCst);
        assert_eq!(report.errors, 0);
        match counted {
            Some(count) => {
                let what = format!("{kind}, {block_bytes} bytes: allocations of the reactor");
                assert_eq!(count, 0, "{what}");
                cases.remove(0);
            }
            // A paused machine missed both moments: repeat.
            None => assert!(Instant::now() < until, "nothing can be counted"),
        }
    }
}

#[test]
fn hot_path_does_not_allocate() {
    SHOW.store(
        std::env::var_os("FOREBAY_SHOW_ALLOCATION").is_some(),
        SeqCst,
    );
    counted("ram", false);
    counted("file", true);
}

/// Also while two reactors serve one queue.
#[test]
fn offloaded_operations_do_not_allocate() {
    let _alone = ALONE
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner);
    let mut engine = TestEngine::start("file", 128 << 20, 2);
    engine.volume(1, 32 << 20, 4096);
    let nqn = engine.export(1, &[]);
    engine.spread(Spread::OneToOne);
    // Grants, and lists at their largest.
    run(&load(&engine, &nqn, 0, 65536, 64), &mut |_| {}).unwrap();
    assert_eq!(engine.handed_over(0), [0; 2]);
    let mut ways = vec![Spread::OneToN];
    let until = Instant::now() + HANG;
    while let Some(&spread) = ways.first() {
        engine.spread(spread);
        let (mut before, mut counted) = (None, None);
        let spec = LoadSpec {
            amount: Amount::Duration(std::time::Duration::from_secs(2)),
            ..load(&engine, &nqn, 50, 4096, 64)
        };
        let report = run(&spec, &mut |at| {
            if at.fraction > 0.3 && before.is_none() {
                before = Some(engine.handed_over(0)[0]);
                COUNT.store(0, SeqCst);
                ALSO.store(thread("reactor-1"), SeqCst);
                WATCHED.store(reactor_thread(), SeqCst);
            } else if at.fraction > 0.8 && counted.is_none() {
                WATCHED.store(0, SeqCst);
                counted = Some((COUNT.load(SeqCst), engine.handed_over(0)[0]));
            }
        })
        .unwrap();
        WATCHED.store(0, SeqCst);
        ALSO.store(0, SeqCst);
        assert_eq!(report.errors, 0);
        match (before, counted) {
            (Some(before), Some((count, after))) if after > before => {
                assert_eq!(count, 0, "{spread:?}: allocations of the reactors");
                ways.remove(0);
            }
            // A paused machine missed the moment: repeat.
            _ => assert!(Instant::now() < until, "nothing can be counted"),
        }
    }
    let [there, home] = [engine.handed_over(1), engine.handed_over(0)];
    assert_eq!([there[0], home[1]], [0; 2]);
    assert_eq!(there[1], home[0], "each was carried out once");
}

/// A first write that claims a preallocated extent.
#[test]
fn a_claim_does_not_allocate() {
    let _alone = ALONE
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner);
    let until = Instant::now() + HANG;
    // A paused machine missed both moments of counting: repeat.
    while !claims() {
        assert!(Instant::now() < until, "nothing can be counted");
    }
}

/// Whether it was counted.
fn claims() -> bool {
    let mut engine = TestEngine::start("ram", 128 << 20, 1);
    engine.volume(1, 32 << 20, 4096);
    let nqn = engine.export(1, &[]);
    run(&load(&engine, &nqn, 0, 65536, 32), &mut |_| {}).unwrap();
    let (volume, range) = (VolumeId(1), ExtentRange::new(0, (32 << 20) / EXTENT_BYTES));
    let faults = || engine.log.lock().unwrap().faults;
    let (mut begun, mut counted) = (None, None);
    let spec = LoadSpec {
        amount: Amount::Duration(std::time::Duration::from_secs(2)),
        ..load(&engine, &nqn, 0, 65536, 32)
    };
    let report = run(&spec, &mut |at| {
        if at.fraction > 0.3 && begun.is_none() {
            begun = Some(faults());
            COUNT.store(0, SeqCst);
            WATCHED.store(reactor_thread(), SeqCst);
            // Moves the volume to preallocated extents behind the old ones.
            let revoke = ToEngine::Revoke {
                revoke: 1,
                volume,
                range,
                freeze: None,
                release: None,
            };
            let word = Word::preallocated(DeviceIndex(0), ExtentIndex(range.count + 10)).unwrap();
            let grants = vec![GrantOf {
                volume,
                range,
                word: word.bits(),
                commit_sequence: 0,
            }];
            // A fault between the two gets no answer, so only commands in flight may ask.
            engine.say_together([revoke, ToEngine::Grants { grants }]);
        } else if at.fraction > 0.8 && counted.is_none() {
            WATCHED.store(0, SeqCst);
            counted = Some((COUNT.load(SeqCst), faults()));
        }
    })
    .unwrap();
    WATCHED.store(0, SeqCst);
    let Some((allocations, after)) = counted else {
        return false;
    };
    assert_eq!((report.errors, allocations), (0, 0));
    // All other extents were claimed.
    assert!(after - begun.unwrap() < range.count / 2);
    true
}
