//! Checks where device files may be created, so that a mistyped disk name or size does not create
//! one. Checks all files of a request before one is made.

use std::collections::BTreeMap;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use forebay_device::size::format_bytes;
use forebay_device::{DeviceKind, DeviceSpec, mounts};

use super::invalid;
use crate::model::error::{self, ApiError};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum NewFiles {
    /// None: a missing file is an error.
    Refused,
    /// Files that fit into the file system's free space.
    WithinRoom,
    /// Sparse files of any size.
    Any,
}

/// Refuses specifications that would create a file in a wrong place.
pub(super) fn check(
    specs: &[String],
    size_bytes: Option<u64>,
    allowed: NewFiles,
) -> Result<(), ApiError> {
    let mut asked = BTreeMap::new();
    for text in specs {
        let spec: DeviceSpec = text.parse().map_err(invalid)?;
        let path = spec.path();
        let is_missing = !path.exists();
        let is_file = is_missing || path.is_file();
        if is_file && let Some(kind) = mounts::device_folder(path) {
            let refused = match is_missing {
                true => ApiError::not_found,
                false => ApiError::invalid,
            };
            return Err(refused(format!(
                "{}: there is no such device, and a file there would be in memory: {kind}",
                path.display()
            ))
            .hint("check the name: `lsblk` lists this machine's disks"));
        }
        let size_bytes = match (spec.kind(), size_bytes) {
            _ if !is_missing => continue,
            // `ram:` always asks for a new one.
            (Some(DeviceKind::Ram), _) => spec.size_bytes().unwrap_or(0),
            (None | Some(DeviceKind::File), Some(size_bytes)) if allowed != NewFiles::Refused => {
                size_bytes
            }
            (None | Some(DeviceKind::File), None) if allowed != NewFiles::Refused => {
                return Err(no_size(path));
            }
            (None | Some(DeviceKind::File), _) => return Err(no_such_file(path)),
            // `null:` keeps no data.
            _ => continue,
        };
        if allowed != NewFiles::Any {
            refuse_too_large(path, size_bytes, &mut asked)?;
        }
    }
    Ok(())
}

fn no_size(path: &Path) -> ApiError {
    let message = format!("{}: the size of the new file is missing", path.display());
    ApiError::invalid(message).hint("give `--size SIZE` (`size_bytes` in the API)")
}

fn no_such_file(path: &Path) -> ApiError {
    let message = format!("{}: there is no such file or device", path.display());
    ApiError::not_found(message).hint(
        "check the name; `--create --size SIZE` (`create` and `size_bytes` in the API) creates a sparse file there",
    )
}

/// Refuses a file that does not fit beside those `asked` for before, by file system.
fn refuse_too_large(
    path: &Path,
    size_bytes: u64,
    asked: &mut BTreeMap<u64, u64>,
) -> Result<(), ApiError> {
    let folder = mounts::folder_of(path);
    let check = || -> io::Result<(u64, u64)> {
        let below = rustix::fs::statvfs(&folder)?;
        let free = below.f_bavail.saturating_mul(below.f_frsize);
        Ok((folder.metadata()?.dev(), free))
    };
    let (file_system, free_bytes) = check().map_err(|error| {
        let message = format!("{}: {error}", folder.display());
        match error.kind() {
            io::ErrorKind::NotFound => ApiError::not_found(message),
            _ => ApiError::invalid(message),
        }
    })?;
    let all = asked.entry(file_system).or_default();
    *all = all.saturating_add(size_bytes);
    if *all <= free_bytes {
        return Ok(());
    }
    let message = format!(
        "{}: the file system can't hold a file of {}: {} are needed there, {} are free",
        path.display(),
        format_bytes(size_bytes),
        format_bytes(*all),
        format_bytes(free_bytes)
    );
    Err(ApiError::new(error::ErrorKind::NoSpace, message).hint(
        "give a smaller size or free some space there; to exceed the free space, create the file yourself \
        (`truncate -s`)",
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_of_one_request_share_the_room() {
        let folder = tempfile::tempdir().unwrap();
        let below = rustix::fs::statvfs(folder.path()).unwrap();
        let free = below.f_bavail * below.f_frsize;
        let at = |name: &str| folder.path().join(name).display().to_string();
        let (one, two) = (vec![at("a")], vec![at("a"), at("b")]);
        // Other processes use this file system too.
        let most = Some(free / 3 * 2);
        assert!(check(&one, most, NewFiles::WithinRoom).is_ok());
        let error = check(&two, most, NewFiles::WithinRoom).unwrap_err();
        assert_eq!(error.kind, error::ErrorKind::NoSpace);
        assert!(check(&two, most, NewFiles::Any).is_ok());
        let error = check(&one, most, NewFiles::Refused).unwrap_err();
        assert_eq!(error.kind, error::ErrorKind::NotFound);
        let error = check(&one, None, NewFiles::WithinRoom).unwrap_err();
        assert_eq!(error.kind, error::ErrorKind::Invalid);
        assert!(error.message.contains("size of the new file is missing"));
        std::fs::write(&one[0], []).unwrap();
        assert!(check(&one, None, NewFiles::WithinRoom).is_ok());
    }
}
