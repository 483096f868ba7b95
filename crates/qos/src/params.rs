//! The scheduler's parameters. The paper names some, but gives only the size of the reserve.

use crate::resources::MAX_WINDOW_NS;

/// Part of a link's capacity that carries over when a lane waits for the other link. With more,
/// lanes could hoard a link.
pub const LINK_CARRIED: f32 = 0.125;
/// Below this part of the target delay, costs are estimated too high. The gap to the target keeps
/// corrections from oscillating.
pub const LATE_WINDOWS: u64 = 64;
/// Below this part of the target delay, costs are estimated too high. At a half, both corrections
/// would meet.
pub const CALM_DELAY: f32 = 0.25;
/// Growth of a correction per window: doubled costs are found in 20 windows.
pub const STEP_UP: f32 = 0.04;
/// Decrease of a correction per window: slower, against oscillation.
pub const STEP_DOWN: f32 = 0.01;
/// Below this utilisation, a short delay lowers no correction below 1.
pub const BUSY: f32 = 0.5;
/// Unused allocations below this part of the base are dropped: a tenant is idle after six unused
/// windows.
pub const FORGET: f32 = 1.0 / 64.0;
/// The processor's queueing delay is this many times the time that queued lanes left unused.
pub const BACKLOG_WEIGHT: u64 = 4;
/// A small extra demand in bases, split over a tenant's reactors, so that an idle one keeps a small
/// share.
pub const BEGINNER: f32 = 1.0 / 256.0;
/// The largest published demand, in bases, so that sums fit 64 bits.
pub const MOST_PUBLISHED: f32 = 1000.0;
/// After this time (two windows) without beginning a command of its own, a reactor is idle and may
/// help. With one, it would flip between idle and busy.
pub const IDLE_NS: u64 = 600_000;
/// Utilisation above which a reactor gets help.
pub const HELP_FROM: f64 = 0.95;
/// Help ends when a reactor and its helpers together need less than this part of a processor.
pub const HELP_UNTIL: f64 = 0.9;
/// Time over which utilisation is measured.
pub const HELP_NS: u64 = 2_000_000;

/// The scheduler's parameters; [`Params::set`] sets one by name.
#[derive(Clone, PartialEq, Debug)]
pub struct Params {
    /// Length of a window, in ns.
    pub window_ns: u64,
    /// Part of an unused allocation that remains (the paper's alpha).
    pub keep: f32,
    /// Weight of waiting against used resources (the paper's `weight_throttle`).
    pub weight_waiting: f32,
    /// Part of the capacity that is given out; the rest keeps queues short.
    pub utilisation: f32,
    /// Idle tenants that can return to their base at once, out of the reserve.
    pub reserve_tenants: u32,
    /// The largest reserve, as a part of the capacity.
    pub reserve_most: f32,
    /// Bursting tenants to compare when taking from one: 2 in the paper, 1, or 0 for none.
    pub choices: u32,
    /// Windows of base saved for uneven load. With 1, fractions of an I/O are lost.
    pub saved_windows: u32,
    /// Growth of an allocation over the last use, within the base.
    pub headroom: f32,
    /// Target queueing delay, in ns.
    pub target_delay_ns: u64,
    /// The smallest correction of a cost.
    pub correction_least: f32,
    /// The largest correction of a cost.
    pub correction_most: f32,
}

impl Default for Params {
    fn default() -> Self {
        Self {
            window_ns: 300_000,
            keep: 0.5,
            weight_waiting: 1.0,
            utilisation: 0.99,
            reserve_tenants: 2,
            reserve_most: 0.05,
            choices: 2,
            saved_windows: 4,
            headroom: 0.125,
            target_delay_ns: 200_000,
            correction_least: 0.1,
            correction_most: 4.0,
        }
    }
}

