//! One io_uring, as a reactor uses it.
//!
//! **Purpose.** Fill the submission queue, enter the kernel as rarely as possible, take completions, sleep in one
//! system call.
//!
//! **Design.** A ring belongs to the thread that made it (`SINGLE_ISSUER`; the type isn't `Send`). Completions run when
//! the thread enters the kernel (`COOP_TASKRUN`, no interrupt of a busy reactor); the kernel's flag says when that is
//! worth a system call, so [`Ring::submit`] with nothing to do makes none. `DEFER_TASKRUN` is an option and off: with
//! it a killed process's locks fall about 40 ms later. A full queue is [`RingFull`], never a wait. Device files are not
//! registered with the ring, for the same reason as `DEFER_TASKRUN`.
//!
//! **What it does not do.** No polled I/O, no `SQPOLL`, no multishot, no buffer rings. Dropping a ring waits for
//! nothing: what is in flight goes on, and its buffers must stay (see [`crate::Buf::new`]).
#![allow(unsafe_code)]

mod kernel;
#[cfg(feature = "test-device")]
mod linked;
mod native;
mod options;
mod request;
#[cfg(test)]
mod tests;

use std::io;
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd};
use std::time::Duration;

use io_uring::squeue::Entry;
use io_uring::types::{Fd, SubmitArgs, Timespec};
use io_uring::{IoUring, cqueue, opcode};

pub use self::kernel::{KernelVersion, MINIMUM_KERNEL, check_kernel};
use self::native::{NATIVE_USER_DATA, NativeRing};
pub use self::options::{Completion, RingError, RingFull, RingOptions, Wake};
use self::options::{is_transient, setup_error};
pub(crate) use self::request::{CommandBytes, RingIo};
use crate::fixed::{Fixed, Pinned, Registration};

/// This crate's own mark on entries whose completion nobody waits for. Nobody else may use it.
pub const RESERVED_USER_DATA: u64 = u64::MAX;

/// One io_uring. See the module.
pub struct Ring {
    inner: IoUring,
    /// For NVMe commands, if they were prepared for.
    native: Option<Box<NativeRing>>,
    /// Memory that is registered with both.
    fixed: Fixed,
    options: RingOptions,
    /// SINGLE_ISSUER: only the creating thread may submit, so the ring must stay on it.
    _not_send: PhantomData<*mut ()>,
}

impl std::fmt::Debug for Ring {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ring")
            .field("fd", &self.inner.as_raw_fd())
            .finish_non_exhaustive()
    }
}

impl Ring {
    /// Makes a ring for the calling thread.
    pub fn new(options: &RingOptions) -> Result<Self, RingError> {
        check_kernel()?;
        let inner = build(options).map_err(setup_error)?;
        let ring = Self {
            inner,
            native: None,
            fixed: Fixed::default(),
            options: options.clone(),
            _not_send: PhantomData,
        };
        ring.limit_workers(options)?;
        Ok(ring)
    }

    fn limit_workers(&self, options: &RingOptions) -> Result<(), RingError> {
        let submitter = self.inner.submitter();
        let error = |doing| move |source| RingError::Io { doing, source };
        let mut most = [options.iowq_bounded, options.iowq_unbounded];
        submitter
            .register_iowq_max_workers(&mut most)
            .map_err(error("bounding its worker threads"))?;
        if !options.iowq_cpus.is_empty() {
            // SAFETY: cpu_set_t is an array of integers; all zeros is the empty set. CPU_SET bounds-checks by indexing,
            // and the filter keeps the number inside. Wrong on a libc where the set isn't plain bits.
            let set = unsafe {
                let mut set: libc::cpu_set_t = std::mem::zeroed();
                let limit = 8 * size_of::<libc::cpu_set_t>();
                for cpu in options.iowq_cpus.iter().filter(|cpu| **cpu < limit) {
                    libc::CPU_SET(*cpu, &mut set);
                }
                set
            };
            submitter
                .register_iowq_aff(&set)
                .map_err(error("pinning its worker threads"))?;
        }
        Ok(())
    }

