//! The place of a pool's only device, for benchmarks that compare kinds of devices.

use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};
use rustix::fs::SeekFrom;
use rustix::io::Errno;
use xtask::process;

const LIMIT: Duration = Duration::from_secs(600);

/// The place of a device; dropping it removes its files.
pub(super) struct Place {
    pub(super) kind: &'static str,
    bytes: u64,
    /// For `pool create`.
    pub(super) spec: String,
    pub(super) file: PathBuf,
    loop_device: Option<String>,
}

impl Place {
    /// A device of kind `ram`, `null`, `block` (a loop device over memory) or `file`. `None`, with a
    /// message, if it cannot be made.
    pub(super) fn make(kind: &'static str, bytes: u64) -> Result<Option<Self>> {
        let name = format!("forebay-bench-{kind}-{}", std::process::id());
        let file = match kind {
            "file" => crate::cargo::target_folder().join(name),
            _ => Path::new("/dev/shm").join(name),
        };
        let mut place = Self {
            kind,
            bytes,
            spec: match kind {
                "ram" | "null" => format!("{kind}:{}?size={bytes}", file.display()),
                _ => file.display().to_string(),
            },
            file,
            loop_device: None,
        };
        if matches!(kind, "ram" | "null") {
            return Ok(Some(place));
        }
        std::fs::File::create(&place.file)?.set_len(bytes)?;
        if kind == "block" {
            let mut losetup = Command::new("losetup");
            losetup
                .args(["--find", "--show", "--sector-size", "4096"])
                .arg(&place.file);
            match process::text(&mut losetup, LIMIT) {
                Ok(path) => {
                    place.spec = path.trim().to_owned();
                    place.loop_device = Some(place.spec.clone());
                }
                Err(error) => {
                    println!("no loop device, so no figures for a block device: {error:#}");
                    return Ok(None);
                }
            }
        }
        Ok(Some(place))
    }

    pub(super) fn path(&self) -> String {
        let file = || self.file.display().to_string();
        self.loop_device.clone().unwrap_or_else(file)
    }

    /// Allocates memory by writing zeros into holes; reserved pages alone would still be cleared on
    /// first use.
    pub(super) fn take_memory(&self) -> Result<()> {
        if matches!(self.kind, "file" | "null") {
            return Ok(());
        }
        let mut options = std::fs::OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false);
        let file = options.open(&self.file)?;
        if file.metadata()?.len() < self.bytes {
            file.set_len(self.bytes)?;
        }
        let no_memory = || format!("no memory for {}", self.file.display());
        let zeros = vec![0; 1 << 20];
        let mut at = 0;
        while at < self.bytes {
            at = rustix::fs::seek(&file, SeekFrom::Hole(at))?;
            let end = match rustix::fs::seek(&file, SeekFrom::Data(at)) {
                Ok(data) => data.min(self.bytes),
                // No more data.
                Err(Errno::NXIO) => self.bytes,
                Err(error) => return Err(error.into()),
            };
            while at < end {
                let count = (end - at).min(zeros.len() as u64) as usize;
                let written = file.write_at(&zeros[..count], at).with_context(no_memory)?;
                at += written as u64;
            }
        }
        Ok(())
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if let Some(device) = &self.loop_device {
            let _ = Command::new("losetup").args(["-d", device]).status();
        }
        let _ = std::fs::remove_file(&self.file);
    }
}
