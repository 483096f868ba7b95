//! Where a new device file may be.
//!
//! Purpose: a disk's name with a typing error, or a size with a zero too many, does not become a device.
//! Design: all files of a request are looked at before one is made.
//! Not here: making them (`create`); what is said of files in memory (`forebay_device`).

use std::collections::BTreeMap;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use forebay_device::DeviceSpec;
use forebay_device::size::format_bytes;

use super::invalid;
use crate::api::error::{self, ApiError};

/// Which files may be made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum NewFiles {
    /// None: what is missing is an error.
    Refused,
    /// Those that the file system has room for.
    WithinRoom,
    /// Those that may find room later: they are sparse.
    Any,
}

/// Refuses specifications that would make a file where none belongs.
pub(super) fn check(
    specs: &[String],
    size_bytes: Option<u64>,
    allowed: NewFiles,
) -> Result<(), ApiError> {
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let mut asked = BTreeMap::new();
    for text in specs {
        let spec: DeviceSpec = text.parse().map_err(invalid)?;
        let path = spec.path();
        let is_missing = !path.exists();
        let is_file = is_missing || path.is_file();
        if is_file && let Some(kind) = device_folder(path, &mounts) {
            return Err(ApiError::invalid(format!(
                "{}: there is no such device, and a file there would be in memory: {kind}",
                path.display()
            ))
            .hint("check the name: `lsblk` lists this machine's disks"));
        }
        if !is_missing || !matches!(spec, DeviceSpec::Path { .. } | DeviceSpec::File { .. }) {
            continue;
        }
        let size_bytes = match size_bytes {
            Some(size_bytes) if allowed != NewFiles::Refused => size_bytes,
            _ => return Err(no_such_file(path)),
        };
        if allowed == NewFiles::WithinRoom {
            refuse_too_large(path, size_bytes, &mut asked)?;
        }
    }
    Ok(())
}

fn no_such_file(path: &Path) -> ApiError {
    let message = format!("{}: there is no such file or device", path.display());
    ApiError::not_found(message).hint(
        "check the name; `--create --size SIZE` (`create` and `size_bytes` in the API) makes a sparse file there",
    )
}

/// Refuses a file that does not fit beside those that were `asked` for before, by file system.
fn refuse_too_large(
    path: &Path,
    size_bytes: u64,
    asked: &mut BTreeMap<u64, u64>,
) -> Result<(), ApiError> {
    let folder = folder_of(path);
    let look = || -> io::Result<(u64, u64)> {
        let below = rustix::fs::statvfs(&folder)?;
        let free = below.f_bavail.saturating_mul(below.f_frsize);
        Ok((folder.metadata()?.dev(), free))
    };
    let (file_system, free_bytes) =
        look().map_err(|error| ApiError::invalid(format!("{}: {error}", folder.display())))?;
    let all = asked.entry(file_system).or_default();
    *all = all.saturating_add(size_bytes);
    if *all <= free_bytes {
        return Ok(());
    }
    let message = format!(
        "{}: the file system can't hold a file of {}: {} are asked for there, {} are free",
        path.display(),
        format_bytes(size_bytes),
        format_bytes(*all),
        format_bytes(free_bytes)
    );
    Err(ApiError::new(error::ErrorKind::NoSpace, message).hint(
        "give a smaller size, make room there, or make the file yourself (`truncate -s`) if it is to have more than there \
         is room for now",
    ))
}

fn folder_of(path: &Path) -> PathBuf {
    match path.parent() {
        Some(parent) if parent != Path::new("") => parent.to_owned(),
        _ => PathBuf::from("."),
    }
}

/// Whether the folder of `path` is for device nodes, and why that is known.
fn device_folder(path: &Path, mounts: &str) -> Option<String> {
    let folder = folder_of(path).canonicalize().ok()?;
    let (mounted_at, kind) = mount_of(&folder, mounts)?;
    (kind == "devtmpfs" || mounted_at == Path::new("/dev"))
        .then(|| format!("{} is a {kind}", mounted_at.display()))
}

