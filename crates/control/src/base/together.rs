//! Awaits several futures concurrently in one task, so that a hung device does not delay the
//! others.

use std::future::Future;
use std::future::poll_fn;
use std::pin::Pin;
use std::task::Poll;

type Running<F> = (Pin<Box<F>>, Option<<F as Future>::Output>);

/// Waits until all have ended; returns their results in order.
pub(crate) async fn join_all<F: Future>(each: impl IntoIterator<Item = F>) -> Vec<F::Output> {
    let mut running: Vec<Running<F>> = each
        .into_iter()
        .map(|future| (Box::pin(future), None))
        .collect();
    poll_fn(|context| {
        let mut all = true;
        for (future, result) in &mut running {
            if result.is_none() {
                match future.as_mut().poll(context) {
                    Poll::Ready(done) => *result = Some(done),
                    Poll::Pending => all = false,
                }
            }
        }
        if all { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
    running
        .into_iter()
        .filter_map(|(_, result)| result)
        .collect()
}
