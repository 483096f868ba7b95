//! One ring that is served.

use super::Vhost;
use super::inflight::UNFIT;
use crate::frontend::vm::protocol::{Closing, Turn, UNSHARED};
use forebay_virtio::feature;
use forebay_virtio::queue::{Queue, QueueConfig};
use forebay_virtio::ring::{RingError, RingFeatures, Windows, area_bytes};
use forebay_virtio::vhost_user::session::Vring;

/// A request in flight.
#[derive(Clone, Copy, Default, Debug)]
pub(super) struct Slot {
    /// Where its status byte is.
    pub status_address: u64,
    /// Bytes that the device has written to it if it ends well.
    pub written: u32,
    /// Commands of its that the core has.
    pub parts: u32,
    /// More of it is yet to be started.
    pub starting: bool,
    /// Something of it failed.
    pub bad: bool,
    /// It has a record of what it may have at devices.
    pub recorded: bool,
    /// When it was taken from its ring.
    pub taken_ns: u64,
}

/// A ring with its requests.
pub(super) struct ServedRing {
    pub queue: Queue,
    pub slots: Box<[Slot]>,
    /// Something was put back, and not yet shown.
    pub ended: bool,
}

/// Where a ring lies, by the addresses that the client knows.
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

/// Why a ring can't be where it is said to be. A monitor tells only of memory that can be shared.
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

    /// Begins to serve a ring if it is to be served and isn't yet.
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
        // What was made available before is looked at in this turn.
        Ok(())
    }

    /// The memory changed: rings that are served are found in it again.
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
