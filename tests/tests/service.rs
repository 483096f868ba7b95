//! The service under systemd, in a sandbox: its user, locked memory, and a daemon that is
//! restarted, stopped, killed and upgraded. The engine keeps serving, and hosts notice nothing.
//!
//! The `systemctl` commands are those of the book's operations page.

use std::time::Duration;

use std::path::Path;

use anyhow::{Context, Result, ensure};
use forebay_tests::daemon::{Daemon, DaemonOptions};
use forebay_tests::sandbox::Sandbox;
use forebay_tests::wait;
use rustix::process::{Pid, Signal, kill_process};

const LIMIT: Duration = Duration::from_secs(600);

const SCRIPT: &str = r#"
pid_of() {
    forebay --json status | sed -n "s/.*\"$1_pid\": \([0-9]*\).*/\1/p"
}
# Until a daemon answers that is not $1.
next_daemon() {
    for _ in $(seq 300); do
        daemon=$(pid_of daemon 2> /dev/null) && test -n "$daemon" && test "$daemon" != "$1" && return
        sleep 0.1
    done
    systemctl --no-pager status forebay
    return 1
}
ended() {
    for _ in $(seq 300); do test -d "/proc/$1" || return 0; sleep 0.1; done
    return 1
}
active() {
    for _ in $(seq 300); do test "$(systemctl is-active forebay)" = "$1" && return; sleep 0.1; done
    systemctl --no-pager status forebay
    return 1
}
# Until an engine runs that is not $1.
next_engine() {
    for _ in $(seq 300); do
        engine=$(pid_of engine) && test -n "$engine" && test "$engine" != "$1" && return
        sleep 0.1
    done
    return 1
}
# Until the words after $2 (of priorities $1) are in the journal, which takes what it is told when it has the time.
journal() { journalctl --no-pager --unit forebay --output cat --priority "$1"; }
told() {
    priorities=$1
    shift
    for _ in $(seq 300); do journal "$priorities" | grep "$@" && return; sleep 0.1; done
    return 1
}
# The machine's manual pages need not be indexed again.
rm -f /var/lib/man-db/auto-update
set -x
dpkg --force-unsafe-io --install /root/forebay_*.deb
systemctl is-enabled forebay
active active
next_daemon none
test "$(systemctl show --property=MainPID --value forebay)" = "$daemon"
install -d -o forebay -g forebay /srv/disks
forebay pool create --device /srv/disks/pool.img --create --size 1G
forebay tenant create t
forebay volume create t/disk --size 256M
forebay export create t/disk --any-host
engine=$(pid_of engine)

# Who they are, and what they may: a machine whose root may not raise limits gives them its own.
systemctl show forebay | grep '^LimitMEMLOCK=infinity'
locked=$(ulimit -l unlimited 2> /dev/null && echo unlimited || echo $(($(ulimit -Hl) * 1024)))
files=$(ulimit -Hn 524288 2> /dev/null && echo 524288 || ulimit -Hn)
for pid in "$daemon" "$engine"; do
    test "$(stat -c %U:%G "/proc/$pid")" = forebay:forebay
    grep "^Max locked memory  *$locked  *$locked " "/proc/$pid/limits"
    grep "^Max open files  *$files  *$files " "/proc/$pid/limits"
    grep '^NoNewPrivs:[[:space:]]*1' "/proc/$pid/status"
    grep "^Groups:.*\b$(getent group disk | cut -d: -f3)\b" "/proc/$pid/status"
    grep ' /usr ro,' "/proc/$pid/mountinfo"
done
test "$(stat -c %U:%a /var/lib/forebay)" = forebay:750
test "$(stat -c %U:%a /run/forebay)" = forebay:755

# A host is at work.
forebay bench load t/disk --rw randrw --qd 8 --seconds 600 &
load=$!
works() {
    sleep 1
    kill -0 "$load"
    test "$(pid_of engine)" = "$engine"
    test "$(pid_of daemon)" = "$daemon"
}
works
before=$daemon; systemctl restart forebay; next_daemon "$before"; works
# A daemon that dies comes back.
before=$daemon; systemctl kill --kill-who=main --signal=KILL forebay; next_daemon "$before"; works
# And one that is ended by a signal of somebody else's.
before=$daemon; kill -TERM "$daemon"; next_daemon "$before"; works
# Its configuration is read again while it serves.
systemctl reload forebay
told 6..6 'INFO the configuration was reloaded'
works
# Nobody serves the API for a while; hosts are served.
before=$daemon
systemctl stop forebay
ended "$before"
test -d "/proc/$engine"
sleep 2
kill -0 "$load"
systemctl start forebay
next_daemon "$before"
works
# An engine that dies is replaced by the daemon, whatever systemd thinks of it.
before=$engine
kill -KILL "$engine"
ended "$engine"
next_engine "$before"
works
forebay --json events | grep '"took_over"'
told 0..7 'Started .*Forebay'
grep 'daemon' /var/lib/forebay/log/forebay.log | tail -1
# The daemon's log is in the journal, too: what went wrong by its priority, and the rest by its own.
told 0..4 'ERROR the engine (pid [0-9]*, generation [0-9]*) died'
told 6..6 'INFO configuration: /etc/forebay/forebay.toml'
journal 0..5 | (! grep 'INFO')
cp /etc/forebay/forebay.toml /tmp/forebay.toml
sed '/^\[log\]/a format = "json"' /tmp/forebay.toml > /etc/forebay/forebay.toml
before=$daemon; systemctl restart forebay; next_daemon "$before"
json='{"time":"20[^"]*Z","level":"INFO","target":"forebay::serve","message":"configuration: [^"]*","fields":{}}'
tail -40 /var/lib/forebay/log/forebay.log | grep -x "$json"
told 6..6 -x "$json"
cp /tmp/forebay.toml /etc/forebay/forebay.toml
before=$daemon; systemctl restart forebay; next_daemon "$before"
test -f /var/lib/forebay/log/engine.log
# However often it dies, it is started again: the engine needs it.
for _ in 1 2 3 4 5 6 7 8; do
    before=$daemon; systemctl kill --kill-who=main --signal=KILL forebay; next_daemon "$before"
