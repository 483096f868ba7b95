//! Ended operations on their way to the thread that asked for them.
//!
//! **Design.** A list whose head is one atomic word. librbd's threads push, the consumer takes all
//! at once; neither locks nor allocates, as an operation's buffer is its own list entry. The
//! head's value `SLEEPING` says that the list is empty and its consumer sleeps: a push that
//! replaces it writes the eventfd. Both are one word, so no wakeup is lost between them. The list
//! is as long as the buffers in flight.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering::*};
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;

use super::io::{Buffer, Operation};

const SLEEPING: *mut Operation = ptr::without_provenance_mut(1);

/// An ended operation.
#[derive(Debug)]
pub struct Ended {
    /// The token that [`Image::submit`](super::Image::submit) got.
    pub token: u64,
    /// Its buffer, for the next operation.
    pub buffer: Buffer,
    /// The bytes read, written or zeroed. A read that crosses the image's end is short.
    pub result: Result<usize, Errno>,
}

/// The ended operations of one consumer, of any number of images.
#[derive(Debug)]
pub struct Completions {
    head: AtomicPtr<Operation>,
    bell: OwnedFd,
}

impl Completions {
    /// An empty list.
    ///
    /// # Errors
    /// No more file descriptors.
    pub fn new() -> io::Result<Self> {
        Ok(Self {
            head: AtomicPtr::new(ptr::null_mut()),
            bell: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
        })
    }

    /// Takes all ended operations, in the order of their ends.
    pub fn take(&self) -> Batch {
        let mut batch = Batch {
            first: ptr::null_mut(),
        };
        if self.head.load(Relaxed).is_null() {
            return batch; // a poll of an empty list keeps the cache line shared
        }
        let mut newest = self.head.swap(ptr::null_mut(), Acquire);
        if newest == SLEEPING {
            return batch;
        }
        while !newest.is_null() {
            // SAFETY: the list's entries are boxes that `push` gave away. The swap made them ours,
            // with all that was written before their pushes.
            let next = unsafe { &(*newest).next };
            let older = next.swap(batch.first, Relaxed);
            batch.first = newest;
            newest = older;
        }
        batch
    }

    /// Asks for a write to [`fd`](Self::fd) at the next end. False if some ended already: then
    /// don't sleep, but [`take`](Self::take) them.
    pub fn arm(&self) -> bool {
        let armed = self
            .head
            .compare_exchange(ptr::null_mut(), SLEEPING, Relaxed, Relaxed);
        armed.is_ok() || armed == Err(SLEEPING)
    }

    /// Ends [`arm`](Self::arm) after a sleep, and makes the descriptor unreadable. A thread that is
    /// about to write may make it readable once more.
    pub fn disarm(&self) {
        let _ = self
            .head
            .compare_exchange(SLEEPING, ptr::null_mut(), Relaxed, Relaxed);
        // Even if it was armed: a write for an earlier sleep may have come late, and would end each
        // sleep at once.
        let _ = rustix::io::read(&self.bell, &mut [0; 8]);
    }

    /// Becomes readable at an end, if it is [armed](Self::arm).
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }

    /// Sleeps until an operation has ended, or until the limit; then takes all.
    pub fn wait(&self, limit: Duration) -> Batch {
        if self.arm() {
            let limit = Timespec::try_from(limit).ok();
            // An interrupted sleep is a short one.
            let _ = poll(
                &mut [PollFd::new(&self.bell, PollFlags::IN)],
                limit.as_ref(),
            );
            self.disarm();
        }
        self.take()
    }

    /// Ends an operation that librbd does not know, for tests.
    #[cfg(feature = "test-device")]
    pub fn end(&self, token: u64, buffer: Buffer, result: Result<usize, Errno>) {
        self.push(buffer.into_ended_operation(token, result));
    }

    pub(super) fn push(&self, operation: Box<Operation>) {
        let operation = Box::into_raw(operation);
        // SAFETY: the box was given to us, and isn't in the list yet.
        let next = unsafe { &(*operation).next };
        let mut head = self.head.load(Relaxed);
        loop {
            let older = if head == SLEEPING {
                ptr::null_mut()
            } else {
                head
            };
            next.store(older, Relaxed);
            match self
                .head
                .compare_exchange_weak(head, operation, Release, Relaxed)
            {
                Ok(_) => break,
                Err(now) => head = now,
            }
        }
        if head == SLEEPING {
            // It fails only if the counter is full: then the descriptor is readable already.
            let _ = rustix::io::write(&self.bell, &1u64.to_ne_bytes());
        }
    }
}

impl Drop for Completions {
    fn drop(&mut self) {
        drop(self.take());
    }
}

/// Ended operations, in the order of their ends.
#[derive(Debug)]
pub struct Batch {
    /// Boxes that `push` gave away.
    first: *mut Operation,
}

impl Iterator for Batch {
    type Item = Ended;

    fn next(&mut self) -> Option<Ended> {
        if self.first.is_null() {
            return None;
        }
        // SAFETY: `take` made the list ours; each entry leaves it before it becomes a box again.
        let mut operation = unsafe { Box::from_raw(self.first) };
        self.first = *operation.next.get_mut();
        Some(operation.into_ended())
    }
}

