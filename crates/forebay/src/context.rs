//! The context of commands that use the daemon.

use std::io::IsTerminal;

use forebay_control::api::client::Client;

use crate::failure::{Failure, Outcome, While};
use crate::output::Output;

pub(crate) struct Context {
    pub(crate) client: Client,
    pub(crate) output: Output,
    pub(crate) yes: bool,
}

impl Context {
    /// Asks only on a terminal; fails unless the answer is yes.
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
            _ => Err(Failure::new("cancelled: nothing was changed")
                .hint("use --yes to skip the confirmation")),
        }
    }
}
