//! Records as bytes: a version byte, then postcard, or fixed-width columns for maps.
//!
//! A chunk of extents is one record of runs. Decoding checks all counts against the chunk.

use crate::{
    error::{PoolError, Result},
    extents::ExtentState,
    extents::runs::DeviceRun,
    records::{ExportRecord, Layering, PlainExport, VolumeRecord},
    volumes::{
        hidden::HiddenChunk,
        map::{MAP_CHUNK, MapRun},
    },
};
use forebay_xlate::boundary::message::{FrontendKind, MAX_VM_QUEUES};
use forebay_xlate::types::{DeviceIndex, VolumeId};
use serde::{Serialize, de::DeserializeOwned};

pub(crate) const STATE_CHUNK: u64 = 1024;

const VERSION: u8 = 3;
/// For exports that earlier versions don't know.
const MACHINES_VERSION: u8 = 4;
/// For volumes with snapshots, snapshots and clones.
const LAYERED_VERSION: u8 = 5;

fn wrong(what: &str) -> PoolError {
    PoolError::damaged(format!("a catalog record cannot be read: {what}"))
}

pub(crate) fn encode<T: Serialize>(record: &T) -> Result<Vec<u8>> {
    postcard::to_extend(record, vec![VERSION])
        .map_err(|error| PoolError::invalid(format!("a catalog record cannot be written: {error}")))
}

pub(crate) fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T> {
    match bytes.split_first() {
        Some((&VERSION, rest)) => {
            let (record, rest) =
                postcard::take_from_bytes(rest).map_err(|error| wrong(&error.to_string()))?;
            if rest.is_empty() {
                Ok(record)
            } else {
                Err(wrong("bytes follow its end"))
            }
        }
        Some((version, _)) => Err(wrong(&format!(
            "it has version {version}, but this Forebay reads {VERSION}"
        ))),
        None => Err(wrong("it is empty")),
    }
}

/// VM frontends and sharing have their own version, so that earlier versions of Forebay refuse the
/// pool.
pub(crate) fn encode_export(export: &ExportRecord) -> Result<Vec<u8>> {
    match export.plain() {
        Some(plain) => encode(&plain),
        None => {
            let mut bytes = encode(export)?;
            bytes[0] = MACHINES_VERSION;
            Ok(bytes)
        }
    }
}

pub(crate) fn decode_export(bytes: &[u8]) -> Result<ExportRecord> {
    match bytes.split_first() {
        Some((&MACHINES_VERSION, rest)) => {
            let mut known = vec![VERSION];
            known.extend_from_slice(rest);
            let record: ExportRecord = decode(&known)?;
            match record.frontend {
                FrontendKind::VhostUser { queues, .. }
                    if !(1..=MAX_VM_QUEUES).contains(&queues) =>
                {
                    Err(wrong("a VM disk has no queues, or too many"))
                }
                _ => Ok(record),
            }
        }
        _ => decode::<PlainExport>(bytes).map(ExportRecord::from),
    }
}

/// A volume without snapshots has the earlier form.
pub(crate) fn encode_volume(volume: &VolumeRecord) -> Result<Vec<u8>> {
    if volume.layering == Layering::default() {
        return encode(volume);
    }
    let mut bytes = encode(&(volume, volume.layering))?;
    bytes[0] = LAYERED_VERSION;
    Ok(bytes)
}

pub(crate) fn decode_volume(bytes: &[u8]) -> Result<VolumeRecord> {
    match bytes.split_first() {
        Some((&LAYERED_VERSION, rest)) => {
            let mut known = vec![VERSION];
            known.extend_from_slice(rest);
            let (record, layering): (VolumeRecord, Layering) = decode(&known)?;
            Ok(VolumeRecord { layering, ..record })
        }
        _ => decode(bytes),
    }
}

/// The hidden extents of a chunk, a bit for each.
pub(crate) fn encode_hidden(bits: &HiddenChunk) -> Result<Vec<u8>> {
    encode(bits)
}

pub(crate) fn decode_hidden(bytes: &[u8]) -> Result<HiddenChunk> {
    decode(bytes)
}

/// Runs of (state, count), or bytes if those are shorter.
pub(crate) fn encode_states(states: &[u8]) -> Result<Vec<u8>> {
    let mut runs: Vec<(u8, u16)> = Vec::new();
    for state in states {
        match runs.last_mut() {
            Some((last, count)) if last == state => *count += 1,
            _ => runs.push((*state, 1)),
        }
    }
    if runs.len() * 2 < states.len() {
        encode(&(0u8, runs))
    } else {
        encode(&(1u8, states))
    }
}

