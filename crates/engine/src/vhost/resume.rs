//! Going on where a dead engine was.
//!
//! **Design.** The session is read from the machine file; each ring that was served is served again, with what the
//! inflight region says was taken and not returned. What may be at devices is told by our own records, never by the
//! guest's memory: it is carried ([`crate::core::Core::carry_machine`]) before anything is begun again. A request whose chain
//! still says what its record does takes its own span up; the spans of others end with the fence.
//! Then every driver is called, and every ring looked at.

use super::area::Record;
use super::inflight::Inflight;
use super::request::record_of;
use super::{CALL, INFLIGHT, KICK, Vhost, area, offer, slot_of};
use crate::core::staging::MAX_TRANSFER_BYTES;
use crate::core::{CarriedSpan, Devices};
use crate::vm::frontend::{Closing, Turn};
use forebay_virtio::blk;
use forebay_virtio::vhost_user::session::Session;
use std::collections::BTreeMap;

const DAMAGED: Closing = Closing("its machine file is damaged");
/// Deaths after which a request is not tried again.
const DEATHS: u8 = 3;

impl Vhost {
    pub(super) fn take_up(
        &mut self,
        turn: &mut Turn<'_>,
        blamed: Option<u16>,
    ) -> Result<(), Closing> {
        let area = area(turn);
        let records = (0..self.disk.queues).map(|queue| area.records(queue).collect());
        let records: Vec<BTreeMap<u16, Record>> = records.collect();
        let place = area.inflight();
        let before = area.blamed();
        let deaths = blamed.map(|slot| match before {
            Some((same, deaths)) if same == slot => (slot, deaths.saturating_add(1)),
            _ => (slot, 1),
        });
        // A death that nobody is to blame for tells nothing of who was.
        let deaths = deaths.or(before);
        area.set_blamed(deaths);
        if let Some(words) = area.saved() {
            self.session = Session::of_words(offer(&self.disk), &words).ok_or(DAMAGED)?;
        }
        self.blamed = deaths.map(|(slot, _)| slot);
        self.inflight = match place {
            Some(place) if turn.client.held(INFLIGHT).is_some() => {
                Some(Inflight::new(place).ok_or(DAMAGED)?)
            }
            // The daemon hadn't got it yet: then no ring was started.
            _ => None,
        };
        for index in 0..self.disk.queues {
            self.serve(turn, index)?;
            let kick = KICK + usize::from(index);
            if turn.client.held(kick).is_some() && !turn.client.watch(kick) {
                return Err(Closing("its kick descriptor can't be watched"));
            }
        }
        self.carry(turn, records);
        for index in 0..usize::from(self.disk.queues) {
            turn.client.raise(CALL + index);
        }
        self.tell = turn.client.held(super::BACKEND).is_some();
        Ok(())
    }

    /// Has what may be at devices waited for.
    fn carry(&mut self, turn: &mut Turn<'_>, mut records: Vec<BTreeMap<u16, Record>>) {
        let Some(lane) = turn.client.lane() else {
            return;
        };
        let Some(volume) = turn.core.lane(lane).map(|lane| lane.volume.id()) else {
            return;
        };
        let span = |record: &Record, command| CarriedSpan {
            volume,
            bytes: record.offset_bytes..record.offset_bytes.saturating_add(record.len_bytes),
            write: record.write,
            devices: Devices::ALL,
            command,
        };
        let mut own = Vec::new();
        for queue in 0..self.disk.queues {
            let Some(Some(line)) = self.lines.get_mut(usize::from(queue)) else {
                continue;
            };
            let left: Vec<u16> = line.queue.all_left().collect();
            for tag in left {
                let slot = slot_of(queue, tag);
                let Some(record) = records[usize::from(queue)].get(&slot) else {
                    continue;
                };
                let memory = turn.client.memory();
                let again = line.queue.again(tag, memory, &mut self.chain);
                let request = again
                    .ok()
                    .and_then(|()| blk::parse(&self.chain, memory, &self.disk).ok());
                let same = request.is_some_and(|request| {
                    request
                        .work
                        .is_ok_and(|work| record_of(&work, request.data_bytes) == *record)
                        && request.data_bytes <= MAX_TRANSFER_BYTES
                });
                if same {
                    let command = turn.client.command_ref(lane, slot);
                    own.push(span(record, Some(command)));
                    records[usize::from(queue)].remove(&slot);
                }
            }
        }
        let others = records.iter().flat_map(BTreeMap::values);
        let mut spans: Vec<CarriedSpan> = others.map(|record| span(record, None)).collect();
        spans.append(&mut own);
        spans.retain(|span| !span.bytes.is_empty());
        turn.core.carry_machine(lane, &spans);
    }

    /// Whether the blamed request has had its chances.
    pub(super) fn kills(&self, turn: &Turn<'_>) -> bool {
        area(turn).blamed().is_some_and(|(_, n)| n >= DEATHS)
    }
}
