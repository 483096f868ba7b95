//! A gate that a test device keeps shut while it hangs.
//!
//! **Purpose.** "Nothing ends on this device until a file beside it says so", for the engine's ring without a thread that
//! waits per operation.
//!
//! **Design.** An eventfd that is readable while the device does not hang; operations are linked behind a poll of it.
//! Once somebody has found the device hanging, a thread looks every 2 ms whether it still does, and opens the gate.
//!
//! **What it does not do.** It doesn't know what makes the device hang; the caller says.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;

/// How often a hanging device looks whether it may go on.
pub(crate) const LOOK_AGAIN: Duration = Duration::from_millis(2);

/// See the module.
#[derive(Debug)]
pub(crate) struct HangGate {
    /// Readable while the device does not hang.
    open: OwnedFd,
    shut: Mutex<bool>,
}

impl HangGate {
    /// An open gate.
    pub(crate) fn new() -> Result<Arc<Self>, Errno> {
        Ok(Arc::new(Self {
            open: eventfd(1, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            shut: Mutex::new(false),
        }))
    }

    /// What an operation waits for.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.open.as_fd()
    }

    /// Shuts the gate for as long as the device hangs: `false` from now on if it does not.
    pub(crate) fn shut_while(self: &Arc<Self>, hangs: impl Fn() -> bool + Send + 'static) -> bool {
        if !hangs() {
            return false;
        }
        let mut shut = self.shut.lock().unwrap_or_else(PoisonError::into_inner);
        if *shut {
            return true;
        }
        // Not open any more; if it wasn't, there is nothing to read.
        let _ = rustix::io::read(&self.open, &mut [0; 8]);
        let gate = self.clone();
        let watch = move || {
            while hangs() {
                std::thread::sleep(LOOK_AGAIN);
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
