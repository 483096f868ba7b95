//! An image's snapshots.

use std::ffi::{CStr, c_char, c_int};

use rustix::io::Errno;

use super::{Image, c_string, check, text_of, written_list};
use crate::error::RbdError;
use crate::image::Snapshot;
use crate::library::{ImageHandle, SnapInfo};

impl Image {
    /// All snapshots, the oldest first.
    ///
    /// # Errors
    /// Ceph's.
    pub fn snapshots(&self) -> Result<Vec<Snapshot>, RbdError> {
        self.read_snapshots()
            .map_err(self.failed("list snapshots of"))
    }

    fn read_snapshots(&self) -> Result<Vec<Snapshot>, Errno> {
        let functions = &self.open.library.functions;
        // SAFETY: the array has room for `count` entries, of which the call writes the first.
        let mut listed = unsafe {
            written_list(|snapshots: *mut SnapInfo, count| {
                let mut number = c_int::try_from(*count).unwrap_or(c_int::MAX);
                let result = (functions.rbd_snap_list)(self.open.handle, snapshots, &mut number);
                // The call returns how many it wrote.
                let number = if result < 0 { number } else { result };
                *count = usize::try_from(number).unwrap_or(0);
                result
            })
        }?;
        let snapshots = listed
            .iter()
            .map(|snapshot| self.snapshot(snapshot))
            .collect();
        // SAFETY: librbd wrote the list, an end with a null name included; it is freed once.
        unsafe { (functions.rbd_snap_list_end)(listed.as_mut_ptr()) };
        snapshots
    }

    fn snapshot(&self, snapshot: &SnapInfo) -> Result<Snapshot, Errno> {
        let mut protected = 0;
        // SAFETY: the image is open, the name is a C string until its list is freed.
        let name = unsafe {
            check((self.open.library.functions.rbd_snap_is_protected)(
                self.open.handle,
                snapshot.name,
                &mut protected,
            ))?;
            text_of(snapshot.name)
        };
        Ok(Snapshot {
            id: snapshot.id,
            name,
            size_bytes: snapshot.size,
            protected: protected != 0,
        })
    }

    /// Takes a snapshot. It has each write that ended before; flush first if
    /// [`Image::has_write_cache`].
    ///
    /// # Errors
    /// `EEXIST` if the name is taken.
    pub fn take_snapshot(&self, name: &str) -> Result<(), RbdError> {
        let call = self.open.library.functions.rbd_snap_create;
        self.snapshot_call("take a snapshot of", call, name)
    }

    /// Removes a snapshot.
    ///
    /// # Errors
    /// `EBUSY` if it is protected.
    pub fn remove_snapshot(&self, name: &str) -> Result<(), RbdError> {
        let call = self.open.library.functions.rbd_snap_remove;
        self.snapshot_call("remove a snapshot of", call, name)
    }

    /// Protects a snapshot from removal.
    ///
    /// # Errors
    /// `EBUSY` if it is protected already.
    pub fn protect_snapshot(&self, name: &str) -> Result<(), RbdError> {
        let call = self.open.library.functions.rbd_snap_protect;
        self.snapshot_call("protect a snapshot of", call, name)
    }

    /// Ends a snapshot's protection.
    ///
    /// # Errors
    /// `EBUSY` while it has clones; `EINVAL` if it isn't protected.
    pub fn unprotect_snapshot(&self, name: &str) -> Result<(), RbdError> {
        let call = self.open.library.functions.rbd_snap_unprotect;
        self.snapshot_call("unprotect a snapshot of", call, name)
    }

    /// Sets the image back to a snapshot. Takes as long as a copy.
    ///
    /// # Errors
    /// Ceph's.
    pub fn roll_back(&self, name: &str) -> Result<(), RbdError> {
        let call = self.open.library.functions.rbd_snap_rollback;
        self.snapshot_call("roll back", call, name)
    }

    fn snapshot_call(
        &self,
        doing: &'static str,
        call: unsafe extern "C" fn(ImageHandle, *const c_char) -> c_int,
        name: &str,
    ) -> Result<(), RbdError> {
        let failed = self.failed(doing);
        let name = c_string(name).map_err(&failed)?;
        let name: &CStr = &name;
        // SAFETY: the image is open; `call` is one of librbd's functions with these arguments.
        check(unsafe { call(self.open.handle, name.as_ptr()) }).map_err(failed)
    }
}
