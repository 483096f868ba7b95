//! `forebay export`.

use forebay_control::model::events::utc;
use forebay_control::model::{Done, Export, ExportCreate, ExportFrontend, ExportUpdate};

use super::attach::{ANY_ADDRESS, attach_commands};
use super::vm::{attach_text, owner_ids};
use crate::api_paths;
use crate::cli::{ExportCommand, ExportCreateArgs};
use crate::context::Context;
use crate::failure::{Failure, Outcome, While};
use crate::output::{exactly, pairs, table};

pub(crate) fn export(context: &Context, command: ExportCommand) -> Outcome {
    let client = &context.client;
    match command {
        ExportCommand::Create(args) => {
            let made: Export = client.post("/v1/exports", &body(args)?)?;
            context.output.show(&made, show)
        }
        ExportCommand::List => {
            let exports: Vec<Export> = client.get("/v1/exports")?;
            context.output.show(&exports, |exports| list(exports))
        }
        ExportCommand::Show { volume } => {
            let export: Export = client.get(&api_paths::export(&volume))?;
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
                disconnect_hosts: args.disconnect_hosts,
            };
            if args.disconnect_hosts {
                let question = format!("Disconnect hosts that lose access to {}?", args.volume);
                context.confirm(&question)?;
            }
            let export: Export = client.patch(&api_paths::export(&args.volume), &body)?;
            context.output.show(&export, show)
        }
        ExportCommand::Resume { volume } => {
            let export: Export =
                client.post(&format!("{}/resume", api_paths::export(&volume)), &())?;
            context.output.show(&export, show)
        }
        ExportCommand::Delete {
            volume,
            disconnect_hosts,
        } => {
            context.confirm(&match disconnect_hosts {
                true => format!("Delete the export of {volume}, and disconnect its hosts?"),
                false => format!("Delete the export of {volume}?"),
            })?;
            let query = format!("?disconnect_hosts={disconnect_hosts}");
            let done: Done = client.delete(&format!("{}{query}", api_paths::export(&volume)))?;
            context.output.done(&done)
        }
    }
}

fn body(args: ExportCreateArgs) -> Outcome<ExportCreate> {
    let frontend = match (args.nvme_pcie, args.vhost_user) {
        (true, _) => ExportFrontend::NvmePcie,
        (_, true) => ExportFrontend::VhostUser,
        _ => ExportFrontend::NvmeTcp,
    };
    let is_vm = frontend != ExportFrontend::NvmeTcp;
    if !is_vm && (args.vm_socket.is_some() || args.owner.is_some()) {
        return Err(Failure::invalid("only an export to a VM has a socket")
            .hint("add --nvme-pcie or --vhost-user"));
    }
    if !is_vm && args.hosts.is_empty() && !args.any_host {
        return Err(
            Failure::invalid("no host could connect to this export").hint(
                "name the hosts with --host NQN (on Linux: cat /etc/nvme/hostnqn), or allow \
             every host with --any-host; for a VM, use --nvme-pcie or --vhost-user",
            ),
        );
    }
    let socket = match args.vm_socket {
        Some(path) => {
            let path =
                std::path::absolute(&path).while_doing(format!("find {}", path.display()))?;
            let text = path.into_os_string().into_string();
            Some(text.map_err(|_| Failure::invalid("the socket's path is not UTF-8"))?)
        }
        None => None,
    };
    let (socket_user, socket_group) = match &args.owner {
        Some(owner) => owner_ids(owner)?,
        None => (None, None),
    };
    Ok(ExportCreate {
        tenant: args.volume.tenant,
        volume: args.volume.volume,
        hosts: args.hosts,
        any_host: args.any_host,
        frontend,
        mapped_doorbells: args.mapped_doorbells,
        queues: args.queues,
        pinned_memory: args.pinned_memory,
        socket,
        socket_user,
        socket_group,
        shared: args.shared,
    })
}

