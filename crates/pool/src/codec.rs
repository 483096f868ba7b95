//! Records as bytes.
//!
//! **Design.** A version byte, then postcard. States and maps are packed: a chunk of extents is one
//! record of runs, so contiguous space costs a few bytes, whatever its size, and the worst case a few
//! bytes per extent. Decoding trusts nothing: counts are checked against the chunk. **Not here:**
//! which record is where (`batch::Key`).

use crate::{
    error::{PoolError, Result},
    extents::ExtentState,
    runs::DeviceRun,
    volume_map::{MAP_CHUNK, MapRun},
};
use forebay_xlate::types::{DeviceIndex, VolumeId};
use serde::{Serialize, de::DeserializeOwned};

/// Extents per record of states.
pub(crate) const STATE_CHUNK: u64 = 1024;

const VERSION: u8 = 1;

fn wrong(what: &str) -> PoolError {
    PoolError::damaged(format!("a catalog record cannot be read: {what}"))
}

/// Any record that is a struct.
pub(crate) fn encode<T: Serialize>(record: &T) -> Result<Vec<u8>> {
    postcard::to_extend(record, vec![VERSION])
        .map_err(|error| PoolError::invalid(format!("a catalog record cannot be written: {error}")))
}

/// The reverse of [`encode`].
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
            "version {version}, this Forebay reads {VERSION}"
        ))),
        None => Err(wrong("it is empty")),
    }
}

/// A chunk of states: runs of (state, count), or bytes where runs would be longer.
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

/// Fills `states`, whose length says how many extents the chunk has.
pub(crate) fn decode_states(bytes: &[u8], states: &mut [u8]) -> Result<()> {
    let form = *bytes.get(1).ok_or_else(|| wrong("states without a form"))?;
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

/// A chunk of a volume's map: (gap, length, device, step) per run, each relative to the run before.
pub(crate) fn encode_map(runs: &[MapRun]) -> Result<Vec<u8>> {
    let mut packed: Vec<(u16, u16, u8, i64)> = Vec::with_capacity(runs.len());
    let (mut logical, mut extent) = (0u16, 0u64);
    for run in runs {
        packed.push((
            run.start - logical,
            run.count,
            run.device.0,
            run.extent.wrapping_sub(extent).cast_signed(),
        ));
        logical = run.start + run.count;
        extent = run.extent + u64::from(run.count);
    }
    encode(&packed)
}

/// The reverse of [`encode_map`]; the runs are in order, disjoint and within a chunk.
pub(crate) fn decode_map(bytes: &[u8]) -> Result<Vec<MapRun>> {
    let packed: Vec<(u16, u16, u8, i64)> = decode(bytes)?;
    let mut runs = Vec::with_capacity(packed.len().min(MAP_CHUNK as usize));
    let (mut logical, mut extent) = (0u64, 0u64);
    for (gap, count, device, step) in packed {
        let start = logical + u64::from(gap);
        let first = extent
            .checked_add_signed(step)
            .filter(|first| first.checked_add(u64::from(count)).is_some())
            .ok_or_else(|| wrong("an extent out of range"))?;
        if count == 0 || start + u64::from(count) > MAP_CHUNK {
            return Err(wrong("a run beyond its chunk"));
        }
        // Both fit: they end within a chunk of 512.
        runs.push(MapRun {
            start: start as u16,
            count,
            device: DeviceIndex(device),
            extent: first,
        });
        logical = start + u64::from(count);
        extent = first + u64::from(count);
    }
    Ok(runs)
}

/// A chunk of reservations: (offset, count, volume) per run.
pub(crate) fn encode_reservations(base: u64, runs: &[(DeviceRun, VolumeId)]) -> Result<Vec<u8>> {
    let packed: Vec<(u64, u64, u64)> = runs
        .iter()
        .map(|(run, volume)| (run.first.0 - base, run.count, volume.0))
        .collect();
    encode(&packed)
}

/// The reverse of [`encode_reservations`]; the runs are within the chunk.
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

        /// Whatever the bytes, an answer: no panic, and nothing out of range in it.
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
