//! `forebay volume import` and `forebay volume export`: raw images in and out.
//!
//! Purpose: a volume's bytes from and to a file, with a progress bar, through NVMe/TCP like any host.
//! Design: `announce` has the daemon let this program in, `transfer` moves the bytes; here is what the user sees. An import replaces nothing that it was not told to, and takes a raw image only. An exported image is complete or
//! not there.
//! Not here: image formats other than raw.

mod announce;
mod format;
mod transfer;

use std::fs::File;
use std::io::{Seek, SeekFrom};
use std::os::unix::fs::FileTypeExt;
use std::path::Path;

use forebay_control::api::client::Client;
use forebay_control::api::model::{Done, Tenant, TransferKind, Volume};
use forebay_device::size::format_bytes;
use forebay_initiator::{IoQueue, Options, Session};

use crate::cli::VolumeName;
use crate::command::{Context, segment, volume};
use crate::failure::{Failure, Outcome, While};
use crate::interrupt::Interrupt;
use crate::output::exactly;
use crate::progress;
use announce::Announced;
use format::Ends;
use transfer::Shape;

/// What an import may do.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ImportOptions {
    /// Replace what the volume holds.
    pub(crate) overwrite: bool,
    /// Take the file for a raw image, whatever it looks like.
    pub(crate) raw: bool,
}

pub(crate) fn import(
    context: &Context,
    file: &Path,
    name: &VolumeName,
    options: ImportOptions,
) -> Outcome {
    let shown = file.display();
    let (image, bytes) = open_image(file)?;
    let client = &context.client;
    let before: Volume = client.get(&volume::path(name))?;
    if bytes > before.size_bytes {
        return Err(Failure::new(format!(
            "{shown} has {}, the volume {name} only {}",
            exactly(bytes),
            exactly(before.size_bytes)
        ))
        .hint(format!(
            "grow the volume first: `forebay volume resize {name} --size {bytes}`"
        )));
    }
    if !options.raw {
        refuse_other_formats(&shown.to_string(), &Ends::read(&image, bytes)?, &before)?;
    }
    if options.overwrite {
        context.confirm(&format!("Replace everything in the volume {name}?"))?;
    }
    let interrupt = Interrupt::watch()?;
    let announced = Announced::new(client, name, TransferKind::Import, options.overwrite)?;
    let bar = progress::bytes(bytes, "importing");
    let fresh = announced.access.volume.allocated_bytes == 0;
    let moved = with_volume(&announced, |queue, shape| {
        transfer::import(queue, shape, &image, bytes, fresh, &mut |at| {
            bar.set_position(at);
            announced.check()?;
            interrupt.check()
        })?;
        announced.check_now()
    });
    bar.finish_and_clear();
    moved.map_err(|failure| {
        failure.or_hint(format!(
            "{name} holds a part of the image now: import it again with --force"
        ))
    })?;
    announced.close()?;
    context.output.done(&Done {
        done: format!(
            "{} imported into {name}{}",
            format_bytes(bytes),
            budget_note(client, name)
        ),
    })
}

/// Names the budget that a transfer kept to, if there is one.
fn budget_note(client: &Client, name: &VolumeName) -> String {
    let tenant = &name.tenant;
    let shown = client.get::<Tenant>(&format!("/v1/tenants/{}", segment(tenant)));
    match shown.is_ok_and(|shown| shown.budget.is_some()) {
        true => format!(", within the budget of tenant {tenant}"),
        false => String::new(),
    }
}

/// The image, and how large it is.
fn open_image(file: &Path) -> Outcome<(File, u64)> {
    let shown = file.display();
    // Before it is opened: that would wait for a pipe's writer.
    let kind = std::fs::metadata(file)
        .while_doing(format!("open {shown}"))?
        .file_type();
    if !kind.is_file() && !kind.is_block_device() {
        let kind = if kind.is_dir() { "a folder, " } else { "" };
        return Err(Failure::new(format!(
            "{shown} is {kind}neither a file nor a block device"
        ))
        .hint("give a raw image, or a block device"));
    }
    let mut image = File::open(file).while_doing(format!("open {shown}"))?;
    // Works for block devices too.
    let bytes = image
        .seek(SeekFrom::End(0))
        .while_doing(format!("find the size of {shown}"))?;
    if bytes == 0 {
        return Err(Failure::new(format!("{shown} is empty")));
    }
    Ok((image, bytes))
}

