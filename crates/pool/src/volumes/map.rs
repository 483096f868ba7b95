//! A volume's map: logical extent -> device extent.
//!
//! It is a tree of chunks of 512 logical extents. A chunk is a sorted list of runs of 24 bytes, and
//! one stored record (`codec`).
//!
//! **Not here:** durability (`pending`), an extent's state (`extents`).

use crate::extents::runs::DeviceRun;
use forebay_xlate::types::DeviceIndex;
#[cfg(test)]
use forebay_xlate::types::ExtentIndex;
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::ops::Range;

pub(crate) const MAP_CHUNK: u64 = 512;
/// Chunks searched in one call: 128 GiB of the smallest extents.
const CHUNKS_AT_ONCE: usize = 4096;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct MapRun {
    /// Relative to the chunk.
    pub(crate) start: u16,
    pub(crate) count: u16,
    pub(crate) device: DeviceIndex,
    /// The first device extent.
    pub(crate) extent: u64,
}

impl MapRun {
    fn end(&self) -> u16 {
        self.start + self.count
    }

    /// Whether `next` continues it, logically and on the device.
    fn meets(&self, next: &MapRun) -> bool {
        self.end() == next.start
            && self.device == next.device
            && self.extent + u64::from(self.count) == next.extent
    }

    /// Its part within the chunk's `from..to`.
    fn clip(&self, from: u16, to: u16) -> Option<MapRun> {
        let (start, end) = (self.start.max(from), self.end().min(to));
        (start < end).then(|| MapRun {
            start,
            count: end - start,
            device: self.device,
            extent: self.extent + u64::from(start - self.start),
        })
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Mapping {
    pub(crate) logical: u64,
    pub(crate) run: DeviceRun,
}

/// Where an extent would join a neighbour.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Wish {
    pub(crate) device: DeviceIndex,
    pub(crate) extent: u64,
    /// Logical extents between, plus one.
    pub(crate) distance: u64,
}

#[derive(Clone, Default, Debug)]
pub(crate) struct VolumeMap {
    chunks: BTreeMap<u64, Vec<MapRun>>,
    mapped: u64,
    /// Mapped extents by device, without zeros.
    on: BTreeMap<u8, u64>,
}

/// The index of the first run that ends after `at`.
fn place(runs: &[MapRun], at: u16) -> usize {
    runs.partition_point(|run| run.end() <= at)
}

fn split(logical: u64) -> (u64, u16) {
    // The remainder is below 512.
    (logical / MAP_CHUNK, (logical % MAP_CHUNK) as u16)
}

impl VolumeMap {
    pub(crate) fn mapped(&self) -> u64 {
        self.mapped
    }

    /// Mapped extents, recounted.
    pub(crate) fn count(&self) -> u64 {
        let runs = self.chunks.values().flatten();
        runs.map(|run| u64::from(run.count)).sum()
    }

    /// The number of chunks with mappings.
    pub(crate) fn chunks(&self) -> usize {
        self.chunks.len()
    }

    #[cfg(test)]
    pub(crate) fn miscount(&mut self) {
        self.mapped += 1;
    }

    /// The devices with mapped extents.
    pub(crate) fn devices(&self) -> impl Iterator<Item = DeviceIndex> {
        self.on.keys().map(|device| DeviceIndex(*device))
    }

    pub(crate) fn is_on(&self, device: DeviceIndex) -> bool {
        self.on.contains_key(&device.0)
    }

    fn count_in(&mut self, device: DeviceIndex, count: u64) {
        self.mapped += count;
        *self.on.entry(device.0).or_default() += count;
    }

    fn count_out(&mut self, device: DeviceIndex, count: u64) {
        self.mapped -= count;
        if let Entry::Occupied(mut on) = self.on.entry(device.0) {
            *on.get_mut() -= count;
            if *on.get() == 0 {
                on.remove();
            }
        }
    }

    pub(crate) fn chunk(&self, chunk: u64) -> &[MapRun] {
        self.chunks.get(&chunk).map_or(&[], Vec::as_slice)
    }

    pub(crate) fn load_chunk(&mut self, chunk: u64, runs: Vec<MapRun>) {
        for run in &runs {
            self.count_in(run.device, u64::from(run.count));
        }
        self.chunks.insert(chunk, runs);
    }

    pub(crate) fn get(&self, logical: u64) -> Option<(DeviceIndex, u64)> {
        let (chunk, at) = split(logical);
        let runs = self.chunk(chunk);
        let run = runs.get(place(runs, at))?;
        (run.start <= at).then(|| (run.device, run.extent + u64::from(at - run.start)))
    }

