//! The health check of slot 2's program: whether its engines serve, and go on serving.
//!
//! An image that served for a minute has passed. Later deaths of its engines are not its fault
//! alone, and a host that crashes engines must not be able to select the program.

use std::time::Duration;

use super::slots::{Firmware, Slot};

/// How long an engine may take until it serves.
pub(crate) const SERVES_LIMIT: Duration = Duration::from_secs(30);
/// An image has passed when an engine of it has served this long.
const PASSED_AFTER: Duration = Duration::from_secs(60);
/// Engines that may crash before that.
const CRASHES: u32 = 3;

#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Trial {
    crashes: u32,
    passed: bool,
}

/// How an engine of slot 2's program ended.
#[derive(Debug)]
pub(crate) struct EngineEnd<'a> {
    pub(crate) generation: u64,
    /// How long it served, if it did.
    pub(crate) served: Option<Duration>,
    /// It crashed or was stuck; it was not just killed from outside.
    pub(crate) crashed: bool,
    /// Why the daemon ended it, if so.
    pub(crate) given_up: Option<String>,
    pub(crate) cause: &'a str,
}

impl Firmware {
    /// Falls back to slot 1 if the health check fails, and returns whether it does.
    pub(crate) fn judge(&self, end: &EngineEnd<'_>) -> bool {
        let mut trial = self.trial.get();
        if self.next() != Slot::Downloaded || trial.passed {
            return false;
        }
        let why = match end.served {
            None => {
                let cause = end.given_up.as_deref().or(end.crashed.then_some(end.cause));
                cause.map(|cause| format!("its engine did not serve: {cause}"))
            }
            Some(served) if served >= PASSED_AFTER => {
                trial.passed = true;
                None
            }
            Some(_) => {
                trial.crashes += u32::from(end.crashed);
                (trial.crashes >= CRASHES).then(|| {
                    format!(
                        "{CRASHES} of its engines crashed soon, the last because of: {}",
                        end.cause
                    )
                })
            }
        };
        self.trial.set(trial);
        if let Some(why) = &why {
            self.fall_back(end.generation, why);
        }
        why.is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{firmware, stored, with_folder};
    use super::*;

    fn end(served: Option<u64>, crashed: bool) -> EngineEnd<'static> {
        EngineEnd {
            generation: 1,
            served: served.map(Duration::from_secs),
            crashed,
            given_up: None,
            cause: "exit code 3",
        }
    }

    #[test]
    fn an_image_falls_back_if_it_does_not_serve_or_crashes_soon() {
        with_folder(|at| async move {
            let one = firmware(&at);
            assert!(!one.judge(&end(None, true)), "slot 1 has no health check");
            for (ends, why) in [
                (vec![end(None, true)], "did not serve: exit code 3"),
                (
                    vec![EngineEnd {
                        given_up: Some("too slow".to_owned()),
                        ..end(None, false)
                    }],
                    "too slow",
                ),
                (
                    vec![end(Some(1), true), end(Some(59), true), end(Some(0), true)],
                    "3 of its engines crashed",
                ),
            ] {
                stored(&one, "2.0", true).await;
                let judged: Vec<bool> = ends.iter().map(|end| one.judge(end)).collect();
                let last = judged.len() - 1;
                assert!(
                    judged[last] && !judged[..last].contains(&true),
                    "{judged:?}"
                );
                let left = one.fell_back().unwrap().why;
                assert!(left.contains(why), "{left}");
                assert_eq!(one.next(), Slot::Installed);
            }
        });
    }

    #[test]
    fn kills_from_outside_and_later_deaths_do_not_count() {
        with_folder(|at| async move {
            let one = firmware(&at);
            stored(&one, "2.0", true).await;
            for _ in 0..10 {
                assert!(!one.judge(&end(None, false)) && !one.judge(&end(Some(1), false)));
            }
            assert!(!one.judge(&end(Some(1), true)) && !one.judge(&end(Some(1), true)));
            assert!(!one.judge(&end(Some(60), true)), "it has passed");
            for _ in 0..10 {
                assert!(!one.judge(&end(Some(1), true)) && !one.judge(&end(None, true)));
            }
            // The next image has to pass, too.
            stored(&one, "3.0", true).await;
            assert!(one.judge(&end(None, true)));
        });
    }
}
