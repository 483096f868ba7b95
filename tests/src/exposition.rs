//! A strict reader of Prometheus' text format, version 0.0.4.
//!
//! Some conventions are rules here: families are contiguous, with help and type first; samples are
//! unique; histograms rise up to an infinite bound. We write no timestamps, exemplars or summaries.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};

const LIMIT: Duration = Duration::from_secs(60);

/// Metrics of one text.
#[derive(Debug, Default)]
pub struct Metrics {
    /// The type of each family.
    pub kinds: BTreeMap<String, String>,
    /// Samples by name and labels, as written.
    pub samples: BTreeMap<String, f64>,
}

impl Metrics {
    /// A sample's value, e.g. `forebay_engine_up` or `x_total{op="read"}`.
    pub fn get(&self, sample: &str) -> Result<f64> {
        let value = self.samples.get(sample);
        value
            .copied()
            .with_context(|| format!("no sample {sample}"))
    }

    /// Counters and parts of histograms, which must not fall.
    pub fn rising(&self) -> impl Iterator<Item = (&str, f64)> {
        self.samples.iter().filter_map(|(sample, value)| {
            let name = sample.split('{').next().unwrap_or_default();
            let kind = self.kinds.get(self.family(name))?;
            (kind != "gauge").then_some((sample.as_str(), *value))
        })
    }

    fn family<'a>(&self, name: &'a str) -> &'a str {
        let base = ["_bucket", "_sum", "_count"]
            .into_iter()
            .find_map(|part| name.strip_suffix(part));
        match base {
            Some(base) if self.kinds.get(base).is_some_and(|kind| kind == "histogram") => base,
            _ => name,
        }
    }
}

fn is_name(text: &str) -> bool {
    let good = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
    !text.is_empty() && text.bytes().all(good) && !text.as_bytes()[0].is_ascii_digit()
}

/// Parses a text; an error names the line.
pub fn read(text: &str) -> Result<Metrics> {
    ensure!(text.ends_with('\n'), "the last line has no end");
    let mut metrics = Metrics::default();
    let (mut open, mut done) = (String::new(), BTreeSet::new());
    let mut histograms: BTreeMap<String, Vec<(f64, f64)>> = BTreeMap::new();
    let mut lines = text.lines();
    while let Some(line) = lines.next() {
        let wrong = || format!("the line {line:?}");
        if let Some(help) = line.strip_prefix("# HELP ") {
            let (name, help) = help.split_once(' ').with_context(wrong)?;
            ensure!(is_name(name) && !help.is_empty(), wrong());
            done.insert(std::mem::replace(&mut open, name.to_owned()));
            ensure!(!done.contains(name), "{}: a duplicate", wrong());
            let kind = lines.next().and_then(|line| line.strip_prefix("# TYPE "));
            let kind = kind.and_then(|kind| kind.strip_prefix(name));
            let kind = kind
                .and_then(|kind| kind.strip_prefix(' '))
                .with_context(wrong)?;
            ensure!(["counter", "gauge", "histogram"].contains(&kind), wrong());
            ensure!(
                name.ends_with("_total") == (kind == "counter"),
                "{}: a wrong name",
                wrong()
            );
            metrics.kinds.insert(name.to_owned(), kind.to_owned());
            continue;
        }
        let (sample, value) = line.rsplit_once(' ').with_context(wrong)?;
        let value: f64 = value.parse().with_context(wrong)?;
        ensure!(value.is_finite() && value >= 0.0, wrong());
        let (name, labels) = labels(sample).with_context(wrong)?;
        ensure!(
            metrics.family(&name) == open,
            "{}: not in its family",
            wrong()
        );
        if metrics.kinds[&open] == "histogram" {
            let mut others = labels.clone();
            let bound = others.remove("le");
            let key = format!("{open}{others:?}");
            let bounds = histograms.entry(key).or_default();
            match (name.strip_prefix(open.as_str()), bound.as_deref()) {
                (Some("_bucket"), Some("+Inf")) => bounds.push((f64::INFINITY, value)),
                (Some("_bucket"), Some(bound)) => bounds.push((bound.parse()?, value)),
                (Some("_sum"), None) => {}
                (Some("_count"), None) => {
                    let last = bounds.last().with_context(wrong)?;
                    ensure!(
                        *last == (f64::INFINITY, value),
                        "{}: not all counted",
                        wrong()
                    );
                }
                _ => bail!(wrong()),
            }
        }
        let before = metrics.samples.insert(sample.to_owned(), value);
        ensure!(before.is_none(), "{}: a duplicate", wrong());
    }
    for (key, bounds) in &histograms {
        let rise = |pair: &[(f64, f64)]| pair[0].0 < pair[1].0 && pair[0].1 <= pair[1].1;
        ensure!(bounds.windows(2).all(rise), "{key}: {bounds:?}");
    }
    Ok(metrics)
}

