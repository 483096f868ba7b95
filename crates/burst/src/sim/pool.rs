//! A reactor's buffers in virtual time: what the parameters of the two tiers do.
//!
//! **Design.** Some lanes come and go: one that comes has so many commands under way until it goes again, and each has a buffer. How
//! deep it is, how long it stays and how long it is away are drawn so that a tenfold is as likely at any scale: so no value is
//! better for being just above what was assumed. The same counts as in the engine ([`crate::tiers`]) say what is given back. Two things
//! are told: what had to be fetched, which its commands wait for (the kernel finds and zeroes pages); and
//! what is kept, without anybody's use of it, which others on the machine lack. A default is good if with less much more is fetched, and
//! with more much more is kept.
//! **Not here:** that buffers run out (sizes and counts are the engine's), the engine's trimming when it is idle.

use super::figures::Effort;
use super::sweep::default_of;
use crate::params::Params;
use crate::tiers::{Tiers, Used, returned_at_once};

/// Lanes of a reactor.
const LANES: usize = 32;
/// As far apart a reactor looks, in ms.
const LOOK_MS: u64 = 100;
/// Sizes of buffers, as the engine has them, and how likely a lane uses one.
const SIZES: [(u32, f64); 4] = [
    (4 << 10, 0.7),
    (16 << 10, 0.1),
    (64 << 10, 0.1),
    (128 << 10, 0.1),
];
/// How many commands a lane has under way, how long it stays and how long it is away, in ms: between these.
const DEPTH: (f64, f64) = (1.0, 128.0);
const STAYS_MS: (f64, f64) = (5.0, 2_000.0);
const AWAY_MS: (f64, f64) = (5.0, 20_000.0);

/// What one setting does.
#[derive(Clone, Debug)]
pub struct Row {
    /// Which parameter.
    pub name: &'static str,
    /// Its value.
    pub value: f64,
    /// Whether that is the default.
    pub default: bool,
    /// Fetched, MiB a second.
    pub fetched: f64,
    /// Of those that are taken, so many have to be fetched, per cent.
    pub cold: f64,
    /// Kept without use, MiB in the mean.
    pub kept: f64,
}

/// Parameters and the values that are tried.
pub(super) const TRIED: &[(&str, super::sweep::Set, &[f64])] = &[
    (
        "own_buffers",
        |p, v| p.own_buffers = v as u32,
        &[0.0, 2.0, 4.0, 8.0, 16.0, 32.0],
    ),
    (
        "burst_over",
        |p, v| p.burst_over = v as u32,
        &[1.0, 2.0, 5.0, 10.0, 20.0, 50.0],
    ),
];

/// All that is tried, in order.
#[must_use]
pub fn sweep(effort: Effort) -> Vec<Row> {
    let mut rows = Vec::new();
    for (name, set, values) in TRIED {
        for value in *values {
            let mut params = Params::default();
            set(&mut params, *value);
            let [fetched, cold, kept] = run(&params, effort.ms * 1000);
            rows.push(Row {
                name,
                value: *value,
                default: default_of(name, *value),
                fetched,
                cold,
                kept,
            });
        }
    }
    rows
}

/// A lane: how many of a size it has out, and until when; 0: it is away.
#[derive(Clone, Copy, Default)]
struct Lane {
    size: usize,
    depth: u32,
    until_ms: u64,
}

#[derive(Clone, Default)]
struct Size {
    used: Used,
    /// With memory.
    present: u32,
}

fn run(params: &Params, ms: u64) -> [f64; 3] {
    let tiers = Tiers::from(params);
    let mut random = 0x2545_F491_4F6C_DD1Du64;
    let mut draw = move || {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        (random >> 11) as f64 / (1u64 << 53) as f64
    };
    let mut lanes = [Lane::default(); LANES];
    let mut sizes = [const {
        Size {
            used: Used::new(),
            present: 0,
        }
    }; SIZES.len()];
    let (mut fetched, mut taken, mut cold, mut kept) = (0u64, 0u64, 0u64, 0f64);
    for now_ms in 0..ms {
        for lane in &mut lanes {
            if lane.until_ms > now_ms {
                continue;
            }
            let mut between = |(least, most): (f64, f64)| least * (most / least).powf(draw());
            if lane.depth > 0 {
                (0..lane.depth).for_each(|_| sizes[lane.size].used.give());
                lane.depth = 0;
                lane.until_ms = now_ms + between(AWAY_MS) as u64;
                continue;
            }
            lane.depth = between(DEPTH) as u32;
            lane.until_ms = now_ms + between(STAYS_MS) as u64;
            let mut at = draw();
            lane.size = 0;
            while at >= SIZES[lane.size].1 && lane.size + 1 < SIZES.len() {
                at -= SIZES[lane.size].1;
                lane.size += 1;
            }
            let size = &mut sizes[lane.size];
            (0..lane.depth).for_each(|_| size.used.take());
            taken += u64::from(lane.depth);
            let more = size.used.out().saturating_sub(size.present);
            size.present += more;
            cold += u64::from(more);
            fetched += u64::from(more) * u64::from(SIZES[lane.size].0);
        }
        for (at, size) in sizes.iter_mut().enumerate() {
            let bytes = SIZES[at].0;
            let free = size.present - size.used.out();
            kept += f64::from(free) * f64::from(bytes);
            if now_ms % LOOK_MS == 0 {
                let own = tiers.own(at, LANES as u32);
                let keep = size.used.look(own, &tiers).unwrap_or(free);
                size.present -= free.saturating_sub(keep).min(returned_at_once(bytes));
            }
        }
    }
    let mib = f64::from(1 << 20);
    [
        fetched as f64 / mib / (ms as f64 / 1000.0),
        100.0 * cold as f64 / taken.max(1) as f64,
        kept / mib / ms as f64,
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What stays at hand, or stays longer, is fetched less often, and kept. With very few buffers at hand somebody always has more, and
    /// no burst is ever over.
    #[test]
    fn what_is_kept_is_not_fetched() {
        let all = sweep(Effort::QUICK);
        for (name, least) in [("own_buffers", 4.0), ("burst_over", 1.0)] {
            let rows = all.iter();
            let rows = rows.filter(|row| row.name == name && row.value >= least);
            let rows: Vec<&Row> = rows.collect();
            assert!(rows.len() >= 4);
            for pair in rows.windows(2) {
                assert!(pair[0].fetched >= pair[1].fetched, "{pair:?}");
                assert!(pair[0].kept <= pair[1].kept, "{pair:?}");
            }
        }
    }
}
