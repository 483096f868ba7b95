//! Converts records and states of the pool and its devices into API answers. Reads only, except for
//! the pool's settings.

use forebay_pool::DeviceRecord;

use crate::base::Core;
use crate::devices::{api_error, settings_of};
use crate::health::reports::Reports;
use crate::link::session::DeviceState as EngineDevice;
use crate::model::error::ApiError;
use crate::model::{
    CheckProblem, CheckResult, DeviceDetails, DeviceInfo, DeviceState, Placement, PoolCheck,
    PoolInfo, PoolState, PoolUpdate, SpaceLevel,
};
use crate::states::size::state_text as cut_text;

impl Reports {
    fn show_device(&self, core: &Core, record: &DeviceRecord) -> DeviceInfo {
        let devices = self.base.devices.borrow();
        let open = devices.iter().find(|device| device.index == record.index);
        let engine = self.link.session().and_then(|s| s.device(record.index));
        let (state, why) = match (open, engine) {
            (None, _) => {
                let missing = self.base.missing.borrow();
                let missing = missing.iter().find(|device| device.index == record.index);
                let why = missing.map(|device| device.why.clone());
                (DeviceState::Missing, why)
            }
            _ if self.states.cut_short(record.index).is_some() => (
                DeviceState::Failed,
                self.states.cut_short(record.index).map(cut_text),
            ),
            (_, Some(EngineDevice::Failed(error))) => (DeviceState::Failed, Some(error)),
            (_, Some(EngineDevice::Opening)) => (
                DeviceState::Opening,
                self.base.waits.about_device(record.index),
            ),
            (_, Some(EngineDevice::Ready) | None) => {
                match core.pool.allocator().device_health(record.index) {
                    forebay_pool::DeviceHealth::Failing => (DeviceState::Failing, None),
                    _ => (DeviceState::Online, None),
                }
            }
        };
        let info = open.map(|device| device.store.0.info());
        let (drive, drive_note) = self.states.drive_of(record.index);
        let space = core
            .pool
            .allocator()
            .device_space(record.index)
            .unwrap_or_default();
        let extent_bytes = core.pool.info().extent_bytes;
        DeviceInfo {
            index: record.index.0,
            uuid: record.uuid.to_string(),
            spec: open.map_or_else(|| record.spec.clone(), |device| device.spec.clone()),
            kind: info.map_or_else(String::new, |info| info.kind.to_string()),
            capacity_bytes: info.map_or(0, |info| info.capacity_bytes),
            data_bytes: record.extents.saturating_mul(extent_bytes),
            used_bytes: space.used_bytes(),
            free_bytes: (space.clean + space.dirty).saturating_mul(extent_bytes),
            quarantined_bytes: space.quarantined.saturating_mul(extent_bytes),
            data_offset_bytes: record.data_offset_bytes,
            block_bytes: record.block_bytes,
            can_punch: info.is_some_and(|info| info.can_punch),
            errors: self.states.errors_of(record.index),
            state,
            why,
            notes: info.map_or_else(Vec::new, |info| info.notes.clone()),
            drive,
            drive_note,
        }
    }

    pub(crate) fn device_list(&self) -> Vec<DeviceInfo> {
        let core = self.base.core.borrow();
        let records = core.pool.devices().iter();
        records
            .map(|record| self.show_device(&core, record))
            .collect()
    }

    /// One device, and the volumes with data there.
    pub(crate) fn device_show(&self, index: u8) -> Result<DeviceDetails, ApiError> {
        let core = self.base.core.borrow();
        let record = core.pool.devices().get(usize::from(index)).ok_or_else(|| {
            ApiError::not_found(format!("the pool has no device {index}"))
                .hint("`forebay device list` shows the pool's devices")
        })?;
        Ok(DeviceDetails {
            device: self.show_device(&core, record),
            volumes: self.base.volumes_on(&core, record.index),
        })
    }

