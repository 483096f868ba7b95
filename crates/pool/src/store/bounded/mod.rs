//! A device's store behind its own thread, so that a hanging device blocks no caller.
//!
//! Operations run in order. Writes are queued, up to a limit; a failed one fails every operation up
//! to the next sync. Callers wait for reads and syncs, for a limited time. Then the store is
//! *stuck*: it drops its queue and fails operations until the device ends the hanging one. So at
//! most one operation lands late. A cached read with an empty queue needs no thread.
//!
//! A killed process may leave its last operation in the kernel. The claim of the device ends later,
//! with the process's last descriptor.

use crate::store::BlockStore;
use std::{
    collections::{BTreeMap, VecDeque},
    fmt, io,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

/// Limit of queued bytes. A commit has a few pages, a rewritten copy all of them.
const QUEUE_BYTES: usize = 4 << 20;

enum WriteWork {
    Write(u64, Box<[u8]>),
    Read(u64, usize),
    Sync,
    WillRead(u64, u64),
}

struct WriteQueue {
    limit: Duration,
    /// Remaining total wait of all operations, if limited.
    left: Option<Duration>,
    waiting: VecDeque<(u64, WriteWork)>,
    /// Bytes of the queued writes.
    bytes: usize,
    /// The number of the next operation; 0 stands for none.
    next: u64,
    /// The thread executes an operation.
    under_way: bool,
    /// The caller no longer waits for it.
    stuck: bool,
    /// How often a caller gave up.
    given_up: u64,
    /// A write failed: the error of all operations up to a sync.
    failed: Option<(io::ErrorKind, String)>,
    answers: BTreeMap<u64, io::Result<Vec<u8>>>,
    waiters: usize,
    has_thread: bool,
    over: bool,
}

struct Shared {
    store: Arc<dyn BlockStore>,
    queue: Mutex<WriteQueue>,
    work: Condvar,
    ended: Condvar,
}

/// A store with a time limit.
pub struct BoundedStore(Arc<Shared>);

impl fmt::Debug for BoundedStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BoundedStore").finish_non_exhaustive()
    }
}

fn no_answer(limit: Duration) -> io::Error {
    io::Error::new(
        io::ErrorKind::TimedOut,
        format!("the device did not answer for {limit:?}"),
    )
}

impl WriteQueue {
    fn failure(&self) -> io::Result<()> {
        if self.stuck || self.is_used_up() {
            return Err(no_answer(self.limit));
        }
        match &self.failed {
            Some((kind, what)) => Err(io::Error::new(*kind, what.clone())),
            None => Ok(()),
        }
    }

    fn is_used_up(&self) -> bool {
        self.left == Some(Duration::ZERO)
    }

    fn fail(&mut self, error: &io::Error) {
        self.failed
            .get_or_insert_with(|| (error.kind(), error.to_string()));
    }

    /// Drops the queue.
    fn give_up(&mut self) -> io::Error {
        let error = no_answer(self.limit);
        let dropped = std::mem::take(&mut self.waiting);
        if dropped
            .iter()
            .any(|(_, work)| matches!(work, WriteWork::Write(..)))
        {
            self.fail(&error);
        }
        self.bytes = 0;
        self.stuck = self.under_way;
        self.given_up += 1;
        self.answers.clear();
        error
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, WriteQueue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait_while<'a>(
        &'a self,
        mut queue: MutexGuard<'a, WriteQueue>,
        condition: impl Fn(&WriteQueue) -> bool,
    ) -> MutexGuard<'a, WriteQueue> {
        let limit = queue.left.map_or(queue.limit, |left| left.min(queue.limit));
        let (begin, given_up) = (Instant::now(), queue.given_up);
        queue.waiters += 1;
        let ended = self.ended.wait_timeout_while(queue, limit, |queue| {
            queue.given_up == given_up && condition(queue)
        });
        let (mut queue, _) = ended.unwrap_or_else(PoisonError::into_inner);
        queue.waiters -= 1;
        queue.left = (queue.left).map(|left| left.saturating_sub(begin.elapsed()));
        queue
    }

    fn run(&self) {
        let mut queue = self.lock();
        loop {
            queue = self
                .work
                .wait_while(queue, |queue| queue.waiting.is_empty() && !queue.over)
                .unwrap_or_else(PoisonError::into_inner);
            let Some((number, work)) = queue.waiting.pop_front() else {
                return;
            };
            let failure = queue.failure();
            queue.under_way = true;
            drop(queue);
            let (is_read, is_sync) = (
                matches!(work, WriteWork::Read(..)),
                matches!(work, WriteWork::Sync),
            );
            let (result, freed) = match (failure, work) {
                (Ok(()), WriteWork::Write(offset, data)) => {
                    let result = self.store.write_at(offset, &data);
                    (result.map(|()| Vec::new()), data.len())
                }
                (Ok(()), WriteWork::Read(offset, count)) => {
                    let mut into = vec![0; count];
                    (self.store.read_at(offset, &mut into).map(|()| into), 0)
                }
                (Ok(()), WriteWork::Sync) => (self.store.sync().map(|()| Vec::new()), 0),
                (_, WriteWork::WillRead(offset, bytes)) => {
                    self.store.will_read(offset, bytes);
                    (Ok(Vec::new()), 0)
                }
                (Err(error), WriteWork::Write(_, data)) => (Err(error), data.len()),
                (Err(error), WriteWork::Read(..) | WriteWork::Sync) => (Err(error), 0),
            };
            queue = self.lock();
            queue.under_way = false;
            let was_stuck = std::mem::take(&mut queue.stuck);
            match &result {
                // Its caller has gone: later operations report the error.
                Err(error) if !is_read && (was_stuck || !is_sync) => queue.fail(error),
                // This sync reports it.
                Err(_) if is_sync => queue.failed = None,
                _ => {}
            }
            if !was_stuck {
                queue.bytes -= freed;
                if is_read || is_sync {
                    queue.answers.insert(number, result);
                }
            }
            if queue.waiters > 0 {
                self.ended.notify_all();
            }
        }
    }
}

