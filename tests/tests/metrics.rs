//! Metrics are well formed, agree with the API's statistics, and do not fall when an engine dies
//! under load.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use forebay_initiator::vm::{Op, Options};
use forebay_tests::daemon::{Daemon, DaemonOptions};
use forebay_tests::exposition::{Metrics, get, scrape};
use forebay_tests::system::free_ports;
use forebay_tests::vm::{self, Frontend};
use forebay_tests::wait;

const LIMIT: Duration = Duration::from_secs(60);

#[test]
fn metrics_say_what_stats_say_and_do_not_fall_at_a_death() -> Result<()> {
    let port = free_ports(1)?[0];
    let mut daemon = Daemon::start(&DaemonOptions {
        config: format!("metrics = \"127.0.0.1:{port}\"\n"),
        ..DaemonOptions::default()
    })?;
    ensure!(
        scrape(port)?.get("forebay_engine_up")? == 0.0,
        "an engine without a pool"
    );
    let device = format!("file:{}", daemon.folder().join("pool.img").display());
    daemon.create_pool(&["--device", &device, "--size", "1G"])?;
    daemon.cli(&["tenant", "create", "acme"])?;
    daemon.cli(&["volume", "create", "acme/db", "--size", "64M"])?;
    let export = daemon.cli(&["export", "create", "acme/db", "--any-host"])?;
    let nqn = export["nqn"].as_str().context("an NQN")?.to_owned();
    let load = |rw: &str| {
        let addr = format!("127.0.0.1:{}", daemon.port());
        daemon.cli(&[
            "bench",
            "load",
            "--addr",
            &addr,
            "--nqn",
            &nqn,
            "--rw",
            rw,
            "--seconds",
            "1",
        ])
    };
    load("randwrite")?;
    load("randread")?;

    let first = scrape(port)?;
    let stats = daemon.cli(&["stats"])?;
    for op in ["read", "write"] {
        let counted = &stats["lanes"][0][op];
        let labels = format!("tenant=\"acme\",volume=\"db\",op=\"{op}\"");
        let ops = counted["ops"].as_f64().context("ops")?;
        ensure!(ops > 0.0, "no {op}s: {stats}");
        for (name, number) in [
            ("commands", "ops"),
            ("bytes", "bytes"),
            ("errors", "errors"),
        ] {
            let sample = first.get(&format!("forebay_volume_{name}_total{{{labels}}}"))?;
            ensure!(
                Some(sample) == counted[number].as_f64(),
                "{op} {number}: {sample} {counted}"
            );
        }
        let name = "forebay_volume_latency_seconds";
        let count = first.get(&format!("{name}_count{{{labels},part=\"total\"}}"))?;
        ensure!(count == ops, "{op}: {count} of {ops} times");
        let device = first.get(&format!("{name}_count{{{labels},part=\"device\"}}"))?;
        ensure!(
            device > 0.0 && device <= ops,
            "{op}: {device} of {ops} at the device"
        );
    }
    let translated = "tenant=\"acme\",volume=\"db\",op=\"write\",part=\"translating\"";
    let translated = format!("forebay_volume_latency_seconds_count{{{translated}}}");
    ensure!(
        first.get(&translated)? > 0.0,
        "first writes have waited for the daemon"
    );

    let before = daemon.kill_engine()?;
    daemon.wait_engine_after(before.generation, LIMIT)?;
    wait::until("the successor's figures", LIMIT, || {
        let now = scrape(port)?;
        let up = now.get("forebay_engine_up")? == 1.0;
        Ok((up && now.get("forebay_takeovers_total")? >= 1.0).then_some(()))
    })?;
    ensure!(
        scrape(port)?.get("forebay_engine_deaths_total")? == 1.0,
        "one engine died"
    );
    does_not_fall(&first, &scrape(port)?)?;
    load("randread")?;
    let last = scrape(port)?;
    does_not_fall(&first, &last)?;
    let reads = "forebay_volume_commands_total{tenant=\"acme\",volume=\"db\",op=\"read\"}";
    ensure!(
        last.get(reads)? > first.get(reads)?,
        "reads are not counted any more"
    );

    let (head, _) = get(port, "/v1/status")?;
    ensure!(
        head.starts_with("HTTP/1.1 404 "),
        "more than metrics: {head}"
    );
    daemon.stop()
}

