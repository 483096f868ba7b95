//! A volume with several exports.

use super::*;

#[test]
fn exports_of_a_volume_have_its_budget_together() {
    let mut rig = rig(&Budget::unstated(), &fixed(100));
    let first = rig.b.core.lane(LaneIndex(3)).unwrap();
    let (volume, export) = (first.volume.clone(), first.export.clone());
    let region = rig.b.core.region.clone();
    let second = Lane::new(LaneIndex(5), volume.clone(), export, region);
    rig.b.core.set_lane(second);
    let set = |rig: &mut Rig, ops| {
        let budget = Some(fixed(ops));
        let share = Some(Share { tenant: 0, budget });
        rig.b.core.set_share(V, share);
    };
    set(&mut rig, 4);
    let window = |rig: &mut Rig, lanes: &[u32]| {
        for lane in lanes {
            while rig.throttled(*lane).1 < 8 {
                rig.read(*lane);
            }
        }
        rig.pass(WINDOW_NS);
        let mut sum = 0;
        let mut ended = |rig: &mut Rig| {
            let ended = rig.ended_well().len();
            sum += ended;
            ended > 0
        };
        while ended(rig) {
            rig.pass(1000);
        }
        sum
    };
    // Use before the second export does not count.
    let _: usize = (0..8).map(|_| window(&mut rig, &[3, 5])).sum();
    let sum: usize = (0..50).map(|_| window(&mut rig, &[3, 5])).sum();
    assert!((190..=204).contains(&sum), "{sum}");
    // Neither lags behind for long.
    let before = [3, 5].map(|lane| rig.throttled(lane).0);
    let sum: usize = (0..50).map(|_| window(&mut rig, &[3, 5])).sum();
    for (lane, before) in [3, 5].into_iter().zip(before) {
        let begun = (rig.throttled(lane).0 - before) as usize;
        assert!(5 * begun >= 2 * sum, "lane {lane}: {begun} of {sum}");
    }
    // One alone has nearly all; a larger budget serves both.
    let sum: usize = (0..50).map(|_| window(&mut rig, &[3])).sum();
    assert!((190..=204).contains(&sum), "{sum}");
    set(&mut rig, 8);
    let sum: usize = (0..50).map(|_| window(&mut rig, &[3, 5])).sum();
    assert!((380..=408).contains(&sum), "{sum}");
    // Nothing is kept for a removed export.
    rig.b.core.remove_lane(LaneIndex(5));
    rig.ended();
    let sum: usize = (0..50).map(|_| window(&mut rig, &[3])).sum();
    assert!((390..=408).contains(&sum), "{sum}");
}
