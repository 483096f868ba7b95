//! A host's view of Identify data: only the fields in use, read at the specified offsets.
//!
//! Unusable values become `None`.

/// Identify Controller, CNS 01h (Base 5.17.2.1, figure 275).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ControllerInfo {
    /// SN, bytes 23:04, trimmed.
    pub serial: String,
    /// MN, bytes 63:24, trimmed.
    pub model: String,
    /// FR, bytes 71:64, trimmed.
    pub firmware: String,
    /// MDTS, byte 77, in bytes for 4 KiB pages; `None`: no limit.
    pub max_transfer_bytes: Option<u64>,
    /// CNTLID, bytes 79:78.
    pub cntlid: u16,
    /// KAS, bytes 321:320; 0: no keep alive.
    pub keep_alive_granularity_ms: u32,
    /// MAXCMD, bytes 515:514; 0: unknown.
    pub max_outstanding: u16,
    /// NN, bytes 519:516.
    pub max_nsid: u32,
    /// ONCS, bytes 521:520: bit 2 Dataset Management, bit 3 Write Zeroes.
    pub oncs: u16,
    /// VWC bit 0, byte 525.
    pub volatile_write_cache: bool,
    /// SUBNQN, bytes 1023:768.
    pub subnqn: String,
    /// In-capsule data of I/O queues: IOCCSZ, bytes 1795:1792, less 64.
    pub io_in_capsule_bytes: u32,
}

impl ControllerInfo {
    /// Parses the data.
    #[must_use]
    pub fn parse(data: &[u8; 4096]) -> Self {
        let mdts = data[77];
        Self {
            serial: text(&data[4..24]),
            model: text(&data[24..64]),
            firmware: text(&data[64..72]),
            max_transfer_bytes: (mdts != 0 && mdts < 40).then(|| 4096u64 << mdts),
            cntlid: u16_at(data, 78),
            keep_alive_granularity_ms: u32::from(u16_at(data, 320)) * 100,
            max_outstanding: u16_at(data, 514),
            max_nsid: u32_at(data, 516),
            oncs: u16_at(data, 520),
            volatile_write_cache: data[525] & 1 != 0,
            subnqn: text(&data[768..1024]),
            io_in_capsule_bytes: u32_at(data, 1792).saturating_mul(16).saturating_sub(64),
        }
    }
}

/// Identify Namespace, CNS 00h (NVM Command Set 4.1.5.1, figure 97).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamespaceInfo {
    /// The namespace.
    pub nsid: u32,
    /// NSZE, bytes 7:0.
    pub size_blocks: u64,
    /// NUSE, bytes 23:16.
    pub used_blocks: u64,
    /// 1 << LBADS of the format in FLBAS.
    pub block_bytes: u32,
    /// NSFEAT bit 0: thin provisioning.
    pub thin: bool,
    /// DLFEAT bits 2:0 are 001b.
    pub deallocated_reads_zero: bool,
    /// NSATTR bit 0, byte 99.
    pub write_protected: bool,
    /// NGUID, bytes 119:104.
    pub nguid: [u8; 16],
}

impl NamespaceInfo {
    /// Parses the data. `None`: inactive (all zeros) or an unusable block size.
    #[must_use]
    pub fn parse(nsid: u32, data: &[u8; 4096]) -> Option<Self> {
        let size_blocks = u64_at(data, 0);
        // The format's number: low bits in FLBAS 3:0, high bits in 6:5.
        let flbas = usize::from(data[26]);
        let format = flbas & 0xf | (flbas >> 5 & 3) << 4;
        let lbads = data[128 + 4 * format + 2];
        if size_blocks == 0 || !(9..=16).contains(&lbads) {
            return None;
        }
        let mut nguid = [0; 16];
        nguid.copy_from_slice(&data[104..120]);
        Some(Self {
            nsid,
            size_blocks,
            used_blocks: u64_at(data, 16),
            block_bytes: 1 << lbads,
            thin: data[24] & 1 != 0,
            deallocated_reads_zero: data[33] & 7 == 1,
            write_protected: data[99] & 1 != 0,
            nguid,
        })
    }

