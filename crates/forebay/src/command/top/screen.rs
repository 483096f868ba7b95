//! Formats `forebay top` for any window size. The name's column takes the remaining width; hidden
//! rows are counted.

use forebay_device::size::format_bytes;

use super::budget::Use;
use super::view::{ReactorView, SampleRates, View};
use crate::output::latency;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Size {
    pub(crate) columns: usize,
    pub(crate) lines: usize,
}

/// Title, and width with the space before it.
const COLUMNS: [(&str, usize); 8] = [
    ("R IOPS", 8),
    ("W IOPS", 8),
    ("R MB/s", 8),
    ("W MB/s", 8),
    ("P50", 8),
    ("P99", 8),
    ("ERR/s", 6),
    ("IN FLIGHT", 10),
];
const NAME_MIN: usize = 12;

/// The screen's lines; `last` is the last line.
pub(crate) fn text(view: &View, size: Size, last: &str) -> String {
    let others: usize = COLUMNS.iter().map(|(_, width)| width).sum();
    let name_width = size.columns.saturating_sub(others).max(NAME_MIN);
    let mut lines = head(view);
    let mut title = format!("{:name_width$}", "TENANT/VOLUME");
    for (name, width) in COLUMNS {
        title.push_str(&format!("{name:>width$}"));
    }
    lines.push(title);
    let mut rows = vec![row("all", &view.total, name_width)];
    for tenant in &view.tenants {
        rows.push(row(&tenant.name, &tenant.rates, name_width));
        let words = tenant.budget.as_ref().map(Use::words);
        say(&mut rows, 2, words.unwrap_or_default(), size.columns);
        for volume in &tenant.volumes {
            rows.push(row(
                &format!("  {}", volume.name),
                &volume.rates,
                name_width,
            ));
            say(&mut rows, 4, volume.words(), size.columns);
        }
    }
    let room = size.lines.saturating_sub(lines.len() + 1);
    if rows.len() > room {
        let hidden = rows.len() - room.saturating_sub(1);
        rows.truncate(room.saturating_sub(1));
        rows.push(format!("... {hidden} more"));
    }
    lines.append(&mut rows);
    lines.truncate(size.lines.saturating_sub(1));
    if !last.is_empty() {
        lines.push(last.to_owned());
    }
    let cut = lines.iter().map(|line| cut(line, size.columns));
    cut.collect::<Vec<_>>().join("\n")
}

/// Adds words beneath a row, wrapped to the window.
fn say(rows: &mut Vec<String>, indent: usize, words: Vec<String>, columns: usize) {
    let mut line = String::new();
    let rest = words.len();
    for (at, word) in words.iter().enumerate() {
        let comma = if at + 1 < rest { "," } else { "" };
        let wide = line.chars().count() + 1 + word.chars().count() + comma.len();
        if !line.is_empty() && wide > columns {
            rows.push(std::mem::take(&mut line));
        }
        match line.is_empty() {
            true => line = " ".repeat(indent),
            false => line.push(' '),
        }
        line.push_str(word);
        line.push_str(comma);
    }
    if !line.is_empty() {
        rows.push(line);
    }
}

fn head(view: &View) -> Vec<String> {
    let volumes: usize = view.tenants.iter().map(|tenant| tenant.volumes.len()).sum();
    let mut first = format!(
        "{} tenants, {volumes} exports; engine generation {}",
        view.tenants.len(),
        view.generation
    );
    if let Some(percent) = view.engine_cpu_percent {
        first.push_str(&format!(", {percent:.0} % of a CPU"));
    }
    if view.takeovers > 0 {
        first.push_str(&format!("; {} take-overs", view.takeovers));
    }
    let second = match &view.pool {
        Some(pool) => format!(
            "pool: {} of {} used, {:.1} faults/s, {:.1} commits/s",
            format_bytes(pool.used_bytes),
            format_bytes(pool.capacity_bytes),
            pool.faults_s,
            pool.commits_s
        ),
        None => "no pool is open".to_owned(),
    };
    vec![first, second, off(&view.reactors)]
}

fn off(reactors: &[ReactorView]) -> String {
    let of = |reactor: &ReactorView| {
        let mut off = String::new();
        for correction in &reactor.corrections {
            if (correction.times - 1.0).abs() >= 0.01 {
                let (resource, times) = (&correction.resource, correction.times);
                off.push_str(&format!(" {resource} x{times:.2}"));
            }
        }
        (!off.is_empty()).then(|| format!("reactor {}{off}", reactor.reactor))
    };
    let all: Vec<String> = reactors.iter().filter_map(of).collect();
    match all.is_empty() {
        true => String::new(),
        false => format!("costs are corrected: {}", all.join(", ")),
    }
}

fn row(name: &str, rates: &SampleRates, name_width: usize) -> String {
    let mut line = format!("{:name_width$}", cut(name, name_width));
    let megabytes = |bytes_s: f64| short(bytes_s / 1e6);
    let cells = [
        short(rates.read_iops),
        short(rates.write_iops),
        megabytes(rates.read_bytes_s),
        megabytes(rates.write_bytes_s),
        latency(rates.p50_ns),
        latency(rates.p99_ns),
        short(rates.errors_s),
        rates.in_flight.to_string(),
    ];
    for (cell, (_, width)) in cells.iter().zip(COLUMNS) {
        line.push_str(&format!("{cell:>width$}"));
    }
    line
}

