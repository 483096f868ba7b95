//! `forebay port`.

use forebay_control::model::{Port, PortUpdate};

use crate::cli::PortCommand;
use crate::context::Context;
use crate::failure::Outcome;
use crate::output::table;
use crate::word::word;

pub(crate) fn port(context: &Context, command: &PortCommand) -> Outcome {
    let ports: Vec<Port> = match command {
        PortCommand::List => context.client.get("/v1/ports")?,
        PortCommand::Set {
            address,
            ana,
            let_hosts_wait,
        } => {
            if *let_hosts_wait {
                context.confirm(&format!(
                    "Let hosts wait until {address} is accessible again?"
                ))?;
            }
            let body = PortUpdate {
                ana: (*ana).into(),
                let_hosts_wait: *let_hosts_wait,
            };
            // Only brackets need escaping in an address.
            let path = address.to_string().replace('[', "%5B").replace(']', "%5D");
            let port: Port = context.client.patch(&format!("/v1/ports/{path}"), &body)?;
            return context
                .output
                .show(&port, |port| text(std::slice::from_ref(port)));
        }
    };
    context.output.show(&ports, |ports| text(ports))
}

fn text(ports: &[Port]) -> String {
    table(
        ["ADDRESS", ">ID", "STATE", ">CHANGES"],
        ports.iter().map(|port| {
            [
                port.address.clone(),
                port.id.to_string(),
                word(&port.ana),
                port.changes.to_string(),
            ]
        }),
    )
}
