//! Debian's packages of a Ceph release, unpacked in the cache.
//!
//! Nothing is installed. Programs run with their own loader and libraries. Paths that are compiled
//! into them (plugins, object classes, the manager's modules) are options of `ceph.conf`.

use std::ffi::OsStr;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::debian::{self, PrivateApt, Sysroot};
use crate::{cache, process};

const PACKAGES: [&str; 5] = ["ceph-mon", "ceph-mgr", "ceph-osd", "ceph-common", "fio"];
/// Beginnings of the names of packages to unpack. The others (perl, lvm2, sudo) only matter to an
/// installation.
const WANTED: [&str; 5] = ["ceph-", "fio_", "lib", "python3", "zlib"];
/// Also of use to an installation only.
const UNWANTED: [&str; 3] = ["libgprofng", "libperl", "librgw"];
/// The largest files and folders that images do not need.
const REMOVED: [&str; 5] = [
    "usr/bin/cephfs-data-scan",
    "usr/bin/cephfs-journal-tool",
    "usr/bin/cephfs-table-tool",
    "usr/bin/radosgw-admin",
    "usr/share/doc",
];
/// Part of the cache folder's name; change it when the content changes.
const RECIPE: &str = "1";
const LIMIT: Duration = Duration::from_secs(120);
const NO_BYTECODE: &str = "PYTHONDONTWRITEBYTECODE";
const LIBRARIES: &str = "usr/lib/x86_64-linux-gnu";
/// A folder with links to the libraries that librbd needs, without the C library.
const CLIENT: &str = "client";
/// Beginnings of the C library's files.
const LIBC: [&str; 8] = [
    "ld-linux",
    "libc.so",
    "libdl.so",
    "libm.so",
    "libpthread.so",
    "libresolv.so",
    "librt.so",
    "libutil.so",
];

/// A release of Ceph that Debian has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Release {
    /// 16.2 Pacific, of bookworm.
    V16,
    /// 18.2 Reef, of trixie.
    V18,
    /// 20.2 Tentacle, of sid.
    V20,
}

impl Release {
    /// All, oldest first.
    pub const ALL: [Self; 3] = [Self::V16, Self::V18, Self::V20];

    /// The release with this number.
    pub fn parse(number: &str) -> Result<Self> {
        Self::ALL
            .into_iter()
            .find(|release| release.number() == number)
            .with_context(|| format!("no Ceph release `{number}`; the releases are 16, 18 and 20"))
    }

    /// Its major number.
    #[must_use]
    pub fn number(self) -> &'static str {
        match self {
            Self::V16 => "16",
            Self::V18 => "18",
            Self::V20 => "20",
        }
    }

    fn suite(self) -> &'static str {
        match self {
            Self::V16 => "bookworm",
            Self::V18 => "trixie",
            Self::V20 => "sid",
        }
    }
}

/// A release's unpacked programs and libraries.
#[derive(Debug, Clone)]
pub struct Programs {
    sysroot: Sysroot,
}

impl Programs {
    /// Fetches and unpacks the release's packages if they are not in the cache.
    pub fn prepare(release: Release) -> Result<Self> {
        let name = format!("ceph-{}-{RECIPE}", release.number());
        let root = cache::get(&name, |work| make(work, release.suite()))?;
        Ok(Self::in_folder(root))
    }

    /// The program `name`, for example `rbd` or `ceph`, without arguments.
    #[must_use]
    pub fn command(&self, name: &str) -> Command {
        let path = format!("usr/bin/{name}");
        let mut command = if name == "ceph" {
            let mut python = self.sysroot.command("usr/bin/python3", "python3");
            python.arg(self.path(&path));
            python
        } else {
            self.sysroot.command(&path, name)
        };
        // Also for the manager, which contains an interpreter.
        command
            .env("PYTHONHOME", self.path("usr"))
            .env("PYTHONPATH", self.path("usr/lib/python3/dist-packages"))
            .env("PYTHONNOUSERSITE", "1")
            .env(NO_BYTECODE, "1");
        command
    }

