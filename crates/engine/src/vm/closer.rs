//! Things of clients are let go of elsewhere.
//!
//! **Design.** The last close of a descriptor, and an unmapping, may wait: for a network file system, for
//! a device's driver. So whoever may not wait sends what it is done with to a thread that may. It has a
//! queue without a bound, of what is bounded where it comes from: a client's descriptors.
//! **Not here:** when something is done with.

use std::any::Any;
use std::io;
use std::sync::mpsc;

/// See the module's text. Its clones send to one thread, which ends with the last of them.
#[derive(Clone, Debug)]
pub(crate) struct Closer(mpsc::Sender<Box<dyn Any + Send>>);

impl Closer {
    /// Starts the thread.
    ///
    /// # Errors
    /// The system's.
    pub(crate) fn start() -> io::Result<Self> {
        let (sender, receiver) = mpsc::channel::<Box<dyn Any + Send>>();
        std::thread::Builder::new()
            .name("closer".into())
            .spawn(move || while receiver.recv().is_ok() {})?;
        Ok(Self(sender))
    }

    /// Has it dropped there.
    pub(crate) fn close(&self, what: impl Any + Send) {
        // It ends after us.
        let _ = self.0.send(Box::new(what));
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
    fn whoever_closes_does_not_wait() {
        let closer = Closer::start().unwrap();
        let (go, waits) = mpsc::channel();
        let (over, ended) = mpsc::channel();
        closer.close(Waits(waits, over));
        assert!(ended.try_recv().is_err());
        go.send(()).unwrap();
        ended.recv().unwrap();
    }
}
