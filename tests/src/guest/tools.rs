//! Programs of a newer Debian, unpacked in the cache: QEMU 11 with a vfio-user client, and
//! libblkio. They use their own loader and libraries.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Result;
use xtask::cache;
use xtask::debian::{self, PrivateApt, Sysroot};

/// QEMU has vfio-user since 10.1, which is in the backports.
const SUITES: [&str; 2] = ["trixie", "trixie-backports"];
const PACKAGES: [&str; 3] = ["qemu-system-x86", "qemu-utils", "qemu-block-extra"];
const LIBRARIES: &str = "usr/lib/x86_64-linux-gnu";
/// The cache folder; change it when the content changes.
const NAME: &str = "guest-tools-1";

/// The programs.
#[derive(Debug, Clone)]
pub struct Tools {
    sysroot: Sysroot,
}

impl Tools {
    /// The tools, fetched if they are not in the cache.
    pub fn prepare() -> Result<Self> {
        let finished = cache::get(NAME, make)?;
        Ok(Self {
            sysroot: Sysroot::new(finished),
        })
    }

    /// A program, e.g. `qemu-io`.
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
    let apt = PrivateApt::open_suites(&work.join("apt"), &SUITES)?;
    for package in apt.download_with_dependencies(&PACKAGES)? {
        debian::unpack(&package, &work.join("result"))?;
    }
    Ok(())
}