/// The length of `states` is the chunk's number of extents.
pub(crate) fn decode_states(bytes: &[u8], states: &mut [u8]) -> Result<()> {
    let form = *bytes
        .get(1)
        .ok_or_else(|| wrong("the states have no form"))?;
    if form == 0 {
        let (_, runs): (u8, Vec<(u8, u16)>) = decode(bytes)?;
        let mut at = 0usize;
        for (state, count) in runs {
            let end = at + usize::from(count);
            states
                .get_mut(at..end)
                .ok_or_else(|| wrong("too many states"))?
                .fill(state);
            at = end;
        }
        if at != states.len() {
            return Err(wrong("too few states"));
        }
    } else {
        let (_, plain): (u8, Vec<u8>) = decode(bytes)?;
        if plain.len() != states.len() {
            return Err(wrong("the wrong number of states"));
        }
        states.copy_from_slice(&plain);
    }
    if states
        .iter()
        .any(|state| ExtentState::from_stored(*state).is_none())
    {
        return Err(wrong("an unknown extent state"));
    }
    Ok(())
}

/// Columns present in a chunk of a map.
const GAPS: u8 = 1;
const COUNTS: u8 = 2;
const DEVICES: u8 = 4;

fn width_of(number: u64) -> usize {
    (64 - number.leading_zeros() as usize).div_ceil(8)
}

fn push_column(bytes: &mut Vec<u8>, width: usize, numbers: impl Iterator<Item = u64>) {
    for number in numbers {
        bytes.extend_from_slice(&number.to_le_bytes()[..width]);
    }
}

/// A chunk of a volume's map, in fixed-width columns for fast reading:
///
/// ```text
/// version, number of runs (2 bytes), columns, device, width of extents, width of the lowest extent,
/// the lowest extent, gaps (2 each), counts (2 each), devices (1 each), extents above the lowest
/// ```
///
/// A gap is the unmapped space before a run. A column is left out if all gaps are 0, all counts 1,
/// or all devices equal.
pub(crate) fn encode_map(runs: &[MapRun]) -> Result<Vec<u8>> {
    let mut gaps = Vec::with_capacity(runs.len());
    let mut logical = 0;
    for run in runs {
        gaps.push(run.start - logical);
        logical = run.start + run.count;
    }
    let lowest = runs.iter().map(|run| run.extent).min().unwrap_or(0);
    let highest = runs.iter().map(|run| run.extent).max().unwrap_or(0);
    let (width, lowest_width) = (width_of(highest - lowest), width_of(lowest));
    let device = runs.first().map_or(0, |run| run.device.0);
    let mut columns = 0;
    if gaps.iter().any(|gap| *gap != 0) {
        columns |= GAPS;
    }
    if runs.iter().any(|run| run.count != 1) {
        columns |= COUNTS;
    }
    if runs.iter().any(|run| run.device.0 != device) {
        columns |= DEVICES;
    }
    let mut bytes = Vec::with_capacity(16 + runs.len() * (width + 5));
    bytes.push(VERSION);
    // A chunk has at most 512 runs.
    bytes.extend_from_slice(&(runs.len() as u16).to_le_bytes());
    bytes.extend_from_slice(&[columns, device, width as u8, lowest_width as u8]);
    push_column(&mut bytes, lowest_width, [lowest].into_iter());
    if columns & GAPS != 0 {
        push_column(&mut bytes, 2, gaps.iter().map(|gap| u64::from(*gap)));
    }
    if columns & COUNTS != 0 {
        push_column(&mut bytes, 2, runs.iter().map(|run| u64::from(run.count)));
    }
    if columns & DEVICES != 0 {
        push_column(
            &mut bytes,
            1,
            runs.iter().map(|run| u64::from(run.device.0)),
        );
    }
    push_column(
        &mut bytes,
        width,
        runs.iter().map(|run| run.extent - lowest),
    );
    Ok(bytes)
}

fn take_column<'a>(bytes: &mut &'a [u8], width: usize, rows: usize) -> Result<Column<'a>> {
    let (column, rest) = bytes
        .split_at_checked(width * rows)
        .ok_or_else(|| wrong("a map that ends early"))?;
    *bytes = rest;
    Ok(Column {
        bytes: column,
        width,
    })
}

#[derive(Clone, Copy)]
struct Column<'a> {
    bytes: &'a [u8],
    width: usize,
}

impl Column<'_> {
    fn get(&self, row: usize) -> u64 {
        let from = row * self.width;
        let mut number = [0; 8];
        if let Some(eight) = self.bytes.get(from..from + 8) {
            // One load is faster than `width` bytes; drop the excess.
            number.copy_from_slice(eight);
            let unused = 64 - 8 * self.width as u32;
            return (u64::from_le_bytes(number) << (unused & 63)) >> (unused & 63);
        }
        number[..self.width].copy_from_slice(&self.bytes[from..from + self.width]);
        u64::from_le_bytes(number)
    }
}

