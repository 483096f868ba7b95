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

use std::io;
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::time::Duration;

use io_uring::cqueue::Entry32;
use io_uring::squeue::{Entry, Entry128};
use io_uring::types::{Fd, FsyncFlags, SubmitArgs, Timespec};
use io_uring::{IoUring, cqueue, opcode};
use rustix::io::Errno;

use crate::fixed::{Fixed, Pinned, Registration};
use crate::kernel::forbidden_reason;
pub use crate::kernel::{KernelVersion, MINIMUM_KERNEL, check_kernel};
use crate::mem::Memory;
use crate::native::CommandBytes;

/// This crate's own mark on entries whose completion nobody waits for. Nobody else may use it.
pub const RESERVED_USER_DATA: u64 = u64::MAX;
/// The mark of the poll that says that the second ring has completions.
const NATIVE_USER_DATA: u64 = u64::MAX - 1;

/// `linux/nvme_ioctl.h`: `_IOWR('N', 0x80, struct nvme_uring_cmd)`, whose size is 72, and the same with 0x81.
const NVME_URING_CMD_IO: u32 = 0xc048_4e80;
const NVME_URING_CMD_IO_VEC: u32 = 0xc048_4e81;

/// What a ring is made with.
#[derive(Debug, Clone)]
pub struct RingOptions {
    /// Entries of the submission queue (rounded up to a power of two).
    pub entries: u32,
    /// Entries of the completion queue; at least `entries`.
    pub cq_entries: u32,
    /// Completions run only inside [`Ring::wait`] and [`Ring::submit`]. Faster, but the fence falls later.
    pub defer_taskrun: bool,
    /// Most kernel threads for work on regular files (fsync, zeroing, punching); 0: the kernel's default.
    pub iowq_bounded: u32,
    /// Most kernel threads for other work that blocks; 0: the kernel's default.
    pub iowq_unbounded: u32,
    /// The processors that these threads may use; empty: all.
    pub iowq_cpus: Vec<usize>,
}

impl Default for RingOptions {
    fn default() -> Self {
        Self {
            entries: 256,
            cq_entries: 1024,
            defer_taskrun: false,
            iowq_bounded: 4,
            iowq_unbounded: 4,
            iowq_cpus: Vec::new(),
        }
    }
}

/// Why there is no ring.
#[derive(Debug, thiserror::Error)]
pub enum RingError {
    /// The kernel is below [`MINIMUM_KERNEL`].
    #[error(
        "the kernel is {found}, but Linux {MINIMUM_KERNEL} or newer is needed: update the kernel"
    )]
    KernelTooOld {
        /// What runs here.
        found: KernelVersion,
    },
    /// The kernel's release string has no version in it.
    #[error(
        "the kernel's release `{release}` holds no version: Linux {MINIMUM_KERNEL} or newer is needed"
    )]
    UnknownKernel {
        /// The string.
        release: String,
    },
    /// io_uring is switched off or filtered.
    #[error("io_uring is forbidden here ({source}): {reason}")]
    Forbidden {
        /// Who forbids it, and what to do.
        reason: String,
        /// What the system said.
        source: io::Error,
    },
    /// Something else failed.
    #[error("io_uring: {doing} failed: {source}")]
    Io {
        /// What was being done.
        doing: &'static str,
        /// What the system said.
        source: io::Error,
    },
}

/// The submission queue has no room: submit, take completions, try again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the submission queue is full")]
pub struct RingFull;

/// The end of one entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Completion {
    /// What the entry was marked with.
    pub user_data: u64,
    /// Bytes, events or zero; negative: an errno.
    pub result: i32,
}

/// Why [`Ring::wait`] returned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wake {
    /// There are completions.
    Completions,
    /// The time is over, and there are none.
    TimedOut,
    /// A signal, or nothing in particular; there are no completions.
    Interrupted,
}