/// A parameter out of range.
#[derive(Clone, PartialEq, Debug)]
pub struct BadParam {
    /// Its name.
    pub name: &'static str,
    /// Its value.
    pub value: f64,
    /// Least valid value.
    pub least: f64,
    /// Largest valid value.
    pub most: f64,
}

impl std::fmt::Display for BadParam {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self {
            name,
            value,
            least,
            most,
        } = self;
        write!(f, "{name} is {value}: it can be {least} to {most}")
    }
}

impl std::error::Error for BadParam {}

struct Row {
    name: &'static str,
    least: f64,
    most: f64,
    get: fn(&Params) -> f64,
    set: fn(&mut Params, f64),
}

macro_rules! rows {
    ($($name:ident: $type:ty, $least:expr, $most:expr;)*) => {
        [$(Row {
            name: stringify!($name),
            least: $least,
            most: $most,
            get: |params| params.$name as f64,
            set: |params, value| params.$name = value as $type,
        }),*]
    };
}

static ROWS: [Row; 12] = rows! {
    window_ns: u64, 50_000.0, MAX_WINDOW_NS as f64;
    keep: f32, 0.0, 0.99;
    weight_waiting: f32, 0.0, 1000.0;
    utilisation: f32, 0.1, 1.0;
    reserve_tenants: u32, 0.0, 1024.0;
    reserve_most: f32, 0.0, 0.5;
    choices: u32, 0.0, 2.0;
    saved_windows: u32, 1.0, 1000.0;
    headroom: f32, 0.0, 10.0;
    target_delay_ns: u64, 1000.0, 10_000_000.0;
    correction_least: f32, 0.01, 1.0;
    correction_most: f32, 1.0, 100.0;
};

impl Params {
    /// Finds the first bad parameter.
    pub fn check(&self) -> Result<(), BadParam> {
        ROWS.iter().try_for_each(|row| row.check((row.get)(self)))
    }

    /// All parameters by name.
    pub fn values(&self) -> impl Iterator<Item = (&'static str, f64)> {
        ROWS.iter().map(|row| (row.name, (row.get)(self)))
    }

    /// Sets a parameter; false if the name is unknown. After an error it is unchanged.
    pub fn set(&mut self, name: &str, value: f64) -> Result<bool, BadParam> {
        let Some(row) = ROWS.iter().find(|row| row.name == name) else {
            return Ok(false);
        };
        row.check(value)?;
        (row.set)(self, value);
        Ok(true)
    }
}

impl Row {
    fn check(&self, value: f64) -> Result<(), BadParam> {
        // An f32 is slightly off as an f64.
        let slack = f64::from(f32::EPSILON);
        let least = self.least * (1.0 - slack);
        let most = self.most * (1.0 + slack);
        match (least..=most).contains(&value) {
            true => Ok(()),
            false => Err(BadParam {
                name: self.name,
                value,
                least: self.least,
                most: self.most,
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_defaults_are_good_and_what_is_not_is_named() {
        assert_eq!(Params::default().check(), Ok(()));
        let bad = Params {
            keep: f32::NAN,
            ..Params::default()
        };
        assert_eq!(bad.check().map_err(|bad| bad.name), Err("keep"));
        let bad = Params {
            window_ns: 0,
            ..Params::default()
        };
        let said = bad.check().map_err(|bad| bad.to_string());
        assert_eq!(
            said,
            Err("window_ns is 0: it can be 50000 to 10000000".to_owned())
        );
    }

    #[test]
    fn a_parameter_is_set_by_its_name() {
        let mut params = Params::default();
        for (name, value) in Params::default().values() {
            assert_eq!(params.set(name, value), Ok(true), "{name}");
        }
        assert_eq!(params, Params::default());
        assert_eq!(params.set("reserve_tenants", 7.0), Ok(true));
        assert_eq!(params.reserve_tenants, 7);
        assert_eq!(params.set("no_such", 1.0), Ok(false));
        assert!(params.set("keep", 1.0).is_err());
        assert_eq!(params.keep, 0.5);
    }
}
