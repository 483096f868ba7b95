//! The Debian package: `cargo xtask package`.
//!
//! Files are laid out in a folder for `dpkg-deb`; templates and scripts are in `packaging/`. The
//! program writes its own manual pages, completion and formats. Licence texts come from the crates'
//! folders.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::process;

const LIMIT: Duration = Duration::from_secs(300);

/// Paths for [`build`].
#[derive(Debug, Clone)]
pub struct Options {
    /// The repository.
    pub repository: PathBuf,
    /// The program.
    pub program: PathBuf,
    /// Folder for the package and its contents.
    pub output: PathBuf,
}

/// Builds the package; returns its path.
pub fn build(options: &Options) -> Result<PathBuf> {
    let tree = Tree {
        root: options.output.join("package"),
    };
    if tree.root.exists() {
        fs::remove_dir_all(&tree.root)?;
    }
    let version = version(&options.program)?;
    let from = |file: &str| read(&options.repository.join("packaging").join(file));
    tree.put("usr/bin/forebay", &read(&options.program)?, 0o755)?;
    // Keeps function names for crash reports; debug information is four fifths of the program.
    let mut strip = Command::new("strip");
    strip
        .arg("--strip-debug")
        .arg(tree.root.join("usr/bin/forebay"));
    process::output(&mut strip, LIMIT)?;
    tree.put(
        "usr/lib/systemd/system/forebay.service",
        &from("forebay.service")?,
        0o644,
    )?;
    tree.put(
        "usr/lib/sysusers.d/forebay.conf",
        &from("sysusers.conf")?,
        0o644,
    )?;
    tree.put(
        "usr/lib/tmpfiles.d/forebay.conf",
        &from("tmpfiles.conf")?,
        0o644,
    )?;
    tree.put("etc/forebay/forebay.toml", &from("forebay.toml")?, 0o644)?;
    written_by_itself(&tree, &options.program)?;
    documentation(&tree, &options.repository)?;
    let copyright = copyright(&options.repository)?;
    tree.put(
        "usr/share/doc/forebay/copyright",
        copyright.as_bytes(),
        0o644,
    )?;

    let architecture = process::text(Command::new("dpkg").arg("--print-architecture"), LIMIT)?;
    let architecture = architecture.trim();
    let control = String::from_utf8(from("control")?)?
        .replace("@VERSION@", &version)
        .replace("@ARCHITECTURE@", architecture)
        .replace("@INSTALLED_KIB@", &tree.kib()?.to_string())
        .replace("@GLIBC@", &glibc(&options.program)?);
    let sums = process::text(
        Command::new("sh")
            .args(["-c", "find etc usr -type f | LC_ALL=C sort | xargs md5sum"])
            .current_dir(&tree.root),
        LIMIT,
    )?;
    tree.put("DEBIAN/control", control.as_bytes(), 0o644)?;
    tree.put("DEBIAN/md5sums", sums.as_bytes(), 0o644)?;
    tree.put("DEBIAN/conffiles", b"/etc/forebay/forebay.toml\n", 0o644)?;
    let formats = process::text(Command::new(&options.program).arg("formats"), LIMIT)?;
    let end = String::from_utf8(from("end")?)?;
    for script in ["preinst", "postinst", "prerm", "postrm"] {
        let text = String::from_utf8(from(script)?)?
            .replace("@END@\n", &end)
            .replace("@FORMATS@", formats.trim());
        tree.put(&format!("DEBIAN/{script}"), text.as_bytes(), 0o755)?;
    }
    let package = options
        .output
        .join(format!("forebay_{version}_{architecture}.deb"));
    process::output(
        Command::new("dpkg-deb")
            .args(["--root-owner-group", "--build"])
            .arg(&tree.root)
            .arg(&package),
        LIMIT,
    )?;
    Ok(package)
}

struct Tree {
    root: PathBuf,
}

impl Tree {
    fn put(&self, path: &str, content: &[u8], mode: u32) -> Result<()> {
        let path = self.root.join(path);
        let doing = || path.display().to_string();
        if let Some(folder) = path.parent() {
            fs::create_dir_all(folder).with_context(doing)?;
        }
        fs::write(&path, content).with_context(doing)?;
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).with_context(doing)
    }

    fn kib(&self) -> Result<u64> {
        let said = process::text(Command::new("du").arg("-sk").arg(&self.root), LIMIT)?;
        let number = said
            .split_whitespace()
            .next()
            .context("du printed nothing")?;
        Ok(number.parse()?)
    }
}

fn read(path: &Path) -> Result<Vec<u8>> {
    fs::read(path).with_context(|| path.display().to_string())
}

fn version(program: &Path) -> Result<String> {
    let said = process::text(Command::new(program).arg("--version"), LIMIT)?;
    let version = said.trim().strip_prefix("forebay ");
    Ok(version
        .context("the program does not print its version")?
        .to_owned())
}

/// The newest required C library symbol version.
fn glibc(program: &Path) -> Result<String> {
    let content = read(program)?;
    let mark = b"GLIBC_2.";
    let mut newest = 0;
    for at in content
        .windows(mark.len())
        .enumerate()
        .filter(|(_, part)| part == mark)
    {
        let rest = &content[at.0 + mark.len()..];
        let digits = rest.iter().take_while(|byte| byte.is_ascii_digit());
        let number = digits.fold(0_u32, |n, digit| {
            n.saturating_mul(10).saturating_add(u32::from(digit - b'0'))
        });
        newest = newest.max(number);
    }
    if newest == 0 {
        bail!("{} is not linked to the C library", program.display());
    }
    Ok(format!("2.{newest}"))
}

