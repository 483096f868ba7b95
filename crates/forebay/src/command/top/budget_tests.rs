//! Noisy and hurt tenants, and the limit that `why` names.

use super::super::view::tests::samples;
use super::super::view::{Tenant, View};
use super::*;
use crate::cli::TopOrder;
use forebay_control::model::scheduling::{Budget, Limit};

fn limit(iops: u64) -> Limit {
    Limit {
        iops: Some(iops),
        bytes_s: Some(1 << 30),
    }
}

#[test]
fn noisy_and_hurt_tenants_are_shown() {
    let (mut before, mut now) = samples();
    let tenant = |name: &str, iops: u64| TenantStats {
        tenant: name.to_owned(),
        budget: Some(Budget {
            base: Some(Rate {
                iops,
                bytes_s: 1 << 30,
            }),
            burst: Limit {
                iops: Some(10 * iops),
                bytes_s: Some(1 << 30),
            },
            ..Budget::default()
        }),
        granted_iops: Some(0),
        granted_bytes_s: Some(0),
        ..TenantStats::default()
    };
    before.tenants = vec![tenant("acme", 1000), tenant("zoo", 1000)];
    now.tenants = vec![
        TenantStats {
            used_ops: 10_000,
            metered_ops: 8000,
            granted_iops: Some(7000),
            window_iops: 6500,
            window_bytes_s: 1_000_000,
            window_throttled: 9,
            above_iops: 1300,
            above_bytes_s: 900_000,
            window_cost_ns_s: 2000,
            window_corrected_ns_s: 2500,
            active_windows: 100,
            burst_windows: 75,
            cost_ns: 1_000_000,
            corrected_ns: 1_300_000,
            ..tenant("acme", 1000)
        },
        TenantStats {
            used_ops: 1000,
            throttled_ops: 20,
            throttled_ns: 20_000_000,
            granted_iops: Some(400),
            window_throttled: 5,
            ..tenant("zoo", 1000)
        },
    ];
    let view = View::between(&before, &now, TopOrder::Iops);
    let [acme, zoo] = [0, 1].map(|at| view.tenants[at].budget.clone().unwrap());
    assert_eq!(
        (acme.noisy, acme.hurt, acme.burst_percent),
        (true, false, 75.0)
    );
    let words = [
        "NOISY: 5000 IOPS and 0.0 MB/s of a base of 1000 and 1073.7",
        "given 7000 IOPS and 0.0 MB/s",
        "6500 and 1.0 of that used (90 % above base)",
        "9 waiting",
        "75 % of it bursting",
        "4000/s metered",
        "costs 1.30 times the calibrated ones (1.25 now)",
    ];
    assert_eq!(acme.words(), words);
    assert_eq!((zoo.noisy, zoo.hurt), (false, true));
    let words = [
        "used 500 IOPS and 0.0 MB/s of a base of 1000 and 1073.7",
        "given 400 IOPS and 0.0 MB/s",
        "0 and 0.0 of that used",
        "5 waiting",
        "HURT: 10/s wait 1.0 ms, below its base",
    ];
    assert_eq!(zoo.words(), words);
    assert_eq!(Use::default().words(), Vec::<String>::new());
    for (used_iops, credit_percent, why) in [
        (960.0, None, "others use the rest"),
        (960.0, Some(0.5), "its credit is spent"),
        (9600.0, Some(50.0), "at its limit of 10000 IOPS"),
    ] {
        let one = Use {
            used_iops,
            credit_percent,
            ..zoo.clone()
        };
        assert_eq!(one.reason(), why);
    }
    for (granted_iops, why) in [
        (900, BELOW_BASE),
        (1000, "its load peaks above its base"),
        (10_000, "at its limit of 10000 IOPS"),
    ] {
        let one = Use {
            granted_iops: Some(granted_iops),
            ..zoo.clone()
        };
        assert_eq!(one.reason(), why);
    }
}

/// Base and limit are 1000 IOPS; pulses of 64 come ten times a second.
#[test]
fn a_tenant_with_pulsed_load_is_not_shown_as_hurt() {
    let rate = |iops| Rate {
        iops,
        bytes_s: 1 << 30,
    };
    let tenant = |base: u64, burst: u64| TenantStats {
        tenant: "acme".to_owned(),
        budget: Some(Budget {
            base: Some(rate(base)),
            burst: limit(burst),
            ..Budget::default()
        }),
        granted_iops: Some(0),
        granted_bytes_s: Some(0),
        ..TenantStats::default()
    };
    let pulses = TenantStats {
        used_ops: 640,
        throttled_ops: 600,
        throttled_ns: 600 * 30_000_000,
        ..tenant(1000, 1000)
    };
    let seen = |now: &TenantStats| Use::between(Some(&tenant(1000, 1000)), now, 1.0);
    // Idle: the engine shows no allocation.
    let idle = seen(&pulses);
    assert_eq!((idle.hurt, idle.noisy), (false, false));
    assert_eq!(idle.why.as_deref(), Some("its load peaks above its base"));
    // In a pulse it has its base.
    let at_work = TenantStats {
        granted_iops: Some(1000),
        window_throttled: 40,
        ..pulses.clone()
    };
    let why = seen(&at_work).why;
    assert_eq!(why.as_deref(), Some("at its limit of 1000 IOPS"));
    // A tenant below its base is hurt, even if it does not wait at this moment.
    for (granted_iops, throttled) in [(300, 40), (0, 40), (300, 0)] {
        let hurt = TenantStats {
            granted_iops: Some(granted_iops),
            window_throttled: throttled,
            ..pulses.clone()
        };
        assert!(seen(&hurt).hurt, "{granted_iops} {throttled}");
        assert_eq!(seen(&hurt).why.as_deref(), Some(BELOW_BASE));
    }
    // A tenant with only a limit is neither hurt nor noisy.
    let limited = TenantStats {
        budget: tenant(10, 5000)
            .budget
            .map(|of| Budget { base: None, ..of }),
        ..pulses.clone()
    };
    let nothing = TenantStats {
        budget: None,
        ..pulses.clone()
    };
    assert!(!seen(&nothing).noisy);
    for used_ops in [5, 640] {
        let limited = TenantStats {
            used_ops,
            window_throttled: 3,
            ..limited.clone()
        };
        let seen = seen(&limited);
        assert_eq!((seen.noisy, seen.hurt), (false, false), "{used_ops}");
    }
}