    /// Up to `limit` extents.
    pub(crate) fn run_at(&self, logical: u64, limit: u64) -> Option<DeviceRun> {
        let (device, first) = self.get(logical)?;
        let mut count = 0;
        while count < limit {
            let (chunk, at) = split(logical + count);
            let runs = self.chunk(chunk);
            let Some(run) = runs.get(place(runs, at)) else {
                break;
            };
            let continues = run.start <= at
                && run.device == device
                && run.extent + u64::from(at - run.start) == first + count;
            if !continues {
                break;
            }
            count += u64::from(run.end() - at);
        }
        Some(DeviceRun::new(device, first, count.min(limit)))
    }

    /// [`run_at`](Self::run_at), or [`hole_at`](Self::hole_at) if nothing is mapped there, in one
    /// search, as a fault may go through a thousand maps.
    pub(crate) fn run_or_hole(&self, logical: u64, limit: u64) -> Result<DeviceRun, u64> {
        let (chunk, at) = split(logical);
        let runs = self.chunk(chunk);
        match runs.get(place(runs, at)) {
            Some(run) if run.start <= at => self.run_at(logical, limit).ok_or(0),
            Some(run) => Err(u64::from(run.start - at).min(limit)),
            None if u64::from(at).saturating_add(limit) <= MAP_CHUNK => Err(limit),
            None => Err(self.hole_at(logical, limit)),
        }
    }

    /// Mapped ranges from `from` on, in order: at most `most`, in [`CHUNKS_AT_ONCE`] chunks. Also
    /// returns where to continue.
    pub(crate) fn mapped_from(&self, from: u64, most: usize) -> (Vec<Range<u64>>, Option<u64>) {
        let (first_chunk, at) = split(from);
        let mut ranges: Vec<Range<u64>> = Vec::new();
        for (seen, (chunk, runs)) in self.chunks.range(first_chunk..).enumerate() {
            let base = chunk * MAP_CHUNK;
            if seen == CHUNKS_AT_ONCE {
                return (ranges, Some(base));
            }
            let least = if *chunk == first_chunk { at } else { 0 };
            for run in runs.iter().filter_map(|run| run.clip(least, u16::MAX)) {
                let (start, end) = (base + u64::from(run.start), base + u64::from(run.end()));
                let is_full = ranges.len() == most;
                match ranges.last_mut() {
                    Some(last) if last.end == start => last.end = end,
                    _ if is_full => return (ranges, Some(start)),
                    _ => ranges.push(start..end),
                }
            }
        }
        (ranges, None)
    }

    /// Unmapped extents from `logical` on, up to `limit`.
    pub(crate) fn hole_at(&self, logical: u64, limit: u64) -> u64 {
        let (first_chunk, at) = split(logical);
        for (chunk, runs) in self.chunks.range(first_chunk..) {
            let base = chunk * MAP_CHUNK;
            if base >= logical.saturating_add(limit) {
                break;
            }
            let from = if *chunk == first_chunk { at } else { 0 };
            if let Some(run) = runs.get(place(runs, from)) {
                let next = base + u64::from(run.start.max(from));
                return next.saturating_sub(logical).min(limit);
            }
        }
        limit
    }

    /// Where an unmapped extent would continue the run before or after it, and that run's distance.
    /// Searches its chunk and the adjacent ends of the next.
    pub(crate) fn wishes(&self, logical: u64) -> [Option<Wish>; 2] {
        let (chunk, at) = split(logical);
        let runs = self.chunk(chunk);
        let place = place(runs, at);
        let wish = |run: &MapRun, extent, distance| Wish {
            device: run.device,
            extent,
            distance,
        };
        let before = match place.checked_sub(1).and_then(|before| runs.get(before)) {
            Some(run) => {
                let extent = run.extent + u64::from(at - run.start);
                Some(wish(run, extent, u64::from(at - run.end()) + 1))
            }
            None => chunk
                .checked_sub(1)
                .and_then(|before| self.chunk(before).last())
                .map(|run| {
                    let from = MAP_CHUNK + u64::from(at);
                    let extent = run.extent + from - u64::from(run.start);
                    wish(run, extent, from - u64::from(run.end()) + 1)
                }),
        };
        let after = match runs.get(place) {
            Some(run) => Some((run, u64::from(run.start - at))),
            None => self
                .chunk(chunk + 1)
                .first()
                .map(|run| (run, MAP_CHUNK - u64::from(at) + u64::from(run.start))),
        };
        let after = after.and_then(|(run, distance)| {
            let extent = run.extent.checked_sub(distance)?;
            Some(wish(run, extent, distance))
        });
        [before, after]
    }

    pub(crate) fn chunks_from(&self, chunk: u64) -> impl Iterator<Item = (u64, &[MapRun])> {
        self.chunks
            .range(chunk..)
            .map(|(chunk, runs)| (*chunk, runs.as_slice()))
    }

