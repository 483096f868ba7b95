//! Finds the rest of a queue's work, without side effects, from its records and the kernel's
//! counters.
//!
//! **Design.** It relies only on the order of the dead engine's stores (`docs/src/takeover.md`); a
//! contradiction is damage. **Not here:** controllers and exports ([`super::plan`]).

use super::counters::SocketFacts;
use super::items::{Sent, split};
use super::snapshot::{OldCommand, OldQueue};
use super::stream::{Stretch, gather};
use super::{Damage, FenceSet, MAX_ATTEMPTS, Next, OldBytes};
use forebay_nvme::io::{FUSE_FIRST, FUSE_SECOND};
use forebay_nvme::tcp::DIGEST_BYTES;
use forebay_xlate::DeviceIndex;
use forebay_xlate::boundary::region::item::NO_SLOT;
use forebay_xlate::boundary::region::queue::InData;
use forebay_xlate::boundary::region::{
    Asked, AskedAt, CommandStage, MAX_QUEUE_ENTRIES, R2T_PART_BYTES, RECEIVE_BYTES,
};

const BEYOND: Damage = Damage("data is larger than its buffer");

#[derive(Debug)]
pub(super) struct Converted {
    /// Position up to which PDUs are taken.
    pub taken: u64,
    /// Commands taken.
    pub number: u64,
    /// Bytes received after `taken`.
    pub unread: Vec<u8>,
    /// Taken but still in the socket: the Connect.
    pub in_socket: u64,
    pub data: Option<InData>,
    pub sent: Sent,
    /// Unfinished commands, ordered by number.
    pub commands: Vec<(OldCommand, Next)>,
}

/// Converts a queue. `blamed`: its command that killed the engine.
///
/// # Errors
/// The records contradict each other.
pub(super) fn convert_queue(
    old: &OldQueue,
    memory: &(impl OldBytes + ?Sized),
    facts: SocketFacts,
    blamed: Option<u16>,
) -> Result<Converted, Damage> {
    let sent = split(&old.items.extents(), old.tx_at, facts.accepted)?;
    let answers = Answers::read(old, sent.items)?;

    let mut commands: Vec<OldCommand> = (old.commands.iter())
        .filter(|c| !answers.are_sent(c.slot))
        .cloned()
        .collect();
    commands.sort_by_key(|c| c.number);
    let (mut taken, number) = position(old, &commands, sent.published)?;

    let mut data = None;
    if old.data.begin <= taken && taken < old.data.end {
        let command = (commands.iter_mut())
            .find(|c| c.slot == old.data.slot)
            .ok_or(Damage("data belongs to no command"))?;
        data = within(
            old,
            command,
            &mut taken,
            facts.consumed,
            answers.is_unsent(old.data.slot),
        )?;
    }

    let in_socket = taken.saturating_sub(facts.consumed);
    // Only a Connect is recorded before it is read.
    if in_socket > 0 && (number != 1 || !commands.is_empty() || facts.consumed != 0) {
        return Err(Damage("more was taken than was read"));
    }
    let mut unread = Vec::new();
    if in_socket == 0 {
        let stretches: Vec<Stretch> = [old.kept, old.received].into_iter().flatten().collect();
        let len = facts.consumed - taken;
        if len > RECEIVE_BYTES as u64 {
            return Err(Damage("there are more unread bytes than can be kept"));
        }
        unread.resize(len as usize, 0);
        gather(taken, &stretches, memory, &mut unread)?;
    }

    let commands = commands
        .into_iter()
        .map(|mut command| {
            if blamed == Some(command.slot) && !answers.is_unsent(command.slot) {
                let attempts = command.state.attempts().saturating_add(1);
                command.state = command.state.with_attempts(attempts);
            }
            let unsent = answers.is_unsent(command.slot);
            if command.is_asked() && !unsent && data.is_none_or(|d| d.slot != command.slot) {
                settle_asked(&mut command, sent.published);
            }
            let next = next(&command, unsent)?;
            Ok((command, next))
        })
        .collect::<Result<Vec<_>, Damage>>()?;
    pairs(&commands)?;
    Ok(Converted {
        taken,
        number,
        unread,
        in_socket,
        data,
        sent,
        commands,
    })
}

