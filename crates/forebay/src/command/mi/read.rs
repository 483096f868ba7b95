//! What `forebay mi` shows.

use forebay_device::size::format_bytes;
use forebay_initiator::mi::MiClient;
use forebay_nvme::identify::{IdentifyNamespace, cns};
use forebay_nvme::mi::data::{SubsystemHealth, SubsystemInformation};
use forebay_nvme::mi::vendor::{
    self, CommandFigures, DeviceHealth, DeviceHealthHeader, NONE, NamespaceStatistics, UNKNOWN,
    text_of,
};
use forebay_nvme::mi::{DataStructure, MiCommand};
use forebay_nvme::opcode::admin;
use serde::Serialize;
use zerocopy::FromBytes;
use zerocopy::little_endian::U64;

use super::{MANAGEMENT, command};
use crate::failure::{Failure, Outcome};
use crate::output::{Output, exactly, pairs, table};

const PAGE_BYTES: usize = 4096;
/// Devices of a pool, at most.
const DEVICES_MAX: usize = 256;

fn unusable(what: &str) -> Failure {
    Failure::new(format!("the node's answer has no valid {what}"))
}

/// A structure at the begin of an answer.
fn parsed<T: FromBytes>(data: &[u8], what: &str) -> Outcome<T> {
    let (value, _) = T::read_from_prefix(data).map_err(|_| unusable(what))?;
    Ok(value)
}

pub(super) fn log_page(
    client: &mut MiClient,
    lid: u8,
    nsid: u32,
    offset: usize,
    bytes: usize,
) -> Outcome<Vec<u8>> {
    let dwords = (bytes / 4 - 1) as u32;
    let mut sqe = command(admin::GET_LOG_PAGE, nsid, u32::from(lid) | dwords << 16);
    sqe.cdw10_15[2] = (offset as u32).into();
    Ok(client.admin_read(MANAGEMENT, sqe, bytes)?.1)
}

#[derive(Serialize)]
struct Endpoint {
    uuid: String,
    eid: u8,
    /// The version of NVMe-MI.
    version: String,
    functional: bool,
    /// SMART's Critical Warning.
    critical_warning: u8,
    temperature_c: Option<i16>,
    used_percent: u8,
    controllers: Vec<u16>,
}

pub(super) fn show(output: Output, client: &mut MiClient) -> Outcome {
    let uuid = uuid::Uuid::from_bytes(client.endpoint_uuid()?);
    let eid = client.endpoint_id()?;
    let subsystem = client.data_structure(DataStructure::Subsystem)?;
    let subsystem: SubsystemInformation = parsed(&subsystem, "information")?;
    let (_, health) = client.command(MiCommand::SubsystemHealth { clear: false })?;
    let health: SubsystemHealth = parsed(&health, "health")?;
    let controllers = client.data_structure(DataStructure::Controllers { from: 0 })?;
    let (controllers, _) = controllers.as_chunks();
    let endpoint = Endpoint {
        uuid: uuid.to_string(),
        eid,
        version: format!("{}.{}", subsystem.major, subsystem.minor),
        functional: health.status & SubsystemHealth::FUNCTIONAL != 0,
        critical_warning: !health.no_warnings,
        temperature_c: match health.temperature {
            0x80..=0xC3 => None,
            celsius => Some(i16::from(celsius as i8)),
        },
        used_percent: health.life_used,
        controllers: controllers
            .iter()
            .skip(1)
            .map(|id| u16::from_le_bytes(*id))
            .collect(),
    };
    output.show(&endpoint, |endpoint| {
        let controllers: Vec<String> = endpoint.controllers.iter().map(u16::to_string).collect();
        pairs([
            ("UUID", endpoint.uuid.clone()),
            ("EID", endpoint.eid.to_string()),
            ("NVMe-MI", endpoint.version.clone()),
            (
                "state",
                if endpoint.functional {
                    "works"
                } else {
                    "does not serve"
                }
                .to_owned(),
            ),
            (
                "critical warning",
                format!("{:#04x}", endpoint.critical_warning),
            ),
            ("temperature", celsius(endpoint.temperature_c)),
            ("life used", format!("{} %", endpoint.used_percent)),
            ("controllers", controllers.join(" ")),
        ])
    })
}

fn celsius(known: Option<i16>) -> String {
    known.map_or_else(|| "-".to_owned(), |celsius| format!("{celsius} °C"))
}

#[derive(Serialize)]
struct Namespace {
    nsid: u32,
    uuid: String,
    size_bytes: u64,
    used_bytes: u64,
    block_bytes: u32,
    controllers: Vec<u16>,
}

