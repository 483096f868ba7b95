//! How fast the network is.
//!
//! Purpose: bytes a second of the links by which hosts come.
//! Design: what the kernel says of physical interfaces that are up. A daemon that listens on this machine alone has no link
//! to be full, and a virtual interface says no speed: both count as endless, which is what is known.
//! Not here: measuring it; that would need a host at its other end.

use std::net::{IpAddr, SocketAddr};
use std::path::Path;

/// Of all that are up, if hosts come from elsewhere than this machine.
pub(super) fn bytes_per_second(listens: &[String]) -> Option<u64> {
    let elsewhere = listens
        .iter()
        .filter_map(|address| address.parse::<SocketAddr>().ok())
        .map(|address| address.ip())
        .any(|ip: IpAddr| !ip.is_loopback());
    elsewhere.then(|| of(Path::new("/sys/class/net"))).flatten()
}

fn of(folder: &Path) -> Option<u64> {
    let interfaces = std::fs::read_dir(folder).ok()?;
    let speeds = interfaces.flatten().filter_map(|interface| {
        let path = interface.path();
        let text = |name: &str| std::fs::read_to_string(path.join(name)).ok();
        if !path.join("device").exists() || text("operstate")?.trim() != "up" {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interfaces_that_are_up_count() {
        let folder = tempfile::tempdir().unwrap();
        for (name, device, state, speed) in [
            ("eth0", true, "up", "25000"),
            ("eth1", true, "down", "25000"),
            ("eth2", true, "up", "-1"),
            ("tun0", false, "up", "10000"),
        ] {
            let path = folder.path().join(name);
            std::fs::create_dir_all(&path).unwrap();
            if device {
                std::fs::create_dir(path.join("device")).unwrap();
            }
            std::fs::write(path.join("operstate"), format!("{state}\n")).unwrap();
            std::fs::write(path.join("speed"), format!("{speed}\n")).unwrap();
        }
        assert_eq!(of(folder.path()), Some(25_000_000_000 / 8));
        assert_eq!(of(Path::new("/nowhere")), None);
        assert_eq!(bytes_per_second(&["127.0.0.1:4420".into()]), None);
    }
}
