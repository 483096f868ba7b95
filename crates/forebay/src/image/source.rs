//! The image of an import: a file, a block device or standard input.
//!
//! Holes in a file are not read. A stream's length is known only at its end; its head and tail are
//! kept for checks.

use std::fs::File;
use std::io::{ErrorKind, IsTerminal, Read, Seek, SeekFrom};
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, FileTypeExt};
use std::path::Path;
use std::time::Duration;

use rustix::event::PollFlags;

use super::format::{Ends, HEAD_BYTES, TAIL_BYTES};
use super::stream::{Idle, await_ready, is_standard, standard};
use crate::failure::{Failure, Outcome, While};

/// The sleep while a stream has no first bytes.
const HEAD_WAIT: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub(super) enum Source {
    File {
        file: File,
        bytes: u64,
        /// The file has no data before this offset.
        data_start: u64,
    },
    Stream {
        input: File,
        /// Known in advance if the shell redirected a file.
        bytes: Option<u64>,
        head: Vec<u8>,
        tail: Vec<u8>,
    },
}

#[derive(Debug, Clone, Copy)]
pub(super) struct ImagePart {
    /// 0: the image has ended.
    pub(super) bytes: usize,
    /// All zeros, which were not read.
    pub(super) is_hole: bool,
}

impl Source {
    pub(super) fn open(path: &Path) -> Outcome<Self> {
        if is_standard(path) {
            let stdin = std::io::stdin();
            if stdin.is_terminal() {
                return Err(
                    Failure::invalid("standard input is a terminal, not an image").hint(
                        "pipe an image into the command, or name a file: \
                     `ssh HOST cat IMAGE | forebay volume import - TENANT/VOLUME`",
                    ),
                );
            }
            return Self::stream(standard(stdin.as_fd())?);
        }
        let shown = path.display();
        // Opening would wait for a pipe's writer.
        let kind = std::fs::metadata(path)
            .while_doing(format!("open {shown}"))?
            .file_type();
        if !kind.is_file() && !kind.is_block_device() {
            let kind = if kind.is_dir() { "a folder, " } else { "" };
            return Err(Failure::invalid(format!(
                "{shown} is {kind}neither a file nor a block device"
            ))
            .hint("name a raw image, a block device, or `-` for standard input"));
        }
        let mut file = File::open(path).while_doing(format!("open {shown}"))?;
        // Works for block devices too.
        let bytes = file
            .seek(SeekFrom::End(0))
            .while_doing(format!("find the size of {shown}"))?;
        if bytes == 0 {
            return Err(Failure::invalid(format!("{shown} is empty")));
        }
        Ok(Self::file(file, bytes))
    }

    pub(super) fn file(file: File, bytes: u64) -> Self {
        Self::File {
            file,
            bytes,
            data_start: 0,
        }
    }

    pub(super) fn stream(mut input: File) -> Outcome<Self> {
        let metadata = input.metadata().while_doing("check standard input")?;
        let bytes = if metadata.is_file() {
            let at = input
                .stream_position()
                .while_doing("check standard input")?;
            Some(metadata.len().saturating_sub(at))
        } else {
            None
        };
        Ok(Self::Stream {
            input,
            bytes,
            head: Vec::new(),
            tail: Vec::new(),
        })
    }

    pub(super) fn bytes(&self) -> Option<u64> {
        match self {
            Self::File { bytes, .. } => Some(*bytes),
            Self::Stream { bytes, .. } => *bytes,
        }
    }

    pub(super) fn read_head(&mut self) -> Outcome {
        if let Self::Stream { input, head, .. } = self {
            head.resize(HEAD_BYTES, 0);
            let bytes = read_full(input, head, &mut || Ok(HEAD_WAIT))?;
            head.truncate(bytes);
            if bytes == 0 {
                return Err(Failure::invalid("standard input is empty"));
            }
        }
        Ok(())
    }

    /// The parts that identify the image; of a stream, as far as read.
    pub(super) fn ends(&self, bytes: u64) -> Outcome<Ends> {
        match self {
            Self::File { file, .. } => Ends::read(file, bytes),
            Self::Stream { head, tail, .. } => Ok(Ends {
                head: head.clone(),
                tail: tail.clone(),
                bytes,
            }),
        }
    }

    /// A full `chunk` from byte `at`, or the rest.
    pub(super) fn next(&mut self, at: u64, chunk: &mut [u8], idle: Idle<'_>) -> Outcome<ImagePart> {
        match self {
            Self::File {
                file,
                bytes,
                data_start,
            } => {
                let length =
                    usize::try_from(*bytes - at).map_or(chunk.len(), |left| left.min(chunk.len()));
                if *data_start <= at {
                    *data_start = next_data(file, at, *bytes);
                }
                let is_hole = *data_start >= at + length as u64;
                if !is_hole {
                    file.read_exact_at(&mut chunk[..length], at)
                        .while_doing(format!("read the image at byte {at}"))?;
                }
                Ok(ImagePart {
                    bytes: length,
                    is_hole,
                })
            }
            Self::Stream {
                input, head, tail, ..
            } => {
                let known = usize::try_from(at).ok().and_then(|at| head.get(at..));
                let known = known.unwrap_or_default();
                let known = &known[..known.len().min(chunk.len())];
                chunk[..known.len()].copy_from_slice(known);
                let bytes = known.len() + read_full(input, &mut chunk[known.len()..], idle)?;
                tail.extend_from_slice(&chunk[bytes.saturating_sub(TAIL_BYTES)..bytes]);
                tail.drain(..tail.len().saturating_sub(TAIL_BYTES));
                Ok(ImagePart {
                    bytes,
                    is_hole: false,
                })
            }
        }
    }
}

fn read_full(input: &mut File, buf: &mut [u8], idle: Idle<'_>) -> Outcome<usize> {
    let mut filled = 0;
    while filled < buf.len() {
        await_ready(input, PollFlags::IN, idle)?;
        match input.read(&mut buf[filled..]) {
            Ok(0) => break,
            Ok(bytes) => filled += bytes,
            Err(error)
                if matches!(error.kind(), ErrorKind::Interrupted | ErrorKind::WouldBlock) => {}
            Err(error) => return Err(error).while_doing("read the image from standard input"),
        }
    }
    Ok(filled)
}

/// The file's next data; `at` if the filesystem cannot tell.
fn next_data(file: &File, at: u64, end: u64) -> u64 {
    match rustix::fs::seek(file, rustix::fs::SeekFrom::Data(at)) {
        Ok(found) => found,
        // A hole up to the end.
        Err(rustix::io::Errno::NXIO) => end,
        Err(_) => at,
    }
}
