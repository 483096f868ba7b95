//! `forebay volume`; the transfer of images is in `image`.

use forebay_control::model::{Done, Volume, VolumeCreate, VolumeUpdate};
use forebay_device::size::{Size, format_bytes};

use super::scheduling::{assumed_text, limit_line, patch_of};
use super::snapshot;
use crate::api_paths;
use crate::cli::names::VolumeName;
use crate::cli::{BudgetArgs, Reserve, VolumeCommand};
use crate::context::Context;
use crate::failure::Outcome;
use crate::image;
use crate::output::{exactly, pairs, table, yes_no};

/// The daemon's default block size.
const DEFAULT_BLOCK_BYTES: u32 = 4096;

pub(crate) fn volume(context: &Context, command: VolumeCommand) -> Outcome {
    let client = &context.client;
    match command {
        VolumeCommand::Create {
            volume,
            size,
            block_size,
            reserve,
        } => create(context, volume, size, block_size, reserve),
        VolumeCommand::List { tenant } => {
            let volumes: Vec<Volume> = match tenant {
                Some(tenant) => client.get(&api_paths::volumes(&tenant))?,
                None => client.get("/v1/volumes")?,
            };
            context.output.show(&volumes, |volumes| list(volumes))
        }
        VolumeCommand::Show { volume } => {
            let volume: Volume = client.get(&api_paths::volume(&volume))?;
            context.output.show(&volume, show)
        }
        VolumeCommand::Resize { volume, size } => resize(context, &volume, size),
        VolumeCommand::Set { volume, reserve } => set(context, &volume, reserve),
        VolumeCommand::Budget { volume, budget } => set_budget(context, &volume, &budget),
        VolumeCommand::Delete { volume } => {
            let what = match volume.volume.contains('@') {
                true => "snapshot",
                false => "volume",
            };
            context.confirm(&format!("Delete {what} {volume} and its data?"))?;
            let done: Done = client.delete(&api_paths::volume(&volume))?;
            context.output.done(&done)
        }
        VolumeCommand::Snapshot { snapshots } => snapshot::take(context, &snapshots),
        VolumeCommand::Snapshots { of } => snapshot::list(context, of.as_ref()),
        VolumeCommand::Clone {
            snapshot,
            volume,
            reserve,
        } => snapshot::clone(context, &snapshot, volume, reserve),
        VolumeCommand::Rollback {
            snapshot,
            while_connected,
        } => snapshot::roll_back(context, &snapshot, while_connected),
        VolumeCommand::Import {
            file,
            volume,
            force,
            raw,
        } => {
            let options = image::ImportOptions {
                overwrite: force,
                raw,
            };
            image::import(context, &file, &volume, options)
        }
        VolumeCommand::Export { volume, file } => image::export(context, &volume, &file),
    }
}

fn create(
    context: &Context,
    name: VolumeName,
    size: Size,
    block_size: Option<u32>,
    reserve: Option<Reserve>,
) -> Outcome {
    let path = api_paths::volumes(&name.tenant);
    let block_bytes = u64::from(block_size.unwrap_or(DEFAULT_BLOCK_BYTES)).max(1);
    let size_bytes = size.to_blocks(block_bytes);
    let body = VolumeCreate {
        name: name.volume,
        size_bytes,
        block_bytes: block_size,
        reserved_bytes: reserve.map_or(0, |reserve| reserve.of(size_bytes, block_bytes)),
    };
    let made: Volume = context.client.post(&path, &body)?;
    context.output.show(&made, |made| {
        format!(
            "volume {}/{} created: {}, blocks of {} bytes{}",
            made.tenant,
            made.name,
            format_bytes(made.size_bytes),
            made.block_bytes,
            rounded(size, made.size_bytes)
        )
    })
}

