//! Times the end of a window for several numbers of active tenants:
//! `cargo xtask sim scheduler_time`, in release.
//!
//! Half of the active tenants stay within their base; the others burst and wait. A line has the
//! number of active tenants, the median and the 99th percentile in ns.

use forebay_qos::budget::{Budget, Burst, Rate};
use forebay_qos::cost::Routes;
use forebay_qos::cost::{CostTable, Operation, Profile, Transport};
use forebay_qos::ledger::Ledger;
use forebay_qos::params::Params;
use forebay_qos::resources::PARTS;
use forebay_qos::scheduler::Scheduler;
use std::sync::Arc;
use std::time::Instant;

const TENANTS: usize = 1024;
const ACTIVE: [usize; 8] = [1, 16, 32, 64, 128, 256, 512, 1024];
const WARM: usize = 200;
const WINDOWS: usize = 2000;

fn main() {
    for active in ACTIVE {
        let mut times = windows(active);
        times.sort_unstable();
        println!(
            "{active} {} {}",
            times[WINDOWS / 2],
            times[WINDOWS * 99 / 100]
        );
    }
}

fn windows(active: usize) -> Vec<u128> {
    let profile = Profile::line((1000.0, 0.04), (500.0, 0.1), 64);
    let costs = CostTable::new([[profile; 3]; 3]);
    let ledger = Arc::new(Ledger::new(TENANTS));
    let whole = [1e9, 4e9, 4e9, 12.5e9, 12.5e9, 4e6 * f64::from(PARTS)];
    let Ok(mut scheduler) = Scheduler::new(Params::default(), &whole, TENANTS, &ledger) else {
        return Vec::new();
    };
    let rate = |iops: u64| Rate {
        iops,
        bytes: iops * 8192,
    };
    for tenant in 0..TENANTS {
        let how = match tenant % 3 {
            0 => Burst::Credit { seconds: 60 },
            _ => Burst::Metered,
        };
        let budget = Budget {
            base: rate(1000),
            burst: rate(100_000),
            how,
        };
        scheduler.set_budget(tenant, &budget, &costs, Routes::LOCAL);
        scheduler.attach(tenant, tenant);
    }
    let cost = costs.of(Transport::Tcp, Operation::Read, 4096);
    let mut waits = vec![false; TENANTS];
    let mut times = Vec::with_capacity(WINDOWS);
    let step = TENANTS / active;
    for window in 0..WARM + WINDOWS {
        for tenant in (0..TENANTS).step_by(step) {
            let bursts = (tenant / step) % 2 == 1;
            let wants = if bursts {
                16
            } else {
                usize::from((window + tenant) % 4 == 0)
            };
            for _ in 0..wants {
                let begins = match waits[tenant] {
                    true => scheduler.resume(tenant, &cost),
                    false => scheduler.admit(tenant, &cost),
                };
                if !begins && !waits[tenant] {
                    scheduler.wait(tenant, &cost);
                }
                waits[tenant] = !begins;
                if !begins {
                    break;
                }
            }
        }
        let start = Instant::now();
        scheduler.refill(1, 0);
        let took = start.elapsed();
        if window >= WARM {
            times.push(took.as_nanos());
        }
    }

    assert_eq!(scheduler.active(), active);
    times
}
