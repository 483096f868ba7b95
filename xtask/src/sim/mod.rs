//! `cargo xtask sim`: the paper's figures, simulated with the scheduler's code.
//!
//! Prints tables with the paper's values, and writes plots as SVG. `crates/sim/src` has the
//! simulation.

mod svg;
mod time;

use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, Result, bail};
use forebay_sim::figures::{Claim, Effort, FIGURES, Figure, make};

pub(crate) fn run(args: &[String]) -> Result<bool> {
    let mut effort = Effort::FULL;
    let mut folder = crate::cargo::target_folder().join("sim");
    let mut names = Vec::new();
    let mut args = args.iter();
    while let Some(arg) = args.next() {
        match arg.as_str() {
            "--quick" => effort = Effort::QUICK,
            "--svg" => folder = PathBuf::from(args.next().context("--svg needs a folder")?),
            "all" => names.extend(all().map(|(name, _)| name)),
            name => match all().find(|(own, _)| *own == name) {
                Some((own, _)) => names.push(own),
                None => bail!("no figure '{name}'; the figures are:\n{}", list()),
            },
        }
    }
    if names.is_empty() {
        bail!("name a figure; the figures are:\n{}", list());
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