fn resize(context: &Context, name: &VolumeName, size: Size) -> Outcome {
    let path = api_paths::volume(name);
    let size_bytes = match size.is_rounded {
        true => {
            let now: Volume = context.client.get(&path)?;
            size.to_blocks(u64::from(now.block_bytes))
        }
        false => size.bytes,
    };
    let body = VolumeUpdate {
        size_bytes: Some(size_bytes),
        reserved_bytes: None,
    };
    let grown: Volume = context.client.patch(&path, &body)?;
    context.output.show(&grown, |grown| {
        format!(
            "volume {name} is now {}{}",
            format_bytes(grown.size_bytes),
            rounded(size, grown.size_bytes)
        )
    })
}

fn set(context: &Context, name: &VolumeName, reserve: Reserve) -> Outcome {
    let path = api_paths::volume(name);
    let reserved_bytes = match reserve {
        Reserve::Size(size) if !size.is_rounded => size.bytes,
        reserve => {
            let now: Volume = context.client.get(&path)?;
            reserve.of(now.size_bytes, u64::from(now.block_bytes))
        }
    };
    let body = VolumeUpdate {
        size_bytes: None,
        reserved_bytes: Some(reserved_bytes),
    };
    let set: Volume = context.client.patch(&path, &body)?;
    context.output.show(&set, |set| {
        let rounded = match reserve {
            Reserve::Size(size) => rounded(size, set.reserved_bytes),
            Reserve::Full => String::new(),
        };
        format!(
            "volume {name} has {} reserved{rounded}",
            format_bytes(set.reserved_bytes)
        )
    })
}

fn set_budget(context: &Context, name: &VolumeName, args: &BudgetArgs) -> Outcome {
    let path = format!("{}/budget", api_paths::volume(name));
    let set: Volume = match patch_of(args, None) {
        Some(patch) => context.client.patch(&path, &patch)?,
        None => context.client.delete(&path)?,
    };
    context.output.show(&set, |set| match &set.budget {
        Some(budget) => format!(
            "volume {name} has {}\n{}",
            limit_line(budget),
            assumed_text(budget)
        ),
        None => format!("volume {name} has no budget of its own"),
    })
}

/// Tells if a size was rounded up.
fn rounded(stated: Size, bytes: u64) -> String {
    match stated.is_rounded && bytes > stated.bytes {
        true => format!(
            " ({bytes} bytes: {} were rounded up to whole blocks)",
            stated.bytes
        ),
        false => String::new(),
    }
}

fn list(volumes: &[Volume]) -> String {
    table(
        [
            "VOLUME",
            ">SIZE",
            ">MAPPED",
            ">RESERVED",
            ">BLOCK",
            "EXPORTED",
            "UUID",
        ],
        volumes.iter().map(|volume| {
            [
                format!("{}/{}", volume.tenant, volume.name),
                format_bytes(volume.size_bytes),
                format_bytes(volume.mapped_bytes),
                format_bytes(volume.reserved_bytes),
                volume.block_bytes.to_string(),
                yes_no(volume.exported),
                volume.uuid.clone(),
            ]
        }),
    )
}

fn show(volume: &Volume) -> String {
    let snapshot = volume.snapshot.as_ref();
    let of = snapshot.map(|snapshot| match &snapshot.of {
        Some(of) => format!("of volume {}/{of}", volume.tenant),
        None => "of a deleted volume".to_owned(),
    });
    let taken = snapshot::taken(volume).map(|taken| ("taken", taken));
    let first = [("volume", format!("{}/{}", volume.tenant, volume.name))];
    let snapshot = of.map(|of| ("snapshot", of)).into_iter().chain(taken);
    pairs(
        first.into_iter().chain(snapshot).chain([
            ("size", exactly(volume.size_bytes)),
            ("mapped", format_bytes(volume.mapped_bytes)),
            ("allocated", format_bytes(volume.allocated_bytes)),
            ("reserved", format_bytes(volume.reserved_bytes)),
            ("block size", volume.block_bytes.to_string()),
            ("uuid", volume.uuid.clone()),
            ("serial", volume.serial.clone()),
            ("exported", yes_no(volume.exported)),
            (
                "budget",
                volume
                    .budget
                    .as_ref()
                    .map_or_else(|| "none of its own".to_owned(), limit_line),
            ),
        ]),
    )
}
