//! Finds a running engine whose record was lost: the kernel tells which process listens on an
//! engine's socket, and which files it has open.

use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use super::process::{EngineRecord, EngineState, note, record_path, recorded, start_ticks};
use crate::files;
use crate::firmware::Slot;

/// Sets a damaged record aside. Without a record, finds a living engine by its socket and records
/// it again.
pub(crate) fn engine(run_dir: &Path) -> io::Result<Option<EngineRecord>> {
    let path = record_path(run_dir);
    match recorded(run_dir) {
        Ok(Some(record)) => return Ok(Some(record)),
        Ok(None) => {}
        Err(_) => {
            if let Err(error) = files::set_aside(&path) {
                tracing::warn!(%error, "can't rename a damaged file");
            }
        }
    }
    let mut living: Vec<EngineRecord> = std::fs::read_dir(run_dir)?
        .flatten()
        .filter_map(|entry| listening(&entry.path()))
        .collect();
    living.sort_by_key(|record| record.generation);
    let found = living.pop();
    if let Some(record) = &found {
        tracing::warn!(
            pid = record.pid,
            generation = record.generation,
            "found an unrecorded engine by its socket"
        );
        note(&path, record);
    }
    Ok(found)
}

fn listening(socket: &Path) -> Option<EngineRecord> {
    let name = socket.file_name()?.to_str()?;
    let generation = name.strip_prefix("engine-")?.strip_suffix(".sock")?;
    let generation = generation.parse().ok()?;
    let there = forebay_xlate::boundary::socket::connect(socket).ok()?;
    let peer = rustix::net::sockopt::socket_peercred(&there).ok()?;
    let pid = u32::try_from(peer.pid.as_raw_nonzero().get()).ok()?;
    Some(EngineRecord {
        state: EngineState::Running,
        pid: Some(pid),
        generation,
        socket: socket.to_owned(),
        start_ticks: start_ticks(pid)?,
        daemon_pid: 0,
        formats: match is_this_program(pid) {
            true => forebay_xlate::boundary::formats(),
            false => String::new(),
        },
        slot: Slot::default(),
    })
}

fn is_this_program(pid: u32) -> bool {
    let file = |process: &str| {
        let program = std::fs::metadata(format!("/proc/{process}/exe")).ok()?;
        Some((program.dev(), program.ino()))
    };
    file("self").is_some_and(|this| Some(this) == file(&pid.to_string()))
}

pub(crate) fn open_files(pid: u32) -> Vec<PathBuf> {
    let Ok(descriptors) = std::fs::read_dir(format!("/proc/{pid}/fd")) else {
        return Vec::new();
    };
    let mut paths: Vec<PathBuf> = descriptors
        .flatten()
        .filter_map(|entry| std::fs::read_link(entry.path()).ok())
        .filter(|path| {
            let kind = path.metadata().map(|there| there.file_type());
            path.is_absolute() && kind.is_ok_and(|kind| kind.is_file() || kind.is_block_device())
        })
        .collect();
    paths.sort();
    paths.dedup();
    paths
}
