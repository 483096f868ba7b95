//! The rings between the control thread and a reactor.
//!
//! **Design.** Two bounded single-producer rings, with an eventfd each way. The sender rings only
//! if the other side sleeps. The sleeper sets its flag, then checks its ring again; both sides use
//! a full fence ([`Sleeper`]), so no wakeup is lost. If a ring is full, the sender keeps the
//! message and retries.

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

pub(crate) enum Post {
    Device(ServedDevice),
    Statistics(VolumeId, VolumeStatistics),
    /// `None` admits everything.
    Admission(Option<Box<Admission>>),
    NewTenant(u32),
    /// The tenant's slot, and whether its base is guaranteed.
    Budget(u32, Budget, bool),
    /// `None`: no tenant.
    Share(VolumeId, Option<Share>),
    /// The fence of a served device has passed.
    Fenced(DeviceIndex),
    /// An image was opened or locked, or has failed.
    ImageChanged,
    /// Whether it will be served before its fence, once open.
    Expect(DeviceIndex, bool),
    /// Answered by [`Upcall::ExportSettled`] with this request.
    Lane(Box<Lane>, u64),
    /// Answered by [`Upcall::ExportSettled`] with this request.
    RemoveLane(LaneIndex, ExportId, u64),
    Volume(Arc<Volume>),
    /// The owner's message about space.
    Space(engine_side::ProtocolPost),
    Frontend(FrontendMessage),
    /// A dead engine's state, taken over in one turn.
    Inherit(Vec<FrontendMessage>),
    Spread(Spread),
    Stop,
}

pub(crate) struct ControlEnd {
    posts: Producer<Post>,
    upcalls: Consumer<Upcall>,
    overflow: VecDeque<Post>,
    heard_ns: Arc<AtomicU64>,
    asleep: Arc<Sleeper>,
    wake: Arc<OwnedFd>,
}

pub(crate) struct ReactorEnd {
    posts: Consumer<Post>,
    upcalls: Producer<Upcall>,
    heard_ns: Arc<AtomicU64>,
    asleep: Arc<Sleeper>,
    wake: Arc<OwnedFd>,
    control: ControlBell,
}

pub(crate) fn mailbox(control: ControlBell) -> io::Result<(ControlEnd, ReactorEnd)> {
    let (post_in, post_out) = RingBuffer::new(RING_ENTRIES);
    let (up_in, up_out) = RingBuffer::new(RING_ENTRIES);
    let asleep = Arc::new(Sleeper::default());
    let wake = Arc::new(eventfd()?);
    let heard_ns = Arc::<AtomicU64>::default();
    let reactor = ReactorEnd {
        posts: post_out,
        upcalls: up_in,
        heard_ns: heard_ns.clone(),
        asleep: asleep.clone(),
        wake: wake.clone(),
        control,
    };
    Ok((
        ControlEnd {
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

impl ControlEnd {
    pub(crate) fn post(&mut self, post: Post) {
        self.queue(post);
        self.flush();
    }

    /// Many messages need only one check for sleep.
    pub(crate) fn queue(&mut self, post: Post) {
        self.overflow.push_back(post);
    }

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

    /// The daemon's messages up to this time are posted, if there was room.
    pub(crate) fn heard(&self, ns: u64) {
        if !self.is_behind() {
            self.heard_ns.store(ns, Release);
        }
    }

    pub(crate) fn is_behind(&self) -> bool {
        !self.overflow.is_empty()
    }

    pub(crate) fn has_upcalls(&self) -> bool {
        !self.upcalls.is_empty()
    }

    pub(crate) fn next(&mut self) -> Option<Upcall> {
        self.upcalls.pop().ok()
    }
}

impl ReactorEnd {
    #[inline]
    pub(crate) fn next(&mut self) -> Option<Post> {
        self.posts.pop().ok()
    }

    pub(crate) fn heard_ns(&self) -> u64 {
        self.heard_ns.load(Acquire)
    }

    pub(crate) fn send(&mut self, upcall: Upcall) -> Result<(), Upcall> {
        self.upcalls.push(upcall).map_err(|PushError::Full(u)| u)
    }

    pub(crate) fn wake_control(&self) {
        if self.control.asleep.must_be_woken() {
            ring_bell(&*self.control.wake);
        }
    }

    /// False if a message came, or `nothing` is false.
    pub(crate) fn fall_asleep(&self, nothing: impl FnOnce() -> bool) -> bool {
        self.asleep
            .fall_asleep(|| self.posts.is_empty() && nothing())
    }

    pub(crate) fn bell(&self) -> ReactorBell {
        ReactorBell {
            asleep: self.asleep.clone(),
            wake: self.wake.clone(),
        }
    }

    pub(crate) fn awake(&self) {
        self.asleep.awake();
        quiet_bell(&*self.wake);
    }

    pub(crate) fn wake_fd(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }
}
