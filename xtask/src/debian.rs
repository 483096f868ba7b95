//! Debian packages, fetched without root and outside the machine's package configuration.
//!
//! A [`PrivateApt`] has its own sources, lists, cache and empty package database, and uses the
//! machine's mirror. Packages are only unpacked; a [`Sysroot`] runs their programs with their own
//! loader and libraries. Only [`install_on_host`] needs root and changes the machine.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::process;

/// Environment variable that names a mirror if the machine's sources have none.
pub const MIRROR_VARIABLE: &str = "FOREBAY_DEBIAN_MIRROR";

const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";
const APT_LIMIT: Duration = Duration::from_secs(600);
const UNPACK_LIMIT: Duration = Duration::from_secs(120);
/// Between attempts.
const PAUSES: [Duration; 3] = [
    Duration::from_secs(2),
    Duration::from_secs(10),
    Duration::from_secs(30),
];

/// Why packages cannot be fetched here, if so.
#[must_use]
pub fn unavailable() -> Option<String> {
    if !cfg!(target_arch = "x86_64") {
        return Some("Debian packages for x86_64 can only be used on x86_64".to_owned());
    }
    for program in ["apt-get", "apt-cache", "dpkg-deb"] {
        if !process::is_installed(program) {
            return Some(format!("{program} (this is not a Debian machine)"));
        }
    }
    mirror().err().map(|error| format!("{error:#}"))
}

/// The machine's mirror of Debian's main archive.
pub fn mirror() -> Result<String> {
    if let Ok(mirror) = std::env::var(MIRROR_VARIABLE) {
        return Ok(mirror);
    }
    let release = std::fs::read_to_string("/etc/os-release").unwrap_or_default();
    let codename = release
        .lines()
        .find_map(|line| line.strip_prefix("VERSION_CODENAME="))
        .unwrap_or_default()
        .trim_matches('"');
    // This fetches nothing, and unlike `indextargets` works before the first fetch of lists.
    let indexes = process::text(
        Command::new("apt-get").args(["--print-uris", "update"]),
        APT_LIMIT,
    )?;
    choose_mirror(&indexes, codename).with_context(|| {
        format!("apt's sources have no Debian mirror; set {MIRROR_VARIABLE} to one")
    })
}

/// Prefers the mirror with the machine's own suite.
fn choose_mirror(indexes: &str, codename: &str) -> Option<String> {
    // 'MIRROR/dists/SUITE/main/binary-ARCHITECTURE/Packages.xz' FILE SIZE
    let with_suite = |suite: &str| {
        let middle = format!("/dists/{suite}/main/binary-");
        indexes.lines().find_map(|line| {
            let (mirror, _) = line.strip_prefix('\'')?.split_once(&middle)?;
            Some(mirror.to_owned())
        })
    };
    [codename, "stable", "testing", "unstable", "sid"]
        .into_iter()
        .filter(|suite| !suite.is_empty())
        .find_map(with_suite)
}

/// An apt with all its state in one folder.
#[derive(Debug)]
pub struct PrivateApt {
    folder: PathBuf,
    /// The preferred suite, if there are several.
    target: Option<String>,
}

impl PrivateApt {
    /// An apt for `suite` (for example `trixie`) in `folder`; fetches the lists.
    pub fn open(folder: &Path, suite: &str) -> Result<Self> {
        Self::open_suites(folder, &[suite])
    }

    /// An apt for several suites; the last has priority.
    pub fn open_suites(folder: &Path, suites: &[&str]) -> Result<Self> {
        let folder = std::path::absolute(folder)?;
        for sub in [
            "state/lists/partial",
            "cache/archives/partial",
            "none",
            "log",
        ] {
            std::fs::create_dir_all(folder.join(sub))
                .with_context(|| format!("cannot create {}/{sub}", folder.display()))?;
        }
        let signed_by = if Path::new(KEYRING).exists() {
            format!("[signed-by={KEYRING}] ")
        } else {
            String::new()
        };
        let mirror = mirror()?;
        let sources = suites
            .iter()
            .map(|suite| format!("deb {signed_by}{mirror} {suite} main\n"));
        std::fs::write(folder.join("sources.list"), sources.collect::<String>())?;
        std::fs::write(folder.join("status"), "")?;
        let target = match suites {
            [_, .., last] => Some((*last).to_owned()),
            _ => None,
        };
        let apt = Self { folder, target };
        apt.run("apt-get", &["-qq", "update"])
            .with_context(|| format!("cannot read Debian's package lists of {suites:?}"))?;
        Ok(apt)
    }

