//! Finds the drive that a device lies on, in sysfs.

use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

use super::DriveSource;

/// The most layers between a device and its drive.
const MOST_LAYERS: usize = 8;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Drive {
    /// Below `/dev`.
    pub(super) name: String,
    pub(super) number: u64,
    pub(super) source: DriveSource,
}

/// The drive below the block device `number`; else what there is instead.
pub(super) fn drive(sys: &Path, number: u64) -> Result<Drive, String> {
    let mut number = number;
    for _ in 0..MOST_LAYERS {
        let (major, minor) = (rustix::fs::major(number), rustix::fs::minor(number));
        if major == 0 {
            let what = "it lies in a file system without a block device of its own";
            return Err(what.to_owned());
        }
        let node = sys.join(format!("dev/block/{major}:{minor}"));
        let unknown = |_| format!("the kernel shows no block device {major}:{minor} here");
        let node = fs::canonicalize(node).map_err(unknown)?;
        match next(&node)? {
            Some(below) => number = below,
            None => return judge(&node, number),
        }
    }
    Err("it lies below too many layers".to_owned())
}

/// The device one layer below.
fn next(node: &Path) -> Result<Option<u64>, String> {
    let name = name_of(node);
    if node.join("partition").exists() {
        let whole = node.parent().and_then(number_in);
        return whole
            .map(Some)
            .ok_or_else(|| format!("the disk of {name} is unknown"));
    }
    if let Ok(file) = fs::read_to_string(node.join("loop/backing_file")) {
        let file = file.trim_end_matches('\n');
        let below = fs::metadata(file).map_err(|error| format!("{name} is on {file}: {error}"))?;
        let is_block = below.file_type().is_block_device();
        return Ok(Some(if is_block { below.rdev() } else { below.dev() }));
    }
    let Ok(layers) = fs::read_dir(node.join("slaves")) else {
        return Ok(None);
    };
    let mut layers = layers.flatten();
    match (layers.next(), layers.next()) {
        (None, _) => Ok(None),
        (Some(below), None) => {
            let number = number_in(&below.path());
            number
                .map(Some)
                .ok_or_else(|| format!("what is below {name} is unknown"))
        }
        _ => Err(format!("it lies on several drives, below {name}")),
    }
}

fn judge(node: &Path, number: u64) -> Result<Drive, String> {
    let name = name_of(node);
    let is_ata = || {
        let vendor = fs::read_to_string(node.join("device/vendor"));
        vendor.is_ok_and(|vendor| vendor.trim() == "ATA")
    };
    let source = match () {
        () if is_namespace(&name) => DriveSource::Nvme,
        () if is_disk(&name) && is_ata() => DriveSource::Ata,
        () => {
            return Err(format!(
                "it lies on {name}, which is neither an NVMe nor a SATA drive"
            ));
        }
    };
    Ok(Drive {
        name,
        number,
        source,
    })
}

fn name_of(node: &Path) -> String {
    node.file_name()
        .unwrap_or_default()
        .to_string_lossy()
        .into_owned()
}

fn number_in(node: &Path) -> Option<u64> {
    let text = fs::read_to_string(node.join("dev")).ok()?;
    let (major, minor) = text.trim().split_once(':')?;
    Some(rustix::fs::makedev(
        major.parse().ok()?,
        minor.parse().ok()?,
    ))
}

/// `nvme0n1`.
fn is_namespace(name: &str) -> bool {
    let numbers = name
        .strip_prefix("nvme")
        .and_then(|rest| rest.split_once('n'));
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    numbers.is_some_and(|(controller, namespace)| is_number(controller) && is_number(namespace))
}