fn labels(sample: &str) -> Result<(String, BTreeMap<String, String>)> {
    let mut labels = BTreeMap::new();
    let (name, rest) = match sample.split_once('{') {
        None => (sample, ""),
        Some((name, rest)) => (name, rest.strip_suffix('}').context("no closing bracket")?),
    };
    ensure!(is_name(name), "{name:?} is not a name");
    let mut rest = rest;
    while !rest.is_empty() {
        let (label, after) = rest.split_once("=\"").context("a label without a value")?;
        ensure!(is_name(label), "{label:?} is not a label");
        let mut value = String::new();
        let mut chars = after.char_indices();
        let end = loop {
            match chars.next().context("a value without an end")? {
                (at, '"') => break at,
                (_, '\\') => match chars.next().context("a value without an end")?.1 {
                    'n' => value.push('\n'),
                    same @ ('\\' | '"') => value.push(same),
                    other => bail!("\\{other} is not an escape"),
                },
                (_, other) => value.push(other),
            }
        };
        ensure!(
            labels.insert(label.to_owned(), value).is_none(),
            "{label} occurs twice"
        );
        rest = &after[end + 1..];
        if !rest.is_empty() {
            rest = rest.strip_prefix(',').context("no comma between labels")?;
        }
    }
    Ok((name.to_owned(), labels))
}

/// The metrics of a daemon's listener.
pub fn scrape(port: u16) -> Result<Metrics> {
    let (head, body) = get(port, "/metrics")?;
    ensure!(head.starts_with("HTTP/1.1 200 "), "{head}");
    ensure!(head.contains("text/plain; version=0.0.4"), "{head}");
    read(&body)
}

/// An answer's head and body.
pub fn get(port: u16, path: &str) -> Result<(String, String)> {
    let mut stream = TcpStream::connect(("127.0.0.1", port))?;
    stream.set_read_timeout(Some(LIMIT))?;
    write!(
        stream,
        "GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
    )?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    let (head, body) = answer.split_once("\r\n\r\n").context("no HTTP response")?;
    Ok((head.to_owned(), body.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = "# HELP a_total A.\n# TYPE a_total counter\na_total{x=\"1\\\"\",y=\"\"} 3\na_total 4\n\
        # HELP h H.\n# TYPE h histogram\nh_bucket{le=\"1\"} 1\nh_bucket{le=\"+Inf\"} 2\nh_sum 1.5\nh_count 2\n";

    #[test]
    fn a_good_text_is_read() {
        let metrics = read(GOOD).unwrap();
        assert_eq!(metrics.get("a_total").unwrap(), 4.0);
        assert_eq!(metrics.rising().count(), 6);
    }

    #[test]
    fn bad_texts_are_not() {
        for (from, to) in [
            ("count 2\n", "count 2"),
            ("# HELP a_total A.\n", ""),
            ("counter", "gauge"),
            ("{x=\"1\\\"\",y=\"\"}", ""),
            ("x=\"1\\\"\",", "x=\"1\"\","),
            ("y=", "x="),
            ("} 3", "} three"),
            ("} 3", "} -3"),
            ("le=\"1\"} 1", "le=\"1\"} 3"),
            ("+Inf\"} 2", "+Inf\"} 3"),
            ("le=\"1\"", "le=\"one\""),
            ("h_sum", "g_sum"),
            ("# HELP h", "# HELP a_total"),
        ] {
            let bad = GOOD.replacen(from, to, 1);
            assert!(
                bad != GOOD && read(&bad).is_err(),
                "{from:?} -> {to:?}\n{bad}"
            );
        }
    }
}
