//! Tests of bounded stores: no wait exceeds its limit.

use super::*;
use crate::store::{BLOCK_BYTES, MemStore};
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

const HOUR: Duration = Duration::from_secs(3600);
/// For waits that must time out.
const SHORT: Duration = Duration::from_millis(5);

/// A device that can hang, and fail.
struct Gate {
    store: MemStore,
    hangs: Mutex<bool>,
    changed: Condvar,
    hanging: AtomicUsize,
    fails: Mutex<bool>,
    /// Executed operations.
    log: Mutex<Vec<String>>,
}

impl Gate {
    fn new() -> Arc<Self> {
        Arc::new(Self {
            store: MemStore::new(64 * BLOCK_BYTES),
            hangs: Mutex::new(false),
            changed: Condvar::new(),
            hanging: AtomicUsize::new(0),
            fails: Mutex::new(false),
            log: Mutex::new(Vec::new()),
        })
    }

    fn hang(&self, hangs: bool) {
        *self.hangs.lock().unwrap() = hangs;
        self.changed.notify_all();
    }

    fn wait_hanging(&self) {
        while self.hanging.load(SeqCst) == 0 {
            std::thread::yield_now();
        }
    }

    fn pass(&self, what: String) -> io::Result<()> {
        let mut hangs = self.hangs.lock().unwrap();
        self.hanging.fetch_add(1, SeqCst);
        while *hangs {
            hangs = self.changed.wait(hangs).unwrap();
        }
        self.hanging.fetch_sub(1, SeqCst);
        if *self.fails.lock().unwrap() {
            return Err(io::Error::other(format!("no {what}")));
        }
        self.log.lock().unwrap().push(what);
        Ok(())
    }

    fn log(&self) -> Vec<String> {
        std::mem::take(&mut self.log.lock().unwrap())
    }
}

impl BlockStore for Gate {
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        self.pass(format!("read {}", offset / 4096))?;
        self.store.read_at(offset, buf)
    }
    fn write_at(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.pass(format!("write {}", offset / 4096))?;
        self.store.write_at(offset, data)
    }
    fn sync(&self) -> io::Result<()> {
        self.pass("sync".to_owned())
    }
    fn capacity(&self) -> io::Result<u64> {
        self.store.capacity()
    }
}

fn bounded() -> (Arc<Gate>, BoundedStore) {
    let gate = Gate::new();
    (gate.clone(), BoundedStore::new(gate, HOUR))
}

fn block(store: &dyn BlockStore, at: u64) -> io::Result<u8> {
    let mut block = [0; BLOCK_BYTES];
    store.read_at(at * 4096, &mut block).map(|()| block[0])
}

fn put(store: &BoundedStore, at: u64, byte: u8) -> io::Result<()> {
    store.write_at(at * 4096, &[byte; BLOCK_BYTES])
}

fn wait_free(store: &BoundedStore) {
    while store.is_stuck() {
        std::thread::yield_now();
    }
}

#[test]
fn everything_is_done_in_the_order_in_which_it_was_asked_for() {
    let (gate, store) = bounded();
    put(&store, 1, 7).unwrap();
    put(&store, 2, 8).unwrap();
    assert_eq!(block(&store, 1).unwrap(), 7);
    put(&store, 1, 9).unwrap();
    store.sync().unwrap();
    assert_eq!(block(&store, 1).unwrap(), 9);
    let done = ["write 1", "write 2", "read 1", "write 1", "sync", "read 1"];
    assert_eq!(gate.log(), done);
    put(&store, 3, 1).unwrap();
    drop(store);
    assert_eq!(gate.log(), ["write 3"], "on its way when the store is gone");
}

#[test]
fn a_write_failure_persists_until_a_sync_reports_it() {
    let (gate, store) = bounded();
    *gate.fails.lock().unwrap() = true;
    put(&store, 1, 7).unwrap();
    // Later operations are not executed.
    assert!(block(&store, 1).is_err() && put(&store, 2, 7).is_err());
    *gate.fails.lock().unwrap() = false;
    assert!(block(&store, 1).is_err() && put(&store, 2, 7).is_err());
    let error = store.sync().unwrap_err();
    assert!(error.to_string().contains("no write 1"), "{error}");
    assert_eq!(gate.log(), [""; 0]);
    store.sync().unwrap();
    put(&store, 2, 7).unwrap();
    assert_eq!(block(&store, 2).unwrap(), 7);
    store.note_failure(&io::Error::other("told to somebody else"));
    assert!(store.sync().is_err() && store.sync().is_ok());
}

#[test]
fn a_device_that_hangs_fails_everything_until_its_operation_has_ended() {
    let (gate, store) = bounded();
    store.sync().unwrap();
    for what in 0..3 {
        gate.hang(true);
        put(&store, 1, 10 + what).unwrap();
        put(&store, 2, 10 + what).unwrap();
        gate.wait_hanging();
        store.set_limit(SHORT);
        let kind = match what {
            0 => block(&store, 1).unwrap_err().kind(),
            1 => store.sync().unwrap_err().kind(),
            _ => {
                // More than the queue takes.
                let large = vec![0; QUEUE_BYTES];
                store.write_at(0, &large).unwrap_err().kind()
            }
        };
        assert_eq!(kind, io::ErrorKind::TimedOut);
        store.set_limit(HOUR);
        // Without an immediate error this never ends.
        assert!(store.is_stuck() && store.sync().is_err());
        assert!(block(&store, 1).is_err() && put(&store, 3, 1).is_err());
        gate.log();
        gate.hang(false);
        wait_free(&store);
        // The device's operation landed late; queued ones were dropped, which the sync reports.
        assert_eq!(gate.log(), ["write 1"]);
        assert!(store.sync().is_err());
        store.sync().unwrap();
        assert_eq!(block(&store, 1).unwrap(), 10 + what);
        assert_eq!(block(&store, 2).unwrap(), 0);
    }
}

#[test]
fn each_of_several_waiters_gets_the_error() {
    let (gate, store) = bounded();
    gate.hang(true);
    store.set_limit(SHORT);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| assert!(store.sync().is_err()));
        }
    });
    store.set_limit(HOUR);
    gate.hang(false);
    wait_free(&store);
    let begun = store.begin_sync();
    store.end_sync(begun).unwrap();
}

#[test]
fn a_stuck_store_can_be_let_go() {
    let (gate, store) = bounded();
    gate.hang(true);
    put(&store, 1, 1).unwrap();
    put(&store, 2, 1).unwrap();
    gate.wait_hanging();
    store.set_limit(SHORT);
    drop(store);
    gate.hang(false);
    // Its thread ends, which closes the device.
    while Arc::strong_count(&gate) > 1 {
        std::thread::yield_now();
    }
    assert_eq!(gate.log(), ["write 1"]);
}
