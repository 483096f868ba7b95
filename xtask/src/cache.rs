//! A per-machine cache of fetched files, shared by checkouts.
//!
//! Each folder has the SHA-256 sums of its files, checked at a process's first use; a damaged
//! folder is rebuilt. Folders are renamed into place when complete, under a lock. Folders unused
//! for 30 days are removed.

use std::collections::BTreeSet;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result};
use rustix::fs::FlockOperation;

use crate::process;

/// Environment variable with the cache's folder; the default is `forebay` in `$XDG_CACHE_HOME` or
/// `~/.cache`.
pub const VARIABLE: &str = "FOREBAY_CACHE";
/// The subfolder with `make`'s result.
const RESULT: &str = "result";
const SUMS: &str = "SHA256SUMS";
const SUMS_LIMIT: Duration = Duration::from_secs(300);
const UNUSED: Duration = Duration::from_secs(30 * 24 * 3600);

/// The cache's folder.
pub fn folder() -> Result<PathBuf> {
    let named = |variable: &str| std::env::var_os(variable).map(PathBuf::from);
    let folder = named(VARIABLE)
        .or_else(|| Some(named("XDG_CACHE_HOME")?.join("forebay")))
        .or_else(|| Some(named("HOME")?.join(".cache/forebay")));
    let folder = folder.with_context(|| format!("neither HOME nor {VARIABLE} is set"))?;
    std::path::absolute(folder).context("the cache's folder")
}

/// The cached folder `name`. If missing or damaged, `make` fills the subfolder `result` of a work
/// folder.
pub fn get(name: &str, make: impl FnOnce(&Path) -> Result<()>) -> Result<PathBuf> {
    get_in(&folder()?, name, make)
}

fn get_in(cache: &Path, name: &str, make: impl FnOnce(&Path) -> Result<()>) -> Result<PathBuf> {
    static WHOLE: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());
    let finished = cache.join(name);
    let mut whole = WHOLE.lock().unwrap_or_else(PoisonError::into_inner);
    if whole.contains(&finished) {
        return Ok(finished);
    }
    std::fs::create_dir_all(cache).with_context(|| cache.display().to_string())?;
    let lock = File::create(cache.join(format!("{name}.lock")))?;
    rustix::fs::flock(&lock, FlockOperation::LockExclusive)?;
    if finished.exists() && !is_whole(&finished) {
        eprintln!("{} is damaged: making it again", finished.display());
        std::fs::remove_dir_all(&finished)?;
    }
    if !finished.exists() {
        let work = cache.join(format!("{name}.work"));
        if work.exists() {
            std::fs::remove_dir_all(&work)?;
        }
        let result = work.join(RESULT);
        std::fs::create_dir_all(&result)?;
        make(&work).with_context(|| format!("cannot make {}", finished.display()))?;
        let sum = format!("find . -type f ! -name {SUMS} -exec sha256sum {{}} + > {SUMS}");
        let mut sum_up = Command::new("sh");
        process::output(sum_up.args(["-c", &sum]).current_dir(&result), SUMS_LIMIT)?;
        std::fs::rename(&result, &finished)?;
        std::fs::remove_dir_all(&work)?;
    }
    // The sums' modification time is the last use.
    let sums = File::open(finished.join(SUMS))?;
    sums.set_modified(SystemTime::now())?;
    forget_unused(cache, UNUSED);
    whole.insert(finished.clone());
    Ok(finished)
}

fn is_whole(folder: &Path) -> bool {
    let mut check = Command::new("sha256sum");
    check
        .args(["--check", "--quiet", "--strict", SUMS])
        .current_dir(folder);
    process::output(&mut check, SUMS_LIMIT).is_ok()
}

fn forget_unused(cache: &Path, unused: Duration) {
    let Ok(entries) = std::fs::read_dir(cache) else {
        return;
    };
    for entry in entries.flatten() {
        let used = std::fs::metadata(entry.path().join(SUMS)).and_then(|sums| sums.modified());
        let is_old = used.is_ok_and(|used| used.elapsed().is_ok_and(|age| age > unused));
        if is_old {
            let _ = std::fs::remove_dir_all(entry.path());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_made_once_and_again_when_it_is_damaged() {
        let cache = std::env::temp_dir().join(format!("xtask-cache-{}", std::process::id()));
        let mut made = 0;
        // New names, as a process checks each only once.
        let mut get = |name: &str| {
            let folder = get_in(&cache, name, |work| {
                made += 1;
                std::fs::write(work.join(RESULT).join("file"), "content")?;
                Ok(())
            });
            (folder.unwrap(), made)
        };
        let (first, count) = get("one");
        assert_eq!(count, 1);
        assert_eq!(get("one"), (first.clone(), 1));

        let (second, third) = (cache.join("two"), cache.join("three"));
        for copy in [&second, &third] {
            std::fs::create_dir(copy).unwrap();
            for file in ["file", SUMS] {
                std::fs::copy(first.join(file), copy.join(file)).unwrap();
            }
        }
        assert_eq!(get("two"), (second, 1));
        std::fs::write(third.join("file"), "kontent").unwrap();
        assert_eq!(get("three").1, 2);
        assert_eq!(
            std::fs::read_to_string(third.join("file")).unwrap(),
            "content"
        );

        let old = SystemTime::now() - 2 * UNUSED;
        File::open(first.join(SUMS))
            .unwrap()
            .set_modified(old)
            .unwrap();
        forget_unused(&cache, UNUSED);
        assert!(!first.exists() && third.exists());
        std::fs::remove_dir_all(&cache).unwrap();
    }
}