impl Drop for Batch {
    fn drop(&mut self) {
        self.for_each(drop);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, AtomicU64};
    use std::thread;

    use super::*;

    fn ended(token: u64) -> Box<Operation> {
        Operation::ended(token, Ok(0))
    }

    fn is_readable(completions: &Completions) -> bool {
        let now = Timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        let mut fds = [PollFd::new(&completions.bell, PollFlags::IN)];
        poll(&mut fds, Some(&now)).unwrap() == 1
    }

    fn tokens(batch: Batch) -> Vec<u64> {
        batch.map(|ended| ended.token).collect()
    }

    #[test]
    fn operations_come_in_the_order_of_their_ends() {
        let completions = Completions::new().unwrap();
        assert_eq!(tokens(completions.take()), []);
        for token in 1..=3 {
            completions.push(ended(token));
        }
        let mut batch = completions.take();
        assert_eq!(batch.next().unwrap().token, 1);
        completions.push(ended(4));
        assert_eq!(tokens(batch), [2, 3]);
        assert_eq!(tokens(completions.take()), [4]);
    }

    #[test]
    fn only_an_armed_list_rings() {
        let completions = Completions::new().unwrap();
        completions.push(ended(1));
        assert!(!is_readable(&completions));
        assert!(!completions.arm(), "it must not sleep: something ended");
        assert_eq!(tokens(completions.take()), [1]);

        assert!(completions.arm());
        assert!(completions.arm());
        completions.push(ended(2));
        completions.push(ended(3));
        assert!(is_readable(&completions));
        completions.disarm();
        assert!(!is_readable(&completions));
        assert_eq!(tokens(completions.take()), [2, 3]);

        assert!(completions.arm());
        completions.disarm();
        completions.push(ended(4));
        assert!(!is_readable(&completions));
        assert_eq!(tokens(completions.take()), [4]);
    }

    #[test]
    fn a_late_ring_ends_one_sleep_only() {
        let completions = Completions::new().unwrap();
        assert!(completions.arm());
        rustix::io::write(&completions.bell, &1u64.to_ne_bytes()).unwrap();
        completions.disarm();
        assert!(completions.arm());
        assert!(!is_readable(&completions));
    }

    #[test]
    fn a_taken_list_is_not_armed() {
        let completions = Completions::new().unwrap();
        assert!(completions.arm());
        assert_eq!(tokens(completions.take()), []);
        completions.push(ended(1));
        assert!(!is_readable(&completions));
    }

    /// Producers wait until their operations were taken: a lost wakeup leaves all asleep.
    #[test]
    fn no_wakeup_is_lost() {
        const ROUNDS: u64 = 20_000;
        const EACH: u64 = ROUNDS * 3;
        const PRODUCERS: u64 = 3;
        let completions = Completions::new().unwrap();
        let taken: [AtomicU64; PRODUCERS as usize] = Default::default();
        let lost = AtomicBool::new(false);
        thread::scope(|scope| {
            for (producer, taken) in taken.iter().enumerate() {
                let (completions, lost) = (&completions, &lost);
                scope.spawn(move || {
                    let mut pushed = 0;
                    for round in 0..ROUNDS {
                        for _ in 0..=round % 3 {
                            pushed += 1;
                            completions.push(ended(producer as u64 * EACH + pushed));
                        }
                        while taken.load(Acquire) < pushed && !lost.load(Relaxed) {
                            thread::yield_now();
                        }
                    }
                });
            }
            let total = PRODUCERS * (0..ROUNDS).map(|round| round % 3 + 1).sum::<u64>();
            let mut seen = 0;
            while seen < total && !lost.load(Relaxed) {
                if completions.arm() {
                    let limit = Timespec {
                        tv_sec: 60,
                        tv_nsec: 0,
                    };
                    let woken = poll(
                        &mut [PollFd::new(&completions.bell, PollFlags::IN)],
                        Some(&limit),
                    );
                    completions.disarm();
                    lost.store(woken == Ok(0), Relaxed);
                }
                for ended in completions.take() {
                    let (producer, number) = (ended.token / EACH, ended.token % EACH);
                    let taken = &taken[producer as usize];
                    assert_eq!(taken.swap(number, Release) + 1, number, "out of order");
                    seen += 1;
                }
            }
        });
        assert!(!lost.into_inner(), "asleep beside ended operations");
        assert_eq!(tokens(completions.take()), []);
    }

    #[test]
    fn what_nobody_takes_is_freed() {
        let buffer = Arc::new(());
        let completions = Completions::new().unwrap();
        for token in 0..4 {
            completions.push(Operation::ended_with_witness(token, &buffer));
        }
        let mut batch = completions.take();
        drop(batch.next());
        completions.push(Operation::ended_with_witness(4, &buffer));
        assert_eq!(Arc::strong_count(&buffer), 5);
        drop(batch);
        assert_eq!(Arc::strong_count(&buffer), 2);
        drop(completions);
        assert_eq!(Arc::strong_count(&buffer), 1);
    }
}
