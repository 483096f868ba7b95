//! Debian's unmodified `nvme-cli` as a client of the out-of-band endpoint.
//!
//! The packages are in the cache; their program runs with its own loader and libraries. It speaks
//! NVMe-MI over `AF_MCTP` sockets, which few kernels have: the preloaded `mctp_socket.c` makes one
//! of a Unix socket.

use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use tempfile::TempDir;
use xtask::debian::{self, PrivateApt, Sysroot};
use xtask::{cache, process};

const PACKAGE: &str = "nvme-cli";
/// Part of the cache folder's name; change it when the content changes.
const RECIPE: &str = "1";
const SOURCE: &str = "src/mctp_socket.c";
/// The environment variable with the line's socket.
const LINE: &str = "MCTP_LINE";
const LIMIT: Duration = Duration::from_secs(120);

/// A version of `nvme-cli`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Version {
    /// 2.3, of bookworm.
    V2_3,
    /// 2.13, of trixie.
    V2_13,
}

impl Version {
    /// The versions that are tested.
    pub const ALL: [Self; 2] = [Self::V2_3, Self::V2_13];

    fn suite(self) -> &'static str {
        match self {
            Self::V2_3 => "bookworm",
            Self::V2_13 => "trixie",
        }
    }
}

/// `nvme-cli` for one controller of an endpoint.
#[derive(Debug)]
pub struct NvmeCli {
    sysroot: Sysroot,
    /// With the preloaded library.
    folder: TempDir,
    line: PathBuf,
    /// In the form of `nvme-cli`: `mctp:NETWORK,EID:CONTROLLER`.
    device: String,
}

impl NvmeCli {
    /// A client of the controller `cntlid` of the endpoint `eid` behind the Unix socket `line`.
    /// Fetches the program if it is not in the cache, and needs a C compiler.
    pub fn prepare(version: Version, line: &Path, eid: u8, cntlid: u16) -> Result<Self> {
        let suite = version.suite();
        let root = cache::get(&format!("{PACKAGE}-{suite}-{RECIPE}"), |work| {
            make(work, suite)
        })?;
        let folder = tempfile::tempdir()?;
        let mut compile = Command::new("cc");
        compile
            .args([
                "-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", "-o",
            ])
            .arg(folder.path().join("mctp_socket.so"))
            .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join(SOURCE));
        process::output(&mut compile, LIMIT)?;
        Ok(Self {
            sysroot: Sysroot::new(root),
            folder,
            line: line.to_owned(),
            device: format!("mctp:1,{eid}:{cntlid}"),
        })
    }

    /// Runs `nvme COMMAND DEVICE ARGS...`, and returns all that it says.
    pub fn text(&self, command: &str, args: &[&str]) -> Result<String> {
        let (status, said) = self.run(command, args)?;
        ensure!(
            status.success(),
            "nvme {command} {args:?}: {status}\n{said}"
        );
        Ok(said)
    }

    /// What a command says that must fail.
    pub fn refused(&self, command: &str, args: &[&str]) -> Result<String> {
        let (status, said) = self.run(command, args)?;
        let has_failed = status.code().is_some_and(|code| code != 0);
        ensure!(has_failed, "nvme {command} {args:?}: {status}\n{said}");
        Ok(said)
    }

    /// Runs a line as it is typed in a shell in that folder.
    pub fn typed(&self, line: &str, folder: &Path) -> Result<()> {
        let mut words = line.split_whitespace();
        ensure!(words.next() == Some("nvme"), "another program: {line}");
        let mut nvme = self.program();
        nvme.args(words).current_dir(folder);
        process::text(&mut nvme, LIMIT).map(drop)
    }

    /// Runs a command with JSON as its output's format.
    pub fn json(&self, command: &str, args: &[&str]) -> Result<Value> {
        let args = [args, &["--output-format=json"]].concat();
        let output = self.bytes(command, &args)?;
        serde_json::from_slice(&output).with_context(|| {
            let output = String::from_utf8_lossy(&output);
            format!("nvme {command} {args:?}: {output}")
        })
    }

    /// Runs a command that writes data.
    pub fn bytes(&self, command: &str, args: &[&str]) -> Result<Vec<u8>> {
        process::output(&mut self.command(command, args), LIMIT)
    }

    fn run(&self, command: &str, args: &[&str]) -> Result<(ExitStatus, String)> {
        let mut said = Vec::new();
        let mut command = self.command(command, args);
        let ended = process::lines(command.stderr(Stdio::piped()), LIMIT, |line| {
            said.push(line.to_owned());
        })?;
        Ok((ended.status, said.join("\n")))
    }

    fn command(&self, command: &str, args: &[&str]) -> Command {
        let mut nvme = self.program();
        nvme.arg(command).arg(&self.device).args(args);
        nvme
    }

    fn program(&self) -> Command {
        let mut nvme = self.sysroot.command("usr/sbin/nvme", "nvme");
        nvme.env("LD_PRELOAD", self.folder.path().join("mctp_socket.so"));
        nvme.env(LINE, &self.line);
        nvme
    }
}

fn make(work: &Path, suite: &str) -> Result<()> {
    let result = work.join("result");
    let apt = PrivateApt::open(&work.join("apt"), suite)?;
    for package in apt.download_with_dependencies(&[PACKAGE])? {
        let name = package.file_name().unwrap_or_default().to_string_lossy();
        if [PACKAGE, "lib", "zlib"]
            .iter()
            .any(|kind| name.starts_with(kind))
        {
            debian::unpack(&package, &result)?;
        }
    }
    debian::merge_usr(&result)
}