/// Where the file system of `folder` is mounted, and its type (proc(5), mountinfo).
fn mount_of<'a>(folder: &Path, mounts: &'a str) -> Option<(PathBuf, &'a str)> {
    let entries = mounts.lines().filter_map(|line| {
        let mounted_at = PathBuf::from(unescape(line.split(' ').nth(4)?));
        let kind = line.split_once(" - ")?.1.split(' ').next()?;
        folder
            .starts_with(&mounted_at)
            .then_some((mounted_at, kind))
    });
    // Of several at one place, the last one is on top.
    entries.max_by_key(|(mounted_at, _)| mounted_at.as_os_str().len())
}

/// Spaces and the like are three octal digits in mountinfo.
fn unescape(text: &str) -> String {
    let mut parts = text.split('\\');
    let mut plain = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let code = part
            .get(..3)
            .and_then(|digits| u8::from_str_radix(digits, 8).ok());
        match code {
            Some(code) => {
                plain.push(char::from(code));
                plain.push_str(&part[3..]);
            }
            None => {
                plain.push('\\');
                plain.push_str(part);
            }
        }
    }
    plain
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOUNTS: &str = "\
22 1 254:0 / / rw,relatime - ext4 /dev/vda rw
23 22 0:5 / /dev rw,relatime shared:2 - devtmpfs devtmpfs rw
24 23 0:21 / /dev/shm rw,nosuid - tmpfs tmpfs rw
25 22 0:30 / /srv/my\\040disks rw - ext4 /dev/vdb rw
26 22 0:31 / /srv/over rw - ext4 /dev/vdc rw
27 22 0:32 / /srv/over rw - tmpfs tmpfs rw
";

    #[test]
    fn the_innermost_mount_counts() {
        let kind = |folder: &str| mount_of(Path::new(folder), MOUNTS).unwrap().1;
        assert_eq!(kind("/srv"), "ext4");
        assert_eq!(kind("/dev/mapper"), "devtmpfs");
        assert_eq!(kind("/dev/shm/a"), "tmpfs");
        assert_eq!(kind("/developers"), "ext4");
        assert_eq!(kind("/srv/over/a"), "tmpfs");
        let (at, _) = mount_of(Path::new("/srv/my disks/a"), MOUNTS).unwrap();
        assert_eq!(at, Path::new("/srv/my disks"));
        assert_eq!(mount_of(Path::new("/srv"), ""), None);
    }

    #[test]
    fn a_container_has_its_device_nodes_in_a_tmpfs() {
        let mounts = "22 1 0:9 / / rw - overlay overlay rw\n23 22 0:8 / /dev rw - tmpfs tmpfs rw\n";
        let said = device_folder(Path::new("/dev/nvme1n1"), mounts);
        assert_eq!(said.as_deref(), Some("/dev is a tmpfs"));
    }

    #[test]
    fn files_of_one_request_share_the_room() {
        let folder = tempfile::tempdir().unwrap();
        let below = rustix::fs::statvfs(folder.path()).unwrap();
        let free = below.f_bavail * below.f_frsize;
        let at = |name: &str| folder.path().join(name).display().to_string();
        let (one, two) = (vec![at("a")], vec![at("a"), at("b")]);
        // Others use this file system too.
        let most = Some(free / 3 * 2);
        assert!(check(&one, most, NewFiles::WithinRoom).is_ok());
        let error = check(&two, most, NewFiles::WithinRoom).unwrap_err();
        assert_eq!(error.kind, error::ErrorKind::NoSpace);
        assert!(check(&two, most, NewFiles::Any).is_ok());
        let error = check(&one, most, NewFiles::Refused).unwrap_err();
        assert_eq!(error.kind, error::ErrorKind::NotFound);
    }
}
