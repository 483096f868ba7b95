//! Interrupts: signals clients' eventfds without ever blocking.
//!
//! A write blocks if the eventfd's counter is full and the client made it blocking. Linux AIO
//! (`io_submit`) can signal an eventfd when a request ends, and never blocks. So each interrupt is
//! a zero-byte read from /dev/null, which ends within the call. A turn's interrupts are submitted
//! together ([`Signals::flush`]); their completions are discarded in bulk. The kernel refuses a
//! descriptor that is no eventfd.

#![allow(unsafe_code)]

use rustix::fs::{Mode, OFlags};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};

/// Interrupts per system call.
const BATCH: usize = 64;
const EVENTS: usize = 2 * BATCH;

/// `struct iocb` (linux/aio_abi.h); the fields used here are alike on little-endian and big-endian.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Iocb {
    data: u64,
    key: [u32; 2],
    opcode: u16,
    priority: i16,
    descriptor: u32,
    buffer: u64,
    bytes: u64,
    offset: i64,
    reserved: u64,
    flags: u32,
    eventfd: u32,
}
const _: () = assert!(size_of::<Iocb>() == 64);

/// `struct io_event`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct AioEvent {
    data: u64,
    object: u64,
    result: i64,
    result2: i64,
}

/// IOCB_CMD_PREAD.
const READ: u16 = 0;
/// IOCB_FLAG_RESFD.
const NAMES_EVENTFD: u32 = 1;

pub(crate) struct Signals {
    context: u64,
    null: OwnedFd,
    batch: [Iocb; BATCH],
    waiting: usize,
    /// Upper bound of completions to discard.
    ended: usize,
}

impl Signals {
    pub(crate) fn new() -> io::Result<Self> {
        let null = rustix::fs::open("/dev/null", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
        let mut context = 0u64;
        // SAFETY: the kernel stores one word into `context`, which lives across the call.
        let made =
            unsafe { libc::syscall(libc::SYS_io_setup, EVENTS as libc::c_long, &raw mut context) };
        if made != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(Self {
            context,
            null,
            batch: [Iocb::default(); BATCH],
            waiting: 0,
            ended: 0,
        })
    }

    /// Signals an eventfd at the next [`Signals::flush`], which must precede its close.
    #[inline]
    pub(crate) fn raise(&mut self, eventfd: BorrowedFd<'_>) {
        if self.waiting == BATCH {
            self.flush();
        }
        self.batch[self.waiting] = Iocb {
            opcode: READ,
            descriptor: self.null.as_raw_fd() as u32,
            flags: NAMES_EVENTFD,
            eventfd: eventfd.as_raw_fd() as u32,
            ..Iocb::default()
        };
        self.waiting += 1;
    }

    #[inline]
    pub(crate) fn any(&self) -> bool {
        self.waiting > 0
    }

    pub(crate) fn flush(&mut self) {
        let mut done = 0;
        let count = std::mem::take(&mut self.waiting);
        while done < count {
            if self.ended + (count - done) > EVENTS {
                self.throw_away();
            }
            let mut pointers = [std::ptr::null::<Iocb>(); BATCH];
            for (pointer, iocb) in pointers.iter_mut().zip(&self.batch[done..count]) {
                *pointer = iocb;
            }
            // SAFETY: `pointers` names `count - done` requests, which the kernel reads only during
            // the call. They have no buffer and no bytes, so the kernel writes nothing.
            let taken = unsafe {
                libc::syscall(
                    libc::SYS_io_submit,
                    self.context,
                    (count - done) as libc::c_long,
                    pointers.as_ptr(),
                )
            };
            match usize::try_from(taken) {
                Ok(taken) if taken > 0 => {
                    self.ended += taken;
                    done += taken;
                }
                _ => {
                    let error = io::Error::last_os_error().raw_os_error();
                    // EAGAIN: discard completions to make room. Any other error is this request's:
                    // not an eventfd.
                    if error != Some(libc::EAGAIN) || self.ended == 0 {
                        done += 1;
                    }
                    self.throw_away();
                }
            }
        }
    }

    fn throw_away(&mut self) {
        let mut events = [AioEvent::default(); EVENTS];
        let none = libc::timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        // SAFETY: `events` has room for EVENTS entries, and lives across the call.
        unsafe {
            libc::syscall(
                libc::SYS_io_getevents,
                self.context,
                0 as libc::c_long,
                EVENTS as libc::c_long,
                events.as_mut_ptr(),
                &raw const none,
            );
        }
        self.ended = 0;
    }
}

impl Drop for Signals {
    fn drop(&mut self) {
        // SAFETY: the context is ours, and this is its last use.
        unsafe { libc::syscall(libc::SYS_io_destroy, self.context) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{EventfdFlags, eventfd};
    use std::os::fd::AsFd;

    fn count(fd: &OwnedFd) -> Option<u64> {
        let mut bytes = [0; 8];
        match rustix::io::read(fd, &mut bytes) {
            Ok(8) => Some(u64::from_ne_bytes(bytes)),
            _ => None,
        }
    }

    #[test]
    fn each_interrupt_counts_once_however_many_there_are() {
        let mut signals = Signals::new().unwrap();
        let fds: Vec<_> = (0..3)
            .map(|_| eventfd(0, EventfdFlags::NONBLOCK).unwrap())
            .collect();
        for _ in 0..1000 {
            for fd in &fds {
                signals.raise(fd.as_fd());
            }
        }
        signals.flush();
        assert!(!signals.any());
        for fd in &fds {
            assert_eq!(count(fd), Some(1000));
            assert_eq!(count(fd), None);
        }
    }

    #[test]
    fn a_full_eventfd_or_another_descriptor_blocks_no_signal() {
        let mut signals = Signals::new().unwrap();
        // A blocking one: a write would wait for ever.
        let full = eventfd(0, EventfdFlags::empty()).unwrap();
        rustix::io::write(&full, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        let good = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
        let (pipe, _other) = rustix::pipe::pipe().unwrap();
        for _ in 0..EVENTS {
            for fd in [&full, &pipe, &good] {
                signals.raise(fd.as_fd());
            }
        }
        signals.flush();
        assert_eq!(count(&good), Some(EVENTS as u64));
        assert!(count(&full).is_some());
    }
}
