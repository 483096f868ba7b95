//! Changes of an image by any client.

use std::ffi::c_void;
use std::fmt;
use std::mem;
use std::sync::Arc;

use super::{Image, check};
use crate::error::RbdError;

type Callback = Arc<dyn Fn() + Send + Sync>;

/// A watch for changes of an image's size, snapshots and features; not of its data.
pub struct UpdateWatch {
    image: Arc<Image>,
    handle: u64,
    /// The callback's argument points to it.
    changed: Arc<Callback>,
}

impl UpdateWatch {
    /// Watches the image, whose last holder this may become. A thread of librbd's calls `changed`,
    /// which must not call librbd: ask [`Image::info`] later, from another thread.
    ///
    /// # Errors
    /// Ceph's.
    pub fn new(image: &Arc<Image>, changed: Callback) -> Result<Self, RbdError> {
        let changed = Arc::new(changed);
        let mut handle = 0;
        let argument = Arc::as_ptr(&changed).cast_mut().cast();
        // SAFETY: the image is open. The argument is valid until `drop` has ended the watch.
        check(unsafe {
            (image.open.library.functions.rbd_update_watch)(
                image.open.handle,
                &mut handle,
                call_back,
                argument,
            )
        })
        .map_err(image.failed("watch"))?;
        Ok(Self {
            image: Arc::clone(image),
            handle,
            changed,
        })
    }
}

impl fmt::Debug for UpdateWatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("UpdateWatch")
            .field("handle", &self.handle)
            .finish_non_exhaustive()
    }
}

impl Drop for UpdateWatch {
    fn drop(&mut self) {
        let functions = &self.image.open.library.functions;
        // SAFETY: the image is open, and the watch is ended once. The call waits for a callback.
        let ended = unsafe { (functions.rbd_update_unwatch)(self.image.open.handle, self.handle) };
        if ended < 0 {
            // It may be called later.
            mem::forget(Arc::clone(&self.changed));
        }
    }
}

/// A panic in it would abort the process, as its ABI can't unwind.
unsafe extern "C" fn call_back(argument: *mut c_void) {
    // SAFETY: the argument points to the watch's callback, which outlives the watch.
    let changed = unsafe { &*argument.cast::<Callback>() };
    changed();
}
