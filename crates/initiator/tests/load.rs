//! Tests of the load generator against a fake target.

mod fake;

use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use fake::{Config, HOSTNQN, SUBNQN, Target};
use forebay_initiator::load::{Access, Amount, LoadSpec, Pace, run};
use forebay_initiator::{Error, Wait};

#[test]
fn a_load_counts_what_the_target_saw() {
    let target = Target::start(Config::default());
    for (cpu, wait, queues) in [
        (None, Wait::Block, 2),
        (Some(0), Wait::Block, 2),
        (None, Wait::Spin, 1),
    ] {
        let reads = target.counters().reads.load(SeqCst);
        let writes = target.counters().writes.load(SeqCst);
        let spec = LoadSpec {
            read_percent: 50,
            queue_depth: 16,
            queues,
            cpu,
            wait,
            amount: Amount::Bytes(1000 * 4096),
            ..LoadSpec::new(target.addr(), SUBNQN, HOSTNQN)
        };
        let mut last = 0.0;
        let report = run(&spec, &mut |p| {
            assert!(p.fraction >= last);
            last = p.fraction;
        })
        .unwrap();
        assert_eq!((report.total.ops, report.errors), (1000, 0));
        assert_eq!(
            report.reads.ops,
            target.counters().reads.load(SeqCst) - reads
        );
        assert_eq!(
            report.writes.ops,
            target.counters().writes.load(SeqCst) - writes
        );
        assert!(report.reads.ops > 300 && report.writes.ops > 300);
        assert!(report.p50_us <= report.p99_us && report.p99_us <= report.max_us * 1.01);
        assert!(report.initiator_cpu > Duration::ZERO && report.iops > 0.0);
    }
}

#[test]
fn a_load_ends_by_time_and_walks_in_order() {
    let target = Target::start(Config::default());
    // Doubled below, for slow nodes.
    let mut duration = Duration::from_millis(200);
    loop {
        let spec = LoadSpec {
            read_percent: 0,
            queue_depth: 128,
            access: Access::Sequential,
            amount: Amount::Duration(duration),
            span_bytes: Some(64 * 4096),
            ..LoadSpec::new(target.addr(), SUBNQN, HOSTNQN)
        };
        let report = run(&spec, &mut |_| ()).unwrap();
        assert_eq!(report.elapsed, duration);
        if report.total.ops > 64 {
            break;
        }
        duration *= 2;
        assert!(duration < Duration::from_secs(60), "nothing is written");
    }
    let disk = target.disk();
    assert!(
        disk[..64 * 4096]
            .chunks(512)
            .all(|s| s.iter().any(|&b| b != 0))
    );
    assert!(disk[64 * 4096..].iter().all(|&b| b == 0));
}

#[test]
fn a_load_that_takes_each_place_once_ends_by_itself() {
    let target = Target::start(Config::default());
    for (queues, cpu) in [(1, None), (2, None), (2, Some(0))] {
        let before = target.counters().writes.load(SeqCst);
        let spec = LoadSpec {
            read_percent: 0,
            queues,
            cpu,
            access: Access::Once {
                stride_bytes: 16384,
            },
            amount: Amount::Duration(Duration::from_secs(60)),
            span_bytes: Some(33 * 16384),
            ..LoadSpec::new(target.addr(), SUBNQN, HOSTNQN)
        };
        let report = run(&spec, &mut |_| ()).unwrap();
        assert_eq!((report.total.ops, report.errors), (33, 0));
        assert_eq!(target.counters().writes.load(SeqCst) - before, 33);
    }
    for (i, chunk) in target.disk()[..33 * 16384].chunks(4096).enumerate() {
        assert_eq!(chunk.iter().any(|&b| b != 0), i % 4 == 0, "{i}");
    }
}

#[test]
fn a_load_that_cannot_be_is_refused_with_its_reason() {
    let target = Target::start(Config {
        mqes: 31,
        ..Config::default()
    });
    let good = LoadSpec {
        queue_depth: 8,
        amount: Amount::Bytes(4096),
        ..LoadSpec::new(target.addr(), SUBNQN, HOSTNQN)
    };
    let refuse = |spec: &LoadSpec| run(spec, &mut |_| ()).unwrap_err().to_string();
    let deep = LoadSpec {
        queue_depth: 32,
        ..good.clone()
    };
    assert!(refuse(&deep).contains("31 commands at a time"));
    let odd = LoadSpec {
        block_bytes: 1000,
        ..good.clone()
    };
    assert!(refuse(&odd).contains("multiple"));
    let wide = LoadSpec {
        queues: 3,
        ..good.clone()
    };
    assert!(refuse(&wide).contains("grants 2"));
    let nowhere = LoadSpec {
        cpu: Some(1 << 20),
        ..good.clone()
    };
    assert!(refuse(&nowhere).contains("no CPU"));
    let gone = LoadSpec {
        nsid: 9,
        ..good.clone()
    };
    assert!(refuse(&gone).contains("namespace 9"));
    run(&good, &mut |_| ()).unwrap();
}

#[test]
fn errors_are_counted_and_a_death_is_an_error() {
    let target = Target::start(Config {
        fail_write: 5,
        ..Config::default()
    });
    let spec = LoadSpec {
        read_percent: 0,
        amount: Amount::Bytes(10 * 4096),
        ..LoadSpec::new(target.addr(), SUBNQN, HOSTNQN)
    };
    let report = run(&spec, &mut |_| ()).unwrap();
    assert_eq!((report.total.ops, report.errors), (9, 1));
    assert!(report.first_error.unwrap().contains("CAPACITY_EXCEEDED"));
    let long = LoadSpec {
        amount: Amount::Duration(Duration::from_secs(60)),
        ..spec
    };
    let error = std::thread::scope(|scope| {
        scope.spawn(|| {
            while target.counters().writes.load(SeqCst) < 1000 {
                std::thread::yield_now();
            }
            target.die(false);
        });
        run(&long, &mut |_| ()).unwrap_err()
    });
    assert!(
        error.is_connection_lost() && !matches!(error, Error::Argument(_)),
        "{error}"
    );
}

/// A load may be slower than its pace, but never faster.
#[test]
fn a_load_has_its_pace() {
    let target = Target::start(Config::default());
    for (cpu, queues, wait, burst) in [
        (None, 1, Wait::Spin, 8),
        (None, 1, Wait::Block, 1),
        (Some(0), 2, Wait::Block, 8),
    ] {
        let every = Duration::from_millis(2);
        let spec = LoadSpec {
            queue_depth: 16,
            queues,
            cpu,
            wait,
            pace: Some(Pace { burst, every }),
            amount: Amount::Bytes(80 * 4096),
            ..LoadSpec::new(target.addr(), SUBNQN, HOSTNQN)
        };
        let report = run(&spec, &mut |_| ()).unwrap();
        assert_eq!((report.total.ops, report.errors), (80, 0));
        let bursts = 80u32.div_ceil(u32::from(burst) * u32::from(queues));
        assert!(report.elapsed >= every * (bursts - 1), "{report:?}");
    }
    let none = LoadSpec {
        pace: Some(Pace {
            burst: 1,
            every: Duration::ZERO,
        }),
        ..LoadSpec::new(target.addr(), SUBNQN, HOSTNQN)
    };
    assert!(
        run(&none, &mut |_| ())
            .unwrap_err()
            .to_string()
            .contains("pace")
    );
}
