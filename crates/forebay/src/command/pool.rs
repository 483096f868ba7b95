//! `forebay pool` and `forebay device`.

use forebay_control::model::{
    CatalogInfo, CheckResult, DeviceAdd, DeviceDetails, DeviceInfo, Done, PoolCheck, PoolCreate,
    PoolInfo, PoolOpen, PoolUpdate,
};
use forebay_device::size::{CAPACITY_BLOCK_BYTES, Size, format_bytes, format_exact, parse_size};
use forebay_device::spec::{DeviceSpec, SpecError};

use crate::api_paths::segment;
use crate::cli::{DeviceCommand, PoolCommand, PoolCreateArgs};
use crate::command::drive;
use crate::context::Context;
use crate::failure::{Failure, Outcome, While};
use crate::output::{pairs, table, yes_no};
use crate::word::word;

pub(crate) fn pool(context: &Context, command: PoolCommand) -> Outcome {
    let info: PoolInfo = match command {
        PoolCommand::Create(args) => return create(context, args),
        PoolCommand::Open {
            devices,
            force,
            take_over,
        } => {
            let body = PoolOpen {
                devices: absolute(&devices, None)?,
                force,
                take_over,
            };
            context.client.post("/v1/pool/open", &body)?
        }
        PoolCommand::Upgrade => context.client.post("/v1/pool/upgrade", &())?,
        PoolCommand::Show => context.client.get("/v1/pool")?,
        PoolCommand::Set(settings) => {
            let body = PoolUpdate {
                placement: settings.placement.map(Into::into),
                warn_percent: settings.warn_percent,
                critical_percent: settings.critical_percent,
            };
            context.client.patch("/v1/pool", &body)?
        }
        PoolCommand::Check { repair } => return check(context, repair),
        PoolCommand::Destroy {
            name,
            delete_volumes,
            disconnect_hosts,
            forget,
        } => {
            context.confirm(&match (forget, delete_volumes) {
                (true, _) => format!("Forget pool {name}?"),
                (_, true) => format!("Destroy pool {name} with all of its volumes and their data?"),
                _ => format!("Destroy pool {name}?"),
            })?;
            let query = format!(
                "?name={}&delete_volumes={delete_volumes}&disconnect_hosts={disconnect_hosts}&forget={forget}",
                segment(&name)
            );
            let done: Done = context.client.delete(&format!("/v1/pool{query}"))?;
            return context.output.done(&done);
        }
    };
    context.output.show(&info, pool_text)
}

fn check(context: &Context, repair: bool) -> Outcome {
    let found: CheckResult = context
        .client
        .post("/v1/pool/check", &PoolCheck { repair })?;
    context.output.show(&found, check_text)?;
    if found.clean {
        return Ok(());
    }
    let failure = Failure::new("the pool has problems");
    let mendable = found.problems.iter().any(|problem| problem.repairable);
    Err(if mendable && !repair {
        failure.hint(
            "`forebay pool check --repair` frees leaked extents, and rewrites overwritten labels",
        )
    } else {
        failure.hint(
            "copy the data that you need from its volumes, and keep this report for the analysis",
        )
    })
}

fn check_text(found: &CheckResult) -> String {
    let mut text = pairs([
        ("extents", found.extents_checked.to_string()),
        ("mappings", found.mappings_checked.to_string()),
        ("volumes", found.volumes_checked.to_string()),
        (
            "leaked",
            format!(
                "{} extents, {} freed",
                found.leaked_extents, found.repaired_extents
            ),
        ),
        (
            "catalog",
            format!("{} blocks repaired", found.repaired_catalog_blocks),
        ),
        (
            "problems",
            (found.problems.len() as u64 + found.problems_left_out).to_string(),
        ),
    ]);
    if !found.problems.is_empty() {
        text.push('\n');
        text.push_str(&table(
            ["PROBLEM", "REPAIRABLE"],
            found
                .problems
                .iter()
                .map(|problem| [problem.what.clone(), yes_no(problem.repairable)]),
        ));
        text.push('\n');
    }
    if found.problems_left_out > 0 {
        text.push_str(&format!("and {} more\n", found.problems_left_out));
    }
    text.push_str(match (found.clean, found.repaired_extents) {
        (true, 0) => "no problems found\n",
        (true, _) => "all problems are repaired\n",
        (false, _) => "",
    });
    text
}

