//! The text of `ceph.conf`.

use std::path::Path;

use super::packages::Programs;

/// The first line; only a folder with such a file is ever removed.
pub(super) const HEADER: &str = "# Made by cargo xtask ceph";
/// Ports of one daemon: public, cluster and two for heartbeats.
const PORTS_OF_A_DAEMON: u32 = 4;
const OSD_BYTES: u64 = 8 << 30;
/// The least that an OSD accepts.
const OSD_MEMORY_BYTES: u64 = 896 << 20;

/// What differs between clusters.
#[derive(Debug)]
pub(super) struct Settings<'a> {
    pub(super) folder: &'a Path,
    pub(super) fsid: &'a str,
    pub(super) monitor_port: u16,
    pub(super) osds: u32,
    pub(super) has_cephx: bool,
}

/// The monitor's address in Ceph's form. Only messenger 2 is used.
pub(super) fn monitor_address(port: u16) -> String {
    format!("[v2:127.0.0.1:{port}]")
}

pub(super) fn text(settings: &Settings<'_>, programs: &Programs) -> String {
    let folder = settings.folder.display();
    let fsid = settings.fsid;
    let monitor = monitor_address(settings.monitor_port);
    let authentication = if settings.has_cephx { "cephx" } else { "none" };
    let first_port = u32::from(settings.monitor_port) + 1;
    // Twice as many as they use, as other programs may have some.
    let last_port = first_port + (settings.osds + 1) * PORTS_OF_A_DAEMON * 2;
    let size = settings.osds.min(2);
    let libraries = programs.libraries();
    let libraries = libraries.display();
    // All OSDs are on one host, so placement and reports of failures are by OSD. The manager's
    // modules need 10 s and 260 MB to start, so it has none: their folder is empty.
    format!(
        "{HEADER}
[global]
fsid = {fsid}
mon host = {monitor}
public addr = 127.0.0.1
cluster addr = 127.0.0.1
ms bind msgr1 = false
ms bind port min = {first_port}
ms bind port max = {last_port}
auth cluster required = {authentication}
auth service required = {authentication}
auth client required = {authentication}
auth allow insecure global id reclaim = false
keyring = {folder}/keys/$name.keyring
run dir = {folder}/run
crash dir = {folder}/log
plugin dir = {libraries}/ceph
erasure code dir = {libraries}/ceph/erasure-code
osd class dir = {libraries}/rados-classes
osd pool default size = {size}
osd pool default min size = 1
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
[mon]
mon data = {folder}/mon
log file = {folder}/log/$name.log
admin socket = {folder}/run/$name.asok
mon allow pool size one = true
mon allow pool delete = true
mon warn on pool no redundancy = false
mon data avail warn = 2
mon data avail crit = 1
mon osd min down reporters = 1
mon osd reporter subtree level = osd
mgr initial modules =
paxos propose interval = 0.05
[mgr]
mgr data = {folder}/mgr
log file = {folder}/log/$name.log
admin socket = {folder}/run/$name.asok
mgr module path = {folder}/modules
[osd]
osd data = {folder}/osd.$id
log file = {folder}/log/$name.log
admin socket = {folder}/run/$name.asok
osd memory target = {OSD_MEMORY_BYTES}
bluestore block size = {OSD_BYTES}
bluestore fsck on mount = false
"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_differs_is_different() {
        let programs = Programs::in_folder("/cache/ceph".into());
        let mut settings = Settings {
            folder: Path::new("/tmp/c"),
            fsid: "f5",
            monitor_port: 11_000,
            osds: 1,
            has_cephx: false,
        };
        let one = text(&settings, &programs);
        for line in [
            "fsid = f5",
            "mon host = [v2:127.0.0.1:11000]",
            "ms bind port min = 11001",
            "ms bind port max = 11017",
            "auth client required = none",
            "keyring = /tmp/c/keys/$name.keyring",
            "osd class dir = /cache/ceph/usr/lib/x86_64-linux-gnu/rados-classes",
            "osd pool default size = 1",
        ] {
            assert!(one.lines().any(|other| other == line), "{line}\n{one}");
        }
        assert!(one.starts_with(HEADER));
        (settings.osds, settings.has_cephx) = (3, true);
        let three = text(&settings, &programs);
        let changed: Vec<&str> = three
            .lines()
            .filter(|line| !one.lines().any(|other| other == *line))
            .collect();
        assert_eq!(
            changed,
            [
                "ms bind port max = 11033",
                "auth cluster required = cephx",
                "auth service required = cephx",
                "auth client required = cephx",
                "osd pool default size = 2",
            ]
        );
    }
}
