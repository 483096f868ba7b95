//! Crowds of hosts that say nothing, stop halfway or read nothing, and constant changes of budgets,
//! beside a verified load.
//!
//! Any peer can do this without a name, so it must cost others nothing lasting. Each test compares
//! descriptors and memory before and after. Rates are paced and printed, never asserted.

use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use forebay_initiator::Host as Discovery;
use forebay_nvme::SglDescriptor;
use forebay_nvme::fabrics::ConnectCommand;
use forebay_nvme::tcp::{self, Pdu};
use forebay_tests::api::Api;
use forebay_tests::daemon::Daemon;
use forebay_tests::host::{Dice, Host};
use forebay_tests::lab::{BLOCK, Lab, LabOptions, MIB, MINUTE, Noticed, count_from};
use forebay_tests::system::resident_bytes;
use forebay_tests::wait;
use raw::{PLAIN, READ, RawHost, WRITE, attach, connect_data, ic_req, rw};
use serde_json::json;
use zerocopy::IntoBytes;

#[allow(missing_docs, dead_code)]
#[path = "../../crates/engine/tests/common/host.rs"]
mod raw;

const HOST: &str = "nqn.2026-01.test:storm";
/// Memory that a test may leave in a process's heap.
const SLACK_BYTES: u64 = 48 << 20;

/// Resources held for hosts.
#[derive(Debug, Clone, Copy)]
struct Held {
    engine_descriptors: usize,
    daemon_descriptors: usize,
    engine_bytes: u64,
    daemon_bytes: u64,
}

fn descriptors(pid: u32) -> Result<usize> {
    Ok(std::fs::read_dir(format!("/proc/{pid}/fd"))
        .with_context(|| format!("descriptors of process {pid}"))?
        .count())
}

fn held(daemon: &Daemon) -> Result<Held> {
    let processes = daemon.processes()?;
    Ok(Held {
        engine_descriptors: descriptors(processes.engine)?,
        daemon_descriptors: descriptors(processes.daemon)?,
        engine_bytes: resident_bytes(processes.engine)?,
        daemon_bytes: resident_bytes(processes.daemon)?,
    })
}

/// The daemon's own work needs a descriptor or two.
fn wait_given_back(lab: &Lab, before: Held) -> Result<()> {
    let mut now = before;
    wait::until("everything is given back", MINUTE, || {
        now = held(&lab.daemon)?;
        let back = now.engine_descriptors <= before.engine_descriptors + 2
            && now.daemon_descriptors <= before.daemon_descriptors + 2;
        Ok(back.then_some(()))
    })
    .with_context(|| format!("before {before:?}, now {now:?}"))?;
    ensure!(
        now.engine_bytes <= before.engine_bytes + SLACK_BYTES
            && now.daemon_bytes <= before.daemon_bytes + SLACK_BYTES,
        "before {before:?}, now {now:?}"
    );
    Ok(())
}

fn subsystem(volume: &str) -> String {
    format!("nqn.2026-01.io.forebay:test:t.{volume}")
}

/// Imitates a dying host; no port stays in TIME_WAIT.
fn reset(socket: &TcpStream) {
    rustix::net::sockopt::set_socket_linger(socket, Some(Duration::ZERO)).expect("SO_LINGER");
}

fn visit(address: SocketAddr, nqn: &str, kind: u64, dice: &mut Dice) -> Result<()> {
    let cut = |host: &mut RawHost, bytes: &[u8], dice: &mut Dice| {
        // An early cut may make the rest fail.
        let end = dice.usize(..bytes.len() + 1);
        let _ = std::io::Write::write_all(&mut host.socket, &bytes[..end]);
    };
    let ic_req_bytes = || {
        let mut out = vec![0; tcp::MAX_HEADER_BYTES];
        let n = tcp::put_ic_req(&mut out, &ic_req(PLAIN));
        out.truncate(n);
        out
    };
    match kind {
        0 => {
            Discovery::discover(address, HOST)?;
        }
        1 => {
            let host = RawHost::dial(address);
            if dice.u64(..2) == 0 {
                reset(&host.socket);
            }
        }
        2 => {
            let mut host = RawHost::dial(address);
            cut(&mut host, &ic_req_bytes(), dice);
            reset(&host.socket);
        }
        3 => {
            let mut host = RawHost::open(address, PLAIN);
            let sqe = ConnectCommand::new(0, 0, 32, 60_000)
                .to_sqe()
                .with_sgl(SglDescriptor::in_capsule(0, 1024));
            let bytes = host.capsule_bytes(&sqe, connect_data(0xffff, nqn, HOST).as_bytes());
            cut(&mut host, &bytes, dice);
            reset(&host.socket);
        }
        _ => {
            // The association ends silently with a read and a write in flight.
            let (admin, mut io) = attach(address, nqn, PLAIN, true);
            let (read, write) = (io.next_cid(), io.next_cid());
            let read = rw(READ, read, 0, 8).with_sgl(SglDescriptor::transport(8 * 4096));
            io.capsule(&read, &[]);
            let write = rw(WRITE, write, 8, 1).with_sgl(SglDescriptor::in_capsule(0, 4096));
            let bytes = io.capsule_bytes(&write, &[7; 4096]);
            cut(&mut io, &bytes, dice);
            reset(&io.socket);
            reset(&admin.socket);
        }
    }
    Ok(())
}

