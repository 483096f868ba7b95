//! The bandwidth of the links by which hosts connect.
//!
//! It is the kernel's speed of physical interfaces that are up. With particular listen addresses,
//! only their interfaces count, or those below (VLAN, bridge). A bond reports its usable speed.
//! Local listeners and virtual interfaces count as unlimited.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::path::Path;

use rustix::io::Result;
use rustix::net::netdevice::index_to_name;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, send, socket_with,
};

const MOST_DEEP: u32 = 8;

/// `None`: hosts connect only locally, or it is unknown.
pub(super) fn bytes_per_second(listens: &[String]) -> Option<u64> {
    let folder = Path::new("/sys/class/net");
    let addresses = listens.iter().filter_map(|address| address.parse().ok());
    let addresses: BTreeSet<IpAddr> = addresses.map(|of: SocketAddr| of.ip()).collect();
    if addresses.iter().any(IpAddr::is_unspecified) {
        return of(folder, &all(folder));
    }
    let elsewhere = addresses.into_iter().filter(|ip| !ip.is_loopback());
    let names = carriers(&elsewhere.collect()).unwrap_or_default();
    let interfaces = names.iter().flat_map(|name| below(folder, name, MOST_DEEP));
    of(folder, &interfaces.collect())
}

fn names(folder: &Path) -> impl Iterator<Item = String> + use<> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().into_string().ok())
}

fn is_physical(folder: &Path, name: &str) -> bool {
    folder.join(name).join("device").exists()
}

fn all(folder: &Path) -> BTreeSet<String> {
    names(folder)
        .filter(|name| is_physical(folder, name))
        .collect()
}

/// The physical interfaces or bonds below an interface.
fn below(folder: &Path, name: &str, deep: u32) -> BTreeSet<String> {
    if is_physical(folder, name) || folder.join(name).join("bonding").exists() {
        return BTreeSet::from([name.to_owned()]);
    }
    let lower =
        names(&folder.join(name)).filter_map(|of| Some(of.strip_prefix("lower_")?.to_owned()));
    let lower = lower.filter(|_| deep > 0);
    lower
        .flat_map(|name| below(folder, &name, deep - 1))
        .collect()
}

/// The total of those that are up and report it.
fn of(folder: &Path, interfaces: &BTreeSet<String>) -> Option<u64> {
    let speeds = interfaces.iter().filter_map(|interface| {
        let path = folder.join(interface);
        let text = |name: &str| std::fs::read_to_string(path.join(name)).ok();
        if text("operstate")?.trim() != "up" {
            return None;
        }
        let megabits: i64 = text("speed")?.trim().parse().ok()?;
        u64::try_from(megabits)
            .ok()
            .filter(|megabits| *megabits > 0)
    });
    let sum: u64 = speeds.fold(0, u64::saturating_add);
    (sum > 0).then(|| sum.saturating_mul(1_000_000 / 8))
}

/// Names of the interfaces with one of these addresses (rtnetlink(7)).
fn carriers(addresses: &BTreeSet<IpAddr>) -> Result<BTreeSet<String>> {
    const REQUEST_AND_DUMP: u16 = 0x301;
    const GET_ADDRESSES: u16 = 22;
    let mut names = BTreeSet::new();
    if addresses.is_empty() {
        return Ok(names);
    }
    let (kind, flags) = (SocketType::RAW, SocketFlags::CLOEXEC);
    // Protocol 0 is NETLINK_ROUTE.
    let socket = socket_with(AddressFamily::NETLINK, kind, flags, None)?;
    let mut ask = [0; 24];
    ask[..4].copy_from_slice(&24u32.to_ne_bytes());
    ask[4..6].copy_from_slice(&GET_ADDRESSES.to_ne_bytes());
    ask[6..8].copy_from_slice(&REQUEST_AND_DUMP.to_ne_bytes());
    send(&socket, &ask, SendFlags::empty())?;
    let mut answer = vec![0; 64 << 10];
    let mut is_whole = false;
    while !is_whole {
        let (_, bytes) = recv(&socket, &mut answer[..], RecvFlags::empty())?;
        let mut found = Vec::new();
        is_whole = bytes == 0 || read_answer(&answer[..bytes.min(answer.len())], &mut found);
        for (index, address) in found {
            if addresses.contains(&address) {
                names.extend(index_to_name(&socket, index));
            }
        }
    }
    Ok(names)
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    let bytes = bytes.get(at..at + 2)?;
    bytes.try_into().ok().map(u16::from_ne_bytes)
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    let bytes = bytes.get(at..at + 4)?;
    bytes.try_into().ok().map(u32::from_ne_bytes)
}

