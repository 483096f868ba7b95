//! The daemon's own program: a daemon of the installed program becomes one of slot 2's program if
//! engines start from slot 2.
//!
//! It counts its attempts in a file, which a daemon that serves removes or resets. So a program
//! whose daemon does not start is given up.

use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::slots::{Firmware, Slot, SlotsRecord, image_path, verify};
use crate::files;

/// Starts of a daemon that may fail in a row.
const STARTS_MAX: u32 = 3;

/// Kept in `daemon.json`.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
struct Attempt {
    /// The installed program and its version.
    program: PathBuf,
    version: String,
    starts: u32,
    /// Why it can't be started at all.
    failed: Option<String>,
}

fn folder_of(state_dir: &Path) -> PathBuf {
    state_dir.join("firmware")
}

fn attempt_path(folder: &Path) -> PathBuf {
    folder.join("daemon.json")
}

fn attempt(folder: &Path) -> Option<Attempt> {
    files::read_json(&attempt_path(folder)).ok().flatten()
}

fn write(folder: &Path, attempt: &Attempt) -> io::Result<()> {
    files::write_json(&attempt_path(folder), attempt, true)
}

fn is_slot_2(program: &Path, folder: &Path) -> bool {
    let file = |path: &Path| {
        let there = path.metadata().ok()?;
        Some((there.dev(), there.ino()))
    };
    let own = file(program);
    own.is_some() && own == file(&image_path(folder))
}

/// The installed program and its version, if known. `own` is the running program.
#[must_use]
pub fn installed(state_dir: &Path, own: PathBuf) -> (PathBuf, Option<String>) {
    let folder = folder_of(state_dir);
    if !is_slot_2(&own, &folder) {
        return (own, Some(forebay_xlate::boundary::version().to_owned()));
    }
    match attempt(&folder) {
        Some(attempt) => (attempt.program, Some(attempt.version)),
        None => (own, None),
    }
}

/// Slot 2's program if this daemon should continue as that. Counts the attempt. `own` is the
/// running program, and `keys` are paths of public keys.
#[must_use]
pub fn follow(state_dir: &Path, keys: &[PathBuf], own: &Path) -> Option<PathBuf> {
    let folder = folder_of(state_dir);
    let record: SlotsRecord = files::read_json(&folder.join("slots.json"))
        .ok()
        .flatten()?;
    if record.next != Slot::Downloaded || is_slot_2(own, &folder) {
        return None;
    }
    let before = attempt(&folder).unwrap_or_default();
    if before.starts >= STARTS_MAX || before.failed.is_some() {
        return None;
    }
    let program = image_path(&folder);
    let (image, _) = verify(&File::open(&program).ok()?, keys).ok()?;
    if image.formats != forebay_xlate::boundary::formats() {
        return None;
    }
    let counted = Attempt {
        program: own.to_owned(),
        version: forebay_xlate::boundary::version().to_owned(),
        starts: before.starts + 1,
        failed: None,
    };
    write(&folder, &counted).ok()?;
    Some(program)
}

/// Slot 2's program can't be started: the daemon gives it up.
pub fn can_not_follow(state_dir: &Path, why: &io::Error) {
    let folder = folder_of(state_dir);
    let failed = Attempt {
        failed: Some(format!("it can't be started: {why}")),
        ..attempt(&folder).unwrap_or_default()
    };
    if let Err(error) = write(&folder, &failed) {
        eprintln!("warning: can't record that firmware slot 2 can't be started: {error}");
    }
}

impl Firmware {
    /// The daemon serves. One of the installed program falls back to slot 1 if one of slot 2's
    /// program did not.
    pub(crate) fn daemon_serves(&self, generation: u64) {
        let Some(attempt) = attempt(&self.folder) else {
            return;
        };
        let own = std::env::current_exe().unwrap_or_default();
        let noted = if is_slot_2(&own, &self.folder) {
            let reset = Attempt {
                starts: 0,
                ..attempt
            };
            write(&self.folder, &reset)
        } else {
            let is_given_up = attempt.failed.is_some() || attempt.starts >= STARTS_MAX;
            if self.next() == Slot::Downloaded && is_given_up {
                let why = attempt.failed.unwrap_or_else(|| {
                    format!("its daemon did not start, {STARTS_MAX} times in a row")
                });
                self.fall_back(generation, &why);
            }
            files::remove(&attempt_path(&self.folder))
        };
        if let Err(error) = noted {
            tracing::warn!(%error, "can't record that the daemon has started");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{firmware, stored, with_folder};
    use super::*;

    #[test]
    fn a_daemon_follows_slot_2_until_its_starts_fail() {
        with_folder(|at| async move {
            let one = firmware(&at);
            let keys = [at.join("key.pem")];
            let own = at.join("installed");
            std::fs::write(&own, "").unwrap();
            let next = || follow(&at, &keys, &own);
            stored(&one, "2.0", false).await;
            assert_eq!(next(), None, "slot 1 is active");
            one.set_next(Slot::Downloaded).await.unwrap();
            assert_eq!(follow(&at, &[], &own), None, "no key verifies it");
            let program = at.join("firmware/slot2");
            assert_eq!(follow(&at, &keys, &program), None, "it is that program");
            for _ in 0..STARTS_MAX {
                assert_eq!(next(), Some(program.clone()));
            }
            assert_eq!(next(), None);
            let version = forebay_xlate::boundary::version().to_owned();
            assert_eq!(
                installed(&at, program.clone()),
                (own.clone(), Some(version))
            );
            // This test is another program than slot 2.
            one.daemon_serves(1);
            assert_eq!(one.next(), Slot::Installed);
            assert!(one.fell_back().unwrap().why.contains("3 times"));
            assert_eq!(next(), None);

            stored(&one, "3.0", true).await;
            assert_eq!(next(), Some(program.clone()), "another image");
            can_not_follow(&at, &io::Error::other("a test"));
            assert_eq!(next(), None);
            one.daemon_serves(1);
            assert!(one.fell_back().unwrap().why.contains("a test"));
        });
    }
}
