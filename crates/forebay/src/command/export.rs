//! `forebay export`.

use forebay_control::api::model::{Done, Export, ExportCreate, ExportUpdate};

use super::{Context, segment};
use crate::cli::{ExportCommand, VolumeName};
use crate::failure::{Failure, Outcome};
use crate::output::{pairs, table};

pub(crate) fn export(context: &Context, command: ExportCommand) -> Outcome {
    let client = &context.client;
    match command {
        ExportCommand::Create {
            volume,
            hosts,
            any_host,
        } => {
            if hosts.is_empty() && !any_host {
                return Err(Failure::new("nobody could connect to this export").hint(
                    "name the hosts with --host NQN (on Linux: cat /etc/nvme/hostnqn), or let \
                     everybody in with --any-host",
                ));
            }
            let body = ExportCreate {
                tenant: volume.tenant,
                volume: volume.volume,
                hosts,
                any_host,
            };
            let made: Export = client.post("/v1/exports", &body)?;
            context.output.show(&made, show)
        }
        ExportCommand::List => {
            let exports: Vec<Export> = client.get("/v1/exports")?;
            context.output.show(&exports, |exports| list(exports))
        }
        ExportCommand::Show { volume } => {
            let export: Export = client.get(&path(&volume))?;
            context.output.show(&export, show)
        }
        ExportCommand::Set(args) => {
            let body = ExportUpdate {
                add_hosts: args.add_hosts,
                remove_hosts: args.remove_hosts,
                any_host: match (args.any_host, args.listed_hosts) {
                    (true, _) => Some(true),
                    (_, true) => Some(false),
                    _ => None,
                },
            };
            let export: Export = client.patch(&path(&args.volume), &body)?;
            context.output.show(&export, show)
        }
        ExportCommand::Resume { volume } => {
            let export: Export = client.post(&format!("{}/resume", path(&volume)), &())?;
            context.output.show(&export, show)
        }
        ExportCommand::Delete { volume } => {
            let done: Done = client.delete(&path(&volume))?;
            context.output.done(&done)
        }
    }
}

/// The route of an export.
pub(crate) fn path(volume: &VolumeName) -> String {
    format!(
        "/v1/exports/{}/{}",
        segment(&volume.tenant),
        segment(&volume.volume)
    )
}

fn list(exports: &[Export]) -> String {
    table(
        ["EXPORT", "NQN", "HOSTS", ">CONNECTED", "STATE"],
        exports.iter().map(|export| {
            [
                format!("{}/{}", export.tenant, export.volume),
                export.nqn.clone(),
                if export.any_host {
                    "any".to_owned()
                } else {
                    export.hosts.len().to_string()
                },
                export.connected_hosts.len().to_string(),
                match &export.quarantined {
                    None => "served".to_owned(),
                    Some(_) => "quarantined".to_owned(),
                },
            ]
        }),
    )
}

fn show(export: &Export) -> String {
    let hosts = if export.any_host {
        "any".to_owned()
    } else {
        export.hosts.join(", ")
    };
    let mut text = pairs([
        ("export", format!("{}/{}", export.tenant, export.volume)),
        ("nqn", export.nqn.clone()),
        ("hosts", hosts),
        ("connected", export.connected_hosts.join(", ")),
        ("addresses", export.addresses.join(", ")),
    ]);
    if let Some(reason) = &export.quarantined {
        text.push_str(&format!("quarantined: {reason}\n"));
    }
    if let Some(command) = attach_command(export, None) {
        text.push_str("\nTo attach it on a Linux host, as root:\n  ");
        text.push_str(&command);
        text.push('\n');
    }
    text
}

/// The nvme-cli command that attaches an export, if it has an address.
pub(crate) fn attach_command(export: &Export, host_nqn: Option<&str>) -> Option<String> {
    let (address, port) = export.addresses.first()?.rsplit_once(':')?;
    let address = address.trim_start_matches('[').trim_end_matches(']');
    let mut command = format!(
        "nvme connect -t tcp -a {address} -s {port} -n {}",
        export.nqn
    );
    if let Some(host_nqn) = host_nqn {
        command.push_str(&format!(" --hostnqn {host_nqn}"));
    }
    Some(command)
}
