//! Images that go into volumes and come out of them.

use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

/// Which way an image goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum TransferKind {
    /// Into the volume, which no other host may use meanwhile.
    Import,
    /// Out of it: no image may go in meanwhile.
    Export,
}

/// Body of `PUT /v1/tenants/{tenant}/volumes/{volume}/transfer`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct TransferPut {
    /// The NQN of the host that will move the image.
    pub host: String,
    /// Which way.
    pub kind: TransferKind,
    /// Import over what the volume holds.
    #[serde(default)]
    pub overwrite: bool,
    /// The transfer is under way already, and goes on.
    #[serde(default)]
    pub renew: bool,
}

/// What `DELETE /v1/tenants/{tenant}/volumes/{volume}/transfer` is told.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct TransferEnd {
    /// The NQN that the transfer was announced with.
    pub host: String,
}
