//! The out-of-band endpoint of a daemon, with this project's own client.

use anyhow::{Context, Result, bail, ensure};
use forebay_initiator::mi::{MiClient, MiError};
use forebay_initiator::{IoOp, IoQueue, Options, Session};
use forebay_nvme::identify::cns;
use forebay_nvme::mi::{
    AdminCommand, ControlPrimitive, ControllerHealthPoll, DataStructure, GetConfiguration,
    MiCommand, MiRefusal, MiRequest, MiResponse, MiStatus, SetConfiguration,
};
use forebay_nvme::opcode::admin;
use forebay_nvme::{NSID_ALL, Sqe, Status};
use forebay_tests::daemon::Daemon;
use forebay_tests::host::HOST_NQN;
use forebay_tests::lab::MINUTE;
use forebay_tests::out_of_band::{
    ALL_RIGHTS, attach, attach_all, client, command, create, daemon, delete, namespaces, table,
};
use forebay_tests::system::hold_by_pid;
use forebay_tests::wait;

const FUNCTIONS: &str = "[[out_of_band.function]]\nany_host = true\n\
    [[out_of_band.function]]\nfrontend = \"nvme_pcie\"\n\
    [[out_of_band.function]]\nnumber = 9\nfrontend = \"vhost_user\"\n";

fn refused<T>(done: Result<T, MiError>) -> Result<MiRefusal> {
    match done {
        Err(MiError::Refused(refusal)) => Ok(refusal),
        Err(error) => bail!("another error: {error}"),
        Ok(_) => bail!("not refused"),
    }
}

fn failed<T>(done: Result<T, MiError>) -> Result<Status> {
    match done {
        // Without Do Not Retry.
        Err(MiError::Failed(status)) => Ok(Status(status.code().0)),
        Err(error) => bail!("another error: {error}"),
        Ok(_) => bail!("it did not fail"),
    }
}

fn status(refusal: MiRefusal) -> Result<MiStatus> {
    match refusal {
        MiRefusal::Status(status) => Ok(status),
        MiRefusal::Parameter { byte, .. } => bail!("a parameter at byte {byte}"),
    }
}

fn at(refusal: MiRefusal) -> Result<u16> {
    match refusal {
        MiRefusal::Parameter { byte, .. } => Ok(byte),
        MiRefusal::Status(status) => bail!("a status: {status:?}"),
    }
}

fn audits(daemon: &Daemon) -> Result<Vec<String>> {
    let events = daemon.cli(&["events", "--audit", "--since", "2h"])?;
    let events = events.as_array().context("a list")?;
    let audits = events.iter().map(|event| &event["audit"]);
    let of_wire = audits.filter(|audit| audit["program"] == "nvme-mi");
    Ok(of_wire
        .map(|audit| format!("{}: {}", audit["user"], audit["request"]))
        .collect())
}

#[test]
fn mi_command_matrix() -> Result<()> {
    let daemon = daemon(ALL_RIGHTS, FUNCTIONS)?;
    let mut client = client(&daemon)?;
    interface_commands(&mut client)?;
    configuration_commands(&mut client)?;
    control_primitives(&mut client)?;
    identify_commands(&mut client)?;
    log_and_feature_commands(&mut client)?;
    malformed_messages(&mut client)?;
    firmware_commands(&mut client)?;
    malformed_namespaces(&mut client)?;
    namespace_refusals(&daemon, &mut client)
}

