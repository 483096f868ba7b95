//! Descriptors that the runtime watches.
//!
//! Purpose: one place that hands a descriptor to the runtime.
//! Design: the runtime's safe way in is marked deprecated, because a type could name another
//! descriptor each time it is asked; an [`OwnedFd`] can't, and closes only after it is taken out.
//! Not here: what is read or written.

use std::io;
use std::os::fd::OwnedFd;

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// Watches a descriptor, which lives as long as the result.
#[expect(
    deprecated,
    reason = "unsound for types that change their descriptor; OwnedFd does not"
)]
pub(crate) fn watch(fd: OwnedFd, interest: Interest) -> io::Result<AsyncFd<OwnedFd>> {
    AsyncFd::with_interest(fd, interest)
}