#[test]
fn connect_discover_storm() -> Result<()> {
    let seconds = count_from("FOREBAY_STORM_SECONDS", 10);
    let mut lab = Lab::new(&LabOptions::volumes(2, 64 * MIB))?;
    // The crowd uses the second volume; only the first has a load.
    lab.hosts.truncate(1);
    let (address, nqn) = (lab.address, subsystem("b"));
    Discovery::discover(address, HOST)?;
    let mut before = None;
    let visits = AtomicU64::new(0);
    let begun = Instant::now();
    let mut took = Duration::ZERO;
    lab.during_load(Noticed::Nothing, |daemon, progress| {
        progress.more("the load has begun", 100)?;
        before = Some(held(daemon)?);
        std::thread::scope(|scope| {
            let crowd: Vec<_> = (0..4u64)
                .map(|number| {
                    let (nqn, visits) = (&nqn, &visits);
                    scope.spawn(move || -> Result<()> {
                        // 250 a second each, if the node can.
                        let mut dice = Dice::with_seed(number + 1);
                        let start = Instant::now();
                        for i in 0..seconds * 250 {
                            let due = start + Duration::from_millis(4 * i);
                            std::thread::sleep(due.saturating_duration_since(Instant::now()));
                            visit(address, nqn, dice.u64(..5), &mut dice)
                                .with_context(|| format!("visit {i} of {number}"))?;
                            visits.fetch_add(1, Relaxed);
                        }
                        Ok(())
                    })
                })
                .collect();
            crowd
                .into_iter()
                .try_for_each(|thread| thread.join().expect("a visitor is not refused"))
        })?;
        took = begun.elapsed();
        progress.more("the load goes on", 100)
    })?;
    println!(
        "{} visits in {:.1} s",
        visits.load(Relaxed),
        took.as_secs_f64()
    );
    wait_given_back(&lab, before.context("counted")?)?;
    lab.finish()
}

#[test]
fn thousands_of_half_open_connections_block_no_host() -> Result<()> {
    let mut lab = Lab::new(&LabOptions::volumes(1, 64 * MIB))?;
    let before = held(&lab.daemon)?;
    let address = lab.address;
    lab.during_load(Noticed::Nothing, |_, progress| {
        progress.more("the load has begun", 100)?;
        let mut crowd = Vec::new();
        for i in 0..5000u64 {
            // The oldest are disconnected; later connections may be refused for a moment.
            if let Ok(socket) = TcpStream::connect(address) {
                if i % 2 == 0 {
                    let mut out = [0; tcp::MAX_HEADER_BYTES];
                    let n = tcp::put_ic_req(&mut out, &ic_req(PLAIN));
                    let _ = std::io::Write::write(&mut &socket, &out[..n - 1]);
                }
                crowd.push(socket);
            }
        }
        progress.more("the load goes on beside them", 100)?;
        // A regular host can connect beside the crowd.
        let found = Discovery::discover(address, HOST)?;
        let found = found.iter().filter(|found| found.is_nvm_tcp()).count();
        ensure!(found == 1, "{found}");
        crowd.iter().for_each(reset);
        Ok(())
    })?;
    wait_given_back(&lab, before)?;
    lab.finish()
}

