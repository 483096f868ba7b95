//! `forebay volume`; the transfer of images is in `image`.

use forebay_control::model::rbd::{ImagePath, ImageState};
use forebay_control::model::{Done, Volume, VolumeCreate, VolumeUpdate};
use forebay_device::size::{Size, format_bytes};
use serde::Serialize;

use super::scheduling::{assumed_text, limit_line, patch_of};
use super::snapshot;
use crate::api_paths;
use crate::cli::names::VolumeName;
use crate::cli::{BudgetArgs, Reserve, VolumeCommand};
use crate::context::Context;
use crate::failure::{Failure, Outcome};
use crate::image;
use crate::output::{exactly, pairs, table, yes_no};

/// The daemon's default block size.
const DEFAULT_BLOCK_BYTES: u32 = 4096;
/// The same, for an image in Ceph.
const IMAGE_BLOCK_BYTES: u32 = 512;

pub(crate) fn volume(context: &Context, command: VolumeCommand) -> Outcome {
    let client = &context.client;
    match command {
        VolumeCommand::Create {
            volume,
            size,
            block_size,
            reserve,
            rbd,
        } => match (rbd, size) {
            (Some(image), size) => create_on_image(context, volume, &image, size, block_size),
            (None, Some(size)) => create(context, volume, size, block_size, reserve),
            // clap requires one of them.
            (None, None) => Err(Failure::invalid("a volume needs --size or --rbd")),
        },
        VolumeCommand::List { tenant } => {
            let volumes: Vec<Volume> = match tenant {
                Some(tenant) => client.get(&api_paths::volumes(&tenant))?,
                None => client.get("/v1/volumes")?,
            };
            context.output.show(&volumes, |volumes| list(volumes))
        }
        VolumeCommand::Show { volume } => show_one(context, &volume),
        VolumeCommand::Resize {
            volume,
            size,
            shrink,
        } => resize(context, &volume, size, shrink),
        VolumeCommand::Set { volume, reserve } => set(context, &volume, reserve),
        VolumeCommand::Budget { volume, budget } => set_budget(context, &volume, &budget),
        VolumeCommand::Delete { volume, with_image } => delete(context, &volume, with_image),
        VolumeCommand::Snapshot { snapshots } => snapshot::take(context, &snapshots),
        VolumeCommand::Snapshots { of } => snapshot::list(context, of.as_ref()),
        VolumeCommand::Clone {
            snapshot,
            volume,
            reserve,
            rbd,
        } => snapshot::clone(context, &snapshot, volume, reserve, rbd.as_ref()),
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
        size_bytes: Some(size_bytes),
        block_bytes: block_size,
        reserved_bytes: reserve.map_or(0, |reserve| reserve.of(size_bytes, block_bytes)),
        rbd: None,
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

fn create_on_image(
    context: &Context,
    name: VolumeName,
    image: &ImagePath,
    size: Option<Size>,
    block_size: Option<u32>,
) -> Outcome {
    let path = api_paths::volumes(&name.tenant);
    let block_bytes = u64::from(block_size.unwrap_or(IMAGE_BLOCK_BYTES)).max(1);
    let body = VolumeCreate {
        name: name.volume,
        size_bytes: size.map(|size| size.to_blocks(block_bytes)),
        block_bytes: block_size,
        reserved_bytes: 0,
        rbd: Some(image.to_string()),
    };
    let made: Volume = context.client.post(&path, &body)?;
    context.output.show(&made, |made| {
        format!(
            "volume {}/{} created on image {image}: {}, blocks of {} bytes",
            made.tenant,
            made.name,
            format_bytes(made.size_bytes),
            made.block_bytes,
        )
    })
}

fn delete(context: &Context, name: &VolumeName, with_image: bool) -> Outcome {
    let what = match name.volume.contains('@') {
        true => "snapshot",
        false => "volume",
    };
    let path = api_paths::volume(name);
    let of: Volume = context.client.get(&path)?;
    let question = match &of.rbd {
        None => format!("Delete {what} {name} and its data?"),
        Some(image) if with_image => {
            format!(
                "Delete {what} {name}, and remove {} from Ceph with its data?",
                image.path
            )
        }
        Some(image) => format!("Delete {what} {name}? {} stays in Ceph.", image.path),
    };
    context.confirm(&question)?;
    let query = match with_image {
        true => "?with_image=true",
        false => "",
    };
    let done: Done = context.client.delete(&format!("{path}{query}"))?;
    context.output.done(&done)
}

fn resize(context: &Context, name: &VolumeName, size: Size, shrink: bool) -> Outcome {
    if shrink {
        context.confirm(&format!(
            "Set volume {name} to {}, and lose the data beyond?",
            format_bytes(size.bytes)
        ))?;
    }
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
        shrink,
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
        shrink: false,
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
            "RBD",
        ],
        volumes.iter().map(|volume| {
            [
                format!("{}/{}", volume.tenant, volume.name),
                format_bytes(volume.size_bytes),
                mapped(volume),
                format_bytes(volume.reserved_bytes),
                volume.block_bytes.to_string(),
                yes_no(volume.exported),
                volume.uuid.clone(),
                volume.rbd.as_ref().map_or("-", |rbd| &rbd.path).to_owned(),
            ]
        }),
    )
}

