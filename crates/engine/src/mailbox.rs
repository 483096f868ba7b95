//! The rings between the control thread and a reactor.
//!
//! **Design.** Two bounded single-producer rings and an eventfd each way. The sender wakes the other
//! side only when that says that it is asleep; the sleeper says so first and looks once more
//! afterwards, with a full fence on both sides ([`Sleeper`]), so no message is slept through. A full
//! ring is the sender's business: it keeps the message and tries again. **Not here:** what the
//! messages do.

use crate::core::{Admission, ServedDevice};
use crate::door::NewConnection;
use crate::exports::Port;
use crate::frontend::vm::NewMachine;
use crate::frontend::vm::frontend::{Closing, Deposit};
use crate::lane::{Figures, Lane, LaneIndex, Share};
use crate::takeover::Part;
use crate::volume::Volume;
use forebay_burst::budget::Budget;
use forebay_device::Errno;
use forebay_nvme::Status;
use forebay_nvme::reservation::Reservations;
use forebay_xlate::boundary::message::Spread;
use forebay_xlate::boundary::message::{ExportId, FaultFailure, Job, ReserveAsk, ReserveToken};
use forebay_xlate::{DeviceIndex, ExtentRange, Rights, VolumeId};
use rtrb::{Consumer, Producer, PushError, RingBuffer};
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::*, fence};

const RING_ENTRIES: usize = 4096;

/// From the control thread to a reactor.
pub enum Post {
    /// A device is served.
    Device(ServedDevice),
    /// The ports are these now.
    Ports(Arc<Vec<Port>>),
    /// What the owner says of a volume.
    Figures(VolumeId, Figures),
    /// How I/O is admitted; `None`: all of it is. Tenants' budgets are in it.
    Admission(Option<Box<Admission>>),
    /// There is another tenant in this slot.
    NewTenant(u32),
    /// The budget of the tenant in this slot, and whether its base comes first.
    Budget(u32, Budget, bool),
    /// Whose a volume is, and what it may use; `None`: nobody's.
    Share(VolumeId, Option<Share>),
    /// Nothing of an earlier engine is at a device that is served.
    Fenced(DeviceIndex),
    /// The device will be served before its fence, as soon as it is open; or it won't after all.
    Expect(DeviceIndex, bool),
    /// A lane is served here, or shows something else now.
    /// Answered by [`Upcall::ExportSettled`] with this request.
    Lane(Box<Lane>, u64),
    /// A lane's export is removed.
    /// Answered by [`Upcall::ExportSettled`] with this request.
    RemoveLane(LaneIndex, ExportId, u64),
    /// A volume grew.
    Volume(Arc<Volume>),
    /// Faults in the range are answered.
    Granted(VolumeId, ExtentRange),
    /// Faults in the range, for writing or for reading, can't be answered.
    FaultFailed(VolumeId, ExtentRange, bool, FaultFailure),
    /// Words are cleared: drain.
    Revoke {
        /// Its number.
        revoke: u64,
        /// Whose.
        volume: VolumeId,
        /// What.
        range: ExtentRange,
        /// What stays.
        keep: Option<Rights>,
    },
    /// A revoke is given up: it needs no answer any more.
    Abandon(u64),
    /// Answer this job once everything in flight here at the device has ended.
    Settle(u64, DeviceIndex),
    /// More is durable.
    Committed(VolumeId),
    /// A commit failed.
    CommitFailed(VolumeId, u64),
    /// A release is carried out: command, its slot's generation, and how many of its extents.
    ReleaseDone(u32, u32, u64),
    /// The owner can't carry a release out, nothing was done: command and its slot's generation.
    ReleaseFailed(u32, u32),
    /// A release is given up before anything was done for it: command and its slot's generation.
    ReleaseAbandoned(u32, u32),
    /// Work for the internal lane.
    Job(u64, Job),
    /// A connection that the door has let in.
    Connection(Box<NewConnection>),
    /// What a dead engine left of this reactor's.
    Inherit(Box<Part>),
    /// A machine's client.
    Machine(Box<NewMachine>),
    /// The daemon holds a client's deposits up to this one, or has no room for them.
    Deposited(u64, u32, bool),
    /// Who may do what with a volume has changed.
    Reservations(VolumeId, Arc<Reservations>),
    /// A reservation command is carried out, or refused; the state is as it is now.
    Reserved(ReserveToken, VolumeId, Status, Arc<Reservations>),
    /// Queues are spread over reactors like this from now on.
    Spread(Spread),
    /// The set of exports changed.
    DiscoveryChanged,
    /// Close everything and end.
    Stop,
}

