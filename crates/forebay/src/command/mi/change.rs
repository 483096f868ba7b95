//! What `forebay mi` changes.

use std::path::Path;

use forebay_control::model::Done;
use forebay_initiator::mi::MiClient;
use forebay_nvme::identify::IdentifyNamespace;
use forebay_nvme::mi::MAX_DATA_BYTES;
use forebay_nvme::mi::vendor::{self, AddDevice, NONE, NamespaceBudget};
use forebay_nvme::opcode::admin;
use serde::Serialize;
use zerocopy::little_endian::U64;
use zerocopy::{FromBytes, FromZeros, IntoBytes};

use super::read::log_page;
use super::{MANAGEMENT, command};
use crate::cli::{Amount, MiBudgetArgs};
use crate::failure::{Failure, Outcome, While};
use crate::output::{Output, bandwidth, pairs};

/// The block of format 0.
const BLOCK_BYTES: u64 = 4096;
/// SEL of Namespace Management and of Namespace Attachment.
const DELETE: u32 = 1;
const DETACH: u32 = 1;
/// SES of Format NVM, with its place: User Data Erase.
const USER_DATA_ERASE: u32 = 1 << 9;
/// Firmware Commit: slot 2, and the action in bits 5:3.
const SLOT: u32 = 2;
const REPLACE_AND_SELECT: u32 = 1 << 3;
const ACTIVATE: u32 = 3 << 3;

fn done(output: Output, done: String) -> Outcome {
    output.done(&Done { done })
}

pub(super) fn set_eid(output: Output, client: &mut MiClient, eid: u8) -> Outcome {
    client.set_endpoint_id(eid)?;
    done(output, format!("the endpoint has EID {eid}"))
}

pub(super) fn create(output: Output, client: &mut MiClient, bytes: u64) -> Outcome {
    let mut namespace = IdentifyNamespace::new_zeroed();
    namespace.nsze = bytes.div_ceil(BLOCK_BYTES).into();
    namespace.ncap = namespace.nsze;
    let sqe = command(admin::NAMESPACE_MANAGEMENT, 0, 0);
    let nsid = client.admin_write(MANAGEMENT, sqe, namespace.as_bytes())?;
    done(output, format!("namespace {nsid} is created"))
}

pub(super) fn delete(output: Output, client: &mut MiClient, nsid: u32) -> Outcome {
    let sqe = command(admin::NAMESPACE_MANAGEMENT, nsid, DELETE);
    client.admin_write(MANAGEMENT, sqe, &[])?;
    done(output, format!("namespace {nsid} is deleted"))
}

pub(super) fn attach(
    output: Output,
    client: &mut MiClient,
    nsid: u32,
    controller: u16,
    attach: bool,
) -> Outcome {
    let mut list = [0; MAX_DATA_BYTES];
    list[..2].copy_from_slice(&1u16.to_le_bytes());
    list[2..4].copy_from_slice(&controller.to_le_bytes());
    let select = if attach { 0 } else { DETACH };
    let sqe = command(admin::NAMESPACE_ATTACHMENT, nsid, select);
    client.admin_write(MANAGEMENT, sqe, &list)?;
    let what = if attach {
        "attached to"
    } else {
        "detached from"
    };
    done(
        output,
        format!("namespace {nsid} is {what} controller {controller}"),
    )
}

pub(super) fn format(output: Output, client: &mut MiClient, nsid: u32) -> Outcome {
    let formats = super::read::format_of(client, nsid)?;
    let sqe = command(
        admin::FORMAT_NVM,
        nsid,
        USER_DATA_ERASE | u32::from(formats),
    );
    client.admin_write(MANAGEMENT, sqe, &[])?;
    done(output, format!("namespace {nsid} is erased"))
}

#[derive(Serialize)]
struct ShownBudget {
    base_iops: Option<u64>,
    base_bytes_s: Option<u64>,
    burst_iops: Option<u64>,
    burst_bytes_s: Option<u64>,
}

