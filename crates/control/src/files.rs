//! Small files that are replaced atomically (records beside the catalog), and lock files that keep
//! daemons apart.
//!
//! A file is written under another name, synced if it must survive a power cut, then renamed. On a
//! full disk, one that need not survive is overwritten in place.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use forebay_device::fence::{FenceError, claim_file};
use serde::{Serialize, de::DeserializeOwned};

const LOCK_PATIENCE: Duration = Duration::from_secs(2);
const LOCK_POLL: Duration = Duration::from_millis(20);

fn with_path(path: &Path, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{}: {error}", path.display()))
}

/// Atomically replaces `path` by `value` as JSON; `durable`: it survives a power cut.
pub(crate) fn write_json<T: Serialize>(path: &Path, value: &T, durable: bool) -> io::Result<()> {
    let bytes = serde_json::to_vec_pretty(value).map_err(io::Error::other)?;
    let mut temporary = path.as_os_str().to_owned();
    temporary.push(".new");
    let temporary = Path::new(&temporary);
    let write = || -> io::Result<()> {
        let mut file = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600)
            .open(temporary)?;
        file.write_all(&bytes)?;
        file.write_all(b"\n")?;
        if durable {
            file.sync_all()?;
        }
        std::fs::rename(temporary, path)?;
        if durable && let Some(folder) = path.parent() {
            File::open(folder)?.sync_all()?;
        }
        Ok(())
    };
    let written = write().inspect_err(|_| {
        // A partial file would occupy space.
        let _ = std::fs::remove_file(temporary);
    });
    match written {
        Err(error) if error.kind() == io::ErrorKind::StorageFull && !durable => {
            overwrite(path, &bytes).map_err(|_| with_path(path, &error))
        }
        written => written.map_err(|error| with_path(path, &error)),
    }
}

/// Overwrites a file in place, which needs no new space on a full disk. A single write: a process
/// that dies leaves the old text or the new.
fn overwrite(path: &Path, text: &[u8]) -> io::Result<()> {
    let file = OpenOptions::new().write(true).open(path)?;
    let old_bytes = usize::try_from(file.metadata()?.len()).unwrap_or(usize::MAX);
    let mut text = text.to_vec();
    // Trailing spaces mean nothing in JSON. Our files are much smaller.
    text.resize(old_bytes.clamp(text.len(), text.len() + 4096), b' ');
    match file.write_at(&text, 0)? {
        written if written == text.len() => Ok(()),
        _ => Err(io::ErrorKind::StorageFull.into()),
    }
}

/// `None` if there is no file.
pub(crate) fn read_json<T: DeserializeOwned>(path: &Path) -> io::Result<Option<T>> {
    let bytes = match std::fs::read(path) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(with_path(path, &error)),
    };
    serde_json::from_slice(&bytes).map(Some).map_err(|error| {
        io::Error::new(
            io::ErrorKind::InvalidData,
            format!("{}: {error}", path.display()),
        )
    })
}

/// Renames a damaged file to `<file>.damaged`, for inspection.
pub(crate) fn set_aside(path: &Path) -> io::Result<()> {
    let mut aside = path.as_os_str().to_owned();
    aside.push(".damaged");
    match std::fs::rename(path, &aside) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(with_path(path, &error)),
        _ => Ok(()),
    }
}

pub(crate) fn remove(path: &Path) -> io::Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(with_path(path, &error)),
        _ => Ok(()),
    }
}

fn in_use(lock: File, does: &str) -> io::Error {
    let mut pid = String::new();
    let _ = lock.take(20).read_to_string(&mut pid);
    let pid = pid.trim();
    let pid = if pid.is_empty() { "unknown" } else { pid };
    io::Error::new(
        io::ErrorKind::AddrInUse,
        format!("another daemon (pid {pid}) {does}"),
    )
}

/// The error says what another daemon `does`.
pub(crate) fn lock_file(base: &Path, does: &str) -> io::Result<File> {
    let mut path = base.as_os_str().to_owned();
    path.push(".lock");
    let path = PathBuf::from(path);
    let failed = |error: io::Error| {
        io::Error::new(
            error.kind(),
            format!("can't lock {}: {error}", path.display()),
        )
    };
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .open(&path)
        .map_err(failed)?;
    let begin = Instant::now();
    loop {
        match claim_file(&file, &path) {
            Ok(_) => break,
            // A process that was just killed holds it until the kernel has cleaned up. (One that
            // can't end because a device hangs is ignored.)
            Err(FenceError::Held { .. }) if begin.elapsed() < LOCK_PATIENCE => {
                std::thread::sleep(LOCK_POLL);
            }
            Err(FenceError::Held { .. }) => return Err(in_use(file, does)),
            Err(error) => return Err(failed(io::Error::other(error))),
        }
    }
    // Overwritten in place: on a full disk, a truncated file may find no space again. The pid is
    // for messages only.
    let pid = format!("{:<10}\n", std::process::id());
    if file.write_all_at(pid.as_bytes(), 0).is_err() {
        let _ = file.set_len(0);
    }
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_replaced_atomically_and_damage_is_reported() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.json");
        assert_eq!(read_json::<Vec<u8>>(&path).unwrap(), None);
        write_json(&path, &vec![1u8, 2], true).unwrap();
        write_json(&path, &vec![3u8], false).unwrap();
        assert_eq!(read_json::<Vec<u8>>(&path).unwrap(), Some(vec![3]));
        std::fs::write(&path, "[3").unwrap();
        let error = read_json::<Vec<u8>>(&path).unwrap_err();
        assert!(error.to_string().contains("x.json"), "{error}");
        write_json(&path, &vec![1u8, 2, 3], false).unwrap();
        overwrite(&path, b"[7]").unwrap();
        assert_eq!(read_json::<Vec<u8>>(&path).unwrap(), Some(vec![7]));
        overwrite(&path, b"[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]").unwrap();
        assert_eq!(read_json::<Vec<u8>>(&path).unwrap().unwrap().len(), 11);
        set_aside(&path).unwrap();
        set_aside(&path).unwrap();
        assert!(folder.path().join("x.json.damaged").exists() && !path.exists());
        remove(&path).unwrap();
        assert!(overwrite(&path, b"[1]").is_err(), "it makes no file");
    }
}