/// Manual pages and completion.
fn written_by_itself(tree: &Tree, program: &Path) -> Result<()> {
    let pages = tree.root.join("usr/share/man/man1");
    process::output(Command::new(program).arg("man").arg(&pages), LIMIT)?;
    let mut written = Vec::new();
    let of_files = tree.root.join("usr/share/man/man5");
    fs::create_dir_all(&of_files)?;
    for page in fs::read_dir(&pages)? {
        let mut path = page?.path();
        if path.extension().is_some_and(|section| section == "5") {
            let there = of_files.join(path.file_name().unwrap_or_default());
            fs::rename(&path, &there)?;
            path = there;
        }
        written.push(path);
    }
    // -n omits name and time, for reproducible packages.
    process::output(Command::new("gzip").arg("-n9").args(&written), LIMIT)?;
    for (shell, path) in [
        ("bash", "usr/share/bash-completion/completions/forebay"),
        ("zsh", "usr/share/zsh/vendor-completions/_forebay"),
        ("fish", "usr/share/fish/vendor_completions.d/forebay.fish"),
    ] {
        let script = process::output(Command::new(program).args(["completion", shell]), LIMIT)?;
        tree.put(path, &script, 0o644)?;
    }
    Ok(())
}

fn documentation(tree: &Tree, repository: &Path) -> Result<()> {
    let pages = repository.join("docs/src");
    for page in fs::read_dir(&pages).with_context(|| pages.display().to_string())? {
        let page = page?.path();
        let name = page.file_name().unwrap_or_default().to_string_lossy();
        if page.extension().is_some_and(|ending| ending == "md") {
            tree.put(
                &format!("usr/share/doc/forebay/book/{name}"),
                &read(&page)?,
                0o644,
            )?;
        }
    }
    let api = read(&repository.join("docs/openapi.json"))?;
    tree.put("usr/share/doc/forebay/openapi.json", &api, 0o644)
}

/// Our licence and those of linked crates, each text once.
fn copyright(repository: &Path) -> Result<String> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let metadata = process::output(
        Command::new(cargo)
            .args(["metadata", "--format-version", "1", "--locked", "--offline"])
            .args(["--filter-platform", "x86_64-unknown-linux-gnu"])
            .current_dir(repository),
        LIMIT,
    )?;
    let metadata: Value = serde_json::from_slice(&metadata).context("cargo metadata")?;
    let mut texts: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for package in linked_in(&metadata) {
        let text = |key: &str| package[key].as_str().unwrap_or_default().to_owned();
        let name = format!("{} {} ({})", text("name"), text("version"), text("license"));
        let manifest = text("manifest_path");
        let folder = Path::new(&manifest).parent().unwrap_or(Path::new("."));
        for licence in licences(folder)? {
            texts.entry(licence).or_default().push(name.clone());
        }
    }
    let own = String::from_utf8_lossy(&read(&repository.join("LICENSE"))?).into_owned();
    let mut whole = format!("Forebay is distributed under these terms:\n\n{own}\n");
    for (licence, names) in texts {
        let line = "=".repeat(72);
        whole += &format!("{line}\nLinked in: {}\n\n{licence}\n", names.join(", "));
    }
    Ok(whole)
}

/// Packages that `forebay` links, except our own.
fn linked_in(metadata: &Value) -> Vec<&Value> {
    let list =
        |value: &'static str, of: &'_ Value| of[value].as_array().cloned().unwrap_or_default();
    let mut uses: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for node in list("nodes", &metadata["resolve"]) {
        let normal = |dependency: &Value| {
            let kinds = dependency["dep_kinds"]
                .as_array()
                .cloned()
                .unwrap_or_default();
            kinds.iter().any(|kind| kind["kind"].is_null())
        };
        let dependencies = list("deps", &node);
        let needed = dependencies.iter().filter(|dependency| normal(dependency));
        let needed = needed.filter_map(|dependency| dependency["pkg"].as_str());
        uses.insert(
            node["id"].as_str().unwrap_or_default().to_owned(),
            needed.map(str::to_owned).collect(),
        );
    }
    let packages = metadata["packages"]
        .as_array()
        .map_or(&[][..], Vec::as_slice);
    let root = packages.iter().find(|package| package["name"] == "forebay");
    let mut wanted: Vec<String> = root
        .and_then(|package| package["id"].as_str())
        .map(str::to_owned)
        .into_iter()
        .collect();
    let mut seen = std::collections::BTreeSet::new();
    while let Some(id) = wanted.pop() {
        if seen.insert(id.clone()) {
            wanted.extend(uses.get(&id).cloned().unwrap_or_default());
        }
    }
    let foreign = |package: &&Value| !package["source"].is_null();
    let linked = packages
        .iter()
        .filter(foreign)
        .filter(|package| package["id"].as_str().is_some_and(|id| seen.contains(id)));
    linked.collect()
}

fn licences(folder: &Path) -> Result<Vec<String>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).with_context(|| folder.display().to_string())? {
        let path = entry?.path();
        let name = path
            .file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .to_uppercase();
        let is_licence = ["LICENSE", "LICENCE", "COPYING", "NOTICE", "COPYRIGHT"]
            .iter()
            .any(|start| name.starts_with(start));
        if is_licence && path.is_file() {
            found.push(String::from_utf8_lossy(&read(&path)?).trim().to_owned());
        }
    }
    Ok(found)
}
