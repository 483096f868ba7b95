//! A PCI function with an NVMe controller: registers, configuration space and resets.
//!
//! The owner saves the [`FunctionState`] after each `&mut self` call. Only it knows when old
//! commands have ended: a [`RegisterEffect`] asks it to drain them, and [`Function::quiesced`] is
//! its answer.

use super::interrupt::Coalescing;
use super::state::MSIX_TABLE_BYTES;
use super::{
    BAR0_BYTES, CqState, DOORBELLS_AT, FunctionState, Memory, PAGE_BYTES, PBA_AT, SqState,
    addresses, space,
};
use crate::controller::{Controller, ControllerConfig, Effect, EventCompletion, StateError};
use crate::register;
use zerocopy::FromZeros;

mod offset {
    /// Admin queue attributes (Base 2.0, 3.1.3.8).
    pub(super) const AQA: u64 = 0x24;
    /// Admin submission queue base (Base 2.0, 3.1.3.9).
    pub(super) const ASQ: u64 = 0x28;
    /// Admin completion queue base (Base 2.0, 3.1.3.10).
    pub(super) const ACQ: u64 = 0x30;
}

/// The owner's work after a register write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RegisterEffect {
    /// Nothing.
    None,
    /// Enabled or failed; the admin queue is new.
    Enabled,
    /// Reset: start nothing, drain, drop all queues, then call [`Function::quiesced`]. The write
    /// returns at once; CSTS.RDY shows progress.
    Reset,
    /// Shutdown: flush, then as [`RegisterEffect::Reset`]. CSTS.SHST shows progress.
    Shutdown,
}

/// A PCI function and its controller.
#[derive(Clone, Debug)]
pub struct Function {
    pub(super) controller: Controller,
    pub(super) state: FunctionState,
}

impl Function {
    /// A function in power-on state.
    pub fn new(config: ControllerConfig) -> Self {
        let controller = Controller::without_host(config);
        let mut function = Self {
            controller,
            state: FunctionState::new_zeroed(),
        };
        function.state.space = space::after_reset();
        function.mask_vectors();
        function
    }

    /// Continues from another process's untrusted state.
    pub fn restore(config: ControllerConfig, state: &FunctionState) -> Result<Self, StateError> {
        let controller = Controller::restore(config, &state.controller)?;
        state.check()?;
        let mut state = *state;
        state.space = space::sanitized(&state.space);
        if controller.ready() && state.sqs[0].entries == 0 {
            return Err(StateError("admin queue"));
        }
        Ok(Self { controller, state })
    }

    /// All changing state except cursors.
    pub fn state(&mut self) -> &FunctionState {
        self.state.controller = *self.controller.state();
        &self.state
    }

    /// The queues as of the last [`Function::state`].
    pub fn queues(&self) -> (&[SqState; super::QUEUES], &[CqState; super::QUEUES]) {
        (&self.state.sqs, &self.state.cqs)
    }

    /// The controller.
    pub fn controller(&self) -> &Controller {
        &self.controller
    }

    /// The controller, for changes and events.
    pub fn controller_mut(&mut self) -> &mut Controller {
        &mut self.controller
    }

    /// Whether commands are accepted.
    #[inline]
    pub fn ready(&self) -> bool {
        self.controller.ready()
    }

    /// Addresses of shadow doorbells and event indexes.
    pub fn shadow(&self) -> Option<(u64, u64)> {
        (self.state.shadow != 0).then_some((self.state.shadow, self.state.event_index))
    }

    /// Coalescing of a vector.
    pub fn coalescing(&self, vector: u16) -> Coalescing {
        match self.controller.coalesces(vector) {
            true => {
                let feature = self.controller.state().interrupt_coalescing;
                Coalescing::of(u16::from_le_bytes(feature))
            }
            false => Coalescing::default(),
        }
    }

    /// Whether all vectors are masked.
    pub fn masks_all(&self) -> bool {
        space::masks_all(&self.state.space)
    }

    /// Reads configuration space.
    pub fn read_config(&self, at: u64, into: &mut [u8]) {
        space::read(&self.state.space, at, into);
    }

