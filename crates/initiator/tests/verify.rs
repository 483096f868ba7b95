//! Tests of the verifier against a fake target that dies, and that loses or misplaces writes.

mod fake;

use std::ops::ControlFlow::{Break, Continue};
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::Duration;

use fake::{Config, HOSTNQN, SUBNQN, Target};
use forebay_initiator::Options;
use forebay_initiator::verify::{
    Initial, Promise, Verdict, Verifier, VerifyReport, VerifySpec, WriteGoal, WriteReport,
};

fn spec(target: &Target) -> VerifySpec {
    VerifySpec {
        queue_depth: 8,
        flush_every_writes: 50,
        seed: 0xf0,
        reconnect_limit: Duration::from_secs(120),
        options: Options {
            kato_ms: 0,
            ..Options::default()
        },
        ..VerifySpec::new(target.addr(), SUBNQN, HOSTNQN)
    }
}

fn write(verifier: &mut Verifier, bytes: u64) -> WriteReport {
    let goal = WriteGoal::Bytes(bytes);
    verifier.write(goal, &mut |_| Continue(())).unwrap()
}

fn verdicts(report: &VerifyReport) -> Vec<Verdict> {
    report.mismatches.iter().map(|m| m.verdict).collect()
}

#[test]
fn a_good_target_is_clean() {
    for (data_digest, block_bytes) in [(false, 4096), (true, 8192), (false, 512)] {
        let target = Target::start(Config::default());
        let mut spec = spec(&target);
        spec.block_bytes = block_bytes;
        spec.options.data_digest = data_digest;
        let mut verifier = Verifier::connect(spec).unwrap();
        let written = write(&mut verifier, 2 << 20);
        assert_eq!((written.bytes, written.errors), (2 << 20, 0));
        assert!(written.flushes > 0);
        verifier.flush().unwrap();
        let report = verifier.read_back(&mut |_| ()).unwrap();
        assert!(report.is_clean(), "{report}");
        assert_eq!(report.bytes, 1 << 20);
        verifier.close().unwrap();
    }
}

#[test]
fn a_lost_write_is_found_stale_or_missing() {
    let target = Target::start(Config {
        lose_write: 700,
        ..Config::default()
    });
    let mut spec = spec(&target);
    // Few blocks, so that each was written before.
    spec.span_bytes = Some(16 * 4096);
    let mut verifier = Verifier::connect(spec).unwrap();
    write(&mut verifier, 700 * 4096);
    let report = verifier.read_back(&mut |_| ()).unwrap();
    assert_eq!(report.wrong_sectors, 8, "{report}");
    assert_eq!(verdicts(&report), [Verdict::Stale; 8]);
    let target = Target::start(Config {
        lose_write: 1,
        ..Config::default()
    });
    let mut verifier = Verifier::connect(crate::spec(&target)).unwrap();
    write(&mut verifier, 4096);
    let report = verifier.read_back(&mut |_| ()).unwrap();
    assert_eq!(verdicts(&report), [Verdict::Lost; 8]);
}

#[test]
fn a_misplaced_write_is_found_twice() {
    let target = Target::start(Config {
        misplace_write: 1,
        ..Config::default()
    });
    let mut verifier = Verifier::connect(spec(&target)).unwrap();
    write(&mut verifier, 4096);
    let report = verifier.read_back(&mut |_| ()).unwrap();
    let mut found = verdicts(&report);
    found.sort_by_key(|v| format!("{v:?}"));
    let mut expected = [Verdict::Lost; 16];
    expected[8..].fill(Verdict::Misplaced);
    assert_eq!(found, expected, "{report}");
}

#[test]
fn a_failed_write_is_an_error_and_may_be_there_or_not() {
    let target = Target::start(Config {
        fail_write: 10,
        ..Config::default()
    });
    let mut verifier = Verifier::connect(spec(&target)).unwrap();
    let written = write(&mut verifier, 20 * 4096);
    assert_eq!((written.writes, written.errors), (19, 1));
    assert!(written.first_error.unwrap().contains("CAPACITY_EXCEEDED"));
    let report = verifier.read_back(&mut |_| ()).unwrap();
    assert!(report.is_clean(), "{report}");
}

