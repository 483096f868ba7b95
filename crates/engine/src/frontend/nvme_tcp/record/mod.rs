//! All stores to a queue's records in the state region, for a successor.
//!
//! A successor reads them, and asks the kernel how much of each stream was consumed and accepted. A
//! killed thread has carried out a prefix of its program, so program order is enough: all stores
//! are `Release`, which costs nothing here. Each function is one step of the specification
//! (`docs/src/takeover.md`); its last store validates the others. No other code stores these words.
//! Without [`RECORDS`] the I/O path's functions do nothing, so that their cost can be measured.
//!
//! **Not here:** the layout ([`forebay_xlate::boundary::region`]), the order of steps, controllers
//! ([`super::controllers`]).

use forebay_nvme::tcp::{MIN_MAX_H2C_DATA_BYTES, Phase, Role, TcpParams};
use forebay_xlate::boundary::region::check::{BufferRef, Seed};
use forebay_xlate::boundary::region::command::{Asked, AskedAt, R2T_PARTS};
use forebay_xlate::boundary::region::item::{ItemRecord, MAX_ITEMS, Span};
use forebay_xlate::boundary::region::queue::{InData, Kept};
use forebay_xlate::boundary::region::{
    Blame, CommandRecord, CommandStage, CommandState, MAX_QUEUE_ENTRIES, QueueConstants,
    QueueRecord, RECORDS, ReactorRecord, Region, queue_use, rx_word,
};
use forebay_xlate::kill_point;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Relaxed, Release};

/// The largest MAXH2CDATA in a record.
const MAX_RECORDED_H2C_BYTES: u64 = 1 << 30;

pub(crate) fn params_word(params: &TcpParams) -> u64 {
    u64::from(params.header_digest)
        | u64::from(params.data_digest) << 1
        | (params.max_r2t.clamp(1, R2T_PARTS as u64) - 1) << 2
        | u64::from(params.host_alignment_bytes) << 8
        | u64::from(params.controller_alignment_bytes) << 16
        | u64::from(params.max_h2c_data_bytes) << 24
}

/// Decodes that word; `None` if it is invalid.
pub(crate) fn params_of_word(word: u64) -> Option<TcpParams> {
    let (host, controller, max_h2c) = ((word >> 8) as u8, (word >> 16) as u8, word >> 24);
    let aligns = |bytes: u8| bytes.is_multiple_of(4) && (4..=128).contains(&bytes);
    let bounds = u64::from(MIN_MAX_H2C_DATA_BYTES)..=MAX_RECORDED_H2C_BYTES;
    if !aligns(host) || !aligns(controller) || !bounds.contains(&max_h2c) || word & 0xf0 != 0 {
        return None;
    }
    Some(TcpParams {
        role: Role::Controller,
        phase: Phase::Ready,
        header_digest: word & 1 == 1,
        data_digest: word & 2 == 2,
        host_alignment_bytes: host,
        controller_alignment_bytes: controller,
        max_in_capsule_bytes: super::IN_CAPSULE_BYTES,
        max_data_bytes: max_h2c as u32,
        max_h2c_data_bytes: max_h2c as u32,
        max_r2t: (word >> 2 & 3) + 1,
    })
}

#[inline(always)]
fn put(cell: &AtomicU64, value: u64) {
    cell.store(value, Release);
}

pub(crate) struct NewCommand<'a> {
    pub sqe: &'a [u64; 8],
    pub number: u64,
    /// The stream position after its capsule.
    pub end: u64,
    pub taken_ns: u64,
    pub buffer: Option<BufferRef>,
}

#[derive(Clone, Copy)]
pub(crate) struct QueueRecords {
    region: &'static Region,
    queue: u32,
    record: &'static QueueRecord,
    commands: &'static [CommandRecord; MAX_QUEUE_ENTRIES],
    reactor: &'static ReactorRecord,
    /// The blame word, without the slot.
    blame: u64,
    commands_seed: Seed,
    items_seed: Seed,
}

impl QueueRecords {
    /// `None`: no such queue slot or reactor.
    pub(crate) fn new(region: &'static Region, queue: u32, reactor: usize) -> Option<Self> {
        let key = region.header().key.load(Relaxed);
        Some(Self {
            region,
            queue,
            record: region.queues().get(queue as usize)?,
            commands: region.all_commands(queue as usize)?,
            reactor: region.reactors().get(reactor)?,
            blame: Blame::command(queue, 0),
            commands_seed: Seed::commands(key, queue),
            items_seed: Seed::items(key, queue),
        })
    }

    pub(crate) fn queue(&self) -> u32 {
        self.queue
    }

