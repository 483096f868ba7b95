//! What can be set, by name.
//!
//! **Design.** The paper names some of these and gives none but the size of the reserve; the defaults are those that
//! `cargo xtask sweep burst` finds good. **Not here:** the models of devices and links ([`crate::sim`] has its own).

use crate::units::MAX_WINDOW_NS;
use serde::{Deserialize, Serialize};

/// How the reactor's time and the node's resources are given out.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Hash, Serialize, Deserialize)]
pub enum Policy {
    /// Base guaranteed, the rest shared: BurstCBS.
    #[default]
    Burst,
    /// Everyone has their base and never more: the paper's BaseCBS.
    Base,
    /// Everyone up to their burst limit, lanes in a weighted round robin: the paper's WildCBS.
    Wild,
}

impl Policy {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Burst, Self::Base, Self::Wild];

    /// Its name in a setting.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Burst => "burst",
            Self::Base => "base",
            Self::Wild => "wild",
        }
    }
}

/// See the module's text.
#[derive(Clone, PartialEq, Debug)]
pub struct Params {
    /// How things are given out.
    pub policy: Policy,
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
    /// Of the reserve that nobody came for, this part is given out in the next window.
    pub reserve_carried: f32,
    /// What is lost of a link, because what waits in a lane for the other keeps those behind it from this one, is given out in the
    /// next window, but no more than this part of what there is.
    pub link_carried: f32,
    /// So many bursting tenants are looked at, of which the better gives: the paper's two; 1; or none, and nobody gives.
    pub choices: u32,
    /// So many windows' base can be saved for use within one: load is not even. With 1, what a window brings beyond whole I/Os is lost.
    pub saved_windows: u32,
    /// So many windows that a reactor was late are made up for in the next one.
    pub late_windows: u32,
    /// Whoever stays within their base is given so much more than they used last, up to it; and so is a volume of what its
    /// siblings can spare.
    pub headroom: f32,
    /// The queueing that is aimed at, ns: more of it, and costs were estimated too low.
    pub target_delay_ns: u64,
    /// Less queueing than this part of it, while there is much to do, and costs were estimated too high.
    pub calm_delay: f32,
    /// A correction grows so much in a window.
    pub step_up: f32,
    /// A correction shrinks so much in a window.
    pub step_down: f32,
    /// The least that a cost is taken for, of what is calibrated.
    pub correction_least: f32,
    /// The most.
    pub correction_most: f32,
    /// Below this part of use, delay says nothing about costs.
    pub busy: f32,
    /// Below this part of its base, an allocation that nobody uses is nothing, and its tenant is forgotten until it comes back.
    pub forget: f32,
    /// The processor's time, by what its I/Os cost, that a lane may begin in a reactor's turn, and all above their base together, ns.
    pub lump_ns: u32,
    /// The same of a lane that is alone, ns.
    pub calm_lump_ns: u32,
    /// Under `wild`: the processor's time that a lane may begin in a round, if its tenant's base is what those of all at work
    /// are in the mean, ns.
    pub batch_ns: u32,
    /// A tenant that is alone may use so many times what devices were measured to do.
    pub alone_most: f32,
    /// After so many windows in which no other was at work, a tenant is alone on its node, and a lane on its reactor: who comes now and
    /// then finds all as if it were always there.
    pub alone_windows: u32,
    /// What lanes were given of the processor and have not begun when a window ends counts as a delay so many times: as if it stayed.
    pub backlog_weight: u32,
    /// All reactors that have volumes of a tenant count together as so much of its base, besides their demand: who wakes finds a share.
    pub beginner: f32,
    /// The same of each export of a volume that has several. A limit is nothing that must be there at once, so it is not kept from
    /// others.
    pub new_lane: f32,
    /// No demand is told as more than so many times a base.
    pub most_told: f32,
    /// A reactor whose own lanes began nothing for so many windows is idle, and may help others.
    pub idle_windows: u32,
    /// A reactor is helped once it was at work for more than this part of its time ...
    pub help_from: f32,
    /// ... and until what it and those who help it are at work for is less than this part of one processor's.
    pub help_until: f32,
    /// Over so much time that is judged, ns.
    pub help_ns: u64,
    /// Of the smallest buffers, so many stay at hand for each lane, of each next size half as many.
    pub own_buffers: u32,
    /// What a burst has borrowed of buffers goes back after so many looks, 0.1 s apart, that found it over.
    pub burst_over: u32,
}

