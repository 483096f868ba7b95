//! `forebay volume import` and `forebay volume export`: raw images over NVMe/TCP.
//!
//! An import replaces data only when told to. An exported file is complete or absent.

mod announce;
mod format;
mod mapped;
mod sink;
mod source;
mod stream;
mod transfer;

use std::path::Path;

use forebay_control::api::client::Client;
use forebay_control::model::{Done, Tenant, TransferKind, Volume};
use forebay_device::size::format_bytes;
use forebay_initiator::{IoQueue, Options, Session};

use crate::api_paths;
use crate::cli::names::VolumeName;
use crate::context::Context;
use crate::failure::{Failure, Outcome, While};
use crate::interrupt::Interrupt;
use crate::output::exactly;
use crate::progress;
use announce::Announced;
use format::Ends;
use mapped::Mapped;
use sink::Sink;
use source::Source;
use transfer::{Data, VolumeShape};

#[derive(Debug, Clone, Copy)]
pub(crate) struct ImportOptions {
    pub(crate) overwrite: bool,
    /// Treat the file as raw, whatever it looks like.
    pub(crate) raw: bool,
}

pub(crate) fn import(
    context: &Context,
    file: &Path,
    name: &VolumeName,
    options: ImportOptions,
) -> Outcome {
    let mut source = Source::open(file)?;
    let client = &context.client;
    let before: Volume = client.get(&api_paths::volume(name))?;
    if let Some(bytes) = source.bytes()
        && bytes > before.size_bytes
    {
        return Err(Failure::invalid(format!(
            "{} has {}, but the volume {name} has only {}",
            shown(file, "standard input"),
            exactly(bytes),
            exactly(before.size_bytes)
        ))
        .hint(format!(
            "grow the volume first: `forebay volume resize {name} --size {bytes}`"
        )));
    }
    source.read_head()?;
    if !options.raw {
        // A stream may be as large as the volume.
        let bytes = source.bytes().unwrap_or(before.size_bytes);
        refuse_other_formats(file, &source.ends(bytes)?, &before)?;
    }
    if options.overwrite {
        context.confirm(&format!("Replace all data of the volume {name}?"))?;
    }
    let interrupt = Interrupt::watch()?;
    let announced = Announced::new(client, name, TransferKind::Import, options.overwrite)?;
    let bar = progress::bytes(source.bytes(), "importing");
    let fresh =
        announced.access.volume.allocated_bytes == 0 && Mapped::new(client, name).next()?.is_none();
    let moved = with_volume(&announced, |queue, shape| {
        let bytes = transfer::import(queue, shape, &mut source, fresh, &mut |at| {
            bar.set_position(at);
            announced.check()?;
            interrupt.check()
        })?;
        if !options.raw {
            // A stream's last bytes are known only now.
            refuse_other_formats(file, &source.ends(bytes)?, &before)?;
        }
        announced.check_now()?;
        Ok(bytes)
    });
    bar.finish_and_clear();
    let bytes = moved.map_err(|failure| {
        failure.also_hint(format!(
            "{name} may now contain a part of the image; import it again with --force"
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

/// Names the budgets that limited a transfer, if any.
fn budget_note(client: &Client, name: &VolumeName) -> String {
    let tenant = &name.tenant;
    let of_tenant = client.get::<Tenant>(&format!("/v1/tenants/{}", api_paths::segment(tenant)));
    let of_volume = client.get::<Volume>(&api_paths::volume(name));
    match (
        of_tenant.is_ok_and(|shown| shown.budget.is_some()),
        of_volume.is_ok_and(|shown| shown.budget.is_some()),
    ) {
        (true, true) => format!(", within the budgets of tenant {tenant} and volume {name}"),
        (true, false) => format!(", within the budget of tenant {tenant}"),
        (false, true) => format!(", within the budget of volume {name}"),
        (false, false) => String::new(),
    }
}

fn shown(file: &Path, standard: &str) -> String {
    match stream::is_standard(file) {
        true => standard.to_owned(),
        false => file.display().to_string(),
    }
}

fn refuse_other_formats(file: &Path, ends: &Ends, volume: &Volume) -> Outcome {
    const AS_IT_IS: &str = "--raw imports the bytes as they are";
    let image = shown(file, "the image on standard input");
    if let Some(format) = ends.format() {
        return Err(
            Failure::invalid(format!("{image} is {}, not a raw image", format.name)).hint(format!(
                "convert it first: `{}`; {AS_IT_IS}",
                format.command(&shown(file, "FILE"))
            )),
        );
    }
    let Some((what, made_for)) = ends.unusable_with(volume.block_bytes) else {
        return Ok(());
    };
    let failure = Failure::invalid(format!(
        "{image} has {what} for blocks of {made_for} bytes, but the volume {}/{} has blocks of {}: \
         hosts could not use it",
        volume.tenant, volume.name, volume.block_bytes
    ));
    let wanted = if made_for < 4096 { 512 } else { 4096 };
    Err(failure.hint(format!(
        "import it into a volume created with `--block-size {wanted}`; {AS_IT_IS}"
    )))
}

pub(crate) fn export(context: &Context, name: &VolumeName, file: &Path) -> Outcome {
    let before: Volume = context.client.get(&api_paths::volume(name))?;
    let interrupt = Interrupt::watch()?;
    let mut sink = Sink::create(file)?;
    let announced = Announced::new(&context.client, name, TransferKind::Export, false)?;
    for user in &announced.access.in_use_by {
        eprintln!("warning: {user}; its current writes may or may not be in the image");
    }
    let bar = progress::bytes(Some(before.size_bytes), "exporting");
    let moved = with_volume(&announced, |queue, shape| {
        bar.set_length(shape.size_bytes);
        let mut data = Mapped::new(&context.client, name);
        transfer::export(queue, shape, &mut data, &mut sink, &mut |at| {
            bar.set_position(at);
            announced.check()?;
            interrupt.check()
        })?;
        Ok(shape.size_bytes)
    });
    bar.finish_and_clear();
    let bytes = moved?;
    announced.close()?;
    let done = Done {
        done: format!(
            "{} of {name} exported to {}{}",
            format_bytes(bytes),
            shown(file, "standard output"),
            budget_note(&context.client, name)
        ),
    };
    match sink {
        Sink::File(_) => context.output.done(&done),
        Sink::Stream(_) => context.output.done_on_stderr(&done),
    }
}

/// Disconnects even if `work` fails.
fn with_volume<T>(
    announced: &Announced,
    work: impl FnOnce(&mut IoQueue, VolumeShape) -> Outcome<T>,
) -> Outcome<T> {
    let options = Options {
        queue_entries: 33,
        ..Options::default()
    };
    let address = announced.address()?;
    let nqn = &announced.access.nqn;
    let mut session = Session::connect(address, nqn, &announced.host_nqn, &options)
        .while_doing("connect to the volume")?;
    let namespace = session.namespaces().first();
    let namespace = namespace.ok_or_else(|| Failure::new("the export has no namespace"))?;
    let shape = VolumeShape {
        size_bytes: namespace.size_bytes(),
        block_bytes: namespace.block_bytes,
        max_transfer_bytes: session.controller().max_transfer_bytes,
    };
    let nsid = namespace.nsid;
    let mut queue = session
        .open_queue(nsid)
        .while_doing("connect to the volume")?;
    let worked = work(&mut queue, shape);
    drop(queue);
    let closed = session.close();
    let worked = worked?;
    closed.while_doing("close the connection")?;
    Ok(worked)
}
