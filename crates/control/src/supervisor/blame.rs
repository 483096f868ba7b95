//! Why an engine died.
//!
//! Purpose: from how the kernel says a process ended, to a cause for people, and whether it crashed by
//! itself.
//! Not here: what follows from it (the supervisor, `owner::quarantine`).

use forebay_pool::ExportId;
use forebay_xlate::boundary::message::Blamed;
use forebay_xlate::boundary::region::Region;

/// What is known about a death.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Verdict {
    /// For people.
    pub(super) cause: String,
    /// It crashed or was stuck, and was not just killed from outside.
    pub(super) crashed: bool,
    /// What it was working on then.
    pub(super) blamed: Option<Blamed>,
    /// Whose that was.
    pub(super) export: Option<ExportId>,
}

/// Judges a death by how the kernel says the process ended, and by what it recorded.
pub(super) fn judge(_region: Option<&Region>, how: &str) -> Verdict {
    Verdict {
        cause: how.to_owned(),
        crashed: !how.contains("SIGKILL"),
        blamed: None,
        export: None,
    }
}
