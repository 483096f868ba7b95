//! `forebay volume`; the transfer of images is in `image`.

use forebay_control::api::model::{Done, Volume, VolumeCreate, VolumeUpdate};
use forebay_device::size::{Size, format_bytes};

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
            let block_bytes = u64::from(block_size.unwrap_or(DEFAULT_BLOCK_BYTES)).max(1);
            let size_bytes = size.to_blocks(block_bytes);
            let body = VolumeCreate {
                name: volume.volume,
                size_bytes,
                block_bytes: block_size,
                reserved_bytes: reserve.map_or(0, |reserve| reserve.of(size_bytes, block_bytes)),
            };
            let made: Volume = client.post(&path, &body)?;
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
                format!(
                    "volume {volume} is now {}{}",
                    format_bytes(grown.size_bytes),
                    rounded(size, grown.size_bytes)
                )
            })
        }
        VolumeCommand::Set { volume, reserve } => {
            let reserved_bytes = match reserve {
                Reserve::Size(size) if !size.is_rounded => size.bytes,
                reserve => {
                    let now: Volume = client.get(&path(&volume))?;
                    reserve.of(now.size_bytes, u64::from(now.block_bytes))
                }
            };
            let body = VolumeUpdate {
                size_bytes: None,
                reserved_bytes: Some(reserved_bytes),
            };
            let set: Volume = client.patch(&path(&volume), &body)?;
            context.output.show(&set, |set| {
                let rounded = match reserve {
                    Reserve::Size(size) => rounded(size, set.reserved_bytes),
                    Reserve::Full => String::new(),
                };
                format!(
                    "volume {volume} has {} reserved{rounded}",
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

/// Says that a size was rounded up, if it was.
fn rounded(stated: Size, bytes: u64) -> String {
    match stated.is_rounded && bytes > stated.bytes {
        true => format!(
            " ({bytes} bytes: {} are rounded up to whole blocks)",
            stated.bytes
        ),
        false => String::new(),
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