fn interface_commands(client: &mut MiClient) -> Result<()> {
    let subsystem = client.data_structure(DataStructure::Subsystem)?;
    ensure!(
        (subsystem.len(), subsystem[0], subsystem[1]) == (32, 0, 2),
        "{subsystem:?}"
    );
    let port = client.data_structure(DataStructure::Port(0))?;
    ensure!(port[0] == 2 && port[2..4] == [251, 0], "{port:?}");
    ensure!(at(refused(client.data_structure(DataStructure::Port(1)))?)? == 10);
    let controllers = DataStructure::Controllers { from: 0 };
    ensure!(client.data_structure(controllers)? == [4, 0, 0, 0, 1, 0, 2, 0, 9, 0]);
    let controllers = DataStructure::Controllers { from: 3 };
    ensure!(client.data_structure(controllers)? == [1, 0, 9, 0]);
    for controller in [0, 1, 9] {
        let information = client.data_structure(DataStructure::Controller(controller))?;
        ensure!(information.len() == 32);
    }
    ensure!(
        at(refused(
            client.data_structure(DataStructure::Controller(3))
        )?)? == 8
    );
    let optional = DataStructure::OptionalCommands {
        controller: 0,
        command_set: 0,
    };
    let optional = client.data_structure(optional)?;
    let count = usize::from(optional[0]);
    ensure!(optional.len() == 2 + 2 * count, "{optional:?}");
    ensure!(
        optional[2..]
            .chunks(2)
            .any(|entry| entry == [2 << 3, admin::NAMESPACE_MANAGEMENT])
    );
    ensure!(client.data_structure(DataStructure::BufferCommands)? == [0, 0]);

    let (_, health) = client.command(MiCommand::SubsystemHealth { clear: true })?;
    // The drive works, no reset is required, no warnings.
    ensure!(
        health.len() == 8 && health[..2] == [0x30, 0xFF],
        "{health:?}"
    );
    let poll = ControllerHealthPoll {
        first: 0,
        entries: 255,
        functions: 7,
        all: true,
        changes: 0,
        clear: false,
    };
    let (value, entries) = client.command(MiCommand::ControllerHealth(poll))?;
    ensure!(
        value >> 16 == 4 && entries.len() == 64,
        "{value:#x} {entries:?}"
    );
    ensure!(
        entries[2] & 1 == 1 && entries[18] & 1 == 0,
        "only controller 0 is ready"
    );
    let none = ControllerHealthPoll { first: 10, ..poll };
    ensure!(client.command(MiCommand::ControllerHealth(none))?.0 >> 16 == 0);

    let (_, vpd) = client.command(MiCommand::ReadVpd {
        offset: 0,
        bytes: 256,
    })?;
    ensure!(vpd.len() == 256 && vpd[0] == 1, "{vpd:?}");
    let beyond = client.command(MiCommand::ReadVpd {
        offset: 255,
        bytes: 2,
    });
    ensure!(at(refused(beyond)?)? == 12);
    let beyond = client.command(MiCommand::ReadVpd {
        offset: 257,
        bytes: 0,
    });
    ensure!(at(refused(beyond)?)? == 8);
    let write = MiCommand::WriteVpd {
        offset: 0,
        data: &[1, 2, 3, 4],
    };
    ensure!(status(refused(client.command(write))?)? == MiStatus::ACCESS_DENIED);
    ensure!(status(refused(client.command(MiCommand::Reset))?)? == MiStatus::ACCESS_DENIED);
    Ok(())
}

fn configuration_commands(client: &mut MiClient) -> Result<()> {
    let unit = GetConfiguration::TransmissionUnit { port: 0 };
    ensure!(client.command(MiCommand::GetConfiguration(unit))?.0 == 64);
    for (bytes, is_valid) in [
        (63, false),
        (252, false),
        (251, true),
        (64, true),
        (100, true),
    ] {
        let set = SetConfiguration::TransmissionUnit { port: 0, bytes };
        let done = client.command(MiCommand::SetConfiguration(set));
        match is_valid {
            true => ensure!(done.is_ok(), "{bytes}"),
            false => ensure!(at(refused(done)?)? == 12, "{bytes}"),
        }
    }
    ensure!(client.command(MiCommand::GetConfiguration(unit))?.0 == 100);
    let other = GetConfiguration::TransmissionUnit { port: 7 };
    ensure!(at(refused(client.command(MiCommand::GetConfiguration(other)))?)? == 11);
    let frequency = GetConfiguration::SmbusFrequency { port: 0 };
    ensure!(client.command(MiCommand::GetConfiguration(frequency))?.0 == 1);
    for (frequency, is_valid) in [(1, true), (2, false), (0, false)] {
        let set = SetConfiguration::SmbusFrequency { port: 0, frequency };
        let done = client.command(MiCommand::SetConfiguration(set));
        ensure!(done.is_ok() == is_valid, "{frequency}");
    }
    let clear = SetConfiguration::HealthStatusChange { clear: 0xFFFF };
    client.command(MiCommand::SetConfiguration(clear))?;
    let get = GetConfiguration::HealthStatusChange;
    ensure!(client.command(MiCommand::GetConfiguration(get))?.0 == 0);
    Ok(())
}