/// A second ring, whose entries are long enough for NVMe commands. The first one wakes for it.
struct NativeRing {
    inner: IoUring<Entry128, Entry32>,
    /// The first ring polls it.
    is_watched: bool,
}

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
        let mut builder = IoUring::builder();
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
        let inner = builder.build(options.entries).map_err(setup_error)?;
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
        if self.native.is_some() {
            return Ok(());
        }
        let mut builder = IoUring::<Entry128, Entry32>::builder();
        builder
            .dontfork()
            .setup_single_issuer()
            .setup_submit_all()
            .setup_taskrun_flag()
            .setup_cqsize(self.options.cq_entries.max(self.options.entries));
        if self.options.defer_taskrun {
            builder.setup_defer_taskrun();
        } else {
            builder.setup_coop_taskrun();
        }
        let inner = builder.build(self.options.entries)?;
        self.fixed.also(&inner.submitter())?;
        self.native = Some(Box::new(NativeRing {
            inner,
            is_watched: false,
        }));
        Ok(())
    }

    /// Has the kernel know memory that it holds already: from now on requests in it cost less. Given back if that can't
    /// be: requests go on as ever.
    pub fn register(&mut self, pinned: Pinned) -> Result<Registration, (Pinned, io::Error)> {
        let name = self.fixed.add(&self.inner.submitter(), pinned)?;
        let native = self.native.as_ref();
        let also = native.map_or(Ok(()), |ring| {
            self.fixed.also_new(&ring.inner.submitter(), name)
        });
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
            self.fixed.forget(&native.inner.submitter(), name);
        }
        self.fixed.remove(&self.inner.submitter(), name)
    }

    /// Requests so far whose memory was registered.
    pub fn fixed_requests(&self) -> u64 {
        self.fixed.used.get()
    }

    /// Whether it takes NVMe commands.
    #[inline]
    pub(crate) fn takes_native(&self) -> bool {
        self.native.is_some()
    }

    /// Hands what is queued in the second ring to the kernel.
    #[cold]
    fn submit_native(&mut self) -> io::Result<usize> {
        let Some(native) = &mut self.native else {
            return Ok(0);
        };
        let queue = native.inner.submission();
        let idle = queue.is_empty() && !queue.taskrun() && !queue.cq_overflow();
        drop(queue);
        if idle {
            return Ok(0);
        }
        match native.inner.submit() {
            Err(error) if is_transient(&error) => Ok(0),
            other => other,
        }
    }

    /// Before a sleep: has the first ring wake when the second has completions. False if it has some, or may not sleep.
    #[cold]
    fn watch_native(&mut self) -> io::Result<bool> {
        self.submit_native()?;
        let Some(native) = &mut self.native else {
            return Ok(true);
        };
        if !native.is_watched {
            let entry = opcode::PollAdd::new(Fd(native.inner.as_raw_fd()), libc::POLLIN as u32)
                .build()
                .user_data(NATIVE_USER_DATA);
            // SAFETY: as in `poll_add`; the second ring lives as long as the first.
            native.is_watched = unsafe { self.inner.submission().push(&entry) }.is_ok();
        }
        let ready = !native.inner.completion().is_empty();
        Ok(native.is_watched && !ready)
    }

    /// What the second ring has completed.
    #[cold]
    fn next_native(&mut self) -> Option<Completion> {
        let entry = self.native.as_mut()?.inner.completion().next()?;
        Some(Completion {
            user_data: entry.user_data(),
            result: entry.result(),
        })
    }

    /// Hands what is queued to the kernel, and lets it finish what waits for that. No system call if there is neither.
    /// Returns how many entries were taken.
    pub fn submit(&mut self) -> io::Result<usize> {
        let others = match self.native {
            Some(_) => self.submit_native()?,
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
        if self.native.is_some() && !self.watch_native()? {
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
                    native.is_watched = false;
                }
            }
            if count < room {
                break;
            }
        }
        if self.native.is_some() {
            while taken < out.len()
                && let Some(done) = self.next_native()
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
            || (self.native.as_mut()).is_some_and(|native| !native.inner.completion().is_empty())
    }

    /// How many entries are queued and not yet handed to the kernel.
    pub fn queued(&mut self) -> usize {
        let others = self.native.as_mut();
        self.inner.submission().len() + others.map_or(0, |native| native.inner.submission().len())
    }

    /// How many more entries fit.
    pub fn free_entries(&mut self) -> usize {
        let queue = self.inner.submission();
        queue.capacity() - queue.len()
    }

    pub(crate) fn push_io(&mut self, io: &Io<'_>, user_data: u64) -> Result<(), RingFull> {
        if let Io::Native { fd, memory, bytes } = io {
            return self.push_native(*fd, memory, *bytes, user_data);
        }
        let entry = io.entry(self).user_data(user_data);
        // SAFETY: buffers inside an `Io` are `Buf`s, whose maker promised `Buf::new`'s contract, or lists of them, whose
        // maker promised `Vectors::bufs`'s: which is what `push` asks for. The kernel takes its own reference to the file at submission.
        unsafe { self.push(&entry) }
    }

    #[cold]
    fn push_native(
        &mut self,
        fd: BorrowedFd<'_>,
        memory: &Memory,
        bytes: CommandBytes,
        user_data: u64,
    ) -> Result<(), RingFull> {
        // A list is never known to be registered here: which kernels take that is not asked.
        let (command, index) = match memory {
            Memory::One(_) => (NVME_URING_CMD_IO, self.fixed.index_of(memory)),
            Memory::Many(_) => (NVME_URING_CMD_IO_VEC, None),
        };
        let entry = opcode::UringCmd80::new(Fd(fd.as_raw_fd()), command)
            .cmd(bytes)
            .buf_index(index)
            .build()
            .user_data(user_data);
        let native = self.native.as_mut().ok_or(RingFull)?;
        // SAFETY: as in `push_io`: the command's memory is that of an operation, and the kernel copies the entry itself.
        unsafe { native.inner.submission().push(&entry) }.map_err(|_| RingFull)
    }

    /// Queues `io` to start when `gate` becomes readable.
    #[cfg(feature = "test-device")]
    pub(crate) fn push_io_behind(
        &mut self,
        gate: BorrowedFd<'_>,
        io: &Io<'_>,
        user_data: u64,
    ) -> Result<(), RingFull> {
        use io_uring::squeue::Flags;
        let wait = opcode::PollAdd::new(Fd(gate.as_raw_fd()), libc::POLLIN as u32)
            .build()
            .flags(Flags::IO_LINK | Flags::SKIP_SUCCESS)
            .user_data(RESERVED_USER_DATA);
        let entry = io.entry(self).user_data(user_data);
        // SAFETY: as in `push_io` and `poll_add`; both entries go in or none.
        unsafe { self.inner.submission().push_multiple(&[wait, entry]) }.map_err(|_| RingFull)
    }

    /// Queues `io` to start after so long.
    #[cfg(feature = "test-device")]
    pub(crate) fn push_io_after(
        &mut self,
        delay: &'static Timespec,
        io: &Io<'_>,
        user_data: u64,
    ) -> Result<(), RingFull> {
        use io_uring::squeue::Flags;
        use io_uring::types::TimeoutFlags;
        let wait = opcode::Timeout::new(delay)
            .flags(TimeoutFlags::ETIME_SUCCESS)
            .build()
            .flags(Flags::IO_LINK | Flags::SKIP_SUCCESS)
            .user_data(RESERVED_USER_DATA);
        let entry = io.entry(self).user_data(user_data);
        // SAFETY: as in `push_io`; the time is static; both entries go in or none.
        unsafe { self.inner.submission().push_multiple(&[wait, entry]) }.map_err(|_| RingFull)
    }

    #[cfg(test)]
    fn raw_fd(&self) -> std::os::fd::RawFd {
        self.inner.as_raw_fd()
    }
}