pub(super) fn namespaces(output: Output, client: &mut MiClient) -> Outcome {
    let mut all = Vec::new();
    let mut after = 0;
    loop {
        let list = identify(client, after, cns::ALLOCATED_NAMESPACES)?;
        let (list, _) = list.as_chunks();
        let list = list.iter().map(|entry| u32::from_le_bytes(*entry));
        let list: Vec<u32> = list.take_while(|nsid| *nsid > after).collect();
        let Some(last) = list.last() else { break };
        after = *last;
        for nsid in list {
            all.push(namespace(client, nsid)?);
        }
    }
    output.show(&all, |all| {
        let rows = all.iter().map(|namespace| {
            let controllers: Vec<String> =
                namespace.controllers.iter().map(u16::to_string).collect();
            [
                namespace.nsid.to_string(),
                format_bytes(namespace.size_bytes),
                format_bytes(namespace.used_bytes),
                namespace.block_bytes.to_string(),
                controllers.join(" "),
                namespace.uuid.clone(),
            ]
        });
        table(
            ["NSID", ">SIZE", ">USED", ">BLOCK", "CONTROLLERS", "UUID"],
            rows,
        )
    })
}

fn identify(client: &mut MiClient, nsid: u32, cns: u8) -> Outcome<Vec<u8>> {
    let sqe = command(admin::IDENTIFY, nsid, cns.into());
    Ok(client.admin_read(MANAGEMENT, sqe, PAGE_BYTES)?.1)
}

/// The index of a namespace's LBA format.
pub(super) fn format_of(client: &mut MiClient, nsid: u32) -> Outcome<u8> {
    let id = identify(client, nsid, cns::ALLOCATED_NAMESPACE)?;
    let id: IdentifyNamespace = parsed(&id, "namespace")?;
    Ok(id.flbas & 0xF)
}

fn namespace(client: &mut MiClient, nsid: u32) -> Outcome<Namespace> {
    let id = identify(client, nsid, cns::ALLOCATED_NAMESPACE)?;
    let id: IdentifyNamespace = parsed(&id, "namespace")?;
    let controllers = identify(client, nsid, cns::NAMESPACE_CONTROLLERS)?;
    let (controllers, _) = controllers.as_chunks();
    let mut controllers = controllers.iter().map(|id| u16::from_le_bytes(*id));
    let count = usize::from(controllers.next().unwrap_or(0));
    let block_bytes = id.block_bytes().unwrap_or(0);
    let bytes = |blocks: U64| blocks.get().saturating_mul(block_bytes.into());
    Ok(Namespace {
        nsid,
        uuid: uuid::Uuid::from_bytes(id.nguid).to_string(),
        size_bytes: bytes(id.nsze),
        used_bytes: bytes(id.nuse),
        block_bytes,
        controllers: controllers.take(count).collect(),
    })
}

#[derive(Serialize)]
struct ShownDevice {
    index: u8,
    spec: String,
    state: &'static str,
    data_bytes: u64,
    used_bytes: u64,
    errors: u64,
    drive: Option<ShownDrive>,
}

#[derive(Serialize)]
struct ShownDrive {
    model: String,
    serial: String,
    firmware: String,
    critical_warning: u8,
    temperature_c: Option<i16>,
    spare_percent: Option<u8>,
    used_percent: Option<u8>,
    media_errors: Option<u64>,
    power_on_hours: Option<u64>,
    unsafe_shutdowns: Option<u64>,
}

fn number(field: U64) -> Option<u64> {
    (field != NONE).then(|| field.get())
}

pub(super) fn devices(output: Output, client: &mut MiClient) -> Outcome {
    const HEADER: usize = size_of::<DeviceHealthHeader>();
    const ENTRY: usize = size_of::<DeviceHealth>();
    let header = log_page(client, vendor::LOG_DEVICE_HEALTH, 0, 0, HEADER)?;
    let header: DeviceHealthHeader = parsed(&header, "device health")?;
    let step = usize::from(header.entry_bytes.get());
    if step < ENTRY {
        return Err(unusable("device health"));
    }
    let mut devices = Vec::new();
    let count = usize::try_from(header.devices.get()).unwrap_or(0);
    for at in 0..count.min(DEVICES_MAX) {
        let offset = HEADER + at * step;
        let entry = log_page(client, vendor::LOG_DEVICE_HEALTH, 0, offset, ENTRY)?;
        devices.push(device(&parsed(&entry, "device health")?));
    }
    output.show(&devices, |devices| {
        let or_dash = |value: Option<String>| value.unwrap_or_else(|| "-".to_owned());
        let rows = devices.iter().map(|device| {
            let drive = device.drive.as_ref();
            let percent = |of: fn(&ShownDrive) -> Option<u8>| {
                or_dash(drive.and_then(of).map(|percent| format!("{percent} %")))
            };
            [
                device.index.to_string(),
                device.spec.clone(),
                device.state.to_owned(),
                format_bytes(device.used_bytes),
                format_bytes(device.data_bytes),
                or_dash(drive.map(|drive| drive.model.clone())),
                celsius(drive.and_then(|drive| drive.temperature_c)),
                percent(|drive| drive.spare_percent),
                percent(|drive| drive.used_percent),
                or_dash(
                    drive
                        .and_then(|drive| drive.media_errors)
                        .map(|n| n.to_string()),
                ),
            ]
        });
        let header = [
            "DEVICE",
            "SPEC",
            "STATE",
            ">USED",
            ">SIZE",
            "DRIVE",
            ">TEMPERATURE",
            ">SPARE",
            ">LIFE USED",
            ">MEDIA ERRORS",
        ];
        table(header, rows)
    })
}

