//! The Debian package is installed, used, removed, and installed again. Removing and purging keep
//! all data.
//!
//! dpkg runs in a sandbox without systemd, so the daemon is started by hand as in the unit.
//! `systemd-analyze verify` checks the unit. The book's commands for an installed package must
//! leave a program that serves.

use std::time::Duration;

use anyhow::{Result, bail, ensure};
use forebay_tests::book::{self, Place};
use forebay_tests::sandbox::Sandbox;
use xtask::process;

const LIMIT: Duration = Duration::from_secs(600);

/// Starts the daemon as the unit does, for all scripts.
const PRELUDE: &str = r#"
up() {
    setpriv --reuid=forebay --regid=forebay --init-groups \
        /usr/bin/forebay serve --keep-engine --config /etc/forebay/forebay.toml &
    for _ in $(seq 600); do forebay status > /dev/null 2>&1 && return; sleep 0.1; done
    cat /var/lib/forebay/log/forebay.log
    return 1
}
nobody() {
    for _ in $(seq 600); do pgrep -x forebay > /dev/null || return 0; sleep 0.1; done
    ps ax
    return 1
}
pid_of() {
    forebay --json status | sed -n "s/.*\"$1_pid\": \([0-9]*\).*/\1/p"
}
# Until a file has such words.
shows() {
    for _ in $(seq 600); do grep -a "$1" "$2" && return; sleep 0.1; done
    return 1
}
# Some images leave manual pages and documentation out.
everything='--path-include=/usr/share/man/* --path-include=/usr/share/doc/*'
# The machine's manual pages need not be indexed again at each step.
rm -f /var/lib/man-db/auto-update
package=$(echo /root/forebay_*.deb)
set -x
"#;

const INSTALL_AND_USE: &str = r#"
dpkg --force-unsafe-io $everything --install "$package"
dpkg --verify forebay
systemd-analyze verify --man=no /usr/lib/systemd/system/forebay.service
test -f /usr/share/man/man1/forebay.1.gz
test -f /usr/share/man/man5/forebay.toml.5.gz
zcat /usr/share/man/man1/forebay-volume-create.1.gz | grep -q reserve
bash -n /usr/share/bash-completion/completions/forebay
grep -q 'Apache License' /usr/share/doc/forebay/copyright
test "$(stat -c %U /var/lib/forebay)" = forebay
up
install -d -o forebay -g forebay /srv/disks
forebay pool create --device /srv/disks/pool.img --create --size 1G
forebay tenant create acme
head -c 3000000 /usr/bin/bash > image.raw; truncate -s 4M image.raw
forebay volume create acme/kept --size 4M
forebay volume import image.raw acme/kept
# As `systemctl restart` does: the engine serves on.
engine=$(pid_of engine)
kill -TERM "$(pid_of daemon)"
while forebay status > /dev/null 2>&1; do sleep 0.1; done
test -d "/proc/$engine"
up
test "$(pid_of engine)" = "$engine"
# Removing it ends what runs, in good order.
dpkg --remove forebay
nobody
test -f /srv/disks/pool.img
test -f /var/lib/forebay/devices.json
test -f /etc/forebay/forebay.toml
test ! -e /usr/bin/forebay
# Purging it keeps the volumes as well, and says so.
dpkg --purge forebay 2>&1 | tee purged
grep -q '/var/lib/forebay is kept' purged
test -f /srv/disks/pool.img
test -f /var/lib/forebay/devices.json
test ! -e /etc/forebay/forebay.toml
# Installed again, it serves them.
dpkg --force-unsafe-io $everything --install "$package"
up
forebay volume export acme/kept back.raw
cmp image.raw back.raw
# Installing over a running one is an upgrade: what runs ends in good order.
dpkg --force-unsafe-io $everything --install "$package"
nobody
# A listener beyond loopback is reported.
sed -i 's/127.0.0.1:4420/0.0.0.0:4420/' /etc/forebay/forebay.toml
up
for told in "forebay status" "forebay events" "cat /var/lib/forebay/log/forebay.log"; do
    $told | grep 'not authenticated'
done
forebay volume list | grep acme/kept
forebay events --follow --json > followed &
follows=$!
shows '"kind":"daemon_started"' followed
kill "$follows"
# A terminal of its own: drawn, and put back at the end.
: > screen
(shows 'TENANT/VOLUME' screen > /dev/null; printf q) | script -qec 'stty cols 80 rows 24; forebay top; stty -a' /dev/null > screen
grep -a 'TENANT/VOLUME' screen
grep -a ' icanon' screen
forebay pool check
forebay shutdown
nobody
"#;

/// After the book's commands: the service can serve.
const SERVES: &str = r"
up
forebay --json status | grep engine
forebay shutdown
nobody
";

#[test]
fn the_package_keeps_data() -> Result<()> {
    let sandbox = with_package()?;
    let said = sandbox.run(&format!("{PRELUDE}{INSTALL_AND_USE}"), LIMIT)?;
    ensure!(!said.contains("warning: files list"), "{said}");
    Ok(())
}

#[test]
fn docs_commands_run_from_the_package() -> Result<()> {
    let mut lines = Vec::new();
    for page in book::pages()? {
        let parts = page.parts.into_iter();
        let ours = parts.filter(|part| part.place == Place::Package);
        lines.extend(ours.flat_map(|part| part.lines));
    }
    ensure!(!lines.is_empty(), "the book does not say how to install");
    let script = format!("{PRELUDE}{}\n{SERVES}", lines.join("\n"));
    with_package()?.run(&script, LIMIT).map(drop)
}

fn with_package() -> Result<Sandbox> {
    if let Some(missing) = unavailable() {
        bail!("this test needs {missing}");
    }
    Sandbox::with_package()
}

fn unavailable() -> Option<String> {
    let programs = [
        "dpkg",
        "dpkg-deb",
        "systemd-analyze",
        "setpriv",
        "pgrep",
        "script",
    ];
    let missing = programs
        .into_iter()
        .find(|program| !process::is_installed(program));
    Sandbox::unavailable().or(missing.map(str::to_owned))
}
