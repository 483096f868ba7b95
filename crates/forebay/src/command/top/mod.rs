//! `forebay top`: a live view of tenants and volumes.
//!
//! A daemon that does not answer is reported on the last line and polled further. Without a
//! terminal, with `--once` and with `--json`, it shows one interval.

mod budget;
mod screen;
mod view;

use std::io::IsTerminal;
use std::time::{Duration, Instant};

use forebay_control::model::stats::Stats;

pub(crate) use self::screen::Size;
use self::view::View;
use super::terminal::Terminal;
use crate::cli::{TopArgs, TopOrder};
use crate::context::Context;
use crate::failure::Outcome;
use crate::interrupt::Interrupt;

/// The longest delay of a key or a resize.
const TURN: Duration = Duration::from_millis(200);
/// Keys are ignored meanwhile.
const ANSWER_LIMIT: Duration = Duration::from_secs(3);
const PAPER: Size = Size {
    columns: 80,
    lines: usize::MAX,
};

pub(crate) fn top(context: &Context, args: &TopArgs) -> Outcome {
    let interval = Duration::from_secs(args.interval.into());
    let live = !args.once && !context.output.json && std::io::stdout().is_terminal();
    if live && std::io::stdin().is_terminal() {
        return watch(context, args.sort, interval);
    }
    let before = sample(context)?;
    std::thread::sleep(interval);
    let view = View::between(&before, &sample(context)?, args.sort);
    context
        .output
        .show(&view, |view| screen::text(view, PAPER, ""))
}

fn sample(context: &Context) -> Outcome<Stats> {
    let client = context.client.clone().with_time_limit(ANSWER_LIMIT);
    Ok(client.get("/v1/stats")?)
}

fn watch(context: &Context, mut order: TopOrder, interval: Duration) -> Outcome {
    let interrupt = Interrupt::watch()?;
    let mut before = sample(context)?;
    let mut now = before.clone();
    let mut asked = Instant::now();
    let mut trouble = String::new();
    let mut terminal = Terminal::open()?;
    loop {
        if asked.elapsed() >= interval {
            asked = Instant::now();
            match sample(context) {
                Ok(next) => {
                    before = std::mem::replace(&mut now, next);
                    trouble.clear();
                }
                Err(failure) => trouble = failure.to_string().replace('\n', " "),
            }
        }
        let size = terminal.size();
        let last = if trouble.is_empty() { KEYS } else { &trouble };
        let text = screen::text(&View::between(&before, &now, order), size, last);
        terminal.draw(&text)?;
        match terminal.key(TURN)? {
            Some(b'q' | 3 | 4) => return Ok(()),
            Some(key) => order = order_of(key).unwrap_or(order),
            None => {}
        }
        if interrupt.check().is_err() {
            return Ok(());
        }
    }
}

const KEYS: &str = "sort by: i IOPS, b bytes, p P99, u queue, t throttled, n name; q quits";

fn order_of(key: u8) -> Option<TopOrder> {
    Some(match key {
        b'i' => TopOrder::Iops,
        b'b' => TopOrder::Bytes,
        b'p' => TopOrder::P99,
        b'u' => TopOrder::InFlight,
        b't' => TopOrder::Throttled,
        b'n' => TopOrder::Name,
        _ => return None,
    })
}