fn control(client: &mut MiClient, primitive: ControlPrimitive) -> Result<u16> {
    let answer = client.exchange(&MiRequest::Control(primitive, 0x5A).encode(0))?;
    match MiResponse::decode(&answer) {
        Ok((_, MiResponse::Control { tag: 0x5A, value })) => Ok(value),
        other => bail!("{other:?}"),
    }
}

fn control_primitives(client: &mut MiClient) -> Result<()> {
    let state = ControlPrimitive::GetState { clear_errors: true };
    control(client, state)?;
    ensure!(control(client, state)? == 0, "the slot is idle");
    ensure!(
        control(client, ControlPrimitive::Abort)? == 0,
        "there is nothing to abort"
    );
    control(client, ControlPrimitive::Pause)?;
    control(client, ControlPrimitive::Resume)?;
    Ok(())
}

fn identify_commands(client: &mut MiClient) -> Result<()> {
    let identify = |nsid, cdw10| command(admin::IDENTIFY, nsid, cdw10, 0);
    let (_, management) = client.admin_read(0, identify(0, cns::CONTROLLER.into()), 4096)?;
    ensure!(management[111] == 3, "the type is Administrative");
    let (_, function) = client.admin_read(9, identify(0, cns::CONTROLLER.into()), 4096)?;
    ensure!(
        function[111] == 1 && function[78..80] == [9, 0],
        "an I/O controller"
    );
    // Sanitize is not offered.
    ensure!(management[328..332] == [0; 4]);
    // A part of the data.
    let secondaries = identify(0, 0x15);
    let part = AdminCommand {
        controller: 0,
        sqe: secondaries,
        offset: 32,
        length: 32,
        data: &[],
    };
    let answer = client.exchange(&MiRequest::Admin(part).encode(0))?;
    let (_, MiResponse::Admin { data, .. }) = MiResponse::decode(&answer).ok().context("decode")?
    else {
        bail!("no Admin response");
    };
    let (_, whole) = client.admin_read(0, secondaries, 4096)?;
    ensure!(
        whole[0] == 3 && data == &whole[32..64],
        "{:?}",
        &whole[..128]
    );
    ensure!(
        data[..2] == [1, 0] && data[2..4] == [0, 0],
        "secondary 1 of primary 0"
    );
    for wrong in [0x20, 0xFF] {
        ensure!(failed(client.admin_read(0, identify(0, wrong), 4096))? == Status::INVALID_FIELD);
    }
    ensure!(at(refused(client.admin_read(3, identify(0, 1), 4096))?)? == 6);
    let beyond = AdminCommand {
        controller: 0,
        sqe: secondaries,
        offset: 4096,
        length: 4,
        data: &[],
    };
    let answer = client.exchange(&MiRequest::Admin(beyond).encode(0))?;
    let (_, MiResponse::Refused(refusal)) = MiResponse::decode(&answer).ok().context("decode")?
    else {
        bail!("not refused");
    };
    ensure!(at(refusal)? == 32);
    Ok(())
}

fn log_and_feature_commands(client: &mut MiClient) -> Result<()> {
    let log = |lid: u32, bytes: u32| {
        command(
            admin::GET_LOG_PAGE,
            NSID_ALL,
            lid | (bytes / 4 - 1) << 16,
            0,
        )
    };
    for (lid, bytes) in [
        (0x01, 64),
        (0x02, 512),
        (0x03, 512),
        (0x04, 4096),
        (0x05, 4096),
        (0x80, 64),
    ] {
        let (_, page) = client
            .admin_read(0, log(lid, bytes), bytes as usize)
            .with_context(|| format!("log page {lid:#x}"))?;
        ensure!(page.len() == bytes as usize);
        if lid == 0x03 {
            ensure!(page[0] & 7 == 1, "slot 1 runs");
        }
    }
    let wrong = client.admin_read(0, log(0x77, 64), 64);
    ensure!(failed(wrong)? == Status::INVALID_FIELD);
    let threshold = command(admin::GET_FEATURES, 0, 0x04, 0);
    client.admin_read(0, threshold, 0)?;
    client.admin_write(0, command(admin::SET_FEATURES, 0, 0x04, 300), &[])?;
    ensure!(client.admin_read(0, threshold, 0)?.0 == 300);
    let unknown = command(admin::GET_FEATURES, 0, 0x77, 0);
    ensure!(failed(client.admin_read(0, unknown, 0))? == Status::INVALID_FIELD);
    // Sanitize, and commands of hosts.
    for opcode in [0x84, admin::ASYNC_EVENT_REQUEST, 0x7F, 0xFF] {
        let refused = client.admin_write(0, command(opcode, 0, 0, 0), &[]);
        ensure!(failed(refused)? == Status::INVALID_OPCODE, "{opcode:#x}");
    }
    Ok(())
}

