//! Names that completion knows from the daemon.
//!
//! Purpose: the shell completes names of tenants, volumes and exports.
//! Design: the program completes itself (`clap_complete`); it asks the daemon, and knows no names when that does not answer
//! at once.
//! Not here: the shell's part (`pages`).

use std::ffi::OsStr;
use std::time::Duration;

use clap_complete::CompletionCandidate;
use clap_complete::engine::ArgValueCompleter;
use forebay_control::api::client::Client;
use forebay_control::api::model::{Export, Tenant, Volume};
use serde::de::DeserializeOwned;

/// A shell that waits longer seems to hang.
const TIME_LIMIT: Duration = Duration::from_secs(2);

fn ask<T: DeserializeOwned>(path: &str) -> Option<Vec<T>> {
    let socket = crate::config::socket(None).ok()?;
    let client = Client::new(&socket).with_time_limit(TIME_LIMIT);
    client.get(path).ok()
}

fn that_begin<T: DeserializeOwned>(
    path: &str,
    with: &OsStr,
    name: impl Fn(T) -> String,
) -> Vec<CompletionCandidate> {
    let Some(with) = with.to_str() else {
        return Vec::new();
    };
    let all = ask::<T>(path).unwrap_or_default();
    let names = all
        .into_iter()
        .map(name)
        .filter(|name| name.starts_with(with));
    names.map(CompletionCandidate::new).collect()
}

/// Completes a tenant's name.
pub(super) fn tenants() -> ArgValueCompleter {
    ArgValueCompleter::new(|with: &OsStr| that_begin("/v1/tenants", with, |of: Tenant| of.name))
}

/// Completes `TENANT/VOLUME`.
pub(super) fn volumes() -> ArgValueCompleter {
    let name = |of: Volume| format!("{}/{}", of.tenant, of.name);
    ArgValueCompleter::new(move |with: &OsStr| that_begin("/v1/volumes", with, name))
}

/// Completes `TENANT/VOLUME@ID` of a volume that is exported several times, `TENANT/VOLUME` of others.
pub(crate) fn exports() -> ArgValueCompleter {
    let name = |of: Export| match of.shared {
        true => format!("{}/{}@{}", of.tenant, of.volume, of.id),
        false => format!("{}/{}", of.tenant, of.volume),
    };
    ArgValueCompleter::new(move |with: &OsStr| that_begin("/v1/exports", with, name))
}
