//! Vendor-specific log pages and Admin commands; `forebay_nvme::mi::vendor` defines their data.

use forebay_nvme::mi::vendor::{
    self, CommandFigures, DeviceHealthHeader, NONE, UNKNOWN, text, text_of,
};
use forebay_nvme::mi::{AdminCommand, MiStatus};
use forebay_nvme::{NSID_ALL, Status};
use forebay_qos::stated_budget::Stated;
use forebay_xlate::VolumeId;
use zerocopy::little_endian::U64;
use zerocopy::{FromBytes, FromZeros, IntoBytes};

use super::answer::CommandAnswer;
use super::namespaces::{answer, find, no_namespace, status_of};
use super::node::{Caller, ManagedNode};
use crate::config::Right;
use crate::model::error::ApiError;
use crate::model::scheduling::{BudgetChange, BudgetParts};
use crate::model::stats::{LaneStats, OpStats};
use crate::model::{DeviceAdd, DeviceInfo, DeviceState, DriveSource};
use crate::owner::Owner;

/// The largest part of a log page that a command may ask for.
const PAGE_BYTES_MAX: usize = 64 << 10;
const KELVIN: i16 = 273;

/// Whether a log page is one of ours.
pub(super) fn is_log(lid: u8) -> bool {
    vendor::LOGS.contains(&lid)
}

impl ManagedNode {
    /// Get Log Page of a page of ours.
    pub(super) async fn vendor_log(&self, command: &AdminCommand<'_>) -> CommandAnswer {
        let sqe = command.sqe;
        let lid = sqe.cdw(10) as u8;
        let dwords = u64::from(sqe.cdw(10) >> 16) | u64::from(sqe.cdw(11) & 0xFFFF) << 16;
        let offset = u64::from(sqe.cdw(12)) | u64::from(sqe.cdw(13)) << 32;
        let bytes = usize::try_from((dwords + 1) * 4).unwrap_or(usize::MAX);
        if bytes > PAGE_BYTES_MAX {
            return CommandAnswer::admin(Status::INVALID_FIELD.with_dnr(), 0, Vec::new());
        }
        let nsid = sqe.nsid();
        let page = self.daemon.read(move |owner| match lid {
            vendor::LOG_DEVICE_HEALTH => Ok(device_health(owner)),
            vendor::LOG_NAMESPACE_STATISTICS => statistics(owner, nsid),
            _ => budget(owner, nsid),
        });
        let page = match page.await {
            Ok(page) => page,
            Err(error) => {
                let status = status_of(&error, Status::INVALID_FIELD);
                return CommandAnswer::admin(status, 0, Vec::new());
            }
        };
        let rest = usize::try_from(offset)
            .ok()
            .and_then(|offset| page.get(offset..));
        let Some(rest) = rest else {
            return CommandAnswer::admin(Status::INVALID_FIELD.with_dnr(), 0, Vec::new());
        };
        // Bytes past the end are zeros.
        let mut data = vec![0; bytes];
        let length = rest.len().min(bytes);
        data[..length].copy_from_slice(&rest[..length]);
        match command.part(&data) {
            Ok(part) => CommandAnswer::admin(Status::SUCCESS, 0, part.to_vec()),
            Err(refusal) => refusal.into(),
        }
    }

