//! The journal of a volatile device: what happened since the last cut.
//!
//! A header says how much of it the visible file shows. A record is written whole, then the visible
//! file changes, then the header. So behind the header's position there is at most one record,
//! perhaps torn.

use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::io::Errno;

use super::{write_all, zero};

pub(crate) const HEADER_BYTES: u64 = 4096;
const RECORD_HEADER_BYTES: usize = 48;
const MARK: u64 = u64::from_le_bytes(*b"volatile");
/// No write, and no flush's list of exceptions, is longer.
const MAX_BODY_BYTES: u64 = 64 << 20;

const WRITE: u64 = 1;
const ZERO: u64 = 2;
const FLUSH: u64 = 3;
const DURABLE: u64 = 4;

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum JournalRecord<'a> {
    Write {
        offset_bytes: u64,
        bytes: &'a [u8],
    },
    Zero {
        offset_bytes: u64,
        len_bytes: u64,
    },
    /// Everything recorded before a position is durable, except these records.
    Flush {
        before: u64,
        but: &'a [u64],
    },
    /// The write recorded at this position is durable.
    Durable {
        at: u64,
    },
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Read {
    pub(crate) at: u64,
    kind: u64,
    first: u64,
    second: u64,
    body: Vec<u8>,
}

impl Read {
    pub(crate) fn record<'a>(&'a self, words: &'a mut Vec<u64>) -> Option<JournalRecord<'a>> {
        Some(match self.kind {
            WRITE => JournalRecord::Write {
                offset_bytes: self.first,
                bytes: &self.body,
            },
            ZERO => JournalRecord::Zero {
                offset_bytes: self.first,
                len_bytes: self.second,
            },
            FLUSH => {
                words.clear();
                words.extend(self.body.chunks_exact(8).map(word));
                JournalRecord::Flush {
                    before: self.first,
                    but: words,
                }
            }
            DURABLE => JournalRecord::Durable { at: self.first },
            _ => return None,
        })
    }

    pub(crate) fn end(&self) -> u64 {
        self.at + RECORD_HEADER_BYTES as u64 + self.body.len() as u64
    }
}

fn word(bytes: &[u8]) -> u64 {
    bytes.try_into().map_or(0, u64::from_le_bytes)
}

fn checksum(header: &[u8], body: &[u8], at: u64) -> u64 {
    let mut sum = at ^ MARK;
    for part in [header, body] {
        for chunk in part.chunks(8) {
            let mut bytes = [0; 8];
            bytes[..chunk.len()].copy_from_slice(chunk);
            sum = (sum ^ u64::from_le_bytes(bytes)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            sum ^= sum >> 29;
        }
    }
    sum
}

#[derive(Debug)]
pub(crate) struct WriteJournal {
    fd: OwnedFd,
}

impl WriteJournal {
    pub(crate) fn new(fd: OwnedFd) -> Self {
        Self { fd }
    }

    pub(crate) fn fd(&self) -> &OwnedFd {
        &self.fd
    }

    /// The next record's position, after [`WriteJournal::complete`].
    pub(crate) fn end(&self) -> Result<u64, Errno> {
        let mut shown = [0; 8];
        let n = rustix::io::pread(&self.fd, &mut shown, 0)?;
        if n < shown.len() {
            return Err(Errno::IO);
        }
        Ok(u64::from_le_bytes(shown).max(HEADER_BYTES))
    }

    /// Appends a record and applies it to the visible file. Returns its position.
    pub(crate) fn append(
        &mut self,
        visible: BorrowedFd<'_>,
        record: &JournalRecord<'_>,
    ) -> Result<u64, Errno> {
        let at = self.end()?;
        let words: Vec<u8>;
        let (kind, first, second, body) = match *record {
            JournalRecord::Write {
                offset_bytes,
                bytes,
            } => (WRITE, offset_bytes, 0, bytes),
            JournalRecord::Zero {
                offset_bytes,
                len_bytes,
            } => (ZERO, offset_bytes, len_bytes, &[][..]),
            JournalRecord::Flush { before, but } => {
                words = but.iter().flat_map(|at| at.to_le_bytes()).collect();
                (FLUSH, before, 0, &words[..])
            }
            JournalRecord::Durable { at } => (DURABLE, at, 0, &[][..]),
        };
        let mut text = Vec::with_capacity(RECORD_HEADER_BYTES + body.len());
        for number in [MARK, kind, first, second, body.len() as u64] {
            text.extend_from_slice(&number.to_le_bytes());
        }
        let sum = checksum(&text, body, at);
        text.extend_from_slice(&sum.to_le_bytes());
        text.extend_from_slice(body);
        write_all(&self.fd, at, &text)?;
        apply(visible, record)?;
        self.set_end(at + text.len() as u64)?;
        Ok(at)
    }

    /// Repairs a death in [`WriteJournal::append`]: applies the last record to the visible file, or
    /// removes a torn one.
    pub(crate) fn complete(&mut self, visible: BorrowedFd<'_>) -> Result<(), Errno> {
        let end = self.end()?;
        if self.len()? <= end {
            return Ok(());
        }
        match self.read(end)? {
            Some(read) => {
                if let Some(record) = read.record(&mut Vec::new()) {
                    apply(visible, &record)?;
                }
                self.set_end(read.end())
            }
            None => rustix::fs::ftruncate(&self.fd, end),
        }
    }

    pub(crate) fn read(&self, at: u64) -> Result<Option<Read>, Errno> {
        let mut header = [0; RECORD_HEADER_BYTES];
        if !self.read_all(at, &mut header)? {
            return Ok(None);
        }
        let number = |index: usize| word(&header[8 * index..8 * index + 8]);
        if number(0) != MARK || number(4) > MAX_BODY_BYTES {
            return Ok(None);
        }
        let mut body = vec![0; number(4) as usize];
        let whole = self.read_all(at + RECORD_HEADER_BYTES as u64, &mut body)?;
        if !whole || number(5) != checksum(&header[..RECORD_HEADER_BYTES - 8], &body, at) {
            return Ok(None);
        }
        Ok(Some(Read {
            at,
            kind: number(1),
            first: number(2),
            second: number(3),
            body,
        }))
    }

    pub(crate) fn clear(&mut self) -> Result<(), Errno> {
        rustix::fs::ftruncate(&self.fd, HEADER_BYTES)?;
        self.set_end(HEADER_BYTES)
    }

    fn set_end(&self, end: u64) -> Result<(), Errno> {
        write_all(&self.fd, 0, &end.to_le_bytes())
    }

    fn len(&self) -> Result<u64, Errno> {
        let size = rustix::fs::fstat(&self.fd)?.st_size;
        Ok(u64::try_from(size).unwrap_or(0))
    }

    fn read_all(&self, at: u64, into: &mut [u8]) -> Result<bool, Errno> {
        let mut done = 0;
        while done < into.len() {
            match rustix::io::pread(&self.fd, &mut into[done..], at + done as u64) {
                Ok(0) => return Ok(false),
                Ok(n) => done += n,
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno),
            }
        }
        Ok(true)
    }
}

fn apply(visible: BorrowedFd<'_>, record: &JournalRecord<'_>) -> Result<(), Errno> {
    match *record {
        JournalRecord::Write {
            offset_bytes,
            bytes,
        } => write_all(visible, offset_bytes, bytes),
        JournalRecord::Zero {
            offset_bytes,
            len_bytes,
        } => zero(visible, offset_bytes, len_bytes),
        JournalRecord::Flush { .. } | JournalRecord::Durable { .. } => Ok(()),
    }
}
