//! Finds the export that a request names.

use forebay_pool::{ExportId, ExportRecord, VolumeRecord};

use crate::base::Core;
use crate::devices::api_error;
use crate::exports::export::Exports;
use crate::model::error::ApiError;

impl Exports {
    /// `db` and `db@monday` name the only export of a volume or a snapshot; `db@7` and
    /// `db@monday@7` are the exports with number 7. `db@7` may mean both.
    pub(crate) fn export_id(&self, tenant: &str, named: &str) -> Result<ExportId, ApiError> {
        let core = self.base.core.borrow();
        let numbered = numbered(&core, tenant, named);
        let whole = match core.pool.volume_by_name(tenant, named) {
            Ok(volume) => volume,
            Err(error) => {
                return numbered.unwrap_or_else(|| Err(api_error(error)));
            }
        };
        let mut found = core.pool.exports().of_volume(whole.id);
        match (found.next(), found.next(), numbered) {
            (Some(_), _, Some(Ok(other))) => Err(ambiguous(tenant, named, other)),
            (None, _, Some(Ok(other))) => Ok(other),
            (Some(one), None, _) => Ok(one.id),
            (Some(_), Some(_), _) => Err(several(&core, tenant, whole)),
            (None, ..) => Err(not_exported(tenant, named)),
        }
    }
}

/// `None` if no volume has the name before the number.
fn numbered(core: &Core, tenant: &str, named: &str) -> Option<Result<ExportId, ApiError>> {
    let (name, number) = named.rsplit_once('@')?;
    let volume = core.pool.volume_by_name(tenant, name).ok()?;
    let is_named = |export: &&ExportRecord| export.id.0.to_string() == number;
    let mut exports = core.pool.exports().of_volume(volume.id);
    let found = exports.find(is_named).map(|export| export.id);
    Some(found.ok_or_else(|| not_exported(tenant, named)))
}

fn several(core: &Core, tenant: &str, volume: &VolumeRecord) -> ApiError {
    let name = format!("{tenant}/{}", volume.name);
    let exports = core.pool.exports().of_volume(volume.id);
    let all: Vec<String> = exports
        .map(|export| format!("{name}@{} ({})", export.id.0, export.frontend.name()))
        .collect();
    ApiError::invalid(format!("volume {name} has several exports"))
        .hint(format!("name one: {}", all.join(", ")))
}

fn ambiguous(tenant: &str, named: &str, other: ExportId) -> ApiError {
    let volume = named.rsplit_once('@').map_or(named, |(volume, _)| volume);
    ApiError::invalid(format!(
        "{tenant}/{named} may mean the export of a snapshot, or export {} of {tenant}/{volume}",
        other.0
    ))
    .hint(format!(
        "name the snapshot's as {tenant}/{named}@NUMBER, and the only one of a volume as {tenant}/{volume}; \
        `forebay export list` shows them"
    ))
}

fn not_exported(tenant: &str, named: &str) -> ApiError {
    ApiError::not_found(format!("volume {tenant}/{named} is not exported"))
        .hint("`forebay export list` shows the exports")
}
