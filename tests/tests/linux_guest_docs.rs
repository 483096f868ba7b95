//! Runs pages with `sh,guest` blocks of README and book whole and in order.
//!
//! The storage node is a sandbox, and the host is a guest in its network. Pages use 127.0.0.1 for
//! both, so a relay in the guest forwards port 4420. A line that names a disk waits for it.

use std::fs;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use forebay_tests::book::{self, Page, Place};
use forebay_tests::guest::{Guest, GuestOptions, HOST_ADDRESS};
use forebay_tests::sandbox::Running;
use forebay_tests::wait;

const LIMIT: Duration = Duration::from_secs(600);
const LINE_LIMIT: Duration = Duration::from_secs(120);
/// The host in the pages.
const HOST_ID: &str = "5d3f9a52-1c7b-4a0e-9a55-6d1f0d3c2b11";

/// `host N` waits until the host has done its N-th part.
const HANDS: &str = r#"
host() {
    touch "/root/.host.$1"
    until [ -e "/root/.host.$1.done" ]; do sleep 0.1; done
}
"#;

#[test]
#[ignore = "boots a Linux guest: cargo xtask test guest"]
fn docs_commands_run_in_a_guest() -> Result<()> {
    let pages = book::pages()?;
    let pages = pages.iter().filter(|page| page.has(Place::Host));
    let mut blocks = 0;
    for page in pages {
        blocks += run(page).with_context(|| page.path.display().to_string())?;
    }
    ensure!(blocks > 2, "only {blocks} parts were found");
    Ok(())
}

/// Returns the number of the host's turns.
fn run(page: &Page) -> Result<usize> {
    let mut lines: Vec<String> = HANDS.lines().map(str::to_owned).collect();
    let mut turns = Vec::new();
    for part in &page.parts {
        match part.place {
            Place::Vm => lines.extend_from_slice(&part.lines),
            Place::Host => {
                lines.push(format!("host {}", turns.len()));
                turns.push(&part.lines);
            }
            // These are alternatives to the blocks that run here.
            Place::Package | Place::Source | Place::Bmc => {}
        }
    }
    // The host releases its disks while the target still runs.
    let end = vec!["umount /mnt; nvme disconnect-all".to_owned()];
    lines.push(format!("host {}", turns.len()));
    turns.push(&end);
    let sandbox = book::vm()?;
    let home = sandbox.home();
    let mut page = sandbox.start(&book::script(&lines))?;
    let mut guest = None;
    for (turn, lines) in turns.iter().enumerate() {
        if !is_handed_over(&mut page, &home, turn)? {
            break;
        }
        let guest = match &mut guest {
            Some(guest) => guest,
            none => none.insert(host(page.process())?),
        };
        for line in *lines {
            type_line(guest, line).with_context(|| format!("the host's part {turn}"))?;
        }
        fs::write(home.join(format!(".host.{turn}.done")), "")?;
    }
    page.wait(LIMIT)?;
    guest.context("the host had no turn")?.power_off()?;
    Ok(turns.len())
}

/// False if the script has ended.
fn is_handed_over(page: &mut Running, home: &Path, turn: usize) -> Result<bool> {
    let mark = home.join(format!(".host.{turn}"));
    wait::until("the host's turn", LIMIT, || {
        let is_there = mark.exists();
        Ok((is_there || page.has_ended()?).then_some(is_there))
    })
}

fn host(network_of: u32) -> Result<Guest> {
    let guest = Guest::boot(&GuestOptions {
        network_of: Some(network_of),
        ..GuestOptions::default()
    })?;
    let set_up = format!(
        "mkdir -p /etc/nvme
         echo nqn.2014-08.org.nvmexpress:uuid:{HOST_ID} > /etc/nvme/hostnqn
         echo {HOST_ID} > /etc/nvme/hostid
         nc -ll -p 4420 -e nc {HOST_ADDRESS} 4420 > /dev/null 2>&1 &"
    );
    guest.check(&set_up, LINE_LIMIT)?;
    Ok(guest)
}

fn type_line(guest: &Guest, line: &str) -> Result<()> {
    for word in line.split_whitespace() {
        let is_there = match word {
            _ if word.starts_with("/dev/") => format!("[ -b {word} ]"),
            _ if word.starts_with("LABEL=") => format!("findfs {word}"),
            _ => continue,
        };
        let there = format!("for _ in $(seq 300); do {is_there} && exit; sleep 0.1; done; exit 1");
        guest.check(&there, LINE_LIMIT)?;
    }
    let said = guest.check(line, LINE_LIMIT)?;
    println!("# {line}\n{said}");
    Ok(())
}
