//! A reactor's time, read once per turn.
//!
//! **Design.** It also has the time up to which the daemon's messages were handled: a wait for the
//! daemon is late only if its socket was read after the deadline. **Not here:** the effect of
//! timeouts ([`crate::io::waits`]).

/// A longer wait for the daemon ends with Command Interrupted.
pub(crate) const OWNER_WAIT_LIMIT_NS: u64 = 20_000_000_000;

#[derive(Debug)]
pub(crate) struct Clock {
    pub(crate) now_ns: u64,
    /// The daemon's messages up to here were handled.
    heard_ns: u64,
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

    #[inline]
    pub(crate) fn stamp(&mut self) {
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

    /// Reads the clock if it would be 0.
    #[inline]
    pub(crate) fn since(&self, then_ns: u64) -> u64 {
        match self.now_ns.saturating_sub(then_ns) {
            0 => self.read().saturating_sub(then_ns),
            ns => ns,
        }
    }

    pub(crate) fn owner_was_heard(&mut self, ns: u64) {
        self.heard_ns = ns;
    }

    /// The daemon's silence is known up to here.
    pub(crate) fn owner_heard_ns(&self) -> u64 {
        self.heard_ns.min(self.now_ns)
    }

    pub(crate) fn owner_is_late(&self, deadline_ns: u64) -> bool {
        deadline_ns <= self.owner_heard_ns()
    }

    /// Deadline of a command that asks the daemon now.
    pub(crate) fn owner_deadline_ns(&self) -> u64 {
        self.now_ns + OWNER_WAIT_LIMIT_NS
    }

    #[cfg(test)]
    pub(crate) fn set_now_ns(&mut self, now_ns: u64) {
        self.now_ns = now_ns;
    }

    #[cfg(test)]
    pub(crate) fn let_clock_run(&mut self) {
        self.fixed_ns = None;
    }

    /// Sets the time for a test, also for later turns.
    #[cfg(test)]
    pub(crate) fn set_clock_ns(&mut self, ns: u64) {
        self.fixed_ns = Some(ns);
        self.now_ns = ns;
    }
}

/// CLOCK_MONOTONIC in ns.
pub(crate) fn monotonic_ns() -> u64 {
    let t = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    t.tv_sec as u64 * 1_000_000_000 + t.tv_nsec as u64
}
