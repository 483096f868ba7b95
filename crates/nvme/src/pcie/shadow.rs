//! Shadow doorbells and event indexes (Base 2.0, 5.8 and annex B.5).
//!
//! Purpose: a host writes its doorbells to memory, and to the register only when the controller has asked
//! for it by an event index. Design: while the controller looks by itself, event indexes are values that no
//! doorbell passes; before it sleeps, they are the values that it has seen. Does NOT touch memory.

/// An event index that asks for nothing: no queue has it as an index, so a host passes it once in a lap at most.
pub const QUIET: u32 = 0xFFFF;

/// Whether a host that moves a doorbell from `old` to `new` writes the register too.
pub fn rings(event_index: u16, new: u16, old: u16) -> bool {
    new.wrapping_sub(event_index).wrapping_sub(1) < new.wrapping_sub(old)
}

#[cfg(test)]
mod tests {
    use super::*;

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