    /// Downloads packages with their dependencies; returns all package files.
    pub fn download_with_dependencies(&self, packages: &[&str]) -> Result<Vec<PathBuf>> {
        let archives = self.folder.join("cache/archives");
        let mut args = vec![
            "-qq",
            "-y",
            "--no-install-recommends",
            "--download-only",
            "install",
        ];
        if let Some(target) = &self.target {
            args.extend(["-t", target]);
        }
        args.extend(packages);
        self.run("apt-get", &args)?;
        let mut files = Vec::new();
        for entry in std::fs::read_dir(&archives)? {
            let path = entry?.path();
            if path.extension().is_some_and(|ending| ending == "deb") {
                files.push(path);
            }
        }
        files.sort();
        Ok(files)
    }

    /// Downloads one package into `into`.
    pub fn download_only(&self, package: &str, into: &Path) -> Result<PathBuf> {
        std::fs::create_dir_all(into)?;
        let mut command = self.command("apt-get");
        command.args(["-qq", "download", package]).current_dir(into);
        again(|| process::output(&mut command, APT_LIMIT))?;
        let beginning = format!("{package}_");
        for entry in std::fs::read_dir(into)? {
            let entry = entry?;
            if entry.file_name().to_string_lossy().starts_with(&beginning) {
                return Ok(entry.path());
            }
        }
        bail!("apt-get download {package} produced no file");
    }

    /// Names of direct dependencies.
    pub fn dependencies(&self, package: &str) -> Result<Vec<String>> {
        let said = self.run("apt-cache", &["depends", package])?;
        Ok(said
            .lines()
            .filter_map(|line| line.trim().strip_prefix("Depends: "))
            .map(str::to_owned)
            .collect())
    }

    fn run(&self, program: &str, args: &[&str]) -> Result<String> {
        again(|| process::text(self.command(program).args(args), APT_LIMIT))
    }

    fn command(&self, program: &str) -> Command {
        let at = |sub: &str| self.folder.join(sub).display().to_string();
        let mut command = Command::new(program);
        for option in [
            format!("Dir::Etc::SourceList={}", at("sources.list")),
            format!("Dir::Etc::SourceParts={}", at("none")),
            format!("Dir::State={}", at("state")),
            format!("Dir::State::status={}", at("status")),
            format!("Dir::Cache={}", at("cache")),
            format!("Dir::Log={}", at("log")),
            "APT::Architecture=amd64".to_owned(),
            "APT::Sandbox::User=".to_owned(),
            "Acquire::Languages=none".to_owned(),
            "Acquire::Retries=3".to_owned(),
            "Acquire::IndexTargets::deb::DEP-11::DefaultEnabled=false".to_owned(),
        ] {
            command.arg("-o").arg(option);
        }
        command.env("LC_ALL", "C");
        command
    }
}

/// Retries when a mirror fails.
fn again<T>(mut what: impl FnMut() -> Result<T>) -> Result<T> {
    for pause in PAUSES {
        match what() {
            Ok(value) => return Ok(value),
            Err(error) => eprintln!("trying again in {} s: {error:#}", pause.as_secs()),
        }
        std::thread::sleep(pause);
    }
    what()
}

/// Unpacks a package into `into`; runs no scripts.
pub fn unpack(package: &Path, into: &Path) -> Result<()> {
    std::fs::create_dir_all(into)?;
    let mut command = Command::new("dpkg-deb");
    command.arg("-x").arg(package).arg(into);
    process::output(&mut command, UNPACK_LIMIT).map(drop)
}

/// Moves libraries in `/lib` to `/usr/lib`, where a [`Sysroot`] finds them: some packages of bookworm
/// still have them there.
pub fn merge_usr(root: &Path) -> Result<()> {
    let lib = std::fs::symlink_metadata(root.join("lib"));
    if !lib.is_ok_and(|lib| lib.is_dir()) {
        return Ok(());
    }
    let mut merge = Command::new("cp");
    merge.args(["-a", "lib/.", "usr/lib"]).current_dir(root);
    process::output(&mut merge, UNPACK_LIMIT)?;
    std::fs::remove_dir_all(root.join("lib")).context("cannot remove the old folder")
}

/// Unpacked packages, run with their own loader and libraries.
#[derive(Debug, Clone)]
pub struct Sysroot {
    folder: PathBuf,
}

