//! `cargo xtask sim`: the paper's figures, simulated with the scheduler's own code.
//!
//! Purpose: a table, a plot, and the paper's values beside ours.
//! Design: `forebay-burst` makes the figures; this prints them and writes an SVG file each.
//! Not here: what is simulated, and its parameters (`crates/burst/src/sim`).

mod svg;
mod time;

use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, Result, bail};
use forebay_burst::sim::figures::{Claim, Effort, FIGURES, Figure, make};
use forebay_burst::sim::{helped, pool, sweep as burst};

pub(crate) fn run(args: &[String]) -> Result<bool> {
    let mut effort = Effort::FULL;
    let mut folder = crate::target_folder().join("sim");
    let mut names = Vec::new();
    let mut args = args.iter();
    while let Some(arg) = args.next() {
        match arg.as_str() {
            "--quick" => effort = Effort::QUICK,
            "--svg" => folder = PathBuf::from(args.next().context("--svg needs a folder")?),
            "all" => names.extend(all().map(|(name, _)| name)),
            name => match all().find(|(own, _)| *own == name) {
                Some((own, _)) => names.push(own),
                None => bail!("no figure '{name}'; there are:\n{}", list()),
            },
        }
    }
    if names.is_empty() {
        bail!("which figure? There are:\n{}", list());
    }
    std::fs::create_dir_all(&folder).with_context(|| folder.display().to_string())?;
    let mut good = true;
    for name in names {
        let start = Instant::now();
        let figure = match name {
            name if name == time::FIGURE.0 => time::make()?,
            name => make(name, effort).context("no such figure")?,
        };
        print(&figure);
        good &= figure.claims.iter().all(Claim::holds);
        let file = folder.join(format!("{name}.svg"));
        write(&file, &svg::plot(&figure))?;
        let seconds = start.elapsed().as_secs_f64();
        println!("{} ({seconds:.1} s)\n", file.display());
    }
    Ok(good)
}

/// `cargo xtask sweep burst`: what each parameter of the scheduler does, the others at their defaults.
pub(crate) fn sweep(args: &[String]) -> Result<bool> {
    let effort = match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["burst"] => Effort::FULL,
        ["burst", "--quick"] => Effort::QUICK,
        _ => bail!("cargo xtask sweep burst [--quick]"),
    };
    println!(
        "{:<18}{:>10}{:>10}{:>9}{:>9}{:>14}{:>13}{:>12}",
        "parameter", "value", "mean us", "p99", "p99.9", "% of wild's", "throttled %", "least base"
    );
    for row in burst::burst(effort) {
        let [mean, p99, p999] = row.us.map(number);
        println!(
            "{:<18}{:>10}{mean:>10}{p99:>9}{p999:>9}{:>14}{:>13}{:>12}{}",
            row.name,
            (row.value * 1e5).round() / 1e5,
            number(row.throughput),
            number(row.throttled),
            number(row.base),
            if row.default { "  default" } else { "" }
        );
    }
    println!(
        "\n{:<18}{:>10}{:>16}{:>16}{:>10}",
        "of buffers", "value", "fetched MiB/s", "fetched %", "kept MiB"
    );
    for row in pool::sweep(effort) {
        println!(
            "{:<18}{:>10}{:>16}{:>16}{:>10}{}",
            row.name,
            row.value,
            number(row.fetched),
            number(row.cold),
            number(row.kept),
            if row.default { "  default" } else { "" }
        );
    }
    println!(
        "\n{:<18}{:>10}{:>12}{:>10}{:>11}{:>15}{:>14}",
        "of help", "value", "has %", "mean us", "helpers %", "pulse's mean", "pulse's p99"
    );
    for row in helped::sweep(effort) {
        println!(
            "{:<18}{:>10}{:>12}{:>10}{:>11}{:>15}{:>14}{}",
            row.name,
            (row.value * 1e5).round() / 1e5,
            number(row.has),
            number(row.us),
            number(row.helpers),
            number(row.pulse_us[0]),
            number(row.pulse_us[1]),
            if row.default { "  default" } else { "" }
        );
    }
    Ok(true)
}

fn write(file: &Path, text: &str) -> Result<()> {
    std::fs::write(file, text).with_context(|| file.display().to_string())
}

fn all() -> impl Iterator<Item = (&'static str, &'static str)> {
    let simulated = FIGURES.iter().map(|(name, what, _)| (*name, *what));
    simulated.chain([time::FIGURE])
}

fn list() -> String {
    let lines: Vec<String> = all()
        .map(|(name, what)| format!("  {name:<16}{what}"))
        .collect();
    lines.join("\n")
}

fn print(figure: &Figure) {
    println!("{}, {}", figure.title, figure.unit);
    println!("assumed: {}", figure.assumed);
    println!("parameters: {}", figure.parameters);
    let widths: Vec<usize> = figure
        .columns
        .iter()
        .map(|name| name.len().max(9) + 2)
        .collect();
    print!("{:<14}", figure.across);
    for (name, width) in figure.columns.iter().zip(&widths) {
        print!("{name:>width$}");
    }
    println!();
    for (at, (x, values)) in figure.rows.iter().enumerate() {
        match figure.names.get(at) {
            Some(name) => print!("{name:<14}"),
            None => print!("{x:<14}"),
        }
        for (value, width) in values.iter().zip(&widths) {
            print!("{:>width$}", number(*value));
        }
        println!();
    }
    for claim in &figure.claims {
        let verdict = match (claim.is_within(), claim.holds()) {
            (true, _) => "within",
            (false, true) => "better than",
            (false, false) => "NOT within",
        };
        println!(
            "{}: ours {}, the paper's {}: {verdict} {} to {}{}",
            claim.what,
            number(claim.ours),
            claim.paper,
            number(claim.range.0),
            number(claim.range.1),
            if claim.why.is_empty() {
                String::new()
            } else {
                format!(". {}", claim.why)
            },
        );
    }
}

fn number(value: f64) -> String {
    match value.abs() {
        large if large >= 1000.0 => format!("{value:.0}"),
        small if small < 10.0 => format!("{value:.2}"),
        _ => format!("{value:.1}"),
    }
}