    /// Sets a namespace's budget.
    pub(super) async fn set_budget(
        &self,
        command: &AdminCommand<'_>,
        caller: &Caller,
    ) -> CommandAnswer {
        if !self.may(Right::Budgets) {
            return CommandAnswer::status(MiStatus::ACCESS_DENIED);
        }
        let Ok(budget) = vendor::NamespaceBudget::read_from_bytes(command.data) else {
            return CommandAnswer::status(MiStatus::INVALID_INPUT_SIZE);
        };
        if budget.version.get() != vendor::VERSION {
            return CommandAnswer::admin(Status::INVALID_FIELD.with_dnr(), 0, Vec::new());
        }
        let value = |field: U64| (field != NONE).then(|| field.get());
        let stated = Stated {
            base_iops: value(budget.base_iops),
            base_bytes: value(budget.base_bytes),
            burst_iops: value(budget.burst_iops),
            burst_bytes: value(budget.burst_bytes),
            credit_seconds: None,
        };
        let nsid = command.sqe.nsid();
        let request = format!("Set Namespace Budget: namespace {nsid}, {stated:?}");
        let done = self.daemon.change(move |owner| async move {
            let named = find(&owner, nsid).ok_or_else(|| no_namespace(nsid))?;
            let rate = |iops, bytes| crate::base::show::rate_parts(iops, bytes);
            let change = match stated.is_empty() {
                true => BudgetChange::Delete,
                false => BudgetChange::Put(BudgetParts {
                    base: rate(stated.base_iops, stated.base_bytes),
                    burst: rate(stated.burst_iops, stated.burst_bytes),
                    credit_s: None,
                }),
            };
            let (tenant, volume) = (&*named.tenant, &*named.volume);
            owner
                .budgets
                .volume_budget(tenant, volume, change)
                .await
                .map(|_| ())
        });
        let done = done.await;
        let result = done.as_ref().map(|()| "done".to_owned());
        self.audit_result(
            caller,
            "set the budget of a volume",
            request,
            false,
            &result,
        )
        .await;
        answer(done.map(|()| 0), Status::INVALID_FIELD)
    }

    /// Adds a device to the pool.
    pub(super) async fn add_device(
        &self,
        command: &AdminCommand<'_>,
        caller: &Caller,
    ) -> CommandAnswer {
        if !self.may(Right::Devices) {
            return CommandAnswer::status(MiStatus::ACCESS_DENIED);
        }
        let Ok(device) = vendor::AddDevice::ref_from_bytes(command.data) else {
            return CommandAnswer::status(MiStatus::INVALID_INPUT_SIZE);
        };
        let spec = match text_of(&device.specification) {
            Some(spec) if !spec.is_empty() => spec.to_owned(),
            _ => return CommandAnswer::admin(Status::INVALID_FIELD.with_dnr(), 0, Vec::new()),
        };
        // A `ram:` device would create its file, and may keep data only in memory.
        if !spec.starts_with('/') && !spec.starts_with("file:/") {
            return CommandAnswer::admin(Status::INVALID_FIELD.with_dnr(), 0, Vec::new());
        }
        let request = format!("Add Device: {spec}");
        let added = self.daemon.change_with(|daemon, owner| async move {
            let body = DeviceAdd {
                spec,
                force: false,
                create: false,
                size_bytes: None,
            };
            daemon.device_add(owner, body).await
        });
        let added = added.await;
        let result = added.as_ref().map(|_| "done".to_owned());
        self.audit_result(caller, "add a device", request, false, &result)
            .await;
        answer(
            added.map(|device| device.index.into()),
            Status::OPERATION_DENIED,
        )
    }
}

fn device_health(owner: &Owner) -> Vec<u8> {
    let devices = owner.reports.device_list();
    let header = DeviceHealthHeader {
        version: vendor::VERSION.into(),
        entry_bytes: (size_of::<vendor::DeviceHealth>() as u16).into(),
        devices: (devices.len() as u32).into(),
        reserved: [0; 56],
    };
    let mut page = header.as_bytes().to_vec();
    for device in &devices {
        page.extend_from_slice(entry(device).as_bytes());
    }
    page
}

