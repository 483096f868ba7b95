//! Lines to the out-of-band endpoint: several requesters, terminals, restarts, floods.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

use anyhow::{Context, Result, ensure};
use forebay_initiator::mi::MiClient;
use forebay_mctp::serial::{Decoder, encode};
use forebay_mctp::{BASELINE_UNIT_BYTES, EID_NULL, Endpoint, EndpointConfig, NVME_MI};
use forebay_nvme::identify::cns;
use forebay_nvme::mi::{AdminCommand, ControlPrimitive, MiCommand, MiRequest, MiResponse, open};
use forebay_nvme::opcode::admin;
use forebay_tests::daemon::{Daemon, DaemonOptions};
use forebay_tests::lab::MINUTE;
use forebay_tests::out_of_band::{
    ALL_RIGHTS, attach, client, command, create, daemon, delete, namespaces, socket,
};
use forebay_tests::wait;
use rustix::pty::OpenptFlags;

const FUNCTIONS: &str = "[[out_of_band.function]]\nany_host = true\n\
    [[out_of_band.function]]\nfrontend = \"nvme_pcie\"\n\
    [[out_of_band.function]]\nnumber = 9\nfrontend = \"vhost_user\"\n";

/// The frames of a message from an EID.
fn frames(eid: u8, message: &[u8]) -> Vec<u8> {
    let mut endpoint = Endpoint::new(EndpointConfig {
        uuid: [0; 16],
        eid,
        static_eid: EID_NULL,
        types: &[NVME_MI],
        unit_bytes: BASELINE_UNIT_BYTES,
    });
    let mut frames = Vec::new();
    for packet in endpoint.request(EID_NULL, message).1 {
        encode(&packet, &mut frames);
    }
    frames
}

#[test]
fn requesters_and_slots_of_one_line_are_kept_apart() -> Result<()> {
    let daemon = daemon("", FUNCTIONS)?;
    let mut line = UnixStream::connect(socket(&daemon))?;
    line.set_read_timeout(Some(MINUTE))?;
    let poll = MiRequest::Command(MiCommand::SubsystemHealth { clear: false });
    let asked = [(20, 0), (20, 1), (21, 0), (21, 1), (22, 1)];
    let all: Vec<u8> = asked
        .iter()
        .flat_map(|(eid, slot)| frames(*eid, &poll.encode(*slot)))
        .collect();
    line.write_all(&all)?;
    let mut answered = Vec::new();
    for packet in packets(&mut line, asked.len())? {
        // An answer fits into a packet; its header has the requester's EID.
        let (header, _) = open(&packet[4..]).ok().context("a broken answer")?;
        answered.push((packet[1], header.slot));
    }
    answered.sort_unstable();
    ensure!(answered == asked, "{answered:?}");
    Ok(())
}

#[test]
fn a_response_is_replayed() -> Result<()> {
    let daemon = daemon("", FUNCTIONS)?;
    let mut line = UnixStream::connect(socket(&daemon))?;
    line.set_read_timeout(Some(MINUTE))?;
    let vpd = MiCommand::ReadVpd {
        offset: 0,
        bytes: 100,
    };
    line.write_all(&frames(8, &MiRequest::Command(vpd).encode(1)))?;
    let payloads = |packets: &[Vec<u8>]| -> Vec<Vec<u8>> {
        packets.iter().map(|packet| packet[4..].to_vec()).collect()
    };
    let first = packets(&mut line, 2)?;
    let replay = ControlPrimitive::Replay { first_packet: 0 };
    line.write_all(&frames(8, &MiRequest::Control(replay, 7).encode(1)))?;
    let again = packets(&mut line, 3)?;
    let (_, done) = MiResponse::decode(&again[0][4..]).ok().context("decode")?;
    ensure!(done == MiResponse::Control { tag: 7, value: 1 }, "{done:?}");
    ensure!(payloads(&again[1..]) == payloads(&first));
    Ok(())
}

/// The next packets of a line.
fn packets(line: &mut UnixStream, count: usize) -> Result<Vec<Vec<u8>>> {
    let mut packets = Vec::new();
    let mut decoder = Decoder::new();
    let mut bytes = [0; 4096];
    while packets.len() < count {
        let read = line.read(&mut bytes)?;
        ensure!(read > 0, "the line ended");
        let mut rest = &bytes[..read];
        while let Some(packet) = decoder.next_packet(&mut rest) {
            packets.push(packet.to_vec());
        }
    }
    ensure!(packets.len() == count, "{packets:?}");
    Ok(packets)
}

#[test]
fn a_terminal_is_a_line() -> Result<()> {
    let near = rustix::pty::openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY)?;
    rustix::pty::grantpt(&near)?;
    rustix::pty::unlockpt(&near)?;
    let device = rustix::pty::ptsname(&near, Vec::new())?;
    let config = format!(
        "[out_of_band]\nserial = \"tty:{}\"\nbaud = 9600\n",
        device.to_str()?
    );
    let daemon = Daemon::start(&DaemonOptions {
        config,
        ..DaemonOptions::default()
    })?;
    let mut client = MiClient::from(File::from(near));
    let uuid = client.endpoint_uuid()?;
    let identify = command(admin::IDENTIFY, 0, cns::CONTROLLER.into(), 0);
    ensure!(client.admin_read(0, identify, 4096)?.1[111] == 3);
    ensure!(client.endpoint_uuid()? == uuid);
    ensure!(daemon.status()?["warnings"] == serde_json::json!([]));
    Ok(())
}