/// Adds interface indexes and addresses; true at the dump's end.
fn read_answer(mut messages: &[u8], found: &mut Vec<(u32, IpAddr)>) -> bool {
    const HEADER: usize = 16;
    const ERROR: u16 = 2;
    const DONE: u16 = 3;
    const ADDRESS: u16 = 20;
    while let (Some(bytes), Some(kind)) = (u32_at(messages, 0), u16_at(messages, 4)) {
        let bytes = bytes as usize;
        if bytes < HEADER || bytes > messages.len() || kind == ERROR || kind == DONE {
            return true;
        }
        if kind == ADDRESS {
            found.extend(read_address(&messages[HEADER..bytes]));
        }
        messages = messages.get(bytes.next_multiple_of(4)..).unwrap_or(&[]);
    }
    false
}

fn read_address(message: &[u8]) -> Option<(u32, IpAddr)> {
    /// On a point-to-point link, the peer's address.
    const ADDRESS: u16 = 1;
    const OWN: u16 = 2;
    let index = u32_at(message, 4)?;
    let (mut address, mut own) = (None, None);
    let mut rest = message.get(8..)?;
    while let (Some(bytes), Some(kind)) = (u16_at(rest, 0), u16_at(rest, 2)) {
        let bytes = usize::from(bytes);
        let value = rest.get(4..bytes)?;
        let read = || match value.len() {
            4 => <[u8; 4]>::try_from(value).ok().map(IpAddr::from),
            16 => <[u8; 16]>::try_from(value).ok().map(IpAddr::from),
            _ => None,
        };
        match kind {
            ADDRESS => address = read(),
            OWN => own = read(),
            _ => {}
        }
        rest = rest.get(bytes.next_multiple_of(4)..).unwrap_or(&[]);
    }
    Some((index, own.or(address)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interfaces_that_are_up_count() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        for (name, kind, state, speed) in [
            ("eth0", "device", "up", "25000"),
            ("eth1", "device", "down", "25000"),
            ("eth2", "device", "up", "-1"),
            ("eth3", "device", "up", "1000"),
            ("tun0", "queues", "up", "10000"),
            ("bond0", "bonding", "up", "1000"),
            ("vlan5", "lower_eth0", "up", "25000"),
            ("br0", "lower_vlan5", "up", "100"),
        ] {
            std::fs::create_dir_all(at(name).join(kind)).unwrap();
            std::fs::write(at(name).join("operstate"), format!("{state}\n")).unwrap();
            std::fs::write(at(name).join("speed"), format!("{speed}\n")).unwrap();
        }
        std::fs::create_dir(at("br0").join("lower_bond0")).unwrap();
        std::fs::create_dir(at("bond0").join("lower_eth3")).unwrap();
        let folder = folder.path();
        assert_eq!(of(folder, &all(folder)), Some(26_000_000_000 / 8));
        let of_one = |name: &str| of(folder, &below(folder, name, MOST_DEEP));
        assert_eq!(of_one("eth3"), Some(125_000_000));
        assert_eq!(of_one("vlan5"), Some(25_000_000_000 / 8));
        assert_eq!(of_one("br0"), Some(26_000_000_000 / 8));
        assert_eq!(of_one("tun0"), None, "unknown");
        assert_eq!(of_one("none"), None);
        // A cycle.
        std::fs::create_dir_all(folder.join("loop0/lower_loop0")).unwrap();
        assert_eq!(of_one("loop0"), None);
        assert_eq!(bytes_per_second(&["127.0.0.1:4420".into()]), None);
    }

    #[test]
    fn the_kernel_says_who_carries_an_address() {
        let local = BTreeSet::from([IpAddr::from([127, 0, 0, 1])]);
        let names = carriers(&local).unwrap();
        assert_eq!(names, BTreeSet::from(["lo".to_owned()]));
        let nobodys = BTreeSet::from([IpAddr::from([203, 0, 113, 77])]);
        assert_eq!(carriers(&nobodys).unwrap(), BTreeSet::new());
        // Truncated messages end the dump.
        assert!(read_answer(&[255; 16], &mut Vec::new()));
        assert!(!read_answer(&[0; 3], &mut Vec::new()));
        assert_eq!(read_address(&[0; 5]), None);
        assert_eq!(read_address(&[0; 16]), None);
    }
}