fn entry(device: &DeviceInfo) -> vendor::DeviceHealth {
    let mut entry = vendor::DeviceHealth {
        index: device.index,
        state: match device.state {
            DeviceState::Online => 0,
            DeviceState::Opening => 1,
            DeviceState::Failing => 2,
            DeviceState::Failed => 3,
            DeviceState::Missing => 4,
        },
        spare_percent: UNKNOWN,
        spare_threshold_percent: UNKNOWN,
        used_percent: UNKNOWN,
        media_errors: NONE,
        power_on_hours: NONE,
        unsafe_shutdowns: NONE,
        data_bytes: device.data_bytes.into(),
        used_bytes: device.used_bytes.into(),
        errors: (device.errors.reads.saturating_add(device.errors.writes)).into(),
        specification: text(&device.spec),
        ..vendor::DeviceHealth::new_zeroed()
    };
    if let Some(drive) = &device.drive {
        let number = |value: Option<u64>| value.map_or(NONE, U64::new);
        let percent = |value: Option<u8>| value.map_or(UNKNOWN, |value| value.min(UNKNOWN - 1));
        entry.source = match drive.source {
            DriveSource::Nvme => 1,
            DriveSource::Ata => 2,
        };
        entry.critical_warning = drive.critical_warning;
        let kelvins = drive
            .temperature_c
            .map(|celsius| celsius.saturating_add(KELVIN).max(1));
        entry.temperature_k = (kelvins.unwrap_or(0) as u16).into();
        entry.spare_percent = percent(drive.spare_percent);
        entry.spare_threshold_percent = percent(drive.spare_threshold_percent);
        entry.used_percent = percent(drive.used_percent);
        entry.media_errors = number(drive.media_errors);
        entry.power_on_hours = number(drive.power_on_hours);
        entry.unsafe_shutdowns = number(drive.unsafe_shutdowns);
        entry.model = text(&drive.model);
        entry.serial = text(&drive.serial);
        entry.firmware = text(&drive.firmware);
    }
    entry
}

/// For NSIDs of log pages; there is none of all namespaces.
fn check(owner: &Owner, nsid: u32) -> Result<VolumeId, ApiError> {
    match find(owner, nsid) {
        Some(_) if nsid != NSID_ALL => Ok(VolumeId(nsid.into())),
        _ => Err(no_namespace(nsid)),
    }
}

fn statistics(owner: &Owner, nsid: u32) -> Result<Vec<u8>, ApiError> {
    let volume = check(owner, nsid)?;
    let lanes = owner.statistics.lanes(|export| export.volume == volume);
    let sum = |of: &dyn Fn(&LaneStats) -> u64| lanes.iter().map(of).fold(0, u64::saturating_add);
    let figures = |of: fn(&LaneStats) -> &OpStats| {
        let most = |time: fn(&OpStats) -> Option<u64>| {
            lanes.iter().filter_map(|lane| time(of(lane))).max()
        };
        CommandFigures {
            commands: sum(&|lane| of(lane).ops).into(),
            bytes: sum(&|lane| of(lane).bytes).into(),
            errors: sum(&|lane| of(lane).errors).into(),
            p50_ns: most(|ops| ops.latency_p50_ns).unwrap_or(0).into(),
            p99_ns: most(|ops| ops.latency_p99_ns).unwrap_or(0).into(),
        }
    };
    let page = vendor::NamespaceStatistics {
        version: vendor::VERSION.into(),
        nsid: nsid.into(),
        exports: (lanes.len() as u32).into(),
        queues: (sum(&|lane| lane.queues) as u32).into(),
        reads: figures(|lane| &lane.read),
        writes: figures(|lane| &lane.write),
        flushes: figures(|lane| &lane.flush),
        deallocations: figures(|lane| &lane.deallocate),
        in_flight: sum(&|lane| lane.in_flight).into(),
        throttled: sum(&|lane| lane.throttled_ops).into(),
        used_bytes: owner.base.mapped_bytes(volume).into(),
        ..vendor::NamespaceStatistics::new_zeroed()
    };
    Ok(page.as_bytes().to_vec())
}

fn budget(owner: &Owner, nsid: u32) -> Result<Vec<u8>, ApiError> {
    let volume = check(owner, nsid)?;
    let stated = owner
        .base
        .core
        .borrow()
        .pool
        .budgets()
        .stated_of_volume(volume);
    let field = |value: Option<u64>| value.map_or(NONE, U64::new);
    let page = vendor::NamespaceBudget {
        base_iops: field(stated.base_iops),
        base_bytes: field(stated.base_bytes),
        burst_iops: field(stated.burst_iops),
        burst_bytes: field(stated.burst_bytes),
        ..vendor::NamespaceBudget::none()
    };
    Ok(page.as_bytes().to_vec())
}