    /// Queues any entry, for requests that this wrapper has no method for.
    ///
    /// # Safety
    ///
    /// What the entry points to must stay valid, and its buffers must obey the contract of
    /// [`Buf::new`](crate::Buf::new), until its completion was taken from this ring. Its user data must not be [`RESERVED_USER_DATA`].
    #[inline]
    pub unsafe fn push(&mut self, entry: &Entry) -> Result<(), RingFull> {
        // SAFETY: the caller answers for the entry, as documented above.
        unsafe { self.inner.submission().push(entry) }.map_err(|_| RingFull)
    }

    /// Waits once for `events` (`libc::POLLIN as u32` and so on) on a descriptor; the result is what happened there.
    pub fn poll_add(&mut self, fd: impl AsFd, events: u32, user_data: u64) -> Result<(), RingFull> {
        let entry = opcode::PollAdd::new(Fd(fd.as_fd().as_raw_fd()), events)
            .build()
            .user_data(user_data);
        // SAFETY: a poll names no memory, and the kernel takes its own reference to the file when it is submitted. If
        // the number was closed before that, the result is an error.
        unsafe { self.push(&entry) }
    }

    /// Asks to end the request marked `target_user_data` early; the answer to the asking is marked `user_data`.
    pub fn cancel(&mut self, target_user_data: u64, user_data: u64) -> Result<(), RingFull> {
        let entry = opcode::AsyncCancel::new(target_user_data)
            .build()
            .user_data(user_data);
        // SAFETY: a cancellation names no memory.
        unsafe { self.push(&entry) }
    }

    /// Makes it able to take NVMe commands ([`crate::Device::is_native`]): once, later calls are free. It costs a second
    /// ring in the kernel, which completes, sleeps and wakes with the first.
    ///
    /// # Errors
    /// The system's; then such devices are used in the usual way.
    pub fn prepare_native(&mut self) -> io::Result<()> {
        if self.native.is_none() {
            self.native = Some(Box::new(NativeRing::new(&self.options, &self.fixed)?));
        }
        Ok(())
    }

    /// Whether it takes NVMe commands.
    #[inline]
    pub(crate) fn takes_native(&self) -> bool {
        self.native.is_some()
    }

    /// Has the kernel know memory that it holds already: from now on requests in it cost less. Given back if that can't
    /// be: requests go on as ever.
    pub fn register(&mut self, pinned: Pinned) -> Result<Registration, (Pinned, io::Error)> {
        let name = self.fixed.add(&self.inner.submitter(), pinned)?;
        let native = self.native.as_ref();
        let also = native.map_or(Ok(()), |ring| self.fixed.also_new(&ring.submitter(), name));
        match also {
            Ok(()) => Ok(name),
            Err(error) => match self.unregister(name) {
                Some(pinned) => Err((pinned, error)),
                None => Ok(name),
            },
        }
    }

    /// Has the kernel forget memory, of which no request is queued or in flight. What held it is given back: to drop it
    /// may take long.
    pub fn unregister(&mut self, name: Registration) -> Option<Pinned> {
        if let Some(native) = &self.native {
            self.fixed.forget(&native.submitter(), name);
        }
        self.fixed.remove(&self.inner.submitter(), name)
    }

    /// Requests so far whose memory was registered.
    pub fn fixed_requests(&self) -> u64 {
        self.fixed.used.get()
    }

    /// Hands what is queued to the kernel, and lets it finish what waits for that. No system call if there is neither.
    /// Returns how many entries were taken.
    pub fn submit(&mut self) -> io::Result<usize> {
        let others = match &mut self.native {
            Some(native) => native.submit()?,
            None => 0,
        };
        let queue = self.inner.submission();
        let idle = queue.is_empty() && !queue.taskrun() && !queue.cq_overflow();
        drop(queue);
        if idle {
            return Ok(others);
        }
        match self.inner.submit() {
            // EBUSY: the completion queue overflowed and must be drained first. The others pass by themselves.
            Err(error) if is_transient(&error) => Ok(others),
            other => other.map(|taken| taken + others),
        }
    }