/// At most five characters: `0`, `0.4`, `37.2`, `812`, `13.5k`, `1.2M`.
fn short(value: f64) -> String {
    match value {
        v if v < 0.05 => "0".to_owned(),
        v if v < 99.95 => format!("{v:.1}"),
        v if v < 9_999.5 => format!("{v:.0}"),
        v if v < 99_950.0 => format!("{:.1}k", v / 1e3),
        v if v < 999_500.0 => format!("{:.0}k", v / 1e3),
        v if v < 99.95e6 => format!("{:.1}M", v / 1e6),
        v => format!("{:.0}M", v / 1e6),
    }
}

fn cut(line: &str, columns: usize) -> String {
    line.chars().take(columns).collect()
}

#[cfg(test)]
mod tests {
    use super::super::view::tests::samples;
    use super::*;
    use crate::cli::TopOrder;
    use forebay_control::model::stats::Correction;

    const SMALL: Size = Size {
        columns: 80,
        lines: 24,
    };

    fn view() -> View {
        let (before, now) = samples();
        View::between(&before, &now, TopOrder::Iops)
    }

    #[test]
    fn a_small_terminal_shows_everything() {
        let expected = "\
2 tenants, 3 exports; engine generation 3, 75 % of a CPU; 2 take-overs
pool: 12 GiB of 100 GiB used, 10.0 faults/s, 1.0 commits/s

TENANT/VOLUME     R IOPS  W IOPS  R MB/s  W MB/s     P50     P99 ERR/s IN FLIGHT
all                 2100    1.2M     263    9830   20 us   20 us   3.0       164
acme                 100    1.2M     0.4    9830   20 us   20 us   3.0        36
  log                  0    1.2M       0    9830   20 us   20 us   3.0        32
  db                 100       0     0.4       0   80 us   80 us     0         4
zoo                 2000       0     262       0  3.1 ms  3.1 ms     0       128
  big               2000       0     262       0  3.1 ms  3.1 ms     0       128
q ends";
        assert_eq!(text(&view(), SMALL, "q ends"), expected);
    }

    #[test]
    fn no_window_is_too_small() {
        let mut view = view();
        view.tenants[0].name = "ä".repeat(63);
        for columns in 0..120 {
            for lines in 0..14 {
                let text = text(&view, Size { columns, lines }, "the last line");
                assert!(
                    text.lines().count() <= lines.max(1),
                    "{columns} {lines}\n{text}"
                );
                let widest = text.lines().map(|line| line.chars().count()).max();
                assert!(widest.unwrap_or(0) <= columns, "{columns} {lines}\n{text}");
            }
        }
    }

    #[test]
    fn no_word_of_a_budget_is_cut_off() {
        let mut view = view();
        view.tenants[0].budget = Some(Use {
            base_iops: Some(1000),
            base_bytes_s: Some(4_096_000),
            used_iops: 5000.0,
            used_bytes_s: 20_480_000.0,
            granted_iops: Some(5300),
            granted_bytes_s: Some(21_700_000),
            window_iops: 5100,
            window_bytes_s: 20_900_000,
            throttled_s: 70.0,
            throttled_ns: Some(1_000_000),
            burst_percent: 75.0,
            credit_percent: Some(40.0),
            noisy: true,
            why: Some("others use the rest".to_owned()),
            ..Use::default()
        });
        let text = text(&view, SMALL, "");
        let said: Vec<_> = text.lines().skip(6).take(3).collect();
        let expected = [
            "  NOISY: 5000 IOPS and 20.5 MB/s of a base of 1000 and 4.1,",
            "  given 5300 IOPS and 21.7 MB/s, 5100 and 20.9 of that used,",
            "  75 % of it bursting, 70/s wait 1.0 ms, others use the rest, credit 40 %",
        ];
        assert_eq!(said, expected, "{text}");
    }

    #[test]
    fn corrected_costs_are_shown() {
        let mut view = view();
        let correction = |resource: &str, times| Correction {
            resource: resource.to_owned(),
            times,
        };
        view.reactors = vec![
            ReactorView {
                reactor: 0,
                windows_s: 0.0,
                scheduling_percent: 0.0,
                corrections: vec![correction("processor time", 1.3), correction("x", 1.001)],
            },
            ReactorView {
                reactor: 1,
                windows_s: 0.0,
                scheduling_percent: 0.0,
                corrections: Vec::new(),
            },
        ];
        let text = text(&view, SMALL, "");
        let third = "costs are corrected: reactor 0 processor time x1.30";
        assert_eq!(text.lines().nth(2), Some(third));
    }

    #[test]
    fn rows_that_do_not_fit_are_counted() {
        let size = Size { lines: 8, ..SMALL };
        let text = text(&view(), size, "q ends");
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(lines.len(), 8);
        assert!(lines[4].starts_with("all"), "{text}");
        assert_eq!(lines[6], "... 4 more", "{text}");
        assert_eq!(lines[7], "q ends");
    }

    #[test]
    fn numbers_are_short() {
        for (value, text) in [
            (0.0, "0"),
            (0.4, "0.4"),
            (99.96, "100"),
            (9_999.0, "9999"),
            (13_512.0, "13.5k"),
            (812_400.0, "812k"),
            (1_234_567.0, "1.2M"),
        ] {
            assert_eq!(short(value), text);
        }
        for power in 0..8 {
            for nearly in [0.94, 0.9994, 0.9996, 1.0, 4.44, 9.96] {
                let text = short(nearly * 10f64.powi(power));
                assert!(text.len() <= 5, "{text}");
            }
        }
    }
}
