//! The kernel's own count of how much of a client's stream is consumed.
//!
//! With SO_PEEK_OFF, MSG_PEEK continues where the last peek ended, and a plain receive subtracts
//! the consumed bytes from that offset. The offset outlives this process: a successor that knows
//! its value before a message was consumed can tell how much is consumed.

#![allow(unsafe_code)]

use rustix::io::Errno;
use std::os::fd::{AsFd, AsRawFd};

pub(super) fn set_offset(socket: impl AsFd, offset: u32) -> Result<(), Errno> {
    let value = libc::c_int::try_from(offset).map_err(|_| Errno::INVAL)?;
    // SAFETY: the kernel reads one int, which lives across the call.
    let set = unsafe {
        libc::setsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEEK_OFF,
            (&raw const value).cast(),
            size_of::<libc::c_int>() as libc::socklen_t,
        )
    };
    match set {
        0 => Ok(()),
        _ => Err(last()),
    }
}

pub(super) fn offset(socket: impl AsFd) -> Result<u64, Errno> {
    let mut value: libc::c_int = 0;
    let mut len = size_of::<libc::c_int>() as libc::socklen_t;
    // SAFETY: the kernel stores one int and its length; both live across the call.
    let got = unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEEK_OFF,
            (&raw mut value).cast(),
            &raw mut len,
        )
    };
    match got {
        // -1 if never set.
        0 => u64::try_from(value).map_err(|_| Errno::INVAL),
        _ => Err(last()),
    }
}

fn last() -> Errno {
    let error = std::io::Error::last_os_error();
    Errno::from_io_error(&error).unwrap_or(Errno::INVAL)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};

    #[test]
    fn the_peek_offset_counts_consumed_bytes() {
        let (ours, theirs) = rustix::net::socketpair(
            AddressFamily::UNIX,
            SocketType::STREAM,
            SocketFlags::CLOEXEC,
            None,
        )
        .unwrap();
        assert!(offset(&ours).is_err(), "not set yet");
        set_offset(&ours, 0).unwrap();
        let send = |bytes: &[u8]| rustix::net::send(&theirs, bytes, SendFlags::empty()).unwrap();
        send(b"abcdef");
        send(b"ghij");
        let mut bytes = [0u8; 16];
        let mut receive = |flags, len: usize| {
            let (n, _) = rustix::net::recv(&ours, &mut bytes[..len], flags | RecvFlags::DONTWAIT)?;
            Ok::<_, Errno>(bytes[..n].to_vec())
        };
        assert_eq!(receive(RecvFlags::PEEK, 4).unwrap(), b"abcd");
        assert_eq!(receive(RecvFlags::PEEK, 16).unwrap(), b"efghij");
        assert_eq!(receive(RecvFlags::PEEK, 16), Err(Errno::AGAIN));
        assert_eq!(offset(&ours), Ok(10));
        assert_eq!(receive(RecvFlags::empty(), 4).unwrap(), b"abcd");
        assert_eq!(offset(&ours), Ok(6));
        send(b"kl");
        assert_eq!(receive(RecvFlags::PEEK, 16).unwrap(), b"kl");
        assert_eq!(offset(&ours), Ok(8));
        assert_eq!(receive(RecvFlags::empty(), 8).unwrap(), b"efghijkl");
        assert_eq!(offset(&ours), Ok(0));
    }
}
