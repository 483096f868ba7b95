//! What a dead engine recorded of one queue, read once.
//!
//! **Design.** Every word of the region is loaded exactly once, into private memory, and bounded on the
//! way; what fails its check is damage. Bytes of the engine's memory file stay where they are: nothing
//! of a dead process changes them but devices that still read into its buffers, which are not looked at.
//!
//! **Not here:** whether the records fit together ([`super::queue`]).

use super::items::Extent;
use super::stream::Stretch;
use super::{Damage, OldBytes};
use forebay_nvme::Sqe;
use forebay_xlate::boundary::region::check::{BufferRef, Seed};
use forebay_xlate::boundary::region::item::{MAX_ITEMS, NO_SLOT};
use forebay_xlate::boundary::region::queue::{InData, Kept};
use forebay_xlate::boundary::region::{
    Asked, CommandRecord, CommandStage, CommandState, Item, MAX_LISTS, MAX_QUEUE_ENTRIES,
    MAX_REACTORS, QueueConstants, QueueRecord, RECEIVE_AT, RECEIVE_BYTES, Region, Span, queue_use,
};
use std::sync::atomic::Ordering::{Acquire, Relaxed};

/// A command that had a slot.
#[derive(Clone, Debug)]
pub(super) struct OldCommand {
    /// Its slot.
    pub slot: u16,
    /// How far it was.
    pub state: CommandState,
    /// Its number on the queue.
    pub number: u64,
    /// The stream's position after its capsule.
    pub end: u64,
    /// When it was taken.
    pub taken_ns: u64,
    /// As it came.
    pub sqe: Sqe,
    /// Its data from the host.
    pub buffer: Option<BufferRef>,
    /// How far data has come that was asked for.
    pub asked: Asked,
    /// The transmit position after the R2T.
    pub asked_at: u64,
}

impl OldCommand {
    fn read(record: &CommandRecord, seed: Seed, slot: u16) -> Result<Option<Self>, Damage> {
        let word = record.state.load(Acquire);
        if word == CommandState::FREE.0 {
            return Ok(None);
        }
        let number = record.number.load(Relaxed);
        let state = CommandState::open(word, number).map_err(|_| Damage("a command's state"))?;
        let (sqe, end) = (record.sqe_words(), record.end.load(Relaxed));
        if CommandRecord::check_of(seed, slot, &sqe, number, end) != record.check.load(Relaxed) {
            return Err(Damage("a command's check"));
        }
        let buffer = match record.buffer.load(Relaxed) {
            0 => None,
            word => Some(
                BufferRef::of_word(word, seed, slot, number).ok_or(Damage("a command's buffer"))?,
            ),
        };
        Ok(Some(Self {
            slot,
            state,
            number,
            end,
            taken_ns: record.taken_ns.load(Relaxed),
            sqe: zerocopy::transmute!(sqe),
            buffer,
            asked: Asked::of_word(record.asked.load(Relaxed)),
            asked_at: record.asked_at.load(Relaxed),
        }))
    }

    /// Whether its data still comes from the host.
    pub(super) fn is_asked(&self) -> bool {
        self.state.stage() == Some(CommandStage::Asked)
    }
}

/// The last answer that belonged to no slot.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct OldOdd {
    /// The queue's number with it.
    pub number: u64,
    /// The transmit position after the answer.
    pub tx: u64,
    /// The receive position after the command.
    pub taken: u64,
}

/// A published item.
#[derive(Clone, Copy, Debug)]
pub(super) struct OldItem<'a> {
    /// As recorded.
    pub item: Item,
    /// Its header.
    pub header: &'a [u8],
    /// What of its buffer is sent.
    pub data: &'a [u8],
}

impl OldItem<'_> {
    /// Its place in the stream.
    pub(super) fn extent(&self) -> Extent {
        Extent {
            start: self.item.start,
            len: (self.header.len() + self.data.len()) as u64,
        }
    }
}

/// See the module's text.
#[derive(Clone, Debug)]
pub(super) struct OldQueue<'a> {
    /// Its slot.
    pub queue: u32,
    /// One of [`queue_use`].
    pub used: u64,
    /// What never changed.
    pub constants: QueueConstants,
    /// Commands taken.
    pub number: u64,
    /// The position up to which PDUs are taken.
    pub taken: u64,
    /// Bytes kept.
    pub kept: Option<Stretch<'a>>,
    /// Bytes in the reactor's receive buffer, if it received for this queue last.
    pub received: Option<Stretch<'a>>,
    /// The data that a PDU brings: it counts while the position is within it.
    pub data: InData,
    /// The last answer without a slot.
    pub odd: OldOdd,
    /// Where the transmitted stream was when nothing was published.
    pub tx_at: u64,
    /// What was published.
    pub items: Vec<OldItem<'a>>,
    /// The commands that had slots, by slot.
    pub commands: Vec<OldCommand>,
}

/// The commands of a queue, sound or not.
pub(super) fn commands(
    region: &Region,
    queue: u32,
) -> impl Iterator<Item = (u16, Result<Option<OldCommand>, Damage>)> {
    let seed = Seed::commands(region.header().key.load(Relaxed), queue);
    (0..)
        .zip(region.commands(queue as usize))
        .map(move |(slot, record)| (slot, OldCommand::read(record, seed, slot)))
}

