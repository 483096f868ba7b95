//! Detects devices that give errors, and keeps new extents away from them.
//!
//! Reactors count errors by device in the state region, which is checked once a second. A device is
//! in trouble until no error has come for a while. If writes or flushes failed, a flush must also
//! succeed; until then nothing is placed there if another device is left. Mapped extents are served
//! anyway. Errors from long before the daemon's start are only counted.

use std::rc::Rc;
use std::sync::atomic::Ordering::{Acquire, Relaxed};
use std::time::Duration;

use forebay_xlate::DeviceIndex;
use forebay_xlate::boundary::region::DeviceRecord;

use crate::model::DeviceErrors;
use crate::model::events::EventKind;
use crate::states::DeviceStates;

/// A device without an error for this long is healthy again.
pub(crate) const QUIET: Duration = Duration::from_secs(30);

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct ErrorCounts {
    reads: u64,
    writes: u64,
    flushes: u64,
    no_room: u64,
}

impl ErrorCounts {
    fn with(self, other: Self, f: impl Fn(u64, u64) -> u64) -> Self {
        Self {
            reads: f(self.reads, other.reads),
            writes: f(self.writes, other.writes),
            flushes: f(self.flushes, other.flushes),
            no_room: f(self.no_room, other.no_room),
        }
    }

    fn is_any(self) -> bool {
        self != Self::default()
    }