    /// Writes configuration space. Returns true for a function level reset.
    ///
    /// The owner then calls [`Function::begin_reset`], and [`Function::quiesced`] after it drained.
    pub fn write_config(&mut self, at: u64, from: &[u8]) -> bool {
        space::write(&mut self.state.space, at, from)
    }

    /// Reads the MSI-X table; the owner supplies the pending bits.
    pub fn read_msix(&self, at: u64, pending: &[u64; 2], into: &mut [u8]) {
        let mut bits = [0; 16];
        bits[..8].copy_from_slice(&pending[0].to_le_bytes());
        bits[8..].copy_from_slice(&pending[1].to_le_bytes());
        for (at, byte) in addresses(at, into.len()).zip(into) {
            let table = usize::try_from(at)
                .ok()
                .and_then(|at| self.state.msix.get(at));
            let pba = at.checked_sub(PBA_AT).and_then(|at| bits.get(at as usize));
            *byte = table.or(pba).copied().unwrap_or(0);
        }
    }

    /// Writes the MSI-X table.
    pub fn write_msix(&mut self, at: u64, from: &[u8]) {
        for (at, byte) in addresses(at, from.len()).zip(from) {
            let Some(at) = usize::try_from(at).ok().filter(|at| *at < MSIX_TABLE_BYTES) else {
                return;
            };
            // Vector Control has only the mask bit.
            self.state.msix[at] = match at % 16 {
                12 => byte & 1,
                13.. => 0,
                _ => *byte,
            };
        }
    }

    fn mask_vectors(&mut self) {
        self.state.msix = [0; MSIX_TABLE_BYTES];
        for entry in self.state.msix.chunks_exact_mut(16) {
            entry[12] = 1;
        }
    }

    /// `at` is a multiple of 4.
    fn register(&self, at: u64) -> u32 {
        let half = |value: u64, at: u64| (value >> (8 * (at & 4))) as u32;
        let property = |at: u64| {
            let value = self.controller.property_get(at as u32, false);
            value.map_or(0, |value| value as u32)
        };
        match at {
            0x00 | 0x04 => half(self.controller.cap().into_bits(), at),
            0x08 | 0x14 | 0x1C | 0x68 => property(at),
            offset::AQA => self.state.aqa,
            0x28 | 0x2C => half(self.state.asq, at),
            0x30 | 0x34 => half(self.state.acq, at),
            _ => 0,
        }
    }

    /// Reads register bytes.
    pub fn read_registers(&self, at: u64, into: &mut [u8]) {
        for (at, byte) in addresses(at, into.len()).zip(into) {
            let word = match at {
                ..DOORBELLS_AT => self.register(at & !3),
                _ => 0,
            };
            *byte = word.to_le_bytes()[(at & 3) as usize];
        }
    }

    /// Writes 4 or 8 aligned bytes; ignores other, illegal accesses.
    pub fn write_registers<M: Memory>(
        &mut self,
        at: u64,
        from: &[u8],
        memory: &M,
        now_ns: u64,
    ) -> RegisterEffect {
        let word = |from: &[u8]| from.first_chunk().map(|bytes| u32::from_le_bytes(*bytes));
        let aligned = at.is_multiple_of(from.len().max(1) as u64) && at < BAR0_BYTES;
        match (from.len(), word(from), aligned) {
            (4, Some(value), true) => self.write_register(at, value, memory, now_ns),
            (8, Some(low), true) => {
                let first = self.write_register(at, low, memory, now_ns);
                let high = word(&from[4..]).unwrap_or(0);
                // Upper halves have no effects.
                match self.write_register(at + 4, high, memory, now_ns) {
                    RegisterEffect::None => first,
                    effect => effect,
                }
            }
            _ => RegisterEffect::None,
        }
    }

