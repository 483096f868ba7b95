//! How far a TCP stream was consumed and accepted, by the kernel's counters.
//!
//! **Design.** Consumed: bytes received in order, less those unread. Accepted: bytes acknowledged,
//! plus those queued. The peer continues meanwhile, so the counters are read until two reads agree.
//! (Sent bytes, less retransmissions and unsent ones, would be one call, but wrong if the local
//! queueing discipline drops.)

#![allow(unsafe_code)]

use std::io;
use std::mem::{MaybeUninit, offset_of};
use std::os::fd::{AsFd, AsRawFd};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct SocketFacts {
    /// Bytes that our side has read.
    pub consumed: u64,
    /// Bytes that our side has written; the peer gets all of them.
    pub accepted: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum NoFacts {
    Ended,
    Moving,
    Unknown,
}

const MAX_ROUNDS: usize = 100;
const ESTABLISHED: u8 = 1;

/// The kernel's `struct tcp_info`, which only grows at its end.
#[repr(C)]
#[derive(Clone, Copy)]
struct TcpInfo {
    state: u8,
    flags: [u8; 7],
    words: [u32; 24],
    pacing_rate: u64,
    max_pacing_rate: u64,
    bytes_acked: u64,
    bytes_received: u64,
}
const _: () = assert!(offset_of!(TcpInfo, bytes_acked) == 120);

/// The socket must have no other user.
///
/// # Errors
/// See [`NoFacts`].
pub(crate) fn read(socket: impl AsFd) -> Result<SocketFacts, NoFacts> {
    let mut before = tcp_info(&socket).map_err(|_| NoFacts::Unknown)?;
    for _ in 0..MAX_ROUNDS {
        let unread = rustix::io::ioctl_fionread(&socket).map_err(|_| NoFacts::Unknown)?;
        let queued = unacknowledged(&socket).map_err(|_| NoFacts::Unknown)?;
        let after = tcp_info(&socket).map_err(|_| NoFacts::Unknown)?;
        if after.state != ESTABLISHED {
            return Err(NoFacts::Ended);
        }
        let of = |info: &TcpInfo| (info.state, info.bytes_received, info.bytes_acked);
        if of(&before) == of(&after) {
            return Ok(SocketFacts {
                consumed: after.bytes_received.saturating_sub(unread),
                // The engine never connects, so no own SYN is acknowledged.
                accepted: after.bytes_acked.saturating_add(queued),
            });
        }
        before = after;
    }
    Err(NoFacts::Moving)
}

fn tcp_info(socket: impl AsFd) -> io::Result<TcpInfo> {
    let mut info = MaybeUninit::<TcpInfo>::zeroed();
    let mut len = size_of::<TcpInfo>() as libc::socklen_t;
    // SAFETY: `info` has room for `len` bytes, and the kernel writes no more than that.
    let result = unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_INFO,
            info.as_mut_ptr().cast(),
            &mut len,
        )
    };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    if (len as usize) < size_of::<TcpInfo>() {
        return Err(io::Error::other("the kernel's tcp_info is too short"));
    }
    // SAFETY: it was zeroed, and any bytes are a valid `TcpInfo`.
    Ok(unsafe { info.assume_init() })
}

/// Bytes that the peer has not acknowledged (SIOCOUTQ).
fn unacknowledged(socket: impl AsFd) -> io::Result<u64> {
    let mut bytes: libc::c_int = 0;
    // SAFETY: the request writes one int.
    let result = unsafe { libc::ioctl(socket.as_fd().as_raw_fd(), libc::TIOCOUTQ, &raw mut bytes) };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    u64::try_from(bytes).map_err(io::Error::other)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};

    fn pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let host = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (ours, _) = listener.accept().unwrap();
        (ours, host)
    }

    #[test]
    fn socket_counters_match_bytes_read_and_written() {
        let (mut ours, mut host) = pair();
        assert_eq!(
            read(&ours),
            Ok(SocketFacts {
                consumed: 0,
                accepted: 0
            })
        );
        rustix::net::sockopt::set_socket_send_buffer_size(&ours, 8192).unwrap();
        ours.set_nonblocking(true).unwrap();
        let (mut consumed, mut accepted) = (0, 0);
        for round in 0..200usize {
            host.write_all(&vec![1; 1 + round * 37 % 5000]).unwrap();
            // The host reads rarely, so that the socket fills up.
            if round % 3 == 0 {
                host.set_nonblocking(true).unwrap();
                while matches!(host.read(&mut [0; 70_000]), Ok(n) if n > 0) {}
                host.set_nonblocking(false).unwrap();
            }
            if let Ok(n) = ours.read(&mut vec![0; 1 + round * 101 % 4000]) {
                consumed += n as u64;
            }
            if let Ok(n) = ours.write(&vec![2; 1 + round * 911 % 60_000]) {
                accepted += n as u64;
            }
            assert_eq!(read(&ours), Ok(SocketFacts { consumed, accepted }));
        }
        assert!(accepted > 60_000 && consumed > 60_000);
    }

    #[test]
    fn a_stream_that_one_side_ended_is_ended() {
        let (ours, host) = pair();
        drop(host);
        while read(&ours) != Err(NoFacts::Ended) {
            std::thread::yield_now();
        }
        let (a, _b) = std::os::unix::net::UnixStream::pair().unwrap();
        assert_eq!(read(&a), Err(NoFacts::Unknown));
    }
}
