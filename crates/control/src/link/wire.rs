//! The socket to the engine, with async readiness. It never blocks: unsent messages are queued, and
//! the session's task sends them.

use forebay_xlate::boundary::message::FromEngine;
use forebay_xlate::boundary::message::ToEngine;
use forebay_xlate::boundary::socket::Channel;
use std::cell::RefCell;
use std::io;
use std::os::fd::AsFd;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::Notify;

#[derive(Debug)]
pub(crate) struct Wire {
    channel: RefCell<Channel>,
    readiness: AsyncFd<OwnedFd>,
    pub(crate) wants_write: Notify,
}

impl Wire {
    pub(crate) fn new(fd: OwnedFd) -> io::Result<Self> {
        let channel = Channel::new(fd)?;
        // A second descriptor, because the channel keeps the first.
        let readiness = crate::readiness::watch(
            channel.as_fd().try_clone_to_owned()?,
            Interest::READABLE | Interest::WRITABLE,
        )?;
        Ok(Self {
            channel: RefCell::new(channel),
            readiness,
            wants_write: Notify::new(),
        })
    }

    pub(crate) fn send(
        &self,
        message: &ToEngine,
        descriptors: Vec<Arc<OwnedFd>>,
    ) -> io::Result<()> {
        let mut channel = self.channel.borrow_mut();
        channel.send_shared(message, descriptors)?;
        if channel.wants_to_write() {
            self.wants_write.notify_one();
        }
        Ok(())
    }

    pub(crate) async fn next(&self) -> io::Result<(FromEngine, Vec<OwnedFd>)> {
        loop {
            let mut ready = self.readiness.readable().await?;
            match self.channel.borrow_mut().receive()? {
                Some(message) => return Ok(message),
                None => ready.clear_ready(),
            }
        }
    }

    pub(crate) fn next_now(&self) -> io::Result<Option<(FromEngine, Vec<OwnedFd>)>> {
        self.channel.borrow_mut().receive()
    }

    pub(crate) async fn write_queued(&self) -> io::Result<()> {
        while self.channel.borrow().wants_to_write() {
            let mut ready = self.readiness.writable().await?;
            let mut channel = self.channel.borrow_mut();
            channel.flush()?;
            if channel.wants_to_write() {
                ready.clear_ready();
            }
        }
        Ok(())
    }
}
