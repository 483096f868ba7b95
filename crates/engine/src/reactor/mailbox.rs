//! The rings between the control thread and a reactor.
//!
//! **Design.** Two bounded single-producer rings and an eventfd each way. The sender wakes the other
//! side only when that says that it is asleep; the sleeper says so first and looks once more
//! afterwards, with a full fence on both sides ([`Sleeper`]), so no message is slept through. A full
//! ring is the sender's business: it keeps the message and tries again. **Not here:** what the
//! messages do.

use crate::bell::{ControlBell, ReactorBell, Sleeper, eventfd, quiet_bell, ring_bell};
use crate::core::{Admission, ServedDevice};
use crate::frontend::FrontendMessage;
use crate::lane::{Lane, LaneIndex, Share, VolumeStatistics};
use crate::upcall::Upcall;
use crate::volume::Volume;
use forebay_qos::budget::Budget;
use forebay_xlate::boundary::message::{ExportId, Spread};
use forebay_xlate::{DeviceIndex, VolumeId, engine_side};
use rtrb::{Consumer, Producer, PushError, RingBuffer};
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::*};

const RING_ENTRIES: usize = 4096;

/// From the control thread to a reactor.
pub(crate) enum Post {
    /// A device is served.
    Device(ServedDevice),
    /// What the owner says of a volume.
    Figures(VolumeId, VolumeStatistics),
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
    /// What the owner says of space.
    Space(engine_side::Post),
    /// For the frontend that knows its type.
    Frontend(FrontendMessage),
    /// What a dead engine left for frontends: they take it up in one turn.
    Inherit(Vec<FrontendMessage>),
    /// Queues are spread over reactors like this from now on.
    Spread(Spread),
    /// Close everything and end.
    Stop,
}

/// The control thread's end.
pub(crate) struct ToReactor {
    posts: Producer<Post>,
    upcalls: Consumer<Upcall>,
    overflow: VecDeque<Post>,
    heard_ns: Arc<AtomicU64>,
    asleep: Arc<Sleeper>,
    wake: Arc<OwnedFd>,
}

/// The reactor's end.
pub(crate) struct ToControl {
    posts: Consumer<Post>,
    upcalls: Producer<Upcall>,
    heard_ns: Arc<AtomicU64>,
    asleep: Arc<Sleeper>,
    wake: Arc<OwnedFd>,
    control: ControlBell,
}

/// A pair of ends.
pub(crate) fn mailbox(control: ControlBell) -> io::Result<(ToReactor, ToControl)> {
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
    pub(crate) fn post(&mut self, post: Post) {
        self.queue(post);
        self.flush();
    }

    /// Sends with the next [`ToReactor::flush`]: many with one look at whether the reactor sleeps.
    pub(crate) fn queue(&mut self, post: Post) {
        self.overflow.push_back(post);
    }

    /// Sends what found no room before; call it each turn.
    pub(crate) fn flush(&mut self) {
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
    pub(crate) fn heard(&self, ns: u64) {
        if !self.is_behind() {
            self.heard_ns.store(ns, Release);
        }
    }

    /// Whether something waits for room.
    pub(crate) fn is_behind(&self) -> bool {
        !self.overflow.is_empty()
    }

    /// Whether the reactor has said something.
    pub(crate) fn has_upcalls(&self) -> bool {
        !self.upcalls.is_empty()
    }

    /// The next message from the reactor.
    pub(crate) fn next(&mut self) -> Option<Upcall> {
        self.upcalls.pop().ok()
    }
}

impl ToControl {
    /// The next message from the control thread.
    #[inline]
    pub(crate) fn next(&mut self) -> Option<Post> {
        self.posts.pop().ok()
    }

    /// What the daemon had said by then is posted.
    pub(crate) fn heard_ns(&self) -> u64 {
        self.heard_ns.load(Acquire)
    }

    /// Sends one message; gives it back when there is no room.
    pub(crate) fn send(&mut self, upcall: Upcall) -> Result<(), Upcall> {
        self.upcalls.push(upcall).map_err(|PushError::Full(u)| u)
    }

    /// Sees to it that the control thread looks at what was sent.
    pub(crate) fn wake_control(&self) {
        if self.control.asleep.must_be_woken() {
            ring_bell(&*self.control.wake);
        }
    }

    /// Says that the reactor is about to sleep; false when a message came meanwhile, or there is something else.
    pub(crate) fn fall_asleep(&self, nothing: impl FnOnce() -> bool) -> bool {
        self.asleep
            .fall_asleep(|| self.posts.is_empty() && nothing())
    }

    /// What wakes this reactor.
    pub(crate) fn bell(&self) -> ReactorBell {
        ReactorBell {
            asleep: self.asleep.clone(),
            wake: self.wake.clone(),
        }
    }

    /// Says that the reactor is awake.
    pub(crate) fn awake(&self) {
        self.asleep.awake();
        quiet_bell(&*self.wake);
    }

    /// The descriptor that wakes the reactor.
    pub(crate) fn wake_fd(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }
}
