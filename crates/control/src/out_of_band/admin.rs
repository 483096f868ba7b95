//! Tunnelled Admin commands (NVMe-MI 1.2, 6).
//!
//! A state machine of crate `nvme` answers what reads. Commands that change the node are carried out
//! here, in `namespaces` and beside it.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use forebay_nvme::controller::{
    AdminOutcome, Controller, ControllerConfig, ErrorReport, Firmware, ascii,
};
use forebay_nvme::io::Transfer;
use forebay_nvme::mi::{AdminCommand, MiRefusal, MiStatus, vendor};
use forebay_nvme::opcode::admin;
use forebay_nvme::{Nqn, Sqe, Status};

use super::answer::CommandAnswer;
use super::environment::Environment;
use super::node::{Caller, ManagedNode};
use super::vendor::is_log;
use crate::clock::now_unix_ms;
use crate::config::{Function, Right};
use crate::daemon::Daemon;

/// The place of CTLID in the message.
const CONTROLLER_AT: MiRefusal = MiRefusal::at(6);
/// The subsystem of an endpoint, whose UUID follows.
const NQN_PREFIX: &str = "nqn.2014-08.org.nvmexpress:uuid:";

/// Controllers that were addressed, by CNTLID: their features and error logs.
pub(super) type Controllers = Arc<Mutex<BTreeMap<u16, Controller>>>;

impl ManagedNode {
    /// A function by its number.
    pub(super) fn function(&self, number: u16) -> Option<&Function> {
        self.config
            .functions
            .iter()
            .find(|function| function.number == number)
    }

    fn new_controller(&self, cntlid: u16) -> Controller {
        let uuid = self.identity.uuid;
        let serial: String = uuid.simple().to_string().chars().take(20).collect();
        let nqn = format!("{NQN_PREFIX}{uuid}");
        let nqn = Nqn::parse(&nqn).unwrap_or_else(|_| Nqn::discovery());
        Controller::management(ControllerConfig {
            firmware: ascii(&self.version),
            ..ControllerConfig::management(cntlid, nqn, &serial)
        })
    }

    /// Carries out an Admin command.
    pub(super) async fn admin(&self, command: &AdminCommand<'_>, caller: &Caller) -> CommandAnswer {
        if !self.has_controller(command.controller) {
            return CONTROLLER_AT.into();
        }
        let answer = match command.sqe.opcode() {
            admin::SET_FEATURES => self.set_features(command, caller).await,
            admin::NAMESPACE_MANAGEMENT => self.namespace_management(command, caller).await,
            admin::NAMESPACE_ATTACHMENT => self.namespace_attachment(command, caller).await,
            admin::FORMAT_NVM => self.format(command, caller).await,
            admin::FIRMWARE_DOWNLOAD => self.firmware_download(command).await,
            admin::FIRMWARE_COMMIT => self.firmware_commit(command, caller).await,
            vendor::SET_NAMESPACE_BUDGET => self.set_budget(command, caller).await,
            vendor::ADD_DEVICE => self.add_device(command, caller).await,
            admin::GET_LOG_PAGE if is_log(command.sqe.cdw(10) as u8) => {
                self.vendor_log(command).await
            }
            _ => self.by_controller(command).await,
        };
        if let Some(status) = answer.failure() {
            self.record_error(command, status);
        }
        answer
    }

    /// Adds a failed command to the error log of its controller.
    fn record_error(&self, command: &AdminCommand<'_>, status: Status) {
        let mut controllers = self
            .controllers
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let fresh = || self.new_controller(command.controller);
        let controller = controllers.entry(command.controller).or_insert_with(fresh);
        controller.record_error(ErrorReport {
            status,
            nsid: command.sqe.nsid(),
            ..ErrorReport::default()
        });
    }