fn refuse_other_formats(shown: &str, ends: &Ends, volume: &Volume) -> Outcome {
    const AS_IT_IS: &str = "--raw imports the file's bytes as they are";
    if let Some(format) = ends.format() {
        return Err(
            Failure::new(format!("{shown} is {}, not a raw image", format.name)).hint(format!(
                "convert it first: `{}`; {AS_IT_IS}",
                format.command(shown)
            )),
        );
    }
    let Some((what, made_for)) = ends.unusable_with(volume.block_bytes) else {
        return Ok(());
    };
    let failure = Failure::new(format!(
        "{shown} has {what} for blocks of {made_for} bytes, the volume {}/{} has blocks of {}: hosts could not use it",
        volume.tenant, volume.name, volume.block_bytes
    ));
    let wanted = if made_for < 4096 { 512 } else { 4096 };
    Err(failure.hint(format!(
        "import it into a volume made with `--block-size {wanted}`; {AS_IT_IS}"
    )))
}

pub(crate) fn export(context: &Context, name: &VolumeName, file: &Path) -> Outcome {
    let before: Volume = context.client.get(&volume::path(name))?;
    let interrupt = Interrupt::watch()?;
    let image = NewFile::create(file)?;
    let announced = Announced::new(&context.client, name, TransferKind::Export, false)?;
    for user in &announced.access.in_use_by {
        eprintln!("warning: {user}; what it writes now may be in the image or not");
    }
    let bar = progress::bytes(before.size_bytes, "exporting");
    let moved = with_volume(&announced, |queue, shape| {
        bar.set_length(shape.size_bytes);
        transfer::export(queue, shape, &image.file, &mut |at| {
            bar.set_position(at);
            announced.check()?;
            interrupt.check()
        })?;
        Ok(shape.size_bytes)
    });
    bar.finish_and_clear();
    let bytes = moved?;
    image.keep();
    announced.close()?;
    let done = format!(
        "{} of {name} exported to {}{}",
        format_bytes(bytes),
        file.display(),
        budget_note(&context.client, name)
    );
    context.output.done(&Done { done })
}

/// Connects, and ends the connection however `work` ends.
fn with_volume<T>(
    announced: &Announced,
    work: impl FnOnce(&mut IoQueue, Shape) -> Outcome<T>,
) -> Outcome<T> {
    let options = Options {
        queue_entries: 33,
        ..Options::default()
    };
    let address = announced.address()?;
    let nqn = &announced.access.nqn;
    let mut session = Session::connect(address, nqn, &announced.host_nqn, &options)
        .while_doing("reach the volume")?;
    let namespace = session.namespaces().first();
    let namespace = namespace.ok_or_else(|| Failure::new("the export has no namespace"))?;
    let shape = Shape {
        size_bytes: namespace.size_bytes(),
        block_bytes: namespace.block_bytes,
        max_transfer_bytes: session.controller().max_transfer_bytes,
    };
    let nsid = namespace.nsid;
    let mut queue = session.open_queue(nsid).while_doing("reach the volume")?;
    let worked = work(&mut queue, shape);
    drop(queue);
    let closed = session.close();
    let worked = worked?;
    closed.while_doing("end the connection in good order")?;
    Ok(worked)
}

/// A new file that is removed again unless it is kept.
struct NewFile<'a> {
    file: File,
    path: &'a Path,
    kept: bool,
}

impl<'a> NewFile<'a> {
    fn create(path: &'a Path) -> Outcome<Self> {
        if !path.exists()
            && let Some(kind) = forebay_device::mounts::device_folder(path)
        {
            return Err(Failure::new(format!(
                "can't create {}: {kind}, so the image would be in memory",
                path.display()
            ))
            .hint("name a file elsewhere"));
        }
        let file = File::create_new(path).map_err(|error| {
            let failure = Failure::new(format!("can't create {}: {error}", path.display()));
            if error.kind() == std::io::ErrorKind::AlreadyExists {
                failure.hint("an export never overwrites: remove the file, or choose another name")
            } else {
                failure
            }
        })?;
        Ok(Self {
            file,
            path,
            kept: false,
        })
    }

    fn keep(mut self) {
        self.kept = true;
    }
}

impl Drop for NewFile<'_> {
    fn drop(&mut self) {
        if !self.kept {
            let _ = std::fs::remove_file(self.path);
        }
    }
}
