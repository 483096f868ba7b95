//! `cargo xtask bench`: runs a benchmark from [`BENCHES`].

mod bmstore;
mod bmstore_cases;
mod bmstore_clients;
mod bmstore_devices;
mod bmstore_load;
mod bmstore_upgrade;
mod burst;
mod burst_client;
mod burst_rig;
mod burst_spread;
mod busy;
mod ceph;
mod ceph_load;
mod ceph_pause;
mod device;
mod example;
mod floor;
mod forebay;
mod machine_busy;
mod measure;
mod once;
mod place;
mod pool;
mod pool_api;
mod pool_chain;
mod pool_clone;
mod pool_first_write;
mod pool_load;
mod pool_metadata;
mod pool_open;
mod pool_qcow2;
mod pool_stall;
pub(crate) mod profile;
mod recording;
mod recording_file;
mod spdk;
mod spdk_machine;
mod start;
mod tcp;
mod thin;
mod vm;

use std::path::PathBuf;

use anyhow::{Context, Result, bail};

#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Options {
    /// Short runs, for a functional check.
    pub(crate) quick: bool,
    /// File for JSON results.
    pub(crate) json: Option<PathBuf>,
    /// Uses the profile `release`, for published values.
    pub(crate) release: bool,
    /// Filter by name, e.g. `null_read_qd128`, for `bmstore`, `ceph`, `tcp`, `vhost`, `pcie`,
    /// `instructions` and `pool`.
    pub(crate) only: Option<String>,
}

type Bench = (&'static str, fn(&Options) -> Result<()>);

const BENCHES: [Bench; 15] = [
    ("bmstore", bmstore::run),
    ("burst", burst::run),
    ("ceph", ceph::run),
    ("device", device::run),
    ("instructions", recording::run_instructions),
    ("mi", example::run_mi),
    ("pcie", vm::run_pcie),
    ("pool", pool::run),
    ("pool-open", pool_open::run),
    ("recording", recording::run),
    ("start", start::run),
    ("takeover", example::run_takeover),
    ("tcp", tcp::run),
    ("thin", thin::run),
    ("vhost", vm::run_vhost),
];

pub(crate) fn run(args: &[String]) -> Result<bool> {
    let (name, options) = parse(args)?;
    let bench = BENCHES.iter().find(|(bench, _)| *bench == name);
    let Some((_, bench)) = bench else {
        let names: Vec<&str> = BENCHES.iter().map(|(name, _)| *name).collect();
        bail!(
            "no benchmark '{name}'; the benchmarks are: {}",
            names.join(" ")
        );
    };
    if options.release {
        profile::set_release();
    }
    println!("profile: {}", profile::name());
    bench(&options)?;
    Ok(true)
}

fn parse(args: &[String]) -> Result<(&str, Options)> {
    let mut args = args.iter();
    let name = args.next().context("name a benchmark")?;
    let mut options = Options::default();
    while let Some(arg) = args.next() {
        match arg.as_str() {
            "--quick" => options.quick = true,
            "--release" => options.release = true,
            "--json" => {
                let file = args.next().context("--json needs a file")?;
                options.json = Some(PathBuf::from(file));
            }
            "--only" => options.only = Some(args.next().context("--only needs a name")?.clone()),
            other => {
                bail!(
                    "unknown argument '{other}'; the arguments are: --quick, --release, --json FILE, --only NAME"
                )
            }
        }
    }
    Ok((name, options))
}

#[cfg(test)]
mod tests {
    use super::{Options, parse};

    #[test]
    fn arguments() {
        let args = |words: &[&str]| -> Vec<String> { words.iter().map(|w| (*w).into()).collect() };
        let all = args(&[
            "tcp",
            "--quick",
            "--release",
            "--json",
            "x.json",
            "--only",
            "qd1",
        ]);
        let (name, options) = parse(&all).unwrap();
        assert_eq!(name, "tcp");
        let wanted = Options {
            quick: true,
            release: true,
            json: Some("x.json".into()),
            only: Some("qd1".into()),
        };
        assert_eq!(options, wanted);
        assert!(parse(&args(&[])).is_err());
        assert!(parse(&args(&["tcp", "--json"])).is_err());
        assert!(parse(&args(&["tcp", "--only"])).is_err());
        assert!(parse(&args(&["tcp", "--slow"])).is_err());
    }
}