/// The runs are in order, disjoint and within a chunk.
pub(crate) fn decode_map(bytes: &[u8]) -> Result<Vec<MapRun>> {
    let (head, mut rest) = bytes
        .split_first_chunk::<7>()
        .ok_or_else(|| wrong("a map without a head"))?;
    let [version, low, high, columns, device, width, lowest_width] = *head;
    if version != VERSION {
        return Err(wrong(&format!(
            "it has version {version}, but this Forebay reads {VERSION}"
        )));
    }
    let rows = usize::from(u16::from_le_bytes([low, high]));
    let (width, lowest_width) = (usize::from(width), usize::from(lowest_width));
    if rows as u64 > MAP_CHUNK
        || width > 8
        || lowest_width > 8
        || columns & !(GAPS | COUNTS | DEVICES) != 0
    {
        return Err(wrong("a map of an unknown form"));
    }
    let lowest = take_column(&mut rest, lowest_width, 1)?;
    let lowest = if lowest_width == 0 { 0 } else { lowest.get(0) };
    let mut optional = |column, width| {
        let there = columns & column != 0;
        take_column(&mut rest, if there { width } else { 0 }, rows)
            .map(|column| there.then_some(column))
    };
    let gaps = optional(GAPS, 2)?;
    let counts = optional(COUNTS, 2)?;
    let devices = optional(DEVICES, 1)?;
    let extents = take_column(&mut rest, width, rows)?;
    if !rest.is_empty() {
        return Err(wrong("bytes follow its end"));
    }
    let mut runs = Vec::with_capacity(rows);
    let mut logical = 0u64;
    for row in 0..rows {
        let start = logical + gaps.map_or(0, |column| column.get(row));
        let count = counts.map_or(1, |column| column.get(row));
        let above = if width == 0 { 0 } else { extents.get(row) };
        let extent = lowest
            .checked_add(above)
            .filter(|extent| extent.checked_add(count).is_some())
            .ok_or_else(|| wrong("an extent out of range"))?;
        logical = start + count;
        if count == 0 || logical > MAP_CHUNK {
            return Err(wrong("a run beyond its chunk"));
        }
        // No overflow: it ends within a chunk of 512.
        runs.push(MapRun {
            start: start as u16,
            count: count as u16,
            device: DeviceIndex(devices.map_or(device, |column| column.get(row) as u8)),
            extent,
        });
    }
    Ok(runs)
}

/// (offset, count, volume) per run.
pub(crate) fn encode_reservations(base: u64, runs: &[(DeviceRun, VolumeId)]) -> Result<Vec<u8>> {
    let packed: Vec<(u64, u64, u64)> = runs
        .iter()
        .map(|(run, volume)| (run.first.0 - base, run.count, volume.0))
        .collect();
    encode(&packed)
}

