//! The transport of messages: a Unix SOCK_SEQPACKET socket, with descriptors by SCM_RIGHTS.
//!
//! The engine listens and the daemon connects; either may be replaced. A new engine inherits its
//! first connection ([`pair`]). Sending never blocks: [`Channel`] queues.

use super::message::{MAX_MESSAGE_BYTES, decode, encode};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};
use serde::{Serialize, de::DeserializeOwned};
use std::collections::VecDeque;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;

/// Descriptors per message; the kernel's limit is 253.
pub const MAX_DESCRIPTORS: usize = 128;

/// A listening socket at `path` for its owner only; replaces a dead one.
pub fn listen(path: &Path) -> io::Result<OwnedFd> {
    match std::fs::remove_file(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
        _ => {}
    }
    let fd = new_socket()?;
    rustix::net::bind(&fd, &SocketAddrUnix::new(path)?)?;
    rustix::fs::chmod(path, rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR)?;
    rustix::net::listen(&fd, 4)?;
    Ok(fd)
}

/// Accepts a waiting connection, if any.
pub fn accept(listener: BorrowedFd<'_>) -> io::Result<Option<OwnedFd>> {
    match rustix::net::accept_with(listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
        Ok(fd) => Ok(Some(fd)),
        Err(
            rustix::io::Errno::AGAIN | rustix::io::Errno::CONNABORTED | rustix::io::Errno::INTR,
        ) => Ok(None),
        Err(e) => Err(e.into()),
    }
}

/// Connects to an engine.
pub fn connect(path: &Path) -> io::Result<OwnedFd> {
    let fd = new_socket()?;
    rustix::net::connect(&fd, &SocketAddrUnix::new(path)?)?;
    Ok(fd)
}

/// Two connected sockets, one for a child to inherit.
pub fn pair() -> io::Result<(OwnedFd, OwnedFd)> {
    Ok(rustix::net::socketpair(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
        None,
    )?)
}

fn new_socket() -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    Ok(rustix::net::socket_with(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        flags,
        None,
    )?)
}

/// One side of the conversation.
#[derive(Debug)]
pub struct Channel {
    fd: OwnedFd,
    queue: VecDeque<(Vec<u8>, Vec<Arc<OwnedFd>>)>,
    buffer: Vec<u8>,
}

impl Channel {
    /// Wraps a connected socket and makes it non-blocking.
    pub fn new(fd: OwnedFd) -> io::Result<Self> {
        rustix::io::ioctl_fionbio(&fd, true)?;
        Ok(Self {
            fd,
            queue: VecDeque::new(),
            buffer: vec![0; MAX_MESSAGE_BYTES],
        })
    }

    /// Queues a message and sends what the socket takes.
    pub fn send<M: Serialize>(&mut self, message: &M, descriptors: Vec<OwnedFd>) -> io::Result<()> {
        self.send_shared(message, descriptors.into_iter().map(Arc::new).collect())
    }

    /// Sends descriptors that the caller keeps too.
    pub fn send_shared<M: Serialize>(
        &mut self,
        message: &M,
        descriptors: Vec<Arc<OwnedFd>>,
    ) -> io::Result<()> {
        if descriptors.len() > MAX_DESCRIPTORS {
            return Err(io::Error::other("too many descriptors for one message"));
        }
        let bytes = encode(message).map_err(io::Error::other)?;
        self.queue.push_back((bytes, descriptors));
        self.flush()
    }

    /// Sends queued messages while the socket takes them.
    pub fn flush(&mut self) -> io::Result<()> {
        while let Some((bytes, descriptors)) = self.queue.front() {
            let fds: Vec<BorrowedFd<'_>> = descriptors.iter().map(|fd| fd.as_fd()).collect();
            let mut space =
                [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(&fds)) {
                return Err(io::Error::other("too many descriptors for one message"));
            }
            let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
            match rustix::net::sendmsg(&self.fd, &[IoSlice::new(bytes)], &mut control, flags) {
                Ok(_) => {
                    self.queue.pop_front();
                }
                Err(rustix::io::Errno::AGAIN) => return Ok(()),
                Err(rustix::io::Errno::INTR) => {}
                Err(e) => return Err(e.into()),
            }
        }
        Ok(())
    }

    /// Whether messages wait: poll for writing too.
    pub fn wants_to_write(&self) -> bool {
        !self.queue.is_empty()
    }

