//! A controller as a state machine.
//!
//! # Purpose
//! One [`Controller`] per association: its properties, Admin commands, features, log pages,
//! asynchronous events, keep alive and I/O queue bookkeeping, for I/O and Discovery controllers.
//!
//! # Design
//! Commands, data and the time come in; completions and [`Effect`]s go out. What changes lives in
//! one plain structure, [`ControllerState`], which the owner copies wherever a successor will look
//! for it. What the namespaces are *now* is asked through [`AdminEnv`] each time, so growth needs
//! no copy here. Transports call [`Controller::transfer`] to learn how much data a command moves,
//! then [`Controller::admin`] with that data, then [`Controller::next_event`] until it is empty.
//!
//! The reset and the shutdown of a controller promise the host that nothing of its old commands is
//! still running, and only the owner knows that. So CC.EN and CC.SHN give an [`Effect`], and CSTS
//! follows when the owner calls [`Controller::quiesced`].
//!
//! # What it does not do
//! It moves no I/O data, parses no SGL, owns no queue memory, and keeps no clock. Queue creation by
//! Admin command, interrupts and doorbells are [`crate::pcie`]. There is
//! one I/O command set (NVM), one power state, and nothing is saved across resets.

mod ana;
mod config;
mod connect;
mod events;
mod features;
mod identify;
mod keep_alive;
mod log_pages;
mod notices;
mod registers;
mod state;
mod supported;
#[cfg(test)]
mod tests;
mod virtualization;

pub use ana::{Ana, AnaState};
pub use config::{
    AdminEnv, ControllerConfig, ControllerKind, Health, NamespaceInfo, SubsystemController, ascii,
};
pub use connect::{AdminConnect, IoQueue, Refusal, check_admin_connect};
pub use events::EventCompletion;
pub use log_pages::ErrorReport;
pub use state::{ControllerState, StateError};

use crate::fabrics::{PropertyCommand, fctype};
use crate::io::Transfer;
use crate::log_page::ErrorEntry;
use crate::opcode::{self, admin};
use crate::{Nqn, Sqe, Status};
use zerocopy::FromZeros;

/// The most namespaces a controller can have.
pub const MAX_NAMESPACES: u32 = 64;
/// The namespace whose features and reservations a controller keeps.
const FEATURES_NSID: u32 = 1;
/// The most I/O queues a controller can have.
pub const MAX_IO_QUEUES: u16 = 128;
/// Asynchronous Event Requests that a host may have outstanding.
pub const MAX_EVENT_REQUESTS: usize = 4;

/// A controller of one association. See the module's documentation.
#[derive(Clone, Debug)]
pub struct Controller {
    config: ControllerConfig,
    hostnqn: Nqn,
    state: ControllerState,
    // Newest first. Not part of the state: a successor starts with an empty page.
    errors: [ErrorEntry; log_pages::ERROR_ENTRIES],
}

/// What the owner must do because of a property that the host wrote.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Nothing.
    None,
    /// The controller is enabled and ready.
    Enabled,
    /// Controller reset (Base 2.0, 3.7.2): start no I/O command, let those in flight end, drop the
    /// I/O queues, keep the Admin queue; then call [`Controller::quiesced`].
    Reset,
    /// Shutdown (Base 2.0, 3.6): as [`Effect::Reset`], and make everything written durable before
    /// calling [`Controller::quiesced`].
    Shutdown,
}

/// How an Admin command ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AdminOutcome {
    /// Post a completion.
    Complete {
        /// Status field.
        status: Status,
        /// Dwords 0 and 1 of the completion.
        result: u64,
        /// Bytes of `out` that go to the host first; 0 unless the status is success.
        data_bytes: u32,
        /// What else must happen.
        effect: Effect,
    },
    /// No completion now: an Asynchronous Event Request waits for [`Controller::next_event`].
    Parked,
    /// No completion now: Reservation Persistence is to be set, which is for whoever keeps the
    /// namespace's reservations. The action is for [`crate::reservation::ReservationCommand::new`],
    /// with keys of 0.
    Reserve {
        /// What is asked.
        action: u32,
    },
}

/// The success of a command, inside the state machine.
#[derive(Default)]
struct Reply {
    result: u64,
    data_bytes: u32,
    /// See [`AdminOutcome::Reserve`].
    action: Option<u32>,
}

