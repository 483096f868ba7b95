//! A dead engine, made by hand for tests and the fuzz target.

use super::counters::{NoFacts, SocketFacts};
use super::*;
use crate::exports::Served;
use forebay_nvme::controller::{Controller, ControllerConfig, check_admin_connect};
use forebay_nvme::fabrics::{ConnectCommand, ConnectData};
use forebay_nvme::{Nqn, SglDescriptor, Sqe};
use forebay_xlate::VolumeId;
use forebay_xlate::boundary::message::{ExportConfig, VolumeConfig};
use forebay_xlate::boundary::region::check::{BufferRef, Seed};
use forebay_xlate::boundary::region::{
    Asked, AskedAt, CommandRecord, CommandStage, CommandState, ControllerConstants,
    ControllerContent, Item, QueueConstants, QueueIdentity, Span, queue_use,
};
use std::sync::atomic::Ordering::Release;

/// End of the Connect in the received stream.
pub(super) const CONNECTED: u64 = 1224;
/// End of its answer in the transmitted stream.
pub(super) const ANSWERED: u64 = 152;
pub(super) const BLOCKS: u64 = 1 << 20;

pub(super) struct Dead {
    pub region: Region,
    pub bytes: BTreeMap<u64, Vec<u8>>,
}

impl OldBytes for Dead {
    fn read(&self, place: u64, out: &mut [u8]) -> Option<()> {
        let end = place.checked_add(out.len() as u64)?;
        if end > 1 << 36 {
            return None;
        }
        for (to, at) in out.iter_mut().zip(place..) {
            *to = at as u8;
        }
        for (from, bytes) in &self.bytes {
            for (byte, at) in bytes.iter().zip(*from..) {
                if let Some(to) = at.checked_sub(place).and_then(|i| out.get_mut(i as usize)) {
                    *to = *byte;
                }
            }
        }
        Some(())
    }
}

pub(super) fn block_write(cid: u16, lba: u64) -> Sqe {
    Sqe::new(1, cid)
        .with_nsid(1)
        .with_cdw64(10, lba)
        .with_cdw(12, 0)
        .with_sgl(SglDescriptor::in_capsule(0, 4096))
}

pub(super) fn buffer(number: u64) -> BufferRef {
    BufferRef {
        offset_bytes: (1 << 34) + number * 4096,
        len_bytes: 4096,
    }
}

impl Dead {
    pub(super) fn new() -> Self {
        Self {
            region: Region::anonymous(7).unwrap(),
            bytes: BTreeMap::new(),
        }
    }

    pub(super) fn key(&self) -> u64 {
        self.region.header().key.load(Relaxed)
    }

    /// It has answered its Connect; its socket number is 1000 more.
    pub(super) fn queue(&self, queue: u32, controller: u32, qid: u16) {
        let record = &self.region.queues()[queue as usize];
        let constants = QueueConstants {
            controller,
            identity: QueueIdentity {
                qid,
                entries: 32,
                no_flow_control: true,
            },
            params: 4096 << 24 | 4 << 16 | 4 << 8,
            socket: 1000 + u64::from(queue),
            reactor: 0,
            keep: queue,
        };
        record.put_constants(self.key(), queue, &constants);
        record.number.store(1, Relaxed);
        record.taken.store(CONNECTED, Relaxed);
        record.tx_at.store(ANSWERED, Relaxed);
        record.used.store(queue_use::LIVE, Release);
    }

    pub(super) fn command(
        &self,
        queue: u32,
        slot: u16,
        number: u64,
        end: u64,
        sqe: Sqe,
    ) -> &CommandRecord {
        let c = &self.region.commands(queue as usize)[usize::from(slot)];
        let words: [u64; 8] = zerocopy::transmute!(sqe);
        for (to, from) in c.sqe.iter().zip(words) {
            to.store(from, Relaxed);
        }
        c.number.store(number, Relaxed);
        c.end.store(end, Relaxed);
        c.taken_ns.store(number * 10, Relaxed);
        let seed = Seed::commands(self.key(), queue);
        let check = CommandRecord::check_of(seed, slot, &words, number, end);
        c.check.store(check, Relaxed);
        let place = u64::from(queue) * 256 + number;
        c.buffer
            .store(buffer(place).word(seed, slot, number), Relaxed);
        c.state.store(CommandState::taken(number).0, Relaxed);
        c
    }

