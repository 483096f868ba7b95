//! Notifies systemd (`Type=notify`) of start and stop: one datagram to the socket named by the
//! environment (sd_notify(3)), if any.

use std::ffi::OsStr;
use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};

/// A failure is only logged.
pub(crate) fn report(what: &str) {
    let Some(socket) = std::env::var_os("NOTIFY_SOCKET") else {
        return;
    };
    if let Err(error) = send(&socket, what) {
        tracing::warn!(%error, "can't notify systemd: {what}");
    }
}

/// A name that begins with `@` is in the abstract namespace.
fn send(socket: &OsStr, what: &str) -> io::Result<()> {
    let address = match socket.as_bytes().strip_prefix(b"@") {
        Some(name) => SocketAddr::from_abstract_name(name)?,
        None => SocketAddr::from_pathname(socket)?,
    };
    let sender = UnixDatagram::unbound()?;
    sender.set_nonblocking(true)?;
    sender.send_to_addr(what.as_bytes(), &address).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn readiness_is_sent_to_path_and_abstract_sockets() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("notify");
        let name = format!("@forebay-test-{}", std::process::id());
        let address = SocketAddr::from_abstract_name(&name[1..]).unwrap();
        for (socket, listener) in [
            (path.as_os_str(), UnixDatagram::bind(&path).unwrap()),
            (
                OsStr::new(&name),
                UnixDatagram::bind_addr(&address).unwrap(),
            ),
        ] {
            send(socket, "READY=1").unwrap();
            let mut said = [0; 32];
            let length = listener.recv(&mut said).unwrap();
            assert_eq!(&said[..length], b"READY=1");
        }
        assert!(send(OsStr::new("/no/such/socket"), "READY=1").is_err());
    }
}
