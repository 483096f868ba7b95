//! Notifications to the driver: completed requests, and growth of the disk.
//!
//! A ring is called by its descriptor or, if negotiated
//! (VHOST_USER_PROTOCOL_F_INBAND_NOTIFICATIONS), by a message on the backend channel. If the
//! channel is full, the message is retried later, without blocking. **Not here:** whether a driver
//! wants calls ([`forebay_virtio::queue`]).

use super::{BACKEND, CALL, Vhost};
use crate::frontend::vm::protocol::{Closing, Turn};
use forebay_virtio::vhost_user::MAX_QUEUES;
use forebay_virtio::vhost_user::message;
use forebay_xlate::boundary::region::bump;
use rustix::io::Errno;
use rustix::net::SendFlags;

/// The delay before a retry about growth.
const REPORT_AGAIN_NS: u64 = 100_000_000;
/// The delay before a retry of a call.
const CALL_AGAIN_NS: u64 = 10_000_000;

const FLAGS: SendFlags = SendFlags::DONTWAIT.union(SendFlags::NOSIGNAL);

const _: () = assert!(MAX_QUEUES <= u64::BITS as usize);

#[derive(Default)]
pub(super) struct Notices {
    calls: u64,
    again_ns: Option<u64>,
    growth_ns: Option<u64>,
}

impl Vhost {
    /// Takes effect at the turn's end.
    #[inline]
    pub(super) fn call(&mut self, turn: &mut Turn<'_>, index: usize) {
        if turn.client.held(CALL + index).is_some() {
            turn.client.raise(CALL + index);
        } else if self.session.calls_in_band(index as u16) {
            self.notices.calls |= 1 << index;
        }
    }

    /// The old channel may have lost messages: calls every driver that is called by messages.
    pub(super) fn call_again(&mut self, turn: &mut Turn<'_>) {
        for index in 0..self.lines.len() {
            if self.lines[index].is_some() && turn.client.held(CALL + index).is_none() {
                self.call(turn, index);
            }
        }
    }
}

impl Notices {
    pub(super) fn grew(&mut self) {
        self.growth_ns = Some(0);
    }

    pub(super) fn has_channel(&mut self) {
        self.again_ns = None;
    }

    pub(super) fn has_descriptor(&mut self, index: usize) {
        self.calls &= !(1 << index);
    }

    pub(super) fn must_report_growth(&self, now_ns: u64) -> bool {
        self.growth_ns.is_some_and(|at| now_ns >= at)
    }

    pub(super) fn deadline_ns(&self) -> Option<u64> {
        self.growth_ns.into_iter().chain(self.again_ns).min()
    }

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
        while let Some(channel) = turn.client.held(BACKEND).filter(|_| self.calls != 0) {
            let index = self.calls.trailing_zeros() as u16;
            let call = message::vring_call(index);
            match rustix::net::send(channel, &call, FLAGS) {
                Ok(sent) if sent == call.len() => {
                    self.calls &= self.calls - 1;
                    count += 1;
                }
                Ok(_) => {
                    let why = Closing("its channel for requests took only part of one");
                    turn.client.fail(why);
                    self.calls = 0;
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN | Errno::NOBUFS | Errno::NOMEM) => {
                    self.again_ns = Some(now + CALL_AGAIN_NS);
                    break;
                }
                // The channel is gone; `call_again` calls all on a new one.
                Err(_) => self.calls = 0,
            }
        }
        let lane = turn.client.lane();
        if let Some(lane) = lane.and_then(|lane| turn.core.lane(lane)) {
            bump(&lane.record().interrupts, count);
        }
    }

    /// Reports a configuration change, if the channel has room.
    pub(super) fn report_growth(&mut self, turn: &mut Turn<'_>) {
        let Some(channel) = turn.client.held(BACKEND) else {
            self.growth_ns = None;
            return;
        };
        match rustix::net::send(channel, &message::config_changed(), FLAGS) {
            Err(Errno::AGAIN | Errno::INTR | Errno::NOBUFS | Errno::NOMEM) => {
                self.growth_ns = Some(turn.core.now_ns() + REPORT_AGAIN_NS);
            }
            _ => self.growth_ns = None,
        }
    }
}
