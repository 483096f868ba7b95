//! A target with tenants and budgets, and a host for each, for `cargo xtask bench burst`.
//!
//! The daemon has one reactor and a ram device or file; the command line configures it. Connections
//! stay open throughout.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use super::burst_client::{BLOCK, Host, Stream, fill};
use super::forebay::Forebay;
use super::recording_file::RemovedAtEnd;

/// Per tenant.
const VOLUME_BYTES: u64 = 16 << 20;
/// Effectively unlimited.
const ENDLESS: u64 = 4_000_000;

/// Transport of the hosts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Way {
    Pcie,
    Tcp,
}

impl Way {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Pcie => "pcie",
            Self::Tcp => "tcp",
        }
    }
}

/// Admission policy; only budgets differ.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Policy {
    /// No budgets.
    Off,
    /// Burst limits without base: the paper's WildCBS.
    Wild,
    /// Burst limits equal to the base: the paper's BaseCBS.
    Base,
    /// A base each, unlimited bursts.
    Burst,
}

pub(super) const POLICIES: [Policy; 4] = [Policy::Off, Policy::Wild, Policy::Base, Policy::Burst];

impl Policy {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::Wild => "wild",
            Self::Base => "base",
            Self::Burst => "burst",
        }
    }
}

pub(super) struct Rig {
    pub(super) forebay: Forebay,
    pub(super) streams: Vec<Stream>,
    tenants: Vec<String>,
    /// Operations a second, by tenant.
    pub(super) bases: Vec<u64>,
    policy: Policy,
    _file: RemovedAtEnd,
}

impl Rig {
    pub(super) fn start(program: &Path, device: &str, way: Way, tenants: usize) -> Result<Self> {
        let file = format!("bench-burst-{}.img", std::process::id());
        let file = RemovedAtEnd(crate::cargo::target_folder().join(file));
        let forebay = match device {
            "file" => {
                let size = VOLUME_BYTES.to_string();
                std::fs::File::create(&file.0)?.set_len(2 << 30)?;
                let spec = format!("file:{}", file.0.display());
                Forebay::start_with(program, &spec, 0, &size)?
            }
            device => Forebay::start(program, device, 0)?,
        };
        let mut this = Self {
            forebay,
            streams: Vec::new(),
            tenants: Vec::new(),
            bases: vec![0; tenants],
            policy: Policy::Off,
            _file: file,
        };
        for tenant in 0..tenants {
            let name = format!("t{tenant}");
            let volume = format!("{name}/v");
            let cli = |args: &[&str]| this.forebay.cli(args);
            cli(&["tenant", "create", &name])?;
            cli(&[
                "volume",
                "create",
                &volume,
                "--size",
                &VOLUME_BYTES.to_string(),
            ])?;
            let host = match way {
                Way::Pcie => {
                    let export = cli(&["export", "create", &volume, "--nvme-pcie"])?;
                    let socket = export["socket"].as_str().context("no socket")?;
                    Host::vm(&this.forebay.folder().join(PathBuf::from(socket)))?
                }
                Way::Tcp => Host::tcp(this.forebay.port, &this.forebay.export(&volume)?)?,
            };
            let mut stream = Stream {
                host,
                places: VOLUME_BYTES / u64::from(BLOCK),
            };
            fill(&mut stream)?;
            this.streams.push(stream);
            this.tenants.push(name);
        }
        // The benchmark chooses bases freely.
        (this.forebay).cli(&["scheduling", "set", "--oversubscription", "100"])?;
        Ok(this)
    }

    /// Measures and stores the costs of I/O.
    pub(super) fn calibrate(&self, quick: bool) -> Result<()> {
        let quick: &[&str] = if quick {
            &["--quick"]
        } else {
            &["--seconds", "30"]
        };
        let args = [&["calibrate", "--anyway"][..], quick].concat();
        let costs = &self.forebay.cli(&args)?["costs"];
        let reads = costs
            .as_array()
            .into_iter()
            .flatten()
            .filter(|cost| cost["operation"] == "read");
        for cost in reads {
            println!(
                "a read of 4 KiB over {}: {:.0} ns of the processor, {:.0} ns of the device",
                cost["frontend"],
                cost["cpu_ns"][0].as_f64().unwrap_or(0.0),
                cost["device_ns"][0].as_f64().unwrap_or(0.0)
            );
        }
        Ok(())
    }

    /// Sets policy and budgets.
    pub(super) fn set(&mut self, policy: Policy) -> Result<()> {
        if policy == self.policy {
            return Ok(());
        }
        self.policy = policy;
        for (name, base) in self.tenants.iter().zip(&self.bases) {
            let number = |iops: u64| (iops.to_string(), (iops * u64::from(BLOCK)).to_string());
            let most = match policy {
                Policy::Base => *base,
                _ => ENDLESS,
            };
            let ((base, bytes), (most, most_bytes)) = (number(*base), number(most));
            let budget = |more: &[&str]| {
                let args = [&["tenant", "budget", name.as_str()], more].concat();
                self.forebay.cli(&args).map(drop)
            };
            if policy == Policy::Off {
                budget(&["--none"])?;
                continue;
            }
            budget(&["--burst-iops", &most, "--burst-bandwidth", &most_bytes])?;
            match policy {
                Policy::Wild => budget(&["--no-base"])?,
                _ => budget(&["--base-iops", &base, "--base-bandwidth", &bytes])?,
            }
        }
        Ok(())
    }
}
