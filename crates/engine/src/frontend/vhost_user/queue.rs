//! One served ring.

use super::Vhost;
use super::inflight::UNFIT;
use crate::frontend::vm::protocol::{Closing, Turn, UNSHARED};
use forebay_virtio::feature;
use forebay_virtio::queue::{Queue, QueueConfig};
use forebay_virtio::ring::{RingError, RingFeatures, Windows, area_bytes};
use forebay_virtio::vhost_user::session::Vring;

#[derive(Clone, Copy, Default, Debug)]
pub(super) struct Slot {
    pub status_address: u64,
    /// Bytes that the device writes on success.
    pub written: u32,
    pub parts: u32,
    /// Some parts are not started yet.
    pub starting: bool,
    pub bad: bool,
    /// It has a record of its device bytes.
    pub recorded: bool,
    pub taken_ns: u64,
}

pub(super) struct ServedRing {
    pub queue: Queue,
    pub slots: Box<[Slot]>,
    /// Requests were returned, but not yet published.
    pub ended: bool,
}

/// A ring's memory, by the client's addresses.
fn windows(turn: &Turn<'_>, vring: &Vring, packed: bool) -> Result<Windows, RingError> {
    let (descriptors, driver, device) = area_bytes(packed, vring.size);
    let window = |address, bytes| {
        let area = turn.client.memory().area_of_user(address, bytes);
        area.map(Into::into).ok_or(RingError::Address)
    };
    Ok(Windows {
        descriptors: window(vring.descriptors, descriptors)?,
        driver: window(vring.driver, driver)?,
        device: window(vring.device, device)?,
    })
}

/// Why a ring's address is invalid. Monitors announce only memory that can be shared.
fn not_there(turn: &Turn<'_>, vring: &Vring, error: RingError) -> Closing {
    let is_shared = |at: u64| {
        let mut regions = turn.client.memory().regions().iter();
        regions.any(|region| at.wrapping_sub(region.user_address()) < region.len_bytes())
    };
    let parts = [vring.descriptors, vring.driver, vring.device];
    let is_elsewhere = parts != [0; 3] && !parts.into_iter().any(is_shared);
    match error == RingError::Address && is_elsewhere {
        true => Closing(UNSHARED),
        false => Closing(error.text()),
    }
}

impl Vhost {
    fn is_packed(&self) -> bool {
        self.session.features() & feature::RING_PACKED != 0
    }

    /// Serves a ring that is enabled and not served yet.
    pub(super) fn serve(&mut self, turn: &mut Turn<'_>, index: u16) -> Result<(), Closing> {
        let at = usize::from(index);
        let vring = self.session.vrings()[at];
        if !self.session.is_served(index) || self.lines[at].is_some() {
            return Ok(());
        }
        let packed = self.is_packed();
        let config = QueueConfig {
            windows: windows(turn, &vring, packed).map_err(|e| not_there(turn, &vring, e))?,
            size: vring.size,
            packed,
            features: RingFeatures::of(self.session.features()),
            base: vring.base,
            inflight: (self.inflight.as_ref())
                .ok_or(UNFIT)?
                .window(turn, index, vring.size)?,
        };
        let queue = Queue::new(&config).map_err(|e| Closing(e.text()))?;
        let slots = vec![Slot::default(); usize::from(vring.size)];
        self.lines[at] = Some(Box::new(ServedRing {
            queue,
            slots: slots.into(),
            ended: false,
        }));
        // Chains that are already available are taken in this turn.
        Ok(())
    }

    pub(super) fn memory_changed(&mut self, turn: &Turn<'_>) -> Result<(), Closing> {
        self.pieces.let_go();
        let packed = self.is_packed();
        for (line, vring) in self.lines.iter_mut().zip(self.session.vrings()) {
            if let Some(line) = line {
                let windows = windows(turn, vring, packed);
                let moved = windows.and_then(|windows| line.queue.move_to(windows));
                moved.map_err(|e| Closing(e.text()))?;
            }
        }
        Ok(())
    }
}