fn malformed_messages(client: &mut MiClient) -> Result<()> {
    let short = MiRequest::Command(MiCommand::Reset).encode(0);
    // Two command bytes less, with a valid check.
    let kinds = [
        (vec![0x84, 1 << 3, 0, 0, 1], MiStatus::INVALID_SIZE),
        (
            vec![0x84, 2 << 3, 0, 0, admin::IDENTIFY],
            MiStatus::INVALID_SIZE,
        ),
        (
            [&short[..short.len() - 4], &[0; 8][..]].concat(),
            MiStatus::INVALID_INPUT_SIZE,
        ),
        (
            [&[0x84, 1 << 3, 0, 0, 0x55][..], &[0; 11]].concat(),
            MiStatus::INVALID_OPCODE,
        ),
        (
            vec![0x84, 4 << 3, 0, 0, 0, 0, 0, 0],
            MiStatus::INVALID_OPCODE,
        ),
    ];
    for (mut message, expected) in kinds {
        let check = forebay_nvme::tcp::crc32c(&message);
        message.extend(check.to_le_bytes());
        let answer = client.exchange(&message)?;
        let (_, response) = MiResponse::decode(&answer).ok().context("decode")?;
        let MiResponse::Refused(refusal) = response else {
            bail!("{message:?}: {response:?}");
        };
        ensure!(status(refusal)? == expected, "{message:?}: {refusal:?}");
    }
    Ok(())
}

/// An empty or impossible image; `tests/firmware.rs` has the others.
fn firmware_commands(client: &mut MiClient) -> Result<()> {
    let commit = |slot: u32, action: u32| command(admin::FIRMWARE_COMMIT, 0, slot | action << 3, 0);
    let write = |client: &mut MiClient, sqe, data: &[u8]| failed(client.admin_write(0, sqe, data));
    ensure!(write(client, commit(2, 0), &[])? == Status::INVALID_FIRMWARE_IMAGE);
    ensure!(write(client, commit(1, 0), &[])? == Status::INVALID_FIRMWARE_SLOT);
    ensure!(write(client, commit(3, 3), &[])? == Status::INVALID_FIRMWARE_SLOT);
    let part = |dwords: u32, at: u32| command(admin::FIRMWARE_DOWNLOAD, 0, dwords - 1, at);
    client.admin_write(0, part(1024, 0), &[0xA5; 4096])?;
    ensure!(write(client, part(1024, 1 << 30), &[0; 4096])? == Status::INVALID_FIELD);
    ensure!(write(client, part(1024, 0), &[0; 64])? == Status::INVALID_FIELD);
    ensure!(write(client, commit(2, 3), &[])? == Status::INVALID_FIRMWARE_IMAGE);
    Ok(())
}