    /// Path of an unpacked file; `path` has no leading slash.
    #[must_use]
    pub fn path(&self, path: &str) -> PathBuf {
        self.sysroot.path(path)
    }

    /// A folder with `librbd.so.1`, `librados.so.2` and the libraries that they need, except the C
    /// library. As `LD_LIBRARY_PATH` it lets an ordinary program of this machine load librbd, if the
    /// machine's C library is not older than the release's.
    #[must_use]
    pub fn client_libraries(&self) -> PathBuf {
        self.path(CLIENT)
    }

    pub(super) fn libraries(&self) -> PathBuf {
        self.path(LIBRARIES)
    }

    pub(super) fn in_folder(folder: PathBuf) -> Self {
        Self {
            sysroot: Sysroot::new(folder),
        }
    }
}

/// A shell script that runs `command` with more arguments.
pub(super) fn script(command: &Command) -> String {
    let quoted = |text: &OsStr| format!(" '{}'", text.to_string_lossy().replace('\'', "'\\''"));
    let mut script = "#!/bin/sh\nexec env".to_owned();
    for (name, value) in command.get_envs() {
        if let Some(value) = value {
            script += &format!(" {}={}", name.display(), quoted(value).trim_start());
        }
    }
    script += &quoted(command.get_program());
    script.extend(command.get_args().map(quoted));
    script + " \"$@\"\n"
}

fn make(work: &Path, suite: &str) -> Result<()> {
    if let Some(missing) = debian::unavailable() {
        bail!("missing: {missing}");
    }
    let result = work.join("result");
    let apt = PrivateApt::open(&work.join("apt"), suite)?;
    for package in apt.download_with_dependencies(&PACKAGES)? {
        let name = package
            .file_name()
            .and_then(OsStr::to_str)
            .unwrap_or_default();
        let begins = |beginning: &&str| name.starts_with(beginning);
        if WANTED.iter().any(begins) && !UNWANTED.iter().any(|unwanted| name.starts_with(unwanted))
        {
            debian::unpack(&package, &result)?;
        }
    }
    debian::merge_usr(&result)?;
    for path in REMOVED {
        let path = result.join(path);
        let removed = match path.is_dir() {
            true => std::fs::remove_dir_all(&path),
            false => std::fs::remove_file(&path),
        };
        removed.with_context(|| path.display().to_string())?;
    }
    link_client_libraries(&result)?;
    // Leaves the bytecode of all that it imports, without which it needs five times as long.
    let mut first = Programs::in_folder(result).command("ceph");
    first.arg("--version").env_remove(NO_BYTECODE);
    process::output(&mut first, LIMIT).map(drop)
}

fn link_client_libraries(root: &Path) -> Result<()> {
    let client = root.join(CLIENT);
    std::fs::create_dir(&client)?;
    let sysroot = Sysroot::new(root.to_owned());
    for library in ["librbd.so.1", "librados.so.2"] {
        let path = format!("{LIBRARIES}/{library}");
        let mut files = sysroot.libraries(&path)?;
        files.push(sysroot.path(&path));
        for file in files {
            let name = file.file_name().unwrap_or_default();
            let text = name.to_string_lossy();
            if LIBC.iter().any(|beginning| text.starts_with(beginning)) {
                continue;
            }
            // The cache's folder gets another name later.
            let target = Path::new("..").join(file.strip_prefix(root)?);
            match symlink(&target, client.join(name)) {
                Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => {
                    return Err(error.into());
                }
                _ => {}
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_script_keeps_environment_and_arguments() {
        let mut command = Command::new("sh");
        command.args(["-c", "echo \"$A|$1|$2\"", "sh", "it's"]);
        let script = script(command.env("A", "a b"));
        let mut run = Command::new("sh");
        run.args(["-c", &script, "sh", "more words"]);
        let said = process::text(&mut run, LIMIT).unwrap();
        assert_eq!(said, "a b|it's|more words\n");
    }

    #[test]
    fn releases_have_numbers() {
        for release in Release::ALL {
            assert_eq!(Release::parse(release.number()).unwrap(), release);
        }
        assert!(Release::parse("17").is_err());
    }
}
