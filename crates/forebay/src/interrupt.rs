//! SIGINT, SIGTERM and SIGHUP for commands that must clean up.
//!
//! A thread sets a flag, which loops check; guards run. A second signal ends the process at once.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio::signal::unix::{SignalKind, signal};

use crate::failure::{Failure, Outcome, While};

#[derive(Debug, Clone)]
pub(crate) struct Interrupt(Arc<AtomicBool>);

impl Interrupt {
    /// Call it once, before anything that needs cleaning up.
    pub(crate) fn watch() -> Outcome<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_io()
            .build()
            .while_doing("start the runtime")?;
        let mut signals = {
            let _inside = runtime.enter();
            let mut signals = Vec::new();
            for kind in [
                SignalKind::interrupt(),
                SignalKind::terminate(),
                SignalKind::hangup(),
            ] {
                signals.push(signal(kind).while_doing("wait for signals")?);
            }
            signals
        };
        let flag = Arc::new(AtomicBool::new(false));
        let set = flag.clone();
        std::thread::Builder::new()
            .name("signals".to_owned())
            .spawn(move || {
                runtime.block_on(async {
                    any(&mut signals).await;
                    set.store(true, Ordering::Relaxed);
                    any(&mut signals).await;
                    std::process::exit(130);
                });
            })
            .while_doing("start a thread")?;
        Ok(Self(flag))
    }

    #[cfg(test)]
    pub(crate) fn never() -> Self {
        Self(Arc::default())
    }

    #[cfg(test)]
    pub(crate) fn raise(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    pub(crate) fn check(&self) -> Outcome {
        if self.0.load(Ordering::Relaxed) {
            Err(Failure::new("interrupted"))
        } else {
            Ok(())
        }
    }
}

async fn any(signals: &mut [tokio::signal::unix::Signal]) {
    std::future::poll_fn(|context| {
        for signal in signals.iter_mut() {
            if signal.poll_recv(context).is_ready() {
                return std::task::Poll::Ready(());
            }
        }
        std::task::Poll::Pending
    })
    .await;
}