impl<'a> OldQueue<'a> {
    /// Reads a queue's records.
    ///
    /// # Errors
    /// A record is not what was recorded there.
    pub(super) fn read(
        region: &Region,
        memory: &'a (impl OldBytes + ?Sized),
        queue: u32,
    ) -> Result<Self, Damage> {
        let record = (region.queues().get(queue as usize)).ok_or(Damage("no such queue"))?;
        let used = record.used.load(Acquire);
        let key = region.header().key.load(Relaxed);
        let constants = record
            .constants(key, queue)
            .ok_or(Damage("a queue's constants"))?;
        let entries = constants.identity.entries;
        if entries == 0 || usize::from(entries) > MAX_QUEUE_ENTRIES {
            return Err(Damage("a queue's entries"));
        }
        let commands = commands(region, queue)
            .filter_map(|(slot, command)| {
                let command = command.transpose()?;
                Some(match slot < entries {
                    true => command,
                    false => Err(Damage("a command beyond the queue's entries")),
                })
            })
            .collect::<Result<Vec<_>, _>>()?;
        let data_slot = record.data_slot.load(Acquire);
        Ok(Self {
            queue,
            used,
            number: record.number.load(Relaxed),
            taken: record.taken.load(Acquire),
            kept: kept(record, memory, constants.keep)?,
            received: received(region, memory, queue, constants.reactor),
            data: InData {
                begin: record.data_begin.load(Acquire),
                end: record.data_end.load(Acquire),
                slot: data_slot as u16,
                offset_bytes: (data_slot >> 32) as u32,
                digest: data_slot >> 16 & 1 == 1,
            },
            odd: OldOdd {
                number: record.odd_number.load(Relaxed),
                tx: record.odd_tx.load(Relaxed),
                taken: record.odd_taken.load(Relaxed),
            },
            tx_at: record.tx_at.load(Relaxed),
            items: items(region, memory, queue, record.tx_span.load(Acquire))?,
            commands,
            constants,
        })
    }

    /// Whether it serves.
    pub(super) fn is_live(&self) -> bool {
        self.used == queue_use::LIVE
    }
}

fn kept<'a>(
    record: &QueueRecord,
    memory: &'a (impl OldBytes + ?Sized),
    keep: u32,
) -> Result<Option<Stretch<'a>>, Damage> {
    let kept = Kept::of_word(record.kept.load(Acquire));
    if kept.bytes == 0 {
        return Ok(None);
    }
    let at = record.kept_at[usize::from(kept.which & 1)].load(Relaxed);
    let bytes = memory
        .kept(keep, kept.which)
        .and_then(|all| all.get(..kept.bytes as usize))
        .ok_or(Damage("kept bytes"))?;
    Ok(Some(Stretch { at, bytes }))
}

fn received<'a>(
    region: &Region,
    memory: &'a (impl OldBytes + ?Sized),
    queue: u32,
    reactor: u32,
) -> Option<Stretch<'a>> {
    if reactor as usize >= MAX_REACTORS {
        return None;
    }
    let record = region.reactors().get(reactor as usize)?;
    if record.rx_queue.load(Acquire) != u64::from(queue) + 1 {
        return None;
    }
    Some(Stretch {
        at: record.rx_base.load(Relaxed),
        bytes: memory
            .receive(reactor)?
            .get(RECEIVE_AT..RECEIVE_AT + RECEIVE_BYTES)?,
    })
}

fn items<'a>(
    region: &Region,
    memory: &'a (impl OldBytes + ?Sized),
    queue: u32,
    span: u64,
) -> Result<Vec<OldItem<'a>>, Damage> {
    let span = Span::of_word(span, MAX_LISTS).map_err(|_| Damage("a list of items"))?;
    let Some(span) = span else {
        return Ok(Vec::new());
    };
    let seed = Seed::items(region.header().key.load(Relaxed), queue);
    let records = region.items(usize::from(span.list));
    let headers = memory
        .headers(u32::from(span.list))
        .ok_or(Damage("a list's headers"))?;
    let read = |place: u16| {
        let damage = Damage("an item");
        let record = records.get(usize::from(place)).ok_or(damage)?;
        let of = |item: &Item| {
            let from = usize::from(item.header_at);
            headers.get(from..from + usize::from(item.header_bytes))
        };
        let item = record.sound(seed, place, of).map_err(|_| damage)?;
        let data = match item.buffer {
            Some(buffer) => memory.buffer(buffer).ok_or(damage)?,
            None => &[],
        };
        let data = data.get(..item.data_bytes as usize).ok_or(damage)?;
        if item.ends != NO_SLOT && usize::from(item.ends) >= MAX_QUEUE_ENTRIES {
            return Err(damage);
        }
        Ok(OldItem {
            item,
            header: of(&item).ok_or(damage)?,
            data,
        })
    };
    debug_assert!(span.count() <= MAX_ITEMS);
    span.places().map(read).collect()
}
