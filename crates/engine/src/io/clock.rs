//! The time, as of a reactor's turn.
//!
//! **Purpose.** Everything in a turn happens at one time, which is read once; so commands cost no clock of their own.
//! **Design.** Beside it stands until when the daemon was heard: who waits for the daemon is late only if a look at its socket
//! was later than the deadline.
//! **Not here:** what is done when time is over ([`crate::io::waits`]).

/// A command that waits for the daemon longer than this ends with Command Interrupted.
pub const OWNER_WAIT_LIMIT_NS: u64 = 20_000_000_000;

/// See the module's text.
#[derive(Debug)]
pub struct Clock {
    pub(crate) now_ns: u64,
    /// What the daemon had said by then is here.
    heard_ns: u64,
    /// A test's time.
    #[cfg(test)]
    fixed_ns: Option<u64>,
}

impl Clock {
    pub(crate) fn new() -> Self {
        Self {
            now_ns: monotonic_ns(),
            heard_ns: u64::MAX,
            #[cfg(test)]
            fixed_ns: None,
        }
    }

    /// Reads the time for what begins now.
    #[inline]
    pub fn stamp(&mut self) {
        self.now_ns = self.read();
    }

    #[inline]
    fn read(&self) -> u64 {
        #[cfg(test)]
        if let Some(fixed_ns) = self.fixed_ns {
            return fixed_ns;
        }
        monotonic_ns()
    }

    /// Time since `then_ns`. What ends in the turn that it began in has the clock read for it: no time is 0.
    #[inline]
    pub fn since(&self, then_ns: u64) -> u64 {
        match self.now_ns.saturating_sub(then_ns) {
            0 => self.read().saturating_sub(then_ns),
            ns => ns,
        }
    }

    /// What the daemon had said by then is here.
    pub fn owner_was_heard(&mut self, ns: u64) {
        self.heard_ns = ns;
    }

    /// The time up to which the daemon's silence is known.
    pub(crate) fn owner_heard_ns(&self) -> u64 {
        self.heard_ns.min(self.now_ns)
    }

    /// Whether the daemon was not heard to answer by then.
    pub fn owner_is_late(&self, deadline_ns: u64) -> bool {
        deadline_ns <= self.owner_heard_ns()
    }

    /// When a command that asks the daemon now has waited long enough.
    pub fn owner_deadline_ns(&self) -> u64 {
        self.now_ns + OWNER_WAIT_LIMIT_NS
    }

    /// Lets time pass in a test that makes no turns.
    #[cfg(test)]
    pub(crate) fn set_now_ns(&mut self, now_ns: u64) {
        self.now_ns = now_ns;
    }

    /// From now on time passes by itself.
    #[cfg(test)]
    pub(crate) fn let_clock_run(&mut self) {
        self.fixed_ns = None;
    }

    /// From now on it is as late as a test says, in turns too.
    #[cfg(test)]
    pub(crate) fn set_clock_ns(&mut self, ns: u64) {
        self.fixed_ns = Some(ns);
        self.now_ns = ns;
    }
}

/// CLOCK_MONOTONIC in ns.
pub fn monotonic_ns() -> u64 {
    let t = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    t.tv_sec as u64 * 1_000_000_000 + t.tv_nsec as u64
}