    pub(crate) fn pool_show(&self) -> PoolInfo {
        let devices = self.device_list();
        let mut warnings = self.notes();
        warnings.extend(self.warnings());
        let is_lost = |device: &DeviceInfo| {
            matches!(
                device.state,
                DeviceState::Failing | DeviceState::Failed | DeviceState::Missing
            )
        };
        let degraded = devices.iter().any(is_lost)
            || self.base.committer.trouble().is_some()
            || self.copies.lacks_a_copy();
        let catalog = self.copies.catalog_info();
        let core = self.base.core.borrow();
        let pool = &core.pool;
        let info = pool.info();
        let space = pool.space();
        let settings = pool.info().settings;
        let bytes = |extents: u64| extents.saturating_mul(info.extent_bytes);
        PoolInfo {
            name: info.name.clone(),
            uuid: info.uuid.to_string(),
            state: if degraded {
                PoolState::Degraded
            } else {
                PoolState::Online
            },
            extent_bytes: info.extent_bytes,
            capacity_bytes: space.total_bytes(),
            used_bytes: space.used_bytes(),
            promised_bytes: space.promised_bytes(),
            free_bytes: space.free_bytes(),
            used_percent: space.used_percent(),
            level: match pool.space_level() {
                forebay_pool::SpaceLevel::Normal => SpaceLevel::Normal,
                forebay_pool::SpaceLevel::Warn => SpaceLevel::Warn,
                forebay_pool::SpaceLevel::Critical => SpaceLevel::Critical,
            },
            clean_bytes: bytes(space.clean),
            reserved_bytes: bytes(space.reserved),
            owned_bytes: bytes(space.owned),
            dirty_bytes: bytes(space.dirty),
            quarantined_bytes: bytes(space.quarantined),
            provisioned_bytes: pool
                .volumes()
                .records()
                .filter(|volume| !volume.is_snapshot() && pool.images().of(volume.id).is_none())
                .fold(0, |sum: u64, volume| sum.saturating_add(volume.size_bytes)),
            tenants: pool.tenants().iter().count() as u64,
            volumes: pool.volumes().records().count() as u64,
            placement: match settings.placement {
                forebay_pool::Placement::Stripe => Placement::Stripe,
                forebay_pool::Placement::Fill => Placement::Fill,
            },
            warn_percent: settings.warn_percent,
            critical_percent: settings.critical_percent,
            catalog,
            devices,
            warnings,
        }
    }

    pub(crate) async fn pool_update(&self, body: PoolUpdate) -> Result<PoolInfo, ApiError> {
        let settings = self.base.core.borrow().pool.info().settings;
        let settings = settings_of(
            settings,
            body.placement,
            body.warn_percent,
            body.critical_percent,
        );
        let set = self.base.core.borrow_mut().pool.set_settings(settings);
        set.map_err(api_error)?;
        self.base.commit_for_api().await?;
        Ok(self.pool_show())
    }

    pub(crate) async fn check(&self, body: PoolCheck) -> Result<CheckResult, ApiError> {
        let (report, repaired) = self.pool_check(body.repair).await?;
        let wrong = report.problems.iter().any(|problem| !problem.repairable)
            || report.problems_left_out > 0;
        Ok(CheckResult {
            clean: report.is_clean()
                || (!wrong && repaired > 0 && repaired >= report.leaked_extents),
            extents_checked: report.extents_checked,
            mappings_checked: report.mappings_checked,
            volumes_checked: report.volumes_checked,
            leaked_extents: report.leaked_extents,
            repaired_catalog_blocks: self.copies.catalog_info().repaired_blocks,
            repaired_extents: repaired,
            problems: report
                .problems
                .into_iter()
                .map(|problem| CheckProblem {
                    what: problem.what,
                    repairable: problem.repairable,
                })
                .collect(),
            problems_left_out: report.problems_left_out,
        })
    }
}
