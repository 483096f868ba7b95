//! What systemd is told.
//!
//! Purpose: a unit of `Type=notify` is up when the daemon serves, and going down when it stops.
//! Design: one datagram to the socket that the environment names (sd_notify(3)); without one, nothing.
//! Not here: watchdogs, descriptors kept by systemd.

use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};

/// Tells systemd something, e.g. `READY=1`. A failure is only logged.
pub(crate) fn tell(what: &str) {
    let Some(socket) = std::env::var_os("NOTIFY_SOCKET") else {
        return;
    };
    let send = || {
        let address = match socket.as_bytes().strip_prefix(b"@") {
            Some(name) => SocketAddr::from_abstract_name(name)?,
            None => SocketAddr::from_pathname(&socket)?,
        };
        UnixDatagram::unbound()?.send_to_addr(what.as_bytes(), &address)
    };
    if let Err(error) = send() {
        tracing::warn!(%error, "can't tell systemd: {what}");
    }
}
