//! `forebay pool` and `forebay device`.

use forebay_control::api::model::{DeviceInfo, Done, PoolCreate, PoolInfo, PoolOpen};
use forebay_device::size::format_bytes;
use forebay_device::spec::DeviceSpec;

use super::Context;
use crate::cli::{DeviceCommand, PoolCommand, PoolCreateArgs};
use crate::failure::{Failure, Outcome, While};
use crate::output::{pairs, table, yes_no};

pub(crate) fn pool(context: &Context, command: PoolCommand) -> Outcome {
    let info: PoolInfo = match command {
        PoolCommand::Create(args) => create(context, args)?,
        PoolCommand::Open { devices } => {
            let body = PoolOpen {
                devices: absolute(&devices)?,
            };
            context.client.post("/v1/pool/open", &body)?
        }
        PoolCommand::Show => context.client.get("/v1/pool")?,
        PoolCommand::Destroy { force } => {
            let query = if force { "?force=true" } else { "" };
            let done: Done = context.client.delete(&format!("/v1/pool{query}"))?;
            return context.output.done(&done);
        }
    };
    context.output.show(&info, pool_text)
}

/// Device specifications with absolute paths: the daemon runs elsewhere.
fn absolute(specs: &[String]) -> Outcome<Vec<String>> {
    let here = std::env::current_dir().while_doing("find the current directory")?;
    specs
        .iter()
        .map(|text| match DeviceSpec::parse_in(&here, text) {
            Ok(spec) => Ok(spec.to_string()),
            Err(error) => Err(Failure::new(error.to_string())
                .hint("a device is file:/path, /path, ram:/path?size=1G or null:/path?size=64G")),
        })
        .collect()
}

fn create(context: &Context, args: PoolCreateArgs) -> Outcome<PoolInfo> {
    let body = PoolCreate {
        name: args.name,
        devices: absolute(&args.devices)?,
        force: args.force,
        extent_bytes: args.extent_size,
        size_bytes: args.size,
    };
    Ok(context.client.post("/v1/pool", &body)?)
}

fn pool_text(pool: &PoolInfo) -> String {
    let used = pool.capacity_bytes.saturating_sub(pool.clean_bytes);
    let percent = used as f64 * 100.0 / pool.capacity_bytes.max(1) as f64;
    let mut text = pairs([
        ("name", pool.name.clone()),
        ("uuid", pool.uuid.clone()),
        ("state", crate::command::status::word(&pool.state)),
        ("capacity", format_bytes(pool.capacity_bytes)),
        ("used", format!("{} ({percent:.1} %)", format_bytes(used))),
        ("  owned", format_bytes(pool.owned_bytes)),
        ("  reserved", format_bytes(pool.reserved_bytes)),
        ("  dirty", format_bytes(pool.dirty_bytes)),
        ("  quarantined", format_bytes(pool.quarantined_bytes)),
        ("provisioned", format_bytes(pool.provisioned_bytes)),
        ("extent size", format_bytes(pool.extent_bytes)),
        ("tenants", pool.tenants.to_string()),
        ("volumes", pool.volumes.to_string()),
    ]);
    text.push('\n');
    text.push_str(&devices_text(&pool.devices));
    text
}

pub(crate) fn device(context: &Context, command: &DeviceCommand) -> Outcome {
    match command {
        DeviceCommand::List => {
            let devices: Vec<DeviceInfo> = context.client.get("/v1/devices")?;
            context
                .output
                .show(&devices, |devices| devices_text(devices))
        }
    }
}

fn devices_text(devices: &[DeviceInfo]) -> String {
    table(
        [
            ">INDEX",
            "DEVICE",
            "KIND",
            ">CAPACITY",
            ">BLOCK",
            "PUNCH",
            "STATE",
        ],
        devices.iter().map(|device| {
            [
                device.index.to_string(),
                device.spec.clone(),
                device.kind.clone(),
                format_bytes(device.capacity_bytes),
                device.block_bytes.to_string(),
                yes_no(device.can_punch),
                device.state.clone(),
            ]
        }),
    )
}
