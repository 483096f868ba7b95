//! Native multipath of a Linux host with two ports of one subsystem. fio does not notice ANA
//! changes, a lost path, or an engine's death.
//!
//! The second port is behind a proxy that can be cut. The kernel's `ana_state` must follow.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use forebay_tests::daemon::{Daemon, DaemonOptions};
use forebay_tests::guest::{self, Guest, GuestOptions};
use forebay_tests::wait;

const MINUTE: Duration = Duration::from_secs(60);

/// A TCP proxy that can be cut.
struct Proxy {
    port: u16,
    /// `None` while it is cut.
    open: Arc<Mutex<Option<Vec<TcpStream>>>>,
}

impl Proxy {
    fn new(target: u16) -> Result<Self> {
        let listener = TcpListener::bind(("127.0.0.1", 0))?;
        let port = listener.local_addr()?.port();
        let open = Arc::new(Mutex::new(Some(Vec::new())));
        let shared = open.clone();
        // It ends with the test's process.
        std::thread::spawn(move || {
            for host in listener.incoming().flatten() {
                let mut open = shared.lock().unwrap_or_else(PoisonError::into_inner);
                // Connections are refused while it is cut.
                let Some(open) = open.as_mut() else { continue };
                let Ok(there) = TcpStream::connect(("127.0.0.1", target)) else {
                    continue;
                };
                for socket in [&host, &there] {
                    let _ = socket.set_nodelay(true);
                    open.extend(socket.try_clone());
                }
                for (from, to) in [(host.try_clone(), there.try_clone()), (Ok(there), Ok(host))] {
                    if let (Ok(from), Ok(to)) = (from, to) {
                        std::thread::spawn(move || recover(from, to));
                    }
                }
            }
        });
        Ok(Self { port, open })
    }

    fn cut(&self) {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        for socket in open.take().into_iter().flatten() {
            let _ = socket.shutdown(Shutdown::Both);
        }
    }

    fn mend(&self) {
        *self.open.lock().unwrap_or_else(PoisonError::into_inner) = Some(Vec::new());
    }
}

fn recover(mut from: TcpStream, mut to: TcpStream) {
    let mut bytes = [0; 65536];
    while let Ok(count @ 1..) = from.read(&mut bytes) {
        if to.write_all(&bytes[..count]).is_err() {
            break;
        }
    }
    let _ = from.shutdown(Shutdown::Both);
    let _ = to.shutdown(Shutdown::Both);
}

/// States of the paths, in the order of their connections.
fn ana_states(guest: &Guest) -> Result<Vec<String>> {
    let said = guest.check("cat /sys/block/nvme*c*n*/ana_state", MINUTE)?;
    Ok(said.split_whitespace().map(str::to_owned).collect())
}

fn wait_ana(guest: &Guest, wanted: [&str; 2]) -> Result<()> {
    let mut seen = Vec::new();
    wait::until("the paths' states", MINUTE, || {
        seen = ana_states(guest)?;
        Ok((seen == wanted).then_some(()))
    })
    .with_context(|| format!("wanted {wanted:?}, seen {seen:?}"))
}

#[test]
#[ignore = "boots a Linux guest: cargo xtask test guest"]
fn linux_guest_multipath() -> Result<()> {
    let options = DaemonOptions {
        more_ports: 1,
        ..DaemonOptions::default()
    };
    let mut daemon = guest::serve_disk(&options, "2G", "256M")?;
    let addresses: Vec<String> = daemon
        .ports()
        .iter()
        .map(|port| format!("127.0.0.1:{port}"))
        .collect();
    let set = |daemon: &Daemon, port: usize, state: &str| {
        daemon.cli(&["port", "set", &addresses[port], state])
    };
    let proxy = Proxy::new(daemon.ports()[1])?;
    let guest = Guest::boot(&GuestOptions::default())?;
    for port in [daemon.ports()[0], proxy.port] {
        guest.connect(port, "--reconnect-delay=1 --ctrl-loss-tmo=600")?;
    }
    let disk = guest.wait_disk()?;
    wait_ana(&guest, ["optimized", "optimized"])?;
    guest.check(
        "echo round-robin > /sys/class/nvme-subsystem/nvme-subsys0/iopolicy",
        MINUTE,
    )?;
    guest.check("dmesg --clear", MINUTE)?;

    let fio = format!(
        "fio --name=verify --filename={disk} --size=64m --rw=randwrite --bsrange=4k-64k --direct=1 \
         --ioengine=libaio --iodepth=16 --verify=crc32c --verify_backlog=128 --verify_fatal=1 \
         --fsync=200 --time_based --runtime=45"
    );
    let load = guest.spawn(&fio)?;
    // The operator drains each path in turn.
    set(&daemon, 0, "inaccessible")?;
    wait_ana(&guest, ["inaccessible", "optimized"])?;
    set(&daemon, 0, "non-optimized")?;
    wait_ana(&guest, ["non-optimized", "optimized"])?;
    // The last path can't be drained by accident.
    set(&daemon, 1, "inaccessible")?;
    ensure!(
        set(&daemon, 0, "inaccessible").is_err(),
        "the last port was made inaccessible"
    );
    wait_ana(&guest, ["non-optimized", "inaccessible"])?;
    // The states survive the death of both processes.
    let dead = daemon.kill_engine()?;
    daemon.wait_engine_after(dead.generation, MINUTE)?;
    wait_ana(&guest, ["non-optimized", "inaccessible"])?;
    set(&daemon, 1, "optimized")?;
    set(&daemon, 0, "optimized")?;
    wait_ana(&guest, ["optimized", "optimized"])?;
    let log = guest.check("dmesg", MINUTE)?;
    ensure!(
        !log.contains("reconnect") && !log.contains("I/O error"),
        "states changed and an engine died, and the kernel says:\n{log}"
    );
    let live = "cat /sys/class/nvme/nvme*/state";
    proxy.cut();
    wait::until("the kernel has noticed the lost path", MINUTE, || {
        let states = guest.check(live, MINUTE)?;
        Ok(states.lines().any(|state| state != "live").then_some(()))
    })?;
    std::thread::sleep(Duration::from_secs(2));
    proxy.mend();
    wait::until("both paths are there again", MINUTE, || {
        let states = guest.check(live, MINUTE)?;
        Ok(states.lines().all(|state| state == "live").then_some(()))
    })?;
    wait_ana(&guest, ["optimized", "optimized"])?;

    let output = load.wait(5 * MINUTE)?;
    ensure!(output.code == 0, "fio: {}", output.text);
    let log = guest.check("dmesg", MINUTE)?;
    // The kernel logs a failed path and the failover, but no I/O error.
    let bad: Vec<&str> = log
        .lines()
        .filter(|line| {
            [
                "Buffer I/O error",
                "blk_update_request",
                "critical",
                "hung",
                "BUG",
                "WARNING",
            ]
            .iter()
            .any(|word| line.contains(word))
        })
        .collect();
    ensure!(bad.is_empty(), "the kernel says:\n{}", bad.join("\n"));
    guest.check("nvme disconnect-all", MINUTE)?;
    guest.power_off()?;
    daemon.pool_check()?;
    daemon.stop()
}
