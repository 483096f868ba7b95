//! What Prometheus reads.
//!
//! Purpose: the exposition is well formed, says what the API's statistics say, and its counters do not fall
//! when an engine dies under load.
//! Design: one daemon with a listener for metrics; the text is read strictly (`exposition`).
//! Not here: the text's details (unit tests of the crate `control`).

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use forebay_tests::daemon::{Daemon, DaemonOptions, free_ports};
use forebay_tests::exposition::{self, Metrics};
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

fn does_not_fall(before: &Metrics, now: &Metrics) -> Result<()> {
    for (sample, was) in before.rising() {
        let is = now.get(sample)?;
        ensure!(is >= was, "{sample} fell from {was} to {is}");
    }
    Ok(())
}

fn scrape(port: u16) -> Result<Metrics> {
    let (head, body) = get(port, "/metrics")?;
    ensure!(head.starts_with("HTTP/1.1 200 "), "{head}");
    ensure!(head.contains("text/plain; version=0.0.4"), "{head}");
    exposition::read(&body)
}

fn get(port: u16, path: &str) -> Result<(String, String)> {
    let mut stream = TcpStream::connect(("127.0.0.1", port))?;
    stream.set_read_timeout(Some(LIMIT))?;
    write!(
        stream,
        "GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
    )?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    let (head, body) = answer.split_once("\r\n\r\n").context("no HTTP answer")?;
    Ok((head.to_owned(), body.to_owned()))
}