/// From a reactor to the control thread.
#[derive(Debug)]
pub enum Upcall {
    /// A miss.
    Fault {
        /// Whose.
        volume: VolumeId,
        /// Which extent.
        extent: u64,
        /// For writing.
        write: bool,
    },
    /// A command waits for a commit.
    CommitWanted {
        /// Whose.
        volume: VolumeId,
        /// Up to which.
        sequence: u64,
    },
    /// A tenant deallocates.
    Release {
        /// The command.
        io: u32,
        /// Its slot's generation.
        generation: u32,
        /// Whose.
        volume: VolumeId,
        /// What.
        range: ExtentRange,
    },
    /// A release has waited too long: give it up, unless it is being carried out.
    AbandonRelease {
        /// The command.
        io: u32,
        /// Its slot's generation.
        generation: u32,
    },
    /// A host changes a volume's reservations.
    Reserve(ReserveAsk),
    /// Nobody waits for that any more.
    ReserveGone(VolumeId, ReserveToken),
    /// This reactor has drained a revoke.
    Drained {
        /// Which.
        revoke: u64,
    },
    /// Everything that was in flight here when [`Post::Settle`] came has ended.
    Settled {
        /// Which job.
        job: u64,
    },
    /// The internal lane ended a job.
    JobDone {
        /// Which.
        job: u64,
        /// How.
        error: Option<Errno>,
    },
    /// What an export's change takes from hosts is taken: their connections are shut and their commands
    /// ended.
    ExportSettled {
        /// From the post.
        request: u64,
        /// Commands of theirs that are not ended: they are at devices.
        at_devices: u32,
    },
    /// A lane is gone from its reactor.
    LaneGone {
        /// Which.
        lane: LaneIndex,
    },
    /// A connection's socket is shut down, and no record is left of it.
    SocketGone(u64),
    /// A machine's client has sent descriptors: the daemon is to keep them, and say so.
    Deposits(u64, Vec<Deposit>),
    /// It has no use for these any more.
    Withdrawn(u64, Vec<u32>),
    /// A machine's client is gone, and its last command is back.
    MachineLeft(u64, ExportId, Closing),
    /// A machine was refused something: what and why, for people.
    MachineRefused(ExportId, String),
    /// The reactor has ended.
    Stopped,
}

/// Whether a thread sleeps until its eventfd is rung.
#[derive(Debug, Default)]
pub struct Sleeper(AtomicBool);

impl Sleeper {
    /// The thread is about to sleep; false when there is something for it, so that it must not.
    pub fn fall_asleep(&self, nothing: impl FnOnce() -> bool) -> bool {
        self.0.store(true, SeqCst);
        fence(SeqCst);
        if nothing() {
            return true;
        }
        self.0.store(false, SeqCst);
        false
    }

    /// The thread is awake.
    pub fn awake(&self) {
        self.0.store(false, SeqCst);
    }

    /// Whether it must be woken to see what was just put there for it.
    #[inline]
    fn must_be_woken(&self) -> bool {
        fence(SeqCst);
        self.0.load(SeqCst)
    }
}

/// What wakes a reactor, for other reactors.
#[derive(Clone, Debug)]
pub struct ReactorBell {
    asleep: Arc<Sleeper>,
    wake: Arc<OwnedFd>,
}

impl ReactorBell {
    /// A bell for a reactor that is awake.
    ///
    /// # Errors
    /// The system's.
    #[cfg(test)]
    pub fn new() -> io::Result<Self> {
        Ok(Self {
            asleep: Arc::default(),
            wake: Arc::new(eventfd()?),
        })
    }

    /// Sees to it that the reactor looks at what was put there for it.
    #[inline]
    pub fn ring(&self) {
        if self.asleep.must_be_woken() {
            ring_bell(&*self.wake);
        }
    }

    /// Whether it sleeps, as far as that can be seen.
    #[inline]
    pub fn sleeps(&self) -> bool {
        self.asleep.0.load(Relaxed)
    }
}

/// The control thread's end.
pub struct ToReactor {
    posts: Producer<Post>,
    upcalls: Consumer<Upcall>,
    overflow: VecDeque<Post>,
    heard_ns: Arc<AtomicU64>,
    asleep: Arc<Sleeper>,
    wake: Arc<OwnedFd>,
}

/// The reactor's end.
pub struct ToControl {
    posts: Consumer<Post>,
    upcalls: Producer<Upcall>,
    heard_ns: Arc<AtomicU64>,
    asleep: Arc<Sleeper>,
    wake: Arc<OwnedFd>,
    control: ControlBell,
}

/// A non-blocking eventfd.
pub fn eventfd() -> io::Result<OwnedFd> {
    use rustix::event::EventfdFlags;
    Ok(rustix::event::eventfd(
        0,
        EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK,
    )?)
}

