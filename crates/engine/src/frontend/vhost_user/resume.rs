//! Continues a dead engine's client.
//!
//! Each started ring is served again, with the requests that the inflight region lists as taken and
//! not returned. Our own records, never guest memory, tell which requests may be at devices. These
//! are recovered (`RecoveredIo::recover_vm`) first, and begin again when the dead engine cannot
//! touch guest memory ([`Vhost::may_redo`]). Requests that don't overlap them continue at once.
//! Then every driver is called, and every ring polled.

use super::area::Record;
use super::inflight::Inflight;
use super::{INFLIGHT, KICK, Vhost, area, offer, slot_of};
use crate::core::{FenceSet, RecoveredSpan};
use crate::frontend::vm::protocol::{Closing, Turn};
use forebay_virtio::vhost_user::session::VhostSession;
use std::collections::BTreeSet;

const DAMAGED: Closing = Closing("its saved state is damaged");
/// Deaths after which a request is not retried.
const DEATHS: u8 = 3;

impl Vhost {
    pub(super) fn resume_client(
        &mut self,
        turn: &mut Turn<'_>,
        blamed: Option<u16>,
    ) -> Result<(), Closing> {
        let area = area(turn);
        let records = (0..self.disk.queues).flat_map(|queue| area.records(queue));
        let records: Vec<(u16, Record)> = records.collect();
        let place = area.inflight();
        let before = area.blamed();
        let deaths = blamed.map(|slot| match before {
            Some((same, deaths)) if same == slot => (slot, deaths.saturating_add(1)),
            _ => (slot, 1),
        });
        // A death without blame keeps the earlier blame.
        let deaths = deaths.or(before);
        area.set_blamed(deaths);
        if let Some(words) = area.saved() {
            self.session = VhostSession::of_words(offer(&self.disk), &words).ok_or(DAMAGED)?;
        }
        self.blamed = deaths.map(|(slot, _)| slot);
        self.inflight = match place {
            Some(place) if turn.client.held(INFLIGHT).is_some() => {
                Some(Inflight::new(place).ok_or(DAMAGED)?)
            }
            // The daemon had not stored it: then no ring was started.
            _ => None,
        };
        for index in 0..self.disk.queues {
            self.serve(turn, index)?;
            let kick = KICK + usize::from(index);
            if turn.client.held(kick).is_some() && !turn.client.watch(kick) {
                return Err(Closing("its kick descriptor can't be watched"));
            }
        }
        if !self.all_left(&records) {
            return Err(DAMAGED);
        }
        self.recover(turn, &records);
        for index in 0..usize::from(self.disk.queues) {
            self.call(turn, index);
        }
        if turn.client.held(super::BACKEND).is_some() {
            // It may have grown meanwhile.
            self.notices.grew();
        }
        Ok(())
    }

    /// Whether each request that may be at a device is unreturned in its ring. A hostile inflight
    /// region could hide one, and its number would be reused while its record is needed.
    fn all_left(&self, records: &[(u16, Record)]) -> bool {
        let lines = self.lines.iter().zip(0..);
        let left = lines.filter_map(|(line, queue)| Some((line.as_ref()?, queue)));
        let left: BTreeSet<u16> = left
            .flat_map(|(line, queue)| line.queue.all_left().map(move |tag| slot_of(queue, tag)))
            .collect();
        records.iter().all(|(slot, _)| left.contains(slot))
    }

    fn recover(&mut self, turn: &mut Turn<'_>, records: &[(u16, Record)]) {
        let Some(lane) = turn.client.lane() else {
            return;
        };
        let Some(volume) = turn.core.lane(lane).map(|lane| lane.volume.id()) else {
            return;
        };
        let spans = records.iter().map(|(slot, record)| RecoveredSpan {
            volume,
            bytes: record.offset_bytes..record.offset_bytes.saturating_add(record.len_bytes),
            write: record.write,
            devices: FenceSet::ALL,
            command: Some(turn.client.command_ref(lane, *slot)),
        });
        let spans: Vec<RecoveredSpan> = spans.filter(|span| !span.bytes.is_empty()).collect();
        turn.core.recovered.recover_vm(lane, &spans);
    }

    /// Whether a dead engine's requests may begin again or be answered.
    pub(super) fn may_redo(&mut self, turn: &mut Turn<'_>) -> bool {
        let Some(lane) = turn.client.lane() else {
            return true;
        };
        !turn.core.recovered.may_touch_memory_of(lane)
    }

    /// A dead engine's request has ended without beginning again.
    #[cold]
    pub(super) fn not_begun(turn: &mut Turn<'_>, slot: u16) {
        if let Some(lane) = turn.client.lane()
            && turn.core.recovered.any()
        {
            turn.core
                .recovered
                .refused(turn.client.command_ref(lane, slot));
        }
    }

    pub(super) fn kills(&self, turn: &Turn<'_>) -> bool {
        area(turn).blamed().is_some_and(|(_, n)| n >= DEATHS)
    }
}