fn list(exports: &[Export]) -> String {
    table(
        ["EXPORT", "NQN OR SOCKET", "HOSTS", ">CONNECTED", "STATE"],
        exports.iter().map(|export| {
            [
                name(export),
                export.socket.as_ref().unwrap_or(&export.nqn).clone(),
                match export.frontend {
                    ExportFrontend::NvmePcie => "a VM (NVMe)".to_owned(),
                    ExportFrontend::VhostUser => "a VM (virtio)".to_owned(),
                    ExportFrontend::NvmeTcp if export.any_host => "any".to_owned(),
                    ExportFrontend::NvmeTcp => export.hosts.len().to_string(),
                },
                match export.machine {
                    Some(_) => "1".to_owned(),
                    None => export.connected_hosts.len().to_string(),
                },
                match (&export.quarantined, export.internal) {
                    (Some(_), _) => "quarantined".to_owned(),
                    (None, true) => "internal".to_owned(),
                    (None, false) => "served".to_owned(),
                },
            ]
        }),
    )
}

/// Includes the number if the volume may have several exports.
fn name(export: &Export) -> String {
    let Export {
        tenant, volume, id, ..
    } = export;
    match export.shared {
        false => format!("{tenant}/{volume}"),
        true => format!("{tenant}/{volume}@{id}"),
    }
}

fn show_vm(export: &Export) -> String {
    let frontend = match (export.frontend, export.mapped_doorbells) {
        (ExportFrontend::NvmePcie, false) => "NVMe over vfio-user, doorbells trapped".to_owned(),
        (ExportFrontend::NvmePcie, true) => "NVMe over vfio-user, doorbells mapped".to_owned(),
        _ => format!("vhost-user-blk, {} queues", export.queues),
    };
    let connected = export.machine.map_or_else(String::new, |machine| {
        format!(
            "since {}, {} queues, shares {}",
            utc(machine.since_unix_s * 1000),
            machine.queues,
            exactly(machine.memory_bytes)
        )
    });
    let mut text = pairs([
        ("export", name(export)),
        ("frontend", frontend),
        ("socket", export.socket.clone().unwrap_or_default()),
        ("reactor", reactor(export)),
        ("connected", connected),
    ]);
    text.push_str(&state(export));
    text.push_str(&attach_text(export).unwrap_or_default());
    text.push_str(&warnings(export));
    text
}

fn show(export: &Export) -> String {
    if export.frontend != ExportFrontend::NvmeTcp {
        return show_vm(export);
    }
    let hosts = if export.any_host {
        "any".to_owned()
    } else {
        export.hosts.join(", ")
    };
    let mut text = pairs([
        ("export", name(export)),
        ("nqn", export.nqn.clone()),
        ("hosts", hosts),
        ("reactor", reactor(export)),
        ("connected", export.connected_hosts.join(", ")),
        ("addresses", export.addresses.join(", ")),
    ]);
    text.push_str(&state(export));
    if export.internal {
        text.push_str("internal: an image transfer uses this export, and deletes it afterwards\n");
        text.push_str(&warnings(export));
        return text;
    }
    let mut commands = attach_commands(export, None);
    if let Some(all) = commands.pop() {
        text.push_str("\nTo attach it on a Linux host, as root, through each path:\n");
        for command in commands {
            text.push_str(&format!("  {command}\n"));
        }
        text.push_str(&format!(
            "or all volumes that this host may use:\n  {all}\n"
        ));
        if all.contains(ANY_ADDRESS) {
            text.push_str(&format!(
                "replace {ANY_ADDRESS} by an address of this node that the host can reach; the daemon listens on all \
                 of them (`ip address` lists them)\n"
            ));
        }
    }
    text.push_str(&warnings(export));
    text
}

fn reactor(export: &Export) -> String {
    let reactor = export.reactor.map(|reactor| reactor.to_string());
    reactor.unwrap_or_default()
}

fn state(export: &Export) -> String {
    let mut text = String::new();
    if export.read_only {
        text.push_str("read-only: this is a snapshot\n");
    }
    if let Some(reason) = &export.quarantined {
        text.push_str(&format!("quarantined: {reason}\n"));
    }
    text
}

fn warnings(export: &Export) -> String {
    let warnings = export.warnings.iter();
    warnings.map(|text| format!("warning: {text}\n")).collect()
}
