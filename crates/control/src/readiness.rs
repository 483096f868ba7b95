//! Registers descriptors with the async runtime. Its safe function is deprecated, because a type
//! could return a different descriptor each time; an [`OwnedFd`] can't.

use std::future::{Future, poll_fn};
use std::io;
use std::os::fd::OwnedFd;
use std::pin::pin;
use std::task::Poll;
use std::time::Duration;

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

/// Polls of the runtime before an answer counts as late: one to read it, and a few for tasks that
/// pass it on.
const POLLS: u32 = 8;

/// Like [`tokio::time::timeout`], for an answer that another task reads from a descriptor. Bytes
/// that are there at the deadline are in time: the process may have been paused.
pub(crate) async fn in_time<F: Future>(limit: Duration, answer: F) -> Option<F::Output> {
    let mut answer = pin!(answer);
    if let Ok(answer) = tokio::time::timeout(limit, &mut answer).await {
        return Some(answer);
    }
    for _ in 0..POLLS {
        tokio::task::yield_now().await;
        let now = poll_fn(|context| Poll::Ready(answer.as_mut().poll(context))).await;
        if let Poll::Ready(answer) = now {
            return Some(answer);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_that_lies_there_is_in_time() {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        let local = tokio::task::LocalSet::new();
        local.block_on(&runtime, async {
            for came in [true, false] {
                let (ours, theirs) = rustix::pipe::pipe().unwrap();
                let (sender, answer) = tokio::sync::oneshot::channel();
                tokio::task::spawn_local(async move {
                    let ours = watch(ours, Interest::READABLE).unwrap();
                    let _ = ours.readable().await;
                    let _ = sender.send(());
                });
                tokio::task::yield_now().await;
                let limit = Duration::from_millis(20);
                let waits = in_time(limit, answer);
                let (answer, ()) = tokio::join!(waits, async {
                    // The process is paused beyond the limit.
                    tokio::task::yield_now().await;
                    std::thread::sleep(3 * limit);
                    if came {
                        rustix::io::write(&theirs, b"!").unwrap();
                    }
                });
                assert_eq!(answer.is_some(), came);
            }
        });
    }
}
