//! Output of commands: tables without borders for people and text tools, or JSON in the API's own
//! types.

use std::fmt::Display;
use std::io::{ErrorKind, Write as _};

use comfy_table::{CellAlignment, Table, presets};
use forebay_control::model::Done;
use forebay_device::size::format_bytes;
use serde::Serialize;

use crate::failure::{Outcome, While};

#[derive(Debug, Clone, Copy)]
pub(crate) struct Output {
    pub(crate) json: bool,
}

impl Output {
    pub(crate) fn show<T: Serialize, H: Display>(
        self,
        value: &T,
        human: impl FnOnce(&T) -> H,
    ) -> Outcome {
        print(&self.text(value, human)?)
    }

    fn text<T: Serialize, H: Display>(
        self,
        value: &T,
        human: impl FnOnce(&T) -> H,
    ) -> Outcome<String> {
        if self.json {
            serde_json::to_string_pretty(value).while_doing("write JSON")
        } else {
            Ok(human(value).to_string())
        }
    }

    pub(crate) fn done(self, done: &Done) -> Outcome {
        self.show(done, |done| done.done.clone())
    }

    /// As [`Output::done`], if standard output carries data.
    pub(crate) fn done_on_stderr(self, done: &Done) -> Outcome {
        let text = self.text(done, |done| done.done.clone())?;
        let _ = writeln!(std::io::stderr(), "{text}");
        Ok(())
    }
}

pub(crate) fn print(text: &str) -> Outcome {
    print_line(text).map(drop)
}

/// Prints a line; false if the pipe is closed.
pub(crate) fn print_line(text: &str) -> Outcome<bool> {
    let mut stdout = std::io::stdout().lock();
    match writeln!(stdout, "{}", text.trim_end()).and_then(|()| stdout.flush()) {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(false),
        Err(error) => Err(error).while_doing("write to standard output"),
        Ok(()) => Ok(true),
    }
}

/// A title that starts with `>` aligns its column to the right.
pub(crate) fn table<const N: usize>(
    header: [&str; N],
    rows: impl IntoIterator<Item = [String; N]>,
) -> String {
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    table.set_header(header.map(|title| title.trim_start_matches('>')));
    for row in rows {
        table.add_row(row);
    }
    for (index, title) in header.iter().enumerate() {
        if let Some(column) = table.column_mut(index) {
            if title.starts_with('>') {
                column.set_cell_alignment(CellAlignment::Right);
            }
            if index == 0 {
                column.set_padding((0, 1));
            }
        }
    }
    table.trim_fmt()
}

pub(crate) fn pairs(pairs: impl IntoIterator<Item = (&'static str, String)>) -> String {
    let pairs: Vec<_> = pairs.into_iter().collect();
    let width = pairs.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
    let mut text = String::new();
    for (name, value) in pairs {
        text.push_str(&format!("{name:width$}  {value}\n"));
    }
    text
}

pub(crate) fn yes_no(value: bool) -> String {
    if value { "yes" } else { "no" }.to_owned()
}

/// A size without rounding: `1.5 GiB (1610612737 bytes)`.
pub(crate) fn exactly(bytes: u64) -> String {
    format!("{} ({bytes} bytes)", format_bytes(bytes))
}

/// In the largest unit that divides it: `300 MB/s`, `1.5 GB/s`, `64 KiB/s`.
pub(crate) fn bandwidth(bytes_s: u64) -> String {
    const UNITS: [(u64, &str); 3] = [(1_000_000_000, "GB"), (1_000_000, "MB"), (1_000, "KB")];
    let unit = UNITS.iter().find(|(unit, _)| bytes_s >= *unit);
    match unit {
        Some((unit, name)) if bytes_s.is_multiple_of(*unit) => {
            format!("{} {name}/s", bytes_s / unit)
        }
        Some((unit, name)) if bytes_s.is_multiple_of(unit / 10) => {
            format!("{}.{} {name}/s", bytes_s / unit, bytes_s % unit * 10 / unit)
        }
        _ => format!("{}/s", format_bytes(bytes_s)),
    }
}

/// A duration: `512 ns`, `83 us`, `1.2 ms`, `3.4 s`.
pub(crate) fn duration_ns(ns: u64) -> String {
    let value = ns as f64;
    let (value, unit) = match ns {
        0..1_000 => return format!("{ns} ns"),
        1_000..1_000_000 => (value / 1e3, "us"),
        1_000_000..1_000_000_000 => (value / 1e6, "ms"),
        _ => (value / 1e9, "s"),
    };
    if value < 10.0 {
        format!("{value:.1} {unit}")
    } else {
        format!("{value:.0} {unit}")
    }
}

/// A duration, or `-`.
pub(crate) fn latency(ns: Option<u64>) -> String {
    ns.map_or_else(|| "-".to_owned(), duration_ns)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations() {
        for (ns, text) in [
            (0, "0 ns"),
            (999, "999 ns"),
            (1_000, "1.0 us"),
            (83_400, "83 us"),
            (1_250_000, "1.2 ms"),
            (3_400_000_000, "3.4 s"),
        ] {
            assert_eq!(duration_ns(ns), text);
        }
    }

    #[test]
    fn bandwidth_is_as_it_was_stated() {
        for (bytes_s, text) in [
            (100_000_000_000, "100 GB/s"),
            (1_500_000_000, "1.5 GB/s"),
            (300_000_000, "300 MB/s"),
            (512_000, "512 KB/s"),
            (64 << 10, "64 KiB/s"),
            (100 << 20, "100 MiB/s"),
            (8_192_000, "7.8 MiB/s"),
            (0, "0 B/s"),
        ] {
            assert_eq!(bandwidth(bytes_s), text);
        }
    }

    #[test]
    fn tables_are_plain() {
        let text = table(["NAME", ">SIZE"], [["a".to_owned(), "1 GiB".to_owned()]]);
        let lines: Vec<_> = text.lines().map(str::trim_end).collect();
        assert_eq!(lines, ["NAME   SIZE", "a     1 GiB"]);
        assert_eq!(table(["NAME"], []).trim(), "NAME");
    }
}