    /// Size in bytes.
    #[must_use]
    pub fn size_bytes(&self) -> u64 {
        self.size_blocks.saturating_mul(u64::from(self.block_bytes))
    }
}

/// Active namespaces, CNS 02h (Base 5.17.2.2).
pub fn active_namespaces(data: &[u8; 4096]) -> impl Iterator<Item = u32> + '_ {
    data.chunks_exact(4)
        .map(|id| u32::from_le_bytes([id[0], id[1], id[2], id[3]]))
        .take_while(|&id| id != 0)
}

/// The UUID, NIDT 03h, among the descriptors of CNS 03h (Base 5.17.2.3).
#[must_use]
pub fn uuid_descriptor(data: &[u8; 4096]) -> Option<[u8; 16]> {
    let mut rest: &[u8] = data;
    while let [kind, len, _, _, tail @ ..] = rest {
        let len = usize::from(*len);
        if len == 0 {
            return None;
        }
        let value = tail.get(..len)?;
        if *kind == 3 {
            return value.try_into().ok();
        }
        rest = &tail[len..];
    }
    None
}

fn text(field: &[u8]) -> String {
    let end = field.iter().position(|&b| b == 0).unwrap_or(field.len());
    let field = String::from_utf8_lossy(&field[..end]);
    field.trim_end_matches(' ').to_owned()
}

fn u16_at(data: &[u8; 4096], at: usize) -> u16 {
    u16::from_le_bytes([data[at], data[at + 1]])
}

fn u32_at(data: &[u8; 4096], at: usize) -> u32 {
    u32::from(u16_at(data, at)) | u32::from(u16_at(data, at + 2)) << 16
}

fn u64_at(data: &[u8; 4096], at: usize) -> u64 {
    u64::from(u32_at(data, at)) | u64::from(u32_at(data, at + 4)) << 32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_namespace_is_read_at_the_right_places() {
        let mut data = [0; 4096];
        assert_eq!(NamespaceInfo::parse(1, &data), None);
        data[..8].copy_from_slice(&1000u64.to_le_bytes());
        assert_eq!(NamespaceInfo::parse(1, &data), None);
        data[26] = 0x21; // format 17
        data[128 + 4 * 17 + 2] = 12;
        data[24] = 1;
        data[33] = 0x09;
        data[99] = 0xFE;
        let info = NamespaceInfo::parse(1, &data).unwrap();
        assert_eq!((info.block_bytes, info.size_bytes()), (4096, 4_096_000));
        assert!(info.thin && info.deallocated_reads_zero && !info.write_protected);
        data[99] = 1;
        assert!(NamespaceInfo::parse(1, &data).unwrap().write_protected);
        data[26] = 0x6f; // the highest possible format
        assert_eq!(NamespaceInfo::parse(1, &data), None);
    }

    #[test]
    fn descriptors_end_and_lie() {
        let mut data = [0; 4096];
        assert_eq!(uuid_descriptor(&data), None);
        data[..2].copy_from_slice(&[2, 16]);
        data[20..22].copy_from_slice(&[3, 16]);
        data[24..40].fill(7);
        assert_eq!(uuid_descriptor(&data), Some([7; 16]));
        assert_eq!(uuid_descriptor(&[0xff; 4096]), None);
    }

    #[test]
    fn controller_text_and_sizes() {
        let mut data = [0; 4096];
        data[4..24].copy_from_slice(b"0123456789          ");
        data[77] = 5;
        data[1792] = 4;
        data[1793] = 1;
        let info = ControllerInfo::parse(&data);
        assert_eq!(info.serial, "0123456789");
        assert_eq!(info.max_transfer_bytes, Some(128 * 1024));
        assert_eq!(info.io_in_capsule_bytes, 4096);
    }
}
