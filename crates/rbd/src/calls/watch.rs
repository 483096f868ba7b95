//! Changes of an image by any client.

use std::ffi::c_void;
use std::mem;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::event::{EventfdFlags, eventfd};

use super::{Image, check};
use crate::error::RbdError;

/// A watch for changes of an image's size, snapshots and features; not of its data.
#[derive(Debug)]
pub struct UpdateWatch {
    image: Arc<Image>,
    handle: u64,
    /// The callback's argument points to it.
    bell: Arc<OwnedFd>,
}

impl UpdateWatch {
    /// Watches the image, whose last holder this may become.
    ///
    /// # Errors
    /// Ceph's; no more file descriptors.
    pub fn new(image: &Arc<Image>) -> Result<Self, RbdError> {
        let failed = image.failed("watch");
        let bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let bell = Arc::new(bell.map_err(&failed)?);
        let mut handle = 0;
        let argument = Arc::as_ptr(&bell).cast_mut().cast();
        // SAFETY: the image is open. The argument is valid until `drop` has ended the watch.
        check(unsafe {
            (image.open.library.functions.rbd_update_watch)(
                image.open.handle,
                &mut handle,
                changed,
                argument,
            )
        })
        .map_err(failed)?;
        Ok(Self {
            image: Arc::clone(image),
            handle,
            bell,
        })
    }

    /// Whether something changed since the last call: ask [`Image::info`] what.
    pub fn take_change(&self) -> bool {
        rustix::io::read(&*self.bell, &mut [0; 8]).is_ok()
    }

    /// Becomes readable at a change.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }
}

impl Drop for UpdateWatch {
    fn drop(&mut self) {
        let functions = &self.image.open.library.functions;
        // SAFETY: the image is open, and the watch is ended once. The call waits for a callback.
        let ended = unsafe { (functions.rbd_update_unwatch)(self.image.open.handle, self.handle) };
        if ended < 0 {
            // The callback may run later: its descriptor stays.
            mem::forget(Arc::clone(&self.bell));
        }
    }
}

unsafe extern "C" fn changed(argument: *mut c_void) {
    // SAFETY: the argument points to the watch's descriptor, which outlives the watch.
    let bell = unsafe { &*argument.cast::<OwnedFd>() };
    // It fails only if the counter is full: then the descriptor is readable already.
    let _ = rustix::io::write(bell, &1u64.to_ne_bytes());
}
