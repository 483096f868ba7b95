//! Marks of other software on a device, so that `pool create` doesn't overwrite a file system
//! because of a typing error. The middle of the device isn't read.

pub(crate) const SCAN_BYTES: u64 = 1 << 20;

struct Mark {
    name: &'static str,
    /// Offset from the start; negative: from the end.
    at: i64,
    bytes: &'static [u8],
}

const fn mark(name: &'static str, at: i64, bytes: &'static [u8]) -> Mark {
    Mark { name, at, bytes }
}

/// More specific marks first: an MBR also protects a GPT, and FAT and NTFS also begin with a boot
/// sector.
const MARKS: &[Mark] = &[
    mark("a LUKS encrypted volume", 0, b"LUKS\xba\xbe"),
    mark("an XFS file system", 0, b"XFSB"),
    mark("a btrfs file system", 0x1_0040, b"_BHRfS_M"),
    mark("an ext2, ext3 or ext4 file system", 0x438, b"\x53\xef"),
    mark("an LVM physical volume", 0x218, b"LVM2 001"),
    mark("an LVM physical volume", 0x018, b"LVM2 001"),
    mark("an LVM physical volume", 0x418, b"LVM2 001"),
    mark("an LVM physical volume", 0x618, b"LVM2 001"),
    mark("swap space", 4086, b"SWAPSPACE2"),
    mark("swap space", 4086, b"SWAP-SPACE"),
    mark("swap space", 65526, b"SWAPSPACE2"),
    mark(
        "a bcache device",
        0x1018,
        b"\xc6\x85\x73\xf6\x4e\x1a\x45\xca",
    ),
    mark(
        "a bcachefs file system",
        0x1018,
        b"\xc6\x85\x73\xf6\x66\xce\x90\xa9",
    ),
    mark("a Ceph BlueStore", 0, b"bluestore block device"),
    mark("a VDO volume", 0, b"dmvdo001"),
    mark("a Linux RAID member", 0x1000, b"\xfc\x4e\x2b\xa9"),
    mark("a Linux RAID member", 0, b"\xfc\x4e\x2b\xa9"),
    mark("a squashfs image", 0, b"hsqs"),
    mark("an F2FS file system", 0x400, b"\x10\x20\xf5\xf2"),
    mark("an ISO 9660 image", 0x8001, b"CD001"),
    mark("a QCOW image", 0, b"QFI\xfb"),
    mark("a VMDK image", 0, b"KDMV"),
    mark("a partition table (GPT)", 512, b"EFI PART"),
    mark("a partition table (GPT)", 4096, b"EFI PART"),
    mark("a partition table (GPT, its backup)", -512, b"EFI PART"),
    mark("a partition table (GPT, its backup)", -4096, b"EFI PART"),
    mark("an NTFS file system", 3, b"NTFS    "),
    mark("an exFAT file system", 3, b"EXFAT   "),
    mark("a FAT file system", 82, b"FAT32   "),
    mark("a FAT file system", 54, b"FAT1"),
    mark("a partition table or boot sector (MBR)", 510, b"\x55\xaa"),
];

/// ZFS writes its labels in both byte orders, at many places of a ring of uberblocks.
const ZFS_RING: std::ops::Range<usize> = 128 << 10..256 << 10;
const ZFS_MAGIC: u64 = 0x00ba_b10c;

/// Linux RAID 0.90 and 1.0 keep their superblock in the last 128 KiB, at multiples of 4 KiB.
const RAID_TAIL_BYTES: usize = 128 << 10;
const RAID_MAGIC: [u8; 4] = [0xfc, 0x4e, 0x2b, 0xa9];

/// Names the content of a device's start and end (which may overlap). `None` if both are all zeros.
pub(crate) fn describe(head: &[u8], tail: &[u8]) -> Option<String> {
    for mark in MARKS {
        let (piece, at) = match usize::try_from(mark.at) {
            Ok(at) => (head, Some(at)),
            Err(_) => (
                tail,
                tail.len()
                    .checked_sub(usize::try_from(mark.at.unsigned_abs()).unwrap_or(usize::MAX)),
            ),
        };
        let found = at
            .and_then(|at| piece.get(at..at.checked_add(mark.bytes.len())?))
            .is_some_and(|bytes| bytes == mark.bytes);
        if found {
            return Some(mark.name.to_owned());
        }
    }
    let zfs = head.get(ZFS_RING).is_some_and(|ring| {
        ring.chunks_exact(1024).any(|block| {
            block.first_chunk::<8>().is_some_and(|bytes| {
                u64::from_le_bytes(*bytes) == ZFS_MAGIC || u64::from_be_bytes(*bytes) == ZFS_MAGIC
            })
        })
    });
    if zfs {
        return Some("a ZFS pool member".to_owned());
    }
    let raid_tail = &tail[tail.len().saturating_sub(RAID_TAIL_BYTES)..];
    if raid_tail
        .chunks(4096)
        .any(|block| block.starts_with(&RAID_MAGIC))
    {
        return Some("a Linux RAID member".to_owned());
    }
    for (piece, name) in [(head, "first"), (tail, "last")] {
        if let Some(at) = piece.iter().position(|byte| *byte != 0) {
            return Some(format!(
                "unknown data (the first nonzero byte is byte {at} of its {name} MiB)"
            ));
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const LEN: usize = SCAN_BYTES as usize;

    #[test]
    fn every_mark_is_found() {
        for mark in MARKS {
            let (mut head, mut tail) = (vec![0; LEN], vec![0; LEN]);
            let (piece, at) = match usize::try_from(mark.at) {
                Ok(at) => (&mut head, at),
                Err(_) => (&mut tail, LEN - mark.at.unsigned_abs() as usize),
            };
            piece[at..at + mark.bytes.len()].copy_from_slice(mark.bytes);
            assert_eq!(describe(&head, &tail).as_deref(), Some(mark.name));
        }
    }

    #[test]
    fn rings_and_tails() {
        let (mut head, mut tail) = (vec![0; LEN], vec![0; LEN]);
        assert_eq!(describe(&head, &tail), None);
        tail[LEN - 65536..LEN - 65532].copy_from_slice(&RAID_MAGIC);
        assert!(describe(&head, &tail).is_some_and(|text| text.contains("RAID")));
        head[130 << 10..(130 << 10) + 8].copy_from_slice(&ZFS_MAGIC.to_be_bytes());
        assert!(describe(&head, &tail).is_some_and(|text| text.contains("ZFS")));
        let (head, mut tail) = (vec![0; LEN], vec![0; LEN]);
        tail[5] = 1;
        assert!(describe(&head, &tail).is_some_and(|text| text.contains("byte 5 of its last")));
    }

    proptest! {
        #[test]
        fn short_and_odd_pieces_are_fine(head in prop::collection::vec(any::<u8>(), 0..2000), tail in prop::collection::vec(any::<u8>(), 0..2000)) {
            let blank = head.iter().chain(&tail).all(|byte| *byte == 0);
            prop_assert_eq!(describe(&head, &tail).is_none(), blank);
        }
    }
}
