//! Connections of a dead engine, taken up where they are.
//!
//! **Not here:** what the dead engine left ([`crate::takeover`]).

use super::{IN_CAPSULE_BYTES, MAX_IO_ENTRIES, MDTS_BYTES};
use forebay_nvme::Nqn;
use forebay_nvme::controller::ControllerConfig;
use forebay_xlate::boundary::message::ExportConfig;

/// What a controller of an export is made with, or one of the discovery service; `None` for an export
/// whose name is none.
pub(crate) fn controller_config(
    cntlid: u16,
    export: Option<&ExportConfig>,
) -> Option<ControllerConfig> {
    let Some(export) = export else {
        return Some(ControllerConfig::discovery(cntlid));
    };
    Some(ControllerConfig {
        max_queue_entries: MAX_IO_ENTRIES,
        mdts_bytes: MDTS_BYTES,
        in_capsule_bytes: IN_CAPSULE_BYTES,
        ..ControllerConfig::io(cntlid, Nqn::parse(&export.nqn).ok()?, &export.serial)
    })
}