/// Data that describes no namespace, and lists of no controllers.
fn malformed_namespaces(client: &mut MiClient) -> Result<()> {
    let create = command(admin::NAMESPACE_MANAGEMENT, 0, 0, 0);
    let mut namespace = vec![0; 4096];
    namespace[0] = 8;
    namespace[8] = 8;
    let changed = |at: usize, value: u8| {
        let mut namespace = namespace.clone();
        namespace[at] = value;
        namespace
    };
    for (data, expected) in [
        (namespace[..2048].to_vec(), Status::INVALID_FIELD),
        (changed(0, 0), Status::INVALID_FIELD),
        (changed(8, 4), Status::THIN_PROVISIONING_NOT_SUPPORTED),
        (changed(26, 7), Status::INVALID_FORMAT),
        (changed(29, 1), Status::INVALID_FORMAT),
        (changed(9, 4), Status::INVALID_FIELD),
    ] {
        let done = failed(client.admin_write(0, create, &data))?;
        ensure!(done == expected, "{:?}: {done:?}", &data[..32]);
    }
    let mut huge = changed(7, 0x7F);
    huge[15] = 0x7F;
    let done = failed(client.admin_write(0, create, &huge))?;
    ensure!(done == Status::NAMESPACE_INSUFFICIENT_CAPACITY, "{done:?}");
    let attach = command(admin::NAMESPACE_ATTACHMENT, 1, 0, 0);
    let count_alone = 1_u16.to_le_bytes();
    let twice = [2_u16, 9, 9].map(u16::to_le_bytes);
    for list in [
        &[0; 4096][..],
        &[0xFF; 4096],
        &count_alone,
        twice.as_flattened(),
    ] {
        let mut data = list.to_vec();
        data.resize(data.len().next_multiple_of(4), 0);
        let done = failed(client.admin_write(0, attach, &data))?;
        ensure!(
            done == Status::CONTROLLER_LIST_INVALID,
            "{:?}: {done:?}",
            &data[..4]
        );
    }
    ensure!(namespaces(client, 0, cns::ALLOCATED_NAMESPACES)?.is_empty());
    Ok(())
}

fn namespace_refusals(daemon: &Daemon, client: &mut MiClient) -> Result<()> {
    let all = client.admin_write(0, command(admin::NAMESPACE_MANAGEMENT, NSID_ALL, 1, 0), &[]);
    ensure!(failed(all)? == Status::INVALID_FIELD);
    let format = |nsid| command(admin::FORMAT_NVM, nsid, 1 << 9, 0);
    ensure!(failed(client.admin_write(0, format(NSID_ALL), &[]))? == Status::INVALID_FIELD);
    let invalid = Status::INVALID_NAMESPACE_OR_FORMAT;
    ensure!(failed(client.admin_write(0, format(4711), &[]))? == invalid);
    let nsid = create(client, 4096)?;
    ensure!(nsid > 0);
    attach(client, nsid, 2, true)?;
    ensure!(attach(client, nsid, 2, true).is_err());
    ensure!(attach(client, nsid, 77, true).is_err());
    ensure!(attach(client, nsid, 1, false).is_err());
    let other = create(client, 4096)?;
    let taken = attach(client, other, 2, true).unwrap_err().to_string();
    ensure!(taken.contains("attachment limit exceeded"), "{taken}");
    // A namespace may have several controllers.
    attach(client, nsid, 9, true)?;
    ensure!(namespaces(client, 0, cns::ALLOCATED_NAMESPACES)? == [nsid, other]);
    ensure!(namespaces(client, 9, cns::ACTIVE_NAMESPACES)? == [nsid]);
    ensure!(namespaces(client, 1, cns::ACTIVE_NAMESPACES)?.is_empty());
    let exports = daemon.cli(&["export", "list"])?;
    ensure!(
        exports.as_array().is_some_and(|exports| exports.len() == 2),
        "{exports}"
    );
    // One refused controller of a list: none changes.
    ensure!(attach_all(client, other, &[1, 2]).is_err());
    ensure!(namespaces(client, 1, cns::ACTIVE_NAMESPACES)?.is_empty());
    ensure!(attach_all(client, nsid, &[1, 9]).is_err());
    ensure!(namespaces(client, 1, cns::ACTIVE_NAMESPACES)?.is_empty());
    let erased = client.admin_write(0, format(other), &[])?;
    ensure!(erased == 0);
    delete(client, nsid)?;
    delete(client, other)?;
    ensure!(namespaces(client, 0, cns::ALLOCATED_NAMESPACES)?.is_empty());
    let audits = audits(daemon)?;
    let named = |part: &str| audits.iter().any(|audit| audit.contains(part));
    ensure!(named("endpoint 8 at connection 1"), "{audits:#?}");
    ensure!(named("Namespace Management, create"), "{audits:#?}");
    ensure!(named(&format!("delete: namespace {nsid}")), "{audits:#?}");
    ensure!(named("attach: namespace"), "{audits:#?}");
    Ok(())
}

