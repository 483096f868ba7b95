//! A Linux host uses two nodes with default names and equal tenants and volumes, by
//! `nvme connect-all` and by the NQN in `export show --json`.

use std::time::Duration;

use anyhow::{Result, ensure};
use forebay_tests::daemon::DaemonOptions;
use forebay_tests::guest::{self, Guest, GuestOptions, HOST_ADDRESS};

const MINUTE: Duration = Duration::from_secs(60);

#[test]
#[ignore = "boots a Linux guest: cargo xtask test guest"]
fn nqn_is_unique_to_a_node() -> Result<()> {
    let options = DaemonOptions {
        is_nameless: true,
        ..DaemonOptions::default()
    };
    let nodes = [
        guest::serve_disk(&options, "1G", "64M")?,
        guest::serve_disk(&options, "1G", "64M")?,
    ];
    let mut nqns = Vec::new();
    for node in &nodes {
        let shown = node.cli(&["export", "show", "t/disk"])?;
        nqns.push(shown["nqn"].as_str().unwrap_or_default().to_owned());
    }
    ensure!(nqns[0] != nqns[1], "{nqns:?}");

    let guest = Guest::boot(&GuestOptions::default())?;
    guest.check("modprobe nvme-tcp", MINUTE)?;
    let [first, second] = nodes.each_ref().map(|node| node.ports()[0]);
    guest.check(
        &format!("nvme connect-all -t tcp -a {HOST_ADDRESS} -s {first}"),
        MINUTE,
    )?;
    guest.check(
        &format!(
            "nvme connect -t tcp -a {HOST_ADDRESS} -s {second} -n {}",
            nqns[1]
        ),
        MINUTE,
    )?;
    let count = "for try in $(seq 300); do [ $(ls -d /sys/block/nvme*n1 | wc -l) = 2 ] && exit 0; sleep 0.1; done; exit 1";
    guest.check(count, MINUTE)?;
    let log = guest.check("dmesg", MINUTE)?;
    ensure!(!log.contains("IDs don't match"), "{log}");
    // They are different disks.
    let each = "for disk in /dev/nvme*n1; do echo $disk | dd of=$disk bs=4k count=1 conv=sync oflag=direct 2>&1; done;
        for disk in /dev/nvme*n1; do [ $(dd if=$disk bs=4k count=1 iflag=direct | head -c 12) = $disk ] || exit 1; done";
    guest.check(each, MINUTE)?;
    guest.check("nvme disconnect-all", MINUTE)?;
    guest.power_off()
}