/// What a device asks of a ring.
pub(crate) enum Io<'a> {
    Read {
        fd: BorrowedFd<'a>,
        offset_bytes: u64,
        memory: Memory,
    },
    Write {
        fd: BorrowedFd<'a>,
        offset_bytes: u64,
        memory: Memory,
        dsync: bool,
    },
    Flush {
        fd: BorrowedFd<'a>,
    },
    /// An NVMe command, for the second ring.
    Native {
        fd: BorrowedFd<'a>,
        memory: Memory,
        bytes: CommandBytes,
    },
    Fallocate {
        fd: BorrowedFd<'a>,
        offset_bytes: u64,
        len_bytes: u64,
        mode: i32,
    },
    /// Completes with this result and does nothing.
    #[cfg(feature = "test-device")]
    Answer {
        result: i32,
        user_data: u64,
    },
}

impl Io<'_> {
    /// That of a transfer whose memory is the ring's entry of this number.
    fn fixed_entry(&self, index: u16) -> Entry {
        match *self {
            Io::Read {
                fd,
                offset_bytes,
                memory: Memory::One(buf),
            } => {
                let (fd, ptr) = (Fd(fd.as_raw_fd()), buf.ptr().as_ptr());
                opcode::ReadFixed::new(fd, ptr, buf.len_bytes(), index)
                    .offset(offset_bytes)
                    .build()
            }
            Io::Read {
                fd,
                offset_bytes,
                memory: Memory::Many(bufs),
            } => {
                let (fd, list) = (Fd(fd.as_raw_fd()), bufs.ptr().as_ptr());
                opcode::ReadvFixed::new(fd, list, bufs.count(), index)
                    .offset(offset_bytes)
                    .build()
            }
            Io::Write {
                fd,
                offset_bytes,
                memory: Memory::One(buf),
                dsync,
            } => {
                let (fd, ptr) = (Fd(fd.as_raw_fd()), buf.ptr().as_ptr());
                opcode::WriteFixed::new(fd, ptr, buf.len_bytes(), index)
                    .offset(offset_bytes)
                    .rw_flags(if dsync { libc::RWF_DSYNC } else { 0 })
                    .build()
            }
            Io::Write {
                fd,
                offset_bytes,
                memory: Memory::Many(bufs),
                dsync,
            } => {
                let (fd, list) = (Fd(fd.as_raw_fd()), bufs.ptr().as_ptr());
                opcode::WritevFixed::new(fd, list, bufs.count(), index)
                    .offset(offset_bytes)
                    .rw_flags(if dsync { libc::RWF_DSYNC } else { 0 })
                    .build()
            }
            // Nothing else has such memory.
            _ => opcode::Nop::new().build(),
        }
    }

    fn entry(&self, ring: &Ring) -> Entry {
        if let Io::Read { memory, .. } | Io::Write { memory, .. } = self
            && let Some(index) = ring.fixed.index_of(memory)
        {
            return self.fixed_entry(index);
        }
        match *self {
            Io::Read {
                fd,
                offset_bytes,
                memory: Memory::One(buf),
            } => opcode::Read::new(Fd(fd.as_raw_fd()), buf.ptr().as_ptr(), buf.len_bytes())
                .offset(offset_bytes)
                .build(),
            Io::Read {
                fd,
                offset_bytes,
                memory: Memory::Many(bufs),
            } => opcode::Readv::new(Fd(fd.as_raw_fd()), bufs.ptr().as_ptr(), bufs.count())
                .offset(offset_bytes)
                .build(),
            Io::Write {
                fd,
                offset_bytes,
                memory: Memory::One(buf),
                dsync,
            } => opcode::Write::new(Fd(fd.as_raw_fd()), buf.ptr().as_ptr(), buf.len_bytes())
                .offset(offset_bytes)
                .rw_flags(if dsync { libc::RWF_DSYNC } else { 0 })
                .build(),
            Io::Write {
                fd,
                offset_bytes,
                memory: Memory::Many(bufs),
                dsync,
            } => opcode::Writev::new(Fd(fd.as_raw_fd()), bufs.ptr().as_ptr(), bufs.count())
                .offset(offset_bytes)
                .rw_flags(if dsync { libc::RWF_DSYNC } else { 0 })
                .build(),
            // `push_io` doesn't ask.
            Io::Native { .. } => opcode::Nop::new().build(),
            Io::Flush { fd } => opcode::Fsync::new(Fd(fd.as_raw_fd()))
                .flags(FsyncFlags::DATASYNC)
                .build(),
            Io::Fallocate {
                fd,
                offset_bytes,
                len_bytes,
                mode,
            } => opcode::Fallocate::new(Fd(fd.as_raw_fd()), len_bytes)
                .offset(offset_bytes)
                .mode(mode)
                .build(),
            // A message to the ring itself brings any result with any mark; its own completion stays away.
            #[cfg(feature = "test-device")]
            Io::Answer { result, user_data } => {
                opcode::MsgRingData::new(Fd(ring.inner.as_raw_fd()), result, user_data, None)
                    .build()
                    .flags(io_uring::squeue::Flags::SKIP_SUCCESS)
            }
        }
    }
}

