//! Plots a figure as SVG: lines over numeric rows, bars for named rows.

use forebay_sim::figures::Figure;
use std::fmt::Write;

const WIDTH: f64 = 860.0;
const HEIGHT: f64 = 420.0;
/// Left, right (with line names), top, bottom.
const MARGIN: (f64, f64, f64, f64) = (70.0, 220.0, 40.0, 50.0);
const COLOURS: [&str; 8] = [
    "#1f4e79", "#c0504d", "#4f8f3a", "#8064a2", "#d68a1f", "#2a9d9d", "#7f7f7f", "#b0326e",
];

pub(super) fn plot(figure: &Figure) -> String {
    let (left, right, top, bottom) = MARGIN;
    let values = figure.rows.iter().flat_map(|(_, values)| values);
    let mut plot = Plot {
        inner_width: WIDTH - left - right,
        inner_height: HEIGHT - top - bottom,
        most: nice(values.copied().fold(0.0, f64::max)),
        count: figure.rows.len().max(2) as f64,
        out: String::new(),
    };
    plot.put(format_args!(
        r#"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">"#
    ));
    plot.put(format_args!(
        r#"<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>"#
    ));
    plot.put(format_args!(
        r#"<text x="{left}" y="22" font-size="15">{}</text>"#,
        escape(&figure.title)
    ));
    plot.scales(figure);
    for (column, name) in figure.columns.iter().enumerate() {
        plot.column(figure, column);
        plot.legend(column, name);
    }
    plot.put(format_args!("</svg>"));
    plot.out
}

struct Plot {
    inner_width: f64,
    inner_height: f64,
    /// The top value.
    most: f64,
    /// Rows, at least two.
    count: f64,
    out: String,
}

impl Plot {
    fn put(&mut self, text: std::fmt::Arguments<'_>) {
        // Infallible.
        let _ = self.out.write_fmt(text);
        self.out.push('\n');
    }

    fn y(&self, value: f64) -> f64 {
        MARGIN.2 + self.inner_height * (1.0 - (value / self.most).clamp(0.0, 1.0))
    }

    /// Rows are equidistant, because depths and counts double.
    fn x(&self, at: usize) -> f64 {
        MARGIN.0 + self.inner_width * (at as f64 + 0.5) / self.count
    }

    /// Scales and row names.
    fn scales(&mut self, figure: &Figure) {
        let (left, _, top, _) = MARGIN;
        for step in 0..=5 {
            let value = self.most * f64::from(step) / 5.0;
            let at = self.y(value);
            self.put(format_args!(
                r##"<path d="M{left} {at:.1}H{:.1}" stroke="#dddddd"/><text x="{:.1}" y="{:.1}" text-anchor="end">{}</text>"##,
                left + self.inner_width,
                left - 6.0,
                at + 4.0,
                super::number(value)
            ));
        }
        self.put(format_args!(
            r#"<text x="16" y="{:.1}" transform="rotate(-90 16 {0:.1})" text-anchor="middle">{}</text>"#,
            top + self.inner_height / 2.0,
            escape(figure.unit)
        ));
        self.put(format_args!(
            r#"<text x="{:.1}" y="{:.1}" text-anchor="middle">{}</text>"#,
            left + self.inner_width / 2.0,
            HEIGHT - 10.0,
            escape(figure.across)
        ));
        for (at, (number, _)) in figure.rows.iter().enumerate() {
            let name = match figure.names.get(at) {
                Some(name) => (*name).to_owned(),
                None => format!("{number}"),
            };
            self.put(format_args!(
                r#"<text x="{:.1}" y="{:.1}" text-anchor="middle">{}</text>"#,
                self.x(at),
                top + self.inner_height + 18.0,
                escape(&name)
            ));
        }
    }

    /// A column's line or bars.
    fn column(&mut self, figure: &Figure, column: usize) {
        let colour = COLOURS[column % COLOURS.len()];
        let rows = figure.rows.iter().enumerate();
        let points: Vec<(f64, f64)> = rows
            .filter_map(|(at, (_, values))| Some((self.x(at), self.y(*values.get(column)?))))
            .collect();
        if figure.names.is_empty() {
            let line: Vec<String> = points
                .iter()
                .map(|(x, y)| format!("{x:.1},{y:.1}"))
                .collect();
            self.put(format_args!(
                r#"<polyline points="{}" fill="none" stroke="{colour}" stroke-width="2"/>"#,
                line.join(" ")
            ));
        }
        let columns = figure.columns.len().max(1) as f64;
        let width = 0.8 * self.inner_width / self.count / columns;
        for (x, y) in points {
            if figure.names.is_empty() {
                self.put(format_args!(
                    r#"<circle cx="{x:.1}" cy="{y:.1}" r="3" fill="{colour}"/>"#
                ));
            } else {
                let from = x + width * (column as f64 - columns / 2.0);
                self.put(format_args!(
                    r#"<rect x="{from:.1}" y="{y:.1}" width="{width:.1}" height="{:.1}" fill="{colour}"/>"#,
                    MARGIN.2 + self.inner_height - y
                ));
            }
        }
    }

    fn legend(&mut self, column: usize, name: &str) {
        let colour = COLOURS[column % COLOURS.len()];
        let row = MARGIN.2 + 10.0 + 18.0 * column as f64;
        let text = MARGIN.0 + self.inner_width + 16.0;
        self.put(format_args!(
            r#"<rect x="{text:.1}" y="{:.1}" width="12" height="4" fill="{colour}"/><text x="{:.1}" y="{:.1}">{}</text>"#,
            row - 6.0,
            text + 18.0,
            row,
            escape(name)
        ));
    }
}

/// The next number that divides easily by five.
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