#[test]
fn mi_two_requesters() -> Result<()> {
    let daemon = daemon(ALL_RIGHTS, FUNCTIONS)?;
    std::thread::scope(|scope| {
        let work = |number: usize| {
            let socket = socket(&daemon);
            move || -> Result<()> {
                let mut client = MiClient::open(&socket)?;
                for _round in 0..10 {
                    let nsid = create(&mut client, 4096)?;
                    let controller = [1, 2][number];
                    attach(&mut client, nsid, controller, true)?;
                    let own = namespaces(&mut client, controller, cns::ACTIVE_NAMESPACES)?;
                    ensure!(own == [nsid], "{own:?}");
                    attach(&mut client, nsid, controller, false)?;
                    delete(&mut client, nsid)?;
                }
                Ok(())
            }
        };
        let both = [0, 1].map(|number| scope.spawn(work(number)));
        both.into_iter()
            .try_for_each(|one| one.join().expect("a requester"))
    })?;
    ensure!(namespaces(&mut client(&daemon)?, 0, cns::ALLOCATED_NAMESPACES)?.is_empty());
    Ok(())
}

#[test]
fn mi_slow_serial() -> Result<()> {
    let config = "[out_of_band]\nserial = \"pty:mctp.tty\"\nallow = [\"configuration\"]\n";
    let daemon = Daemon::start(&DaemonOptions {
        config: config.into(),
        ..Default::default()
    })?;
    let line = daemon.folder().join("mctp.tty");
    let mut client = wait::until("the line", MINUTE, || Ok(MiClient::open(&line).ok()))?;
    client.use_large_packets()?;
    let identify = command(admin::IDENTIFY, 0, cns::CONTROLLER.into(), 0);
    let whole = client.admin_read(0, identify, 4096)?.1;
    drop(client);
    // A relay that brings one byte at a time, in both directions.
    let (near, far) = UnixStream::pair()?;
    let terminal = File::options().read(true).write(true).open(&line)?;
    let mut from = (terminal.try_clone()?, far.try_clone()?);
    let mut to = (terminal, far);
    std::thread::spawn(move || relay(&mut from.0, &mut from.1));
    std::thread::spawn(move || relay(&mut to.1, &mut to.0));
    let mut client = MiClient::from(File::from(OwnedFd::from(near)));
    for _round in 0..3 {
        ensure!(client.admin_read(0, identify, 4096)?.1 == whole);
    }
    Ok(())
}

fn relay(from: &mut impl Read, to: &mut impl Write) {
    let mut byte = [0];
    while from.read_exact(&mut byte).is_ok() && to.write_all(&byte).is_ok() {
        std::thread::sleep(std::time::Duration::from_micros(20));
    }
}

#[test]
fn mi_restart_keeps_identity() -> Result<()> {
    let mut daemon = daemon("\"namespaces\"", FUNCTIONS)?;
    let mut first = client(&daemon)?;
    let uuid = first.endpoint_uuid()?;
    first.set_endpoint_id(29)?;
    ensure!(first.endpoint_id()? == 29);
    // Another line has it, too.
    ensure!(client(&daemon)?.endpoint_id()? == 29);
    let nsid = create(&mut first, 4096)?;
    attach(&mut first, nsid, 9, true)?;
    daemon.kill_daemon()?;
    daemon.start_again()?;
    let mut again = client(&daemon)?;
    ensure!(again.endpoint_uuid()? == uuid);
    ensure!(again.endpoint_id()? == 29);
    ensure!(namespaces(&mut again, 9, cns::ACTIVE_NAMESPACES)? == [nsid]);
    Ok(())
}

#[test]
fn a_flood_of_aborted_commands_is_bounded() -> Result<()> {
    let daemon = daemon("", FUNCTIONS)?;
    let mut line = UnixStream::connect(socket(&daemon))?;
    line.set_nonblocking(true)?;
    let log = AdminCommand {
        controller: 0,
        sqe: command(admin::GET_LOG_PAGE, 0, 0xC0 | 15 << 16, 0),
        offset: 0,
        length: 64,
        data: &[],
    };
    let mut flood = frames(8, &MiRequest::Admin(log).encode(0));
    flood.extend(frames(
        8,
        &MiRequest::Control(ControlPrimitive::Abort, 0).encode(0),
    ));
    let flood = flood.repeat(100);
    let mut answers = vec![0; 64 << 10];
    for _round in 0..200 {
        // Whole frames need not arrive: the next flag begins a new one.
        let _ = line.write(&flood);
        while line.read(&mut answers).is_ok_and(|read| read > 0) {}
        ensure!(daemon.status()?["daemon_pid"].is_u64());
    }
    drop(line);
    let mut client = client(&daemon)?;
    client.endpoint_id()?;
    let pid = daemon.processes()?.daemon;
    let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
    let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib: u64 = resident
        .context("VmRSS")?
        .trim()
        .trim_end_matches(" kB")
        .parse()?;
    ensure!(kib < 200 << 10, "the daemon has {kib} KiB");
    Ok(())
}