/// `sda`.
fn is_disk(name: &str) -> bool {
    let letters = name.strip_prefix("sd").unwrap_or_default();
    !letters.is_empty() && letters.bytes().all(|byte| byte.is_ascii_lowercase())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;
    use std::path::PathBuf;

    use super::*;

    /// A sysfs of files.
    struct Sys(tempfile::TempDir);

    impl Sys {
        fn new() -> Self {
            Self(tempfile::tempdir().unwrap())
        }

        /// Adds a block device; `path` is below `devices`.
        fn add(&self, path: &str, (major, minor): (u32, u32)) -> PathBuf {
            let node = self.0.path().join("devices").join(path);
            fs::create_dir_all(&node).unwrap();
            fs::write(node.join("dev"), format!("{major}:{minor}\n")).unwrap();
            let links = self.0.path().join("dev/block");
            fs::create_dir_all(&links).unwrap();
            symlink(&node, links.join(format!("{major}:{minor}"))).unwrap();
            node
        }

        fn drive(&self, major: u32, minor: u32) -> Result<Drive, String> {
            drive(self.0.path(), rustix::fs::makedev(major, minor))
        }
    }

    fn lies_on(below: &Path, upper: &Path) {
        fs::create_dir_all(upper.join("slaves")).unwrap();
        symlink(below, upper.join("slaves").join(below.file_name().unwrap())).unwrap();
    }

    fn nvme(minor: u32) -> Drive {
        Drive {
            name: "nvme0n1".to_owned(),
            number: rustix::fs::makedev(259, minor),
            source: DriveSource::Nvme,
        }
    }

    #[test]
    fn a_mapped_partition_lies_on_its_disk() {
        let sys = Sys::new();
        sys.add("nvme0/nvme0n1", (259, 0));
        let partition = sys.add("nvme0/nvme0n1/nvme0n1p2", (259, 2));
        fs::write(partition.join("partition"), "2\n").unwrap();
        let mapped = sys.add("dm-0", (253, 0));
        lies_on(&partition, &mapped);
        for (major, minor) in [(259, 0), (259, 2), (253, 0)] {
            assert_eq!(sys.drive(major, minor), Ok(nvme(0)));
        }
    }

    #[test]
    fn a_volume_on_two_drives_has_no_health_of_its_own() {
        let sys = Sys::new();
        let md = sys.add("md0", (9, 0));
        lies_on(&sys.add("nvme0/nvme0n1", (259, 0)), &md);
        lies_on(&sys.add("nvme1/nvme1n1", (259, 1)), &md);
        assert!(sys.drive(9, 0).unwrap_err().contains("several drives"));
    }

    #[test]
    fn a_loop_device_lies_where_its_file_does() {
        let sys = Sys::new();
        let file = tempfile::NamedTempFile::new().unwrap();
        let number = file.as_file().metadata().unwrap().dev();
        let node = sys.add("loop0", (7, 0));
        fs::create_dir_all(node.join("loop")).unwrap();
        let backing = format!("{}\n", file.path().display());
        fs::write(node.join("loop/backing_file"), backing).unwrap();
        let numbers = (rustix::fs::major(number), rustix::fs::minor(number));
        if numbers.0 == 0 {
            assert!(
                sys.drive(7, 0)
                    .unwrap_err()
                    .contains("without a block device")
            );
        } else {
            sys.add("nvme0/nvme0n1", numbers);
            assert_eq!(sys.drive(7, 0).map(|drive| drive.number), Ok(number));
        }
        drop(file);
        assert!(sys.drive(7, 0).unwrap_err().starts_with("loop0 is on "));
    }

    #[test]
    fn only_disks_that_speak_ata_are_asked_in_ata() {
        let sys = Sys::new();
        for (name, number, vendor) in [("sda", 0, "ATA     \n"), ("sdb", 16, "IBM\n")] {
            let node = sys.add(name, (8, number));
            fs::create_dir_all(node.join("device")).unwrap();
            fs::write(node.join("device/vendor"), vendor).unwrap();
        }
        sys.add("vda", (254, 0));
        assert_eq!(
            sys.drive(8, 0).map(|drive| drive.source),
            Ok(DriveSource::Ata)
        );
        for (major, minor) in [(8, 16), (254, 0)] {
            assert!(sys.drive(major, minor).unwrap_err().contains("neither"));
        }
        assert!(
            sys.drive(8, 32)
                .unwrap_err()
                .contains("no block device 8:32")
        );
        assert!(sys.drive(0, 24).unwrap_err().contains("file system"));
    }

    #[test]
    fn layers_in_a_circle_end() {
        let sys = Sys::new();
        let node = sys.add("dm-0", (253, 0));
        lies_on(&node, &node);
        assert!(sys.drive(253, 0).unwrap_err().contains("too many layers"));
    }
}
