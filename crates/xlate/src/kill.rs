//! Kill points: named places where a test kills a process, to prove the order of stores for a
//! take-over.
//!
//! Without the feature `test-device`, or with `no-kill-points`, [`kill_point!`](crate::kill_point)
//! compiles to nothing. [`arm_from_environment`] reads `FOREBAY_KILL`, a list of
//! `ROLE:POINT:COUNT`, `ROLE:POINT:crash:COUNT` or `ROLE:POINT:hang:COUNT`, such as
//! `engine2:rx.received:3,daemon:daemon.flip:1`. At the COUNTth pass the process gets SIGKILL, or
//! SIGABRT for `crash`; with `hang`, the thread stops.

/// Every kill point, in the specification's order.
pub const POINTS: &[&str] = &[
    // The handshake.
    "accept.accepted",
    "accept.deposited",
    "door.answered",
    "door.routed",
    // A queue is set up.
    "place.taken",
    "place.live",
    "place.consumed",
    "place.answered",
    // Receiving, and taking PDUs.
    "rx.base",
    "rx.intent",
    "rx.received",
    "rx.record",
    "rx.state",
    "rx.taken",
    "rx.kept",
    "rx.cleared",
    // Data that an R2T asked for.
    "data.header",
    "data.placed",
    "data.state",
    "r2t.recorded",
    "r2t.published",
    // At the devices.
    "core.put",
    "core.entered",
    "core.completed",
    "fused.flushing",
    "fused.compared",
    "fused.passed",
    "fused.put",
    // Responses.
    "tx.item",
    "tx.published",
    "tx.sent",
    "tx.freed",
    "tx.first",
    "tx.reset",
    // The admin queue.
    "admin.state",
    "admin.sequence",
    "admin.answered",
    "aer.kept",
    "aer.delivered",
    "quiesce.draining",
    "quiesce.flushing",
    // A connection ends.
    "close.shutdown",
    "close.freed",
    "close.withdrawn",
    // The take-over.
    "over.greeted",
    "over.adopted",
    "over.counted",
    "over.half",
    "over.converted",
    "over.resumed",
    "over.inherited",
    "over.listening",
    "over.waiting",
    "over.fenced",
    "over.reexecuted",
    // A VM's connection and its messages.
    "vm.accepted",
    "vm.deposited",
    "vm.intent",
    "vm.applied",
    "vm.answering",
    "vm.sent",
    "vm.answered",
    "vm.consumed",
    "vm.asking",
    "vm.asked",
    "vm.resumed",
    // A PCI controller's commands and resets.
    "pcie.taken",
    "pcie.fetched",
    "pcie.completing",
    "pcie.posted",
    "pcie.freed",
    "pcie.quiescing",
    "pcie.quiesced",
    "pcie.inherited",
    // The daemon.
    "daemon.death",
    "daemon.spawned",
    "daemon.told",
    "daemon.sockets",
    "daemon.converted",
    "daemon.flip",
    "daemon.report",
    // The daemon, when a host changes reservations.
    "reserve.applied",
    "reserve.durable",
];

/// The environment variable that arms points.
pub const KILL_VARIABLE: &str = "FOREBAY_KILL";
/// The environment variable with this process's role: `engine1` for the first engine; by default
/// `daemon`.
pub const ROLE_VARIABLE: &str = "FOREBAY_KILL_ROLE";

/// The index of a name in [`POINTS`], at compile time.
pub const fn index(name: &str) -> usize {
    let mut at = 0;
    while at < POINTS.len() {
        if same(POINTS[at].as_bytes(), name.as_bytes()) {
            return at;
        }
        at += 1;
    }
    panic!("this kill point is not in the list");
}

const fn same(a: &[u8], b: &[u8]) -> bool {
    let mut at = 0;
    while at < a.len() && at < b.len() && a[at] == b[at] {
        at += 1;
    }
    at == a.len() && at == b.len()
}

/// A place where a test may kill the process.
#[macro_export]
macro_rules! kill_point {
    ($name:literal) => {{
        const AT: usize = $crate::kill::index($name);
        $crate::kill::at(AT);
    }};
}

#[cfg(not(feature = "test-device"))]
#[doc(hidden)]
#[inline(always)]
pub fn at(_point: usize) {}

#[cfg(feature = "test-device")]
pub use armed::*;

#[cfg(feature = "test-device")]
mod armed {
    use super::{KILL_VARIABLE, POINTS, ROLE_VARIABLE};
    use std::cell::Cell;
    use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

    /// In a counter: crash.
    const CRASH: u32 = 1 << 31;
    /// In a counter: a thread armed the point for itself.
    const HERE_TOO: u32 = 1 << 30;
    /// In a counter: hang the thread.
    const HANG: u32 = 1 << 29;
    const COUNT: u32 = HANG - 1;

    /// Passes left of each point; 0: not armed.
    static LEFT: [AtomicU32; POINTS.len()] = [const { AtomicU32::new(0) }; POINTS.len()];

    thread_local! {
        static HERE: Cell<(usize, u32)> = const { Cell::new((0, 0)) };
    }

    /// The panic payload of [`arm_here`].
    #[derive(Debug)]
    pub struct Killed;

    #[doc(hidden)]
    #[inline]
    pub fn at(point: usize) {
        if cfg!(feature = "no-kill-points") {
            return;
        }
        let left = LEFT[point].load(Relaxed);
        if left != 0 {
            count(point, left);
        }
    }

