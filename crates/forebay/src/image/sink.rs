//! The image of an export: a new file, with holes for zeros, or standard output.

use std::fs::File;
use std::io::{ErrorKind, IsTerminal, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use rustix::event::PollFlags;
use rustix::fs::{FileType, OFlags};

use super::stream::{Idle, await_ready, is_standard, standard};
use super::transfer::runs;
use crate::failure::{Failure, Outcome, While};

/// The usual block size of filesystems.
const GRANULE_BYTES: usize = 4096;
/// PIPE_BUF: a ready pipe takes this much without blocking.
const PIECE_BYTES: usize = 4096;
const ZEROS_BYTES: usize = 64 * 1024;

#[derive(Debug)]
pub(super) enum Sink {
    File(NewFile),
    Stream(File),
}

impl Sink {
    pub(super) fn create(path: &Path) -> Outcome<Self> {
        if !is_standard(path) {
            return NewFile::create(path).map(Self::File);
        }
        let stdout = std::io::stdout();
        if stdout.is_terminal() {
            return Err(Failure::new(
                "standard output is a terminal: Forebay does not write an image to it",
            )
            .hint(
                "redirect it to a file or a pipe: \
                 `forebay volume export TENANT/VOLUME - | zstd > IMAGE.zst`",
            ));
        }
        let output = standard(stdout.as_fd())?;
        if is_closed(&output)? {
            return Err(
                Failure::new("standard output is closed: the image would be lost")
                    .hint("redirect it to a file or a pipe"),
            );
        }
        Ok(Self::Stream(output))
    }

    /// Appends `data`, which begins at byte `at`.
    pub(super) fn write(&mut self, at: u64, data: &[u8], idle: Idle<'_>) -> Outcome {
        match self {
            Self::File(NewFile { file, .. }) => {
                for run in runs(data, GRANULE_BYTES).filter(|run| !run.zero) {
                    let bytes = &data[run.start..run.start + run.bytes];
                    file.write_all_at(bytes, at + run.start as u64)
                        .while_doing("write the image")?;
                }
                Ok(())
            }
            Self::Stream(output) => data
                .chunks(PIECE_BYTES)
                .try_for_each(|piece| write_piece(output, piece, idle)),
        }
    }

    pub(super) fn skip(&mut self, mut bytes: u64, idle: Idle<'_>) -> Outcome {
        if matches!(self, Self::File(_)) {
            return Ok(());
        }
        let zeros = [0; ZEROS_BYTES];
        while bytes > 0 {
            let some = bytes.min(ZEROS_BYTES as u64);
            self.write(0, &zeros[..some as usize], idle)?;
            idle()?;
            bytes -= some;
        }
        Ok(())
    }

    pub(super) fn finish(&mut self, bytes: u64) -> Outcome {
        match self {
            Self::File(image) => {
                image
                    .file
                    .set_len(bytes)
                    .while_doing("set the image's size")?;
                image.file.sync_all().while_doing("write the image")?;
                image.is_complete = true;
            }
            Self::Stream(output) => {
                // Some filesystems report a failed write only now. Pipes cannot be synced.
                if output.metadata().is_ok_and(|metadata| metadata.is_file()) {
                    output
                        .sync_all()
                        .while_doing("write the image to standard output")?;
                }
            }
        }
        Ok(())
    }
}

/// Whether standard output was closed. The runtime opens it as `/dev/null` for reading and writing;
/// a shell's `> /dev/null` is write-only.
fn is_closed(output: &File) -> Outcome<bool> {
    let doing = "check standard output";
    let stat = rustix::fs::fstat(output).while_doing(doing)?;
    let flags = rustix::fs::fcntl_getfl(output).while_doing(doing)?;
    let is_null = FileType::from_raw_mode(stat.st_mode) == FileType::CharacterDevice
        && stat.st_rdev == rustix::fs::makedev(1, 3);
    Ok(is_null && flags.contains(OFlags::RDWR))
}

fn write_piece(output: &mut File, mut piece: &[u8], idle: Idle<'_>) -> Outcome {
    while !piece.is_empty() {
        await_ready(output, PollFlags::OUT, idle)?;
        match output.write(piece) {
            Ok(bytes) => piece = &piece[bytes..],
            Err(error)
                if matches!(error.kind(), ErrorKind::Interrupted | ErrorKind::WouldBlock) => {}
            Err(error) => return Err(error).while_doing("write the image to standard output"),
        }
    }
    Ok(())
}

/// Removed on drop unless complete.
#[derive(Debug)]
pub(super) struct NewFile {
    file: File,
    path: PathBuf,
    is_complete: bool,
}

impl NewFile {
    fn create(path: &Path) -> Outcome<Self> {
        if !path.exists()
            && let Some(kind) = forebay_device::mounts::device_folder(path)
        {
            return Err(Failure::invalid(format!(
                "can't create {}: {kind}, so the image would be in memory",
                path.display()
            ))
            .hint("choose a path elsewhere"));
        }
        let file = File::create_new(path);
        let is_there = (file.as_ref()).is_err_and(|error| error.kind() == ErrorKind::AlreadyExists);
        let file = file.while_doing(format!("create {}", path.display()));
        let file = file.map_err(|failure| match is_there {
            true => {
                failure.hint("an export never overwrites: remove the file, or choose another name")
            }
            false => failure,
        })?;
        Ok(Self {
            file,
            path: path.to_owned(),
            is_complete: false,
        })
    }
}

impl Drop for NewFile {
    fn drop(&mut self) {
        if !self.is_complete {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}
