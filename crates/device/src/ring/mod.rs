//! One reactor's io_uring: submission, completions, and sleep in one system call.
//!
//! A ring belongs to its thread (`SINGLE_ISSUER`; the type isn't `Send`). Completions run when the
//! thread enters the kernel (`COOP_TASKRUN`); a flag of the kernel says when that is worth a system
//! call. `DEFER_TASKRUN` is off by default, and device files aren't registered: with either, a
//! killed process's locks fall about 40 ms later. Dropping a ring waits for nothing: requests in
//! flight go on, and their buffers must stay (see [`crate::Buf::new`]).
#![allow(unsafe_code)]

mod kernel;
#[cfg(feature = "test-device")]
mod linked;
mod native;
mod options;
mod remote;
mod request;
#[cfg(test)]
mod tests;

use std::io;
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd};
use std::time::Duration;

use forebay_rbd::{Image, ImageRequest};
use io_uring::squeue::Entry;
use io_uring::types::{Fd, SubmitArgs, Timespec};
use io_uring::{IoUring, cqueue, opcode};
use rustix::io::Errno;

pub use self::kernel::{KernelVersion, MINIMUM_KERNEL, check_kernel};
use self::native::{NATIVE_USER_DATA, NativeRing};
pub use self::options::{Completion, RingError, RingFull, RingOptions, Wake};
use self::options::{is_transient, setup_error};
use self::remote::{REMOTE_USER_DATA, RemoteIo};
pub(crate) use self::request::{CommandBytes, RingIo};
use crate::fixed::{Fixed, Pinned, Registration};
use crate::mem::IoMemory;
use crate::op::Submitted;

/// Reserved for entries whose completion is ignored.
pub const RESERVED_USER_DATA: u64 = u64::MAX;