    #[cold]
    fn count(point: usize, left: u32) {
        let (armed, here) = HERE.get();
        if here != 0 && armed == point {
            HERE.set((armed, here - 1));
            if here == 1 {
                std::panic::resume_unwind(Box::new(Killed));
            }
        }
        if left & COUNT != 0 && LEFT[point].fetch_sub(1, Relaxed) & COUNT == 1 {
            if left & CRASH != 0 {
                std::process::abort();
            }
            if left & HANG != 0 {
                loop {
                    std::thread::park();
                }
            }
            let _ = rustix::process::kill_process(
                rustix::process::getpid(),
                rustix::process::Signal::KILL,
            );
        }
    }

    /// Unwinds this thread with [`Killed`] at a point's `count`th pass from now; 0: never. The
    /// catcher must not use the thread's data.
    ///
    /// # Panics
    /// For an unknown point.
    pub fn arm_here(point: &str, count: u32) {
        let point = super::index(point);
        LEFT[point].fetch_or(HERE_TOO, Relaxed);
        HERE.set((point, count));
    }

    /// Arms this process's points in the environment. A wrong list is an error: a test that kills
    /// nothing proves nothing.
    pub fn arm_from_environment() -> Result<(), String> {
        let Ok(list) = std::env::var(KILL_VARIABLE) else {
            return Ok(());
        };
        let role = std::env::var(ROLE_VARIABLE).unwrap_or_else(|_| "daemon".into());
        for (point, count) in parse(&list, &role)? {
            LEFT[point].store(count, Relaxed);
        }
        Ok(())
    }

    fn parse(list: &str, role: &str) -> Result<Vec<(usize, u32)>, String> {
        let wrong = |entry: &str| {
            format!(
                "{KILL_VARIABLE}: {entry:?} is not ROLE:POINT:COUNT, with crash or hang before COUNT"
            )
        };
        let mut all = Vec::new();
        for entry in list.split(',').filter(|entry| !entry.is_empty()) {
            let parts: Vec<&str> = entry.split(':').collect();
            let (who, name, how, count) = match parts[..] {
                [who, name, count] => (who, name, 0, count),
                [who, name, "crash", count] => (who, name, CRASH, count),
                [who, name, "hang", count] => (who, name, HANG, count),
                _ => return Err(wrong(entry)),
            };
            let point = POINTS.iter().position(|point| *point == name);
            let point = point.ok_or_else(|| format!("{KILL_VARIABLE}: no point {name:?}"))?;
            let count: u32 = count.parse().map_err(|_| wrong(entry))?;
            if count == 0 || count > COUNT {
                return Err(wrong(entry));
            }
            if who == role {
                all.push((point, count | how));
            }
        }
        Ok(all)
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        #[test]
        fn a_list_names_role_point_and_count() {
            let list = "engine2:rx.received:3,daemon:daemon.flip:1,engine2:tx.sent:crash:2";
            let (rx, tx) = (
                crate::kill::index("rx.received"),
                crate::kill::index("tx.sent"),
            );
            assert_eq!(parse(list, "engine2"), Ok(vec![(rx, 3), (tx, 2 | CRASH)]));
            assert_eq!(parse(list, "engine1"), Ok(vec![]));
            for wrong in [
                "engine1:rx.received",
                "engine1:nowhere:1",
                "a:rx.base:0",
                "a:rx.base:x",
            ] {
                assert!(parse(wrong, "engine1").is_err(), "{wrong}");
            }
        }

        #[test]
        fn a_thread_dies_at_its_point_for_the_nth_time() {
            let mut passed = 0;
            arm_here("rx.base", 3);
            let died = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                loop {
                    crate::kill_point!("rx.intent");
                    crate::kill_point!("rx.base");
                    passed += 1;
                }
            }));
            assert!(died.is_err_and(|e| e.is::<Killed>()));
            assert_eq!(passed, 2);
            crate::kill_point!("rx.base");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_distinct_and_of_one_form() {
        for (at, name) in POINTS.iter().enumerate() {
            assert_eq!(index(name), at, "{name} is there twice");
            let letters = |part: &str| {
                part.bytes()
                    .all(|b| b.is_ascii_lowercase() || b.is_ascii_digit())
            };
            let parts: Vec<&str> = name.split('.').collect();
            assert!(parts.len() == 2 && parts.into_iter().all(letters), "{name}");
        }
    }

    #[test]
    fn every_point_is_somewhere_in_the_source() {
        fn read(folder: &std::path::Path, all: &mut String) {
            for entry in std::fs::read_dir(folder).unwrap() {
                let path = entry.unwrap().path();
                if path.is_dir() {
                    read(&path, all);
                } else if path.extension().is_some_and(|e| e == "rs") && !path.ends_with("kill.rs")
                {
                    all.push_str(&std::fs::read_to_string(path).unwrap());
                }
            }
        }
        let mut all = String::new();
        for name in ["xlate", "engine", "control"] {
            let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
            read(&folder.join(name).join("src"), &mut all);
        }
        let used = |name: &&str| all.contains(&format!("kill_point!(\"{name}\")"));
        let unused: Vec<_> = POINTS.iter().filter(|name| !used(name)).collect();
        assert!(unused.is_empty(), "nobody comes to {unused:?}");
    }
}