fn connect(daemon: &Daemon, nqn: &str) -> Result<(Session, IoQueue)> {
    let address = std::net::SocketAddr::from(([127, 0, 0, 1], daemon.port()));
    let mut session = Session::connect(address, nqn, HOST_NQN, &Options::default())?;
    let queue = session.open_queue(1)?;
    Ok((session, queue))
}

fn read(queue: &mut IoQueue) -> Result<Vec<u8>> {
    let read = IoOp::Read { lba: 3, blocks: 1 };
    Ok(queue.execute(&read, vec![0; 4096], MINUTE)?)
}

#[test]
fn mi_namespace_create_is_a_volume() -> Result<()> {
    let mut daemon = daemon("\"namespaces\", \"format\"", FUNCTIONS)?;
    let mut client = client(&daemon)?;
    let nsid = create(&mut client, 4096)?;
    let name = format!("out-of-band/ns-{nsid}");
    let volume = daemon.cli(&["volume", "show", &name])?;
    ensure!(
        volume["size_bytes"] == 16 << 20 && volume["id"] == nsid,
        "{volume}"
    );
    attach(&mut client, nsid, 1, true)?;
    let export = daemon.cli(&["export", "show", &name])?;
    let nqn = export["nqn"].as_str().context("an NQN")?;
    let mut host = connect(&daemon, nqn)?;
    let block = vec![0xA5; 4096];
    let write = IoOp::Write {
        lba: 3,
        blocks: 1,
        fua: false,
    };
    host.1.execute(&write, block.clone(), MINUTE)?;
    ensure!(read(&mut host.1)? == block);
    // A connected host is not cut off.
    let format = command(admin::FORMAT_NVM, nsid, 1 << 9, 0);
    ensure!(failed(client.admin_write(0, format, &[]))? == Status::OPERATION_DENIED);
    ensure!(attach(&mut client, nsid, 1, false).is_err());
    ensure!(delete(&mut client, nsid).is_err());
    ensure!(read(&mut host.1)? == block);
    drop(host);
    // The attachment survives a restart.
    daemon.kill_daemon()?;
    daemon.start_again()?;
    client = forebay_tests::out_of_band::client(&daemon)?;
    ensure!(namespaces(&mut client, 1, cns::ACTIVE_NAMESPACES)? == [nsid]);
    client.admin_write(0, format, &[])?;
    let mut host = connect(&daemon, nqn)?;
    ensure!(read(&mut host.1)? == [0; 4096], "the format erased it");
    drop(host);
    attach(&mut client, nsid, 1, false)?;
    delete(&mut client, nsid)?;
    ensure!(daemon.cli(&["volume", "show", &name]).is_err());
    daemon.pool_check()
}

#[test]
fn a_refused_delete_changes_nothing() -> Result<()> {
    let functions = "[[out_of_band.function]]\nfrontend = \"vhost_user\"\n\
        [[out_of_band.function]]\nany_host = true\n";
    let daemon = daemon("\"namespaces\"", functions)?;
    let mut client = client(&daemon)?;
    let nsid = create(&mut client, 4096)?;
    attach(&mut client, nsid, 1, true)?;
    attach(&mut client, nsid, 2, true)?;
    let exports = daemon.cli(&["export", "list"])?;
    let nqn = exports[0]["nqn"].as_str().context("an NQN")?;
    let host = connect(&daemon, nqn)?;
    ensure!(delete(&mut client, nsid).is_err());
    for controller in [1, 2] {
        ensure!(namespaces(&mut client, controller, cns::ACTIVE_NAMESPACES)? == [nsid]);
    }
    // The error log has it, and the operator's events.
    let errors = command(admin::GET_LOG_PAGE, NSID_ALL, 0x01 | 15 << 16, 0);
    let (_, entry) = client.admin_read(0, errors, 64)?;
    ensure!(
        entry[0] > 0 && entry[24..28] == nsid.to_le_bytes(),
        "{entry:?}"
    );
    let audits = audits(&daemon)?;
    ensure!(
        audits
            .iter()
            .any(|audit| audit.contains("delete: namespace")),
        "{audits:?}"
    );
    drop(host);
    delete(&mut client, nsid)
}