    async fn set_features(&self, command: &AdminCommand<'_>, caller: &Caller) -> CommandAnswer {
        if !self.may(Right::Configuration) {
            return CommandAnswer::status(MiStatus::ACCESS_DENIED);
        }
        let answer = self.by_controller(command).await;
        let request = format!(
            "Set Features {:#x} of controller {}: {:#x}",
            command.sqe.cdw(10) as u8,
            command.controller,
            command.sqe.cdw(11)
        );
        if answer.succeeded() {
            self.audit(
                caller,
                "change a controller's feature",
                request,
                false,
                "done",
            )
            .await;
        }
        answer
    }

    /// By the controller's state machine.
    async fn by_controller(&self, command: &AdminCommand<'_>) -> CommandAnswer {
        let cntlid = command.controller;
        let (sqe, data) = (command.sqe, command.data.to_vec());
        let controllers = self.controllers.clone();
        let functions = self.function_numbers();
        let (version, fresh) = (self.version.clone(), self.new_controller(cntlid));
        let done = self.daemon.ask(move |daemon| {
            let mut controllers = controllers.lock().unwrap_or_else(PoisonError::into_inner);
            let controller = controllers.entry(cntlid).or_insert(fresh);
            let condition = daemon.condition();
            let environment = Environment {
                condition: &condition,
                cntlid,
                functions: &functions,
                firmware: firmware(daemon, &version),
            };
            run(controller, &sqe, &data, &environment)
        });
        match done.await {
            Ok(Ok(Completed {
                status,
                result,
                data,
            })) => {
                // A failed command has no data.
                let part = match data {
                    Some(data) => command.part(&data).map(<[u8]>::to_vec),
                    None => Ok(Vec::new()),
                };
                part.map_or_else(CommandAnswer::from, |data| {
                    CommandAnswer::admin(status, result, data)
                })
            }
            Ok(Err(status)) => CommandAnswer::status(status),
            // The daemon stops.
            Err(_) => CommandAnswer::status(MiStatus::INTERNAL_ERROR),
        }
    }
}

/// The slots, as the log page has them.
fn firmware(daemon: &Daemon, version: &str) -> Firmware {
    let slots = daemon.firmware_commands().slots();
    let running = slots.running.unwrap_or(slots.next);
    let revision = |number: u8| {
        let slot = slots.slots.iter().find(|slot| slot.slot == number);
        let known = slot.and_then(|slot| slot.version.as_deref());
        // Something runs, even if its version is unknown.
        let known = known.or_else(|| (number == running).then_some(version));
        known.map(ascii)
    };
    Firmware {
        active_slot: running,
        next_slot: if slots.next == running { 0 } else { slots.next },
        revisions: [revision(1), revision(2)],
    }
}

struct Completed {
    status: Status,
    result: u64,
    /// Of a command that returns data.
    data: Option<Vec<u8>>,
}

fn run(
    controller: &mut Controller,
    sqe: &Sqe,
    data: &[u8],
    environment: &Environment<'_>,
) -> Result<Completed, MiStatus> {
    let failed = |status| Completed {
        status,
        result: 0,
        data: None,
    };
    let (mut out, input) = match controller.transfer(sqe) {
        Err(status) => return Ok(failed(status)),
        Ok(Transfer::ToHost(bytes)) => (vec![0; bytes as usize], &[][..]),
        Ok(Transfer::FromHost(bytes)) => match data.get(..bytes as usize) {
            Some(data) => (Vec::new(), data),
            None => return Err(MiStatus::INVALID_INPUT_SIZE),
        },
        Ok(Transfer::None) => (Vec::new(), &[][..]),
    };
    let now_ns = now_unix_ms().saturating_mul(1_000_000);
    match controller.admin(sqe, input, &mut out, environment, now_ns) {
        AdminOutcome::Complete {
            status,
            result,
            data_bytes,
            ..
        } if status == Status::SUCCESS => Ok(Completed {
            status,
            result,
            data: (data_bytes > 0).then(|| {
                out.truncate(data_bytes as usize);
                out
            }),
        }),
        AdminOutcome::Complete { status, .. } => Ok(failed(status)),
        // Neither concerns a controller without a host.
        AdminOutcome::Parked | AdminOutcome::Reserve { .. } => Ok(failed(Status::INVALID_OPCODE)),
    }
}
