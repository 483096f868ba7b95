//! An NVMe controller as a state machine: one [`Controller`] per association, I/O or Discovery, or
//! per controller that a management endpoint shows.
//!
//! Commands, data and time come in; completions and [`Effect`]s go out. The owner copies the
//! [`ControllerState`] to where a successor finds it. [`AdminEnv`] supplies the current namespaces.
//! Transports call [`Controller::transfer`], [`Controller::admin`], then [`Controller::next_event`]
//! until it is empty.
//!
//! Only the owner knows when no old command runs. So CC.EN and CC.SHN return an [`Effect`], and
//! CSTS follows on [`Controller::quiesced`].
//!
//! I/O data is elsewhere; [`crate::pcie`] has memory-based queues. There is one command set and
//! power state; nothing survives a reset.

mod ana;
mod config;
mod connect;
mod events;
mod features;
mod identify;
mod keep_alive;
mod log_pages;
mod management;
mod notices;
mod registers;
mod state;
mod supported;
#[cfg(test)]
mod tests;
mod virtualization;

pub use ana::{Ana, AnaState};
pub use config::{
    AdminEnv, ControllerConfig, ControllerKind, Firmware, Health, NamespaceInfo,
    SubsystemController, ascii,
};
pub use connect::{AdminConnect, IoQueue, Refusal, check_admin_connect};
pub use events::EventCompletion;
pub use log_pages::ErrorReport;
pub use state::{ControllerState, StateError};
pub use supported::management_opcodes;

use crate::fabrics::{PropertyCommand, fctype};
use crate::io::Transfer;
use crate::log_page::ErrorEntry;
use crate::opcode::{self, admin};
use crate::{Nqn, Sqe, Status};
use zerocopy::FromZeros;

/// Maximum namespaces.
pub const MAX_NAMESPACES: u32 = 64;
/// The highest valid namespace identifier (Base 2.0, 3.2.1.2).
pub(crate) const MAX_NSID: u32 = 0xFFFF_FFFE;
/// The namespace with features and reservations.
const FEATURES_NSID: u32 = 1;
/// Maximum I/O queues.
pub const MAX_IO_QUEUES: u16 = 128;
/// Maximum outstanding Asynchronous Event Requests.
pub const MAX_EVENT_REQUESTS: usize = 4;

/// The controller of one association.
#[derive(Clone, Debug)]
pub struct Controller {
    config: ControllerConfig,
    hostnqn: Nqn,
    state: ControllerState,
    // Newest first. Not in the state: a successor's log is empty.
    errors: [ErrorEntry; log_pages::ERROR_ENTRIES],
    // Of management controllers; the state's list has too few places for their identifiers.
    changed: management::ChangedNamespaces,
}

/// The owner's work after a property write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Nothing.
    None,
    /// Enabled and ready.
    Enabled,
    /// Reset (Base 2.0, 3.7.2): drain I/O commands, drop the I/O queues but not the admin queue,
    /// call [`Controller::quiesced`].
    Reset,
    /// Shutdown (Base 2.0, 3.6): as [`Effect::Reset`], but flush first.
    Shutdown,
}

/// The outcome of an admin command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AdminOutcome {
    /// Post a completion.
    Complete {
        /// Status field.
        status: Status,
        /// Completion dwords 0 and 1.
        result: u64,
        /// Bytes of `out` to send first; 0 on failure.
        data_bytes: u32,
        /// The owner's work.
        effect: Effect,
    },
    /// An Asynchronous Event Request waits for [`Controller::next_event`].
    Parked,
    /// Set Reservation Persistence, for the owner of the reservations.
    Reserve {
        /// For [`crate::reservation::ReservationCommand::new`], with keys of 0.
        action: u32,
    },
}

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
    /// A new association's controller, disabled.
    pub fn new(config: ControllerConfig, connect: &AdminConnect, now_ns: u64) -> Self {
        let mut controller = Self {
            config: config.normalized(),
            hostnqn: connect.hostnqn,
            state: ControllerState::new_zeroed(),
            errors: [ErrorEntry::new_zeroed(); log_pages::ERROR_ENTRIES],
            changed: management::ChangedNamespaces::default(),
        };
        controller.state.cntlid = controller.config.cntlid;
        controller.state.hostnqn = connect.hostnqn.to_field();
        controller.state.hostid = connect.hostid;
        controller.reset_features();
        controller.state.set_kato_ms(connect.kato_ms);
        controller.state.keep_alive_from_ns = now_ns;
        controller
    }

    /// A controller of [`ControllerKind::Management`]: always ready, and without a host.
    pub fn management(config: ControllerConfig) -> Self {
        let mut controller = Self::without_host(ControllerConfig {
            kind: ControllerKind::Management,
            ..config
        });
        controller.make_ready();
        controller
    }

    /// The controller of a host without a name.
    pub(crate) fn without_host(config: ControllerConfig) -> Self {
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

    /// Continues from another process's untrusted state.
    pub fn restore(config: ControllerConfig, state: &ControllerState) -> Result<Self, StateError> {
        let config = config.normalized();
        let hostnqn = state.check(&config)?;
        Ok(Self {
            config,
            hostnqn,
            state: *state,
            errors: [ErrorEntry::new_zeroed(); log_pages::ERROR_ENTRIES],
            changed: management::ChangedNamespaces::default(),
        })
    }

    /// Changing state, without the error log.
    pub fn state(&self) -> &ControllerState {
        &self.state
    }
    /// The configuration.
    pub fn config(&self) -> &ControllerConfig {
        &self.config
    }
    /// Controller identifier.
    pub fn cntlid(&self) -> u16 {
        self.config.cntlid
    }
    /// The host's NQN.
    pub fn hostnqn(&self) -> Nqn {
        self.hostnqn
    }
    /// The subsystem's NQN.
    pub fn subnqn(&self) -> Nqn {
        self.config.subnqn
    }

    /// An admin command's data, at most MDTS; its SGL must describe at least as much.
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

    /// Runs an admin command other than Connect (see [`check_admin_connect`]).
    ///
    /// `data_in` and `out` have the sizes of [`Controller::transfer`].
    pub fn admin(
        &mut self,
        sqe: &Sqe,
        data_in: &[u8],
        out: &mut [u8],
        env: &dyn AdminEnv,
        now_ns: u64,
    ) -> AdminOutcome {
        self.note_command(sqe, now_ns);
        if sqe.opcode() == opcode::FABRICS && self.config.kind.is_fabrics() {
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
        // Before ready, only Fabrics commands are allowed (Base 2.0, 3.5.4).
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
                // A small buffer is the caller's error.
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
            // `admin_effects` refused the others, except those of `crate::pcie` and
            // `crate::management`.
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
            // Already connected (Base 2.0, 6.3).
            opcode::fctype::CONNECT => Err(Status::COMMAND_SEQUENCE_ERROR),
            _ => Err(Status::INVALID_OPCODE),
        }
    }
}

fn failed(status: Status) -> AdminOutcome {
    AdminOutcome::Complete {
        // Only our errors are worth a retry.
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