#[test]
fn mi_read_only_by_default() -> Result<()> {
    let daemon = daemon("", FUNCTIONS)?;
    daemon.cli(&["tenant", "create", "t"])?;
    daemon.cli(&["volume", "create", "t/v", "--size", "16M"])?;
    let volume = daemon.cli(&["volume", "show", "t/v"])?;
    let nsid = u32::try_from(volume["id"].as_u64().context("an id")?)?;
    let mut client = client(&daemon)?;
    ensure!(namespaces(&mut client, 0, cns::ALLOCATED_NAMESPACES)? == [nsid]);
    let data = vec![0; 4096];
    let refused_ones: [(Sqe, &[u8]); 5] = [
        (command(admin::NAMESPACE_MANAGEMENT, 0, 0, 0), &data),
        (command(admin::NAMESPACE_MANAGEMENT, nsid, 1, 0), &[]),
        (command(admin::NAMESPACE_ATTACHMENT, nsid, 0, 0), &data),
        (command(admin::FORMAT_NVM, nsid, 1 << 9, 0), &[]),
        (command(admin::SET_FEATURES, 0, 4, 300), &[]),
    ];
    for (sqe, data) in refused_ones {
        let refusal = refused(client.admin_write(0, sqe, data))?;
        ensure!(status(refusal)? == MiStatus::ACCESS_DENIED, "{sqe:?}");
    }
    let set = SetConfiguration::TransmissionUnit {
        port: 0,
        bytes: 128,
    };
    let set = client.command(MiCommand::SetConfiguration(set));
    ensure!(status(refused(set)?)? == MiStatus::ACCESS_DENIED);
    ensure!(daemon.cli(&["volume", "show", "t/v"])? == volume);
    ensure!(audits(&daemon)?.is_empty());
    Ok(())
}

#[test]
fn mi_answers_without_engine() -> Result<()> {
    // Without a pool.
    let daemon = Daemon::start(&forebay_tests::daemon::DaemonOptions {
        config: table(ALL_RIGHTS, FUNCTIONS),
        ..Default::default()
    })?;
    let mut client = client(&daemon)?;
    let health =
        |client: &mut MiClient| client.command(MiCommand::SubsystemHealth { clear: false });
    ensure!(health(&mut client)?.1[0] == 0x10, "nothing is served");
    ensure!(namespaces(&mut client, 0, cns::ALLOCATED_NAMESPACES)?.is_empty());
    ensure!(create(&mut client, 4096).is_err());
    let device = format!("file:{}", daemon.folder().join("pool.img").display());
    daemon.create_pool(&["--device", &device, "--size", "256M"])?;
    let nsid = create(&mut client, 4096)?;
    attach(&mut client, nsid, 1, true)?;
    // While engines die and start, and while the engine can't run.
    for _death in 0..3 {
        daemon.kill_engine()?;
        for _poll in 0..50 {
            health(&mut client)?;
            namespaces(&mut client, 0, cns::ALLOCATED_NAMESPACES)?;
        }
        wait::until("an engine", MINUTE, || Ok(daemon.processes().ok()))?;
    }
    // While a successor takes over.
    let before = daemon.processes()?;
    std::thread::scope(|scope| -> Result<()> {
        let upgrade = scope.spawn(|| daemon.cli(&["upgrade"]));
        while !upgrade.is_finished() {
            ensure!(health(&mut client)?.1[0] == 0x30, "an interruption");
            ensure!(namespaces(&mut client, 1, cns::ACTIVE_NAMESPACES)? == [nsid]);
        }
        upgrade.join().expect("the upgrade")?;
        Ok(())
    })?;
    let engine = daemon.processes()?.engine;
    ensure!(engine != before.engine);
    hold_by_pid(engine, true)?;
    for _poll in 0..50 {
        ensure!(health(&mut client)?.1.len() == 8);
        ensure!(namespaces(&mut client, 1, cns::ACTIVE_NAMESPACES)? == [nsid]);
    }
    hold_by_pid(engine, false)?;
    wait::until("a working subsystem", MINUTE, || {
        Ok((health(&mut client)?.1[0] == 0x30).then_some(()))
    })
}