    /// For which three R2Ts were sent; `dwords` of each part came.
    pub(super) fn ask_in_parts(&self, queue: u32, slot: u16, len_bytes: u32, dwords: [u16; 4]) {
        let c = &self.region.commands(queue as usize)[usize::from(slot)];
        let number = c.number.load(Relaxed);
        let seed = Seed::commands(self.key(), queue);
        let buffer = BufferRef {
            len_bytes,
            ..buffer(u64::from(queue) * 256)
        };
        c.buffer.store(buffer.word(seed, slot, number), Relaxed);
        c.asked.store(Asked::Parts(dwords).word(), Relaxed);
        let at = AskedAt {
            at: ANSWERED,
            r2ts: 3,
        };
        c.asked_at.store(at.word(), Relaxed);
        let state = CommandState::taken(number).with_stage(CommandStage::AskedInParts);
        c.state.store(state.0, Relaxed);
    }

    /// Publishes an item of 24 header bytes and `data_bytes`.
    pub(super) fn answer(&mut self, queue: u32, start: u64, ends: u16, data_bytes: u32) {
        let header = [queue as u8; 24];
        let record = &self.region.queues()[queue as usize];
        let span = Span::of_word(record.tx_span.load(Relaxed), 4096).unwrap();
        let span = span.unwrap_or(Span {
            list: queue as u16,
            first: 0,
            tail: 0,
        });
        let item = Item {
            start,
            header_at: span.tail * 24,
            header_bytes: 24,
            ends,
            buffer: (data_bytes > 0).then(|| buffer(u64::from(queue) * 256 + 200)),
            data_bytes,
        };
        let list = &self.region.items(queue as usize)[usize::from(span.tail)];
        list.put(Seed::items(self.key(), queue), span.tail, item.words());
        let tail = span.tail + 1;
        record.tx_span.store(Span { tail, ..span }.word(), Relaxed);
        let at = crate::memory::headers_at(queue as u16) + u64::from(item.header_at);
        self.bytes.insert(at, header.to_vec());
    }

    /// The admin queue is `first`, then the I/O queues.
    pub(super) fn association(&self, slot: u32, first: u32, io_queues: u32) {
        let lane = lane();
        let command = ConnectCommand::new(0, 0, 32, 0);
        let subsystem = Nqn::parse(&lane.served.config.nqn).unwrap();
        let host = Nqn::parse("nqn.2014-08.org.example:host").unwrap();
        let data = ConnectData::new([7; 16], 0xffff, &subsystem, &host);
        let connect = check_admin_connect(&command, &data, 128).unwrap();
        let config = crate::frontend::nvme_tcp::controller_config(
            slot as u16 + 1,
            Some(&lane.served.config),
        );
        let config: ControllerConfig = config.unwrap();
        let controller = Controller::new(config, &connect, 5);
        let record = &self.region.controllers()[slot as usize];
        let constants = ControllerConstants {
            lane: Some(3),
            cntlid: slot as u16 + 1,
            export: Some(1),
            local: "127.0.0.1:4420".parse().unwrap(),
        };
        record.put_constants(self.key(), slot, &constants);
        let content = ControllerContent {
            sequence: 1,
            valid_from: 0,
            blocks: BLOCKS,
            state: zerocopy::transmute!(*controller.state()),
        };
        record.put_state(self.key(), slot, &content);
        record.used.store(1, Relaxed);
        for qid in 0..=io_queues {
            self.queue(first + qid, slot, qid as u16);
        }
    }
}

pub(super) fn lane() -> ServedLane {
    let volume = Volume::new(VolumeConfig {
        volume: VolumeId(9),
        uuid: [2; 16],
        read_only: false,
        size_bytes: BLOCKS * 4096,
        block_bytes: 4096,
        extent_bytes: 64 << 10,
        epoch: 0,
        image: None,
    });
    let config = ExportConfig {
        export: ExportId(1),
        volume: VolumeId(9),
        nqn: "nqn.2026-01.io.forebay:t.v".into(),
        serial: "s".into(),
        hosts: Default::default(),
        any_host: true,
        frontend: Default::default(),
    };
    ServedLane {
        served: Served {
            config: Arc::new(config),
            reactor: 1,
        },
        lane: LaneIndex(5),
        volume: Arc::new(volume.unwrap()),
    }
}

pub(super) fn lanes() -> ServedLanes {
    BTreeMap::from([(ExportId(1), lane())])
}

pub(super) fn facts(
    sockets: &[u32],
    consumed: u64,
    accepted: u64,
) -> Vec<(u64, Result<SocketFacts, NoFacts>)> {
    let of = |queue: &u32| {
        let facts = SocketFacts { consumed, accepted };
        (1000 + u64::from(*queue), Ok(facts))
    };
    sockets.iter().map(of).collect()
}