    /// Submits, then sleeps until there are `min_complete` completions, the time is over, or a signal comes: one system
    /// call. Without a time limit only if something else is sure to wake it.
    pub fn wait(&mut self, min_complete: u32, timeout: Option<Duration>) -> io::Result<Wake> {
        if let Some(native) = &mut self.native
            && !native.may_sleep(&mut self.inner)?
        {
            // It has completions; or the first ring is full, which submitting mends.
            self.submit()?;
            return Ok(if self.has_completions() {
                Wake::Completions
            } else {
                Wake::Interrupted
            });
        }
        let want = min_complete as usize;
        let entered = match timeout {
            None => self.inner.submit_and_wait(want),
            Some(limit) => {
                let limit = Timespec::from(limit);
                let args = SubmitArgs::new().timespec(&limit);
                self.inner.submitter().submit_with_args(want, &args)
            }
        };
        let otherwise = match entered {
            Ok(_) => Wake::Interrupted,
            Err(error) if error.raw_os_error() == Some(libc::ETIME) => Wake::TimedOut,
            Err(error) if is_transient(&error) => Wake::Interrupted,
            Err(error) => return Err(error),
        };
        Ok(if self.has_completions() {
            Wake::Completions
        } else {
            otherwise
        })
    }

    /// Takes completions into `out`, as many as fit, and says how many.
    pub fn drain(&mut self, out: &mut [Completion]) -> usize {
        let mut taken = 0;
        while taken < out.len() {
            let mut batch = [const { MaybeUninit::<cqueue::Entry>::uninit() }; 32];
            let room = batch.len().min(out.len() - taken);
            let got = self.inner.completion().fill(&mut batch[..room]);
            let count = got.len();
            for entry in got {
                if entry.user_data() < NATIVE_USER_DATA {
                    out[taken] = Completion {
                        user_data: entry.user_data(),
                        result: entry.result(),
                    };
                    taken += 1;
                } else if entry.user_data() == NATIVE_USER_DATA
                    && let Some(native) = &mut self.native
                {
                    native.poll_ended();
                }
            }
            if count < room {
                break;
            }
        }
        if let Some(native) = &mut self.native {
            while taken < out.len()
                && let Some(done) = native.next()
            {
                out[taken] = done;
                taken += 1;
            }
        }
        taken
    }

    /// Takes all completions that are there, and says how many.
    pub fn for_each_completion(&mut self, mut f: impl FnMut(Completion)) -> usize {
        let mut taken = 0;
        let mut batch = [Completion::default(); 32];
        loop {
            let count = self.drain(&mut batch);
            batch[..count].iter().for_each(|done| f(*done));
            taken += count;
            if count < batch.len() {
                return taken;
            }
        }
    }

    /// Whether there are completions to take.
    pub fn has_completions(&mut self) -> bool {
        !self.inner.completion().is_empty()
            || (self.native.as_mut()).is_some_and(|native| native.has_completions())
    }

    /// How many entries are queued and not yet handed to the kernel.
    pub fn queued(&mut self) -> usize {
        let others = self.native.as_mut();
        self.inner.submission().len() + others.map_or(0, |native| native.queued())
    }

    /// Queues what a device asks for.
    pub(crate) fn push_io(&mut self, io: &RingIo<'_>, user_data: u64) -> Result<(), RingFull> {
        if let RingIo::Native { fd, memory, bytes } = io {
            let native = self.native.as_mut().ok_or(RingFull)?;
            return native.push(&self.fixed, *fd, memory, *bytes, user_data);
        }
        let entry = io.entry(&self.fixed).user_data(user_data);
        // SAFETY: buffers inside a `RingIo` are `Buf`s, whose maker promised `Buf::new`'s contract, or lists of them, whose
        // maker promised `Vectors::bufs`'s: which is what `push` asks for. The kernel takes its own reference to the file at submission.
        unsafe { self.push(&entry) }
    }

    #[cfg(test)]
    fn raw_fd(&self) -> std::os::fd::RawFd {
        self.inner.as_raw_fd()
    }
}

/// A ring of either kind of entries, as the options say.
fn build<S: io_uring::squeue::EntryMarker, C: cqueue::EntryMarker>(
    options: &RingOptions,
) -> io::Result<IoUring<S, C>> {
    let mut builder = IoUring::<S, C>::builder();
    builder
        .dontfork()
        .setup_single_issuer()
        .setup_submit_all()
        .setup_taskrun_flag()
        .setup_cqsize(options.cq_entries.max(options.entries));
    if options.defer_taskrun {
        builder.setup_defer_taskrun();
    } else {
        builder.setup_coop_taskrun();
    }
    builder.build(options.entries)
}
