//! The format of log lines: text, or JSON with the documented fields.
//!
//! A line for the journal begins with its priority, `<N>` (sd-daemon(3)). Text has no time there,
//! as each entry has one.

use std::collections::BTreeMap;
use std::fmt::{self, Debug};

use serde::Serialize;
use serde_json::Value;
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::fmt::format::{Format, Full, Writer};
use tracing_subscriber::fmt::time::{FormatTime, SystemTime as Clock};
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::registry::LookupSpan;

use crate::config::LogFormat;

enum Shape {
    Text(Format<Full, Clock>),
    TextWithoutTime(Format<Full, ()>),
    Json,
}

pub(super) struct Lines {
    shape: Shape,
    priorities: bool,
}

impl Lines {
    pub(super) fn new(format: LogFormat) -> Self {
        let shape = match format {
            LogFormat::Text => Shape::Text(Format::default().with_target(false)),
            LogFormat::Json => Shape::Json,
        };
        Self {
            shape,
            priorities: false,
        }
    }

    pub(super) fn for_journal(format: LogFormat) -> Self {
        let text = Format::default().with_target(false).without_time();
        let shape = match format {
            LogFormat::Text => Shape::TextWithoutTime(text),
            LogFormat::Json => Shape::Json,
        };
        Self {
            shape,
            priorities: true,
        }
    }
}

fn priority(level: Level) -> u8 {
    match level {
        Level::ERROR => 3,
        Level::WARN => 4,
        Level::INFO => 6,
        _ => 7,
    }
}

impl<S, N> FormatEvent<S, N> for Lines
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        let put = |writer: Writer<'_>| match &self.shape {
            Shape::Text(format) => format.format_event(context, writer, event),
            Shape::TextWithoutTime(format) => format.format_event(context, writer, event),
            Shape::Json => put_json(writer, event),
        };
        if !self.priorities {
            return put(writer);
        }
        let mut text = String::new();
        put(Writer::new(&mut text))?;
        // The journal makes an entry of each line.
        let priority = priority(*event.metadata().level());
        for line in text.lines() {
            writeln!(writer, "<{priority}>{line}")?;
        }
        Ok(())
    }
}

#[derive(Serialize)]
struct Line<'a> {
    time: String,
    level: &'a str,
    target: &'a str,
    message: String,
    fields: BTreeMap<&'static str, Value>,
}

#[derive(Default)]
struct EventText {
    message: String,
    fields: BTreeMap<&'static str, Value>,
}

impl EventText {
    fn put(&mut self, field: &Field, value: impl Into<Value>) {
        self.fields.insert(field.name(), value.into());
    }
}

impl Visit for EventText {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        let text = format!("{value:?}");
        match field.name() {
            "message" => self.message = text,
            _ => self.put(field, text),
        }
    }
    fn record_str(&mut self, field: &Field, value: &str) {
        match field.name() {
            "message" => value.clone_into(&mut self.message),
            _ => self.put(field, value),
        }
    }
    fn record_f64(&mut self, field: &Field, value: f64) {
        self.put(field, value);
    }
    fn record_i64(&mut self, field: &Field, value: i64) {
        self.put(field, value);
    }
    fn record_u64(&mut self, field: &Field, value: u64) {
        self.put(field, value);
    }
    fn record_bool(&mut self, field: &Field, value: bool) {
        self.put(field, value);
    }
}

fn put_json(mut writer: Writer<'_>, event: &Event<'_>) -> fmt::Result {
    let mut time = String::new();
    Clock.format_time(&mut Writer::new(&mut time))?;
    let mut found = EventText::default();
    event.record(&mut found);
    let line = Line {
        time,
        level: event.metadata().level().as_str(),
        target: event.metadata().target(),
        message: found.message,
        fields: found.fields,
    };
    let text = serde_json::to_string(&line).map_err(|_| fmt::Error)?;
    writeln!(writer, "{text}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::{Arc, Mutex};
    use tracing_subscriber::layer::SubscriberExt;

    fn written(lines: Lines) -> Vec<String> {
        #[derive(Clone, Default)]
        struct Into(Arc<Mutex<Vec<u8>>>);
        impl std::io::Write for Into {
            fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
                self.0.lock().unwrap().extend(bytes);
                Ok(bytes.len())
            }
            fn flush(&mut self) -> std::io::Result<()> {
                Ok(())
            }
        }
        let into = Into::default();
        let writer = into.clone();
        let layer = tracing_subscriber::fmt::layer()
            .with_ansi(false)
            .with_writer(move || writer.clone())
            .event_format(lines);
        tracing::subscriber::with_default(tracing_subscriber::registry().with(layer), || {
            let error = std::io::Error::other("no \"luck\"");
            tracing::error!(%error, pid = 7u32, late = true, "it ended");
            tracing::warn!(limit = ?Some(-3), below = -3, "two\nlines");
            tracing::info!(target: "elsewhere", "{} words", 2);
        });
        let bytes = into.0.lock().unwrap().clone();
        let text = String::from_utf8(bytes).unwrap();
        text.lines().map(str::to_owned).collect()
    }

    #[test]
    fn a_json_line_has_its_fields() {
        let lines = written(Lines::new(LogFormat::Json));
        let of = |line: &str| -> Value { serde_json::from_str(line).unwrap() };
        assert_eq!(lines.len(), 3, "one a line: {lines:?}");
        for line in &lines {
            let line = of(line);
            let mut keys: Vec<&String> = line.as_object().unwrap().keys().collect();
            keys.sort();
            assert_eq!(keys, ["fields", "level", "message", "target", "time"]);
            let time = line["time"].as_str().unwrap();
            assert!(time.starts_with("20") && time.ends_with('Z'), "{time}");
        }
        let [error, warning, info] = [0, 1, 2].map(|at| of(&lines[at]));
        assert_eq!(
            (&error["level"], &error["message"]),
            (&"ERROR".into(), &"it ended".into())
        );
        let fields = serde_json::json!({"error": "no \"luck\"", "pid": 7, "late": true});
        assert_eq!(error["fields"], fields);
        assert_eq!(error["target"], module_path!());
        assert_eq!(warning["message"], "two\nlines");
        assert_eq!(warning["fields"]["below"], -3);
        assert_eq!(warning["fields"]["limit"], "Some(-3)");
        assert_eq!(
            (&info["target"], &info["message"]),
            (&"elsewhere".into(), &"2 words".into())
        );
        assert_eq!(info["fields"], serde_json::json!({}));
    }

    #[test]
    fn the_journal_gets_priorities() {
        let json = written(Lines::for_journal(LogFormat::Json));
        let begins: Vec<&str> = json.iter().map(|line| &line[..4]).collect();
        assert_eq!(begins, ["<3>{", "<4>{", "<6>{"]);
        let text = written(Lines::for_journal(LogFormat::Text));
        let begins: Vec<&str> = text.iter().map(|line| &line[..3]).collect();
        assert_eq!(begins, ["<3>", "<4>", "<4>", "<6>"], "{text:?}");
        assert!(text[0].starts_with("<3>ERROR it ended"), "{text:?}");
        let plain = written(Lines::new(LogFormat::Text));
        assert!(plain[0].starts_with("20") && plain[0].contains("ERROR it ended"));
    }
}