impl Default for Params {
    fn default() -> Self {
        Self {
            policy: Policy::Burst,
            window_ns: 300_000,
            keep: 0.5,
            weight_waiting: 1.0,
            utilisation: 0.99,
            reserve_tenants: 2,
            reserve_most: 0.05,
            reserve_carried: 1.0,
            link_carried: 0.125,
            choices: 2,
            saved_windows: 4,
            late_windows: 64,
            headroom: 0.125,
            target_delay_ns: 200_000,
            calm_delay: 0.25,
            step_up: 0.04,
            step_down: 0.01,
            correction_least: 0.1,
            correction_most: 4.0,
            busy: 0.5,
            forget: 1.0 / 64.0,
            lump_ns: 12_000,
            calm_lump_ns: 75_000,
            batch_ns: 75_000,
            alone_most: 2.0,
            alone_windows: 32,
            backlog_weight: 4,
            beginner: 1.0 / 256.0,
            new_lane: 1.0 / 256.0,
            most_told: 1000.0,
            idle_windows: 2,
            help_from: 0.95,
            help_until: 0.9,
            help_ns: 2_000_000,
            own_buffers: 8,
            burst_over: 5,
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

/// All but the policy.
static ROWS: [Row; 35] = rows! {
    window_ns: u64, 50_000.0, MAX_WINDOW_NS as f64;
    keep: f32, 0.0, 0.99;
    weight_waiting: f32, 0.0, 1000.0;
    utilisation: f32, 0.1, 1.0;
    reserve_tenants: u32, 0.0, 1024.0;
    reserve_most: f32, 0.0, 0.5;
    reserve_carried: f32, 0.0, 1.0;
    link_carried: f32, 0.0, 0.5;
    choices: u32, 0.0, 2.0;
    saved_windows: u32, 1.0, 1000.0;
    late_windows: u32, 1.0, 1000.0;
    headroom: f32, 0.0, 10.0;
    target_delay_ns: u64, 1000.0, 10_000_000.0;
    calm_delay: f32, 0.0, 1.0;
    step_up: f32, 0.0001, 1.0;
    step_down: f32, 0.0001, 0.5;
    correction_least: f32, 0.01, 1.0;
    correction_most: f32, 1.0, 100.0;
    busy: f32, 0.0, 1.0;
    forget: f32, 0.0001, 1.0;
    lump_ns: u32, 1000.0, 1_000_000.0;
    calm_lump_ns: u32, 1000.0, 1_000_000.0;
    batch_ns: u32, 1000.0, 10_000_000.0;
    alone_most: f32, 1.0, 100.0;
    alone_windows: u32, 1.0, 100_000.0;
    backlog_weight: u32, 0.0, 1000.0;
    beginner: f32, 0.0001, 1.0;
    new_lane: f32, 0.0001, 1.0;
    most_told: f32, 1.0, 100_000.0;
    idle_windows: u32, 1.0, 1000.0;
    help_from: f32, 0.0, 1.0;
    help_until: f32, 0.0, 1.0;
    help_ns: u64, 50_000.0, 1e9;
    own_buffers: u32, 0.0, 1024.0;
    burst_over: u32, 1.0, 1000.0;
};

impl Params {
    /// Each within its range.
    ///
    /// # Errors
    /// The first that is not.
    pub fn check(&self) -> Result<(), BadParam> {
        ROWS.iter().try_for_each(|row| row.check((row.get)(self)))
    }

    /// All by name, but the policy.
    pub fn values(&self) -> impl Iterator<Item = (&'static str, f64)> {
        ROWS.iter().map(|row| (row.name, (row.get)(self)))
    }

    /// Sets one by its name; false if there is none of that name.
    ///
    /// # Errors
    /// It can't be set to this; then it is as it was.
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
