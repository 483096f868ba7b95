//! `forebay volume snapshot`, `clone`, `rollback` and `snapshots`.

use std::collections::BTreeSet;

use forebay_control::model::events::utc;
use forebay_control::model::rbd::ImagePath;
use forebay_control::model::{SnapshotSpace, SnapshotsTake, Volume, VolumeClone, VolumeRollback};
use forebay_device::size::format_bytes;

use crate::api_paths;
use crate::cli::Reserve;
use crate::cli::names::{SnapshotName, SnapshotsOf, VolumeName};
use crate::context::Context;
use crate::failure::{Failure, Outcome};
use crate::output::table;

pub(super) fn take(context: &Context, names: &[SnapshotName]) -> Outcome {
    let tenant = names.first().map_or("", |name| name.tenant());
    if names.iter().any(|name| name.tenant() != tenant) {
        return Err(
            Failure::invalid("these snapshots are of several tenants").hint(
                "a command takes snapshots of one tenant's volumes; use a command for each tenant",
            ),
        );
    }
    let body = SnapshotsTake {
        snapshots: names.iter().map(|name| name.0.volume.clone()).collect(),
    };
    let taken: Vec<Volume> = context.client.post(&api_paths::snapshots(tenant), &body)?;
    context.output.show(&taken, |taken| {
        let names: Vec<String> = taken.iter().map(name_of).collect();
        match &*names {
            [one] => format!("snapshot {one} taken"),
            all => format!("snapshots taken at one moment: {}", all.join(", ")),
        }
    })
}

pub(super) fn clone(
    context: &Context,
    snapshot: &SnapshotName,
    clone: VolumeName,
    reserve: Option<Reserve>,
    image: Option<&ImagePath>,
) -> Outcome {
    let path = api_paths::volume(&snapshot.0);
    let reserved_bytes = match reserve {
        None => 0,
        Some(reserve) => {
            let of: Volume = context.client.get(&path)?;
            reserve.of(of.size_bytes, u64::from(of.block_bytes))
        }
    };
    let body = VolumeClone {
        tenant: Some(clone.tenant),
        name: clone.volume,
        reserved_bytes,
        rbd: image.map(ToString::to_string),
    };
    let made: Volume = context.client.post(&format!("{path}/clone"), &body)?;
    context.output.show(&made, |made| {
        format!(
            "volume {} created as a clone of {snapshot}: {}",
            name_of(made),
            format_bytes(made.size_bytes)
        )
    })
}

pub(super) fn roll_back(
    context: &Context,
    snapshot: &SnapshotName,
    while_connected: bool,
) -> Outcome {
    let volume = snapshot.of();
    let connected = match while_connected {
        true => ", while hosts use it",
        false => "",
    };
    context.confirm(&format!(
        "Replace the content of volume {volume} by that of {snapshot}{connected}?"
    ))?;
    let body = VolumeRollback {
        snapshot: snapshot.0.volume.clone(),
        while_connected,
    };
    let path = format!("{}/rollback", api_paths::volume(&volume));
    let rolled_back: Volume = context.client.post(&path, &body)?;
    context.output.show(&rolled_back, |_| {
        format!("volume {volume} rolled back to {snapshot}")
    })
}

pub(super) fn list(context: &Context, of: Option<&SnapshotsOf>) -> Outcome {
    let tenants: BTreeSet<String> = match of {
        Some(of) => BTreeSet::from([of.tenant.clone()]),
        None => {
            let mut all: Vec<Volume> = context.client.get("/v1/volumes")?;
            all.retain(|volume| volume.snapshot.is_some());
            all.into_iter().map(|volume| volume.tenant).collect()
        }
    };
    let mut snapshots: Vec<SnapshotSpace> = Vec::new();
    for tenant in tenants {
        let of_tenant: Vec<SnapshotSpace> = context.client.get(&api_paths::snapshots(&tenant))?;
        snapshots.extend(of_tenant);
    }
    snapshots.retain(|snapshot| is_listed(&snapshot.volume, of));
    context.output.show(&snapshots, |snapshots| {
        table(
            ["SNAPSHOT", ">SIZE", ">ALONE", "TAKEN", "EXPORTED"],
            snapshots.iter().map(|snapshot| {
                [
                    name_of(&snapshot.volume),
                    format_bytes(snapshot.volume.size_bytes),
                    format_bytes(snapshot.alone_bytes),
                    taken(&snapshot.volume).unwrap_or_default(),
                    crate::output::yes_no(snapshot.volume.exported),
                ]
            }),
        )
    })
}

/// By its name, because the volume may be gone.
fn is_listed(volume: &Volume, of: Option<&SnapshotsOf>) -> bool {
    let of = of.and_then(|of| of.volume.as_deref());
    let begin = volume.name.split_once('@').map(|(of, _)| of);
    of.is_none_or(|of| begin == Some(of))
}

/// When a snapshot was taken.
pub(super) fn taken(volume: &Volume) -> Option<String> {
    let snapshot = volume.snapshot.as_ref()?;
    Some(utc(snapshot.created_unix_s.saturating_mul(1000)))
}

fn name_of(volume: &Volume) -> String {
    format!("{}/{}", volume.tenant, volume.name)
}
