//! Programs of a newer Debian than the machine's own may be: QEMU 11 with a vfio-user client, and libblkio.
//!
//! Purpose: guests whose disks are vfio-user devices, and clients that need no guest.
//! Design: packages are unpacked in the cache folder, as the guest's image is, and run with their own loader and
//! libraries; nothing is installed. Made once; a lock keeps test processes from making it twice.
//! Not here: what is run with them.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use rustix::fs::FlockOperation;
use xtask::debian::{self, PrivateApt, Sysroot};

use super::image::{cache_folder, forget};

/// QEMU knows vfio-user since 10.1, which is in the backports.
const SUITES: [&str; 2] = ["trixie", "trixie-backports"];
const PACKAGES: [&str; 3] = ["qemu-system-x86", "qemu-utils", "qemu-block-extra"];
const LIBRARIES: &str = "usr/lib/x86_64-linux-gnu";
/// Names the folder; another when what is in it changes.
const NAME: &str = "tools-1";

/// The programs.
#[derive(Debug, Clone)]
pub struct Tools {
    sysroot: Sysroot,
}

impl Tools {
    /// The tools; fetches them if the cache has none.
    ///
    /// # Errors
    /// If packages can't be had, or the disk is full.
    pub fn prepare() -> Result<Self> {
        let cache = cache_folder();
        std::fs::create_dir_all(&cache).with_context(|| cache.display().to_string())?;
        let cache = cache.canonicalize()?;
        let lock = File::create(cache.join("tools-lock"))?;
        rustix::fs::flock(&lock, FlockOperation::LockExclusive)?;
        let finished = cache.join(NAME);
        if !finished.exists() {
            forget(&cache, &["tools-", "fetching"])?;
            let work = cache.join("fetching");
            make(&work).context("cannot fetch QEMU")?;
            std::fs::rename(work.join("root"), &finished)?;
            std::fs::remove_dir_all(&work)?;
        }
        Ok(Self {
            sysroot: Sysroot::new(finished),
        })
    }

    /// One of the programs, e.g. `qemu-io`.
    #[must_use]
    pub fn command(&self, program: &str) -> Command {
        let mut command = self.sysroot.command(&format!("usr/bin/{program}"), program);
        let modules = self.path(&format!("{LIBRARIES}/qemu"));
        command.env("QEMU_MODULE_DIR", modules);
        command
    }

    /// `qemu-system-x86_64` with its own firmware.
    #[must_use]
    pub fn qemu(&self) -> Command {
        let mut command = self.command("qemu-system-x86_64");
        for folder in ["qemu", "seabios"] {
            command
                .arg("-L")
                .arg(self.path(&format!("usr/share/{folder}")));
        }
        command
    }

    fn path(&self, path: &str) -> PathBuf {
        self.sysroot.path(path)
    }
}

fn make(work: &Path) -> Result<()> {
    std::fs::create_dir_all(work)?;
    let apt = PrivateApt::open_suites(&work.join("apt"), &SUITES)?;
    let root = work.join("root");
    for package in apt.download_with_dependencies(&PACKAGES)? {
        debian::unpack(&package, &root)?;
    }
    Ok(())
}
