//! Shared by this crate's tests: scratch files, a loop device (by `losetup`), and skips that fail
//! in CI.
#![allow(dead_code)]

use std::path::{Path, PathBuf};
use std::process::Command;

/// Reports a skipped test. With `CI=true` that is a failure.
pub(crate) fn skip(what: &str, reason: &str) {
    eprintln!("SKIPPED {what}: {reason}");
    assert_ne!(
        std::env::var("CI").as_deref(),
        Ok("true"),
        "{what} was skipped, and with CI=true a skip is a failure: {reason}"
    );
}

/// A sparse file in the target's temporary folder, which is on a real file system.
pub(crate) fn scratch_file(len_bytes: u64) -> tempfile::NamedTempFile {
    let file = tempfile::NamedTempFile::new_in(env!("CARGO_TARGET_TMPDIR")).expect("scratch file");
    file.as_file().set_len(len_bytes).expect("set length");
    file
}

/// A folder on tmpfs if there is one.
pub(crate) fn memory_dir() -> tempfile::TempDir {
    let shm = Path::new("/dev/shm");
    if shm.is_dir() {
        tempfile::tempdir_in(shm).expect("folder")
    } else {
        tempfile::tempdir().expect("folder")
    }
}

pub(crate) struct Loop {
    pub(crate) path: PathBuf,
    _file: tempfile::NamedTempFile,
}

impl Loop {
    /// `None`, after a message, where it can't be made.
    pub(crate) fn new(what: &str, len_bytes: u64, sector_bytes: u32) -> Option<Self> {
        let file = scratch_file(len_bytes);
        let made = Command::new("losetup")
            .args(["--find", "--show", "--direct-io=on", "--sector-size"])
            .arg(sector_bytes.to_string())
            .arg(file.path())
            .output();
        match made {
            Ok(output) if output.status.success() => {
                let path = String::from_utf8(output.stdout).expect("a path");
                Some(Self {
                    path: path.trim().into(),
                    _file: file,
                })
            }
            Ok(output) => {
                skip(what, &String::from_utf8_lossy(&output.stderr));
                None
            }
            Err(error) => {
                skip(what, &format!("losetup: {error}"));
                None
            }
        }
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = Command::new("losetup").arg("-d").arg(&self.path).status();
    }
}