struct Answers {
    /// By slot: 1 sent, 2 unsent.
    of: [u8; MAX_QUEUE_ENTRIES],
}

impl Answers {
    fn read(old: &OldQueue, sent: usize) -> Result<Self, Damage> {
        let mut of = [0; MAX_QUEUE_ENTRIES];
        for (i, item) in old.items.items.iter().enumerate() {
            let slot = item.ends;
            if slot == NO_SLOT {
                continue;
            }
            let of = of
                .get_mut(usize::from(slot))
                .filter(|of| **of == 0)
                .ok_or(Damage("a command is answered twice"))?;
            *of = if i < sent { 1 } else { 2 };
            let known = old.commands.iter().any(|c| c.slot == slot);
            // The slot of a sent answer may be free already.
            if i >= sent && !known {
                return Err(Damage("an answer belongs to no command"));
            }
        }
        Ok(Self { of })
    }

    fn are_sent(&self, slot: u16) -> bool {
        self.of.get(usize::from(slot)) == Some(&1)
    }

    fn is_unsent(&self, slot: u16) -> bool {
        self.of.get(usize::from(slot)) == Some(&2)
    }
}

/// The stream position and the number of commands. A PDU's records are stored before the position
/// that makes them valid, so at most one is ahead.
fn position(old: &OldQueue, commands: &[OldCommand], published: u64) -> Result<(u64, u64), Damage> {
    let (mut taken, mut number) = (old.taken, old.number);
    for pair in commands.windows(2) {
        if pair[0].number >= pair[1].number || pair[0].end >= pair[1].end {
            return Err(Damage("commands are out of order"));
        }
    }
    let mut ahead = 0;
    for command in commands {
        if command.end > old.taken {
            ahead += 1;
            taken = command.end;
            number = number.max(command.number);
        } else if command.number > old.number {
            return Err(Damage("a command's number is invalid"));
        }
    }
    let odd = old.odd;
    // Its answer is published, so it is taken. Otherwise it is taken and answered again.
    if odd.taken > old.taken && odd.tx <= published {
        ahead += 1;
        taken = taken.max(odd.taken);
        number = number.max(odd.number);
    }
    if ahead > 1 || number > old.number.saturating_add(1) {
        return Err(Damage("more than one command is ahead of the stream"));
    }
    Ok((taken, number))
}

/// The stream stopped within a PDU's data, or before the record of its last byte. Moves `taken`
/// over bytes that bypassed the receive buffer. Returns the data if more is to come.
fn within(
    old: &OldQueue,
    command: &mut OldCommand,
    taken: &mut u64,
    consumed: u64,
    answered: bool,
) -> Result<Option<InData>, Damage> {
    let data = old.data;
    let digest = if data.digest { DIGEST_BYTES as u64 } else { 0 };
    let len = (data.end - data.begin)
        .checked_sub(digest)
        .filter(|len| *len <= u64::from(u32::MAX))
        .ok_or(Damage("the length of a PDU's data is invalid"))?;
    if !command.is_asked() || answered {
        // All data has come.
        *taken = data.end;
        return Ok(None);
    }
    let room = command.buffer.map_or(0, |b| u64::from(b.len_bytes));
    if u64::from(data.offset_bytes) + len > room {
        return Err(BEYOND);
    }
    let all = (command.asked)
        .up_to(data.offset_bytes, data.offset_bytes + len as u32)
        .ok_or(BEYOND)?;
    let end = data.begin + len;
    // The data went straight into the command's buffer. Bytes received after it begin where it
    // ends.
    if let Some(received) = old.received
        && received.at > *taken
        && received.at <= end
        && old.kept.is_none_or(|kept| !kept.has(*taken))
    {
        *taken = received.at.min(consumed).max(*taken);
    }
    if *taken == data.end {
        // The last byte came but was not recorded.
        command.asked = all;
        return Ok(None);
    }
    let placed = (*taken).min(end) - data.begin;
    // Only whole PDUs count.
    command.asked = (command.asked.up_to(data.offset_bytes, data.offset_bytes)).ok_or(BEYOND)?;
    debug_assert!(placed <= len);
    Ok(Some(data))
}