impl Reply {
    fn data(bytes: usize) -> Self {
        Self {
            data_bytes: bytes as u32,
            ..Self::default()
        }
    }
    fn result(result: u32) -> Self {
        Self {
            result: u64::from(result),
            ..Self::default()
        }
    }
}

impl Controller {
    /// The controller of a new association, not yet enabled.
    pub fn new(config: ControllerConfig, connect: &AdminConnect, now_ns: u64) -> Self {
        let mut controller = Self {
            config: config.normalized(),
            hostnqn: connect.hostnqn,
            state: ControllerState::new_zeroed(),
            errors: [ErrorEntry::new_zeroed(); log_pages::ERROR_ENTRIES],
        };
        controller.state.cntlid = controller.config.cntlid;
        controller.state.hostnqn = connect.hostnqn.to_field();
        controller.state.hostid = connect.hostid;
        controller.reset_features();
        controller.state.set_kato_ms(connect.kato_ms);
        controller.state.keep_alive_from_ns = now_ns;
        controller
    }

    /// The controller of a PCI function: nobody connects to it, so its host has no name.
    pub(crate) fn of_function(config: ControllerConfig) -> Self {
        let connect = AdminConnect {
            subnqn: config.subnqn,
            hostnqn: config.subnqn,
            hostid: [0; 16],
            entries: config.max_queue_entries,
            kato_ms: 0,
            disable_sq_flow_control: false,
        };
        Self::new(config, &connect, 0)
    }

    /// A controller that continues where another process left off. The state is not trusted.
    pub fn restore(config: ControllerConfig, state: &ControllerState) -> Result<Self, StateError> {
        let config = config.normalized();
        let hostnqn = state.check(&config)?;
        Ok(Self {
            config,
            hostnqn,
            state: *state,
            errors: [ErrorEntry::new_zeroed(); log_pages::ERROR_ENTRIES],
        })
    }

    /// Everything that changes in a controller, except the contents of the error log.
    pub fn state(&self) -> &ControllerState {
        &self.state
    }
    /// What the controller was made with.
    pub fn config(&self) -> &ControllerConfig {
        &self.config
    }
    /// Controller Identifier.
    pub fn cntlid(&self) -> u16 {
        self.config.cntlid
    }
    /// The host of the association.
    pub fn hostnqn(&self) -> Nqn {
        self.hostnqn
    }
    /// The subsystem.
    pub fn subnqn(&self) -> Nqn {
        self.config.subnqn
    }

    /// The data that an Admin command moves. Its SGL must describe at least as much; a command
    /// that asks for more than MDTS is refused here.
    pub fn transfer(&self, sqe: &Sqe) -> Result<Transfer, Status> {
        match sqe.opcode() {
            admin::IDENTIFY => Ok(Transfer::ToHost(crate::identify::IDENTIFY_BYTES as u32)),
            admin::GET_LOG_PAGE => {
                let bytes = log_pages::requested_bytes(sqe);
                match u32::try_from(bytes) {
                    Ok(bytes) if bytes <= self.config.mdts_bytes => Ok(Transfer::ToHost(bytes)),
                    _ => Err(Status::INVALID_FIELD.with_dnr()),
                }
            }
            admin::GET_FEATURES => Ok(match features::data_bytes(sqe) {
                0 => Transfer::None,
                bytes => Transfer::ToHost(bytes),
            }),
            admin::SET_FEATURES => Ok(match features::data_bytes(sqe) {
                0 => Transfer::None,
                bytes => Transfer::FromHost(bytes),
            }),
            _ => Ok(Transfer::None),
        }
    }

