//! Recognises folders for device nodes, where a regular file would be in memory.
//!
//! The innermost mount of /proc/self/mountinfo counts; a container's `/dev` is a tmpfs.

use std::path::{Path, PathBuf};

/// The folder that `path` is in.
#[must_use]
pub fn folder_of(path: &Path) -> PathBuf {
    match path.parent() {
        Some(parent) if parent != Path::new("") => parent.to_owned(),
        _ => PathBuf::from("."),
    }
}

/// Says what the folder of `path` is if it is for device nodes: `/dev is a devtmpfs`.
#[must_use]
pub fn device_folder(path: &Path) -> Option<String> {
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").ok()?;
    device_folder_in(path, &mounts)
}

fn device_folder_in(path: &Path, mounts: &str) -> Option<String> {
    let folder = folder_of(path).canonicalize().ok()?;
    let (mounted_at, kind) = mount_of(&folder, mounts)?;
    (kind == "devtmpfs" || mounted_at == Path::new("/dev"))
        .then(|| format!("{} is a {kind}", mounted_at.display()))
}

/// Mount point and type of the file system of `folder` (proc(5), mountinfo).
fn mount_of<'a>(folder: &Path, mounts: &'a str) -> Option<(PathBuf, &'a str)> {
    let entries = mounts.lines().filter_map(|line| {
        let mounted_at = PathBuf::from(unescape(line.split(' ').nth(4)?));
        let kind = line.split_once(" - ")?.1.split(' ').next()?;
        folder
            .starts_with(&mounted_at)
            .then_some((mounted_at, kind))
    });
    // At one mount point, the last mount is on top.
    entries.max_by_key(|(mounted_at, _)| mounted_at.as_os_str().len())
}

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
        let said = device_folder_in(Path::new("/dev/nvme1n1"), mounts);
        assert_eq!(said.as_deref(), Some("/dev is a tmpfs"));
    }
}