/// Makes paths absolute, as the daemon runs elsewhere. `size_bytes` is for devices without a size.
fn absolute(specs: &[String], size_bytes: Option<u64>) -> Outcome<Vec<String>> {
    let here = std::env::current_dir().while_doing("find the current directory")?;
    let parse = |text: &String| match (DeviceSpec::parse_in(&here, text), size_bytes) {
        (Err(SpecError::NoSize { .. }), Some(bytes)) => {
            DeviceSpec::parse_in(&here, &format!("{text}?size={}", format_exact(bytes)))
        }
        (parsed, _) => parsed,
    };
    specs
        .iter()
        .map(|text| match parse(text) {
            Ok(spec) => Ok(spec.to_string()),
            Err(error) => Err(Failure::invalid(error.to_string())
                .hint("a device is file:/path, /path, ram:/path?size=1G or null:/path?size=64G")),
        })
        .collect()
}

fn capacity(size: Option<Size>) -> Option<u64> {
    size.map(|size| size.to_blocks(CAPACITY_BLOCK_BYTES))
}

/// Names each size that was rounded up.
fn rounded(specs: &[String], size: Option<Size>) -> String {
    let own = specs.iter().filter_map(|spec| {
        let (_, size) = spec.rsplit_once("?size=")?;
        parse_size(size).ok()
    });
    let mut text = String::new();
    for size in own.chain(size) {
        let bytes = size.to_blocks(CAPACITY_BLOCK_BYTES);
        if bytes != size.bytes {
            text.push_str(&format!(
                "\n{} bytes are rounded up to {bytes}, a multiple of {CAPACITY_BLOCK_BYTES}",
                size.bytes
            ));
        }
    }
    text
}

fn create(context: &Context, args: PoolCreateArgs) -> Outcome {
    if args.force {
        context.confirm(&format!(
            "Use {}, and lose any data on it?",
            args.devices.join(", ")
        ))?;
    }
    let body = PoolCreate {
        name: args.name,
        devices: absolute(&args.devices, capacity(args.size))?,
        force: args.force,
        extent_bytes: args.extent_size,
        create: args.create,
        size_bytes: capacity(args.size),
        placement: args.settings.placement.map(Into::into),
        warn_percent: args.settings.warn_percent,
        critical_percent: args.settings.critical_percent,
    };
    let made: PoolInfo = context.client.post("/v1/pool", &body)?;
    context.output.show(&made, |made| {
        let rounded = rounded(&args.devices, args.size);
        format!("{}{rounded}", pool_text(made).trim_end())
    })
}

fn pool_text(pool: &PoolInfo) -> String {
    let catalog = &pool.catalog;
    let mut text = pairs([
        ("name", pool.name.clone()),
        ("uuid", pool.uuid.clone()),
        ("state", word(&pool.state)),
        ("capacity", format_bytes(pool.capacity_bytes)),
        (
            "used",
            format!(
                "{} ({} % with promised space)",
                format_bytes(pool.used_bytes),
                pool.used_percent
            ),
        ),
        ("promised", format_bytes(pool.promised_bytes)),
        ("free", format_bytes(pool.free_bytes)),
        ("  clean", format_bytes(pool.clean_bytes)),
        ("  dirty", format_bytes(pool.dirty_bytes)),
        ("owned", format_bytes(pool.owned_bytes)),
        ("set aside", format_bytes(pool.reserved_bytes)),
        ("quarantined", format_bytes(pool.quarantined_bytes)),
        ("provisioned", format_bytes(pool.provisioned_bytes)),
        ("extent size", format_bytes(pool.extent_bytes)),
        ("tenants", pool.tenants.to_string()),
        ("volumes", pool.volumes.to_string()),
        ("placement", word(&pool.placement)),
        (
            "warns at",
            format!("{} % and {} %", pool.warn_percent, pool.critical_percent),
        ),
        (
            "catalog",
            format!(
                "{} of {} used",
                format_bytes(catalog.used_bytes),
                format_bytes(catalog.limit_bytes)
            ),
        ),
        (
            "  on disk",
            format!("{} for each copy", format_bytes(catalog.metadata_bytes)),
        ),
        ("  copies", copies_text(catalog)),
    ]);
    for note in &catalog.notes {
        text.push_str(&format!("  note: {note}\n"));
    }
    text.push('\n');
    text.push_str(&devices_text(&pool.devices));
    for warning in &pool.warnings {
        text.push_str(&format!("\nwarning: {warning}"));
    }
    text
}