    /// Not valid before [`QueueRecords::live`]. The stream is taken up to `taken` (the handshake's
    /// bytes may not be consumed yet), with `number` commands; sending begins at `tx_at`.
    pub(crate) fn make(&self, constants: &QueueConstants, number: u64, taken: u64, tx_at: u64) {
        let r = self.record;
        put(&r.used, queue_use::MADE);
        let key = self.region.header().key.load(Relaxed);
        r.put_constants(key, self.queue, constants);
        for (cell, value) in [
            (&r.number, number),
            (&r.taken, taken),
            (&r.kept, 0),
            (&r.tx_at, tx_at),
            (&r.tx_span, 0),
            (&r.data_begin, 0),
            (&r.data_end, 0),
            (&r.odd_number, 0),
            (&r.odd_tx, 0),
            (&r.odd_taken, 0),
        ] {
            put(cell, value);
        }
        kill_point!("place.taken");
    }

    /// From here on the queue owns its socket.
    pub(crate) fn live(&self) {
        put(&self.record.used, queue_use::LIVE);
        kill_point!("place.live");
    }

    /// Its socket is or will be closed; only its commands at devices still matter.
    pub(crate) fn leaving(&self) {
        put(&self.record.used, queue_use::LEAVING);
    }

    /// Frees the queue's slot. `commands`: the most command slots it used.
    pub(crate) fn free(&self, commands: usize) {
        let used = self.commands.iter().take(commands);
        for command in used.filter(|c| c.state.load(Relaxed) != 0) {
            put(&command.state, 0);
        }
        put(&self.record.used, queue_use::FREE);
    }

    /// Before a receive; its first byte has position `base`.
    #[inline]
    pub(crate) fn intend(&self, base: u64) {
        if !RECORDS {
            return;
        }
        put(&self.reactor.rx_base, base);
        kill_point!("rx.base");
        put(&self.reactor.rx_queue, rx_word(self.queue, base));
        kill_point!("rx.intent");
    }

    /// Nothing was received, or the bytes are taken or kept.
    #[inline]
    pub(crate) fn intend_no_more(&self) {
        if !RECORDS {
            return;
        }
        put(&self.reactor.rx_queue, 0);
        kill_point!("rx.cleared");
    }

