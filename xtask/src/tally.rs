//! Counts tests from libtest's output.
//!
//! Lines count as they arrive, also of a run killed later. A suite that fails without a failed test
//! (build error, dead process) counts as one failure.

#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(crate) struct Tally {
    pub(crate) passed: u64,
    pub(crate) failed: u64,
    /// Tests or suites not run.
    pub(crate) skipped: u64,
    /// Failures and skips, for the summary.
    pub(crate) notes: Vec<String>,
}

impl Tally {
    /// Reads a line of output.
    pub(crate) fn read(&mut self, line: &str) {
        if let Some(counts) = line.strip_prefix("test result: ") {
            for part in counts.split(['.', ';']) {
                let mut words = part.split_whitespace();
                let (Some(number), Some(kind)) = (words.next(), words.next()) else {
                    continue;
                };
                let Ok(number) = number.parse::<u64>() else {
                    continue;
                };
                match kind {
                    "passed" => self.passed += number,
                    "failed" => self.failed += number,
                    "ignored" => self.skipped += number,
                    _ => {}
                }
            }
        } else if let Some(test) = line.strip_prefix("test ") {
            if let Some(name) = test.strip_suffix(" ... FAILED") {
                self.notes.push(format!("failed: {name}"));
            } else if let Some((name, why)) = test.split_once(" ... ignored") {
                self.notes.push(format!("skipped: {name}{why}"));
            }
        }
    }

    pub(crate) fn add(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.skipped += other.skipped;
        self.notes.extend(other.notes);
    }

    /// Ends a suite, with an `error` if it failed.
    pub(crate) fn end(&mut self, error: Option<String>) {
        if let Some(error) = error {
            if self.failed == 0 {
                self.failed = 1;
            }
            self.notes.push(error);
        }
    }

    /// The suite could not run.
    pub(crate) fn skip(&mut self, why: &str) {
        self.skipped += 1;
        self.notes.push(format!("skipped: {why}"));
    }

    /// Turns skips into failures.
    pub(crate) fn refuse_skips(&mut self) {
        if self.skipped > 0 {
            self.notes
                .push("CI=true: skipped tests count as failed".to_owned());
            self.failed += std::mem::take(&mut self.skipped);
        }
    }

    pub(crate) fn closing_line(&self) -> String {
        let mut line = format!("{} passed, {} failed", self.passed, self.failed);
        if self.skipped > 0 {
            line += &format!(", {} skipped", self.skipped);
        }
        line
    }
}

#[cfg(test)]
mod tests {
    use super::Tally;

    #[test]
    fn counts_what_libtest_prints() {
        let mut tally = Tally::default();
        for line in [
            "running 3 tests",
            "test a::b ... ok",
            "test a::c ... FAILED",
            "test a::d ... ignored, needs a GPU",
            "test result: FAILED. 1 passed; 1 failed; 1 ignored; 0 measured; 2 filtered out; finished in 0.00s",
            "test result: ok. 7 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 1.20s",
            "test result: rubbish",
        ] {
            tally.read(line);
        }
        assert_eq!((tally.passed, tally.failed, tally.skipped), (8, 1, 1));
        assert_eq!(tally.notes, ["failed: a::c", "skipped: a::d, needs a GPU"]);
        assert_eq!(tally.closing_line(), "8 passed, 1 failed, 1 skipped");
        tally.refuse_skips();
        assert_eq!(tally.closing_line(), "8 passed, 2 failed");
    }

    #[test]
    fn a_bad_end_without_a_failed_test_is_a_failure() {
        let mut tally = Tally::default();
        tally.end(Some("cargo test: exit status: 101".to_owned()));
        assert_eq!(tally.closing_line(), "0 passed, 1 failed");
        tally.end(Some("again".to_owned()));
        assert_eq!(tally.failed, 1);
    }
}
