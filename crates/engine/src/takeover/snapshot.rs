//! A dead engine's records of one queue, read once.
//!
//! **Design.** Each word is loaded exactly once into private memory and checked; a failed check is
//! damage. The memory file is read in place: only devices that still read into its buffers change
//! it, and those bytes are not used. **Not here:** whether records are consistent
//! ([`super::queue`]).

use super::items::Extent;
use super::stream::Stretch;
use super::{Damage, OldBytes};
use crate::memory::{KEEP_BYTES, headers_at, keep_at, receive_buffer_at};
use forebay_nvme::Sqe;
use forebay_xlate::boundary::region::check::{BufferRef, Seed};
use forebay_xlate::boundary::region::item::HEADER_BYTES;
use forebay_xlate::boundary::region::queue::{InData, Kept};
use forebay_xlate::boundary::region::{
    Asked, AskedAt, CommandRecord, CommandStage, CommandState, Item, MAX_LISTS, MAX_QUEUE_ENTRIES,
    QueueConstants, QueueRecord, RECEIVE_AT, RECEIVE_BYTES, Region, Span, rx_word,
};
use std::sync::atomic::Ordering::{Acquire, Relaxed};

#[derive(Clone, Debug)]
pub(super) struct OldCommand {
    pub slot: u16,
    pub state: CommandState,
    /// Position in the queue's order.
    pub number: u64,
    /// Stream position after its capsule.
    pub end: u64,
    pub taken_ns: u64,
    pub sqe: Sqe,
    pub buffer: Option<BufferRef>,
    /// Requested data that has come.
    pub asked: Asked,
    pub asked_at: AskedAt,
}

impl OldCommand {
    fn read(record: &CommandRecord, seed: Seed, slot: u16) -> Result<Option<Self>, Damage> {
        let word = record.state.load(Acquire);
        if word == CommandState::FREE.0 {
            return Ok(None);
        }
        let number = record.number.load(Relaxed);
        let state =
            CommandState::open(word, number).map_err(|_| Damage("a command's state is invalid"))?;
        let (sqe, end) = (record.sqe_words(), record.end.load(Relaxed));
        if CommandRecord::check_of(seed, slot, &sqe, number, end) != record.check.load(Relaxed) {
            return Err(Damage("a command's checksum is wrong"));
        }
        let buffer = match record.buffer.load(Relaxed) {
            0 => None,
            word => Some(
                BufferRef::of_word(word, seed, slot, number)
                    .ok_or(Damage("a command's buffer is invalid"))?,
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
            asked: Asked::of_word(record.asked.load(Relaxed), state.stage()),
            asked_at: AskedAt::of_word(record.asked_at.load(Relaxed)),
        }))
    }

    pub(super) fn is_asked(&self) -> bool {
        matches!(
            self.state.stage(),
            Some(CommandStage::Asked | CommandStage::AskedInParts)
        )
    }
}

/// The last answer without a slot.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct OldOdd {
    /// The queue's command number at that time.
    pub number: u64,
    /// Transmit position after the answer.
    pub tx: u64,
    /// Receive position after the command.
    pub taken: u64,
}

#[derive(Clone, Debug, Default)]
pub(super) struct OldItems {
    pub items: Vec<Item>,
    headers: Vec<u8>,
}

impl OldItems {
    pub(super) fn header(&self, item: &Item) -> &[u8] {
        let from = usize::from(item.header_at);
        let header = self
            .headers
            .get(from..from + usize::from(item.header_bytes));
        header.unwrap_or_default()
    }

    pub(super) fn extents(&self) -> Vec<Extent> {
        let of = |item: &Item| Extent {
            start: item.start,
            len: u64::from(item.header_bytes) + u64::from(item.data_bytes),
        };
        self.items.iter().map(of).collect()
    }
}

#[derive(Clone, Debug)]
pub(super) struct OldQueue {
    pub queue: u32,
    pub constants: QueueConstants,
    /// Commands taken.
    pub number: u64,
    /// Position up to which PDUs are taken.
    pub taken: u64,
    pub kept: Option<Stretch>,
    /// Bytes in the receive buffer, if the reactor received for this queue last.
    pub received: Option<Stretch>,
    /// The data of a PDU, valid while the position is within it.
    pub data: InData,
    pub odd: OldOdd,
    /// Transmit position when no item was published.
    pub tx_at: u64,
    pub items: OldItems,
    /// Ordered by slot.
    pub commands: Vec<OldCommand>,
}

