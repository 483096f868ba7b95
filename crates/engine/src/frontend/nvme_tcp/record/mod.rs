//! What a queue leaves for a successor: every store to its records, in one place.
//!
//! **Purpose.** An engine may be killed between any two instructions. Its successor then reads what
//! is recorded here, and asks the kernel how much of each stream was consumed and accepted.
//!
//! **Design.** A killed thread has carried out a prefix of its program, so it is enough that stores stay in
//! the program's order: all are `Release`, which costs nothing here. Each function is one step of the
//! specification (`docs/src/takeover.md`); what it stores last is what makes the rest count. Nobody else
//! stores these words. The functions of the I/O path are few instructions each; without [`RECORDS`] they
//! do nothing, so that a measurement can tell what they cost.
//!
//! **Not here:** the records' layout ([`forebay_xlate::boundary::region`]), the order of the steps (the
//! modules that take them), a controller's state ([`super::controllers`]).

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

/// The largest MAXH2CDATA that a record may say.
const MAX_RECORDED_H2C_BYTES: u64 = 1 << 30;

/// What ICReq and ICResp agreed on, as the word of a queue's record.
pub(crate) fn params_word(params: &TcpParams) -> u64 {
    u64::from(params.header_digest)
        | u64::from(params.data_digest) << 1
        | (params.max_r2t.clamp(1, R2T_PARTS as u64) - 1) << 2
        | u64::from(params.host_alignment_bytes) << 8
        | u64::from(params.controller_alignment_bytes) << 16
        | u64::from(params.max_h2c_data_bytes) << 24
}

/// What such a word says; `None` when nobody can have agreed on that.
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

/// Stores in the program's order.
#[inline(always)]
fn put(cell: &AtomicU64, value: u64) {
    cell.store(value, Release);
}

/// A command's own words, as they are taken from the stream.
pub(crate) struct NewCommand<'a> {
    /// The submission queue entry.
    pub sqe: &'a [u64; 8],
    /// Its number on the queue.
    pub number: u64,
    /// The stream position after its capsule.
    pub end: u64,
    /// CLOCK_MONOTONIC ns.
    pub taken_ns: u64,
    /// Its data, which came in the capsule.
    pub buffer: Option<BufferRef>,
}

/// The records of one queue.
#[derive(Clone, Copy)]
pub(crate) struct QueueRecords {
    region: &'static Region,
    queue: u32,
    record: &'static QueueRecord,
    commands: &'static [CommandRecord; MAX_QUEUE_ENTRIES],
    reactor: &'static ReactorRecord,
    /// The word of [`QueueRecords::blame`] but for the slot.
    blame: u64,
    commands_seed: Seed,
    items_seed: Seed,
}

impl QueueRecords {
    /// Of a queue's slot; `None` for a queue or a reactor that there can't be.
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

    /// Its slot.
    pub(crate) fn queue(&self) -> u32 {
        self.queue
    }

    /// A queue is made: nothing counts before [`QueueRecords::live`]. Up to `taken` its stream is taken
    /// (the listener's part of it may not be consumed yet), with `number` commands, and `tx_at` is where what
    /// it will send begins.
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

    /// From here on the queue is its socket's.
    pub(crate) fn live(&self) {
        put(&self.record.used, queue_use::LIVE);
        kill_point!("place.live");
    }

    /// Its socket is closed, or is to be; what its commands have at devices is all that matters.
    pub(crate) fn leaving(&self) {
        put(&self.record.used, queue_use::LEAVING);
    }

    /// Its last command has ended: the slot is nobody's. It had so many commands at once.
    pub(crate) fn free(&self, commands: usize) {
        let used = self.commands.iter().take(commands);
        for command in used.filter(|c| c.state.load(Relaxed) != 0) {
            put(&command.state, 0);
        }
        put(&self.record.used, queue_use::FREE);
    }

    /// Bytes are about to be received; the first has position `base`.
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

    /// Nothing was received, or all that was is taken or kept.
    #[inline]
    pub(crate) fn intend_no_more(&self) {
        if !RECORDS {
            return;
        }
        put(&self.reactor.rx_queue, 0);
        kill_point!("rx.cleared");
    }