#[test]
fn slow_reader_does_not_stall_others() -> Result<()> {
    let mut lab = Lab::new(&LabOptions {
        // One reactor, so that all share everything.
        config: "[engine]\nreactors = 1\n".into(),
        ..LabOptions::volumes(2, 64 * MIB)
    })?;
    lab.hosts.truncate(1);
    let (address, nqn) = (lab.address, subsystem("b"));
    let before = held(&lab.daemon)?;
    lab.during_load(Noticed::Nothing, |daemon, progress| {
        progress.more("the load has begun", 100)?;
        let (admin, mut io) = attach(address, &nqn, PLAIN, true);
        let asked = 127u64;
        for i in 0..asked {
            let cid = io.next_cid();
            let sqe = rw(READ, cid, i % 64 * 32, 32).with_sgl(SglDescriptor::transport(32 * 4096));
            io.capsule(&sqe, &[]);
        }
        // Its data fills its socket and its share of buffers only.
        progress.more("the load goes on beside a host that reads nothing", 2000)?;
        let engine = daemon.processes()?.engine;
        let resident = resident_bytes(engine)?;
        ensure!(
            resident < before.engine_bytes + SLACK_BYTES,
            "a host that reads nothing holds {} bytes",
            resident - before.engine_bytes
        );
        // It reads again, and gets everything.
        let mut bytes = 0;
        let mut ended = 0;
        while ended < asked {
            match io.hear() {
                (Pdu::C2hData(data), got) => {
                    bytes += got.len() as u64;
                    ended += u64::from(data.last && data.success);
                }
                (Pdu::CapsuleResp(cqe), _) => {
                    ensure!(cqe.status().is_success(), "{cqe:?}");
                    ended += 1;
                }
                other => anyhow::bail!("unexpected: {other:?}"),
            }
        }
        ensure!(bytes == asked * 32 * 4096, "{bytes} bytes came");
        drop(admin);
        Ok(())
    })?;
    wait_given_back(&lab, before)?;
    lab.finish()
}

#[test]
fn silent_writers_are_disconnected_and_delay_no_other_host() -> Result<()> {
    let mut lab = Lab::new(&LabOptions {
        config: "[engine]\nreactors = 1\n".into(),
        ..LabOptions::volumes(2, 64 * MIB)
    })?;
    lab.hosts.truncate(1);
    let (address, nqn) = (lab.address, subsystem("b"));
    let before = held(&lab.daemon)?;
    let over = AtomicBool::new(false);
    lab.during_load(Noticed::Nothing, |_, progress| {
        progress.more("the load has begun", 100)?;
        let mut crowd: Vec<(RawHost, RawHost)> =
            (0..4).map(|_| attach(address, &nqn, PLAIN, true)).collect();
        for (_, io) in &mut crowd {
            for i in 0..64u64 {
                let cid = io.next_cid();
                let sqe =
                    rw(WRITE, cid, i * 128, 128).with_sgl(SglDescriptor::transport(128 * 4096));
                io.capsule(&sqe, &[]);
            }
        }
        progress.more(
            "the load goes on beside hosts that never send their data",
            2000,
        )?;
        // Each gets an R2T, and is disconnected 30 s later.
        for (admin, mut io) in crowd {
            io.socket.set_read_timeout(Some(MINUTE))?;
            let mut asked = 0;
            while let Some((pdu, _)) = io.try_hear() {
                match pdu {
                    Pdu::R2t(_) => asked += 1,
                    Pdu::C2hTermReq(_) => {}
                    other => anyhow::bail!("unexpected: {other:?}"),
                }
            }
            ensure!(asked > 0, "asked for nothing");
            drop(admin);
        }
        over.store(true, Relaxed);
        progress.more("the load goes on when they are gone", 100)
    })?;
    wait_given_back(&lab, before)?;
    lab.finish()
}

