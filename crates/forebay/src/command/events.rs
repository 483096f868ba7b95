//! `forebay events`.
//!
//! Purpose: what happened, as a table; with `--follow`, line by line as it happens.
//! Design: following asks for what came after the last event that was shown, and waits for it at the
//! daemon. Events are numbered over restarts of the daemon, so it goes on when there is one again.
//! Not here: what happened.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use forebay_control::api::client::ClientError;
use forebay_control::api::events::{Event, EventList};

use super::Context;
use super::status::word;
use crate::cli::EventsArgs;
use crate::failure::{Failure, Outcome, While};
use crate::output::{print_line, table};

/// How long the daemon holds a question for what is to come.
const WAIT_S: u64 = 25;
/// After how long a daemon that is not there is asked again.
const AGAIN: Duration = Duration::from_secs(1);

pub(crate) fn events(context: &Context, args: &EventsArgs) -> Outcome {
    if args.follow {
        return follow(context, args.after);
    }
    let events = read(context, args.after, 0)?.events;
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    let now_ms = since.unwrap_or_default().as_millis() as u64;
    context.output.show(&events, |events| text(events, now_ms))
}

fn read(context: &Context, after: Option<u64>, wait_s: u64) -> Result<EventList, ClientError> {
    let after = after.map_or_else(String::new, |after| format!("&after={after}"));
    context
        .client
        .get(&format!("/v1/events?wait_s={wait_s}{after}"))
}

fn follow(context: &Context, mut after: Option<u64>) -> Outcome {
    // A daemon that is not there at the beginning is an error; one that goes away is waited for.
    let mut list = read(context, after, 0)?;
    let mut is_away = false;
    loop {
        if list.missed > 0 {
            eprintln!("{} events were missed: see the daemon's log", list.missed);
        }
        for event in &list.events {
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
                    // More readers than the daemon holds questions of: it answers the others at once.
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
                        eprintln!("{error}; asking again");
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

/// `2026-11-22T07:05:00.042Z`.
pub(super) fn utc(unix_ms: u64) -> String {
    let (days, ms) = (unix_ms / 86_400_000, unix_ms % 86_400_000);
    // Counted in years that begin in March, so that a leap day is a year's last; from 0000-03-01 on.
    let days = days + 719_468;
    let (era, day) = (days / 146_097, days % 146_097);
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let day = day - (153 * month + 2) / 5 + 1;
    let year = era * 400 + year + u64::from(month >= 10);
    let month = if month < 10 { month + 3 } else { month - 9 };
    let (hour, minute) = (ms / 3_600_000, ms / 60_000 % 60);
    let (second, ms) = (ms / 1000 % 60, ms % 1000);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{ms:03}Z")
}

fn text(events: &[Event], now_ms: u64) -> String {
    table(
        [">NUMBER", ">AGO", "WHAT", ">GENERATION", "MESSAGE"],
        events.iter().map(|event| {
            let ago_ms = now_ms.saturating_sub(event.at_unix_ms);
            [
                event.sequence.to_string(),
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

#[cfg(test)]
mod tests {
    use super::utc;

    #[test]
    fn times_are_written_as_everybody_writes_them() {
        for (unix_s, text) in [
            (0, "1970-01-01T00:00:00.007Z"),
            (951_782_399, "2000-02-28T23:59:59.007Z"),
            (951_782_400, "2000-02-29T00:00:00.007Z"),
            (1_709_251_199, "2024-02-29T23:59:59.007Z"),
            (1_795_331_100, "2026-11-22T07:05:00.007Z"),
            (4_107_542_400, "2100-03-01T00:00:00.007Z"),
        ] {
            assert_eq!(utc(unix_s * 1000 + 7), text);
        }
    }
}
