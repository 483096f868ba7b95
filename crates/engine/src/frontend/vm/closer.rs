//! Drops clients' resources on helper threads, since the last close of a descriptor, and an
//! unmapping, may block.
//!
//! The queue is unbounded, as clients' resources are bounded. Unexpected descriptors, and sockets
//! in which more may be queued, can block for ever: each gets its own thread. Beyond [`SUSPECTS`]
//! of these, it waits in a queue that may never be served.

use super::descriptor;
use std::any::Any;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicUsize, Ordering::*};
use std::sync::{Arc, mpsc};

const SUSPECTS: usize = 32;

/// Clones share one thread, which ends with the last clone.
#[derive(Clone, Debug)]
pub(crate) struct Closer(CloserQueue, Arc<AtomicUsize>, CloserQueue);

type CloserQueue = mpsc::Sender<Box<dyn Any + Send>>;

impl Closer {
    pub(crate) fn start() -> io::Result<Self> {
        let queue = |name: &str| -> io::Result<CloserQueue> {
            let (sender, receiver) = mpsc::channel();
            std::thread::Builder::new()
                .name(name.into())
                .spawn(move || while receiver.recv().is_ok() {})?;
            Ok(sender)
        };
        Ok(Self(queue("closer")?, Arc::default(), queue("suspects")?))
    }

    pub(crate) fn close(&self, what: impl Any + Send) {
        let _ = self.0.send(Box::new(what));
    }

    /// Drops checked descriptors. Sockets are suspect: unchecked descriptors may be queued in them.
    pub(crate) fn close_all(&self, fds: impl IntoIterator<Item = Arc<OwnedFd>>) {
        let is_socket = |fd: &Arc<OwnedFd>| descriptor::is_unix_stream(&**fd);
        let (sockets, others): (Vec<_>, Vec<_>) = fds.into_iter().partition(is_socket);
        if !sockets.is_empty() {
            self.close_suspect(sockets);
        }
        // Most messages bring none: do not wake the thread then.
        if !others.is_empty() {
            self.close(others);
        }
    }

    pub(crate) fn close_suspect(&self, what: impl Any + Send) {
        let hanging = self.1.clone();
        if hanging.fetch_add(1, AcqRel) >= SUSPECTS {
            hanging.fetch_sub(1, AcqRel);
            let _ = self.2.send(Box::new(what));
            return;
        }
        // If the thread cannot start, it leaks rather than block here.
        let what = std::mem::ManuallyDrop::new(what);
        let count = hanging.clone();
        let thread = std::thread::Builder::new().name("suspect".into());
        let started = thread.spawn(move || {
            drop(std::mem::ManuallyDrop::into_inner(what));
            count.fetch_sub(1, AcqRel);
        });
        if started.is_err() {
            hanging.fetch_sub(1, AcqRel);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Waits(mpsc::Receiver<()>, mpsc::Sender<()>);

    impl Drop for Waits {
        fn drop(&mut self) {
            let _ = self.0.recv();
            let _ = self.1.send(());
        }
    }

    #[test]
    fn a_close_does_not_wait() {
        let closer = Closer::start().unwrap();
        let (go, waits) = mpsc::channel();
        let (over, ended) = mpsc::channel();
        closer.close(Waits(waits, over));
        assert!(ended.try_recv().is_err());
        go.send(()).unwrap();
        ended.recv().unwrap();
    }

    #[test]
    fn a_hung_close_delays_no_other_close() {
        let closer = Closer::start().unwrap();
        let mut going = Vec::new();
        let (over, ended) = mpsc::channel();
        for _ in 0..2 * SUSPECTS {
            let (go, waits) = mpsc::channel();
            closer.close_suspect(Waits(waits, over.clone()));
            going.push(go);
        }
        let (go, waits) = mpsc::channel();
        closer.close(Waits(waits, over));
        go.send(()).unwrap();
        ended.recv().unwrap();
        drop(going);
        for _ in 0..2 * SUSPECTS {
            ended.recv().unwrap();
        }
        assert!(ended.try_recv().is_err());
    }
}