/// Method, path, body, and whether it must be refused.
fn change(dice: &mut Dice) -> (&'static str, String, String, bool) {
    let tenant = ["t", "t", "u"][dice.usize(..3)];
    let volume = ["a", "b", "c", "d"][dice.usize(..4)];
    let of_tenant = format!("/v1/tenants/{tenant}/budget");
    let of_volume = format!("/v1/tenants/t/volumes/{volume}/budget");
    // Sometimes a rate, but never so low that hosts seem to hang.
    let rate = |dice: &mut Dice, least: u64| {
        let (iops, bytes_s) = (
            least + dice.u64(..2000),
            (least + dice.u64(..2000)) * 16_384,
        );
        match dice.u64(..3) {
            0 => json!({ "iops": iops }),
            1 => json!({ "bytes_s": bytes_s }),
            _ => json!({ "iops": iops, "bytes_s": bytes_s }),
        }
    };
    match dice.u64(..100) {
        0..35 => {
            let mut put = json!({ "base": rate(dice, 1000), "burst": rate(dice, 3000) });
            if dice.u64(..2) == 0 {
                put["credit_s"] = json!(1 + dice.u64(..60));
            }
            ("PUT", of_tenant, put.to_string(), false)
        }
        35..42 => ("DELETE", of_tenant, String::new(), false),
        42..60 => {
            let mut put = json!({ "burst": rate(dice, 1000) });
            if dice.u64(..2) == 0 {
                put["base"] = json!({ "iops": 100 + dice.u64(..300), "bytes_s": 1 << 20 });
            }
            ("PUT", of_volume, put.to_string(), false)
        }
        60..68 => ("DELETE", of_volume, String::new(), false),
        68..88 => {
            let bad = [
                r#"{"base":{"iops":5000},"burst":{"iops":4000}}"#,
                r#"{"base":{"iops":0}}"#,
                r#"{"base":{"bytes_s":-1}}"#,
                r#"{"burst":{"iops":18446744073709551615}}"#,
                r#"{"base":{"iops":1000},"credit_s":0}"#,
                r#"{"burst":{"iops":1000},"credit_s":60}"#,
                r#"{"base":{"iops":1000},"speed":1}"#,
                "{",
                "{}",
            ];
            let bad = bad[dice.usize(..bad.len())].to_owned();
            let of = if dice.u64(..2) == 0 {
                of_tenant
            } else {
                of_volume
            };
            ("PUT", of, bad, true)
        }
        88..90 => {
            let spreads = ["one_to_one", "one_to_n"];
            let update = json!({
                "spread": spreads[dice.usize(..2)],
                "params": { "window_ns": 200_000 + dice.u64(..800_000) },
            });
            (
                "PATCH",
                "/v1/scheduling".to_owned(),
                update.to_string(),
                false,
            )
        }
        90..95 => ("POST", "/v1/exports".to_owned(), EXPORT.to_owned(), false),
        _ => ("DELETE", "/v1/exports/t/d".to_owned(), String::new(), false),
    }
}

/// The volume whose export is created and deleted.
const EXPORT: &str = r#"{"tenant":"t","volume":"d","any_host":true}"#;

/// Windows so far on each reactor, and tenant `t`'s use.
fn passed(api: &mut Api) -> Result<(Vec<u64>, u64)> {
    let stats = api.must("GET", "/v1/stats", "")?;
    let all = |key: &str| stats[key].as_array().cloned().unwrap_or_default();
    let windows = all("reactors")
        .iter()
        .filter_map(|r| r["windows"].as_u64())
        .collect();
    let tenants = all("tenants");
    let tenant = tenants.iter().find(|tenant| tenant["tenant"] == "t");
    let used = tenant.and_then(|tenant| tenant["used_ops"].as_u64());
    Ok((windows, used.context("what t has used")?))
}

