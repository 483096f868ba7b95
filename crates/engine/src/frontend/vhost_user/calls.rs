//! What is told to the driver: that something ended, and that the disk grew.
//!
//! **Design.** A ring with a descriptor for calls is rung by it. One without is called by a message on the channel for
//! requests of ours, if the client agreed to that (VHOST_USER_PROTOCOL_F_INBAND_NOTIFICATIONS). What the channel has no room for
//! is remembered and tried again; it is never waited for. No message of ours asks for an answer.
//!
//! **Not here:** whether a driver wants to be called ([`forebay_virtio::queue`]).

use super::{BACKEND, CALL, Vhost};
use crate::frontend::vm::protocol::{Closing, Turn};
use forebay_virtio::vhost_user::MAX_QUEUES;
use forebay_virtio::vhost_user::message;
use forebay_xlate::boundary::region::bump;
use rustix::io::Errno;
use rustix::net::SendFlags;

/// A client that has no room for being told is tried again after this,
const TELL_AGAIN_NS: u64 = 100_000_000;
/// and for being called after this.
const CALL_AGAIN_NS: u64 = 10_000_000;

const FLAGS: SendFlags = SendFlags::DONTWAIT.union(SendFlags::NOSIGNAL);

const _: () = assert!(MAX_QUEUES <= u64::BITS as usize);

/// What is yet to be told to a driver by messages, and when that is tried again.
#[derive(Default)]
pub(super) struct Notices {
    /// Queues of which the driver is to be called.
    calls: u64,
    again_ns: Option<u64>,
    /// That the disk grew.
    growth_ns: Option<u64>,
}

impl Vhost {
    /// A driver is to be called, at the turn's end.
    #[inline]
    pub(super) fn call(&mut self, turn: &mut Turn<'_>, index: usize) {
        if turn.client.held(CALL + index).is_some() {
            turn.client.raise(CALL + index);
        } else if self.session.calls_in_band(index as u16) {
            self.notices.calls |= 1 << index;
        }
    }

    /// There is a new channel: what an old one took with it is not known, so every driver that is called by messages is.
    pub(super) fn call_again(&mut self, turn: &mut Turn<'_>) {
        for index in 0..self.lines.len() {
            if self.lines[index].is_some() && turn.client.held(CALL + index).is_none() {
                self.call(turn, index);
            }
        }
    }
}

impl Notices {
    /// The disk grew while nobody could be told.
    pub(super) fn grew(&mut self) {
        self.growth_ns = Some(0);
    }

    /// There is a new channel for messages, which may have room.
    pub(super) fn has_channel(&mut self) {
        self.again_ns = None;
    }

    /// A queue's driver is called by a descriptor from now on.
    pub(super) fn has_descriptor(&mut self, index: usize) {
        self.calls &= !(1 << index);
    }

    /// Whether it is time to say again that the disk grew.
    pub(super) fn must_tell_of_growth(&self, now_ns: u64) -> bool {
        self.growth_ns.is_some_and(|at| now_ns >= at)
    }

    /// When something is to be tried again.
    pub(super) fn deadline_ns(&self) -> Option<u64> {
        self.growth_ns.into_iter().chain(self.again_ns).min()
    }

    /// Sends the messages that call drivers, as far as there is room.
    #[inline]
    pub(super) fn send_calls(&mut self, turn: &mut Turn<'_>) {
        if self.calls != 0 {
            self.send_all_calls(turn);
        }
    }

    fn send_all_calls(&mut self, turn: &mut Turn<'_>) {
        let now = turn.core.now_ns();
        if self.again_ns.is_some_and(|at| now < at) {
            return;
        }
        self.again_ns = None;
        let mut count = 0;
        // Without a channel they wait for one.
        while let Some(channel) = turn.client.held(BACKEND).filter(|_| self.calls != 0) {
            let index = self.calls.trailing_zeros() as u16;
            let call = message::vring_call(index);
            match rustix::net::send(channel, &call, FLAGS) {
                Ok(sent) if sent == call.len() => {
                    self.calls &= self.calls - 1;
                    count += 1;
                }
                Ok(_) => {
                    let why = Closing("its channel for requests took a part of one");
                    turn.client.fail(why);
                    self.calls = 0;
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN | Errno::NOBUFS | Errno::NOMEM) => {
                    self.again_ns = Some(now + CALL_AGAIN_NS);
                    break;
                }
                // Nobody is there any more. Whoever comes is called for all: see `call_again`.
                Err(_) => self.calls = 0,
            }
        }
        let lane = turn.client.lane();
        if let Some(lane) = lane.and_then(|lane| turn.core.lane(lane)) {
            bump(&lane.record().interrupts, count);
        }
    }

    /// Tells the client that the configuration changed, if it has a channel for that and room in it.
    pub(super) fn tell_of_growth(&mut self, turn: &mut Turn<'_>) {
        let Some(channel) = turn.client.held(BACKEND) else {
            self.growth_ns = None;
            return;
        };
        match rustix::net::send(channel, &message::config_changed(), FLAGS) {
            Err(Errno::AGAIN | Errno::INTR | Errno::NOBUFS | Errno::NOMEM) => {
                self.growth_ns = Some(turn.core.now_ns() + TELL_AGAIN_NS);
            }
            _ => self.growth_ns = None,
        }
    }
}
