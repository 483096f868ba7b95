//! Neither inherited limits and signal masks nor later signals end daemon or engine.

use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::process::Command;
use std::time::Duration;

use anyhow::{Result, ensure};
use forebay_tests::daemon::{self, Daemon, DaemonOptions};
use forebay_tests::exposition;
use forebay_tests::wait;
use rustix::process::{Pid, Signal, kill_process};

const LIMIT: Duration = Duration::from_secs(60);
/// Less than a pool, or an engine's memory.
const LOW: &str = "ulimit -S -f 1000; ulimit -S -n 64; exec \"$@\"";
const SIGNALS: [Signal; 12] = [
    Signal::HUP,
    Signal::USR1,
    Signal::USR2,
    Signal::PIPE,
    Signal::ALARM,
    Signal::QUIT,
    Signal::VTALARM,
    Signal::XFSZ,
    Signal::POWER,
    Signal::TSTP,
    Signal::TTIN,
    Signal::TTOU,
];

fn send(pid: u32, signal: Signal) -> Result<()> {
    let pid = Pid::from_raw(pid.try_into()?);
    Ok(kill_process(
        pid.ok_or_else(|| anyhow::anyhow!("no process"))?,
        signal,
    )?)
}

#[test]
fn inherited_limits_and_signals() -> Result<()> {
    let starter = ["sh", "-c", LOW, "sh", "env"].map(str::to_owned).into();
    let mut options = DaemonOptions {
        starter,
        config: "[log]\nlevel = \"error\"\n".to_owned(),
        ..DaemonOptions::default()
    };
    let signals = ["--block-signal=TERM,HUP", "--ignore-signal=INT,CHLD"];
    options.starter.extend(signals.map(str::to_owned));
    let mut daemon = Daemon::start(&options)?;
    let spec = format!("file:{}", daemon.folder().join("pool.img").display());
    let engine = daemon.create_pool(&["--device", &spec, "--size", "128M"])?;
    daemon.cli(&["tenant", "create", "t"])?;
    daemon.cli(&["volume", "create", "t/v", "--size", "16M"])?;

    for signal in SIGNALS {
        send(engine.daemon, signal)?;
        send(engine.engine, signal)?;
    }
    daemon.cli(&["volume", "list"])?;
    ensure!(daemon.processes()? == engine, "{:?}", daemon.processes()?);

    // SIGHUP reloads level, listeners and metrics.
    let ports = forebay_tests::system::free_ports(2)?;
    let [listener, metrics] = [0, 1].map(|at| format!("127.0.0.1:{}", ports[at]));
    let before = std::fs::read_to_string(daemon.config_path())?;
    let after = before
        .replace(
            "nvme_tcp = [",
            &format!("metrics = \"{metrics}\"\nnvme_tcp = [\"{listener}\", "),
        )
        .replace("\"error\"", "\"info\"");
    std::fs::write(daemon.config_path(), &after)?;
    send(engine.daemon, Signal::HUP)?;
    wait::until("the new listener", LIMIT, || {
        let listeners = daemon.status()?["nvme_tcp"].to_string();
        let connects = TcpStream::connect(&listener).is_ok();
        Ok((connects && listeners.contains(&listener)).then_some(()))
    })?;
    exposition::scrape(ports[1])?;
    let log = std::fs::read_to_string(daemon.folder().join("var/state/log/forebay.log"))?;
    ensure!(log.contains("INFO the configuration was reloaded"), "{log}");
    // A mistake is reported and changes nothing.
    std::fs::write(daemon.config_path(), format!("{after}\nlevle = 1\n"))?;
    send(engine.daemon, Signal::HUP)?;
    daemon.wait_warnings(|warnings| warnings.contains("levle"))?;
    std::fs::write(daemon.config_path(), &before)?;
    send(engine.daemon, Signal::HUP)?;
    daemon.wait_warnings(|warnings| {
        !warnings.contains("levle") && warnings.contains("no longer configured")
    })?;
    ensure!(exposition::scrape(ports[1]).is_err());

    // After a daemon's crash, the engine is kept even without --keep-engine.
    daemon.kill_daemon()?;
    daemon.start_again()?;
    ensure!(daemon.processes()?.engine == engine.engine);
    daemon.stop()?;
    refused_with_a_reason()
}

/// Settings that can't work are reported at once.
fn refused_with_a_reason() -> Result<()> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let effective = u64::from_str_radix(effective.unwrap_or_default().trim(), 16)?;
    let sys_resource = 1 << 24;
    if effective & sys_resource != 0 {
        // CAP_SYS_RESOURCE lifts the limit.
        return Ok(());
    }
    let folder = tempfile::tempdir_in(daemon::target_folder())?;
    let config = folder.path().join("forebay.toml");
    let readable = std::fs::Permissions::from_mode(0o755);
    std::fs::set_permissions(folder.path(), readable)?;
    std::fs::write(
        &config,
        "[pool]\nembedded = { path = \"pool.img\", size = \"1T\" }\n",
    )?;
    // Root has no limit on threads.
    let few_threads = match rustix::process::getuid().is_root() {
        true => "exec prlimit --nproc=6 setpriv --reuid 54321 --clear-groups",
        false => "exec prlimit --nproc=6",
    };
    for (starter, names) in [
        ("ulimit -f 1000; exec", "LimitFSIZE"),
        ("ulimit -v 4000000; exec", "LimitAS"),
        ("ulimit -s 64; exec", "LimitSTACK"),
        (few_threads, "LimitNPROC"),
        // Enough for an engine, but not for the pool.
        (
            "ulimit -f 134217728; exec",
            "pool.img: the file size limit of this process is",
        ),
    ] {
        let said = Command::new("sh")
            .args(["-c", &format!("{starter} \"$@\""), "sh"])
            .arg(daemon::program())
            .args(["serve", "--config"])
            .arg(&config)
            .output()?;
        let reported = String::from_utf8_lossy(&said.stderr);
        ensure!(
            !said.status.success() && reported.contains(names),
            "{starter}: {said:?}"
        );
    }
    Ok(())
}
