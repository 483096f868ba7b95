//! Warnings for `status` and `pool show`, with affected volumes and remedies, computed on request.
//! File systems below device files are polled, because other processes fill them.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::rc::Rc;
use std::time::Duration;

use forebay_device::DeviceKind;
use forebay_device::size::format_bytes;
use forebay_xlate::DeviceIndex;
use tokio::time::sleep;

use crate::base::{Base, Core};
use crate::events::EventFields;
use crate::exports::export::Exports;
use crate::exports::vms::VmSockets;
use crate::health::copies::Copies;
use crate::health::pool_hold::Labels;
use crate::link::Link;
use crate::model::error::ApiError;
use crate::model::events::EventKind;
use crate::model::{Capacity, DeviceInfo, DeviceState};
use crate::qos::placement::ReactorPlacement;
use crate::states::DeviceStates;

const BEAT: Duration = Duration::from_secs(1);
/// Affected volumes that a warning names.
const NAMED: usize = 5;
/// A file system is nearly full when less than this fraction is left.
const NEARLY_FULL: u64 = 20;

/// Whether a file system has room for the rest of a sparse device file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Room {
    /// As far as known.
    Enough,
    /// Bytes left.
    Little(u64),
    Nothing,
}

fn judge(missing_bytes: u64, left_bytes: u64, total_bytes: u64) -> Room {
    if missing_bytes == 0 || left_bytes >= missing_bytes {
        return Room::Enough;
    }
    match left_bytes {
        // A few remaining blocks can't be relied on.
        0..65_536 => Room::Nothing,
        left if left < total_bytes / NEARLY_FULL => Room::Little(left),
        _ => Room::Enough,
    }
}

fn room(path: &Path) -> Room {
    let (Ok(file), Ok(below)) = (path.metadata(), rustix::fs::statvfs(path)) else {
        // It is gone or unreachable, which is detected elsewhere.
        return Room::Enough;
    };
    let missing = file.len().saturating_sub(file.blocks().saturating_mul(512));
    let bytes = |blocks: u64| blocks.saturating_mul(below.f_frsize);
    judge(missing, bytes(below.f_bavail), bytes(below.f_blocks))
}

fn some(names: &[String]) -> Option<String> {
    match names.len() {
        0 => None,
        n if n <= NAMED => Some(names.join(", ")),
        n => Some(format!(
            "{} and {} other volumes",
            names[..NAMED].join(", "),
            n - NAMED
        )),
    }
}

fn listed(names: &[String]) -> String {
    some(names).map_or_else(
        || "no volume has data there".to_owned(),
        |names| format!("data of {names} there can't be reached"),
    )
}

pub(crate) fn concerned(names: &[String]) -> String {
    some(names).map_or_else(
        || "no volume has data there".to_owned(),
        |names| format!("it holds data of {names}"),
    )
}

#[derive(Debug)]
pub(crate) struct Reports {
    pub(super) base: Rc<Base>,
    pub(super) link: Rc<Link>,
    pub(super) states: Rc<DeviceStates>,
    pub(super) labels: Rc<Labels>,
    pub(super) copies: Rc<Copies>,
    pub(super) placement: Rc<ReactorPlacement>,
    pub(super) vms: Rc<VmSockets>,
    pub(super) exports: Rc<Exports>,
    /// The warnings that were emitted.
    pub(super) warned: RefCell<BTreeSet<String>>,
}

impl Reports {
    pub(crate) fn new(
        base: &Rc<Base>,
        link: &Rc<Link>,
        states: &Rc<DeviceStates>,
        labels: &Rc<Labels>,
        copies: &Rc<Copies>,
        exports: &Rc<Exports>,
    ) -> Rc<Self> {
        Rc::new(Self {
            base: base.clone(),
            link: link.clone(),
            states: states.clone(),
            labels: labels.clone(),
            copies: copies.clone(),
            placement: exports.placement.clone(),
            vms: exports.vms.clone(),
            exports: exports.clone(),
            warned: Default::default(),
        })
    }

