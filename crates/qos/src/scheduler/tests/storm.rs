//! Budgets that change all the time.

use super::{ALL, Bench, budget, even, params};
use crate::budget::Burst;

#[test]
fn qos_set_storm() {
    // 10,000 changes of six tenants, 25 per window; two others stay within their base.
    let mut bench = Bench::new(&[budget(50_000, 600_000, Burst::Metered); 8], params());
    let mut random = fastrand::Rng::with_seed(7);
    let mut draw = |below: u64| random.u64(..below);
    let mut limits = [600u64; 8];
    let mut changes = 0;
    let mut ended = [0u64; 2];
    while changes < 10_000 {
        for _ in 0..25 {
            let tenant = 2 + draw(6) as usize;
            let base = 10_000 + 1000 * draw(60);
            let burst = base + 1000 * draw(500);
            let how = if draw(2) == 0 {
                Burst::Metered
            } else {
                Burst::Credit { seconds: 1 }
            };
            bench.set_budget(tenant, &budget(base, burst, how));
            limits[tenant] = burst.div_ceil(1000);
            changes += 1;
        }
        bench.window(300, &|tenant, window, step| {
            if tenant < 2 {
                even(50, window, step)
            } else {
                ALL
            }
        });
        // Allocations are cut at once: the new limit, plus saved base.
        for tenant in 2..8 {
            let most = limits[tenant] + 4 * 70;
            assert!(
                bench.ended[tenant] <= most,
                "{} of {most}",
                bench.ended[tenant]
            );
        }
        ended[0] += bench.ended[0];
        ended[1] += bench.ended[1];
        let asked = 50 * bench.window;
        for ended in ended {
            assert!(ended + 50 >= asked, "{ended} of {asked}");
        }
    }
    for tenant in 2..8 {
        bench.set_budget(tenant, &budget(20_000, 30_000, Burst::Metered));
    }
    let all = |tenant: usize, _: u64, _: usize| if tenant < 2 { (0, 4096) } else { ALL };
    for _ in 0..20 {
        bench.window(300, &all);
    }
    assert_eq!(bench.ended[2..], [30; 6]);
    for tenant in 2..8 {
        bench.set_budget(tenant, &budget(50_000, 60_000, Burst::Metered));
    }
    bench.window(300, &all);
    bench.window(300, &all);
    let had = &bench.ended[2..];
    assert!(had.iter().all(|ended| *ended >= 48), "{had:?}");
    // A limit for a tenant with the whole reactor cuts this window's allocation too.
    let alone = |tenant: usize, _: u64, _: usize| if tenant == 2 { ALL } else { (0, 4096) };
    bench.set_budget(2, &budget(20_000, 600_000, Burst::Metered));
    for _ in 0..40 {
        bench.window(300, &alone);
    }
    assert!(bench.ended[2] >= 590, "{:?}", bench.ended);
    bench.set_budget(2, &budget(20_000, 30_000, Burst::Metered));
    bench.window(300, &alone);
    assert!(bench.ended[2] <= 31, "{:?}", bench.ended);
}