/// A volume with the state of its image.
#[derive(Debug, Serialize)]
struct Shown {
    #[serde(flatten)]
    volume: Volume,
    #[serde(skip_serializing_if = "Option::is_none")]
    image: Option<ImageState>,
    /// Why that is not known.
    #[serde(skip_serializing_if = "Option::is_none")]
    image_trouble: Option<String>,
}

fn show_one(context: &Context, name: &VolumeName) -> Outcome {
    let path = api_paths::volume(name);
    let volume: Volume = context.client.get(&path)?;
    let state = volume.rbd.is_some().then(|| {
        let state = context.client.get(&format!("{path}/image"));
        state.map_err(|error| error.to_string())
    });
    let (image, image_trouble) = match state {
        None => (None, None),
        Some(Ok(image)) => (Some(image), None),
        Some(Err(trouble)) => (None, Some(trouble)),
    };
    let shown = Shown {
        volume,
        image,
        image_trouble,
    };
    context.output.show(&shown, show)
}

/// The image's lines.
fn image_lines(shown: &Shown) -> Vec<(&'static str, String)> {
    let Some(rbd) = &shown.volume.rbd else {
        return Vec::new();
    };
    let client = match rbd.client_addresses.is_empty() {
        true => format!("device {}, not connected yet", rbd.client),
        false => format!("device {}, {}", rbd.client, rbd.client_addresses.join(" ")),
    };
    let mut lines = vec![("rbd", rbd.path.clone()), ("client", client)];
    if let Some(image) = &shown.image {
        lines.push(("features", image.features.join(" ")));
        lines.extend(image.parent.clone().map(|parent| ("parent", parent)));
        let is_other = |owner: &&String| !rbd.client_addresses.contains(owner);
        let others = image.lock_owners.iter().filter(is_other);
        lines.extend(others.map(|owner| ("locked by", owner.clone())));
    }
    lines.extend(
        shown
            .image_trouble
            .clone()
            .map(|trouble| ("image", trouble)),
    );
    lines
}

/// The written part of an image is not known.
fn mapped(volume: &Volume) -> String {
    match volume.rbd {
        Some(_) => "-".to_owned(),
        None => format_bytes(volume.mapped_bytes),
    }
}

fn show(shown: &Shown) -> String {
    let volume = &shown.volume;
    let snapshot = volume.snapshot.as_ref();
    let of = snapshot.map(|snapshot| match &snapshot.of {
        Some(of) => format!("of volume {}/{of}", volume.tenant),
        None => "of a deleted volume".to_owned(),
    });
    let taken = snapshot::taken(volume).map(|taken| ("taken", taken));
    let first = [("volume", format!("{}/{}", volume.tenant, volume.name))];
    let snapshot = of.map(|of| ("snapshot", of)).into_iter().chain(taken);
    pairs(
        first
            .into_iter()
            .chain(snapshot)
            .chain(image_lines(shown))
            .chain([
                ("size", exactly(volume.size_bytes)),
                ("mapped", mapped(volume)),
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