    /// The task that warns when a device file's file system or a shared limit runs out, and when
    /// that ends.
    pub(crate) async fn run_warnings(self: Rc<Self>) {
        let mut warned = BTreeSet::new();
        let mut limits_warned = BTreeSet::new();
        loop {
            sleep(BEAT).await;
            self.log_rooms(&mut warned);
            self.log_limits(&mut limits_warned);
        }
    }

    /// Warnings, except for problems that the configuration itself causes ([`Reports::notes`]).
    pub(crate) fn warnings(&self) -> Vec<String> {
        let mut warnings = Vec::new();
        if let Some(trouble) = self.base.committer.trouble() {
            warnings.push(format!("the pool's catalog can't be written: {trouble}"));
        }
        warnings.extend(self.base.waits.warnings());
        let core = self.base.core.borrow();
        for device in self.device_list() {
            warnings.extend(self.device_warning(&core, &device));
            warnings.extend(self.error_warning(&core, &device));
            warnings.extend(self.drive_warnings(&core, &device));
        }
        drop(core);
        warnings.extend(self.labels.label_warnings());
        warnings.extend(self.states.nameless_warnings());
        warnings.extend(self.copies.copies_warnings());
        warnings.extend(self.room_warnings().into_iter().map(|(_, text)| text));
        warnings.extend(self.vms.socket_warnings());
        warnings.extend(self.limit_warnings());
        warnings.extend(self.troubles());
        warnings.extend(self.placement.promise_warning());
        warnings.extend(self.placement.unwritten_warning());
        warnings
    }

    /// Warnings that follow from the configuration of devices.
    pub(crate) fn notes(&self) -> Vec<String> {
        let devices = self.base.devices.borrow();
        let of = |device: &crate::devices::PoolDevice| {
            let notes = device.store.0.info().notes.clone();
            let spec = device.spec.clone();
            notes
                .into_iter()
                .map(move |note| format!("device {spec}: {note}"))
        };
        devices.iter().flat_map(of).collect()
    }

    pub(crate) fn refuse_failed(&self) -> Result<(), ApiError> {
        let core = self.base.core.borrow();
        let devices = self.device_list();
        let failed = devices.iter().filter(|d| d.state == DeviceState::Failed);
        let failed: Vec<String> = failed
            .filter_map(|device| self.device_warning(&core, device))
            .collect();
        match failed.is_empty() {
            true => Ok(()),
            false => Err(ApiError::damaged(failed.join("; "))),
        }
    }

    /// Whether part of the pool is not served.
    pub(crate) fn has_trouble(&self) -> bool {
        let is_lost = |device: &DeviceInfo| {
            matches!(device.state, DeviceState::Failed | DeviceState::Missing)
        };
        self.base.committer.trouble().is_some()
            || self.device_list().iter().any(is_lost)
            || self.base.waits.is_any_device_published()
            || !self.exports.quarantine_warnings().is_empty()
    }

    pub(crate) fn capacity(&self) -> Capacity {
        let space = self.base.core.borrow().pool.space();
        Capacity {
            total_bytes: space.total_bytes(),
            used_bytes: space.used_bytes(),
            promised_bytes: space.promised_bytes(),
            free_bytes: space.free_bytes(),
        }
    }

    fn device_warning(&self, core: &Core, device: &DeviceInfo) -> Option<String> {
        let (what, to_do) = match device.state {
            DeviceState::Online | DeviceState::Opening | DeviceState::Failing => return None,
            DeviceState::Failed if self.states.cut_short(DeviceIndex(device.index)).is_some() => (
                "has failed",
                "data beyond that is lost; make the file as long as before and take it back with \
                `forebay pool open --device SPEC --force`, or restore the data from a copy",
            ),
            DeviceState::Failed => ("has failed", "the daemon keeps retrying"),
            DeviceState::Missing => (
                "is missing",
                "bring it back and run `forebay pool open`, with --device SPEC if its path has changed",
            ),
        };
        let why = device
            .why
            .as_ref()
            .map_or_else(String::new, |why| format!(" ({why})"));
        let names = self.base.volumes_on(core, DeviceIndex(device.index));
        Some(format!(
            "device {} {what}{why}: {}; {to_do}",
            device.spec,
            listed(&names)
        ))
    }

