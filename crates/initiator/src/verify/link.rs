//! A session with one queue, which reconnects.
//!
//! Most connect errors are retried: a target that restarts may refuse, close, or not know its
//! exports yet.

use std::time::{Duration, Instant};

use super::VerifySpec;
use crate::{Error, IoQueue, Options, Session};

/// First and longest pause between attempts.
const PAUSES: (Duration, Duration) = (Duration::from_millis(10), Duration::from_millis(250));

#[derive(Debug)]
pub(super) struct VerifyLink {
    /// Before `session`, so that it is dropped first.
    pub(super) queue: IoQueue,
    pub(super) session: Session,
}

impl VerifyLink {
    pub(super) fn connect(spec: &VerifySpec) -> Result<Self, Error> {
        let options = Options {
            io_queues: 1,
            queue_entries: u32::from(spec.queue_depth) + 1,
            ..spec.options.clone()
        };
        let mut session = Session::connect(spec.addr, &spec.subnqn, &spec.hostnqn, &options)?;
        let queue = session.open_queue(spec.nsid)?;
        Ok(Self { queue, session })
    }

    pub(super) fn reconnect(spec: &VerifySpec) -> Result<Self, Error> {
        let limit = spec.reconnect_limit;
        let deadline = Instant::now() + limit;
        let mut pause = PAUSES.0;
        loop {
            let error = match Self::connect(spec) {
                Ok(link) => return Ok(link),
                Err(error @ (Error::Argument(_) | Error::System { .. })) => return Err(error),
                Err(error) => error,
            };
            if Instant::now() + pause >= deadline {
                return Err(Error::TimedOut {
                    addr: spec.addr,
                    what: format!("a new connection (last attempt: {error})"),
                    waited: limit,
                });
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(PAUSES.1);
        }
    }
}
