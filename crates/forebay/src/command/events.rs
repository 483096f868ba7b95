//! `forebay events`.

use std::time::{SystemTime, UNIX_EPOCH};

use forebay_control::api::events::{Event, EventList};

use super::Context;
use super::status::word;
use crate::failure::Outcome;
use crate::output::table;

pub(crate) fn events(context: &Context) -> Outcome {
    let events = context.client.get::<EventList>("/v1/events")?.events;
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    let now_ms = since.unwrap_or_default().as_millis() as u64;
    context.output.show(&events, |events| text(events, now_ms))
}

fn text(events: &[Event], now_ms: u64) -> String {
    table(
        [">AGO", "WHAT", ">GENERATION", "MESSAGE"],
        events.iter().map(|event| {
            let ago_ms = now_ms.saturating_sub(event.at_unix_ms);
            [
                format!("{}.{:03} s", ago_ms / 1000, ago_ms % 1000),
                word(&event.kind),
                event.generation.to_string(),
                message(event),
            ]
        }),
    )
}

fn message(event: &Event) -> String {
    let mut text = event.message.clone();
    for closed in &event.connections_closed {
        text.push_str(&format!("; {} closed: {}", closed.count, closed.reason));
    }
    text
}