    fn error_warning(&self, core: &Core, device: &DeviceInfo) -> Option<String> {
        let index = DeviceIndex(device.index);
        let what = self.states.error_trouble(index)?;
        let names = self.base.volumes_on(core, index);
        let placing = match device.state {
            DeviceState::Failing => "; no new extents are placed there until it recovers",
            _ => "",
        };
        Some(format!(
            "device {} {what}; {}{placing}; check the kernel's log, the cable and the disk, and replace the disk if \
            the errors continue",
            device.spec,
            concerned(&names)
        ))
    }

    fn drive_warnings(&self, core: &Core, device: &DeviceInfo) -> Vec<String> {
        let index = DeviceIndex(device.index);
        let warnings = self.states.drive_warnings(index).into_iter();
        let with_volumes = |what| {
            let names = self.base.volumes_on(core, index);
            format!("device {}: {what}; {}", device.spec, concerned(&names))
        };
        warnings.map(with_volumes).collect()
    }

    /// Emits an event when a file system fills up, and when it has room again.
    pub(crate) fn log_rooms(&self, warned: &mut BTreeSet<String>) {
        let now = self.room_warnings();
        for (spec, text) in &now {
            if !warned.contains(spec) {
                self.base
                    .report(EventKind::PoolSpace, text.clone(), EventFields::default());
            }
        }
        let names: BTreeSet<String> = now.into_iter().map(|(spec, _)| spec).collect();
        for spec in warned.difference(&names) {
            let text = format!("the file system below device {spec} has free space again");
            self.base
                .report(EventKind::PoolSpace, text, EventFields::default());
        }
        *warned = names;
    }

    fn room_warnings(&self) -> Vec<(String, String)> {
        let mut warnings = Vec::new();
        for device in &*self.base.devices.borrow() {
            let info = device.store.0.info();
            if info.kind == DeviceKind::Block {
                continue;
            }
            let text = match room(info.spec.path()) {
                Room::Enough => continue,
                Room::Little(left) => format!(
                    "the file system below device {} is nearly full ({} left): free some space there before writes to \
                    new extents fail",
                    device.spec,
                    format_bytes(left)
                ),
                Room::Nothing => format!(
                    "the file system below device {} is full: writes to new extents fail until there is space",
                    device.spec
                ),
            };
            warnings.push((device.spec.clone(), text));
        }
        warnings
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_has_all_its_blocks_never_lacks_room() {
        assert_eq!(judge(0, 0, 1 << 40), Room::Enough);
        assert_eq!(judge(1 << 30, 1 << 30, 1 << 40), Room::Enough);
    }

    #[test]
    fn a_sparse_file_on_a_full_file_system_does() {
        assert_eq!(judge(1 << 30, 0, 1 << 40), Room::Nothing);
        assert_eq!(judge(1 << 30, 4096, 1 << 40), Room::Nothing);
        assert_eq!(judge(1 << 30, 1 << 20, 1 << 40), Room::Little(1 << 20));
        // More is promised than there is, but most space is still free.
        assert_eq!(judge(1 << 40, 1 << 30, 10 << 30), Room::Enough);
    }

    #[test]
    fn a_file_is_looked_at() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(1 << 20).unwrap();
        assert_eq!(room(file.path()), Room::Enough);
        assert_eq!(room(Path::new("/nowhere/at/all")), Room::Enough);
    }

    #[test]
    fn not_every_volume_is_named() {
        let names = |n: usize| -> Vec<String> { (0..n).map(|i| format!("t/{i}")).collect() };
        assert!(listed(&names(2)).contains("t/0, t/1 there can't"));
        assert!(listed(&names(9)).contains("t/4 and 4 other volumes"));
    }
}
