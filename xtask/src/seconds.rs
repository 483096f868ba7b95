//! The table of seconds at the end of `cargo xtask test`, `check` and `ci`, largest first.
//!
//! Programs run concurrently, so processor seconds show which ones compute.

use std::fmt::Write as _;
use std::sync::{Mutex, PoisonError};

static ROWS: Mutex<Vec<Row>> = Mutex::new(Vec::new());

#[derive(Debug, Clone)]
struct Row {
    kind: &'static str,
    name: String,
    wall_s: f64,
    cpu_s: f64,
}

/// `kind` is `build`, `check`, `test` or `run`.
pub(crate) fn add(kind: &'static str, name: &str, wall_s: f64, cpu_s: f64) {
    rows().push(Row {
        kind,
        name: name.to_owned(),
        wall_s,
        cpu_s,
    });
}

/// Prints and clears the rows; `total_s` is the whole run's time.
pub(crate) fn print(total_s: f64) {
    print!("{}", table(std::mem::take(&mut *rows()), total_s));
}

fn rows() -> std::sync::MutexGuard<'static, Vec<Row>> {
    ROWS.lock().unwrap_or_else(PoisonError::into_inner)
}

fn table(mut rows: Vec<Row>, total_s: f64) -> String {
    rows.sort_by(|a, b| b.wall_s.total_cmp(&a.wall_s));
    let mut text = format!(
        "{:>9}{:>11}  {:<6} what (in parallel: the sum of seconds exceeds the total)\n",
        "seconds", "processor", "kind"
    );
    let mut line = |wall_s: f64, cpu_s: f64, kind: &str, name: &str| {
        let _ = writeln!(text, "{wall_s:>9.1}{cpu_s:>11.1}  {kind:<6} {name}");
    };
    for row in &rows {
        line(row.wall_s, row.cpu_s, row.kind, &row.name);
    }
    let cpu_s = rows.iter().map(|row| row.cpu_s).sum();
    line(total_s, cpu_s, "all", "from start to end");
    text
}

#[cfg(test)]
mod tests {
    use super::{Row, table};

    #[test]
    fn the_largest_comes_first_and_the_total_last() {
        let row = |kind, name: &str, wall_s, cpu_s| Row {
            kind,
            name: name.to_owned(),
            wall_s,
            cpu_s,
        };
        let rows = vec![
            row("build", "tests", 2.0, 4.0),
            row("test", "idle", 30.0, 0.5),
        ];
        let text = table(rows, 31.0);
        let names: Vec<&str> = text
            .lines()
            .skip(1)
            .filter_map(|line| line.split_whitespace().nth(3))
            .collect();
        assert_eq!(names, ["idle", "tests", "from"]);
        assert!(
            text.ends_with("31.0        4.5  all    from start to end\n"),
            "{text}"
        );
    }
}
