//! Reports refused hosts to the operator: the newest and a count, at most once a second. **Not
//! here:** the decision ([`super::judge`]).

const INTERVAL_NS: u64 = 1_000_000_000;

#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct RefusedHost {
    pub host: String,
    pub subsystem: String,
    pub why: &'static str,
}

#[derive(Default)]
pub(super) struct Refusals {
    newest: Option<RefusedHost>,
    count: u32,
    reported_ns: Option<u64>,
}

impl Refusals {
    pub(super) fn note(&mut self, refused: RefusedHost) {
        self.newest = Some(refused);
        self.count = self.count.saturating_add(1);
    }

    /// The newest unreported host and the number of refusals, if a report is due.
    pub(super) fn next_report(&mut self, now_ns: u64) -> Option<(RefusedHost, u32)> {
        let waited = self
            .reported_ns
            .is_none_or(|reported| now_ns >= reported.saturating_add(INTERVAL_NS));
        let newest = self.newest.take_if(|_| waited)?;
        self.reported_ns = Some(now_ns);
        Some((newest, std::mem::take(&mut self.count)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_a_second_and_all_counted() {
        let refused = |n: u32| RefusedHost {
            host: format!("host{n}"),
            subsystem: String::new(),
            why: "",
        };
        let mut all = Refusals::default();
        let mut reported = Vec::new();
        for n in 0..300 {
            all.note(refused(n));
            reported.extend(all.next_report(7 + u64::from(n) * 10_000_000));
        }
        reported.extend(all.next_report(7 + 2_999_999_999));
        assert_eq!(
            reported,
            [(refused(0), 1), (refused(100), 100), (refused(200), 100)]
        );
        assert_eq!(all.next_report(7 + 3_000_000_000), Some((refused(299), 99)));
        assert_eq!(all.next_report(u64::MAX), None);
    }
}
