//! librados and librbd as loaded libraries.
//!
//! They stay loaded: their threads and their destructors may outlive every client.
#![allow(unsafe_code)]

mod table;

use std::ffi::{CStr, CString, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::sync::Arc;

use self::table::Functions;
pub(crate) use self::table::{
    ClusterStat, ConfigOption, ImageHandle, LinkedImageSpec, OptionsHandle, PoolHandle,
    RadosHandle, RbdCompletion, SnapInfo, SnapSpec, StatInfo, option,
};

const LIBRADOS: &str = "librados.so.2";
const LIBRBD: &str = "librbd.so.1";

/// The functions of librados and librbd.
#[derive(Debug)]
pub struct Library {
    pub(crate) functions: Functions,
}

/// A library of Ceph that can't be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{} cannot be used ({reason}); volumes in Ceph need it: `apt install librbd1` on Debian and \
     Ubuntu, `dnf install librbd1` on Fedora",
    .library.display()
)]
pub struct LibraryMissing {
    /// The library's name, or its file.
    pub library: PathBuf,
    /// Why, in the loader's words.
    pub reason: String,
}

impl Library {
    /// Loads both libraries from where the system has them, or from `folder`.
    ///
    /// # Errors
    /// A library is missing, or is older than Ceph 16.
    pub fn load(folder: Option<&Path>) -> Result<Arc<Self>, LibraryMissing> {
        let file = |name: &str| folder.map_or(PathBuf::from(name), |folder| folder.join(name));
        let librados = open(&file(LIBRADOS))?;
        let librbd = open(&file(LIBRBD))?;
        let find = |name: &CStr| find(librbd, name).or_else(|| find(librados, name));
        let functions = Functions::load(find).map_err(|name| LibraryMissing {
            library: file(LIBRBD),
            reason: format!("it lacks {name}, so it is older than Ceph 16"),
        })?;
        Ok(Arc::new(Self { functions }))
    }
}

fn open(file: &Path) -> Result<NonNull<c_void>, LibraryMissing> {
    let missing = |reason: &str| LibraryMissing {
        library: file.to_owned(),
        reason: reason.to_owned(),
    };
    let name =
        CString::new(file.as_os_str().as_bytes()).map_err(|_| missing("its path contains NUL"))?;
    // SAFETY: `name` is a C string for the call. Loading runs the library's constructors: wrong
    // if the file is not Ceph's library, which the administrator answers for.
    let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    NonNull::new(handle).ok_or_else(|| {
        // SAFETY: the text, if any, is valid until this thread's next call of the loader.
        let reason =
            unsafe { NonNull::new(libc::dlerror()).map(|text| CStr::from_ptr(text.as_ptr())) };
        missing(&reason.unwrap_or(c"unknown").to_string_lossy())
    })
}

fn find(library: NonNull<c_void>, name: &CStr) -> Option<NonNull<c_void>> {
    // SAFETY: the handle comes from `dlopen` and is never closed; `name` is a C string.
    NonNull::new(unsafe { libc::dlsym(library.as_ptr(), name.as_ptr()) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_library_is_named_with_its_package() {
        let empty = tempfile::tempdir().unwrap();
        let missing = Library::load(Some(empty.path())).unwrap_err();
        assert_eq!(missing.library, empty.path().join(LIBRADOS));
        let shown = missing.to_string();
        assert!(shown.contains("cannot open shared object file"), "{shown}");
        assert!(shown.contains("apt install librbd1"), "{shown}");
    }

    #[test]
    fn a_file_that_is_no_library_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join(LIBRADOS), b"no library").unwrap();
        let missing = Library::load(Some(folder.path())).unwrap_err();
        assert!(missing.reason.contains("file too short"), "{missing}");
    }

    #[test]
    fn a_missing_function_is_named() {
        let name = Functions::load(|name| (name != c"rbd_open").then_some(NonNull::dangling()));
        assert_eq!(name.unwrap_err(), "rbd_open");
    }
}
