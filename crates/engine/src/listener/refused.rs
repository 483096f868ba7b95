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
    told_ns: Option<u64>,
}

impl Refusals {
    pub(super) fn note(&mut self, refused: RefusedHost) {
        self.newest = Some(refused);
        self.count = self.count.saturating_add(1);
    }

    /// The newest unreported host and the number of refusals, if a report is due.
    pub(super) fn take(&mut self, now_ns: u64) -> Option<(RefusedHost, u32)> {
        let waited = self
            .told_ns
            .is_none_or(|told| now_ns >= told.saturating_add(INTERVAL_NS));
        let newest = self.newest.take_if(|_| waited)?;
        self.told_ns = Some(now_ns);
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
        let mut told = Vec::new();
        for n in 0..300 {
            all.note(refused(n));
            told.extend(all.take(7 + u64::from(n) * 10_000_000));
        }
        told.extend(all.take(7 + 2_999_999_999));
        assert_eq!(
            told,
            [(refused(0), 1), (refused(100), 100), (refused(200), 100)]
        );
        assert_eq!(all.take(7 + 3_000_000_000), Some((refused(299), 99)));
        assert_eq!(all.take(u64::MAX), None);
    }
}