/// The runs are within the chunk.
pub(crate) fn decode_reservations(
    device: DeviceIndex,
    chunk: u64,
    bytes: &[u8],
) -> Result<Vec<(DeviceRun, VolumeId)>> {
    let base = chunk
        .checked_mul(STATE_CHUNK)
        .filter(|base| base.checked_add(STATE_CHUNK).is_some());
    let base = base.ok_or_else(|| wrong("a chunk out of range"))?;
    let packed: Vec<(u64, u64, u64)> = decode(bytes)?;
    let run = |(offset, count, volume): (u64, u64, u64)| {
        let end = offset
            .checked_add(count)
            .filter(|end| count > 0 && *end <= STATE_CHUNK);
        end.ok_or_else(|| wrong("a run beyond its chunk"))?;
        Ok((
            DeviceRun::new(device, base + offset, count),
            VolumeId(volume),
        ))
    };
    packed.into_iter().map(run).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::records::{ExportId, LayerId, MapId, SocketOwner, TenantId};

    #[test]
    fn only_exports_that_are_new_have_a_new_version() {
        let tcp = ExportRecord {
            id: ExportId(3),
            volume: VolumeId(2),
            nqn: "nqn.x".into(),
            hosts: vec!["nqn.h".into()],
            any_host: false,
            created_s: 9,
            frontend: FrontendKind::NvmeTcp,
            socket: None,
            socket_owner: SocketOwner::default(),
            shared: false,
        };
        // The format before VM frontends.
        let old = encode(&(3u64, 2u64, "nqn.x", vec!["nqn.h"], false, 9u64)).unwrap();
        assert_eq!(encode_export(&tcp).unwrap(), old);
        assert_eq!(decode_export(&old).unwrap(), tcp);
        let machine = ExportRecord {
            frontend: FrontendKind::VhostUser {
                queues: 4,
                pinned_memory: true,
            },
            socket: Some("/run/x".into()),
            hosts: vec![],
            ..tcp.clone()
        };
        let shared = ExportRecord {
            shared: true,
            ..tcp
        };
        for new in [machine, shared] {
            let bytes = encode_export(&new).unwrap();
            assert_eq!(decode_export(&bytes).unwrap(), new);
            let error = decode::<PlainExport>(&bytes).unwrap_err().to_string();
            assert!(error.contains("version 4"), "{error}");
        }
        let many = ExportRecord {
            frontend: FrontendKind::VhostUser {
                queues: 65,
                pinned_memory: false,
            },
            ..decode_export(&old).unwrap()
        };
        assert!(decode_export(&encode_export(&many).unwrap()).is_err());
    }

    /// An earlier version reads it; one with layers it refuses by its version.
    #[test]
    fn only_volumes_with_layers_have_a_new_version() {
        let plain = VolumeRecord {
            id: VolumeId(7),
            uuid: uuid::Uuid::from_bytes([9; 16]),
            tenant: TenantId(1),
            name: "db".into(),
            size_bytes: 1 << 20,
            block_bytes: 512,
            reserved_bytes: 4096,
            created_s: 3,
            layering: Layering::default(),
        };
        // The format before layers.
        let mut old = vec![VERSION, 7];
        old.extend([9; 16]);
        old.extend([1, 2, b'd', b'b', 0x80, 0x80, 0x40, 0x80, 4, 0x80, 0x20, 3]);
        assert_eq!(encode_volume(&plain).unwrap(), old);
        assert_eq!(decode_volume(&old).unwrap(), plain);
        let layerings = [
            Layering {
                map: Some(MapId(300)),
                ..Layering::default()
            },
            Layering {
                parent: Some(LayerId(1 << 40)),
                ..Layering::default()
            },
            Layering {
                freezes: u64::MAX,
                ..Layering::default()
            },
            Layering {
                snapshot_of: Some(VolumeId(7)),
                ..Layering::default()
            },
        ];
        for layering in layerings {
            let new = VolumeRecord {
                layering,
                ..plain.clone()
            };
            let bytes = encode_volume(&new).unwrap();
            assert_eq!(decode_volume(&bytes).unwrap(), new);
            let error = decode::<VolumeRecord>(&bytes).unwrap_err().to_string();
            assert!(error.contains("version 5"), "{error}");
        }
    }

    use proptest::prelude::*;

    fn map_runs() -> impl Strategy<Value = Vec<MapRun>> {
        prop::collection::vec((0u16..6, 1u16..6, any::<u8>(), 0u64..1 << 50), 0..60).prop_map(
            |parts| {
                let mut at = 0;
                parts
                    .into_iter()
                    .map(|(gap, count, device, extent)| {
                        let start = at + gap;
                        at = start + count;
                        MapRun {
                            start,
                            count,
                            device: DeviceIndex(device),
                            extent,
                        }
                    })
                    .filter(|run| u64::from(run.start + run.count) <= MAP_CHUNK)
                    .collect()
            },
        )
    }

    proptest! {
        #[test]
        fn maps_there_and_back(runs in map_runs()) {
            prop_assert_eq!(decode_map(&encode_map(&runs).unwrap()).unwrap(), runs);
        }

        #[test]
        fn states_there_and_back(states in prop::collection::vec(0u8..5, 1..1024)) {
            let mut back = vec![9; states.len()];
            decode_states(&encode_states(&states).unwrap(), &mut back).unwrap();
            prop_assert_eq!(back, states);
        }

        #[test]
        fn noise_is_refused_or_sound(bytes in prop::collection::vec(any::<u8>(), 0..200), form in 0u8..2) {
            let mut bytes = bytes;
            if let Some(first) = bytes.first_mut() { *first = VERSION; }
            if let Some(second) = bytes.get_mut(1) { *second = form; }
            let mut states = [0; 100];
            let _ = decode_states(&bytes, &mut states);
            let _ = decode_reservations(DeviceIndex(0), 1, &bytes);
            if let Ok(runs) = decode_map(&bytes) {
                let mut at = 0;
                for run in runs {
                    prop_assert!(run.start >= at && run.count > 0);
                    at = run.start + run.count;
                    prop_assert!(u64::from(at) <= MAP_CHUNK);
                }
            }
        }
    }

    #[test]
    fn contiguous_is_small() {
        let whole = [MapRun {
            start: 0,
            count: 512,
            device: DeviceIndex(0),
            extent: 1 << 30,
        }];
        assert!(encode_map(&whole).unwrap().len() < 16);
        assert!(encode_states(&[2; 1024]).unwrap().len() < 16);
        let scattered: Vec<u8> = (0..1024).map(|at| (at % 3) as u8).collect();
        assert!(encode_states(&scattered).unwrap().len() < 1040);
    }
}