done
works

# An upgrade: another daemon, then another engine, and the host works on.
before=$daemon
old=$engine
dpkg --force-unsafe-io --install /root/forebay_*.deb
ended "$before"
ended "$old"
daemon=$(pid_of daemon)
engine=$(pid_of engine)
works
forebay --json events | grep '"engine_replaced"'
# One that could not go on with what runs has it end first.
dpkg-deb --raw-extract /root/forebay_*.deb /tmp/other
sed -i "s/\"$(forebay formats)\"/\"0.0.0.0\"/" /tmp/other/DEBIAN/preinst
grep '0.0.0.0' /tmp/other/DEBIAN/preinst
dpkg-deb -Znone --root-owner-group --build /tmp/other /tmp/other.deb
kill "$load"
before=$daemon
old=$engine
dpkg --force-unsafe-io --install /tmp/other.deb
ended "$before"
ended "$old"
next_daemon "$before"
next_engine "$old"
forebay --json events | (! grep '"engine_replaced"')

# Both end in good order, and stay so.
forebay shutdown
ended "$engine"
active inactive
sleep 2
active inactive
systemctl start forebay
next_daemon none
forebay volume list | grep t/disk
forebay pool check
# The package's removal ends also an engine whose daemon was stopped, or has died and left its socket.
engine=$(pid_of engine)
systemctl stop forebay
setpriv --reuid=forebay --regid=forebay --init-groups \
    forebay serve --keep-engine --config /etc/forebay/forebay.toml &
by_hand=$!
next_daemon none
kill -KILL "$by_hand"
test -S /run/forebay/api.sock
test -d "/proc/$engine"
dpkg --remove forebay
ended "$engine"
test -f /srv/disks/pool.img
# Installed again, it serves as before.
dpkg --force-unsafe-io --install /root/forebay_*.deb
active active
next_daemon none
systemctl is-enabled forebay
forebay volume list | grep t/disk
"#;

#[test]
fn the_service_under_systemd() -> Result<()> {
    if let Some(missing) = Sandbox::can_not_boot() {
        // Few containers allow both.
        eprintln!("NOT RUN: this needs {missing}");
        return Ok(());
    }
    let sandbox = Sandbox::with_package()?;
    sandbox.boot(SCRIPT, LIMIT).map(drop)
}

/// A value from the unit.
fn unit(key: &str) -> Result<String> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../packaging/forebay.service");
    let unit = std::fs::read_to_string(path)?;
    let mut lines = unit.lines();
    let value = lines.find_map(|line| line.strip_prefix(key)?.strip_prefix('='));
    value
        .map(str::to_owned)
        .with_context(|| format!("no {key}"))
}

/// The unit's rules where systemd can't run: the daemon's exit codes decide.
#[test]
fn shutdown_stays_down() -> Result<()> {
    ensure!(unit("Restart")? == "always");
    let stays_down: i32 = unit("RestartPreventExitStatus")?.parse()?;
    ensure!(unit("SuccessExitStatus")?.parse::<i32>()? == stays_down);
    let starts = unit("ExecStart")?;
    let arguments = starts.split_whitespace().skip(2);
    let arguments = arguments.take_while(|argument| *argument != "--config");
    let mut daemon = Daemon::start(&DaemonOptions {
        arguments: arguments.map(str::to_owned).collect(),
        ..DaemonOptions::default()
    })?;
    let spec = format!("file:{}", daemon.folder().join("pool.img").display());
    let engine = daemon
        .create_pool(&["--device", &spec, "--size", "128M"])?
        .engine;
    for signal in [Signal::TERM, Signal::INT, Signal::KILL] {
        let pid = daemon.processes()?.daemon;
        let pid = Pid::from_raw(pid.try_into()?).context("no process")?;
        kill_process(pid, signal)?;
        let code = daemon.wait_exit()?.code();
        ensure!(code != Some(stays_down), "{signal:?}: it would stay down");
        daemon.start_again()?;
        ensure!(daemon.processes()?.engine == engine, "{signal:?}");
    }
    daemon.cli(&["shutdown"])?;
    let code = daemon.wait_exit()?.code();
    ensure!(
        code == Some(stays_down),
        "it would be started again: {code:?}"
    );
    wait::until("the engine's end", LIMIT, || {
        Ok((!Path::new(&format!("/proc/{engine}")).exists()).then_some(()))
    })
}
