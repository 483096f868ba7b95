//! Block requests and the configuration space (VIRTIO 1.2, 5.2).
//!
//! Descriptors' borders mean nothing: a header may be split, and the status is the last writable
//! byte (5.2.6.4). Without that byte the device breaks; other errors are a [`BlkStatus`].

use crate::feature;
use crate::ring::{Chain, Piece};
use forebay_guest::GuestMemory;

/// Always 512, whatever the block size.
pub const SECTOR_BYTES: u64 = 512;
/// Size of a request's header.
pub const HEADER_BYTES: u32 = 16;
/// VIRTIO_BLK_ID_BYTES.
pub const ID_BYTES: usize = 20;
/// seg_max: the most data pieces of a request.
pub const SEG_MAX: u32 = 126;
/// The most sectors of a discard or zeroing: 2 GiB.
pub const MAX_ZEROED_SECTORS: u32 = 1 << 22;
/// Size of the configuration space.
pub const CONFIG_BYTES: usize = 60;
/// Offset of `writeback` in it.
pub const CONFIG_WRITEBACK: usize = 32;

const T_IN: u32 = 0;
const T_OUT: u32 = 1;
const T_FLUSH: u32 = 4;
const T_GET_ID: u32 = 8;
const T_DISCARD: u32 = 11;
const T_WRITE_ZEROES: u32 = 13;
const SEGMENT_BYTES: u32 = 16;
/// VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP.
const F_UNMAP: u32 = 1;

/// The status of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum BlkStatus {
    /// VIRTIO_BLK_S_OK.
    Ok = 0,
    /// VIRTIO_BLK_S_IOERR.
    IoErr = 1,
    /// VIRTIO_BLK_S_UNSUPP.
    Unsupported = 2,
}

crate::named::named_errors! {
    /// An error that breaks the device.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum BlkError {
        /// The chain has no writable byte.
        #[error("a request without a place for its status")]
        NoStatus,
    }
}

/// Properties of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Disk {
    /// Its size in sectors.
    pub sectors: u64,
    /// Alignment of requests: a power of two, at least 512.
    pub block_bytes: u32,
    /// Whether writes fail.
    pub read_only: bool,
    /// Number of queues.
    pub queues: u16,
    /// Best unit to zero or discard, in bytes: a power of two of blocks.
    pub granule_bytes: u32,
}

/// What to do; ranges lie within the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// Reads into the data pieces.
    In {
        /// Start.
        offset_bytes: u64,
    },
    /// Writes the data pieces.
    Out {
        /// Start.
        offset_bytes: u64,
    },
    /// Makes writes durable.
    Flush,
    /// Reads the identifier.
    GetId,
    /// Frees a range.
    Discard {
        /// Start.
        offset_bytes: u64,
        /// Length.
        len_bytes: u64,
    },
    /// Zeroes a range.
    WriteZeroes {
        /// Start.
        offset_bytes: u64,
        /// Length.
        len_bytes: u64,
        /// Whether it may be freed.
        unmap: bool,
    },
}

/// A request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// What to do, or the status if it is invalid.
    pub work: Result<Work, BlkStatus>,
    /// Guest address of the status byte.
    pub status_address: u64,
    /// Length of its data.
    pub data_bytes: u32,
}

