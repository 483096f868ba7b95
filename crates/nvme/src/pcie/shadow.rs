//! Shadow doorbells and event indexes (Base 2.0, 5.8 and annex B.5).
//!
//! A host writes doorbells to memory, and the register only when an event index requests it. A
//! polling controller keeps event indexes where doorbells pass them at most once a lap; before
//! sleep it sets them to the last values.

/// Requests nothing: it is no queue's index, so a host passes it at most once a lap.
pub const QUIET: u32 = 0xFFFF;

/// Requests nothing until the host is a lap past `seen`; update it before that.
#[inline]
#[must_use]
pub fn behind(seen: u32, entries: u32) -> u32 {
    match seen {
        0 => entries.saturating_sub(1),
        seen => seen - 1,
    }
}

/// Whether a move from `old` to `new` also writes the register.
pub fn rings(event_index: u16, new: u16, old: u16) -> bool {
    new.wrapping_sub(event_index).wrapping_sub(1) < new.wrapping_sub(old)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_index_moved_in_each_lap_is_never_passed() {
        for entries in [8u32, 129, 1024] {
            let (mut tail, mut seen) = (0, 0);
            let mut index = behind(seen, entries);
            let (mut rang, mut rang_quiet) = (0, 0);
            for _ in 0..100 * entries {
                // Half of the queue is in flight.
                let next = (tail + 1) % entries;
                rang += u32::from(rings(index as u16, next as u16, tail as u16));
                rang_quiet += u32::from(rings(QUIET as u16, next as u16, tail as u16));
                tail = next;
                if (tail + entries - seen) % entries > entries / 2 {
                    seen = (seen + 1) % entries;
                }
                if (seen + entries - index) % entries > entries / 4 {
                    index = behind(seen, entries);
                }
            }
            assert_eq!((rang, rang_quiet), (0, 100), "{entries}");
        }
    }

    #[test]
    fn a_doorbell_rings_only_past_the_event_index() {
        for entries in [2u16, 7, 1024] {
            for seen in 0..entries {
                for step in 1..entries {
                    let next = (seen + step) % entries;
                    assert!(rings(seen, next, seen), "{entries} {seen} {next}");
                    if next > seen {
                        assert!(!rings(QUIET as u16, next, seen));
                    }
                }
            }
        }
    }
}
