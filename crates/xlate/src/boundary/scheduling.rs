//! Converts admission messages to `forebay_qos` types. Messages carry integers, which compare
//! exactly.

use super::parts::{CostProfile, NodeCapacity, Scheduling};
use super::region::TenantRecord;
use forebay_qos::admission::Capacity;
use forebay_qos::cost::{CostTable, Profile};
use forebay_qos::params::Params;
use std::sync::atomic::AtomicU64;

impl CostProfile {
    /// Converts to the type of `forebay_qos`.
    #[must_use]
    pub fn profile(&self) -> Profile {
        let ns = |ps: [u64; 6]| ps.map(|ps| ps as f64 / 1000.0);
        Profile {
            cpu_ns: ns(self.cpu_ps),
            device_ns: ns(self.device_ps),
            header_bytes: self.header_bytes,
        }
    }
}

impl From<&Profile> for CostProfile {
    /// NaN counts as 0.
    fn from(profile: &Profile) -> Self {
        let ps = |ns: [f64; 6]| ns.map(|ns| (ns * 1000.0).round() as u64);
        Self {
            cpu_ps: ps(profile.cpu_ns),
            device_ps: ps(profile.device_ns),
            header_bytes: profile.header_bytes,
        }
    }
}

impl NodeCapacity {
    /// One device as measured, and no other limit.
    pub const UNLIMITED: Self = Self {
        device_reads_milli: 1000,
        device_writes_milli: 1000,
        link_in_bytes_s: u64::MAX,
        link_out_bytes_s: u64::MAX,
        operations_s: u64::MAX,
    };

    /// The capacity with this number of reactors.
    #[must_use]
    pub fn capacity(&self, reactors: u32) -> Capacity {
        Capacity {
            reactors,
            device_reads: self.device_reads_milli as f64 / 1000.0,
            device_writes: self.device_writes_milli as f64 / 1000.0,
            link_in: self.link_in_bytes_s as f64,
            link_out: self.link_out_bytes_s as f64,
            operations: self.operations_s as f64,
        }
    }
}

/// The default parameters with `set` applied. An error names an unknown parameter or a bad value,
/// and what fits.
pub fn params_of<'a>(set: impl Iterator<Item = (&'a str, f64)>) -> Result<Params, String> {
    let mut params = Params::default();
    for (name, value) in set {
        if !params.set(name, value).map_err(|bad| bad.to_string())? {
            let known: Vec<&str> = params.values().map(|(name, _)| name).collect();
            let known = known.join(", ");
            return Err(format!(
                "there is no parameter `{name}`; the parameters are {known}"
            ));
        }
    }
    Ok(params)
}

impl Scheduling {
    /// The parameters; see [`params_of`].
    pub fn params(&self) -> Result<Params, String> {
        let set = self.params.iter();
        params_of(set.map(|(name, bits)| (&**name, f64::from_bits(*bits))))
    }

    /// The costs.
    #[must_use]
    pub fn cost_table(&self) -> CostTable {
        CostTable::new(self.costs.map(|row| row.map(|profile| profile.profile())))
    }
}

impl TenantRecord {
    /// The sums since the start.
    pub fn sums(&self) -> [&AtomicU64; 13] {
        [
            &self.used_ops,
            &self.used_bytes,
            &self.metered_ops,
            &self.metered_bytes,
            &self.throttled_ops,
            &self.throttled_ns,
            &self.taken_ops,
            &self.lost_ops,
            &self.reserve_ops,
            &self.burst_windows,
            &self.active_windows,
            &self.cost_ns,
            &self.corrected_ns,
        ]
    }

    /// The gauges.
    pub fn gauges(&self) -> [&AtomicU64; 11] {
        [
            &self.credit_ops,
            &self.credit_bytes,
            &self.granted_ops_s,
            &self.granted_bytes_s,
            &self.used_ops_s,
            &self.used_bytes_s,
            &self.throttled,
            &self.above_ops_s,
            &self.above_bytes_s,
            &self.window_cost_ns_s,
            &self.window_corrected_ns_s,
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_qos::cost::default_profiles;

    fn scheduling(params: &[(&str, f64)]) -> Scheduling {
        let params = params.iter();
        Scheduling {
            policy: Default::default(),
            params: params
                .map(|(name, value)| ((*name).to_owned(), value.to_bits()))
                .collect(),
            capacity: NodeCapacity::UNLIMITED,
            costs: default_profiles().map(|row| row.each_ref().map(CostProfile::from)),
        }
    }

    #[test]
    fn published_scheduling_parameters_convert_without_loss() {
        let reported = scheduling(&[("keep", 0.25), ("window_ns", 500_000.0)]);
        let params = reported.params().unwrap();
        assert_eq!((params.keep, params.window_ns), (0.25, 500_000));
        for (reported, own) in reported.costs.iter().zip(default_profiles()) {
            for (reported, own) in reported.iter().zip(own) {
                assert!((reported.profile().cpu_ns[3] - own.cpu_ns[3]).abs() < 0.001);
            }
        }
        let endless = reported.capacity.capacity(2).per_second();
        assert_eq!((endless[0], endless[1]), (2e9, 1e9));
    }

    #[test]
    fn invalid_scheduling_parameters_are_named() {
        let said = |params: &[(&str, f64)]| scheduling(params).params().unwrap_err();
        assert!(said(&[("speed", 1.0)]).contains("window_ns"));
        assert_eq!(said(&[("keep", 7.0)]), "keep is 7: it can be 0 to 0.99");
        assert!(said(&[("keep", f64::NAN)]).contains("keep"));
    }
}
