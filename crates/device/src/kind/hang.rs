//! Holds the operations of a test device while it hangs, linked behind a poll of an eventfd. One
//! thread checks every 2 ms whether the device still hangs.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;

pub(crate) const POLL_AGAIN: Duration = Duration::from_millis(2);

#[derive(Debug)]
pub(crate) struct HangGate {
    open: OwnedFd,
    shut: Mutex<bool>,
}

impl HangGate {
    pub(crate) fn new() -> Result<Arc<Self>, Errno> {
        Ok(Arc::new(Self {
            open: eventfd(1, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            shut: Mutex::new(false),
        }))
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.open.as_fd()
    }

    /// Shuts the gate while the device hangs; `false` if it doesn't.
    pub(crate) fn shut_while(self: &Arc<Self>, hangs: impl Fn() -> bool + Send + 'static) -> bool {
        if !hangs() {
            return false;
        }
        let mut shut = self.shut.lock().unwrap_or_else(PoisonError::into_inner);
        if *shut {
            return true;
        }
        // If the gate was shut already, there is nothing to read.
        let _ = rustix::io::read(&self.open, &mut [0; 8]);
        let gate = self.clone();
        let watch = move || {
            while hangs() {
                std::thread::sleep(POLL_AGAIN);
            }
            let mut shut = gate.shut.lock().unwrap_or_else(PoisonError::into_inner);
            *shut = false;
            let _ = rustix::io::write(&gate.open, &1_u64.to_ne_bytes());
        };
        let name = "hanging-device".to_owned();
        *shut = std::thread::Builder::new().name(name).spawn(watch).is_ok();
        *shut
    }
}
