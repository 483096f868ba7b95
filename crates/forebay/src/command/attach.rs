//! The nvme-cli commands to attach an export.

use std::net::IpAddr;

use forebay_control::model::Export;

pub(crate) const ANY_ADDRESS: &str = "ADDRESS";

pub(crate) fn attach_command(export: &Export, host_nqn: Option<&str>) -> Option<String> {
    attach_commands(export, host_nqn).into_iter().next()
}

/// One per path, then one that finds all paths. A host waits for a lost controller for ever, as for
/// a disk.
pub(crate) fn attach_commands(export: &Export, host_nqn: Option<&str>) -> Vec<String> {
    let host = host_nqn.map_or_else(String::new, |nqn| format!(" --hostnqn {nqn}"));
    let places = places(&export.addresses);
    let one = |place: &String| {
        format!(
            "nvme connect {place} -n {} --ctrl-loss-tmo=-1{host}",
            export.nqn
        )
    };
    let mut commands: Vec<String> = places.iter().map(one).collect();
    if let Some(place) = places.first() {
        commands.push(format!("nvme connect-all {place} --ctrl-loss-tmo=-1{host}"));
    }
    commands
}

fn places(listeners: &[String]) -> Vec<String> {
    let places = listeners.iter().filter_map(|address| {
        let (address, port) = address.rsplit_once(':')?;
        let address = address.trim_start_matches('[').trim_end_matches(']');
        // A host cannot connect to the unspecified address.
        let is_any = (address.parse()).is_ok_and(|ip: IpAddr| ip.is_unspecified());
        let address = if is_any { ANY_ADDRESS } else { address };
        Some(format!("-t tcp -a {address} -s {port}"))
    });
    // Listeners on all IPv4 and all IPv6 addresses look equal.
    let mut places: Vec<String> = places.collect();
    places.dedup();
    places
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_listener_on_all_addresses_is_no_address_of_a_host() {
        let listeners = ["0.0.0.0:4420", "[::]:4420", "[::1]:4421", "10.0.0.7:4420"];
        let places = places(&listeners.map(str::to_owned));
        let expected = [
            "-t tcp -a ADDRESS -s 4420",
            "-t tcp -a ::1 -s 4421",
            "-t tcp -a 10.0.0.7 -s 4420",
        ];
        assert_eq!(places, expected);
    }
}