/// Parses a request.
#[inline]
pub fn parse(chain: &Chain, memory: &GuestMemory, disk: &Disk) -> Result<Request, BlkError> {
    let Some(last) = chain.writable().last() else {
        return Err(BlkError::NoStatus);
    };
    let status_address = last.address + u64::from(last.len) - 1;
    let is_sound = chain.fault().is_none() && chain.readable_bytes() >= HEADER_BYTES;
    let header = is_sound.then(|| header(chain.readable(), memory));
    let Some([kind, sector]) = header.flatten() else {
        return Ok(Request {
            work: Err(BlkStatus::IoErr),
            status_address,
            data_bytes: 0,
        });
    };
    let kind = kind as u32;
    let out_bytes = chain.readable_bytes() - HEADER_BYTES;
    let in_bytes = chain.writable_bytes() - 1;
    let (work, data_bytes) = match kind {
        T_IN => {
            let work = disk
                .range(sector, in_bytes)
                .map(|offset_bytes| Work::In { offset_bytes });
            (work, in_bytes)
        }
        T_OUT if disk.read_only => (Err(BlkStatus::IoErr), 0),
        T_OUT => {
            let work = disk
                .range(sector, out_bytes)
                .map(|offset_bytes| Work::Out { offset_bytes });
            (work, out_bytes)
        }
        T_FLUSH => (Ok(Work::Flush), 0),
        T_GET_ID => (Ok(Work::GetId), in_bytes),
        T_DISCARD | T_WRITE_ZEROES if disk.read_only => (Err(BlkStatus::IoErr), 0),
        T_DISCARD | T_WRITE_ZEROES => {
            let segment = segment(chain, memory, out_bytes);
            (segment.and_then(|s| disk.zeroing(kind, &s)), 0)
        }
        _ => (Err(BlkStatus::Unsupported), 0),
    };
    Ok(Request {
        work,
        status_address,
        data_bytes: if work.is_ok() { data_bytes } else { 0 },
    })
}

impl Request {
    /// The data pieces, if header and status have their own, as with every known driver; else use
    /// [`Request::data`].
    #[inline]
    pub fn plain_data<'c>(&self, chain: &'c Chain) -> Option<&'c [Piece]> {
        match self.work {
            Ok(Work::In { .. }) => match chain.writable() {
                [data @ .., status] if status.len == 1 => Some(data),
                _ => None,
            },
            Ok(Work::Out { .. }) => match chain.readable() {
                [header, data @ ..] if header.len == HEADER_BYTES => Some(data),
                _ => None,
            },
            _ => None,
        }
    }

    /// The data pieces: writable for [`Work::In`] and [`Work::GetId`], else readable.
    #[inline]
    pub fn data<'c>(&self, chain: &'c Chain) -> impl Iterator<Item = Piece> + 'c {
        let (pieces, skip) = match self.work {
            Ok(Work::In { .. } | Work::GetId) => (chain.writable(), 0),
            _ => (chain.readable(), HEADER_BYTES),
        };
        let (mut skip, mut left) = (skip, self.data_bytes);
        pieces.iter().filter_map(move |piece| {
            let skipped = skip.min(piece.len);
            skip -= skipped;
            let len = (piece.len - skipped).min(left);
            left -= len;
            (len > 0).then(|| Piece {
                address: piece.address + u64::from(skipped),
                len,
            })
        })
    }
}

#[inline]
fn header(pieces: &[Piece], memory: &GuestMemory) -> Option<[u64; 2]> {
    let first = pieces.first().filter(|piece| piece.len >= HEADER_BYTES);
    let view = first.and_then(|piece| memory.view(piece.address, HEADER_BYTES as usize));
    if let Some(words) = view.and_then(|view| view.load_two(0)) {
        return Some(words);
    }
    let mut bytes = [0; HEADER_BYTES as usize];
    read(pieces, 0, &mut bytes, memory).then(|| {
        let both = u128::from_le_bytes(bytes);
        [both as u64, (both >> 64) as u64]
    })
}

#[inline]
fn read(pieces: &[Piece], skip: u32, to: &mut [u8], memory: &GuestMemory) -> bool {
    let (mut skip, mut done) = (skip, 0);
    for piece in pieces {
        if done == to.len() {
            break;
        }
        let skipped = skip.min(piece.len);
        skip -= skipped;
        let n = ((piece.len - skipped) as usize).min(to.len() - done);
        if n == 0 {
            continue;
        }
        if !memory.read(piece.address + u64::from(skipped), &mut to[done..done + n]) {
            return false;
        }
        done += n;
    }
    done == to.len()
}

/// (sector, sectors, flags); only one segment is offered.
fn segment(
    chain: &Chain,
    memory: &GuestMemory,
    out_bytes: u32,
) -> Result<(u64, u32, u32), BlkStatus> {
    let mut bytes = [0; SEGMENT_BYTES as usize];
    if out_bytes != SEGMENT_BYTES || !read(chain.readable(), HEADER_BYTES, &mut bytes, memory) {
        return Err(BlkStatus::IoErr);
    }
    let both = u128::from_le_bytes(bytes);
    Ok((both as u64, (both >> 64) as u32, (both >> 96) as u32))
}