/// After all changes, the last one is in effect.
#[test]
fn qos_set_storm() -> Result<()> {
    const CLIENTS: u64 = 16;
    /// The last limit, and a default window.
    const LAST_IOPS: u64 = 300;
    const WINDOW_NS: u64 = 300_000;
    let changes = count_from("FOREBAY_STORM_CHANGES", 3_000);
    let mut lab = Lab::new(&LabOptions::volumes(4, 16 * MIB))?;
    lab.daemon.cli(&["tenant", "create", "u"])?;
    lab.daemon
        .cli(&["volume", "create", "u/x", "--size", "16M"])?;
    lab.daemon.cli(&["export", "create", "u/x", "--any-host"])?;
    let other = Host::new(lab.address, "u/x", 16 * MIB, BLOCK, 5);
    let coming_and_going = std::mem::replace(&mut lab.hosts[3], other);
    let counts = [const { AtomicU64::new(0) }; 3];
    let [done, refused, full] = &counts;
    let mut before = None;
    let begun = Instant::now();
    let mut took = Duration::ZERO;
    lab.during_load(Noticed::Nothing, |daemon, progress| {
        let socket = daemon.socket();
        let mut api = Api::connect(&socket)?;
        api.must("PUT", "/v1/tenants/t/budget", r#"{"base":{"iops":3000}}"#)?;
        progress.more("the load has begun", 100)?;
        before = Some(held(daemon)?);
        std::thread::scope(|scope| {
            let clients: Vec<_> = (0..CLIENTS)
                .map(|number| {
                    let socket = &socket;
                    scope.spawn(move || -> Result<()> {
                        let mut dice = Dice::with_seed(1000 + number);
                        let mut api = Api::connect(socket)?;
                        for _ in 0..changes / CLIENTS {
                            let (method, path, body, bad) = change(&mut dice);
                            let (status, answer) = api.call(method, &path, &body)?;
                            let counts = match status {
                                200 | 201 if !bad => done,
                                400 => refused,
                                // Another client's change, or a base without room.
                                404 | 409 if path.starts_with("/v1/exports") => refused,
                                507 if method == "PUT" => full,
                                _ => anyhow::bail!("{method} {path} {body}: {status} {answer}"),
                            };
                            counts.fetch_add(1, Relaxed);
                        }
                        Ok(())
                    })
                })
                .collect();
            let all = clients.into_iter();
            all.map(|client| client.join().expect("a client does not panic"))
                .collect::<Result<Vec<()>>>()
        })?;
        took = begun.elapsed();
        // An idle connection is closed after ten seconds.
        let mut api = Api::connect(&socket)?;
        for volume in ["a", "b", "c", "d"] {
            api.must(
                "DELETE",
                &format!("/v1/tenants/t/volumes/{volume}/budget"),
                "",
            )?;
        }
        let last = json!({ "spread": "one_to_one", "params": { "window_ns": null } });
        api.must("PATCH", "/v1/scheduling", &last.to_string())?;
        api.must("PUT", "/v1/tenants/u/budget", r#"{"burst":{"iops":5000}}"#)?;
        let rate = json!({ "iops": LAST_IOPS, "bytes_s": 40_000_000 });
        let last = json!({ "base": rate, "burst": rate });
        api.must("PUT", "/v1/tenants/t/budget", &last.to_string())?;
        let shown = api.must("GET", "/v1/tenants/t", "")?;
        ensure!(
            shown["budget"]["base"] == rate && shown["budget"]["burst"] == rate,
            "{shown}"
        );
        // An export exists if its last request created it.
        let (status, answer) = api.call("DELETE", "/v1/exports/t/d", "")?;
        ensure!(status == 200 || status == 404, "{status} {answer}");
        api.must("POST", "/v1/exports", EXPORT)?;
        progress.more("the load goes on", 100)?;

        let mut windows_later = |windows: u64, used: u64, from: &(Vec<u64>, u64)| {
            wait::until("windows pass, and commands end", MINUTE, || {
                progress.alive()?;
                let now = passed(&mut api)?;
                let most = now
                    .0
                    .iter()
                    .zip(&from.0)
                    .map(|(now, from)| now - from)
                    .max();
                let most = most.unwrap_or(0);
                let enough = most >= windows && now.1 - from.1 >= used;
                Ok(enough.then_some((now, most)))
            })
        };
        // Statistics lag by some ten milliseconds.
        let none = passed(&mut Api::connect(&socket)?)?;
        let (from, _) = windows_later(200, 0, &none)?;
        let (to, windows) = windows_later(0, 2 * LAST_IOPS, &from)?;
        let used = to.1 - from.1;
        let most = LAST_IOPS * windows * WINDOW_NS / 1_000_000_000;
        println!("{used} commands in {windows} windows, in which there may be {most}");
        // Slack for late windows and unpublished use.
        ensure!(
            used <= most + 60,
            "{used} commands in {windows} windows: there may be {most}"
        );
        Ok(())
    })?;
    let [done, refused, full] = counts.each_ref().map(|count| count.load(Relaxed));
    println!(
        "{changes} changes in {:.1} s: {done} done, {refused} refused, {full} found no room",
        took.as_secs_f64()
    );
    ensure!(
        done > changes / 3 && refused > changes / 10,
        "{done} {refused} {full}"
    );
    wait_given_back(&lab, before.context("counted")?)?;
    // The remaining work needs no limit.
    lab.daemon.cli(&["tenant", "budget", "t", "--none"])?;
    lab.hosts.push(coming_and_going);
    lab.hosts[4].fill()?;
    lab.finish()
}