    /// "2 reads and 1 write".
    fn in_words(self) -> String {
        let one = |count: u64, what: &str| match count {
            0 => None,
            1 => Some(format!("1 {what}")),
            n => Some(format!(
                "{n} {what}{}",
                if what.ends_with('h') { "es" } else { "s" }
            )),
        };
        let writes = self.writes.saturating_add(self.no_room);
        let parts = [
            one(self.reads, "read"),
            one(writes, "write"),
            one(self.flushes, "flush"),
        ];
        let parts: Vec<String> = parts.into_iter().flatten().collect();
        match parts.as_slice() {
            [first, second, third] => format!("{first}, {second} and {third}"),
            parts => parts.join(" and "),
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Last {
    errno: i32,
    offset_bytes: u64,
    /// CLOCK_MONOTONIC.
    at_ns: u64,
}

impl Last {
    fn in_words(&self) -> String {
        std::io::Error::from_raw_os_error(self.errno).to_string()
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Trouble {
    since_ns: u64,
    counts: ErrorCounts,
    /// Writes or flushes were among them.
    is_shut: bool,
}

#[derive(Debug, Default)]
pub(crate) struct SeenErrors {
    /// The engine that counted.
    generation: u64,
    counts: ErrorCounts,
    total: ErrorCounts,
    last: Option<Last>,
    trouble: Option<Trouble>,
    /// A flush tests whether the device is healthy again.
    is_probed: bool,
}

fn now_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

fn quiet_ns(quiet: Duration) -> u64 {
    u64::try_from(quiet.as_nanos()).unwrap_or(u64::MAX)
}

impl SeenErrors {
    fn check(
        &mut self,
        generation: u64,
        record: &DeviceRecord,
        now_ns: u64,
        quiet: Duration,
    ) -> bool {
        let at_ns = record.last_ns.load(Acquire).min(now_ns);
        let counts = ErrorCounts {
            reads: record.read_errors.load(Relaxed),
            writes: record.write_errors.load(Relaxed),
            flushes: record.flush_errors.load(Relaxed),
            no_room: record.no_room_errors.load(Relaxed),
        };
        if self.generation != generation {
            self.generation = generation;
            self.counts = ErrorCounts::default();
        }
        let new = counts.with(self.counts, u64::saturating_sub);
        self.counts = counts;
        if !new.is_any() {
            return false;
        }
        self.total = self.total.with(new, u64::saturating_add);
        self.last = Some(Last {
            errno: i32::try_from(record.last_errno.load(Relaxed)).unwrap_or(i32::MAX),
            offset_bytes: record.last_offset_bytes.load(Relaxed),
            at_ns,
        });
        let is_old = now_ns.saturating_sub(at_ns) >= quiet_ns(quiet);
        if is_old && self.trouble.is_none() {
            return false;
        }
        let begins = self.trouble.is_none();
        let trouble = self.trouble.get_or_insert(Trouble {
            since_ns: at_ns,
            counts: ErrorCounts::default(),
            is_shut: false,
        });
        trouble.counts = trouble.counts.with(new, u64::saturating_add);
        trouble.is_shut |= new.writes > 0 || new.flushes > 0;
        begins
    }

    fn is_quiet(&self, now_ns: u64, quiet: Duration) -> bool {
        let last_ns = self.last.map_or(0, |last| last.at_ns);
        now_ns.saturating_sub(last_ns) >= quiet_ns(quiet)
    }

    fn is_shut(&self) -> bool {
        self.trouble.is_some_and(|trouble| trouble.is_shut)
    }

    /// The device is the subject of the sentence.
    fn in_words(&self, now_ns: u64) -> Option<String> {
        let (trouble, last) = (self.trouble?, self.last?);
        let ago = |at_ns: u64| now_ns.saturating_sub(at_ns) / 1_000_000_000;
        Some(format!(
            "gives errors: {} failed in the last {} s, the last one {} s ago at byte {}: {}",
            trouble.counts.in_words(),
            ago(trouble.since_ns),
            ago(last.at_ns),
            last.offset_bytes,
            last.in_words()
        ))
    }
}

impl DeviceStates {
    pub(crate) fn poll_errors(self: &Rc<Self>) {
        let (now_ns, quiet) = (now_ns(), self.watched.quiet.get());
        for device in self.base.device_indexes() {
            self.poll_errors_of(device, now_ns, quiet);
            let mut all = self.watched.errors.borrow_mut();
            let seen = all.entry(device).or_default();
            if seen.trouble.is_none() || !seen.is_quiet(now_ns, quiet) || seen.is_probed {
                continue;
            }
            if seen.is_shut() {
                seen.is_probed = true;
                drop(all);
                self.base.spawn(self.clone().probe(device));
            } else {
                seen.trouble = None;
                drop(all);
                let text = format!(
                    "device {} no longer gives errors",
                    self.base.spec_of(device)
                );
                self.base
                    .report_device(EventKind::DeviceReturned, device, text);
            }
        }
    }

    fn poll_errors_of(&self, device: DeviceIndex, now_ns: u64, quiet: Duration) {
        let Some(session) = self.link.session() else {
            return;
        };
        let Some(record) = session.region.devices().get(usize::from(device.0)) else {
            return;
        };
        let begins = {
            let mut all = self.watched.errors.borrow_mut();
            let seen = all.entry(device).or_default();
            let begins = seen.check(session.generation, record, now_ns, quiet);
            begins.then(|| seen.in_words(now_ns)).flatten()
        };
        if let Some(what) = begins {
            let spec = self.base.spec_of(device);
            self.base.report_device(
                EventKind::DeviceFailed,
                device,
                format!("device {spec} {what}"),
            );
        }
        self.judge_health(device);
    }

    /// A successful flush shows that a quiet device is healthy again.
    async fn probe(self: Rc<Self>, device: DeviceIndex) {
        let flushed = self.flush_device(device).await;
        let (now_ns, quiet) = (now_ns(), self.watched.quiet.get());
        self.poll_errors_of(device, now_ns, quiet);
        let is_well = {
            let mut all = self.watched.errors.borrow_mut();
            let seen = all.entry(device).or_default();
            seen.is_probed = false;
            let is_well = flushed.is_ok() && seen.is_quiet(now_ns, quiet);
            if is_well {
                seen.trouble = None;
            }
            is_well
        };
        match flushed {
            Ok(()) if is_well => {
                let spec = self.base.spec_of(device);
                let text = format!("device {spec} no longer gives errors, and a flush succeeded");
                self.base
                    .report_device(EventKind::DeviceReturned, device, text);
            }
            Ok(()) => {}
            Err(error) => tracing::debug!(%device, %error, "can't flush a device that gave errors"),
        }
        self.judge_health(device);
    }

    pub(crate) fn is_shut(&self, device: DeviceIndex) -> bool {
        let all = self.watched.errors.borrow();
        all.get(&device).is_some_and(SeenErrors::is_shut)
    }

    pub(crate) fn error_trouble(&self, device: DeviceIndex) -> Option<String> {
        let all = self.watched.errors.borrow();
        all.get(&device)?.in_words(now_ns())
    }

    /// Since the daemon or its engine started.
    pub(crate) fn errors_of(&self, device: DeviceIndex) -> DeviceErrors {
        let all = self.watched.errors.borrow();
        let Some(seen) = all.get(&device) else {
            return DeviceErrors::default();
        };
        DeviceErrors {
            reads: seen.total.reads,
            writes: seen.total.writes.saturating_add(seen.total.no_room),
            flushes: seen.total.flushes,
            last: seen.last.map(|last| last.in_words()),
            last_offset_bytes: seen.last.map(|last| last.offset_bytes),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_xlate::boundary::region::{DeviceOp, Region};

    const S: u64 = 1_000_000_000;

    #[test]
    fn trouble_begins_once_and_stays_until_it_is_quiet() {
        let region = Region::anonymous(1).unwrap();
        let record = &region.devices()[2];
        let mut seen = SeenErrors::default();
        assert!(!seen.check(1, record, 100 * S, QUIET));
        record.record(DeviceOp::Read, 5, false, 4096, 100 * S);
        assert!(seen.check(1, record, 101 * S, QUIET));
        assert!(!seen.is_shut(), "it can be written to");
        record.record(DeviceOp::Write, 5, false, 8192, 102 * S);
        record.record(DeviceOp::Flush, 5, false, 0, 102 * S);
        record.record(DeviceOp::Flush, 5, false, 0, 103 * S);
        assert!(!seen.check(1, record, 103 * S, QUIET), "it began before");
        assert!(seen.is_shut());
        assert_eq!(
            seen.in_words(105 * S).unwrap(),
            "gives errors: 1 read, 1 write and 2 flushes failed in the last 5 s, the last one 2 s ago at byte 0: \
            Input/output error (os error 5)"
        );
        assert!(!seen.is_quiet(132 * S, QUIET));
        assert!(seen.is_quiet(133 * S, QUIET));
    }

    #[test]
    fn a_new_engine_counts_from_zero_and_old_errors_are_no_trouble() {
        let (first, second) = (Region::anonymous(1).unwrap(), Region::anonymous(2).unwrap());
        let mut seen = SeenErrors::default();
        first.devices()[0].record(DeviceOp::Write, 5, false, 0, S);
        assert!(!seen.check(1, &first.devices()[0], 100 * S, QUIET));
        assert_eq!((seen.total.writes, seen.trouble), (1, None));
        assert!(!seen.check(2, &second.devices()[0], 101 * S, QUIET));
        second.devices()[0].record(DeviceOp::Write, 28, true, 0, 102 * S);
        assert!(seen.check(2, &second.devices()[0], 102 * S, QUIET));
        // A full file system is not the device's fault.
        assert!(!seen.is_shut());
        assert_eq!((seen.total.writes, seen.total.no_room), (1, 1));
        // Implausible counts are ignored.
        second.devices()[0].last_ns.store(u64::MAX, Relaxed);
        second.devices()[0].read_errors.store(u64::MAX, Relaxed);
        second.devices()[0].last_errno.store(u64::MAX, Relaxed);
        assert!(!seen.check(2, &second.devices()[0], 103 * S, QUIET));
        assert!(seen.is_quiet(133 * S, QUIET));
        assert!(seen.in_words(103 * S).is_some());
    }
}
