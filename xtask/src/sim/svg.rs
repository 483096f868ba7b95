//! A plot of a figure as SVG.
//!
//! Purpose: something to look at. Design: a line for each column over the rows' numbers, or bars where rows have
//! names; scales from 0, by powers of two across where the numbers are such. Not here: anything interactive.

use forebay_sim::figures::Figure;
use std::fmt::Write;

const WIDTH: f64 = 860.0;
const HEIGHT: f64 = 420.0;
/// Left, right (with the names of lines), top, bottom.
const MARGIN: (f64, f64, f64, f64) = (70.0, 220.0, 40.0, 50.0);
const COLOURS: [&str; 8] = [
    "#1f4e79", "#c0504d", "#4f8f3a", "#8064a2", "#d68a1f", "#2a9d9d", "#7f7f7f", "#b0326e",
];

/// The figure as the text of an SVG file.
pub(super) fn plot(figure: &Figure) -> String {
    let (left, right, top, bottom) = MARGIN;
    let (inner_width, inner_height) = (WIDTH - left - right, HEIGHT - top - bottom);
    let values = figure.rows.iter().flat_map(|(_, values)| values);
    let most = nice(values.copied().fold(0.0, f64::max));
    let y = |value: f64| top + inner_height * (1.0 - (value / most).clamp(0.0, 1.0));
    let count = figure.rows.len().max(2) as f64;
    // Rows stand at equal distances: depths and counts double from one to the next.
    let x = |at: usize| left + inner_width * (at as f64 + 0.5) / count;
    let mut out = String::new();
    let mut put = |text: std::fmt::Arguments<'_>| {
        // Writing to a string can't fail.
        let _ = out.write_fmt(text);
        out.push('\n');
    };
    put(format_args!(
        r#"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">"#
    ));
    put(format_args!(
        r#"<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>"#
    ));
    put(format_args!(
        r#"<text x="{left}" y="22" font-size="15">{}</text>"#,
        escape(&figure.title)
    ));
    for step in 0..=5 {
        let value = most * f64::from(step) / 5.0;
        let at = y(value);
        put(format_args!(
            r##"<path d="M{left} {at:.1}H{:.1}" stroke="#dddddd"/><text x="{:.1}" y="{:.1}" text-anchor="end">{}</text>"##,
            left + inner_width,
            left - 6.0,
            at + 4.0,
            super::number(value)
        ));
    }
    put(format_args!(
        r#"<text x="16" y="{:.1}" transform="rotate(-90 16 {0:.1})" text-anchor="middle">{}</text>"#,
        top + inner_height / 2.0,
        escape(figure.unit)
    ));
    put(format_args!(
        r#"<text x="{:.1}" y="{:.1}" text-anchor="middle">{}</text>"#,
        left + inner_width / 2.0,
        HEIGHT - 10.0,
        escape(figure.across)
    ));
    for (at, (number, _)) in figure.rows.iter().enumerate() {
        let name = match figure.names.get(at) {
            Some(name) => (*name).to_owned(),
            None => format!("{number}"),
        };
        put(format_args!(
            r#"<text x="{:.1}" y="{:.1}" text-anchor="middle">{}</text>"#,
            x(at),
            top + inner_height + 18.0,
            escape(&name)
        ));
    }
    for (column, name) in figure.columns.iter().enumerate() {
        let colour = COLOURS[column % COLOURS.len()];
        let points: Vec<(f64, f64)> = figure
            .rows
            .iter()
            .enumerate()
            .filter_map(|(at, (_, values))| Some((x(at), y(*values.get(column)?))))
            .collect();
        if figure.names.is_empty() {
            let line: Vec<String> = points
                .iter()
                .map(|(x, y)| format!("{x:.1},{y:.1}"))
                .collect();
            put(format_args!(
                r#"<polyline points="{}" fill="none" stroke="{colour}" stroke-width="2"/>"#,
                line.join(" ")
            ));
        }
        let columns = figure.columns.len().max(1) as f64;
        let width = 0.8 * inner_width / count / columns;
        for (x, y) in points {
            if figure.names.is_empty() {
                put(format_args!(
                    r#"<circle cx="{x:.1}" cy="{y:.1}" r="3" fill="{colour}"/>"#
                ));
            } else {
                let from = x + width * (column as f64 - columns / 2.0);
                put(format_args!(
                    r#"<rect x="{from:.1}" y="{y:.1}" width="{width:.1}" height="{:.1}" fill="{colour}"/>"#,
                    top + inner_height - y
                ));
            }
        }
        let row = top + 10.0 + 18.0 * column as f64;
        let text = left + inner_width + 16.0;
        put(format_args!(
            r#"<rect x="{text:.1}" y="{:.1}" width="12" height="4" fill="{colour}"/><text x="{:.1}" y="{:.1}">{}</text>"#,
            row - 6.0,
            text + 18.0,
            row,
            escape(name)
        ));
    }
    put(format_args!("</svg>"));
    out
}

/// The next larger number that is easily divided by five.
fn nice(value: f64) -> f64 {
    if value <= 0.0 {
        return 1.0;
    }
    let power = 10f64.powf(value.log10().floor());
    let steps = [1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 7.5, 10.0];
    let step = steps.into_iter().find(|step| step * power >= value);
    step.unwrap_or(10.0) * power
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::{nice, plot};
    use forebay_sim::figures::Figure;

    #[test]
    fn a_plot_has_each_line_and_stays_within_its_frame() {
        let figure = Figure {
            title: "a < b".into(),
            columns: vec!["one".into(), "two".into()],
            rows: vec![(1.0, vec![3.0, 70.0]), (2.0, vec![4.0, 80.0])],
            ..Figure::default()
        };
        let text = plot(&figure);
        assert_eq!(text.matches("<polyline").count(), 2);
        assert!(text.contains("a &lt; b") && !text.contains("NaN"));
        let empty = plot(&Figure::default());
        assert!(empty.ends_with("</svg>\n") && !empty.contains("NaN"));
        assert_eq!((nice(72.0), nice(0.0), nice(1001.0)), (75.0, 1.0, 1500.0));
    }
}
