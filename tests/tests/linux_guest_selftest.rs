//! Tests the guest harness and its programs without Forebay, with the guest's own NVMe/TCP target.

use std::time::Duration;

use forebay_tests::guest::{Guest, GuestOptions};

const MINUTE: Duration = Duration::from_secs(60);

/// The kernel's NVMe/TCP target, with a disk in memory.
const TARGET: &str = "set -e
modprobe null_blk nr_devices=1 memory_backed=1 discard=1 gb=1 bs=4096
modprobe nvmet-tcp
mkdir -p /config
mount -t configfs config /config
cd /config/nvmet
mkdir subsystems/nqn.2026-01.test:disk
echo 1 >subsystems/nqn.2026-01.test:disk/attr_allow_any_host
mkdir subsystems/nqn.2026-01.test:disk/namespaces/1
echo -n /dev/nullb0 >subsystems/nqn.2026-01.test:disk/namespaces/1/device_path
echo 1 >subsystems/nqn.2026-01.test:disk/namespaces/1/enable
mkdir ports/1
echo tcp >ports/1/addr_trtype
echo ipv4 >ports/1/addr_adrfam
echo 127.0.0.1 >ports/1/addr_traddr
echo 4420 >ports/1/addr_trsvcid
ln -s /config/nvmet/subsystems/nqn.2026-01.test:disk ports/1/subsystems/";

const DISK: &str = "set -e
modprobe nvme-tcp
nvme discover -t tcp -a 127.0.0.1 -s 4420 | grep nqn.2026-01.test:disk
nvme connect -t tcp -a 127.0.0.1 -s 4420 -n nqn.2026-01.test:disk
for try in $(seq 100); do
    [ -b /dev/nvme0n1 ] && break
    sleep 0.1
done
lsblk /dev/nvme0n1
blkdiscard -f /dev/nvme0n1
mkfs.ext4 -q /dev/nvme0n1 65536
mount -t ext4 /dev/nvme0n1 /mnt
fio --name=verify --directory=/mnt --size=8m --bs=4k --rw=randwrite --ioengine=libaio --direct=1 \\
    --iodepth=8 --verify=crc32c --do_verify=1 --verify_fatal=1
rm /mnt/verify*
fstrim -v /mnt
resize2fs /dev/nvme0n1
umount /mnt
e2fsck -fn /dev/nvme0n1
nvme disconnect -n nqn.2026-01.test:disk";

#[test]
#[ignore = "boots a Linux guest: cargo xtask test guest"]
fn linux_guest_selftest() {
    let guest = Guest::boot(&GuestOptions::default()).unwrap();
    let release = guest.check("uname -r", MINUTE).unwrap();
    assert_eq!(release.trim(), guest.kernel_release());
    guest
        .check("nvme --version && fio --version", MINUTE)
        .unwrap();

    // Exit codes and output of any length and content arrive unchanged.
    let output = guest
        .run("echo to standard error >&2; exit 7", MINUTE)
        .unwrap();
    assert_eq!(
        (output.code, output.text.as_str()),
        (7, "to standard error\n")
    );
    let numbers = guest
        .check("seq 50000; echo \"a  'b' \\\"c\\\" $((1 + 1))\"", MINUTE)
        .unwrap();
    assert_eq!(numbers.lines().count(), 50001);
    assert_eq!(numbers.lines().last(), Some("a  'b' \"c\" 2"));

    // Commands run concurrently: this one ends only through the next.
    let waiting = guest
        .spawn("until [ -e /tmp/go ]; do sleep 0.1; done; echo went")
        .unwrap();
    guest.check("true", MINUTE).unwrap();
    assert!(!waiting.has_ended());
    guest.check("touch /tmp/go", MINUTE).unwrap();
    assert_eq!(waiting.wait(MINUTE).unwrap().text, "went\n");

    // A wait beyond its limit fails, and the guest still works.
    let error = guest.run("sleep 1000", Duration::from_secs(1)).unwrap_err();
    assert!(format!("{error:#}").contains("no answer"), "{error:#}");

    guest.check(TARGET, MINUTE).unwrap();
    guest.check(DISK, 4 * MINUTE).unwrap();
    guest.power_off().unwrap();
}