/// Makes an eventfd readable.
pub fn ring_bell(fd: impl AsFd) {
    // A full counter is readable already.
    let _ = rustix::io::write(fd, &1u64.to_ne_bytes());
}

/// Makes an eventfd unreadable until it is rung again.
pub fn quiet_bell(fd: impl AsFd) {
    let _ = rustix::io::read(fd, &mut [0u8; 8]);
}

/// What wakes the control thread.
#[derive(Clone, Debug)]
pub struct ControlBell {
    /// Its eventfd.
    pub wake: Arc<OwnedFd>,
    /// Whether it sleeps.
    pub asleep: Arc<Sleeper>,
}

impl ControlBell {
    /// A bell for a thread that is awake.
    pub fn new() -> io::Result<Self> {
        Ok(Self {
            wake: Arc::new(eventfd()?),
            asleep: Arc::default(),
        })
    }
}

/// A pair of ends.
pub fn mailbox(control: ControlBell) -> io::Result<(ToReactor, ToControl)> {
    let (post_in, post_out) = RingBuffer::new(RING_ENTRIES);
    let (up_in, up_out) = RingBuffer::new(RING_ENTRIES);
    let asleep = Arc::new(Sleeper::default());
    let wake = Arc::new(eventfd()?);
    let heard_ns = Arc::<AtomicU64>::default();
    let reactor = ToControl {
        posts: post_out,
        upcalls: up_in,
        heard_ns: heard_ns.clone(),
        asleep: asleep.clone(),
        wake: wake.clone(),
        control,
    };
    Ok((
        ToReactor {
            posts: post_in,
            upcalls: up_out,
            overflow: VecDeque::new(),
            heard_ns,
            asleep,
            wake,
        },
        reactor,
    ))
}

impl ToReactor {
    /// Sends, in order.
    pub fn post(&mut self, post: Post) {
        self.queue(post);
        self.flush();
    }

    /// Sends with the next [`ToReactor::flush`]: many with one look at whether the reactor sleeps.
    pub fn queue(&mut self, post: Post) {
        self.overflow.push_back(post);
    }

    /// Sends what found no room before; call it each turn.
    pub fn flush(&mut self) {
        let mut sent = false;
        while let Some(post) = self.overflow.pop_front() {
            match self.posts.push(post) {
                Ok(()) => sent = true,
                Err(PushError::Full(post)) => {
                    self.overflow.push_front(post);
                    break;
                }
            }
        }
        if sent && self.asleep.must_be_woken() {
            ring_bell(&*self.wake);
        }
    }

    /// What the daemon had said by then is posted, as far as there was room.
    pub fn heard(&self, ns: u64) {
        if !self.is_behind() {
            self.heard_ns.store(ns, Release);
        }
    }

    /// Whether something waits for room.
    pub fn is_behind(&self) -> bool {
        !self.overflow.is_empty()
    }

    /// Whether the reactor has said something.
    pub fn has_upcalls(&self) -> bool {
        !self.upcalls.is_empty()
    }

    /// The next message from the reactor.
    pub fn next(&mut self) -> Option<Upcall> {
        self.upcalls.pop().ok()
    }
}

impl ToControl {
    /// The next message from the control thread.
    #[inline]
    pub fn next(&mut self) -> Option<Post> {
        self.posts.pop().ok()
    }

    /// What the daemon had said by then is posted.
    pub fn heard_ns(&self) -> u64 {
        self.heard_ns.load(Acquire)
    }

    /// Sends one message; gives it back when there is no room.
    pub fn send(&mut self, upcall: Upcall) -> Result<(), Upcall> {
        self.upcalls.push(upcall).map_err(|PushError::Full(u)| u)
    }

    /// Sees to it that the control thread looks at what was sent.
    pub fn wake_control(&self) {
        if self.control.asleep.must_be_woken() {
            ring_bell(&*self.control.wake);
        }
    }

    /// Says that the reactor is about to sleep; false when a message came meanwhile, or there is something else.
    pub fn fall_asleep(&self, nothing: impl FnOnce() -> bool) -> bool {
        self.asleep
            .fall_asleep(|| self.posts.is_empty() && nothing())
    }

    /// What wakes this reactor.
    pub fn bell(&self) -> ReactorBell {
        ReactorBell {
            asleep: self.asleep.clone(),
            wake: self.wake.clone(),
        }
    }

    /// Says that the reactor is awake.
    pub fn awake(&self) {
        self.asleep.awake();
        quiet_bell(&*self.wake);
    }

    /// The descriptor that wakes the reactor.
    pub fn wake_fd(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }
}