pub(super) fn commands(
    region: &Region,
    queue: u32,
) -> impl Iterator<Item = (u16, Result<Option<OldCommand>, Damage>)> {
    let seed = Seed::commands(region.header().key.load(Relaxed), queue);
    (0..)
        .zip(region.commands(queue as usize))
        .map(move |(slot, record)| (slot, OldCommand::read(record, seed, slot)))
}

impl OldQueue {
    /// # Errors
    /// A record fails its check.
    pub(super) fn read(
        region: &Region,
        memory: &(impl OldBytes + ?Sized),
        queue: u32,
    ) -> Result<Self, Damage> {
        let record =
            (region.queues().get(queue as usize)).ok_or(Damage("there is no such queue"))?;
        let key = region.header().key.load(Relaxed);
        let constants = record
            .constants(key, queue)
            .ok_or(Damage("a queue's constants are invalid"))?;
        let entries = constants.identity.entries;
        if entries == 0 || usize::from(entries) > MAX_QUEUE_ENTRIES {
            return Err(Damage("a queue's number of entries is invalid"));
        }
        let commands = commands(region, queue)
            .filter_map(|(slot, command)| {
                let command = command.transpose()?;
                Some(command.and_then(|command| match command.buffer {
                    _ if slot >= entries => Err(Damage("a command is beyond the queue's entries")),
                    Some(buffer) if !is_there(memory, buffer) => {
                        Err(Damage("a command's buffer is invalid"))
                    }
                    _ => Ok(command),
                }))
            })
            .collect::<Result<Vec<_>, _>>()?;
        let data_slot = record.data_slot.load(Acquire);
        Ok(Self {
            queue,
            number: record.number.load(Relaxed),
            taken: record.taken.load(Acquire),
            kept: kept(record, constants.keep)?,
            received: received(region, queue, constants.reactor),
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
}

fn is_there(memory: &(impl OldBytes + ?Sized), buffer: BufferRef) -> bool {
    let last = buffer.offset_bytes + u64::from(buffer.len_bytes.saturating_sub(1));
    memory.read(last, &mut [0]).is_some()
}

fn kept(record: &QueueRecord, keep: u32) -> Result<Option<Stretch>, Damage> {
    let kept = Kept::of_word(record.kept.load(Acquire));
    if kept.bytes == 0 {
        return Ok(None);
    }
    let damage = Damage("the kept bytes are invalid");
    if kept.bytes as usize > KEEP_BYTES {
        return Err(damage);
    }
    Ok(Some(Stretch {
        at: record.kept_at[usize::from(kept.which & 1)].load(Relaxed),
        len: u64::from(kept.bytes),
        place: keep_at(keep, kept.which).ok_or(damage)?,
    }))
}

fn received(region: &Region, queue: u32, reactor: u32) -> Option<Stretch> {
    let record = region.reactors().get(reactor as usize)?;
    let word = record.rx_queue.load(Acquire);
    let at = record.rx_base.load(Relaxed);
    if word != rx_word(queue, at) {
        return None;
    }
    Some(Stretch {
        at,
        len: RECEIVE_BYTES as u64,
        place: receive_buffer_at(reactor as usize)? + RECEIVE_AT as u64,
    })
}

fn items(
    region: &Region,
    memory: &(impl OldBytes + ?Sized),
    queue: u32,
    span: u64,
) -> Result<OldItems, Damage> {
    let span = Span::of_word(span, MAX_LISTS).map_err(|_| Damage("a list of items is invalid"))?;
    let Some(span) = span else {
        return Ok(OldItems::default());
    };
    let damage = Damage("an item is invalid");
    let seed = Seed::items(region.header().key.load(Relaxed), queue);
    let records = region.items(usize::from(span.list));
    let mut old = OldItems {
        items: Vec::new(),
        headers: vec![0; HEADER_BYTES],
    };
    memory
        .read(headers_at(span.list), &mut old.headers)
        .ok_or(damage)?;
    for place in span.places() {
        let record = records.get(usize::from(place)).ok_or(damage)?;
        let item = record.sound(seed, place).map_err(|_| damage)?;
        let from = usize::from(item.header_at);
        if from + usize::from(item.header_bytes) > old.headers.len() {
            return Err(damage);
        }
        if item.buffer.is_some_and(|buffer| !is_there(memory, buffer)) {
            return Err(damage);
        }
        old.items.push(item);
    }
    Ok(old)
}
