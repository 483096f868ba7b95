//! The device's side of a split virtqueue (VIRTIO 1.2, 2.7).
//!
//! Returned chains become visible together, by one store ([`Split::publish`]). [`Split::arm`] asks
//! for kicks and checks again, so that no chain is missed.

use super::{
    Chain, Descriptor, Entries, F_INDIRECT, F_NEXT, F_WRITE, IndirectTable, MAX_QUEUE_SIZE,
    RingError, RingFeatures, Windows, area_bytes, need_event,
};
use forebay_guest::GuestMemory;
use std::sync::atomic::{Ordering::SeqCst, fence};

/// VIRTQ_AVAIL_F_NO_INTERRUPT and VIRTQ_USED_F_NO_NOTIFY.
const F_NO: u16 = 1;

/// Prefetch distances, in chains: descriptors, their buffers, and the targets of those.
const AHEAD: [u16; 3] = [12, 8, 4];

/// See the module.
pub struct Split {
    windows: Windows,
    size: u16,
    features: RingFeatures,
    /// Next available entry to take, and the last seen available index.
    next_available: u16,
    seen_available: u16,
    /// Next used entry to write, and the published used index.
    next_used: u16,
    published: u16,
    asked: u16,
    /// Call after the next publication, because the driver's state is unknown.
    call_anyway: bool,
    /// Head, indirect table and first piece of the last chain.
    last: (u16, [u64; 2]),
    table: Box<IndirectTable>,
}

impl Split {
    /// A ring that starts at available entry `base` and at the ring's used index. Fails if it is
    /// unsupported.
    pub fn new(
        windows: Windows,
        size: u16,
        features: RingFeatures,
        base: u16,
    ) -> Result<Self, RingError> {
        if !size.is_power_of_two() || size > MAX_QUEUE_SIZE {
            return Err(RingError::Size);
        }
        check(&windows, size)?;
        let used = windows.device.load_u16_acquire(2);
        Ok(Self {
            windows,
            size,
            features,
            next_available: base,
            seen_available: base,
            next_used: used,
            published: used,
            asked: used,
            call_anyway: true,
            last: (0, [0; 2]),
            table: Box::default(),
        })
    }

    pub(crate) fn move_to(&mut self, windows: Windows) -> Result<(), RingError> {
        check(&windows, self.size)?;
        self.windows = windows;
        Ok(())
    }

    /// Number of descriptors.
    pub const fn size(&self) -> u16 {
        self.size
    }

    /// The next available entry.
    pub const fn next_available(&self) -> u16 {
        self.next_available
    }

    pub(crate) fn set_next_available(&mut self, base: u16) {
        self.next_available = base;
        self.seen_available = base;
    }

    /// The used index that the driver sees.
    pub const fn published(&self) -> u16 {
        self.published
    }

    /// Takes the next chain; returns its head.
    #[inline]
    pub fn pop(
        &mut self,
        memory: &GuestMemory,
        chain: &mut Chain,
    ) -> Result<Option<u16>, RingError> {
        let known = self.known();
        if !self.has_available()? {
            return Ok(None);
        }
        self.fetch_ahead(known == 0, memory);
        let head = self.head(self.next_available);
        self.walk(head, memory, chain)?;
        self.last.0 = head;
        self.last.1[1] = chain.first_address();
        self.next_available = self.next_available.wrapping_add(1);
        Ok(Some(head))
    }

    #[inline]
    fn head(&self, entry: u16) -> u16 {
        let place = usize::from(entry & (self.size - 1));
        self.windows.driver.load_u16(4 + 2 * place)
    }

    #[inline]
    const fn known(&self) -> u16 {
        self.seen_available.wrapping_sub(self.next_available)
    }

    /// Prefetches what later chains need from the driver's cache: a line costs some hundred
    /// instructions.
    #[inline]
    fn fetch_ahead(&self, is_first: bool, memory: &GuestMemory) {
        let known = self.known();
        if is_first && known == 1 {
            // At queue depth 1, a chain is often where the last one was.
            let (head, addresses) = self.last;
            self.windows.descriptors.prefetch(16 * usize::from(head));
            for address in addresses {
                memory.prefetch(address);
            }
        } else if is_first {
            for (stage, ahead) in AHEAD.into_iter().enumerate() {
                for entry in 0..known.min(ahead) {
                    self.fetch(stage, entry, memory);
                }
            }
        }
        for (stage, ahead) in AHEAD.into_iter().enumerate() {
            if known > ahead {
                self.fetch(stage, ahead, memory);
            }
        }
    }

    #[inline]
    fn fetch(&self, stage: usize, ahead: u16, memory: &GuestMemory) {
        let head = self.head(self.next_available.wrapping_add(ahead));
        let place = 16 * usize::from(head);
        if stage == 0 {
            return self.windows.descriptors.prefetch(place);
        }
        let address = self.windows.descriptors.load_u64(place);
        if stage == 1 {
            return memory.prefetch(address);
        }
        let flags = (self.windows.descriptors.load_u64(place + 8) >> 32) as u16;
        if flags & F_INDIRECT != 0
            && let Some(view) = memory.view(address, 16)
            && let Some([address, _]) = view.load_two(0)
        {
            memory.prefetch(address);
        }
    }

