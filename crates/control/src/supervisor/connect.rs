//! Connects to an engine. One that was just started inherited its end of the socket; any other
//! listens on a socket of its own.

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::Duration;

use forebay_xlate::boundary::socket;
use tokio::time::{Instant, sleep};

use super::GREET_LIMIT;
use crate::owner::Owner;
use crate::owner::session::{GreetError, Greeting, Session};

pub(super) async fn greet(owner: &Owner, fd: OwnedFd) -> Result<Greeting, GreetError> {
    let (pool, table) = {
        let core = owner.base.core.borrow();
        let table = core.grants.memory().fd().try_clone_to_owned()?;
        (core.pool.info().uuid.into_bytes(), table)
    };
    Session::greet(fd, pool, Some(table), GREET_LIMIT).await
}

pub(super) async fn connect(owner: &Owner, path: &Path) -> Result<Greeting, GreetError> {
    greet(owner, connect_socket(path, GREET_LIMIT).await?).await
}

/// Waits until the socket accepts, at most `limit`.
pub(crate) async fn connect_socket(path: &Path, limit: Duration) -> Result<OwnedFd, GreetError> {
    let begin = Instant::now();
    loop {
        match socket::connect(path) {
            Ok(fd) => return Ok(fd),
            Err(error) => {
                let later = matches!(
                    error.kind(),
                    io::ErrorKind::NotFound
                        | io::ErrorKind::ConnectionRefused
                        | io::ErrorKind::WouldBlock
                );
                if !later {
                    return Err(error.into());
                }
                if begin.elapsed() >= limit {
                    return Err(GreetError::TimedOut(limit));
                }
            }
        }
        sleep(Duration::from_millis(5)).await;
    }
}