/// Settles a command with an R2T, between two PDUs of its data.
fn settle_asked(command: &mut OldCommand, published: u64) {
    let complete = (command.buffer).is_some_and(|b| command.asked.bytes() == b.len_bytes);
    let AskedAt { at, r2ts } = command.asked_at;
    if at > published && r2ts == 1 {
        // The R2T was not sent: send it again.
        command.state = command.state.with_stage(CommandStage::Taken);
        command.buffer = None;
    } else if at > published {
        // The earlier ones were sent.
        command.asked_at = AskedAt {
            at: published,
            r2ts: r2ts - 1,
        };
    } else if complete {
        // Completion is recorded only after the stream's position.
        command.state = command.state.with_stage(CommandStage::Taken);
    }
}

/// Whether data is still to come; false if more came than the R2Ts asked for.
fn lacks_data(asked: Asked, r2ts: u8, room_bytes: u32) -> bool {
    if let Asked::Parts(dwords) = asked {
        let mut left = room_bytes;
        for (_, dwords) in (0..r2ts).zip(dwords) {
            let len = left.min(R2T_PART_BYTES);
            if len == 0 || u32::from(dwords) * 4 > len {
                return false;
            }
            left -= len;
        }
        if dwords.iter().skip(usize::from(r2ts)).any(|d| *d > 0) {
            return false;
        }
    }
    asked.bytes() < room_bytes
}

fn next(command: &OldCommand, answered: bool) -> Result<Next, Damage> {
    if answered {
        return Ok(Next::Answered);
    }
    let poisoned = command.state.attempts() >= MAX_ATTEMPTS;
    Ok(match command.state.stage() {
        Some(CommandStage::Kept) => Next::Kept,
        // It cannot be ended before its data has come.
        Some(CommandStage::Asked | CommandStage::AskedInParts) if poisoned => {
            return Err(Damage("a command's data crashed engines repeatedly"));
        }
        Some(CommandStage::Asked | CommandStage::AskedInParts) => {
            let (asked, r2ts) = (command.asked, command.asked_at.r2ts);
            if !lacks_data(asked, r2ts, command.buffer.map_or(0, |b| b.len_bytes)) {
                return Err(BEYOND);
            }
            Next::Data { asked, r2ts }
        }
        Some(CommandStage::Taken | CommandStage::Passed) if poisoned => Next::Poisoned,
        Some(CommandStage::Passed) => Next::Passed {
            fenced: devices(command),
        },
        Some(CommandStage::Taken) => Next::Begin {
            fenced: devices(command),
        },
        Some(CommandStage::Free) | None => {
            return Err(Damage("a command's stage is invalid"));
        }
    })
}

/// A passed command is the second of a pair; both are answered together.
fn pairs(commands: &[(OldCommand, Next)]) -> Result<(), Damage> {
    let half = |(command, next): &(OldCommand, Next), fuse, number| {
        command.sqe.fuse() == fuse && command.number == number && *next != Next::Answered
    };
    for (at, second) in commands.iter().enumerate() {
        if !matches!(second.1, Next::Passed { .. }) {
            continue;
        }
        let number = second.0.number;
        let first = at.checked_sub(1).and_then(|before| commands.get(before));
        let sound = half(second, FUSE_SECOND, number)
            && first.is_some_and(|first| half(first, FUSE_FIRST, number.wrapping_sub(1)));
        if !sound {
            return Err(Damage("a fused pair is inconsistent"));
        }
    }
    Ok(())
}

/// Where a dead engine may still work on a command.
pub(super) fn devices(command: &OldCommand) -> FenceSet {
    match (command.state.submitted_ever(), command.state.device()) {
        (false, _) => FenceSet::None,
        (true, Some(device)) => FenceSet::One(DeviceIndex(device)),
        (true, None) => FenceSet::Among(command.state.devices()),
    }
}
