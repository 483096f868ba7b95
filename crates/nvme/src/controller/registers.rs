//! Controller properties: enable, reset and shutdown.
//!
//! [`crate::pcie`] has the admin queue registers, interrupts and doorbells.

use super::{Controller, ControllerConfig, ControllerKind, ControllerState, Effect};
use crate::Status;
use crate::register::{self, Cap, Cc, Crto, Csts};

/// Enable and reset timeout: 30 s, longer than the engine parks a command on a fault.
const READY_TIMEOUT_500_MS: u8 = 60;

impl Controller {
    /// Controller capabilities.
    pub fn cap(&self) -> Cap {
        Cap::new()
            .with_mqes((self.config.max_queue_entries - 1) as u16)
            .with_cqr(true)
            .with_to(READY_TIMEOUT_500_MS)
            .with_css(Cap::CSS_NVM)
            .with_crms(Cap::CRMS_WITH_MEDIA)
    }
    /// Controller configuration.
    pub fn cc(&self) -> Cc {
        Cc::from_bits(self.state.cc)
    }
    /// Controller status.
    pub fn csts(&self) -> Csts {
        Csts::from_bits(self.state.csts)
    }

    /// Whether commands outside Fabrics may run; otherwise they end with Command Sequence Error.
    pub fn ready(&self) -> bool {
        let (cc, csts) = (self.cc(), self.csts());
        cc.en() && csts.rdy() && !csts.cfs() && csts.shst() == Csts::SHST_NORMAL
    }

    /// Reads a property (Base 2.0, 6.5) of 8 bytes (`wide`) or 4.
    pub fn property_get(&self, offset: u32, wide: bool) -> Result<u64, Status> {
        match (offset, wide) {
            (register::CAP, true) => Ok(self.cap().into_bits()),
            (register::VS, false) => Ok(u64::from(register::VERSION_2_0)),
            (register::CC, false) => Ok(u64::from(self.state.cc)),
            (register::CSTS, false) => Ok(u64::from(self.state.csts)),
            (register::CRTO, false) => {
                let timeout = u16::from(READY_TIMEOUT_500_MS);
                Ok(u64::from(Crto::new().with_crwmt(timeout).into_bits()))
            }
            _ => Err(Status::INVALID_FIELD),
        }
    }

    /// Writes a property (Base 2.0, 6.6); only CC is writable.
    pub fn property_set(
        &mut self,
        offset: u32,
        wide: bool,
        value: u64,
        now_ns: u64,
    ) -> Result<Effect, Status> {
        if (offset, wide) != (register::CC, false) {
            return Err(Status::INVALID_FIELD);
        }
        // Any access restarts the keep alive timer.
        self.state.keep_alive(now_ns);
        // CAP.CRMS lacks independent ready, so CRIME reads as zero (Base 2.0, 3.1.3.5).
        let effect = self.write_cc(Cc::from_bits(value as u32).with_crime(false))?;
        // A Discovery controller has nothing in flight.
        if self.config.kind == ControllerKind::Discovery
            && matches!(effect, Effect::Reset | Effect::Shutdown)
        {
            self.quiesced();
            return Ok(Effect::None);
        }
        Ok(effect)
    }

    fn write_cc(&mut self, new: Cc) -> Result<Effect, Status> {
        let (old, csts) = (self.cc(), self.csts());
        match (old.en(), new.en()) {
            (false, true) => {
                // The host did not wait for CSTS.RDY to clear, so its reset is unfinished.
                if csts.rdy() {
                    return Err(Status::COMMAND_SEQUENCE_ERROR);
                }
                self.state.cc = new.with_shn(0).into_bits();
                if !self.config.cc_supported(new) {
                    self.state.set_csts(Csts::new().with_cfs(true));
                    return Ok(Effect::None);
                }
                self.state.set_csts(Csts::new().with_rdy(true));
                Ok(Effect::Enabled)
            }
            (true, false) => {
                self.state.cc = new.with_shn(old.shn()).into_bits();
                Ok(Effect::Reset)
            }
            (enabled, _) => {
                // While enabled, only EN, SHN and the I/O entry sizes may change (Base 2.0,
                // 3.1.3.5, 3.5.1). Hosts choose the sizes after Identify Controller. Only a reset
                // ends a shutdown.
                let begins = new.shn() != 0 && old.shn() == 0;
                let shn = if old.shn() == 0 { new.shn() } else { old.shn() };
                let kept = match (enabled, self.config.kind) {
                    (false, _) => new,
                    (true, ControllerKind::Pcie) => {
                        old.with_iosqes(new.iosqes()).with_iocqes(new.iocqes())
                    }
                    (true, _) => old,
                };
                self.state.cc = kept.with_shn(shn).into_bits();
                if !begins {
                    return Ok(Effect::None);
                }
                if !enabled && !csts.rdy() {
                    self.state.set_csts(csts.with_shst(Csts::SHST_COMPLETE));
                    return Ok(Effect::None);
                }
                self.state.set_csts(csts.with_shst(Csts::SHST_OCCURRING));
                Ok(Effect::Shutdown)
            }
        }
    }

    /// Whether I/O queues can be created: their entry sizes are set.
    pub(crate) fn may_make_queues(&self) -> bool {
        entry_sizes_supported(self.cc())
    }

    /// Begins a reset from outside the controller; continues as [`Effect::Reset`].
    pub fn begin_reset(&mut self) {
        self.state.cc = self.cc().with_en(false).into_bits();
    }

    /// The effect that still awaits [`Controller::quiesced`].
    pub fn unfinished(&self) -> Effect {
        let csts = self.csts();
        match self.cc().en() {
            false if csts.rdy() => Effect::Reset,
            true if csts.shst() == Csts::SHST_OCCURRING => Effect::Shutdown,
            _ => Effect::None,
        }
    }

    /// Completes [`Effect::Reset`] or [`Effect::Shutdown`]: no I/O command runs, the I/O queues are
    /// gone, and a shutdown was flushed.
    pub fn quiesced(&mut self) {
        self.state.io_queues = [0; 2];
        if !self.cc().en() {
            // Controller Level Reset (Base 2.0, 3.7.2): event requests end without completion;
            // properties and features return to defaults.
            self.state.cc = 0;
            self.state.set_csts(Csts::new());
            self.state.reset_events();
            self.reset_features();
        } else if self.csts().shst() == Csts::SHST_OCCURRING {
            self.state
                .set_csts(self.csts().with_shst(Csts::SHST_COMPLETE));
        }
    }

    /// Enables the controller without a host.
    pub(super) fn make_ready(&mut self) {
        self.state.cc = Cc::new().with_en(true).into_bits();
        self.state.set_csts(Csts::new().with_rdy(true));
    }

    /// Sets Controller Fatal Status; the owner must end the association.
    pub fn fail(&mut self) {
        self.state.set_csts(self.csts().with_cfs(true));
    }
}

/// Whether I/O entries have 64 and 16 bytes.
fn entry_sizes_supported(cc: Cc) -> bool {
    cc.iosqes() == 6 && cc.iocqes() == 4
}

impl ControllerConfig {
    /// Whether the controller can be enabled (Base 2.0, 3.1.3.5). Entry sizes matter only for
    /// Fabrics I/O here; PCIe checks them at queue creation.
    fn cc_supported(&self, cc: Cc) -> bool {
        (self.kind != ControllerKind::Io || entry_sizes_supported(cc))
            && cc.css() == 0
            && cc.mps() == 0
            && cc.ams() == 0
    }
}

impl ControllerState {
    fn set_csts(&mut self, csts: Csts) {
        self.csts = csts.into_bits();
    }
}
