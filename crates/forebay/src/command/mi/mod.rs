//! `forebay mi`: a management controller's side of the out-of-band endpoint.

mod change;
mod read;

use forebay_initiator::mi::{MiClient, MiError};
use forebay_nvme::mi::MiRefusal;
use forebay_nvme::{Sqe, Status};

use crate::cli::{MiArgs, MiCommand};
use crate::context::Context;
use crate::failure::{Failure, Outcome, While};
use crate::output::Output;

/// The controller that manages the node.
const MANAGEMENT: u16 = 0;

impl From<MiError> for Failure {
    fn from(error: MiError) -> Self {
        let failure = Self::new(error.to_string());
        match error {
            MiError::Line(_) | MiError::TimedOut(_) => failure.unreachable(),
            MiError::Refused(MiRefusal::Parameter { .. }) => {
                failure.hint("the node may be of another version")
            }
            MiError::Failed(Status::OPERATION_DENIED) => failure.hint(
                "hosts, snapshots or other exports use the volume; the daemon's log on the node says which",
            ),
            MiError::Failed(_) => failure.hint("the daemon's log on the node says why"),
            _ => failure,
        }
    }
}

pub(crate) fn mi(
    output: Output,
    args: &MiArgs,
    context: impl FnOnce() -> Outcome<Context>,
) -> Outcome {
    let line = &args.line;
    let open = || MiClient::open(line).while_doing(format!("open the line {}", line.display()));
    match &args.command {
        MiCommand::Delete { nsid } => {
            let question = format!("Delete namespace {nsid} with its data?");
            context()?.confirm(&question)?;
        }
        MiCommand::Format { nsid } => {
            context()?.confirm(&format!("Erase the data of namespace {nsid}?"))?;
        }
        _ => {}
    }
    let mut client = open().map_err(Failure::unreachable)?;
    match &args.command {
        MiCommand::Show => read::show(output, &mut client),
        MiCommand::Namespaces => read::namespaces(output, &mut client),
        MiCommand::Devices => read::devices(output, &mut client),
        MiCommand::Statistics { nsid } => read::statistics(output, &mut client, *nsid),
        MiCommand::Budget(budget) => change::budget(output, &mut client, budget),
        MiCommand::SetEid { eid } => change::set_eid(output, &mut client, *eid),
        MiCommand::Create { size } => change::create(output, &mut client, *size),
        MiCommand::Delete { nsid } => change::delete(output, &mut client, *nsid),
        MiCommand::Attach { nsid, controller } => {
            change::attach(output, &mut client, *nsid, *controller, true)
        }
        MiCommand::Detach { nsid, controller } => {
            change::attach(output, &mut client, *nsid, *controller, false)
        }
        MiCommand::Format { nsid } => change::format(output, &mut client, *nsid),
        MiCommand::AddDevice { spec } => change::add_device(output, &mut client, spec),
        MiCommand::Firmware {
            image,
            at_next_start,
        } => change::firmware(output, &mut client, image, *at_next_start),
    }
}

/// An Admin command with its namespace and dword 10.
fn command(opcode: u8, nsid: u32, cdw10: u32) -> Sqe {
    let mut sqe = Sqe::new(opcode, 0);
    sqe.nsid = nsid.into();
    sqe.cdw10_15[0] = cdw10.into();
    sqe
}
