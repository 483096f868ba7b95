//! Sample answers of the API.

use forebay_control::model::rbd::{ImageState, VolumeImage};
use forebay_control::model::{
    CatalogCopyInfo, CatalogInfo, CheckProblem, CheckResult, DeviceErrors, DeviceInfo, DeviceState,
    DriveHealth, DriveSource, Export, Placement, PoolInfo, PoolState, SnapshotInfo, SpaceLevel,
    Volume,
};

pub(crate) fn export() -> Export {
    Export {
        id: 3,
        frontend: Default::default(),
        mapped_doorbells: false,
        queues: 0,
        pinned_memory: false,
        socket: None,
        machine: None,
        shared: false,
        read_only: false,
        internal: false,
        tenant: "acme".to_owned(),
        volume: "disk".to_owned(),
        nqn: "nqn.2026-01.io.forebay:acme.disk".to_owned(),
        nsid: 1,
        hosts: vec!["nqn.host".to_owned()],
        any_host: false,
        addresses: vec!["[::1]:4420".to_owned()],
        quarantined: None,
        commands_ending: 0,
        warnings: Vec::new(),
        reactor: None,
        connected_hosts: Vec::new(),
    }
}

pub(crate) fn volume(size_bytes: u64) -> Volume {
    Volume {
        tenant: "acme".to_owned(),
        name: "disk".to_owned(),
        id: 1,
        uuid: "6f0c1c50-8a0b-4c58-9a61-1d0f0b1f5a01".to_owned(),
        serial: "6F0C1C508A0B4C589A61".to_owned(),
        size_bytes,
        block_bytes: 4096,
        allocated_bytes: 65536,
        mapped_bytes: 65536,
        reserved_bytes: 1 << 20,
        exported: true,
        reservation: None,
        budget: None,
        snapshot: None,
        rbd: None,
    }
}

/// `name`: `silent` for one whose cluster does not answer.
pub(crate) fn in_ceph(name: &str) -> Volume {
    Volume {
        name: name.to_owned(),
        rbd: Some(VolumeImage {
            path: format!("east/rbd/{name}"),
            client: 255,
            client_addresses: vec!["10.0.0.1:0/7".to_owned()],
        }),
        ..volume(1 << 30)
    }
}

pub(crate) fn image() -> ImageState {
    ImageState {
        size_bytes: 1 << 30,
        object_bytes: 4 << 20,
        features: vec!["layering".to_owned(), "exclusive-lock".to_owned()],
        parent: Some("rbd/golden@v1".to_owned()),
        snapshots: Vec::new(),
        lock_owners: vec!["10.0.0.1:0/7".to_owned(), "10.0.0.2:0/8".to_owned()],
    }
}

pub(crate) fn snapshot(name: String) -> Volume {
    Volume {
        name,
        exported: false,
        snapshot: Some(SnapshotInfo {
            of: Some("disk".to_owned()),
            created_unix_s: 1_000_000_000,
        }),
        ..volume(1 << 30)
    }
}

pub(crate) fn device(state: DeviceState) -> DeviceInfo {
    let missing = state == DeviceState::Missing;
    DeviceInfo {
        index: missing.into(),
        uuid: "0".to_owned(),
        spec: "file:/pool.img".to_owned(),
        kind: "file".to_owned(),
        capacity_bytes: 1 << 30,
        data_bytes: 1 << 30,
        used_bytes: 1 << 28,
        free_bytes: 3 << 28,
        quarantined_bytes: 0,
        data_offset_bytes: 1 << 20,
        block_bytes: 512,
        can_punch: true,
        errors: DeviceErrors {
            reads: 2,
            last: Some("Input/output error (os error 5)".to_owned()),
            last_offset_bytes: Some(4096),
            ..DeviceErrors::default()
        },
        state,
        why: missing.then(|| "no such file".to_owned()),
        notes: Vec::new(),
        drive: (!missing).then(drive),
        drive_note: missing.then(|| "it does not answer".to_owned()),
    }
}

fn drive() -> DriveHealth {
    DriveHealth {
        path: "/dev/nvme0n1".to_owned(),
        source: DriveSource::Nvme,
        model: "Model 1".to_owned(),
        serial: "S1".to_owned(),
        firmware: "F1".to_owned(),
        read_unix_ms: 1,
        warnings: vec!["is outside its temperature limits".to_owned()],
        critical_warning: 2,
        temperature_c: Some(71),
        spare_percent: Some(100),
        spare_threshold_percent: Some(10),
        used_percent: Some(12),
        media_errors: Some(3),
        power_on_hours: Some(1000),
        unsafe_shutdowns: Some(4),
        reallocated_sectors: None,
        pending_sectors: None,
        uncorrectable_sectors: None,
    }
}

pub(crate) fn check_result(repair: bool) -> CheckResult {
    CheckResult {
        clean: repair,
        extents_checked: 16384,
        mappings_checked: 4096,
        volumes_checked: 1,
        leaked_extents: 3,
        repaired_catalog_blocks: 0,
        repaired_extents: if repair { 3 } else { 0 },
        problems: vec![CheckProblem {
            what: "3 extents of device 0 leak".to_owned(),
            repairable: true,
        }],
        problems_left_out: 0,
    }
}

pub(crate) fn pool() -> PoolInfo {
    PoolInfo {
        name: "pool".to_owned(),
        uuid: "0".to_owned(),
        state: PoolState::Degraded,
        extent_bytes: 65536,
        capacity_bytes: 1 << 30,
        used_bytes: 1 << 28,
        promised_bytes: 1 << 20,
        free_bytes: 3 << 28,
        used_percent: 25,
        level: SpaceLevel::Normal,
        clean_bytes: 3 << 28,
        reserved_bytes: 0,
        owned_bytes: 1 << 28,
        dirty_bytes: 0,
        quarantined_bytes: 0,
        provisioned_bytes: 1 << 40,
        tenants: 1,
        volumes: 1,
        placement: Placement::Stripe,
        warn_percent: 80,
        critical_percent: 95,
        catalog: CatalogInfo {
            used_bytes: 1 << 20,
            limit_bytes: 1 << 25,
            metadata_bytes: 1 << 21,
            copies: vec![
                CatalogCopyInfo {
                    device: 0,
                    is_good: true,
                    why: None,
                },
                CatalogCopyInfo {
                    device: 1,
                    is_good: false,
                    why: Some("it was left behind".to_owned()),
                },
            ],
            repaired_blocks: 2,
            notes: vec!["block 7 of device 1 was repaired".to_owned()],
        },
        devices: vec![device(DeviceState::Online), device(DeviceState::Missing)],
        warnings: vec!["the moon is full".to_owned()],
    }
}
