//! Detects an image's format and block size from its first and last bytes. Unknown content counts
//! as raw.

use std::fs::File;
use std::os::unix::fs::FileExt;

use crate::failure::{Outcome, While};

pub(super) const HEAD_BYTES: usize = 4096 + 512;
pub(super) const TAIL_BYTES: usize = 512;
const QEMU: &str = "qemu-img convert -O raw";

#[derive(Debug, Clone, Copy)]
pub(super) struct Format {
    pub(super) name: &'static str,
    /// `%` stands for the file.
    convert: &'static str,
}

impl Format {
    pub(super) fn command(&self, file: &str) -> String {
        match self.convert {
            QEMU => format!("{QEMU} {file} disk.raw"),
            other => other.replace('%', file),
        }
    }
}

const fn format(name: &'static str, convert: &'static str) -> Format {
    Format { name, convert }
}

/// Offset, magic bytes, format.
const AT_HEAD: [(usize, &[u8], Format); 20] = [
    (0, b"QFI\xfb", format("a qcow2 image", QEMU)),
    (0, b"QED\0", format("a QED image", QEMU)),
    (0, b"KDMV", format("a VMDK image", QEMU)),
    (0, b"COWD", format("a VMDK image", QEMU)),
    (
        0,
        b"# Disk DescriptorFile",
        format("a VMDK descriptor", QEMU),
    ),
    (0, b"conectix", format("a VHD image", QEMU)),
    (0, b"vhdxfile", format("a VHDX image", QEMU)),
    (64, b"\x7f\x10\xda\xbe", format("a VDI image", QEMU)),
    (0, b"WithoutFreeSpace", format("a Parallels image", QEMU)),
    (0, b"WithouFreSpacExt", format("a Parallels image", QEMU)),
    (
        0,
        b"\x1f\x8b\x08",
        format("compressed by gzip", "gzip -dc % > disk.raw"),
    ),
    (
        0,
        b"\xfd7zXZ\0",
        format("compressed by xz", "xz -dc % > disk.raw"),
    ),
    (
        0,
        b"\x28\xb5\x2f\xfd",
        format("compressed by zstd", "zstd -dc % > disk.raw"),
    ),
    (
        0,
        b"BZh",
        format("compressed by bzip2", "bzip2 -dc % > disk.raw"),
    ),
    (
        0,
        b"\x04\x22\x4d\x18",
        format("compressed by lz4", "lz4 -dc % > disk.raw"),
    ),
    (
        0,
        b"LZIP",
        format("compressed by lzip", "lzip -dc % > disk.raw"),
    ),
    (0, b"PK\x03\x04", format("a zip archive", "unzip %")),
    (0, b"7z\xbc\xaf\x27\x1c", format("a 7z archive", "7z x %")),
    (
        0,
        b"\x3a\xff\x26\xed",
        format("an Android sparse image", "simg2img % disk.raw"),
    ),
    // Includes OVA.
    (257, b"ustar", format("a tar archive", "tar -xf %")),
];

/// In the last 512 bytes: a fixed VHD is raw before them.
const AT_TAIL: [(&[u8], Format); 2] = [
    (b"conectix", format("a VHD image", QEMU)),
    (
        b"koly",
        format("a DMG image", "qemu-img convert -f dmg -O raw % disk.raw"),
    ),
];

pub(super) struct Ends {
    pub(super) head: Vec<u8>,
    pub(super) tail: Vec<u8>,
    pub(super) bytes: u64,
}

impl Ends {
    pub(super) fn read(file: &File, bytes: u64) -> Outcome<Self> {
        let part = |at: u64, up_to: usize| -> Outcome<Vec<u8>> {
            let length = usize::try_from(bytes - at).unwrap_or(up_to).min(up_to);
            let mut part = vec![0; length];
            file.read_exact_at(&mut part, at)
                .while_doing(format!("read the image at byte {at}"))?;
            Ok(part)
        };
        Ok(Self {
            head: part(0, HEAD_BYTES)?,
            tail: part(bytes.saturating_sub(TAIL_BYTES as u64), TAIL_BYTES)?,
            bytes,
        })
    }

    fn has(&self, at: usize, magic: &[u8]) -> bool {
        self.head
            .get(at..)
            .is_some_and(|rest| rest.starts_with(magic))
    }

    fn u16_le(&self, at: usize) -> u16 {
        self.bytes_at(at).map_or(0, u16::from_le_bytes)
    }

    fn u32_le(&self, at: usize) -> u32 {
        self.bytes_at(at).map_or(0, u32::from_le_bytes)
    }

    fn bytes_at<const N: usize>(&self, at: usize) -> Option<[u8; N]> {
        self.head.get(at..)?.first_chunk().copied()
    }

    pub(super) fn format(&self) -> Option<Format> {
        let head = AT_HEAD.iter().find(|(at, magic, _)| self.has(*at, magic));
        let tail = AT_TAIL
            .iter()
            .find(|(magic, _)| self.tail.starts_with(magic));
        head.map(|found| found.2).or(tail.map(|found| found.1))
    }

