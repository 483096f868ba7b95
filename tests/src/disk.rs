//! Loop devices: second names of a disk, or disks with larger blocks.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

/// A loop device, removed when dropped.
#[derive(Debug)]
pub struct LoopDevice(PathBuf);

impl LoopDevice {
    /// A loop device over a file.
    pub fn over(file: &Path) -> Result<Self> {
        Self::with(file, &[])
    }

    /// A loop device with blocks of this size.
    pub fn with_blocks(file: &Path, block_bytes: u32) -> Result<Self> {
        Self::with(file, &["--sector-size", &block_bytes.to_string()])
    }

    fn with(file: &Path, arguments: &[&str]) -> Result<Self> {
        let output = Command::new("losetup")
            .args(["--find", "--show"])
            .args(arguments)
            .arg(file)
            .output()
            .context("losetup")?;
        ensure!(
            output.status.success(),
            "losetup: {}",
            String::from_utf8_lossy(&output.stderr)
        );
        Ok(Self(PathBuf::from(
            String::from_utf8(output.stdout)?.trim(),
        )))
    }

    /// Its path.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Its device specification for `forebay`.
    #[must_use]
    pub fn spec(&self) -> String {
        self.0.display().to_string()
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        let _ = Command::new("losetup")
            .arg("--detach")
            .arg(&self.0)
            .status();
    }
}