impl Disk {
    #[inline]
    fn range(&self, sector: u64, bytes: u32) -> Result<u64, BlkStatus> {
        let mask = u64::from(self.block_bytes) - 1;
        let sectors = u64::from(bytes) / SECTOR_BYTES;
        let end = sector.checked_add(sectors).ok_or(BlkStatus::IoErr)?;
        let offset = sector.wrapping_mul(SECTOR_BYTES);
        if bytes == 0 || (offset | u64::from(bytes)) & mask != 0 || end > self.sectors {
            return Err(BlkStatus::IoErr);
        }
        Ok(offset)
    }

    fn zeroing(&self, kind: u32, segment: &(u64, u32, u32)) -> Result<Work, BlkStatus> {
        let (sector, sectors, flags) = *segment;
        let allowed = if kind == T_WRITE_ZEROES { F_UNMAP } else { 0 };
        if flags & !allowed != 0 {
            return Err(BlkStatus::Unsupported);
        }
        let end = sector.checked_add(u64::from(sectors));
        if sectors == 0 || sectors > MAX_ZEROED_SECTORS || end.is_none_or(|end| end > self.sectors)
        {
            return Err(BlkStatus::IoErr);
        }
        let offset_bytes = sector * SECTOR_BYTES;
        let len_bytes = u64::from(sectors) * SECTOR_BYTES;
        if (offset_bytes | len_bytes) & (u64::from(self.block_bytes) - 1) != 0 {
            return Err(BlkStatus::IoErr);
        }
        Ok(if kind == T_WRITE_ZEROES {
            Work::WriteZeroes {
                offset_bytes,
                len_bytes,
                unmap: flags & F_UNMAP != 0,
            }
        } else {
            Work::Discard {
                offset_bytes,
                len_bytes,
            }
        })
    }

    /// The feature bits, those of rings included.
    #[must_use]
    pub const fn features(&self) -> u64 {
        let all = feature::VERSION_1
            | feature::RING_PACKED
            | feature::EVENT_IDX
            | feature::INDIRECT_DESC
            | feature::BLK_SEG_MAX
            | feature::BLK_BLK_SIZE
            | feature::BLK_TOPOLOGY
            | feature::BLK_FLUSH
            | feature::BLK_CONFIG_WCE
            | feature::BLK_MQ;
        if self.read_only {
            all | feature::BLK_RO
        } else {
            all | feature::BLK_DISCARD | feature::BLK_WRITE_ZEROES
        }
    }

    /// The configuration space (`struct virtio_blk_config`).
    #[must_use]
    pub fn config(&self, writeback: bool) -> [u8; CONFIG_BYTES] {
        let mut config = [0; CONFIG_BYTES];
        let mut put = |at: usize, bytes: &[u8]| config[at..at + bytes.len()].copy_from_slice(bytes);
        let granule_blocks = (self.granule_bytes / self.block_bytes).max(1);
        put(0, &self.sectors.to_le_bytes());
        put(12, &SEG_MAX.to_le_bytes());
        put(20, &self.block_bytes.to_le_bytes());
        // Topology: physical blocks are logical ones; no best transfer size.
        put(26, &1u16.to_le_bytes());
        put(CONFIG_WRITEBACK, &[u8::from(writeback)]);
        put(34, &self.queues.to_le_bytes());
        put(36, &MAX_ZEROED_SECTORS.to_le_bytes());
        put(40, &1u32.to_le_bytes());
        let granule_sectors = granule_blocks * (self.block_bytes / SECTOR_BYTES as u32);
        put(44, &granule_sectors.to_le_bytes());
        put(48, &MAX_ZEROED_SECTORS.to_le_bytes());
        put(52, &1u32.to_le_bytes());
        put(56, &[1]);
        config
    }
}

#[cfg(test)]
mod tests;