    /// What blocks of `block_bytes` make unusable, and the block size that it needs.
    pub(super) fn unusable_with(&self, block_bytes: u32) -> Option<(&'static str, u32)> {
        let gpt_at = |at| self.has(at, b"EFI PART");
        let table = match (gpt_at(512), gpt_at(4096)) {
            (true, false) => Some(512),
            (false, true) => Some(4096),
            (true, true) => None,
            (false, false) => self.mbr_is_for_512().then_some(512),
        };
        if let Some(made_for) = table.filter(|made_for| *made_for != block_bytes) {
            return Some(("a partition table", made_for));
        }
        // A file system's blocks may be larger than the disk's, not smaller.
        let file_system = if self.u16_le(1080) == 0xef53 {
            let shift = self.u32_le(1048).min(6);
            Some(("an ext file system", 1024 << shift))
        } else if self.has(0, b"XFSB") {
            let sector = self.bytes_at(102).map_or(0, u16::from_be_bytes);
            Some(("an XFS file system", u32::from(sector)))
        } else if self.has(3, b"NTFS    ") || self.has(54, b"FAT") || self.has(82, b"FAT32") {
            Some(("a FAT or NTFS file system", u32::from(self.u16_le(11))))
        } else {
            None
        };
        file_system.filter(|(_, made_for)| *made_for >= 512 && *made_for < block_bytes)
    }

    /// Whether a partition table (not a protective one) fits only blocks of 512 bytes.
    fn mbr_is_for_512(&self) -> bool {
        if self.u16_le(510) != 0xaa55 {
            return false;
        }
        let entries = (0..4).map(|index| 446 + 16 * index);
        let mut end_block = 0;
        for at in entries {
            let (status, kind) = (self.head[at], self.head[at + 4]);
            let start = u64::from(self.u32_le(at + 8));
            let blocks = u64::from(self.u32_le(at + 12));
            if kind == 0 && blocks == 0 {
                continue;
            }
            if !matches!(status, 0 | 0x80) || kind == 0xee || start == 0 || blocks == 0 {
                return false;
            }
            end_block = end_block.max(start + blocks);
        }
        let fits = |block_bytes: u64| end_block * block_bytes <= self.bytes;
        end_block > 0 && fits(512) && !fits(4096)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ends(head: &[(usize, &[u8])], bytes: u64) -> Ends {
        let mut all = vec![0; HEAD_BYTES];
        for (at, part) in head {
            all[*at..at + part.len()].copy_from_slice(part);
        }
        Ends {
            head: all,
            tail: vec![0; TAIL_BYTES],
            bytes,
        }
    }

    #[test]
    fn an_unknown_image_format_is_raw() {
        let none = ends(&[], 1 << 20);
        assert!(none.format().is_none());
        for block_bytes in [512, 4096] {
            assert_eq!(none.unusable_with(block_bytes), None);
        }
        let short = Ends {
            head: vec![0x55],
            tail: vec![0x55],
            bytes: 1,
        };
        assert!(short.format().is_none() && short.unusable_with(4096).is_none());
    }

    #[test]
    fn each_format_is_known_by_its_bytes() {
        for (at, magic, format) in AT_HEAD {
            let found = ends(&[(at, magic)], 1 << 20).format().expect(format.name);
            assert_eq!(found.name, format.name);
            assert!(found.command("a.img").contains("a.img"), "{found:?}");
        }
        for (magic, format) in AT_TAIL {
            let mut image = ends(&[], 1 << 20);
            image.tail[..magic.len()].copy_from_slice(magic);
            assert_eq!(image.format().expect(format.name).name, format.name);
        }
    }

    #[test]
    fn tables_and_file_systems_need_their_blocks() {
        let gpt_512 = ends(&[(512, b"EFI PART")], 1 << 30);
        assert_eq!(
            gpt_512.unusable_with(4096),
            Some(("a partition table", 512))
        );
        assert_eq!(gpt_512.unusable_with(512), None);
        let gpt_4096 = ends(&[(4096, b"EFI PART")], 1 << 30);
        assert_eq!(
            gpt_4096.unusable_with(512),
            Some(("a partition table", 4096))
        );
        assert_eq!(gpt_4096.unusable_with(4096), None);

        let mbr = |start: u32, blocks: u32| {
            let (start, blocks) = (start.to_le_bytes(), blocks.to_le_bytes());
            ends(
                &[
                    (450, &[0x83]),
                    (454, &start),
                    (458, &blocks),
                    (510, b"\x55\xaa"),
                ],
                64 << 20,
            )
        };
        assert_eq!(
            mbr(2048, 100_000).unusable_with(4096),
            Some(("a partition table", 512))
        );
        assert_eq!(mbr(2048, 100_000).unusable_with(512), None);
        assert_eq!(mbr(256, 10_000).unusable_with(4096), None);
        // Not a table: it exceeds the image.
        assert_eq!(mbr(2048, 1 << 30).unusable_with(4096), None);

        let ext = |shift: u8| ends(&[(1080, b"\x53\xef"), (1048, &[shift])], 1 << 30);
        assert_eq!(
            ext(0).unusable_with(4096),
            Some(("an ext file system", 1024))
        );
        assert_eq!(ext(0).unusable_with(512), None);
        assert_eq!(ext(2).unusable_with(4096), None);
        let xfs = ends(&[(0, b"XFSB"), (102, &[2, 0])], 1 << 30);
        assert_eq!(xfs.unusable_with(4096), Some(("an XFS file system", 512)));
        let fat = ends(&[(82, b"FAT32   "), (11, &[0, 2])], 1 << 30);
        assert_eq!(
            fat.unusable_with(4096),
            Some(("a FAT or NTFS file system", 512))
        );
    }
}