impl Sysroot {
    /// Packages in `folder`, including the C library.
    #[must_use]
    pub fn new(folder: PathBuf) -> Self {
        Self { folder }
    }

    /// Path of a file; `path` has no leading slash.
    #[must_use]
    pub fn path(&self, path: &str) -> PathBuf {
        self.folder.join(path)
    }

    /// The program `path` with `name` as its argument 0.
    #[must_use]
    pub fn command(&self, path: &str, name: &str) -> Command {
        let mut command = self.loader();
        command.args(["--argv0", name]).arg(self.path(path));
        command
    }

    /// Libraries of a program, found by its own loader.
    pub fn libraries(&self, path: &str) -> Result<Vec<PathBuf>> {
        let mut command = self.loader();
        command.arg("--list").arg(self.path(path));
        let said = process::text(&mut command, UNPACK_LIMIT)?;
        let mut libraries = Vec::new();
        for line in said.lines() {
            // "name => file (address)", or "file (address)" for the loader itself
            let Some((name, file)) = line.split_once(" => ") else {
                continue;
            };
            let file = file.split(" (").next().unwrap_or_default();
            if !file.starts_with('/') {
                bail!("{path} needs {}, which no package contains", name.trim());
            }
            libraries.push(PathBuf::from(file));
        }
        Ok(libraries)
    }

    fn loader(&self) -> Command {
        let libraries = [
            "usr/lib/x86_64-linux-gnu",
            "usr/lib/x86_64-linux-gnu/ceph",
            "usr/lib/x86_64-linux-gnu/systemd",
        ];
        let libraries: Vec<String> = libraries
            .iter()
            .map(|path| self.path(path).display().to_string())
            .collect();
        // The link in lib64 is absolute in some releases.
        let loader = "usr/lib/x86_64-linux-gnu/ld-linux-x86-64.so.2";
        let mut command = Command::new(self.path(loader));
        command.arg("--library-path").arg(libraries.join(":"));
        command
    }
}

/// Installs missing programs if possible; `needed` pairs programs with packages.
pub fn install_on_host(needed: &[(&str, &str)]) -> Result<()> {
    let missing = |needed: &[(&str, &str)]| -> Vec<String> {
        needed
            .iter()
            .filter(|(program, _)| !process::is_installed(program))
            .map(|(_, package)| (*package).to_owned())
            .collect()
    };
    let packages = missing(needed);
    if packages.is_empty() {
        return Ok(());
    }
    let list = packages.join(" ");
    if !process::is_installed("apt-get") {
        bail!("missing: {list} (no apt-get here to install them with)");
    }
    if !rustix::process::geteuid().is_root() {
        bail!("missing: {list} (as root: apt-get install --no-install-recommends {list})");
    }
    eprintln!("installing {list}");
    let apt = |args: &[&str]| {
        let mut command = Command::new("apt-get");
        command.args(args).env("DEBIAN_FRONTEND", "noninteractive");
        process::output(&mut command, APT_LIMIT)
    };
    // One unreachable source must not prevent the rest.
    if let Err(error) = apt(&["-qq", "update"]) {
        eprintln!("warning: {error:#}");
    }
    let mut install = vec!["-qq", "-y", "--no-install-recommends", "install"];
    install.extend(packages.iter().map(String::as_str));
    again(|| apt(&install)).with_context(|| format!("cannot install {list}"))?;
    let still = missing(needed);
    if !still.is_empty() {
        bail!("still missing after the installation: {}", still.join(" "));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::choose_mirror;

    #[test]
    fn the_mirror_has_the_installed_suite() {
        let indexes = "\
            'http://s.example/security/dists/bookworm-security/main/binary-amd64/Packages.xz' a 0\n\
            'http://o.example/linux/dists/bookworm/stable/binary-amd64/Packages.gz' b 0\n\
            'http://m.example/debian/dists/bookworm/InRelease' c 0\n\
            'http://m.example/debian/dists/bookworm/main/binary-amd64/Packages.xz' d 0\n";
        let mirror = Some("http://m.example/debian".to_owned());
        assert_eq!(choose_mirror(indexes, "bookworm"), mirror);
        assert_eq!(choose_mirror(indexes, "trixie"), None);
        assert_eq!(choose_mirror(indexes, ""), None);
        let stable = indexes.replace("/bookworm/main", "/stable/main");
        assert_eq!(choose_mirror(&stable, "trixie"), mirror);
    }
}