    /// Runs a command of the Admin queue; Connect itself never comes here (see
    /// [`check_admin_connect`]).
    ///
    /// `data_in` holds what [`Controller::transfer`] said comes from the host; `out` has room for
    /// what it said goes to the host.
    pub fn admin(
        &mut self,
        sqe: &Sqe,
        data_in: &[u8],
        out: &mut [u8],
        env: &dyn AdminEnv,
        now_ns: u64,
    ) -> AdminOutcome {
        self.note_command(sqe, now_ns);
        if sqe.opcode() == opcode::FABRICS && self.config.kind != ControllerKind::Pcie {
            return match self.fabrics(sqe, now_ns) {
                Ok((result, effect)) => AdminOutcome::Complete {
                    status: Status::SUCCESS,
                    result,
                    data_bytes: 0,
                    effect,
                },
                Err(status) => failed(status),
            };
        }
        // Base 2.0, 3.5.4: until the controller is ready only Fabrics commands are processed.
        if !self.ready() {
            return failed(Status::COMMAND_SEQUENCE_ERROR);
        }
        if supported::admin_effects(self.config.face(env), sqe.opcode()).is_none() {
            return failed(Status::INVALID_OPCODE);
        }
        if sqe.opcode() == admin::ASYNC_EVENT_REQUEST && sqe.fuse() == 0 {
            return match self.state.event_request(sqe.cid()) {
                Ok(()) => AdminOutcome::Parked,
                Err(status) => failed(status),
            };
        }
        match self.dispatch(sqe, data_in, out, env, now_ns) {
            Ok(Reply {
                action: Some(action),
                ..
            }) => AdminOutcome::Reserve { action },
            Ok(reply) => AdminOutcome::Complete {
                status: Status::SUCCESS,
                result: reply.result,
                data_bytes: reply.data_bytes,
                effect: Effect::None,
            },
            Err(status) => failed(status),
        }
    }

    fn dispatch(
        &mut self,
        sqe: &Sqe,
        data_in: &[u8],
        out: &mut [u8],
        env: &dyn AdminEnv,
        now_ns: u64,
    ) -> Result<Reply, Status> {
        if sqe.fuse() != 0 {
            return Err(Status::INVALID_FIELD);
        }
        let (data_in, out): (&[u8], &mut [u8]) = match self.transfer(sqe)? {
            Transfer::None => (&[], &mut []),
            Transfer::ToHost(bytes) => {
                // A smaller buffer is the caller's mistake, not the host's.
                let out = out
                    .get_mut(..bytes as usize)
                    .ok_or(Status::INTERNAL_ERROR)?;
                out.fill(0);
                (&[], out)
            }
            Transfer::FromHost(bytes) => {
                let data = data_in.get(..bytes as usize);
                (data.ok_or(Status::DATA_SGL_LENGTH_INVALID)?, &mut [])
            }
        };
        match sqe.opcode() {
            admin::IDENTIFY => self.config.identify(sqe, out, env),
            admin::GET_LOG_PAGE => self.get_log_page(sqe, out, env),
            admin::GET_FEATURES => self.get_features(sqe, out, env),
            admin::SET_FEATURES => self.set_features(sqe, data_in, env, now_ns),
            admin::ABORT => Ok(self.state.abort(sqe)),
            admin::VIRTUALIZATION_MANAGEMENT => self.config.virtualization_management(sqe, env),
            admin::KEEP_ALIVE => {
                self.state.keep_alive(now_ns);
                Ok(Reply::default())
            }
            // `admin_effects` has kept out the others, but for those that `crate::pcie` carries out.
            _ => Err(Status::INVALID_OPCODE),
        }
    }

    fn fabrics(&mut self, sqe: &Sqe, now_ns: u64) -> Result<(u64, Effect), Status> {
        let property = PropertyCommand::of(sqe);
        let wide = || property.wide().ok_or(Status::INVALID_FIELD);
        match fctype(sqe) {
            opcode::fctype::PROPERTY_GET => Ok((
                self.property_get(property.ofst.get(), wide()?)?,
                Effect::None,
            )),
            opcode::fctype::PROPERTY_SET => {
                let (offset, value) = (property.ofst.get(), property.value.get());
                Ok((0, self.property_set(offset, wide()?, value, now_ns)?))
            }
            // The queue is connected already (Base 2.0, 6.3).
            opcode::fctype::CONNECT => Err(Status::COMMAND_SEQUENCE_ERROR),
            _ => Err(Status::INVALID_OPCODE),
        }
    }
}

fn failed(status: Status) -> AdminOutcome {
    AdminOutcome::Complete {
        // Our own mistakes may be retried, the host's may not.
        status: if status == Status::INTERNAL_ERROR {
            status
        } else {
            status.with_dnr()
        },
        result: 0,
        data_bytes: 0,
        effect: Effect::None,
    }
}
