//! Limits the lines of quality of service.
//!
//! Production code counts with comments, without tests. Calibration and benchmarks are not
//! included.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

/// Name, places and maximum lines.
struct Part {
    name: &'static str,
    /// Files and folders.
    places: &'static [&'static str],
}

const SIMULATOR: &str = "crates/sim/src";

const QUALITY_OF_SERVICE: [Part; 5] = [
    Part {
        name: "scheduler",
        places: &["crates/qos/src"],
    },
    Part {
        name: "engine",
        places: &[
            "crates/engine/src/qos",
            "crates/engine/src/offload",
            "crates/engine/src/core/admission/mod.rs",
            "crates/engine/src/core/offload.rs",
            "crates/engine/src/frontend/vm/between_quanta.rs",
            "crates/engine/src/control/budgets.rs",
        ],
    },
    Part {
        name: "control",
        places: &[
            "crates/control/src/qos/budgets.rs",
            "crates/control/src/qos/placement.rs",
            "crates/control/src/qos/promises.rs",
            "crates/control/src/qos/settings.rs",
            "crates/control/src/statistics/used.rs",
            "crates/control/src/model/scheduling.rs",
            "crates/control/src/api/routes/scheduling.rs",
            "crates/control/src/metrics/budgets.rs",
            "crates/xlate/src/boundary/scheduling.rs",
        ],
    },
    Part {
        name: "pool",
        places: &["crates/pool/src/pool/budgets.rs"],
    },
    Part {
        name: "commands",
        places: &[
            "crates/forebay/src/cli/budgets.rs",
            "crates/forebay/src/command/scheduling.rs",
            "crates/forebay/src/command/top/budget.rs",
        ],
    },
];

const MOST_LINES: usize = 10_499;
const MOST_SIMULATOR_LINES: usize = 3000;

/// Prints the parts; returns the oversized ones.
pub(super) fn check() -> Result<Vec<String>> {
    let root = crate::cargo::repository();
    let mut sum = 0;
    for part in &QUALITY_OF_SERVICE {
        let mut lines = 0;
        for place in part.places {
            lines += count(&root, &root.join(place))?;
        }
        println!("shape: quality of service, {}: {lines} lines", part.name);
        sum += lines;
    }
    println!("shape: quality of service: {sum} lines of at most {MOST_LINES}");
    let simulator = count(Path::new(""), &root.join(SIMULATOR))?;
    println!("shape: its simulator: {simulator} lines of at most {MOST_SIMULATOR_LINES}");
    if sum > MOST_LINES || simulator > MOST_SIMULATOR_LINES {
        return Ok(vec![format!(
            "quality of service has {sum} lines, its simulator {simulator}: delete some"
        )]);
    }
    Ok(Vec::new())
}

/// Lines of a file or folder, without the simulator, which is a part of its own.
fn count(root: &Path, place: &Path) -> Result<usize> {
    let is_test = |path: &Path| {
        let name = path.file_stem().unwrap_or_default().to_string_lossy();
        name == "tests" || name.ends_with("_tests")
    };
    if is_test(place) || place == root.join(SIMULATOR) {
        return Ok(0);
    }
    if place.is_file() {
        let text = fs::read_to_string(place).with_context(|| place.display().to_string())?;
        return Ok(production_lines(&text));
    }
    let entries = fs::read_dir(place).with_context(|| place.display().to_string())?;
    let paths: Vec<PathBuf> = entries
        .map(|entry| Ok(entry?.path()))
        .collect::<Result<_>>()?;
    paths.iter().map(|path| count(root, path)).sum()
}

/// Without the test module at the end.
fn production_lines(text: &str) -> usize {
    let lines: Vec<&str> = text.lines().collect();
    let begins_tests = |pair: &[&str]| pair[0] == "#[cfg(test)]" && pair[1].ends_with('{');
    let end = lines.windows(2).position(begins_tests);
    end.unwrap_or(lines.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tests_are_no_production_lines() {
        let text = "a\nb\n#[cfg(test)]\nmod tests;\nc\n\n#[cfg(test)]\nmod tests {\nd\n}\n";
        assert_eq!(production_lines(text), 6);
        assert_eq!(production_lines("a\n"), 1);
    }
}
