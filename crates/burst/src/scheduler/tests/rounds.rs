//! What is a lane's of a round, under `wild`.

use super::*;
use crate::params::Policy;

#[test]
fn a_batch_is_in_proportion_to_the_base() {
    let params = Params {
        policy: Policy::Wild,
        ..params()
    };
    let batch_ns = params.batch_ns as i32;
    let base = |iops| budget(iops, 900_000, Burst::Metered);
    let mut bench = Bench::new(&[base(30_000), base(10_000), base(80_000)], params);
    let begin = |bench: &mut Bench, tenant| {
        bench.scheduler.set_part_ns(tenant, 0);
        bench.scheduler.begin_batch(tenant);
        bench.scheduler.part_ns(tenant)
    };
    // Nothing is known yet.
    assert_eq!(begin(&mut bench, 1), batch_ns);
    // The third is not at work, and does not count.
    let both = |tenant, _, _| if tenant < 2 { ALL } else { NONE };
    for _ in 0..4 {
        bench.window(100, &both);
    }
    let parts = [0, 1].map(|tenant| begin(&mut bench, tenant));
    for (part, of) in parts.into_iter().zip([3, 1]) {
        assert!((part - batch_ns * of / 2).abs() < 100, "{parts:?}");
    }
    // What was had too much is had less now; what was left is not saved.
    for (left, more) in [(-9_000, -9_000), (9_000, 0)] {
        bench.scheduler.set_part_ns(1, left);
        bench.scheduler.begin_batch(1);
        assert_eq!(bench.scheduler.part_ns(1), parts[1] + more);
    }
}