#[test]
fn transports_have_their_figures() -> Result<()> {
    let port = free_ports(1)?[0];
    let mut daemon = vm::serve(
        &DaemonOptions {
            config: format!("metrics = \"127.0.0.1:{port}\"\n"),
            ..DaemonOptions::default()
        },
        "1G",
    )?;
    daemon.cli(&["volume", "create", "t/net", "--size", "64M"])?;
    let export = daemon.cli(&["export", "create", "t/net", "--any-host"])?;
    let nqn = export["nqn"].as_str().context("an NQN")?.to_owned();
    let addr = format!("127.0.0.1:{}", daemon.port());
    let at = ["--addr", &addr, "--nqn", &nqn];
    let rest = ["--rw", "randwrite", "--seconds", "1"];
    daemon.cli(&[&["bench", "load"][..], &at, &rest].concat())?;
    let options = Options {
        interrupts: true,
        depth: 16,
        slot_bytes: 512 << 10,
        ..Options::default()
    };
    let mut disks = Vec::new();
    for (name, frontend, transport) in [
        ("p", Frontend::NvmePcie, "nvme-pcie"),
        ("v", Frontend::VhostUser, "vhost-user"),
    ] {
        let volume = format!("t/{name}");
        daemon.cli(&["volume", "create", &volume, "--size", "64M"])?;
        let target = vm::export_as(&daemon, &volume, frontend, &["--pinned-memory"])?;
        let mut disk = vm::connect(&target, &options)?;
        let mut queues = disk.take_queues();
        for slot in 0..options.depth {
            // Untouched memory is not resident.
            queues[0].put(slot, &vec![slot as u8; options.slot_bytes]);
        }
        for offset_bytes in (0..4 << 20).step_by(options.slot_bytes) {
            let bytes = options.slot_bytes as u32;
            let write = Op::Write {
                offset_bytes,
                bytes,
            };
            vm::execute(&mut *queues[0], write)?;
        }
        disks.push((name, transport, disk, queues));
    }
    let labels = |volume: &str, transport: &str| {
        format!("{{tenant=\"t\",volume=\"{volume}\",transport=\"{transport}\"}}")
    };
    let registers = can_register();
    wait::until("machines' figures", LIMIT, || {
        let now = scrape(port)?;
        for (name, transport, ..) in &disks {
            let of = labels(name, transport);
            let get = |metric: &str| now.get(&format!("forebay_volume_{metric}{of}"));
            ensure!(
                get("copied_bytes_total")? == 0.0,
                "{name}: something is copied"
            );
            let registered = get("registered_bytes")? > 0.0;
            if get("interrupts_total")? == 0.0 || registers && !registered {
                return Ok(None);
            }
        }
        Ok(Some(()))
    })?;
    if !registers {
        eprintln!("NOT SEEN: registered memory, which needs Linux 6.13");
    }
    let now = scrape(port)?;
    let of = labels("net", "nvme-tcp");
    let copied = now.get(&format!("forebay_volume_copied_bytes_total{of}"))?;
    ensure!(copied > 0.0, "what comes with a command is copied");
    for metric in ["registered_bytes", "interrupts_total"] {
        ensure!(now.get(&format!("forebay_volume_{metric}{of}"))? == 0.0);
    }
    for (.., disk, queues) in disks {
        drop(queues);
        disk.close()?;
    }
    daemon.stop()
}

