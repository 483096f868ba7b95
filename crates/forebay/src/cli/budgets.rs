//! Command-line options of budgets and of admission. The daemon checks the values.

use clap::{ArgGroup, Args, Subcommand, ValueEnum};
use forebay_control::model::scheduling::Spread;
use forebay_device::size::{SizeError, parse_size};
use forebay_qos::budget::{LEAST, MOST, MOST_CREDIT_SECONDS};

/// A base, available at any time, and a limit for bursts. Values that are not named stay.
#[derive(Debug, Args)]
pub(crate) struct BudgetArgs {
    /// Base operations per second, available at any time, e.g. 2000 or 20k [default: one for every
    /// 128 KiB/s of base bandwidth, if set]
    #[arg(long, value_name = "N|none", value_parser = Amount::iops, allow_negative_numbers = true)]
    pub(crate) base_iops: Option<Amount>,
    /// Base bytes per second, available at any time, e.g. 100M [default: 4 KiB for each base IOPS,
    /// if set]
    #[arg(long, value_name = "SIZE|none", value_parser = Amount::bandwidth, allow_negative_numbers = true)]
    pub(crate) base_bandwidth: Option<Amount>,
    /// Maximum operations per second [default: --base-iops, else no limit]
    #[arg(long, value_name = "N|none", value_parser = Amount::iops, allow_negative_numbers = true)]
    pub(crate) burst_iops: Option<Amount>,
    /// Maximum bytes per second, e.g. 300M [default: --base-bandwidth, else no limit]
    #[arg(long, value_name = "SIZE|none", value_parser = Amount::bandwidth, allow_negative_numbers = true)]
    pub(crate) burst_bandwidth: Option<Amount>,
    /// Remove the base and any credit, but keep the limits that were set
    #[arg(long, conflicts_with_all = ["base_iops", "base_bandwidth"])]
    pub(crate) no_base: bool,
    /// Remove the whole budget
    #[arg(long, conflicts_with_all = ["base_iops", "base_bandwidth", "burst_iops", "burst_bandwidth", "no_base"])]
    pub(crate) none: bool,
}

/// A number, or `none`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Amount(pub(crate) Option<u64>);

impl Amount {
    pub(super) fn iops(text: &str) -> Result<Self, String> {
        Self::parse(text, parse_rate)
    }

    pub(super) fn bandwidth(text: &str) -> Result<Self, String> {
        Self::parse(text, parse_bandwidth)
    }

    fn iops_limit(text: &str) -> Result<Self, String> {
        Self::parse(text, parse_iops).map_err(|error| format!("{error}; use `none` for no limit"))
    }

    fn bandwidth_limit(text: &str) -> Result<Self, String> {
        let bytes = |text: &str| parse_size(text).map(|size| size.bytes);
        Self::parse(text, bytes).map_err(|error| format!("{error}; use `none` for no limit"))
    }

    fn parse<E>(text: &str, of: impl Fn(&str) -> Result<u64, E>) -> Result<Self, E> {
        match text {
            "none" => Ok(Self(None)),
            number => of(number).map(|number| Self(Some(number))),
        }
    }
}

/// A time in seconds, like `60s`, `10m`, `2h` or `1d`.
pub(super) fn parse_seconds(text: &str) -> Result<u32, String> {
    let days = MOST_CREDIT_SECONDS / 86_400;
    let wrong = || format!("a time is written like 60s, 10m, 2h or 1d; the range is 1s to {days}d");
    let end = text.find(|c: char| !c.is_ascii_digit());
    let (number, unit) = text.split_at(end.unwrap_or(text.len()));
    let unit = match unit {
        "s" | "" => 1,
        "m" => 60,
        "h" => 3600,
        "d" => 86_400,
        _ => return Err(wrong()),
    };
    let number: u32 = number.parse().map_err(|_| wrong())?;
    number.checked_mul(unit).ok_or_else(wrong)
}

/// The daemon checks the range.
fn parse_rate(text: &str) -> Result<u64, String> {
    let fits = |error| format!("{error}; the range is {} to {}", LEAST.iops, MOST.iops);
    parse_iops(text).map_err(fits)
}

fn parse_bandwidth(text: &str) -> Result<u64, String> {
    let error = match parse_size(text) {
        // A rate is not rounded to blocks.
        Ok(size) => return Ok(size.bytes),
        Err(SizeError::TooLarge(text)) => format!("`{text}` is too large"),
        Err(error) => error.to_string(),
    };
    Err(format!(
        "{error}; the range is {} to {}",
        LEAST.bytes, MOST.bytes
    ))
}

fn parse_iops(text: &str) -> Result<u64, String> {
    let wrong = || "IOPS are a whole number, like 2000, 20k or 1M".to_owned();
    let (number, times) = match text.char_indices().last() {
        Some((at, 'k' | 'K')) => (&text[..at], 1000),
        Some((at, 'm' | 'M')) => (&text[..at], 1_000_000),
        _ => (text, 1),
    };
    let number: u64 = number.parse().map_err(|_| wrong())?;
    number.checked_mul(times).ok_or_else(wrong)
}

/// JSON has no word for NaN and infinities.
fn parse_number(text: &str) -> Result<f64, String> {
    let number = text.parse().ok().filter(|number: &f64| number.is_finite());
    number.ok_or_else(|| "expected a number".to_owned())
}

#[derive(Debug, Subcommand)]
pub(crate) enum SchedulingCommand {
    /// Show the settings, the node's resources and their promised part
    Show,
    /// Show the cost of I/O on this node, measured or assumed
    Costs {
        /// Delete the measured costs
        #[arg(long)]
        reset: bool,
    },
    /// Change how I/O is admitted on this node
    Set(Box<SchedulingArgs>),
}