#[test]
fn existing_data_may_be_ignored() {
    let target = Target::start(Config::default());
    target.disk().fill(0x77);
    let mut spec = spec(&target);
    spec.initial = Initial::Any;
    let mut verifier = Verifier::connect(spec.clone()).unwrap();
    write(&mut verifier, 100 * 4096);
    let report = verifier.read_back(&mut |_| ()).unwrap();
    assert!(report.is_clean(), "{report}");
    assert_eq!(report.bytes, verifier.blocks_written() * 4096);
    spec.initial = Initial::Zeros;
    let mut verifier = Verifier::connect(spec).unwrap();
    let report = verifier.read_back(&mut |_| ()).unwrap();
    assert!(!report.is_clean());
}

fn through_deaths(promise: Promise, lose_cache: bool) -> (WriteReport, VerifyReport) {
    let target = Target::start(Config::default());
    let mut spec = spec(&target);
    spec.promise = promise;
    let mut verifier = Verifier::connect(spec).unwrap();
    let over = AtomicBool::new(false);
    let written = std::thread::scope(|scope| {
        scope.spawn(|| {
            for _ in 0..5 {
                let writes = target.counters().writes.load(SeqCst);
                while target.counters().writes.load(SeqCst) < writes + 333 {
                    std::thread::yield_now();
                }
                target.die(lose_cache);
                std::thread::sleep(Duration::from_millis(30));
                target.live();
            }
            over.store(true, SeqCst);
        });
        let mut reported = |_: &_| {
            if over.load(SeqCst) {
                Break(())
            } else {
                Continue(())
            }
        };
        verifier
            .write(WriteGoal::UntilReported, &mut reported)
            .unwrap()
    });
    let report = verifier.read_back(&mut |_| ()).unwrap();
    (written, report)
}

#[test]
fn nothing_is_lost_by_deaths_of_a_good_target() {
    let (written, report) = through_deaths(Promise::Acknowledged, false);
    assert!(report.is_clean(), "{report}");
    assert!(written.reconnects >= 5 && written.redriven > 0 && written.errors == 0);
}

#[test]
fn flushed_data_survives_deaths_that_lose_the_cache() {
    let (written, report) = through_deaths(Promise::Flushed, true);
    assert!(report.is_clean(), "{report}");
    assert!(written.reconnects >= 5 && written.flushes > 0);
}

fn after_a_lost_cache(promise: Promise, ignore_flushes: bool) -> VerifyReport {
    let target = Target::start(Config {
        ignore_flushes,
        ..Config::default()
    });
    let mut spec = spec(&target);
    spec.flush_every_writes = 0;
    spec.promise = promise;
    let mut verifier = Verifier::connect(spec).unwrap();
    write(&mut verifier, 200 * 4096);
    verifier.flush().unwrap();
    if !ignore_flushes {
        write(&mut verifier, 200 * 4096);
    }
    target.die(true);
    target.live();
    let report = verifier.read_back(&mut |_| ()).unwrap();
    assert!(report.reconnects >= 1);
    let lost = |v: &Verdict| matches!(v, Verdict::Stale | Verdict::Lost);
    assert!(verdicts(&report).iter().all(lost), "{report}");
    report
}

#[test]
fn a_cache_may_be_lost_only_if_flushes_are_what_counts() {
    let report = after_a_lost_cache(Promise::Flushed, false);
    assert!(report.is_clean(), "{report}");
    assert!(!after_a_lost_cache(Promise::Acknowledged, false).is_clean());
}

#[test]
fn a_flush_that_was_a_lie_is_found_out() {
    assert!(!after_a_lost_cache(Promise::Flushed, true).is_clean());
}

#[test]
fn a_target_that_stays_dead_is_an_error_and_work_goes_on_when_it_is_back() {
    let target = Target::start(Config::default());
    let mut spec = spec(&target);
    spec.reconnect_limit = Duration::from_millis(200);
    let mut verifier = Verifier::connect(spec).unwrap();
    write(&mut verifier, 100 * 4096);
    target.die(false);
    let goal = WriteGoal::Bytes(4096 * 20);
    let error = verifier.write(goal, &mut |_| Continue(())).unwrap_err();
    assert!(error.is_connection_lost(), "{error}");
    assert!(verifier.read_back(&mut |_| ()).is_err());
    target.live();
    let report = verifier.read_back(&mut |_| ()).unwrap();
    assert!(report.is_clean(), "{report}");
    // The remaining writes were driven before the reads.
    assert!(target.counters().writes.load(SeqCst) > 100);
    verifier.flush().unwrap();
}
