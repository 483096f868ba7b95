//! Extents that read as zeros whatever the layers below hold: a tenant deallocated them.
//!
//! A bit for each, in chunks like a map's. A mapping of the same map has precedence.

use super::map::MAP_CHUNK;
use std::collections::BTreeMap;

const WORDS: usize = (MAP_CHUNK / 64) as usize;
/// The bits of a chunk.
pub(crate) type HiddenChunk = [u64; WORDS];

#[derive(Clone, Default, Debug)]
pub(crate) struct Hidden {
    /// Without empty chunks.
    chunks: BTreeMap<u64, HiddenChunk>,
}

fn place(logical: u64) -> (u64, usize, u64) {
    let at = logical % MAP_CHUNK;
    (logical / MAP_CHUNK, (at / 64) as usize, 1 << (at % 64))
}

impl Hidden {
    pub(crate) fn is_empty(&self) -> bool {
        self.chunks.is_empty()
    }

    pub(crate) fn len(&self) -> usize {
        self.chunks.len()
    }

    pub(crate) fn chunk(&self, chunk: u64) -> Option<&HiddenChunk> {
        self.chunks.get(&chunk)
    }

    pub(crate) fn chunks_from(&self, chunk: u64) -> impl Iterator<Item = u64> {
        self.chunks.range(chunk..).map(|(chunk, _)| *chunk)
    }

    pub(crate) fn load_chunk(&mut self, chunk: u64, bits: HiddenChunk) {
        if bits.iter().any(|word| *word != 0) {
            self.chunks.insert(chunk, bits);
        }
    }

    pub(crate) fn remove_chunk(&mut self, chunk: u64) -> Option<HiddenChunk> {
        self.chunks.remove(&chunk)
    }

    pub(crate) fn contains(&self, logical: u64) -> bool {
        let (chunk, word, bit) = place(logical);
        self.chunk(chunk).is_some_and(|bits| bits[word] & bit != 0)
    }

    pub(crate) fn hide(&mut self, logical: u64) {
        let (chunk, word, bit) = place(logical);
        self.chunks.entry(chunk).or_default()[word] |= bit;
    }

    /// Whether an extent is hidden, and for how many from it on, up to `limit`, the same holds.
    pub(crate) fn run_at(&self, logical: u64, limit: u64) -> (bool, u64) {
        let is_hidden = self.contains(logical);
        let end = logical.saturating_add(limit);
        let mut at = logical;
        while at < end {
            let (chunk, word, bit) = place(at);
            let Some(bits) = self.chunk(chunk) else {
                if is_hidden {
                    break;
                }
                // On to the next chunk with hidden extents.
                let next = self.chunks.range(chunk..).next();
                at = next.map_or(end, |(chunk, _)| chunk * MAP_CHUNK);
                continue;
            };
            let same = if is_hidden { !bits[word] } else { bits[word] };
            let other = same & !(bit - 1);
            if other != 0 {
                at = at - at % 64 + u64::from(other.trailing_zeros());
                break;
            }
            at = at - at % 64 + 64;
        }
        (is_hidden, at.min(end) - logical)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    proptest! {
        #[test]
        fn hidden_extents_are_a_set(
            hidden in prop::collection::vec((0u64..1600, 1u64..90), 0..12),
            probes in prop::collection::vec((0u64..1700, 1u64..1400), 12),
        ) {
            let mut set = Hidden::default();
            let mut model = BTreeSet::new();
            for logical in hidden.into_iter().flat_map(|(first, count)| first..first + count) {
                set.hide(logical);
                model.insert(logical);
            }
            for (at, limit) in probes {
                let is_hidden = model.contains(&at);
                let run = (at..at + limit).take_while(|l| model.contains(l) == is_hidden).count();
                prop_assert_eq!(set.run_at(at, limit), (is_hidden, run as u64));
            }
            for chunk in set.chunks_from(0).collect::<Vec<_>>() {
                let bits = set.remove_chunk(chunk).unwrap();
                prop_assert!(bits.iter().any(|word| *word != 0));
            }
            prop_assert!(set.is_empty());
        }
    }
}