#[derive(Debug, Args)]
#[command(group(
    ArgGroup::new("changes")
        .args([
            "spread", "oversubscription", "wants_base", "device_reads", "device_writes",
            "link_bandwidth", "iops_limit", "params",
        ])
        .required(true)
        .multiple(true)
))]
pub(crate) struct SchedulingArgs {
    /// How queues are spread over reactors, with or without budgets
    #[arg(long, value_enum)]
    pub(crate) spread: Option<SpreadArg>,
    /// Allow bases that need up to this multiple of the node's resources; 1 guarantees all bases
    #[arg(long, value_name = "N", value_parser = parse_number, allow_negative_numbers = true)]
    pub(crate) oversubscription: Option<f64>,
    /// The probability that a tenant needs its base at a given time; the probability of
    /// interference is calculated from it
    #[arg(long, value_name = "P", value_parser = parse_number, allow_negative_numbers = true)]
    pub(crate) wants_base: Option<f64>,
    /// The number of devices like the measured one that can be read at full speed at once
    #[arg(long, value_name = "N", value_parser = parse_number, allow_negative_numbers = true)]
    pub(crate) device_reads: Option<f64>,
    /// The same number for writes
    #[arg(long, value_name = "N", value_parser = parse_number, allow_negative_numbers = true)]
    pub(crate) device_writes: Option<f64>,
    /// The network's bytes per second in each direction, or `none` for no limit
    #[arg(long, value_name = "SIZE|none", value_parser = Amount::bandwidth_limit)]
    pub(crate) link_bandwidth: Option<Amount>,
    /// Maximum operations per second of the node, or `none`
    #[arg(long, value_name = "N|none", value_parser = Amount::iops_limit)]
    pub(crate) iops_limit: Option<Amount>,
    /// Set a scheduler parameter, or `NAME=default`; may be repeated
    #[arg(long = "param", value_name = "NAME=VALUE", value_parser = parse_param)]
    pub(crate) params: Vec<(String, Option<f64>)>,
}

fn parse_param(text: &str) -> Result<(String, Option<f64>), String> {
    let wrong = || "expected NAME=VALUE or NAME=default".to_owned();
    let (name, value) = text.split_once('=').ok_or_else(wrong)?;
    let value = match value {
        "default" => None,
        value => Some(parse_number(value).map_err(|_| wrong())?),
    };
    Ok((name.to_owned(), value))
}

#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum SpreadArg {
    /// One reactor serves each queue
    OneToOne,
    /// One reactor serves each queue, and idle reactors help
    OneToN,
}

impl From<SpreadArg> for Spread {
    fn from(spread: SpreadArg) -> Self {
        match spread {
            SpreadArg::OneToOne => Self::OneToOne,
            SpreadArg::OneToN => Self::OneToN,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::{Cli, Command, TenantCommand};
    use clap::Parser;

    #[test]
    fn numbers_are_read_or_refused() {
        for (text, iops) in [("2000", 2000), ("20k", 20_000), ("3M", 3_000_000), ("0", 0)] {
            assert_eq!(parse_iops(text), Ok(iops));
        }
        for wrong in [
            "",
            "k",
            "-5",
            "1.5",
            "1e3",
            "NaN",
            "99999999999999999999",
            "9999999999999999M",
        ] {
            parse_iops(wrong).unwrap_err();
        }
        for overflow in ["99999999999999999999", "9999999999999999M"] {
            let iops = parse_rate(overflow).unwrap_err();
            assert!(iops.ends_with("10 to 20000000"), "{iops}");
            let bytes = parse_bandwidth(overflow).unwrap_err();
            assert!(bytes.ends_with("65536 to 100000000000"), "{bytes}");
            let time = parse_seconds(&format!("{overflow}d")).unwrap_err();
            assert!(time.ends_with("1s to 7d"), "{time}");
        }
        assert_eq!(parse_bandwidth("100MB"), Ok(100_000_000));
        for wrong in ["NaN", "inf", "-inf", "1e999", ""] {
            parse_number(wrong).unwrap_err();
            parse_param(&format!("keep={wrong}")).unwrap_err();
        }
        assert_eq!(parse_param("keep=default"), Ok(("keep".to_owned(), None)));
        for line in [
            "tenant budget a",
            "tenant budget a --base-iops 5 --no-base",
            "volume budget a/b",
            "tenant budget a --base-iops",
            "tenant budget a --base-iops -5",
            "tenant budget a --base-bandwidth -5M",
            "tenant budget a --base-iops 5 --none",
            "tenant budget a --burst-bandwidth 5M --none",
            "tenant budget a --base-iops 5 --credit 60s --metered",
            "volume budget a/b --base-iops 5 --credit 60s",
            "scheduling set",
            "scheduling set --oversubscription NaN",
            "scheduling set --param keep=inf",
        ] {
            let words = std::iter::once("forebay").chain(line.split(' '));
            let wrong = Cli::try_parse_from(words).unwrap_err();
            assert_eq!(wrong.exit_code(), 2, "{line}");
        }
        let line = "forebay tenant budget a --burst-bandwidth 5M --base-iops 2k";
        let cli = Cli::try_parse_from(line.split(' ')).unwrap();
        let Command::Tenant(TenantCommand::Budget { budget, .. }) = cli.command else {
            panic!("not the expected command");
        };
        let stated = (budget.base_iops, budget.base_bandwidth);
        assert_eq!(stated, (Some(Amount(Some(2000))), None));
        let stated = (budget.burst_iops, budget.burst_bandwidth);
        assert_eq!(stated, (None, Some(Amount(Some(5 << 20)))));
    }
}
