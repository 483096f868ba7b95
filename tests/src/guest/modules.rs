//! Selects the kernel modules that the guest loads, with their dependencies.
//!
//! A kernel package has no `modules.dep`. So each wanted module is decompressed, and its `.modinfo`
//! names its dependencies: `key=value` entries that end with a zero byte. The guest's depmod and
//! modprobe do the rest.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};
use xtask::process;

const LIMIT: Duration = Duration::from_secs(60);

/// The modules `wanted` and their dependencies, by path. Built-in modules are skipped.
pub fn closure(folder: &Path, wanted: &[&str]) -> Result<BTreeMap<String, Vec<u8>>> {
    let files = index(folder)?;
    let mut found = BTreeMap::new();
    let mut seen = HashSet::new();
    let mut queue: Vec<String> = wanted.iter().map(|name| normal(name)).collect();
    while let Some(name) = queue.pop() {
        if !seen.insert(name.clone()) {
            continue;
        }
        let path = files
            .get(&name)
            .with_context(|| format!("the kernel has no module {name}"))?;
        let content = read(path)?;
        for (key, value) in information(&content) {
            if key == "depends" {
                let names = value.split(',').filter(|name| !name.is_empty());
                queue.extend(names.map(normal));
            }
        }
        let below = path.strip_prefix(folder)?.with_extension("");
        let below = below.display().to_string();
        let below = below.trim_end_matches(".ko").to_owned() + ".ko";
        found.insert(below, content);
    }
    Ok(found)
}

/// All modules below `folder`, by normal name.
fn index(folder: &Path) -> Result<HashMap<String, PathBuf>> {
    let mut files = HashMap::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).with_context(|| folder.display().to_string())? {
            let entry = entry?;
            let name = entry.file_name().to_string_lossy().into_owned();
            if entry.file_type()?.is_dir() {
                folders.push(entry.path());
            } else if let Some((name, "" | ".xz" | ".zst" | ".gz")) = name.split_once(".ko") {
                files.insert(normal(name), entry.path());
            }
        }
    }
    Ok(files)
}

/// Module names use `-` and `_` interchangeably.
fn normal(name: &str) -> String {
    name.replace('-', "_")
}

fn read(path: &Path) -> Result<Vec<u8>> {
    let program = match path.extension().and_then(|ending| ending.to_str()) {
        Some("xz") => "xz",
        Some("zst") => "zstd",
        Some("gz") => "gzip",
        _ => return std::fs::read(path).with_context(|| path.display().to_string()),
    };
    process::output(Command::new(program).arg("-dcq").arg(path), LIMIT)
}

/// The entries of a module's `.modinfo` section.
fn information(module: &[u8]) -> impl Iterator<Item = (&str, &str)> {
    module
        .split(|byte| *byte == 0)
        .filter_map(|entry| std::str::from_utf8(entry).ok()?.split_once('='))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn module_dependencies_are_included() {
        let folder = tempfile::tempdir().unwrap();
        let write = |path: &str, content: &[u8]| {
            let path = folder.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, content).unwrap();
        };
        write(
            "kernel/a/top-one.ko",
            b"\x7fELF\0\xff\0license=GPL\0depends=mid_two,low\0x",
        );
        write("kernel/b/mid-two.ko", b"\0depends=low\0");
        write("kernel/b/low.ko", b"\0depends=\0");
        write("kernel/b/other.ko", b"");
        let found = closure(folder.path(), &["top_one"]).unwrap();
        let paths: Vec<&str> = found.keys().map(String::as_str).collect();
        assert_eq!(
            paths,
            [
                "kernel/a/top-one.ko",
                "kernel/b/low.ko",
                "kernel/b/mid-two.ko"
            ]
        );
        assert!(closure(folder.path(), &["nowhere"]).is_err());
    }
}
