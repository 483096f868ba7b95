//! User Mode Linux: a kernel as a process, with a virtio-blk disk on a vhost-user socket.
//!
//! It starts in two seconds without QEMU and runs one shell script. Unlike QEMU's, its kicks and
//! calls are protocol messages. Its `/host` is a folder of the node. There is no PCI or network,
//! and one processor.

use std::fs::File;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use tempfile::TempDir;
use xtask::process;

use super::control::Output;
use super::image;
use crate::wait;

/// From Debian's package of this name, in the kernel's version (`xtask`, suite `guest`).
const PROGRAM: &str = "linux.uml";
/// The number of a block device in `virtio_uml.device`.
const BLOCK: u32 = 2;
const INIT: &str = include_str!("uml_init.sh");

/// A User Mode Linux that runs a job.
#[derive(Debug)]
pub struct Uml {
    child: Child,
    folder: TempDir,
}

impl Uml {
    /// Starts one that runs `job`; its disk `/dev/vda` is at `socket`.
    pub fn start(socket: &Path, job: &str) -> Result<Self> {
        let image = image::prepare()?;
        let folder = tempfile::Builder::new().prefix("forebay-uml-").tempdir()?;
        let host = folder.path().display();
        std::fs::write(folder.path().join("init"), INIT)?;
        std::fs::write(folder.path().join("job"), job)?;
        let console = File::create(folder.path().join("console"))?;
        let first = format!(
            "/bin/busybox mkdir /host; /bin/busybox mount -t hostfs none /host -o {host}; . /host/init"
        );
        let child = Command::new(PROGRAM)
            .args(["mem=256M", "root=/dev/ram0", "quiet", "panic=-1"])
            .args(["con=null", "con0=null,fd:1"])
            .arg(format!("uml_dir={host}/"))
            .arg(format!("initrd={}", image.initramfs.display()))
            .arg(format!("virtio_uml.device={}:{BLOCK}", socket.display()))
            .args(["rdinit=/bin/sh", "--", "-c"])
            .arg(format!("\"{first}\""))
            .env("TMPDIR", "/dev/shm")
            .stdin(Stdio::null())
            .stdout(console.try_clone()?)
            .stderr(console)
            .spawn()
            .with_context(|| format!("cannot start {PROGRAM} (package user-mode-linux)"))?;
        Ok(Self { child, folder })
    }

    /// Waits until the job has made the file `/host/NAME`.
    pub fn wait_file(&mut self, name: &str, limit: Duration) -> Result<()> {
        let path = self.folder.path().join(name);
        wait::until(&format!("/host/{name}"), limit, || {
            if path.exists() {
                return Ok(Some(()));
            }
            let ended = self.child.try_wait()?;
            ensure!(ended.is_none(), "it exited: {}", self.said());
            Ok(None)
        })
        .with_context(|| self.said())
    }

    /// Makes the file `/host/NAME`, for which the job waits.
    pub fn make_file(&self, name: &str) -> Result<()> {
        File::create(self.folder.path().join(name))?;
        Ok(())
    }

    /// Waits for the end of the job and the kernel.
    pub fn wait(mut self, limit: Duration) -> Result<Output> {
        let ended = process::wait(&mut self.child, limit);
        let (text, code) = (self.read("out"), self.read("code"));
        match (ended, code.trim().parse()) {
            (Ok(_), Ok(code)) => Ok(Output { code, text }),
            (ended, _) => bail!("the job did not end ({ended:?}): {}", self.said()),
        }
    }

    /// Whether it has ended.
    pub fn has_ended(&mut self) -> Result<bool> {
        Ok(self.child.try_wait()?.is_some())
    }

    /// The output of job and kernel so far.
    #[must_use]
    pub fn said(&self) -> String {
        let (out, console) = (self.read("out"), self.read("console"));
        format!("{out}\n--- console ---\n{console}")
    }

    fn read(&self, name: &str) -> String {
        let text = std::fs::read(self.folder.path().join(name)).unwrap_or_default();
        String::from_utf8_lossy(&text).into_owned()
    }
}

impl Drop for Uml {
    fn drop(&mut self) {
        // Its programs are child processes.
        process::kill_tree(self.child.id());
        let _ = self.child.wait();
    }
}