    /// Extents from `first` on, up to `count`, with at most `most` mapped ones.
    pub(crate) fn reach(&self, first: u64, count: u64, most: u64) -> u64 {
        let end = first.saturating_add(count);
        let mut left = most;
        for (chunk, runs) in self.chunks.range(first / MAP_CHUNK..) {
            let base = chunk * MAP_CHUNK;
            if base >= end {
                break;
            }
            let from = first.saturating_sub(base).min(MAP_CHUNK) as u16;
            let to = (end - base).min(MAP_CHUNK) as u16;
            for run in &runs[place(runs, from)..] {
                let Some(part) = run.clip(from, to) else {
                    break;
                };
                if u64::from(part.count) > left {
                    return base + u64::from(part.start) + left - first;
                }
                left -= u64::from(part.count);
            }
        }
        count
    }

    pub(crate) fn insert(&mut self, logical: u64, device: DeviceIndex, extent: u64) {
        self.insert_run(logical, DeviceRun::new(device, extent, 1));
    }

    pub(crate) fn insert_run(&mut self, logical: u64, run: DeviceRun) {
        let mut done = 0;
        while done < run.count {
            let (chunk, start) = split(logical + done);
            // At most a chunk.
            let count = (run.count - done).min(MAP_CHUNK - u64::from(start)) as u16;
            let new = MapRun {
                start,
                count,
                device: run.device,
                extent: run.first.0 + done,
            };
            self.insert_in(chunk, new);
            done += u64::from(count);
        }
    }

    fn insert_in(&mut self, chunk: u64, new: MapRun) {
        let runs = self.chunks.entry(chunk).or_default();
        let place = place(runs, new.start);
        debug_assert!(
            runs.get(place).is_none_or(|run| run.start >= new.end()),
            "mapped twice"
        );
        let joins_next = runs.get(place).is_some_and(|next| new.meets(next));
        let joins_before = place > 0 && runs[place - 1].meets(&new);
        match (joins_before, joins_next) {
            (true, true) => {
                runs[place - 1].count += new.count + runs[place].count;
                runs.remove(place);
            }
            (true, false) => runs[place - 1].count += new.count,
            (false, true) => {
                runs[place].start = new.start;
                runs[place].count += new.count;
                runs[place].extent = new.extent;
            }
            (false, false) => runs.insert(place, new),
        }
        self.count_in(new.device, u64::from(new.count));
    }

    pub(crate) fn within(&self, first: u64, count: u64) -> Vec<Mapping> {
        let end = first.saturating_add(count);
        let mut found = Vec::new();
        if first >= end {
            return found;
        }
        for (chunk, runs) in self.chunks.range(first / MAP_CHUNK..=(end - 1) / MAP_CHUNK) {
            let base = chunk * MAP_CHUNK;
            let from = first.saturating_sub(base).min(MAP_CHUNK) as u16;
            let to = (end - base).min(MAP_CHUNK) as u16;
            for run in &runs[place(runs, from)..] {
                let Some(part) = run.clip(from, to) else {
                    break;
                };
                found.push(Mapping {
                    logical: base + u64::from(part.start),
                    run: DeviceRun::new(part.device, part.extent, u64::from(part.count)),
                });
            }
        }
        found
    }

    /// Returns the removed mappings.
    pub(crate) fn remove(&mut self, first: u64, count: u64) -> Vec<Mapping> {
        let removed = self.within(first, count);
        let end = first.saturating_add(count);
        let mut last_chunk = None;
        for mapping in &removed {
            let chunk = mapping.logical / MAP_CHUNK;
            if last_chunk == Some(chunk) {
                continue;
            }
            last_chunk = Some(chunk);
            let base = chunk * MAP_CHUNK;
            let from = first.saturating_sub(base).min(MAP_CHUNK) as u16;
            let to = (end - base).min(MAP_CHUNK) as u16;
            let Some(runs) = self.chunks.get_mut(&chunk) else {
                continue;
            };
            let kept: Vec<MapRun> = runs
                .iter()
                .flat_map(|run| [run.clip(0, from), run.clip(to, MAP_CHUNK as u16)])
                .flatten()
                .collect();
            if kept.is_empty() {
                self.chunks.remove(&chunk);
            } else {
                *runs = kept;
            }
        }
        for mapping in &removed {
            self.count_out(mapping.run.device, mapping.run.count);
        }
        removed
    }

