//! An answer's way to its client, such that a successor knows how much of it went.
//!
//! **Design.** An answer is laid into the machine file and sent from there by sendfile(2) at the file's own offset. The
//! kernel moves that offset on by what it sent, within the one call, which a death does not cut in two; and the offset is the
//! open file's, which the daemon has too. So a successor reads it: all, nothing or a part was sent, and whether
//! the client has read it does not matter. The kernel sends the file's pages themselves, so a place is used again only
//! when the client has received everything.
//!
//! **Not here:** answers with a descriptor, which sendfile can't send ([`super::talk`]).

use super::file::{ANSWER_BYTES, ANSWERS_AT, MachineFile};
use super::peek;
use rustix::fs::{SeekFrom, seek, sendfile};
use rustix::io::Errno;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

/// How far a dead engine was with an answer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Sent {
    Nothing,
    Some,
    All,
}

/// Where in the machine file the answer that is being sent lies.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Laid {
    end: u64,
}

impl Laid {
    /// Puts an answer to where the file's offset is, or can be. `None`: there is no room now.
    pub(super) fn new(file: &MachineFile, socket: impl AsFd, answer: &[u8]) -> Option<Self> {
        let first = ANSWERS_AT as u64;
        let last = first + ANSWER_BYTES as u64;
        let now = seek(file.fd(), SeekFrom::Current(0)).ok()?;
        let mut at = now.max(first).next_multiple_of(4);
        if at > last || last - at < answer.len() as u64 {
            if answer.len() > ANSWER_BYTES || peek::unreceived(socket) != Ok(0) {
                return None;
            }
            at = first;
        }
        if at != now {
            seek(file.fd(), SeekFrom::Start(at)).ok()?;
        }
        let cells = file.answers::<AtomicU32>((at - first) as usize, answer.len().div_ceil(4))?;
        for (cell, bytes) in cells.iter().zip(answer.chunks(4)) {
            let mut word = [0; 4];
            word[..bytes.len()].copy_from_slice(bytes);
            cell.store(u32::from_ne_bytes(word), Relaxed);
        }
        let end = at + answer.len() as u64;
        file.set_answer(at, end);
        Some(Self { end })
    }

    /// Sends what is left of it; how many bytes went.
    pub(super) fn send(&self, file: &MachineFile, socket: impl AsFd) -> Result<usize, Errno> {
        let now = seek(file.fd(), SeekFrom::Current(0))?;
        let left = self.end.checked_sub(now).ok_or(Errno::INVAL)?;
        sendfile(socket, file.fd(), None, left as usize)
    }
}

/// How much a dead engine sent of the answer that it was sending. `None`: it was sent in another way.
pub(super) fn sent(file: &MachineFile) -> Option<Sent> {
    let (begin, end) = file.answer()?;
    let now = seek(file.fd(), SeekFrom::Current(0)).ok()?;
    Some(match now {
        _ if now == begin => Sent::Nothing,
        _ if now == end => Sent::All,
        _ => Sent::Some,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_xlate::boundary::message::ExportId;
    use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType, recv, socketpair};
    use std::os::fd::OwnedFd;

    fn sockets() -> (OwnedFd, OwnedFd) {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None).unwrap()
    }

    #[test]
    fn the_files_offset_says_what_was_sent() {
        let file = MachineFile::create(ExportId(4), 1).unwrap();
        let (ours, theirs) = sockets();
        assert_eq!(sent(&file), None);
        let mut bytes = vec![0; ANSWER_BYTES];
        let mut read = || {
            let (n, _) = recv(&theirs, &mut bytes[..], RecvFlags::empty()).unwrap();
            bytes[..n].to_vec()
        };
        for len in [1, 20, 4097, 30_000, 50_000, ANSWER_BYTES, 3] {
            let answer: Vec<u8> = (0..len).map(|at| (at * 7 + len) as u8).collect();
            let laid = Laid::new(&file, &ours, &answer).unwrap();
            assert_eq!(sent(&file), Some(Sent::Nothing));
            let mut left = &answer[..];
            while !left.is_empty() {
                let count = laid.send(&file, &ours).unwrap();
                let state = if count < left.len() {
                    Sent::Some
                } else {
                    Sent::All
                };
                assert_eq!(sent(&file), Some(state));
                assert_eq!(read(), left[..count]);
                left = &left[count..];
            }
        }
        assert!(Laid::new(&file, &ours, &vec![0; ANSWER_BYTES + 1]).is_none());
        file.no_answer();
        assert_eq!(sent(&file), None);
    }

    #[test]
    fn what_was_sent_is_not_written_over_before_it_is_received() {
        let file = MachineFile::create(ExportId(4), 1).unwrap();
        let (ours, theirs) = sockets();
        let long = vec![1; ANSWER_BYTES - 100];
        let laid = Laid::new(&file, &ours, &long).unwrap();
        let mut count = laid.send(&file, &ours).unwrap();
        assert!(Laid::new(&file, &ours, &[2; 200]).is_none() || count < long.len());
        let mut all = vec![0; ANSWER_BYTES];
        let mut got = 0;
        while got < long.len() {
            got += recv(&theirs, &mut all[..], RecvFlags::empty()).unwrap().0;
            if count < long.len() {
                count += laid.send(&file, &ours).unwrap();
            }
        }
        assert!(Laid::new(&file, &ours, &[2; 200]).is_some());
        // Who is gone gets nothing.
        drop(theirs);
        let laid = Laid::new(&file, &ours, &[3; 8]).unwrap();
        assert_eq!(laid.send(&file, &ours), Err(Errno::PIPE));
        assert_eq!(sent(&file), Some(Sent::Nothing));
    }
}
