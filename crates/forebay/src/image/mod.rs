//! `forebay volume import` and `forebay volume export`: raw images in and out.
//!
//! Purpose: a volume's bytes from and to a file, with a progress bar, through NVMe/TCP like any host.
//! Design: `access` opens the volume for a moment, `transfer` moves the bytes; here is what the user
//! sees. Import is refused while hosts are connected. An exported image is complete or not there.
//! Not here: image formats other than raw.

mod access;
mod transfer;

use std::fs::File;
use std::io::{Seek, SeekFrom};
use std::os::unix::fs::FileTypeExt;
use std::path::Path;

use forebay_control::api::model::{Done, Volume};
use forebay_device::size::format_bytes;
use forebay_initiator::{IoQueue, Options, Session};

use crate::cli::VolumeName;
use crate::command::{Context, volume};
use crate::failure::{Failure, Outcome, While};
use crate::interrupt::Interrupt;
use crate::output::exactly;
use crate::progress;
use access::Access;
use transfer::Shape;

pub(crate) fn import(context: &Context, file: &Path, name: &VolumeName) -> Outcome {
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
    let before: Volume = context.client.get(&volume::path(name))?;
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
    let interrupt = Interrupt::watch()?;
    let existing = Access::existing(&context.client, name)?;
    if let Some(host) = existing
        .as_ref()
        .and_then(|export| export.connected_hosts.first())
    {
        return Err(
            Failure::new(format!("the volume {name} is in use by {host}"))
                .hint("disconnect its hosts first (on Linux: nvme disconnect)"),
        );
    }
    let access = Access::open(&context.client, name, existing.is_some())?;
    let bar = progress::bytes(bytes, "importing");
    let fresh = before.allocated_bytes == 0;
    let moved = with_volume(&access, |queue, shape| {
        transfer::import(queue, shape, &image, bytes, fresh, &mut |at| {
            bar.set_position(at);
            interrupt.check()
        })
    });
    bar.finish_and_clear();
    moved?;
    access.close()?;
    context.output.done(&Done {
        done: format!("{} imported into {name}", format_bytes(bytes)),
    })
}

pub(crate) fn export(context: &Context, name: &VolumeName, file: &Path) -> Outcome {
    let before: Volume = context.client.get(&volume::path(name))?;
    let interrupt = Interrupt::watch()?;
    let existing = Access::existing(&context.client, name)?;
    if existing
        .as_ref()
        .is_some_and(|export| !export.connected_hosts.is_empty())
    {
        eprintln!("warning: hosts are connected to {name}; what they write now may be in or not");
    }
    let image = NewFile::create(file)?;
    let access = Access::open(&context.client, name, existing.is_some())?;
    let bar = progress::bytes(before.size_bytes, "exporting");
    let moved = with_volume(&access, |queue, shape| {
        bar.set_length(shape.size_bytes);
        transfer::export(queue, shape, &image.file, &mut |at| {
            bar.set_position(at);
            interrupt.check()
        })?;
        Ok(shape.size_bytes)
    });
    bar.finish_and_clear();
    let bytes = moved?;
    image.keep();
    access.close()?;
    let done = format!(
        "{} of {name} exported to {}",
        format_bytes(bytes),
        file.display()
    );
    context.output.done(&Done { done })
}

/// Connects, and ends the connection however `work` ends.
fn with_volume<T>(
    access: &Access<'_>,
    work: impl FnOnce(&mut IoQueue, Shape) -> Outcome<T>,
) -> Outcome<T> {
    let options = Options {
        queue_entries: 33,
        ..Options::default()
    };
    let mut session = Session::connect(access.address, &access.nqn, &access.host_nqn, &options)
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