    /// One chunk's runs without the extents in `skip`.
    pub(crate) fn chunk_without(&self, chunk: u64, skip: &[u64]) -> Vec<MapRun> {
        let mut runs = self.chunk(chunk).to_vec();
        for logical in skip {
            let at = (logical % MAP_CHUNK) as u16;
            let place = place(&runs, at);
            if let Some(run) = runs.get(place).copied().filter(|run| run.start <= at) {
                let parts = [run.clip(0, at), run.clip(at + 1, MAP_CHUNK as u16)];
                runs.splice(place..=place, parts.into_iter().flatten());
            }
        }
        runs
    }
}

#[cfg(test)]
impl Mapping {
    pub(crate) fn extents(&self) -> impl Iterator<Item = (u64, ExtentIndex)> + use<> {
        let (logical, first) = (self.logical, self.run.first.0);
        (0..self.run.count).map(move |at| (logical + at, ExtentIndex(first + at)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[derive(Clone, Debug)]
    enum Step {
        Insert(u64, u8, u64, u64),
        Remove(u64, u64),
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            3 => (0u64..1200, 0u8..2, 0u64..8, prop_oneof![Just(1), 1u64..80])
                .prop_map(|(l, d, e, n)| Step::Insert(l, d, e, n)),
            1 => (0u64..1200, 0u64..700).prop_map(|(f, c)| Step::Remove(f, c)),
        ]
    }

    proptest! {
        #[test]
        fn map_is_a_map(steps in prop::collection::vec(step(), 1..120), probes in prop::collection::vec((0u64..1300, 1u64..900), 8)) {
            let mut map = VolumeMap::default();
            let mut model: BTreeMap<u64, (u8, u64)> = BTreeMap::new();
            for step in steps {
                match step {
                    // So that runs join and split.
                    Step::Insert(logical, device, shift, count) => {
                        if model.range(logical..logical + count).next().is_some() { continue; }
                        let extent = logical + if shift < 6 { 0 } else { shift * 5000 };
                        map.insert_run(logical, DeviceRun::new(DeviceIndex(device), extent, count));
                        model.extend((0..count).map(|n| (logical + n, (device, extent + n))));
                    }
                    Step::Remove(first, count) => {
                        let removed = map.remove(first, count);
                        let flat: Vec<_> = removed.iter()
                            .flat_map(|m| m.extents().map(move |(l, e)| (l, (m.run.device.0, e.0))))
                            .collect();
                        let expected: Vec<_> = model.range(first..first + count).map(|(l, e)| (*l, *e)).collect();
                        prop_assert_eq!(flat, expected);
                        model.retain(|l, _| *l < first || *l >= first + count);
                    }
                }
            }
            prop_assert_eq!(map.mapped(), model.len() as u64);
            for device in 0..2 {
                let there = model.values().any(|(on, _)| *on == device);
                prop_assert_eq!(map.is_on(DeviceIndex(device)), there);
            }
            for logical in 0..1300 {
                prop_assert_eq!(map.get(logical).map(|(d, e)| (d.0, e)), model.get(&logical).copied());
            }
            for (at, limit) in probes {
                let hole = (at..at + limit).take_while(|l| !model.contains_key(l)).count() as u64;
                prop_assert_eq!(map.hole_at(at, limit), hole);
                let there = map.run_at(at, limit);
                prop_assert_eq!(map.run_or_hole(at, limit), there.ok_or(hole));
                for most in [1, 7, 100] {
                    let mapped = |n: &u64| model.range(at..=at + n).count() as u64 <= most;
                    let reach = (0..limit).take_while(mapped).count() as u64;
                    prop_assert_eq!(map.reach(at, limit, most), reach);
                }
                let (mut ranges, mut next) = (Vec::new(), Some(at));
                while let Some(from) = next {
                    let (some, more) = map.mapped_from(from, 3);
                    prop_assert!(some.len() <= 3);
                    ranges.extend(some);
                    next = more;
                }
                prop_assert!(ranges.windows(2).all(|pair| pair[0].end < pair[1].start));
                let flat: Vec<u64> = ranges.into_iter().flatten().collect();
                let expected: Vec<u64> = model.range(at..).map(|(l, _)| *l).collect();
                prop_assert_eq!(flat, expected);
                let run = map.run_at(at, limit).map_or(0, |run| run.count);
                let expected = model.get(&at).map_or(0, |(d, e)| {
                    (0..limit).take_while(|n| model.get(&(at + n)) == Some(&(*d, e + n))).count() as u64
                });
                prop_assert_eq!(run, expected);
                let skip: Vec<u64> = (at..at + limit).filter(|l| l / MAP_CHUNK == at / MAP_CHUNK).collect();
                let mut without = map.clone();
                for logical in &skip { without.remove(*logical, 1); }
                prop_assert_eq!(map.chunk_without(at / MAP_CHUNK, &skip), without.chunk(at / MAP_CHUNK));
            }
            for (_, runs) in map.chunks_from(0) {
                prop_assert!(runs.windows(2).all(|pair| pair[0].end() <= pair[1].start));
                prop_assert!(runs.len() == 1 || !runs.is_empty());
            }
        }
    }
}