/// One io_uring. See the module.
pub struct Ring {
    inner: IoUring,
    native: Option<Box<NativeRing>>,
    remote: Option<Box<RemoteIo>>,
    /// Memory that is registered with both rings.
    fixed: Fixed,
    options: RingOptions,
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
            remote: None,
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
            .map_err(error("limiting its worker threads"))?;
        if !options.iowq_cpus.is_empty() {
            // SAFETY: cpu_set_t is an array of integers; all zeros is the empty set. The filter
            // keeps each number inside. Wrong on a libc whose set isn't plain bits.
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

    /// Queues any entry, for requests that have no method here.
    ///
    /// # Safety
    ///
    /// What the entry points to must stay valid, and its buffers must obey the contract of
    /// [`Buf::new`](crate::Buf::new), until its completion was taken from this ring. Its user data
    /// must not be [`RESERVED_USER_DATA`].
    #[inline]
    pub unsafe fn push(&mut self, entry: &Entry) -> Result<(), RingFull> {
        // SAFETY: the caller vouches for the entry, as documented above.
        unsafe { self.inner.submission().push(entry) }.map_err(|_| RingFull)
    }

    /// Polls a descriptor once for `events` (`libc::POLLIN as u32` and so on); the result holds the
    /// events that occurred.
    pub fn poll_add(&mut self, fd: impl AsFd, events: u32, user_data: u64) -> Result<(), RingFull> {
        let entry = opcode::PollAdd::new(Fd(fd.as_fd().as_raw_fd()), events)
            .build()
            .user_data(user_data);
        // SAFETY: a poll names no memory. The kernel takes its own reference to the file at
        // submission; if the number was closed before, the result is an error.
        unsafe { self.push(&entry) }
    }

    /// Asks to end the request `target_user_data` early; the cancellation completes with
    /// `user_data`.
    pub fn cancel(&mut self, target_user_data: u64, user_data: u64) -> Result<(), RingFull> {
        let entry = opcode::AsyncCancel::new(target_user_data)
            .build()
            .user_data(user_data);
        // SAFETY: a cancellation names no memory.
        unsafe { self.push(&entry) }
    }

    /// Prepares the ring for NVMe commands ([`crate::Device::is_native`]), with a second ring in
    /// the kernel. On an error, such devices work through the block layer.
    pub fn prepare_native(&mut self) -> io::Result<()> {
        if self.native.is_none() {
            self.native = Some(Box::new(NativeRing::new(&self.options, &self.fixed)?));
        }
        Ok(())
    }

    #[inline]
    pub(crate) fn takes_native(&self) -> bool {
        self.native.is_some()
    }

    /// Registers memory with the kernel, so that requests in it cost less. On an error the memory
    /// is returned, and requests still work.
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

    /// Unregisters memory; no request in it may be queued or in flight. The result may take long to
    /// drop.
    pub fn unregister(&mut self, name: Registration) -> Option<Pinned> {
        if let Some(native) = &self.native {
            self.fixed.forget(&native.submitter(), name);
        }
        self.fixed.remove(&self.inner.submitter(), name)
    }

    /// Number of requests in registered memory.
    pub fn fixed_requests(&self) -> u64 {
        self.fixed.used.get()
    }

    /// Hands queued entries to the kernel and lets it run deferred work, if there is any. Returns
    /// the number of entries taken.
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
            // EBUSY: the completion queue overflowed and must be drained first.
            Err(error) if is_transient(&error) => Ok(others),
            other => other.map(|taken| taken + others),
        }
    }

    /// Submits, then sleeps until `min_complete` completions, the timeout or a signal: one system
    /// call. Give no timeout only if something else is sure to wake it.
    pub fn wait(&mut self, min_complete: u32, timeout: Option<Duration>) -> io::Result<Wake> {
        let mut may_sleep = true;
        if let Some(native) = &mut self.native {
            may_sleep = native.may_sleep(&mut self.inner)?;
        }
        if let Some(remote) = &mut self.remote {
            may_sleep &= remote.may_sleep(&mut self.inner);
        }
        if !may_sleep {
            // Others have completions, or the first ring is full and must be submitted.
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

    /// Takes completions into `out`, as many as fit, and returns their number.
    pub fn drain(&mut self, out: &mut [Completion]) -> usize {
        let mut taken = 0;
        while taken < out.len() {
            let mut batch = [const { MaybeUninit::<cqueue::Entry>::uninit() }; 32];
            let room = batch.len().min(out.len() - taken);
            let got = self.inner.completion().fill(&mut batch[..room]);
            let count = got.len();
            for entry in got {
                if entry.user_data() < REMOTE_USER_DATA {
                    out[taken] = Completion {
                        user_data: entry.user_data(),
                        result: entry.result(),
                    };
                    taken += 1;
                } else if entry.user_data() == NATIVE_USER_DATA
                    && let Some(native) = &mut self.native
                {
                    native.poll_ended();
                } else if entry.user_data() == REMOTE_USER_DATA
                    && let Some(remote) = &mut self.remote
                {
                    remote.poll_ended();
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
        if let Some(remote) = &mut self.remote {
            while taken < out.len()
                && let Some(done) = remote.next()
            {
                out[taken] = done;
                taken += 1;
            }
        }
        taken
    }

    /// Takes all completions, and returns their number.
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
            || (self.remote.as_mut()).is_some_and(|remote| remote.has_completions())
    }

    /// Number of queued entries that the kernel has not taken.
    pub fn queued(&mut self) -> usize {
        let others = self.native.as_mut();
        self.inner.submission().len() + others.map_or(0, |native| native.queued())
    }

    /// Number of operations that other threads of this process carry out; they end as completions.
    pub fn remote_in_flight(&self) -> usize {
        self.remote.as_ref().map_or(0, |remote| remote.in_flight())
    }

    pub(crate) fn push_io(&mut self, io: &RingIo<'_>, user_data: u64) -> Result<(), RingFull> {
        if let RingIo::Native { fd, memory, bytes } = io {
            let native = self.native.as_mut().ok_or(RingFull)?;
            return native.push(&self.fixed, *fd, memory, *bytes, user_data);
        }
        let entry = io.entry(&self.fixed).user_data(user_data);
        // SAFETY: a `RingIo` holds `Buf`s or lists, whose makers promised the contract of
        // `Buf::new` or `Vectors::bufs`: what `push` asks for. The kernel takes its own reference
        // to the file at submission.
        unsafe { self.push(&entry) }
    }

    /// Begins an operation on an image, with the memory of a read or write. Its end is a completion.
    pub(crate) fn begin_remote(
        &mut self,
        image: &Image,
        request: ImageRequest,
        memory: Option<IoMemory>,
        user_data: u64,
    ) -> Submitted {
        let remote = match &mut self.remote {
            Some(remote) => remote,
            none => match RemoteIo::new() {
                Ok(new) => none.insert(Box::new(new)),
                Err(error) => {
                    let errno = Errno::from_io_error(&error).unwrap_or(Errno::IO);
                    return Submitted::Done(Err(errno));
                }
            },
        };
        match remote.begin(image, request, memory, user_data) {
            Ok(Ok(())) => Submitted::Queued,
            Ok(Err(errno)) => Submitted::Done(Err(errno)),
            Err(RingFull) => Submitted::RingFull,
        }
    }

    #[cfg(test)]
    fn raw_fd(&self) -> std::os::fd::RawFd {
        self.inner.as_raw_fd()
    }
}

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