    /// Whether no chain is available. Nothing is cached.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.known() == 0 && self.windows.driver.load_u16_acquire(2) == self.next_available
    }

    /// Whether a chain is available.
    #[inline]
    pub fn has_available(&mut self) -> Result<bool, RingError> {
        if self.seen_available == self.next_available {
            self.seen_available = self.windows.driver.load_u16_acquire(2);
            if self.seen_available.wrapping_sub(self.next_available) > self.size {
                self.seen_available = self.next_available;
                return Err(RingError::AvailableIndex);
            }
        }
        Ok(self.seen_available != self.next_available)
    }

    /// Reads the chain at `head`.
    #[inline]
    pub fn walk(
        &mut self,
        head: u16,
        memory: &GuestMemory,
        chain: &mut Chain,
    ) -> Result<(), RingError> {
        chain.clear();
        let mut at = head;
        for _ in 0..self.size {
            if at >= self.size {
                return Err(RingError::DescriptorIndex);
            }
            let place = 16 * usize::from(at);
            let d = Descriptor::of_words(
                self.windows.descriptors.load_u64(place),
                self.windows.descriptors.load_u64(place + 8),
            );
            let [flags, next] = d.words;
            if flags & F_INDIRECT != 0 {
                if !self.features.indirect || flags & F_NEXT != 0 {
                    return Err(RingError::Indirect);
                }
                self.last.1[0] = d.address;
                return walk_table(&self.table.read(&d, memory)?, chain);
            }
            chain.push(d.address, d.len, flags & F_WRITE != 0);
            if flags & F_NEXT == 0 {
                return chain.end();
            }
            at = next;
        }
        Err(RingError::Loop)
    }

    /// Returns a chain, still invisible to the driver.
    #[inline]
    pub fn put(&mut self, head: u16, written_bytes: u32) {
        let place = 4 + 8 * usize::from(self.next_used & (self.size - 1));
        self.windows.device.store_u32(place, u32::from(head));
        self.windows.device.store_u32(place + 4, written_bytes);
        self.next_used = self.next_used.wrapping_add(1);
    }

    /// Shows returned chains to the driver.
    #[inline]
    pub fn publish(&mut self) {
        self.windows.device.store_u16(2, self.next_used);
        self.published = self.next_used;
    }

    /// Whether the driver wants a call for chains published since the last check.
    #[inline]
    pub fn wants_call(&mut self) -> bool {
        let (old, new) = (self.asked, self.published);
        if old == new {
            return false;
        }
        self.asked = new;
        // The driver stores its wish, then loads the index; the device does the reverse.
        fence(SeqCst);
        let wants = if self.features.event_idx {
            let event = (self.windows.driver).load_u16(4 + 2 * usize::from(self.size));
            need_event(event, new, old)
        } else {
            self.windows.driver.load_u16(0) & F_NO == 0
        };
        std::mem::take(&mut self.call_anyway) || wants
    }

    /// Asks for kicks; true if a chain is available already.
    pub fn arm(&mut self) -> Result<bool, RingError> {
        if self.features.event_idx {
            let event = 4 + 8 * usize::from(self.size);
            self.windows.device.store_u16(event, self.next_available);
        } else {
            self.windows.device.store_u16(0, 0);
        }
        fence(SeqCst);
        self.has_available()
    }

    /// Asks for no kicks. (With the event index there are none until the next event is set.)
    pub fn disarm(&mut self) {
        if !self.features.event_idx {
            self.windows.device.store_u16(0, F_NO);
        }
    }
}

/// Entries of an indirect table are linked by index (VIRTIO 2.7.5.3).
#[inline]
fn walk_table(table: &Entries<'_>, chain: &mut Chain) -> Result<(), RingError> {
    let mut at = 0;
    for _ in 0..table.count.min(MAX_QUEUE_SIZE.into()) {
        let d = table.get(at)?;
        let [flags, next] = d.words;
        if flags & F_INDIRECT != 0 {
            return Err(RingError::Indirect);
        }
        chain.push(d.address, d.len, flags & F_WRITE != 0);
        if flags & F_NEXT == 0 {
            return chain.end();
        }
        at = usize::from(next);
    }
    Err(RingError::Loop)
}

fn check(windows: &Windows, size: u16) -> Result<(), RingError> {
    let (descriptors, driver, device) = area_bytes(false, size);
    if windows.descriptors.len() < descriptors
        || windows.driver.len() < driver
        || windows.device.len() < device
    {
        return Err(RingError::TooShort);
    }
    // Natural alignment of each area's words (VIRTIO 2.7).
    if !windows.descriptors.is_aligned(16)
        || !windows.driver.is_aligned(2)
        || !windows.device.is_aligned(4)
    {
        return Err(RingError::Alignment);
    }
    if !windows.device.is_writable() {
        return Err(RingError::ReadOnly);
    }
    Ok(())
}