/// Throttling differs from a slow device. Budget and sums survive the engine.
#[test]
fn budgets_are_kept_to_and_seen() -> Result<()> {
    let port = free_ports(1)?[0];
    let mut daemon = Daemon::start(&DaemonOptions {
        config: format!("metrics = \"127.0.0.1:{port}\"\n"),
        ..DaemonOptions::default()
    })?;
    let device = format!("file:{}", daemon.folder().join("pool.img").display());
    daemon.create_pool(&["--device", &device, "--size", "1G"])?;
    daemon.cli(&["tenant", "create", "acme"])?;
    daemon.cli(&["volume", "create", "acme/db", "--size", "64M"])?;
    let export = daemon.cli(&["export", "create", "acme/db", "--any-host"])?;
    let nqn = export["nqn"].as_str().context("an NQN")?.to_owned();
    let load = || {
        let addr = format!("127.0.0.1:{}", daemon.port());
        let rest = ["--rw", "randread", "--seconds", "1"];
        daemon.cli(
            &[
                &["bench", "load", "--addr", &addr, "--nqn", &nqn][..],
                &rest,
            ]
            .concat(),
        )
    };
    let of = "{tenant=\"acme\"}";
    load()?;
    ensure!(
        scrape(port)?
            .get(&format!("forebay_tenant_commands_total{of}"))
            .is_err(),
        "nothing is counted while nobody has a budget"
    );
    let budget = [
        "tenant",
        "budget",
        "acme",
        "--base-iops",
        "200",
        "--base-bandwidth",
        "100M",
        "--credit",
        "10s",
    ];
    let set = daemon.cli(&budget)?;
    ensure!(set["admission"]["guaranteed"] == true, "{set}");
    load()?;
    let seen = |least: f64| {
        wait::until("what the tenant used", LIMIT, || {
            let now = scrape(port)?;
            let get = |name: &str| now.get(&format!("forebay_tenant_{name}{of}"));
            let all = get("commands_total").unwrap_or(0.0) > least
                && get("throttled_commands_total")? > 0.0
                && get("throttled_seconds_total")? > 0.0;
            Ok(all.then_some(now))
        })
    };
    let first = seen(0.0)?;
    let used = first.get(&format!("forebay_tenant_commands_total{of}"))?;
    let most = first.get(&format!("forebay_tenant_credit_limit_commands{of}"))?;
    ensure!(most == 2000.0, "10 s of 200: {most}");
    let labels = "{tenant=\"acme\",volume=\"db\"}";
    let times = first.get(&format!("forebay_volume_throttled_seconds_count{labels}"))?;
    ensure!(times > 0.0, "who waits is timed");
    // It needs a hundredth of these bytes. With the small base, spent credit is not earned again
    // during this test.
    let line =
        "tenant budget acme --base-iops 200 --base-bandwidth 64K --burst-bandwidth 10M --credit 7d";
    daemon.cli(&line.split(' ').collect::<Vec<_>>())?;
    let bytes = |metrics: &Metrics, name: &str| metrics.get(&format!("forebay_tenant_{name}{of}"));
    let rich = scrape(port)?;
    let saved = bytes(&rich, "credit_bytes")?;
    ensure!(saved >= 20e6, "{saved} of 100 MB a second");
    let before = daemon.kill_engine()?;
    daemon.wait_engine_after(before.generation, LIMIT)?;
    wait::until("the successor", LIMIT, || {
        Ok((scrape(port)?.get("forebay_engine_up")? == 1.0).then_some(()))
    })?;
    does_not_fall(&first, &scrape(port)?)?;
    load()?;
    does_not_fall(&first, &seen(used)?)?;
    // All saved credit that was not spent since remains.
    wait::until("what was saved", LIMIT, || {
        let now = scrape(port)?;
        let spent = bytes(&now, "bytes_total")? - bytes(&rich, "bytes_total")?;
        Ok((bytes(&now, "credit_bytes")? >= 0.9 * saved - spent).then_some(()))
    })?;
    let gone = daemon.cli(&["tenant", "budget", "acme", "--none"])?;
    ensure!(gone["budget"].is_null(), "{gone}");
    does_not_fall(&first, &scrape(port)?)?;
    load()?;
    daemon.stop()
}

/// Whether this kernel can share registered buffers between rings (Linux 6.13).
fn can_register() -> bool {
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let mut numbers = release.split(|c: char| !c.is_ascii_digit());
    let mut next = || numbers.next().and_then(|n| n.parse().ok());
    let is_new = (next().unwrap_or(0), next().unwrap_or(0)) >= (6_u32, 13_u32);
    // It must also be allowed to lock that much memory.
    let read = |file| std::fs::read_to_string(file).unwrap_or_default();
    let limits = read("/proc/self/limits");
    let limit = limits
        .lines()
        .find_map(|l| l.strip_prefix("Max locked memory"));
    let limit = limit.and_then(|l| l.split_whitespace().next());
    let enough =
        limit.is_some_and(|l| l.parse::<u64>().map_or(l == "unlimited", |l| l >= 64 << 20));
    let status = read("/proc/self/status");
    let rights = status.lines().find_map(|l| l.strip_prefix("CapEff:"));
    let rights = rights.and_then(|r| u64::from_str_radix(r.trim(), 16).ok());
    // CAP_IPC_LOCK.
    is_new && (enough || rights.is_some_and(|rights| rights & 1 << 14 != 0))
}

fn does_not_fall(before: &Metrics, now: &Metrics) -> Result<()> {
    for (sample, was) in before.rising() {
        let is = now.get(sample)?;
        ensure!(is >= was, "{sample} fell from {was} to {is}");
    }
    Ok(())
}