pub(super) fn budget(output: Output, client: &mut MiClient, args: &MiBudgetArgs) -> Outcome {
    let stated = [
        args.base_iops,
        args.base_bandwidth,
        args.burst_iops,
        args.burst_bandwidth,
    ];
    if args.none || stated.iter().any(Option::is_some) {
        let field = |amount: Option<Amount>| amount.and_then(|a| a.0).map_or(NONE, U64::new);
        let budget = NamespaceBudget {
            base_iops: field(args.base_iops),
            base_bytes: field(args.base_bandwidth),
            burst_iops: field(args.burst_iops),
            burst_bytes: field(args.burst_bandwidth),
            ..NamespaceBudget::none()
        };
        let sqe = command(vendor::SET_NAMESPACE_BUDGET, args.nsid, 0);
        client.admin_write(MANAGEMENT, sqe, budget.as_bytes())?;
    }
    let bytes = size_of::<NamespaceBudget>();
    let page = log_page(client, vendor::LOG_NAMESPACE_BUDGET, args.nsid, 0, bytes)?;
    let page = NamespaceBudget::read_from_bytes(&page)
        .map_err(|_| Failure::new("the node's answer has no valid budget"))?;
    let value = |field: U64| (field != NONE).then(|| field.get());
    let budget = ShownBudget {
        base_iops: value(page.base_iops),
        base_bytes_s: value(page.base_bytes),
        burst_iops: value(page.burst_iops),
        burst_bytes_s: value(page.burst_bytes),
    };
    output.show(&budget, |budget| {
        let iops = |of: Option<u64>| of.map_or_else(|| "-".to_owned(), |iops| iops.to_string());
        let bytes = |of: Option<u64>| of.map_or_else(|| "-".to_owned(), bandwidth);
        pairs([
            ("base IOPS", iops(budget.base_iops)),
            ("base bandwidth", bytes(budget.base_bytes_s)),
            ("burst IOPS", iops(budget.burst_iops)),
            ("burst bandwidth", bytes(budget.burst_bytes_s)),
        ])
    })
}

pub(super) fn add_device(output: Output, client: &mut MiClient, spec: &str) -> Outcome {
    let mut device = AddDevice::new_zeroed();
    if spec.len() > device.specification.len() {
        return Err(Failure::invalid(
            "a device's specification has at most 512 bytes",
        ));
    }
    device.specification = vendor::text(spec);
    let sqe = command(vendor::ADD_DEVICE, 0, 0);
    let index = client.admin_write(MANAGEMENT, sqe, device.as_bytes())?;
    done(output, format!("{spec} is device {index} of the pool"))
}

pub(super) fn firmware(
    output: Output,
    client: &mut MiClient,
    image: &Path,
    at_next_start: bool,
) -> Outcome {
    // Much faster, if the node allows the setting.
    client.use_large_packets()?;
    let bytes = std::fs::read(image).while_doing(format!("read {}", image.display()))?;
    for (at, piece) in bytes.chunks(MAX_DATA_BYTES).enumerate() {
        // Counted in dwords.
        let (length, offset) = (piece.len() / 4, at * MAX_DATA_BYTES / 4);
        let mut sqe = command(
            admin::FIRMWARE_DOWNLOAD,
            0,
            (length as u32).saturating_sub(1),
        );
        sqe.cdw10_15[1] = (offset as u32).into();
        client.admin_write(MANAGEMENT, sqe, piece)?;
    }
    let action = if at_next_start {
        REPLACE_AND_SELECT
    } else {
        ACTIVATE
    };
    let sqe = command(admin::FIRMWARE_COMMIT, 0, SLOT | action);
    client.admin_write(MANAGEMENT, sqe, &[])?;
    done(
        output,
        match at_next_start {
            true => "slot 2 has the image; the next engine starts from it",
            false => "slot 2 has the image, and the engine runs it",
        }
        .to_owned(),
    )
}
