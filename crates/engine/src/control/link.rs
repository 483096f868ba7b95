//! The socket to the daemon. Messages without room wait in the channel, and the socket is polled
//! for room only then. A failed send counts as a hangup. **Not here:** messages
//! ([`super::Control`]).

use super::KEY_CHANNEL;
use forebay_xlate::boundary::message::FromEngine;
use forebay_xlate::boundary::socket::Channel;
use rustix::event::epoll;
use std::os::fd::OwnedFd;
use std::sync::Arc;

pub(super) struct Link {
    epoll: Arc<OwnedFd>,
    pub channel: Option<Channel>,
    wants_write: bool,
    /// `Hello` came on this channel.
    pub greeted: bool,
}

impl Link {
    pub(super) fn new(epoll: Arc<OwnedFd>) -> Self {
        Self {
            epoll,
            channel: None,
            wants_write: false,
            greeted: false,
        }
    }

    pub(super) fn begin(&mut self, fd: OwnedFd) {
        let Ok(channel) = Channel::new(fd) else {
            return;
        };
        let data = epoll::EventData::new_u64(KEY_CHANNEL);
        if epoll::add(&*self.epoll, &channel, data, epoll::EventFlags::IN).is_ok() {
            self.channel = Some(channel);
        }
    }

    pub(super) fn end(&mut self) -> Option<Channel> {
        let old = self.channel.take();
        if let Some(old) = &old {
            let _ = epoll::delete(&*self.epoll, old);
        }
        old
    }

    /// Sends to a daemon that has greeted; false if it hung up.
    pub(super) fn send(&mut self, message: &FromEngine, descriptors: Vec<Arc<OwnedFd>>) -> bool {
        if !self.greeted {
            return true;
        }
        let channel = self.channel.as_mut();
        channel.is_none_or(|channel| channel.send_shared(message, descriptors).is_ok())
    }

    /// Polls for room while messages are left; false if it hung up.
    pub(super) fn settle(&mut self) -> bool {
        let Some(channel) = self.channel.as_mut() else {
            return true;
        };
        if channel.flush().is_err() {
            return false;
        }
        let wants = channel.wants_to_write();
        if wants != self.wants_write {
            let mut flags = epoll::EventFlags::IN;
            flags.set(epoll::EventFlags::OUT, wants);
            let key = epoll::EventData::new_u64(KEY_CHANNEL);
            let _ = epoll::modify(&*self.epoll, &*channel, key, flags);
            self.wants_write = wants;
        }
        true
    }

    pub(super) fn forget(&mut self) {
        self.greeted = false;
        self.wants_write = false;
    }
}