fn device(entry: &DeviceHealth) -> ShownDevice {
    let text = |field: &[u8]| text_of(field).unwrap_or("?").to_owned();
    let percent = |value: u8| (value != UNKNOWN).then_some(value);
    let kelvins = i16::try_from(entry.temperature_k.get()).unwrap_or(0);
    let drive = (entry.source != 0).then(|| ShownDrive {
        model: text(&entry.model),
        serial: text(&entry.serial),
        firmware: text(&entry.firmware),
        critical_warning: entry.critical_warning,
        temperature_c: (kelvins > 0).then(|| kelvins - 273),
        spare_percent: percent(entry.spare_percent),
        used_percent: percent(entry.used_percent),
        media_errors: number(entry.media_errors),
        power_on_hours: number(entry.power_on_hours),
        unsafe_shutdowns: number(entry.unsafe_shutdowns),
    });
    ShownDevice {
        index: entry.index,
        spec: text(&entry.specification),
        state: match entry.state {
            0 => "online",
            1 => "opening",
            2 => "failing",
            3 => "failed",
            4 => "missing",
            _ => "unknown",
        },
        data_bytes: entry.data_bytes.get(),
        used_bytes: entry.used_bytes.get(),
        errors: entry.errors.get(),
        drive,
    }
}

#[derive(Serialize)]
struct Statistics {
    nsid: u32,
    exports: u32,
    queues: u32,
    read: Figures,
    write: Figures,
    flush: Figures,
    deallocate: Figures,
    in_flight: u64,
    throttled: u64,
    used_bytes: u64,
}

#[derive(Serialize)]
struct Figures {
    commands: u64,
    bytes: u64,
    errors: u64,
    p50_ns: u64,
    p99_ns: u64,
}

impl From<CommandFigures> for Figures {
    fn from(figures: CommandFigures) -> Self {
        Self {
            commands: figures.commands.get(),
            bytes: figures.bytes.get(),
            errors: figures.errors.get(),
            p50_ns: figures.p50_ns.get(),
            p99_ns: figures.p99_ns.get(),
        }
    }
}

pub(super) fn statistics(output: Output, client: &mut MiClient, nsid: u32) -> Outcome {
    const BYTES: usize = size_of::<NamespaceStatistics>();
    let page = log_page(client, vendor::LOG_NAMESPACE_STATISTICS, nsid, 0, BYTES)?;
    let page: NamespaceStatistics = parsed(&page, "statistics")?;
    let statistics = Statistics {
        nsid: page.nsid.get(),
        exports: page.exports.get(),
        queues: page.queues.get(),
        read: page.reads.into(),
        write: page.writes.into(),
        flush: page.flushes.into(),
        deallocate: page.deallocations.into(),
        in_flight: page.in_flight.get(),
        throttled: page.throttled.get(),
        used_bytes: page.used_bytes.get(),
    };
    output.show(&statistics, |all| {
        let kinds = [
            ("read", &all.read),
            ("write", &all.write),
            ("flush", &all.flush),
            ("deallocate", &all.deallocate),
        ];
        let micros = |ns: u64| format!("{:.1}", ns as f64 / 1e3);
        let rows = kinds.map(|(name, of)| {
            [
                name.to_owned(),
                of.commands.to_string(),
                format_bytes(of.bytes),
                of.errors.to_string(),
                micros(of.p50_ns),
                micros(of.p99_ns),
            ]
        });
        let header = [
            "COMMANDS", ">COUNT", ">BYTES", ">ERRORS", ">P50 US", ">P99 US",
        ];
        let more = pairs([
            ("exports", all.exports.to_string()),
            ("queues", all.queues.to_string()),
            ("in flight", all.in_flight.to_string()),
            ("throttled", all.throttled.to_string()),
            ("used", exactly(all.used_bytes)),
        ]);
        format!("{}\n\n{more}", table(header, rows))
    })
}
