//! Progress bars on stderr, by `indicatif`: bytes, or a share.

use indicatif::{ProgressBar, ProgressStyle};

const STEPS: u64 = 1000;

fn bar(bar: ProgressBar, doing: &'static str, template: &str) -> ProgressBar {
    let bar = bar.with_message(doing);
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style.progress_chars("=> "));
    }
    bar
}

/// `None`: the total is unknown.
pub(crate) fn bytes(bytes: Option<u64>, doing: &'static str) -> ProgressBar {
    match bytes {
        Some(bytes) => bar(
            ProgressBar::new(bytes),
            doing,
            "{msg:20} [{bar:40}] {bytes}/{total_bytes} {bytes_per_sec} {eta}",
        ),
        None => bar(
            ProgressBar::no_length(),
            doing,
            "{msg:20} {bytes} {bytes_per_sec} {elapsed}",
        ),
    }
}

/// A share, set by [`set`].
pub(crate) fn steps(doing: &'static str) -> ProgressBar {
    bar(
        ProgressBar::new(STEPS),
        doing,
        "{msg:20} [{bar:40}] {percent:>3} % {elapsed}",
    )
}

/// Sets a share, 0.0..=1.0.
pub(crate) fn set(bar: &ProgressBar, fraction: f64) {
    bar.set_position((fraction.clamp(0.0, 1.0) * STEPS as f64) as u64);
}
