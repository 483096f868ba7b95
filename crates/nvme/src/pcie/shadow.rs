//! Shadow doorbells and event indexes (Base 2.0, 5.8 and annex B.5).
//!
//! Purpose: a host writes its doorbells to memory, and to the register only when the controller has asked
//! for it by an event index. Design: while the controller looks by itself, event indexes stay behind what it has
//! seen, where no doorbell comes before a lap is over; before it sleeps, they are the values that it has seen.
//! Does NOT touch memory.

/// An event index that asks for nothing: no queue has it as an index, so a host passes it once in a lap at most.
pub const QUIET: u32 = 0xFFFF;

/// An event index that asks for nothing, of a queue with so many entries whose doorbell was seen at `seen`: a host passes it when
/// it is a lap ahead. To be set anew before that.
#[inline]
#[must_use]
pub fn behind(seen: u32, entries: u32) -> u32 {
    match seen {
        0 => entries.saturating_sub(1),
        seen => seen - 1,
    }
}

/// Whether a host that moves a doorbell from `old` to `new` writes the register too.
pub fn rings(event_index: u16, new: u16, old: u16) -> bool {
    new.wrapping_sub(event_index).wrapping_sub(1) < new.wrapping_sub(old)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_set_anew_in_each_lap_is_never_passed() {
        for entries in [8u32, 129, 1024] {
            let (mut tail, mut seen) = (0, 0);
            let mut index = behind(seen, entries);
            let (mut rang, mut rang_quiet) = (0, 0);
            for _ in 0..100 * entries {
                // Half of the queue is in hand.
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
    fn who_asked_is_told_of_the_next_change_and_who_did_not_is_left_alone() {
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
