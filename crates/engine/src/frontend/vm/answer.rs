//! Sends an answer so that a successor knows how much was sent.
//!
//! sendmmsg(2) stores the sent length in the caller's memory before it returns, and a killed thread
//! ends only on return from a call. With that structure in the VM file ([`Note`]), the file
//! has the length whenever this process dies. The structure's pointers mean nothing to a successor.

#![allow(unsafe_code)]

use rustix::io::Errno;
use std::mem::offset_of;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering::*};

const WORDS: usize = size_of::<libc::mmsghdr>() / 8;
const LEN_WORD: usize = offset_of!(libc::mmsghdr, msg_len) / 8;
const _: () = assert!(size_of::<libc::mmsghdr>() == WORDS * 8 && align_of::<libc::mmsghdr>() == 8);
const _: () = assert!(offset_of!(libc::mmsghdr, msg_len).is_multiple_of(8));

/// The kernel's note of a message: a `struct mmsghdr` as words of a VM file.
pub(super) type Note = [AtomicU64; WORDS];

pub(super) fn clear(note: &Note) {
    note[LEN_WORD].store(0, Release);
}

pub(super) fn sent(note: &Note) -> u64 {
    note[LEN_WORD].load(Relaxed) & u64::from(u32::MAX)
}

/// Room for one descriptor: a `struct cmsghdr`.
#[repr(C, align(8))]
struct AncillaryBuffer([u8; 24]);

/// Sends bytes and a descriptor without blocking; returns the length, which the note has, too.
pub(super) fn send(
    socket: impl AsFd,
    bytes: &[u8],
    fd: Option<BorrowedFd<'_>>,
    note: &Note,
) -> Result<usize, Errno> {
    let mut control = AncillaryBuffer([0; 24]);
    let mut piece = libc::iovec {
        iov_base: bytes.as_ptr().cast_mut().cast(),
        iov_len: bytes.len(),
    };
    // SAFETY: plain numbers and pointers, for which zeros are valid.
    let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
    header.msg_iov = &raw mut piece;
    header.msg_iovlen = 1;
    if let Some(fd) = fd {
        header.msg_control = (&raw mut control).cast();
        header.msg_controllen = control.0.len();
        // SAFETY: the buffer is aligned, and as long as one descriptor needs (CMSG_SPACE is
        // asserted below).
        unsafe {
            debug_assert_eq!(libc::CMSG_SPACE(4) as usize, control.0.len());
            let first = libc::CMSG_FIRSTHDR(&raw const header);
            (*first).cmsg_level = libc::SOL_SOCKET;
            (*first).cmsg_type = libc::SCM_RIGHTS;
            (*first).cmsg_len = libc::CMSG_LEN(4) as usize;
            libc::CMSG_DATA(first)
                .cast::<libc::c_int>()
                .write_unaligned(fd.as_raw_fd());
        }
    }
    let place = ptr::from_ref(note).cast_mut().cast::<libc::mmsghdr>();
    // SAFETY: the atomic words have the struct's size and alignment and allow writes behind a
    // shared reference. No other thread stores there.
    unsafe { (&raw mut (*place).msg_hdr).write(header) };
    clear(note);
    let flags = libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT;
    // SAFETY: all that the header points to lives across the call; the kernel stores only the
    // length.
    let count = unsafe { libc::sendmmsg(socket.as_fd().as_raw_fd(), place, 1, flags) };
    match count {
        1 => Ok(sent(note) as usize),
        _ => Err(std::io::Error::last_os_error()
            .raw_os_error()
            .map_or(Errno::IO, Errno::from_raw_os_error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::{
        AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SocketFlags,
        SocketType, recv, recvmsg, socketpair,
    };
    use std::mem::MaybeUninit;

    fn pair() -> (std::os::fd::OwnedFd, std::os::fd::OwnedFd) {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None).unwrap()
    }

    #[test]
    fn sent_bytes_are_recorded() {
        let note = Note::default();
        let (ours, theirs) = pair();
        assert_eq!(send(&ours, b"four", None, &note), Ok(4));
        assert_eq!(sent(&note), 4);
        clear(&note);
        assert_eq!(sent(&note), 0);
        let own = rustix::fs::memfd_create("own", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        assert_eq!(send(&ours, b"with it", Some(own.as_fd()), &note), Ok(7));
        let mut bytes = [0; 64];
        let (read, _) = recv(&theirs, &mut bytes[..4], RecvFlags::empty()).unwrap();
        assert_eq!(&bytes[..read], b"four");
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut into = [std::io::IoSliceMut::new(&mut bytes)];
        let read = recvmsg(&theirs, &mut into, &mut control, RecvFlags::CMSG_CLOEXEC).unwrap();
        assert_eq!(read.bytes, 7);
        let messages: Vec<_> = control.drain().collect();
        let [RecvAncillaryMessage::ScmRights(_)] = &messages[..] else {
            panic!("a descriptor came with it");
        };
        while send(&ours, &[7; 30_000], None, &note).is_ok() {}
        assert_eq!(send(&ours, b"more", None, &note), Err(Errno::AGAIN));
        assert_eq!(sent(&note), 0);
        drop(theirs);
        assert_eq!(send(&ours, b"more", None, &note), Err(Errno::PIPE));
        assert_eq!(sent(&note), 0);
    }
}
