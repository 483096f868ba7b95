//! User Mode Linux: a Linux kernel as a process, with a virtio-blk disk on a vhost-user socket.
//!
//! Purpose: a real Linux driver (`virtio_uml`, `virtio_blk`) in two seconds, without QEMU.
//! Design: Debian's package, its programs those of the guest's image. One job, a shell script, runs and its output is read
//! from a folder that the machine and the guest share. The process dies with its value, by its pid.
//! Not here: PCI, networks, several processors; it has none.

use std::fs::File;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use tempfile::TempDir;
use xtask::process;

use super::control::Output;
use super::image;

/// The program and the package that has it.
pub const NEEDED: (&str, &str) = ("linux.uml", "user-mode-linux");
/// virtio's number of a block device, as `virtio_uml.device` wants it.
const BLOCK: u32 = 2;

/// A User Mode Linux at its job.
#[derive(Debug)]
pub struct Uml {
    child: Child,
    folder: TempDir,
}

impl Uml {
    /// Starts one whose disk `/dev/vda` is at `socket`, and which carries out `job`.
    ///
    /// # Errors
    /// If the image can't be made, or the program is missing.
    pub fn start(socket: &Path, job: &str) -> Result<Self> {
        let image = image::prepare()?;
        let folder = tempfile::Builder::new().prefix("forebay-uml-").tempdir()?;
        std::fs::write(folder.path().join("job"), job)?;
        let console = File::create(folder.path().join("console"))?;
        let child = Command::new(NEEDED.0)
            .args(["mem=256M", "rdinit=/uml-init", "root=/dev/ram0", "quiet"])
            .args(["con=null", "con0=null,fd:1", "panic=-1"])
            .arg(format!("initrd={}", image.initramfs.display()))
            .arg(format!("folder={}", folder.path().display()))
            .arg(format!("virtio_uml.device={}:{BLOCK}", socket.display()))
            .env("TMPDIR", "/dev/shm")
            .stdin(Stdio::null())
            .stdout(console.try_clone()?)
            .stderr(console)
            // Its helper processes go with it.
            .process_group(0)
            .spawn()
            .with_context(|| format!("cannot start {} (package {})", NEEDED.0, NEEDED.1))?;
        Ok(Self { child, folder })
    }

    /// Waits for the job's end, and the machine's.
    ///
    /// # Errors
    /// If it takes longer than `limit`, or the kernel died.
    pub fn wait(mut self, limit: Duration) -> Result<Output> {
        let ended = process::wait(&mut self.child, limit);
        let read = |name: &str| {
            let text = std::fs::read(self.folder.path().join(name)).unwrap_or_default();
            String::from_utf8_lossy(&text).into_owned()
        };
        let (text, code) = (read("out"), read("code"));
        match (ended, code.trim().parse()) {
            (Ok(_), Ok(code)) => Ok(Output { code, text }),
            (ended, _) => bail!(
                "the job came to no end ({ended:?}): {text}\n--- console ---\n{}",
                read("console")
            ),
        }
    }

    /// Whether it has ended.
    ///
    /// # Errors
    /// If the kernel does not say.
    pub fn has_ended(&mut self) -> Result<bool> {
        Ok(self.child.try_wait()?.is_some())
    }

    /// What the job has printed so far.
    #[must_use]
    pub fn said(&self) -> String {
        std::fs::read_to_string(self.folder.path().join("out")).unwrap_or_default()
    }
}

impl Drop for Uml {
    fn drop(&mut self) {
        process::kill_tree(self.child.id());
        let _ = self.child.wait();
    }
}
