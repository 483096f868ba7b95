//! Finds a moved or renamed device by its label.
//!
//! Searches the folders of all the pool's devices, in a thread and with a time limit, because other
//! disks in `/dev` may hang. It writes nothing, and opens only regular files and block devices. The
//! caller checks a candidate's label.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use forebay_device::{DeviceKind, DeviceSpec};
use forebay_pool::BLOCK_BYTES;
use uuid::Uuid;

/// A folder with more entries is not a place for pools.
const ENTRIES_MAX: usize = 4096;
/// A label and its copy.
const LABEL_BYTES: usize = 2 * BLOCK_BYTES;
const POLL_LIMIT: Duration = Duration::from_secs(10);
/// Running searches.
static LOOKING: AtomicUsize = AtomicUsize::new(0);
const LOOKING_MAX: usize = 16;

pub(super) fn folders<'a>(specs: impl Iterator<Item = &'a str>) -> BTreeSet<PathBuf> {
    specs
        .filter_map(|spec| spec.parse::<DeviceSpec>().ok())
        .filter_map(|spec| spec.path().parent().map(Path::to_owned))
        .collect()
}

/// Specifications at which a device may be now.
pub(super) fn candidates(device: &Uuid, spec: &str, folders: &BTreeSet<PathBuf>) -> Vec<String> {
    let Ok(was) = spec.parse::<DeviceSpec>() else {
        return Vec::new();
    };
    let (sender, receiver) = mpsc::channel();
    let (device, at, folders) = (*device, was.path().to_owned(), folders.clone());
    let check = move || {
        check(&device, &at, &folders, &sender);
        LOOKING.fetch_sub(1, Relaxed);
    };
    // Threads that hang stay until the device answers.
    if LOOKING.fetch_add(1, Relaxed) >= LOOKING_MAX
        || (std::thread::Builder::new()
            .name("device-find".to_owned())
            .spawn(check))
        .is_err()
    {
        LOOKING.fetch_sub(1, Relaxed);
        return Vec::new();
    }
    let end = Instant::now() + POLL_LIMIT;
    let mut found = Vec::new();
    while let Ok(path) = receiver.recv_timeout(end.saturating_duration_since(Instant::now())) {
        found.extend(moved(&was, &path));
    }
    found.sort_unstable();
    found
}

/// Reports every path in these folders, except `at`, whose label names the device.
fn check(device: &Uuid, at: &Path, folders: &BTreeSet<PathBuf>, found: &mpsc::Sender<PathBuf>) {
    for folder in folders {
        let Ok(entries) = std::fs::read_dir(folder) else {
            continue;
        };
        for entry in entries.flatten().take(ENTRIES_MAX) {
            let path = entry.path();
            if path != at && names(&path, device) && found.send(path).is_err() {
                return;
            }
        }
    }
}

fn names(path: &Path, device: &Uuid) -> bool {
    let fits = |kind: std::fs::FileType| kind.is_file() || kind.is_block_device();
    if !path.metadata().is_ok_and(|there| fits(there.file_type())) {
        return false;
    }
    let mut head = Vec::with_capacity(LABEL_BYTES);
    let read = File::open(path).and_then(|file| {
        file.take(LABEL_BYTES as u64)
            .read_to_end(&mut head)
            .map(drop)
    });
    read.is_ok() && head.windows(16).any(|bytes| bytes == device.as_bytes())
}

/// The device's specification at another path.
fn moved(was: &DeviceSpec, path: &Path) -> Option<String> {
    let path = path.to_str()?;
    match was.kind() {
        // The kind is read from the new path.
        None | Some(DeviceKind::File | DeviceKind::Block) => Some(path.to_owned()),
        Some(_) => {
            let old = was.path().to_str()?;
            Some(was.to_string().replacen(old, path, 1))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_files_with_the_device_label_are_candidates() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        let device = Uuid::from_bytes([7; 16]);
        let mut label = vec![0; 100];
        label.extend(device.as_bytes());
        std::fs::write(at("renamed"), &label).unwrap();
        std::fs::write(at("other"), vec![8; 8192]).unwrap();
        std::fs::write(at("short"), b"").unwrap();
        let mut deep = vec![0; LABEL_BYTES];
        deep.extend(device.as_bytes());
        std::fs::write(at("not-in-its-label"), &deep).unwrap();
        std::fs::create_dir(at("folder")).unwrap();
        let folders = folders([format!("file:{}", at("was").display()).as_str()].into_iter());
        let here = at("renamed").display().to_string();
        let found = |spec: String| candidates(&device, &spec, &folders);
        assert_eq!(
            found(format!("file:{}", at("was").display())),
            std::slice::from_ref(&here)
        );
        assert_eq!(
            found(format!("ram:{}?size=1G", at("was").display())),
            [format!("ram:{here}?size=1G")]
        );
        assert_eq!(found(here), Vec::<String>::new(), "it is where it was");
        assert_eq!(found("nonsense".to_owned()), Vec::<String>::new());
    }
}
