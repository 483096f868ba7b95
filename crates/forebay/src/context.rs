//! What a command that asks a daemon needs.
//!
//! Purpose: the way to the daemon, how to print, and whether a person is asked before something is lost.
//! Design: made once, in `main`, from the arguments that all commands share.
//! Not here: the commands (`command`, `image`, `bench`, `calibrate`).

use std::io::IsTerminal;

use forebay_control::api::client::Client;

use crate::failure::{Failure, Outcome, While};
use crate::output::Output;

/// What every command that asks a daemon needs.
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
