//! A Unix socket for whole messages with descriptors, blocking with a time limit.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};

use super::Error;

const MAX_FDS: usize = 64;

#[derive(Debug)]
pub(crate) struct Socket {
    stream: UnixStream,
    path: PathBuf,
    limit: Duration,
}

impl Socket {
    pub(crate) fn connect(path: &Path, limit: Duration) -> Result<Self, Error> {
        let connect = || {
            let stream = UnixStream::connect(path)?;
            stream.set_read_timeout(Some(limit))?;
            stream.set_write_timeout(Some(limit))?;
            Ok(stream)
        };
        let path = path.to_owned();
        match connect() {
            Ok(stream) => Ok(Self {
                stream,
                path,
                limit,
            }),
            Err(source) => Err(Error::Connect { path, source }),
        }
    }

    pub(crate) fn of(stream: UnixStream, path: &Path, limit: Duration) -> Result<Self, Error> {
        let timeouts = stream.set_read_timeout(Some(limit));
        timeouts.map_err(Error::system("set a socket's time limit"))?;
        Ok(Self {
            stream,
            path: path.to_owned(),
            limit,
        })
    }

    pub(crate) fn stream(&self) -> &UnixStream {
        &self.stream
    }

    fn failed(&self, what: &'static str, source: io::Error) -> Error {
        let path = self.path.clone();
        match source.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => Error::TimedOut {
                what: format!("{}: {what}", path.display()),
                waited: self.limit,
            },
            io::ErrorKind::BrokenPipe
            | io::ErrorKind::ConnectionReset
            | io::ErrorKind::UnexpectedEof => Error::Closed { path },
            _ => Error::Socket { path, what, source },
        }
    }

    pub(crate) fn send(&self, mut bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<(), Error> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
        let mut fds = fds;
        while !bytes.is_empty() {
            let mut control = SendAncillaryBuffer::new(&mut space);
            if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
                return Err(Error::Unusable("too many descriptors".into()));
            }
            let sent = rustix::net::sendmsg(
                &self.stream,
                &[IoSlice::new(bytes)],
                &mut control,
                SendFlags::NOSIGNAL,
            );
            match sent {
                Ok(sent) => {
                    bytes = &bytes[sent..];
                    fds = &[];
                }
                Err(rustix::io::Errno::INTR) => {}
                Err(errno) => return Err(self.failed("send", errno.into())),
            }
        }
        Ok(())
    }

    /// Fills `into`; adds received descriptors to `fds`.
    pub(crate) fn receive(&self, mut into: &mut [u8], fds: &mut Vec<OwnedFd>) -> Result<(), Error> {
        while !into.is_empty() {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let received = rustix::net::recvmsg(
                &self.stream,
                &mut [IoSliceMut::new(into)],
                &mut control,
                RecvFlags::CMSG_CLOEXEC,
            );
            let received = match received {
                Ok(received) => received.bytes,
                Err(rustix::io::Errno::INTR) => continue,
                Err(errno) => return Err(self.failed("receive", errno.into())),
            };
            for message in control.drain() {
                if let RecvAncillaryMessage::ScmRights(received) = message {
                    fds.extend(received);
                }
            }
            if received == 0 {
                return Err(Error::Closed {
                    path: self.path.clone(),
                });
            }
            into = &mut into[received..];
        }
        Ok(())
    }
}
