//! `forebay volume`; the transfer of images is in `image`.

use forebay_control::api::model::{Done, Volume, VolumeCreate, VolumeUpdate};
use forebay_device::size::format_bytes;

use super::scheduling::{assumed_text, limit_line, patch_of};
use super::{Context, segment};
use crate::cli::{Reserve, VolumeCommand, VolumeName};
use crate::failure::Outcome;
use crate::image;
use crate::output::{exactly, pairs, table, yes_no};

/// The block size of a volume that names none, as the daemon has it.
const DEFAULT_BLOCK_BYTES: u32 = 4096;

pub(crate) fn volume(context: &Context, command: VolumeCommand) -> Outcome {
    let client = &context.client;
    match command {
        VolumeCommand::Create {
            volume,
            size,
            block_size,
            reserve,
        } => {
            let path = format!("/v1/tenants/{}/volumes", segment(&volume.tenant));
            let size = size.to_blocks(u64::from(block_size.unwrap_or(DEFAULT_BLOCK_BYTES)));
            let body = VolumeCreate {
                name: volume.volume,
                size_bytes: size,
                block_bytes: block_size,
                reserved_bytes: reserve.map_or(0, |reserve| reserve.of(size)),
            };
            let made: Volume = client.post(&path, &body)?;
            context.output.show(&made, |made| {
                format!(
                    "volume {}/{} created: {}, blocks of {} bytes",
                    made.tenant,
                    made.name,
                    format_bytes(made.size_bytes),
                    made.block_bytes
                )
            })
        }
        VolumeCommand::List { tenant } => {
            let volumes: Vec<Volume> = match tenant {
                Some(tenant) => client.get(&format!("/v1/tenants/{}/volumes", segment(&tenant)))?,
                None => client.get("/v1/volumes")?,
            };
            context.output.show(&volumes, |volumes| list(volumes))
        }
        VolumeCommand::Show { volume } => {
            let volume: Volume = client.get(&path(&volume))?;
            context.output.show(&volume, show)
        }
        VolumeCommand::Resize { volume, size } => {
            let size_bytes = match size.is_rounded {
                true => {
                    let now: Volume = client.get(&path(&volume))?;
                    size.to_blocks(u64::from(now.block_bytes))
                }
                false => size.bytes,
            };
            let body = VolumeUpdate {
                size_bytes: Some(size_bytes),
                reserved_bytes: None,
            };
            let grown: Volume = client.patch(&path(&volume), &body)?;
            context.output.show(&grown, |grown| {
                format!("volume {volume} is now {}", format_bytes(grown.size_bytes))
            })
        }
        VolumeCommand::Set { volume, reserve } => {
            let size_bytes = match reserve {
                Reserve::Full => client.get::<Volume>(&path(&volume))?.size_bytes,
                Reserve::Size(_) => 0,
            };
            let body = VolumeUpdate {
                size_bytes: None,
                reserved_bytes: Some(reserve.of(size_bytes)),
            };
            let set: Volume = client.patch(&path(&volume), &body)?;
            context.output.show(&set, |set| {
                format!(
                    "volume {volume} has {} reserved",
                    format_bytes(set.reserved_bytes)
                )
            })
        }
        VolumeCommand::Budget {
            volume,
            budget: args,
        } => {
            let path = format!("{}/budget", path(&volume));
            let set: Volume = match patch_of(&args, None) {
                Some(patch) => client.patch(&path, &patch)?,
                None => client.delete(&path)?,
            };
            context.output.show(&set, |set| match &set.budget {
                Some(budget) => format!(
                    "volume {volume} has {}\n{}",
                    limit_line(budget),
                    assumed_text(budget)
                ),
                None => format!("volume {volume} has no budget of its own"),
            })
        }
        VolumeCommand::Delete { volume } => {
            context.confirm(&format!("Delete volume {volume} and its data?"))?;
            let done: Done = client.delete(&path(&volume))?;
            context.output.done(&done)
        }
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

/// The route of a volume.
pub(crate) fn path(volume: &VolumeName) -> String {
    format!(
        "/v1/tenants/{}/volumes/{}",
        segment(&volume.tenant),
        segment(&volume.volume)
    )
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
    pairs([
        ("volume", format!("{}/{}", volume.tenant, volume.name)),
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
    ])
}
