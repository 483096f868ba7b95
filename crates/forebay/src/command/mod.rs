//! The commands that ask a running daemon, one file per subject.
//!
//! Purpose: from arguments to one or two calls of the API, and from the answer to a table.
//! Design: each command is a function of the client, the output and its arguments.
//! Not here: commands that move data (`image`), and the daemon itself (`serve`).

pub(crate) mod events;
pub(crate) mod export;
mod machine;
pub(crate) mod pool;
pub(crate) mod port;
pub(crate) mod scheduling;
pub(crate) mod status;
pub(crate) mod tenant;
pub(crate) mod terminal;
pub(crate) mod top;
pub(crate) mod volume;

use forebay_control::api::client::Client;

use std::io::IsTerminal;

use crate::failure::{Failure, Outcome, While};
use crate::output::Output;

/// What every command of this kind needs.
pub(crate) struct Context {
    /// The daemon.
    pub(crate) client: Client,
    /// How to print.
    pub(crate) output: Output,
    /// Whether every confirmation is given already.
    pub(crate) yes: bool,
}

impl Context {
    /// Asks on a terminal whether to go on; elsewhere nobody is asked.
    ///
    /// # Errors
    /// If the answer is not yes.
    pub(crate) fn confirm(&self, question: &str) -> Outcome {
        let (input, error) = (std::io::stdin(), std::io::stderr());
        if self.yes || self.output.json || !input.is_terminal() || !error.is_terminal() {
            return Ok(());
        }
        eprint!("{question} [y/N] ");
        let mut answer = String::new();
        input
            .read_line(&mut answer)
            .while_doing("read the answer")?;
        match answer.trim().to_ascii_lowercase().as_str() {
            "y" | "yes" => Ok(()),
            _ => {
                Err(Failure::new("nothing was done").hint("say --yes to go on without a question"))
            }
        }
    }
}

/// A path segment: names with anything but our own characters are escaped, so that the daemon sees,
/// and refuses, exactly what was typed.
pub(crate) fn segment(name: &str) -> String {
    let mut text = String::with_capacity(name.len());
    for byte in name.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' => text.push(byte.into()),
            _ => text.push_str(&format!("%{byte:02X}")),
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::segment;

    #[test]
    fn segments_keep_to_themselves() {
        assert_eq!(segment("a-1"), "a-1");
        assert_eq!(segment("../x y?ä"), "%2E%2E%2Fx%20y%3F%C3%A4");
    }
}