    /// The next message, if any. `UnexpectedEof`: the peer is gone. `InvalidData`: a malformed
    /// message.
    pub fn receive<M: DeserializeOwned>(&mut self) -> io::Result<Option<(M, Vec<OwnedFd>)>> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
        let received = loop {
            match rustix::net::recvmsg(
                &self.fd,
                &mut [IoSliceMut::new(&mut self.buffer)],
                &mut control,
                flags,
            ) {
                Ok(r) => break r,
                Err(rustix::io::Errno::AGAIN) => return Ok(None),
                // CONNRESET comes once, if the peer left our messages unread. Its own can still be
                // read, then its end.
                Err(rustix::io::Errno::INTR | rustix::io::Errno::CONNRESET) => {}
                Err(e) => return Err(e.into()),
            }
        };
        let mut descriptors = Vec::new();
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(fds) = message {
                descriptors.extend(fds);
            }
        }
        if received.bytes == 0 {
            return Err(io::Error::new(
                io::ErrorKind::UnexpectedEof,
                "the other process closed its socket",
            ));
        }
        // Descriptors may be missing if this process has no room; the message's user reports that.
        if received.flags.contains(rustix::net::ReturnFlags::TRUNC) {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "a message was longer than allowed",
            ));
        }
        let message = decode(&self.buffer[..received.bytes]).map_err(|e| {
            io::Error::new(
                io::ErrorKind::InvalidData,
                format!("not a message of this version: {e}"),
            )
        })?;
        Ok(Some((message, descriptors)))
    }
}

impl AsFd for Channel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::boundary::message::{FromEngine, ToEngine};

    #[test]
    fn messages_and_descriptors_arrive_in_order() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let listener = listen(&path).unwrap();
        let mut daemon = Channel::new(connect(&path).unwrap()).unwrap();
        let mut engine = Channel::new(accept(listener.as_fd()).unwrap().unwrap()).unwrap();
        assert!(engine.receive::<ToEngine>().unwrap().is_none());
        let file = std::fs::File::open("/dev/null").unwrap();
        daemon
            .send(
                &ToEngine::SetListener {
                    request: 3,
                    address: "x".into(),
                },
                vec![file.into()],
            )
            .unwrap();
        daemon.send(&ToEngine::Stop, vec![]).unwrap();
        let (m, fds) = engine.receive::<ToEngine>().unwrap().unwrap();
        assert_eq!(
            m,
            ToEngine::SetListener {
                request: 3,
                address: "x".into()
            }
        );
        assert_eq!(fds.len(), 1);
        assert_eq!(
            engine.receive::<ToEngine>().unwrap().unwrap().0,
            ToEngine::Stop
        );
        drop(daemon);
        assert_eq!(
            engine.receive::<ToEngine>().unwrap_err().kind(),
            io::ErrorKind::UnexpectedEof
        );
    }

    #[test]
    fn many_descriptors_come_with_one_message() {
        let (one, other) = pair().unwrap();
        let (mut daemon, mut engine) = (Channel::new(one).unwrap(), Channel::new(other).unwrap());
        let open = || OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
        let descriptors = (0..MAX_DESCRIPTORS).map(|_| open()).collect();
        daemon.send(&ToEngine::SocketsEnd, descriptors).unwrap();
        let (_, came) = engine.receive::<ToEngine>().unwrap().unwrap();
        assert_eq!(came.len(), MAX_DESCRIPTORS);
        let descriptors = (0..=MAX_DESCRIPTORS).map(|_| open()).collect();
        assert!(daemon.send(&ToEngine::SocketsEnd, descriptors).is_err());
    }

    #[test]
    fn a_full_socket_queues() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let listener = listen(&path).unwrap();
        let mut daemon = Channel::new(connect(&path).unwrap()).unwrap();
        let mut engine = Channel::new(accept(listener.as_fd()).unwrap().unwrap()).unwrap();
        let total = 5000u64;
        for job in 0..total {
            engine
                .send(&FromEngine::JobDone { job, errno: None }, vec![])
                .unwrap();
        }
        assert!(
            engine.wants_to_write(),
            "the test is to overfill the socket"
        );
        for want in 0..total {
            let got = loop {
                match daemon.receive::<FromEngine>().unwrap() {
                    Some((m, _)) => break m,
                    None => engine.flush().unwrap(),
                }
            };
            assert_eq!(
                got,
                FromEngine::JobDone {
                    job: want,
                    errno: None
                }
            );
        }
    }

    #[test]
    fn messages_sent_before_a_close_are_received() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        let listener = listen(&path).unwrap();
        let mut client = Channel::new(connect(&path).unwrap()).unwrap();
        let mut server = loop {
            if let Some(fd) = accept(listener.as_fd()).unwrap() {
                break Channel::new(fd).unwrap();
            }
        };
        server.send(&1u64, vec![]).unwrap();
        client.send(&7u64, vec![]).unwrap();
        drop(client);
        assert_eq!(server.receive::<u64>().unwrap().unwrap().0, 7);
        assert!(server.receive::<u64>().is_err());
    }
}