    /// A slot's record: a queue has no slots beyond.
    #[inline(always)]
    fn command(&self, slot: u16) -> &'static CommandRecord {
        &self.commands[usize::from(slot) % MAX_QUEUE_ENTRIES]
    }

    /// The number of a command that is taken.
    pub(crate) fn number_of(&self, slot: u16) -> u64 {
        self.command(slot).number.load(Relaxed)
    }

    /// A command is taken from the stream, with the data of its capsule. I/O commands need but some words
    /// of their entry (`whole`: all).
    #[inline]
    pub(crate) fn begin_command(&self, slot: u16, new: &NewCommand<'_>, whole: bool) {
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

    /// A PDU is taken: with `number` commands, the stream up to `taken`.
    #[inline]
    pub(crate) fn took_pdu(&self, number: u64, taken: u64) {
        if !RECORDS {
            return;
        }
        put(&self.record.number, number);
        put(&self.record.taken, taken);
        kill_point!("rx.taken");
    }

    /// The header of a data PDU is taken; its data follows.
    pub(crate) fn begin_data(&self, data: &InData) {
        self.record.put_data(data);
        kill_point!("data.header");
        put(&self.record.taken, data.begin);
    }

    /// Data is in its place, up to this position of the stream.
    pub(crate) fn placed(&self, taken: u64) {
        put(&self.record.taken, taken);
        kill_point!("data.placed");
    }

    /// So much of a command's data will be there with the next [`QueueRecords::placed`], which ends a
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

    /// All data of a command is there.
    pub(crate) fn data_complete(&self, slot: u16) {
        self.stage(slot, CommandStage::Taken);
        kill_point!("data.state");
    }

    /// What is left of the stream beyond what is taken is kept in buffer `kept.which`, from position `at`
    /// on. From here on the other buffer is free.
    #[inline]
    pub(crate) fn keep(&self, kept: Kept, at: u64) {
        if !RECORDS {
            return;
        }
        put(&self.record.kept_at[usize::from(kept.which & 1)], at);
        put(&self.record.kept, kept.word());
        kill_point!("rx.kept");
    }

    /// Nothing is kept any more.
    #[inline]
    pub(crate) fn keep_nothing(&self) {
        if !RECORDS {
            return;
        }
        put(&self.record.kept, 0);
        kill_point!("rx.kept");
    }

    /// The first R2T was queued for a command, which is at this stage with it.
    ///
    /// The buffer is named last: a command that is merely taken would seem to have its data in it. Until the
    /// R2T is published, nobody needs to know it.
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

    /// Another R2T was queued for a command. It is published before there is yet another one, so it alone may be
    /// one that nobody gets.
    pub(crate) fn asked_next(&self, slot: u16, at: AskedAt) {
        if let Some(c) = self.commands.get(usize::from(slot)) {
            put(&c.asked_at, at.word());
            kill_point!("r2t.recorded");
        }
    }

    /// The controller keeps a command.
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

    /// A command has ended: its answer is sent, or never will be.
    #[inline]
    pub(crate) fn end_command(&self, slot: u16) {
        if !RECORDS {
            return;
        }
        put(&self.command(slot).state, CommandState::FREE.0);
        kill_point!("tx.freed");
    }

    /// An item is queued, and not yet published.
    #[inline]
    pub(crate) fn item(&self, items: &[ItemRecord; MAX_ITEMS], count: u16, words: [u64; 3]) {
        if !RECORDS {
            return;
        }
        let place = count % MAX_ITEMS as u16;
        items[usize::from(place)].put(self.items_seed, place, words);
        kill_point!("tx.item");
    }

    /// These items will be sent, whatever happens: what they answer is answered.
    #[inline]
    pub(crate) fn publish(&self, span: Span) {
        if !RECORDS {
            return;
        }
        put(&self.record.tx_span, span.word());
        kill_point!("tx.published");
    }

    /// Some are all sent, and the commands that end with them are recorded as ended.
    #[inline]
    pub(crate) fn sent(&self, span: Span) {
        if !RECORDS {
            return;
        }
        put(&self.record.tx_span, span.word());
        kill_point!("tx.first");
    }

    /// All are sent, up to this position of the transmitted stream.
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

    /// A command that got no slot is answered with an item up to `tx` that is about to be published; with
    /// it `number` commands are taken, and the stream up to `taken`.
    pub(crate) fn odd(&self, number: u64, tx: u64, taken: u64) {
        put(&self.record.odd_number, number);
        put(&self.record.odd_tx, tx);
        put(&self.record.odd_taken, taken);
    }

    /// The reactor is busy with this command.
    #[inline]
    pub(crate) fn blame(&self, slot: u16) {
        if !RECORDS {
            return;
        }
        put(&self.reactor.blame, self.blame | u64::from(slot));
    }

    /// The reactor is busy with a PDU.
    #[inline]
    pub(crate) fn blame_stream(&self) {
        if !RECORDS {
            return;
        }
        put(&self.reactor.blame, Blame::queue(self.queue));
    }

    /// The reactor is busy with nobody's any more.
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