    fn write_register<M: Memory>(
        &mut self,
        at: u64,
        value: u32,
        memory: &M,
        now_ns: u64,
    ) -> RegisterEffect {
        let enabled = self.controller.cc().en();
        let low = |whole: u64| whole & !0xFFFF_FFFF | u64::from(value & !0xFFF);
        let high = |whole: u64| whole & 0xFFFF_FFFF | u64::from(value) << 32;
        match at {
            // The admin queue is fixed while enabled.
            offset::AQA if !enabled => self.state.aqa = value & 0x0FFF_0FFF,
            offset::ASQ if !enabled => self.state.asq = low(self.state.asq),
            0x2C if !enabled => self.state.asq = high(self.state.asq),
            offset::ACQ if !enabled => self.state.acq = low(self.state.acq),
            0x34 if !enabled => self.state.acq = high(self.state.acq),
            0x14 => return self.write_cc(value, memory, now_ns),
            _ => {}
        }
        RegisterEffect::None
    }

    fn write_cc<M: Memory>(&mut self, value: u32, memory: &M, now_ns: u64) -> RegisterEffect {
        let effect = (self.controller).property_set(register::CC, false, value.into(), now_ns);
        match effect {
            Ok(Effect::None) | Err(_) => RegisterEffect::None,
            Ok(Effect::Reset) => RegisterEffect::Reset,
            Ok(Effect::Shutdown) => RegisterEffect::Shutdown,
            Ok(Effect::Enabled) => {
                self.enable(memory);
                RegisterEffect::Enabled
            }
        }
    }

    /// Creates the admin queue, or fails the controller.
    fn enable<M: Memory>(&mut self, memory: &M) {
        let state = &mut self.state;
        let sq = SqState {
            base: state.asq,
            entries: (state.aqa & 0xFFF) + 1,
            ..SqState::default()
        };
        let cq = CqState {
            base: state.acq,
            entries: (state.aqa >> 16 & 0xFFF) + 1,
            vector: 0,
            interrupts: 1,
        };
        let good = sq.entries >= 2
            && cq.entries >= 2
            && sq.base.is_multiple_of(PAGE_BYTES)
            && cq.base.is_multiple_of(PAGE_BYTES)
            && memory.holds(sq.base, u64::from(sq.entries) * 64, false)
            && memory.holds(cq.base, u64::from(cq.entries) * 16, true);
        if !good {
            self.controller.fail();
            return;
        }
        state.sqs[0] = sq;
        state.cqs[0] = cq;
        state.admin_taken = 0;
        state.admin_completed = 0;
        state.outbox = Default::default();
    }

    /// Ends [`RegisterEffect::Reset`] or [`RegisterEffect::Shutdown`]: no command is in flight.
    pub fn quiesced(&mut self) {
        let shutdown = self.controller.cc().en();
        self.controller.quiesced();
        if !shutdown {
            self.drop_queues();
        }
    }

    fn drop_queues(&mut self) {
        self.state.sqs = [SqState::default(); super::QUEUES];
        self.state.cqs = [CqState::default(); super::QUEUES];
        self.state.shadow = 0;
        self.state.event_index = 0;
    }

    /// Function level or bus reset: power-on state, then as [`RegisterEffect::Reset`].
    pub fn begin_reset(&mut self) {
        self.state.space = space::after_reset();
        self.mask_vectors();
        (self.state.aqa, self.state.asq, self.state.acq) = (0, 0, 0);
        self.controller.begin_reset();
    }

    /// The effect that still awaits [`Function::quiesced`].
    pub fn unfinished(&self) -> RegisterEffect {
        match self.controller.unfinished() {
            Effect::Reset => RegisterEffect::Reset,
            Effect::Shutdown => RegisterEffect::Shutdown,
            Effect::None | Effect::Enabled => RegisterEffect::None,
        }
    }

    /// Bus Master Enable (PCI Express Base, Command Register). Without it, nothing is fetched,
    /// completed or signalled.
    #[inline]
    pub fn is_bus_master(&self) -> bool {
        space::is_bus_master(&self.state.space)
    }

    /// Reports a fatal error; the host must reset.
    pub fn fail(&mut self) {
        self.controller.fail();
    }

    /// The next event, unless the outbox is full.
    pub(super) fn next_event(&mut self, room: u64) -> Option<EventCompletion> {
        match room {
            0 => None,
            _ => self.controller.next_event(),
        }
    }
}
