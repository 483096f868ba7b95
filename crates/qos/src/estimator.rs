//! Corrects calibrated costs by observed queueing delay.
//!
//! Above a target delay, a resource's correction grows each window. Far below it ([`CALM_DELAY`]),
//! while the resource is busy, the correction shrinks. Otherwise it returns to 1. The correction is
//! bounded, which limits tenants that provoke it.

use crate::params::{BUSY, CALM_DELAY, Params, STEP_DOWN, STEP_UP};
use crate::resources::SHARED;

/// One reactor's corrections.
#[derive(Clone, Debug)]
pub struct Estimator {
    factor: [f32; SHARED],
    sum_ns: [u64; SHARED],
    count: [u32; SHARED],
    held: [bool; SHARED],
}

impl Default for Estimator {
    fn default() -> Self {
        Self {
            factor: [1.0; SHARED],
            sum_ns: [0; SHARED],
            count: [0; SHARED],
            held: [false; SHARED],
        }
    }
}

impl Estimator {
    /// Adds the total delay of `count` I/Os.
    #[inline]
    pub fn observe(&mut self, resource: usize, sum_ns: u64, count: u32) {
        self.sum_ns[resource] = self.sum_ns[resource].saturating_add(sum_ns);
        self.count[resource] = self.count[resource].saturating_add(count);
    }

    /// Keeps the correction in a window without an observation: one will follow.
    #[inline]
    pub fn hold(&mut self, resource: usize) {
        self.held[resource] = true;
    }

    /// Caps the correction at 1.
    pub fn relieve(&mut self, resource: usize) {
        self.factor[resource] = self.factor[resource].min(1.0);
    }

    /// Scales a correction above 1 when only `part` of the resource remains: the missing part had
    /// raised it.
    pub fn shrink(&mut self, resource: usize, part: f32) {
        let factor = &mut self.factor[resource];
        *factor = (*factor * part).max(factor.min(1.0));
    }

    /// Ends a window with this utilisation (0 to 1).
    pub fn end_window(&mut self, params: &Params, used: &[f32; SHARED]) {
        let calm_ns = (params.target_delay_ns as f32 * CALM_DELAY) as u64;
        for (resource, used) in used.iter().enumerate() {
            let count = std::mem::take(&mut self.count[resource]);
            let sum = std::mem::take(&mut self.sum_ns[resource]);
            if std::mem::take(&mut self.held[resource]) && count == 0 {
                continue;
            }
            let factor = &mut self.factor[resource];
            let delay = sum.checked_div(count.into()).unwrap_or(0);
            let next = if count > 0 && delay > params.target_delay_ns {
                *factor * (1.0 + STEP_UP)
            } else if count > 0 && *used >= BUSY && delay < calm_ns {
                *factor * (1.0 - STEP_DOWN)
            } else if *factor > 1.0 {
                (*factor * (1.0 - STEP_DOWN)).max(1.0)
            } else {
                (*factor * (1.0 + STEP_DOWN)).min(1.0)
            };
            *factor = next.clamp(params.correction_least, params.correction_most);
        }
    }

    /// Multipliers of calibrated costs.
    #[must_use]
    pub fn factors(&self) -> &[f32; SHARED] {
        &self.factor
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::params::Params;

    /// A fully used resource whose true costs are `truth` times the calibrated ones.
    fn settle(truth: f32, start: Estimator, windows: u32) -> (Estimator, Vec<f32>) {
        let params = Params {
            window_ns: 1_000_000,
            target_delay_ns: 20_000,
            ..Params::default()
        };
        let window = params.window_ns as f32;
        let mut estimator = start;
        let mut backlog = 0f32;
        let mut seen = Vec::new();
        for _ in 0..windows {
            let given = window * params.utilisation / estimator.factors()[0];
            let work = given * truth;
            backlog = (backlog + work - window).clamp(0.0, 20.0 * window);
            estimator.observe(0, backlog as u64 * 100, 100);
            let used = (given / window).min(1.0);
            estimator.end_window(&params, &[used, 0.0, 0.0, 0.0, 0.0, 0.0]);
            seen.push(estimator.factors()[0]);
        }
        (estimator, seen)
    }

    #[test]
    fn estimator_converges_both_ways() {
        let mean = |seen: &[f32]| seen.iter().rev().take(500).sum::<f32>() / 500.0;
        // Costs double, return, and fall.
        let (estimator, seen) = settle(2.0, Estimator::default(), 2000);
        assert!((1.8..=2.3).contains(&mean(&seen)), "{}", mean(&seen));
        let (estimator, seen) = settle(1.0, estimator, 2000);
        assert!((0.9..=1.15).contains(&mean(&seen)), "{}", mean(&seen));
        let (_, seen) = settle(0.7, estimator, 2000);
        assert!((0.63..=0.8).contains(&mean(&seen)), "{}", mean(&seen));
    }

    #[test]
    fn a_correction_is_bounded_and_forgets() {
        let params = Params::default();
        let (estimator, _) = settle(50.0, Estimator::default(), 1000);
        assert_eq!(estimator.factors()[0], params.correction_most);
        let (mut estimator, _) = settle(0.01, estimator, 4000);
        assert_eq!(estimator.factors()[0], params.correction_least);
        // Idle: back to 1 from either side.
        for _ in 0..1000 {
            estimator.end_window(&params, &[0.0; SHARED]);
        }
        assert_eq!(estimator.factors()[0], 1.0);
    }
}