fn is_transient(error: &io::Error) -> bool {
    matches!(
        Errno::from_io_error(error),
        Some(Errno::INTR | Errno::BUSY | Errno::AGAIN)
    )
}

fn setup_error(source: io::Error) -> RingError {
    match Errno::from_io_error(&source) {
        Some(Errno::PERM | Errno::NOSYS | Errno::ACCESS) => RingError::Forbidden {
            reason: forbidden_reason(
                std::fs::read_to_string("/proc/sys/kernel/io_uring_disabled")
                    .ok()
                    .as_deref(),
            ),
            source,
        },
        _ => RingError::Io {
            doing: "setting it up",
            source,
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{EventfdFlags, eventfd};

    fn ring() -> Ring {
        Ring::new(&RingOptions {
            entries: 4,
            cq_entries: 8,
            iowq_cpus: vec![0],
            ..RingOptions::default()
        })
        .expect("io_uring works here")
    }

    #[test]
    fn a_forbidden_ring_says_so() {
        let error = setup_error(io::Error::from_raw_os_error(libc::ENOSYS));
        assert!(matches!(error, RingError::Forbidden { .. }));
    }

    #[test]
    fn sleeps_until_time_or_event() {
        let mut ring = ring();
        let short = Some(Duration::from_millis(5));
        assert_eq!(ring.wait(1, short).expect("wait"), Wake::TimedOut);
        let event = eventfd(0, EventfdFlags::CLOEXEC).expect("eventfd");
        ring.poll_add(&event, libc::POLLIN as u32, 7).expect("room");
        assert_ne!(ring.wait(1, short).expect("wait"), Wake::Completions);
        rustix::io::write(&event, &1u64.to_ne_bytes()).expect("write");
        let long = Some(Duration::from_secs(20));
        assert_eq!(ring.wait(1, long).expect("wait"), Wake::Completions);
        let mut out = [Completion::default(); 4];
        assert_eq!(ring.drain(&mut out), 1);
        assert_eq!(out[0].user_data, 7);
        assert_eq!(out[0].result & i32::from(libc::POLLIN), 1);
        assert_eq!(ring.drain(&mut out), 0);
    }

    #[test]
    fn a_full_queue_is_told_and_nothing_is_lost() {
        let mut ring = ring();
        let event = eventfd(1, EventfdFlags::CLOEXEC).expect("eventfd");
        let mut taken = Vec::new();
        // More than the completion queue holds, taken late: the kernel keeps the rest.
        for user_data in 0..40 {
            if ring.poll_add(&event, libc::POLLIN as u32, user_data) == Err(RingFull) {
                assert_eq!(ring.free_entries(), 0);
                ring.submit().expect("submit");
                ring.poll_add(&event, libc::POLLIN as u32, user_data)
                    .expect("room again");
            }
        }
        while taken.len() < 40 {
            ring.submit().expect("submit");
            let mut out = [Completion::default(); 3];
            let count = ring.drain(&mut out);
            taken.extend(out[..count].iter().map(|done| done.user_data));
        }
        taken.sort_unstable();
        assert_eq!(taken, (0..40).collect::<Vec<_>>());
    }

    #[test]
    fn cancels() {
        let mut ring = ring();
        let event = eventfd(0, EventfdFlags::CLOEXEC).expect("eventfd");
        ring.poll_add(&event, libc::POLLIN as u32, 1).expect("room");
        ring.cancel(1, 2).expect("room");
        let mut results = Vec::new();
        while results.len() < 2 {
            ring.wait(1, Some(Duration::from_secs(20))).expect("wait");
            ring.for_each_completion(|done| results.push((done.user_data, done.result)));
        }
        results.sort_unstable();
        assert_eq!(results, [(1, -libc::ECANCELED), (2, 0)]);
        assert!(ring.raw_fd() >= 0);
    }

    #[test]
    fn many_entries_at_once_with_deferred_completions() {
        let mut ring = Ring::new(&RingOptions {
            defer_taskrun: true,
            ..RingOptions::default()
        })
        .expect("io_uring works here");
        let event = eventfd(1, EventfdFlags::CLOEXEC).expect("eventfd");
        for user_data in 0..100 {
            ring.poll_add(&event, libc::POLLIN as u32, user_data)
                .expect("room");
        }
        assert_eq!(ring.queued(), 100);
        let mut count = 0;
        while count < 100 {
            ring.wait(1, Some(Duration::from_secs(20))).expect("wait");
            count += ring.for_each_completion(|done| assert!(done.result > 0));
        }
    }
}
