//! What can be set, by name.
//!
//! **Design.** The paper names some of these and gives none but the size of the reserve. What hardly matters is a constant, with
//! its reason. **Not here:** models of devices and links (the simulator has its own).

use crate::resources::MAX_WINDOW_NS;

/// What a link loses because commands for the other link keep it waiting is given out in the next window, up to this part of
/// what there is: more, and a lane could save a link for itself.
pub const LINK_CARRIED: f32 = 0.125;
/// So many windows that a reactor was late are made up for in the next: 20 ms, a slice of the system's scheduler.
pub const LATE_WINDOWS: u64 = 64;
/// Queueing below this part of the target says that costs are estimated too high. At half, the two would meet.
pub const CALM_DELAY: f32 = 0.25;
/// A correction grows by this part in a window: costs that double are known in 20 windows.
pub const STEP_UP: f32 = 0.04;
/// A correction shrinks by this part in a window. Slower than it grows, so that it does not swing.
pub const STEP_DOWN: f32 = 0.01;
/// Below this part of use, delay says nothing about costs.
pub const BUSY: f32 = 0.5;
/// An unused allocation below this part of its base is nothing: after six windows without use a tenant rests.
pub const FORGET: f32 = 1.0 / 64.0;
/// What lanes have not begun of the processor's time they were given counts as a delay so many times, as if it stayed.
pub const BACKLOG_WEIGHT: u64 = 4;
/// All reactors that have volumes of a tenant count as this part of its base, besides their demand: a volume that wakes finds a share.
pub const BEGINNER: f32 = 1.0 / 256.0;
/// No published demand is more than so many times a base: sums of all reactors stay within 64 bits.
pub const MOST_PUBLISHED: f32 = 1000.0;
/// A reactor whose own lanes began nothing for so long, ns, is idle, and may help others: two windows. With one, it would come and go.
pub const IDLE_NS: u64 = 600_000;
/// A reactor is helped once it was at work for more than this part of its time.
pub const HELP_FROM: f64 = 0.95;
/// And until what it and its helpers do is less than this part of one processor's time.
pub const HELP_UNTIL: f64 = 0.9;
/// The time over which that is judged, ns: several windows.
pub const HELP_NS: u64 = 2_000_000;

/// See the module's text.
#[derive(Clone, PartialEq, Debug)]
pub struct Params {
    /// The length of a window, ns.
    pub window_ns: u64,
    /// What is left of an allocation in the next window to a tenant that neither bursts nor waits (the paper's alpha).
    pub keep: f32,
    /// What waits counts so many times what was used (the paper's `weight_throttle`).
    pub weight_waiting: f32,
    /// So much of what there is may be given out: the rest is the price of short queues.
    pub utilisation: f32,
    /// So many tenants can come back to their base out of the reserve at once ...
    pub reserve_tenants: u32,
    /// ... as far as that is at most this part of what there is.
    pub reserve_most: f32,
    /// So many bursting tenants are looked at, of which the better gives: the paper's two; 1; or none, and nobody gives.
    pub choices: u32,
    /// So many windows' base can be saved for use within one: load is not even. With 1, what a window brings beyond whole I/Os is lost.
    pub saved_windows: u32,
    /// Whoever stays within their base is given so much more than they used last, up to it; and so is a volume of what its
    /// siblings can spare.
    pub headroom: f32,
    /// The queueing that is aimed at, ns: more of it, and costs were estimated too low.
    pub target_delay_ns: u64,
    /// The least that a cost is taken for, of what is calibrated.
    pub correction_least: f32,
    /// The most.
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

/// A parameter that makes no sense.
#[derive(Clone, PartialEq, Debug)]
pub struct BadParam {
    /// Which.
    pub name: &'static str,
    /// What it was set to.
    pub value: f64,
    /// What can be.
    pub least: f64,
    /// What can be.
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

/// A parameter that can be set by its name: its range, and its place.
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
    /// Each within its range.
    /// Errors: the first that is not.
    pub fn check(&self) -> Result<(), BadParam> {
        ROWS.iter().try_for_each(|row| row.check((row.get)(self)))
    }

    /// All that can be set, by name.
    pub fn values(&self) -> impl Iterator<Item = (&'static str, f64)> {
        ROWS.iter().map(|row| (row.name, (row.get)(self)))
    }

    /// Sets one by its name; false if there is none of that name.
    /// Errors: it can't be set to this; then it is as it was.
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
        // What is an f32 is a little off when it is written as an f64.
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
