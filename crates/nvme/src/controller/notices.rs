//! Reservation notifications (Base 2.0, 8.19.2): feature 82h, log page 80h and its event.
//!
//! The owner passes in the reservation state after each change and after a take-over. The last
//! notice seen is part of the controller's state, so none is lost or repeated.
//! [`crate::reservation`] has the rules.

use super::state::MAX_RESERVATION_NOTICES;
use super::{Controller, ControllerState, events};
use crate::Status;
use crate::log_page::ReservationNotification;
use crate::reservation::Reservations;
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromZeros, IntoBytes};

impl Controller {
    /// Skips existing notices: they concern earlier associations.
    pub fn skip_notices(&mut self, state: &Reservations) {
        self.state.reservation_seen = state.notices_end() as u32;
    }

    /// Logs new notices for this host.
    pub fn reservations_changed(&mut self, state: &Reservations) {
        let end = state.notices_end();
        // Only the lower half is kept: there are never 2^31 new notices at once.
        let new = (end as u32).wrapping_sub(self.state.reservation_seen);
        self.state.reservation_seen = end as u32;
        let from = end.saturating_sub(u64::from(new));
        for notice in state.notices_from(from) {
            let kind = notice.kind as u8;
            if notice.host == self.state.hostid && self.state.reservation_mask & 1 << kind == 0 {
                self.state.notify(kind);
            }
        }
    }
}

impl ControllerState {
    fn notify(&mut self, kind: u8) {
        // Only an empty page has count 0.
        self.reservation_count = self.reservation_count.checked_add(1).unwrap_or(1);
        let queued = usize::from(self.reservation_queued);
        if queued < MAX_RESERVATION_NOTICES {
            self.reservation_queue[queued] = kind;
            self.reservation_queued += 1;
        } else {
            self.reservation_queue.rotate_left(1);
            self.reservation_queue[queued - 1] = kind;
        }
        self.raise_always(events::EVENT_RESERVATION);
    }

    /// The oldest unread notification; reading its end removes it.
    pub(super) fn reservation_log(
        &mut self,
        offset: u64,
        retain: bool,
        out: &mut [u8],
    ) -> Result<(), Status> {
        let mut page = ReservationNotification::new_zeroed();
        let queued = self.reservation_queued;
        if queued > 0 {
            // A gap in the count shows the host that notifications were dropped.
            let later = u64::from(queued - 1);
            page.count = U64::new(self.reservation_count.saturating_sub(later).max(1));
            page.kind = self.reservation_queue[0];
            page.available = queued - 1;
            page.nsid = U32::new(super::FEATURES_NSID);
        }
        super::log_pages::part(page.as_bytes(), offset, out)?;
        let all = offset.saturating_add(out.len() as u64) >= size_of_val(&page) as u64;
        if queued > 0 && all {
            self.reservation_queue.rotate_left(1);
            self.reservation_queue[MAX_RESERVATION_NOTICES - 1] = 0;
            self.reservation_queued -= 1;
        }
        if !retain {
            self.clear_event(events::EVENT_RESERVATION);
            // Otherwise the host would never learn of the unread ones.
            if self.reservation_queued > 0 {
                self.raise_always(events::EVENT_RESERVATION);
            }
        }
        Ok(())
    }

    pub(super) fn reset_notices(&mut self) {
        self.reservation_mask = 0;
        self.reservation_count = 0;
        self.reservation_queued = 0;
        self.reservation_queue = [0; MAX_RESERVATION_NOTICES];
    }
}
