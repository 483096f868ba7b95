//! `forebay events`: events as a table, or with `--follow` line by line, across daemon restarts.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use forebay_control::api::client::ClientError;
use forebay_control::model::events::{Audit, Event, EventList, utc};

use crate::cli::EventsArgs;
use crate::context::Context;
use crate::failure::{Failure, Outcome, While};
use crate::output::{print_line, table};
use crate::word::word;

/// How long the daemon holds a request.
const WAIT_S: u64 = 25;
/// The interval of retries while the daemon is away.
const AGAIN: Duration = Duration::from_secs(1);

pub(crate) fn events(context: &Context, args: &EventsArgs) -> Outcome {
    let wanted = Wanted::new(args);
    if args.follow {
        return follow(context, args.after, &wanted);
    }
    let mut events = read(context, args.after, 0)?.events;
    events.retain(|event| wanted.has(event));
    context.output.show(&events, |events| match args.audit {
        true => audit_text(events),
        false => text(events),
    })
}

struct Wanted {
    since_unix_ms: u64,
    audit: bool,
}

impl Wanted {
    fn new(args: &EventsArgs) -> Self {
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let since = |seconds: u32| {
            let begin = now
                .unwrap_or_default()
                .saturating_sub(Duration::from_secs(seconds.into()));
            begin.as_millis() as u64
        };
        Self {
            since_unix_ms: args.since.map_or(0, since),
            audit: args.audit,
        }
    }

    fn has(&self, event: &Event) -> bool {
        event.at_unix_ms >= self.since_unix_ms && (event.audit.is_some() || !self.audit)
    }
}

fn read(context: &Context, after: Option<u64>, wait_s: u64) -> Result<EventList, ClientError> {
    let after = after.map_or_else(String::new, |after| format!("&after={after}"));
    context
        .client
        .get(&format!("/v1/events?wait_s={wait_s}{after}"))
}

fn follow(context: &Context, mut after: Option<u64>, wanted: &Wanted) -> Outcome {
    // A missing daemon is an error only at the start.
    let mut list = read(context, after, 0)?;
    let mut is_away = false;
    loop {
        if list.missed > 0 {
            eprintln!("{} events were missed; see the daemon's log", list.missed);
        }
        for event in list.events.iter().filter(|event| wanted.has(event)) {
            let line = match context.output.json {
                true => serde_json::to_string(event).while_doing("write JSON")?,
                false => line(event),
            };
            if !print_line(&line)? {
                return Ok(());
            }
        }
        after = Some(list.newest);
        list = loop {
            let begun = Instant::now();
            match read(context, after, WAIT_S) {
                Ok(list) => {
                    // The daemon answers excess requests at once.
                    if list.events.is_empty() && begun.elapsed() < AGAIN {
                        std::thread::sleep(AGAIN);
                    }
                    break list;
                }
                Err(ClientError::Refused(error)) if error.hint.is_none() => {
                    return Err(Failure::new(error.message));
                }
                Err(error) => {
                    if !std::mem::replace(&mut is_away, true) {
                        eprintln!("{error}; retrying");
                    }
                    std::thread::sleep(AGAIN);
                }
            }
        };
        is_away = false;
    }
}

fn line(event: &Event) -> String {
    let at = utc(event.at_unix_ms);
    format!("{at}  {}  {}", word(&event.kind), message(event))
}

fn text(events: &[Event]) -> String {
    table(
        [">NUMBER", "TIME", "WHAT", ">GENERATION", "MESSAGE"],
        events.iter().map(|event| {
            [
                event.sequence.to_string(),
                utc(event.at_unix_ms),
                word(&event.kind),
                event.generation.to_string(),
                message(event),
            ]
        }),
    )
}

/// The JSON has the complete states before and after.
fn audit_text(events: &[Event]) -> String {
    let row = |event: &Event, audit: &Audit| {
        let of = |object: &Option<serde_json::Value>| {
            object.as_ref().map_or_else(|| "-".to_owned(), short)
        };
        let done = match audit.result.as_str() {
            "done" => String::new(),
            other => format!(" ({other})"),
        };
        [
            utc(event.at_unix_ms),
            audit.who(),
            format!("{}{done}", audit.action),
            audit.request.clone(),
            of(&audit.before),
            of(&audit.after),
        ]
    };
    table(
        ["TIME", "USER", "ACTION", "REQUEST", "BEFORE", "AFTER"],
        events
            .iter()
            .filter_map(|event| Some(row(event, event.audit.as_ref()?))),
    )
}

fn short(object: &serde_json::Value) -> String {
    const SHOWN: usize = 60;
    let text = object.to_string();
    match text.char_indices().nth(SHOWN) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text,
    }
}

fn message(event: &Event) -> String {
    let mut text = event.message.clone();
    for closed in &event.connections_closed {
        text.push_str(&format!("; {} closed: {}", closed.count, closed.reason));
    }
    text
}