#[test]
fn throttled_tenants_come_first_and_list_their_volumes() {
    let (before, mut now) = samples();
    now.tenants = vec![TenantStats {
        tenant: "zoo".to_owned(),
        budget: Some(Budget {
            base: Some(Rate {
                iops: 5000,
                bytes_s: 1 << 30,
            }),
            burst: limit(5000),
            ..Budget::default()
        }),
        throttled_ops: 3000,
        granted_iops: Some(0),
        granted_bytes_s: Some(0),
        ..TenantStats::default()
    }];
    let lane = &mut now.lanes[2];
    lane.throttled_ops = 3000;
    lane.throttled_times = Histogram {
        count: 3000,
        sum_ns: 6_000_000_000,
        buckets: Vec::new(),
    };
    lane.granted_iops = Some(2100);
    lane.granted_bytes_s = Some(275_000_000);
    lane.budget = Some(Budget {
        base: None,
        burst: limit(2000),
        ..Budget::default()
    });
    let mut shared = now.clone();
    let mut other = shared.lanes[2].clone();
    (other.granted_iops, shared.lanes[2].granted_iops) = (Some(1500), Some(600));
    other.volume.push_str("@7");
    shared.lanes.push(other);
    let view = View::between(&before, &shared, TopOrder::Throttled);
    for export in &view.tenants[0].volumes[..2] {
        assert_eq!(
            export.words()[1],
            "at its own limit of 2000 IOPS",
            "{}",
            export.name
        );
    }
    let view = View::between(&before, &now, TopOrder::Throttled);
    assert_eq!(view.tenants[0].name, "zoo");
    let words = [
        "1500/s wait 2.0 ms",
        "at its own limit of 2000 IOPS",
        "given 2100 IOPS and 275.0 MB/s",
    ];
    assert_eq!(view.tenants[0].volumes[0].words(), words);
    let zoo = view.tenants[0].budget.clone().unwrap();
    assert_eq!(
        (zoo.hurt, zoo.why.as_deref()),
        (false, Some("its volumes are at their own limits"))
    );
    assert_eq!(view.tenants[1].volumes[0].words(), Vec::<String>::new());
    assert_eq!(view.tenants[1].volumes[0].budget, None);
}

/// The tenant bursts to 5000 IOPS, its volume to 200.
#[test]
fn the_tighter_limit_is_the_reason() {
    let (before, mut now) = samples();
    let budget = |burst: Limit| Budget {
        burst,
        ..Budget::default()
    };
    now.tenants = vec![TenantStats {
        tenant: "zoo".to_owned(),
        budget: Some(budget(limit(5000))),
        throttled_ops: 3000,
        granted_iops: Some(5000),
        granted_bytes_s: Some(1 << 30),
        used_ops: 398,
        ..TenantStats::default()
    }];
    let lane = &mut now.lanes[2];
    (lane.read, lane.throttled_ops) = (before.lanes[2].read.clone(), 3000);
    lane.read.ops += 398;
    (lane.granted_iops, lane.granted_bytes_s) = (Some(200), Some(1 << 30));
    lane.budget = Some(budget(Limit {
        iops: Some(200),
        bytes_s: None,
    }));
    let seen = |now: &_| {
        let view = View::between(&before, now, TopOrder::Name);
        view.tenants[1].clone()
    };
    let zoo = seen(&now);
    let why = |of: &Tenant| of.budget.as_ref().and_then(|of| of.why.clone());
    assert_eq!(why(&zoo).as_deref(), Some(VOLUMES));
    let part = zoo.volumes[0].budget.clone().unwrap();
    assert_eq!(part.why.as_deref(), Some("at its own limit of 200 IOPS"));
    now.tenants[0].used_ops = 10_000;
    assert_eq!(
        why(&seen(&now)).as_deref(),
        Some("at its limit of 5000 IOPS")
    );
    now.tenants[0].budget = Some(budget(Limit {
        iops: Some(5000),
        bytes_s: Some(100_000_000),
    }));
    (now.tenants[0].used_ops, now.tenants[0].used_bytes) = (2000, 199_000_000);
    assert_eq!(
        why(&seen(&now)).as_deref(),
        Some("at its limit of 100 MB/s")
    );
    now.lanes[2].throttled_ops = 0;
    assert_eq!(seen(&now).volumes[0].budget.as_ref().unwrap().why, None);
}