    #[inline(always)]
    fn command(&self, slot: u16) -> &'static CommandRecord {
        &self.commands[usize::from(slot) % MAX_QUEUE_ENTRIES]
    }

    pub(crate) fn number_of(&self, slot: u16) -> u64 {
        self.command(slot).number.load(Relaxed)
    }

    /// I/O commands need only some words of their entry (`whole`: all).
    #[inline]
    pub(crate) fn record_command(&self, slot: u16, new: &NewCommand<'_>, whole: bool) {
        if !RECORDS {
            return;
        }
        let c = self.command(slot);
        let (cells, sqe) = (&c.sqe, new.sqe);
        put(&cells[0], sqe[0]);
        put(&cells[4], sqe[4]);
        put(&cells[5], sqe[5]);
        put(&cells[6], sqe[6]);
        if whole {
            for word in [1, 2, 3, 7] {
                put(&cells[word], sqe[word]);
            }
        }
        put(&c.number, new.number);
        put(&c.end, new.end);
        put(&c.taken_ns, new.taken_ns);
        let check = CommandRecord::check_of(self.commands_seed, slot, new.sqe, new.number, new.end);
        put(&c.check, check);
        let buffer = match new.buffer {
            Some(buffer) => buffer.word(self.commands_seed, slot, new.number),
            None => 0,
        };
        put(&c.buffer, buffer);
        kill_point!("rx.record");
        put(&c.state, CommandState::taken(new.number).0);
        kill_point!("rx.state");
    }

    /// A PDU is taken: now `number` commands, and the stream up to `taken`.
    #[inline]
    pub(crate) fn took_pdu(&self, number: u64, taken: u64) {
        if !RECORDS {
            return;
        }
        put(&self.record.number, number);
        put(&self.record.taken, taken);
        kill_point!("rx.taken");
    }

    pub(crate) fn begin_data(&self, data: &InData) {
        self.record.put_data(data);
        kill_point!("data.header");
        put(&self.record.taken, data.begin);
    }

    pub(crate) fn placed(&self, taken: u64) {
        put(&self.record.taken, taken);
        kill_point!("data.placed");
    }

    /// How much of a command's data is there after the next [`QueueRecords::placed`], which ends a
    /// data PDU.
    pub(crate) fn data_pdu_ends(&self, slot: u16, asked: Asked, damaged: bool) {
        let Some(c) = self.commands.get(usize::from(slot)) else {
            return;
        };
        if damaged {
            let state = CommandState(c.state.load(Relaxed)).with_damaged();
            put(&c.state, state.0);
        }
        put(&c.asked, asked.word());
    }

    pub(crate) fn data_complete(&self, slot: u16) {
        self.stage(slot, CommandStage::Taken);
        kill_point!("data.state");
    }

    /// The rest of the stream, from position `at`, is kept in buffer `kept.which`. From here on the
    /// other buffer is free.
    #[inline]
    pub(crate) fn keep(&self, kept: Kept, at: u64) {
        if !RECORDS {
            return;
        }
        put(&self.record.kept_at[usize::from(kept.which & 1)], at);
        put(&self.record.kept, kept.word());
        kill_point!("rx.kept");
    }

    #[inline]
    pub(crate) fn keep_nothing(&self) {
        if !RECORDS {
            return;
        }
        put(&self.record.kept, 0);
        kill_point!("rx.kept");
    }

    /// The first R2T is queued for a command, which enters this stage.
    ///
    /// The buffer is named last: a command that is only taken would seem to have its data. Until
    /// the R2T is published, a successor need not know the buffer.
    pub(crate) fn asked(&self, slot: u16, buffer: BufferRef, stage: CommandStage, at: AskedAt) {
        let Some(c) = self.commands.get(usize::from(slot)) else {
            return;
        };
        put(&c.asked, 0);
        put(&c.asked_at, at.word());
        kill_point!("r2t.recorded");
        self.stage(slot, stage);
        let number = c.number.load(Relaxed);
        put(&c.buffer, buffer.word(self.commands_seed, slot, number));
        kill_point!("r2t.published");
    }

    /// Another R2T is queued. It is published before the next one, so only it may be lost.
    pub(crate) fn asked_next(&self, slot: u16, at: AskedAt) {
        if let Some(c) = self.commands.get(usize::from(slot)) {
            put(&c.asked_at, at.word());
            kill_point!("r2t.recorded");
        }
    }

    /// An Asynchronous Event Request.
    pub(crate) fn kept_by_controller(&self, slot: u16) {
        self.stage(slot, CommandStage::Kept);
        kill_point!("aer.kept");
    }

    fn stage(&self, slot: u16, stage: CommandStage) {
        if let Some(c) = self.commands.get(usize::from(slot)) {
            let state = CommandState(c.state.load(Relaxed)).with_stage(stage);
            put(&c.state, state.0);
        }
    }

    /// A command ended: its answer is sent, or never will be.
    #[inline]
    pub(crate) fn end_command(&self, slot: u16) {
        if !RECORDS {
            return;
        }
        put(&self.command(slot).state, CommandState::FREE.0);
        kill_point!("tx.freed");
    }

    #[inline]
    pub(crate) fn item(&self, items: &[ItemRecord; MAX_ITEMS], count: u16, words: [u64; 3]) {
        if !RECORDS {
            return;
        }
        let place = count % MAX_ITEMS as u16;
        items[usize::from(place)].put(self.items_seed, place, words);
        kill_point!("tx.item");
    }

    #[inline]
    pub(crate) fn publish(&self, span: Span) {
        if !RECORDS {
            return;
        }
        put(&self.record.tx_span, span.word());
        kill_point!("tx.published");
    }

    /// Some items are sent; the commands that end with them are already recorded as ended.
    #[inline]
    pub(crate) fn sent(&self, span: Span) {
        if !RECORDS {
            return;
        }
        put(&self.record.tx_span, span.word());
        kill_point!("tx.first");
    }

    /// All items are sent, up to this position of the transmitted stream.
    #[inline]
    pub(crate) fn sent_all(&self, tx_at: u64) {
        if !RECORDS {
            return;
        }
        put(&self.record.tx_at, tx_at);
        kill_point!("tx.first");
        put(&self.record.tx_span, 0);
        kill_point!("tx.reset");
    }

    /// A command without a slot is answered by an item that ends at `tx` and is published next.
    /// Then `number` commands are taken, and the stream up to `taken`.
    pub(crate) fn odd(&self, number: u64, tx: u64, taken: u64) {
        put(&self.record.odd_number, number);
        put(&self.record.odd_tx, tx);
        put(&self.record.odd_taken, taken);
    }

    #[inline]
    pub(crate) fn blame(&self, slot: u16) {
        if !RECORDS {
            return;
        }
        put(&self.reactor.blame, self.blame | u64::from(slot));
    }

    #[inline]
    pub(crate) fn blame_stream(&self) {
        if !RECORDS {
            return;
        }
        put(&self.reactor.blame, Blame::queue(self.queue));
    }

    #[inline]
    pub(crate) fn blame_nobody(&self) {
        if !RECORDS {
            return;
        }
        put(&self.reactor.blame, 0);
    }
}

#[cfg(test)]
mod tests;