impl BoundedStore {
    /// A store that answers within `limit`, or fails.
    pub fn new(store: Arc<dyn BlockStore>, limit: Duration) -> Self {
        Self(Arc::new(Shared {
            store,
            queue: Mutex::new(WriteQueue {
                limit,
                left: None,
                waiting: VecDeque::new(),
                bytes: 0,
                next: 1,
                under_way: false,
                stuck: false,
                given_up: 0,
                failed: None,
                answers: BTreeMap::new(),
                waiters: 0,
                has_thread: false,
                over: false,
            }),
            work: Condvar::new(),
            ended: Condvar::new(),
        }))
    }

    /// Makes the next sync fail, after a failure that bypassed this store.
    pub fn note_failure(&self, error: &io::Error) {
        self.0.lock().fail(error);
    }

    /// Limits the total wait of further operations; `None` for no such limit.
    pub fn set_total(&self, total: Option<Duration>) {
        self.0.lock().left = total;
    }

    /// Whether the total limit is used up.
    pub fn is_used_up(&self) -> bool {
        self.0.lock().is_used_up()
    }

    /// Whether a caller waits now.
    pub fn is_waited_for(&self) -> bool {
        self.0.lock().waiters > 0
    }

    #[cfg(test)]
    pub(crate) fn set_limit(&self, limit: Duration) {
        self.0.lock().limit = limit;
    }

    fn submit(&self, queue: &mut WriteQueue, work: WriteWork) -> io::Result<u64> {
        if queue.stuck || queue.is_used_up() {
            return Err(no_answer(queue.limit));
        }
        if !queue.has_thread {
            let shared = self.0.clone();
            std::thread::Builder::new()
                .name("device-store".to_owned())
                .spawn(move || shared.run())?;
            queue.has_thread = true;
        }
        let number = queue.next;
        queue.next += 1;
        if let WriteWork::Write(_, data) = &work {
            queue.bytes += data.len();
        }
        queue.waiting.push_back((number, work));
        if !queue.under_way {
            self.0.work.notify_one();
        }
        Ok(number)
    }

    fn wait(&self, queue: MutexGuard<'_, WriteQueue>, number: u64) -> io::Result<Vec<u8>> {
        let given_up = queue.given_up;
        let mut queue = self
            .0
            .wait_while(queue, |queue| !queue.answers.contains_key(&number));
        match queue.answers.remove(&number) {
            Some(answer) => answer,
            None if queue.given_up == given_up => {
                let error = queue.give_up();
                self.0.ended.notify_all();
                Err(error)
            }
            None => Err(no_answer(queue.limit)),
        }
    }
}

impl BlockStore for BoundedStore {
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        let queue = self.0.lock();
        queue.failure()?;
        let is_idle = queue.waiting.is_empty() && !queue.under_way;
        drop(queue);
        if is_idle && self.0.store.try_read_at(offset, buf) {
            return Ok(());
        }
        let mut queue = self.0.lock();
        let number = self.submit(&mut queue, WriteWork::Read(offset, buf.len()))?;
        buf.copy_from_slice(&self.wait(queue, number)?);
        Ok(())
    }

    fn write_at(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        let mut queue = self.0.lock();
        queue.failure()?;
        let is_full =
            |queue: &WriteQueue| queue.bytes > 0 && queue.bytes + data.len() > QUEUE_BYTES;
        if is_full(&queue) {
            let given_up = queue.given_up;
            queue = self.0.wait_while(queue, is_full);
            if queue.given_up == given_up && is_full(&queue) {
                let error = queue.give_up();
                self.0.ended.notify_all();
                return Err(error);
            }
            queue.failure()?;
        }
        self.submit(&mut queue, WriteWork::Write(offset, data.into()))?;
        Ok(())
    }

    fn begin_sync(&self) -> u64 {
        self.submit(&mut self.0.lock(), WriteWork::Sync)
            .unwrap_or(0)
    }

    fn end_sync(&self, begun: u64) -> io::Result<()> {
        let queue = self.0.lock();
        if begun == 0 {
            return Err(no_answer(queue.limit));
        }
        self.wait(queue, begun).map(drop)
    }

    fn sync(&self) -> io::Result<()> {
        self.end_sync(self.begin_sync())
    }

    fn capacity(&self) -> io::Result<u64> {
        self.0.store.capacity()
    }

    fn is_stuck(&self) -> bool {
        self.0.lock().stuck
    }

    fn will_read(&self, offset: u64, bytes: u64) {
        let _ = self.submit(&mut self.0.lock(), WriteWork::WillRead(offset, bytes));
    }
}

impl Drop for BoundedStore {
    /// Waits for queued writes, unless stuck.
    fn drop(&mut self) {
        let mut queue = self.0.lock();
        queue.over = true;
        self.0.work.notify_one();
        let is_busy = |queue: &WriteQueue| !queue.waiting.is_empty() || queue.under_way;
        if queue.stuck || !is_busy(&queue) {
            return;
        }
        queue = self.0.wait_while(queue, is_busy);
        if is_busy(&queue) {
            queue.give_up();
        }
    }
}

#[cfg(test)]
mod tests;