fn copies_text(catalog: &CatalogInfo) -> String {
    let mut parts: Vec<String> = catalog
        .copies
        .iter()
        .map(|copy| match &copy.why {
            None => format!("good on device {}", copy.device),
            Some(why) => format!("device {}: {why}", copy.device),
        })
        .collect();
    if catalog.repaired_blocks > 0 {
        parts.push(format!("{} blocks repaired", catalog.repaired_blocks));
    }
    parts.join("; ")
}

pub(crate) fn device(context: &Context, command: DeviceCommand) -> Outcome {
    match command {
        DeviceCommand::List => {
            let devices: Vec<DeviceInfo> = context.client.get("/v1/devices")?;
            context
                .output
                .show(&devices, |devices| devices_text(devices))
        }
        DeviceCommand::Show { index } => {
            let shown: DeviceDetails = context.client.get(&format!("/v1/devices/{index}"))?;
            context.output.show(&shown, device_text)
        }
        DeviceCommand::Add {
            spec,
            force,
            create,
            size,
        } => {
            if force {
                context.confirm(&format!("Use {spec}, and lose any data on it?"))?;
            }
            let stated = [spec];
            let body = DeviceAdd {
                spec: absolute(&stated, capacity(size))?.remove(0),
                force,
                create,
                size_bytes: capacity(size),
            };
            let added: DeviceInfo = context.client.post("/v1/devices", &body)?;
            context.output.show(&added, |added| {
                let mut text = format!(
                    "device {} added: {} with room for {}",
                    added.index,
                    added.spec,
                    format_bytes(added.data_bytes)
                );
                for note in &added.notes {
                    text.push_str(&format!("\nwarning: {note}"));
                }
                text.push_str(&rounded(&stated, size));
                text
            })
        }
    }
}

fn state(device: &DeviceInfo) -> String {
    match &device.why {
        Some(why) => format!("{}: {why}", word(&device.state)),
        None => word(&device.state),
    }
}

fn errors_text(device: &DeviceInfo) -> String {
    let errors = &device.errors;
    let counts = format!(
        "{} reads, {} writes, {} flushes failed",
        errors.reads, errors.writes, errors.flushes
    );
    match (&errors.last, errors.last_offset_bytes) {
        (Some(last), Some(at)) => format!("{counts}, the last at byte {at}: {last}"),
        _ => "none".to_owned(),
    }
}

fn device_text(shown: &DeviceDetails) -> String {
    let device = &shown.device;
    let own = [
        ("device", device.index.to_string()),
        ("spec", device.spec.clone()),
        ("uuid", device.uuid.clone()),
        ("state", state(device)),
        ("kind", device.kind.clone()),
        ("capacity", format_bytes(device.capacity_bytes)),
        ("for data", format_bytes(device.data_bytes)),
        ("  used", format_bytes(device.used_bytes)),
        ("  free", format_bytes(device.free_bytes)),
        ("  quarantined", format_bytes(device.quarantined_bytes)),
        ("block size", device.block_bytes.to_string()),
        ("punches", yes_no(device.can_punch)),
        ("errors", errors_text(device)),
        ("volumes", shown.volumes.join(", ")),
    ];
    let mut drive = device.drive.as_ref().map_or_else(Vec::new, drive::pairs);
    if let Some(note) = &device.drive_note {
        drive.push(("drive's health", note.clone()));
    }
    pairs(own.into_iter().chain(drive))
}

fn devices_text(devices: &[DeviceInfo]) -> String {
    let mut text = table(
        [
            ">INDEX",
            "DEVICE",
            "KIND",
            ">FOR DATA",
            ">USED",
            ">FREE",
            ">BLOCK",
            "PUNCH",
            ">ERRORS",
            "STATE",
        ],
        devices.iter().map(|device| {
            [
                device.index.to_string(),
                device.spec.clone(),
                device.kind.clone(),
                format_bytes(device.data_bytes),
                format_bytes(device.used_bytes),
                format_bytes(device.free_bytes),
                device.block_bytes.to_string(),
                yes_no(device.can_punch),
                (device.errors.reads + device.errors.writes + device.errors.flushes).to_string(),
                state(device),
            ]
        }),
    );
    text.push_str(&drive::table(devices));
    text
}
