//! One volume through three frontends: a network disk, a PCI controller and a virtio disk, in
//! succession or, with shared exports, at once.
//!
//! A completed write is visible to all at once. A host's reservation excludes VMs, also across
//! deaths. Content names its place, so stale copies are detected.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use forebay_initiator::verify::pattern;
use forebay_initiator::vm::{Disk, DiskStatus, Op, Options, Queue, Target};
use forebay_initiator::{IoOp, IoQueue, Session};
use forebay_nvme::Status;
use forebay_nvme::host::HostTransfer;
use forebay_nvme::opcode::nvm;
use forebay_nvme::{Sqe, host::command};
use forebay_tests::daemon::{Daemon, DaemonOptions};
use forebay_tests::vm::{self, Frontend};
use forebay_tests::wait;

const MINUTE: Duration = Duration::from_secs(60);
const MIB: u64 = 1 << 20;
const BLOCK: usize = 4096;
const VOLUME: &str = "t/v";
const NQN: &str = "nqn.2026-01.io.forebay:test:t.v";
const SPAN: u64 = 8 * MIB;

struct Host {
    session: Session,
    queue: IoQueue,
}

impl Host {
    fn new(daemon: &Daemon, name: &str) -> Result<Self> {
        let address = SocketAddr::from(([127, 0, 0, 1], daemon.port()));
        let options = forebay_initiator::Options {
            command_timeout: MINUTE,
            connect_timeout: MINUTE,
            ..Default::default()
        };
        let mut session = wait::until("a host connects", MINUTE, || {
            let nqn = format!("nqn.2026-01.test:{name}");
            Ok(Session::connect(address, NQN, &nqn, &options).ok())
        })?;
        let queue = session.open_queue(1)?;
        Ok(Self { session, queue })
    }

    fn write(&mut self, lba: u64, data: Vec<u8>) -> Result<()> {
        let op = IoOp::Write {
            lba,
            blocks: (data.len() / BLOCK) as u32,
            fua: false,
        };
        self.queue.execute(&op, data, MINUTE)?;
        Ok(())
    }

    fn read(&mut self, lba: u64, blocks: u32) -> Result<Vec<u8>> {
        let op = IoOp::Read { lba, blocks };
        let buffer = vec![0; blocks as usize * BLOCK];
        Ok(self.queue.execute(&op, buffer, MINUTE)?)
    }

    fn reserve(&mut self, opcode: u8, cdw10: u32, keys: [u64; 2]) -> Result<()> {
        let data: Vec<u8> = keys.into_iter().flat_map(u64::to_le_bytes).collect();
        let bytes = if opcode == nvm::RESERVATION_RELEASE {
            8
        } else {
            16
        };
        let sqe = Sqe::new(opcode, 0).with_nsid(1).with_cdw(10, cdw10);
        let status = self.status_of(sqe, HostTransfer::ToController(bytes), data)?;
        ensure!(status == Status::SUCCESS, "{opcode:#x}: {status:?}");
        Ok(())
    }

    fn status_of(&mut self, sqe: Sqe, transfer: HostTransfer, data: Vec<u8>) -> Result<Status> {
        let said = self.queue.submit_command(sqe, transfer, 0, data);
        said.map_err(|refused| anyhow::anyhow!("{refused:?}"))?;
        let mut done = Vec::new();
        let done = wait::until("an answer", MINUTE, || {
            let pause = Duration::from_millis(5);
            let wait = forebay_initiator::Wait::Block;
            self.queue.poll(&mut done, wait, pause)?;
            Ok(done.pop())
        })?;
        Ok(done.status.code())
    }

    fn close(self) -> Result<()> {
        drop(self.queue);
        Ok(self.session.close()?)
    }
}

fn over_network(daemon: &Daemon, wrote: u64, writes: u64) -> Result<()> {
    daemon.cli(&["export", "create", VOLUME, "--any-host"])?;
    let mut host = Host::new(daemon, "a")?;
    for lba in (0..SPAN / BLOCK as u64).step_by(16) {
        let sector = lba * 8;
        if wrote > 0 {
            let data = host.read(lba, 16)?;
            for (sector, content) in (sector..).zip(data.chunks(512)) {
                ensure!(
                    pattern::holds(content, wrote, sector, 1),
                    "sector {sector} holds {}",
                    pattern::read(content)
                );
            }
        }
        let mut data = vec![0; 16 * BLOCK];
        pattern::fill(&mut data, writes, sector, 1);
        host.write(lba, data)?;
    }
    host.close()
}

#[test]
fn a_volume_goes_from_frontend_to_frontend() -> Result<()> {
    let mut daemon = vm::serve(&DaemonOptions::default(), "1G")?;
    daemon.cli(&["volume", "create", VOLUME, "--size", "64M"])?;
    over_network(&daemon, 0, 1)?;
    let mut seed = 1;
    for frontend in [
        Frontend::NvmePcie,
        Frontend::VhostUser,
        Frontend::MappedPcie,
    ] {
        daemon.cli(&["export", "delete", VOLUME, "--disconnect-hosts"])?;
        let target = vm::export_as(&daemon, VOLUME, frontend, &[])?;
        vm::poll(&target, SPAN, seed).with_context(|| format!("{frontend:?}"))?;
        seed += 1;
        vm::fill(&target, SPAN, seed)?;
    }
    daemon.cli(&["export", "delete", VOLUME, "--disconnect-hosts"])?;
    over_network(&daemon, seed, seed + 1).context("over the network again")?;
    daemon.pool_check()?;
    daemon.stop()
}

#[test]
fn two_exports_of_a_volume_must_both_be_shared() -> Result<()> {
    let mut daemon = vm::serve(&DaemonOptions::default(), "1G")?;
    daemon.cli(&["volume", "create", VOLUME, "--size", "64M"])?;
    let create = |args: &[&str]| {
        let mut all = vec!["export", "create", VOLUME];
        all.extend_from_slice(args);
        daemon.cli(&all)
    };
    let kinds: [&[&str]; 3] = [&["--any-host"], &["--nvme-pcie"], &["--vhost-user"]];
    for first in kinds {
        for second in kinds {
            // Any number of hosts share one export over the network.
            let both_tcp = first == kinds[0] && second == kinds[0];
            for (one, other) in [(false, false), (false, true), (true, false), (true, true)] {
                let of = |kind: &[&'static str], shared: bool| {
                    let more: &[&str] = if shared { &["--shared"] } else { &[] };
                    [kind, more].concat()
                };
                let made = create(&of(first, one))?;
                let again = create(&of(second, other));
                let what = format!("{first:?} {one}, {second:?} {other}");
                if one && other && !both_tcp {
                    let again = again.with_context(|| what.clone())?;
                    let number = again["id"].as_u64().context("a number")?;
                    daemon.cli(&[
                        "export",
                        "delete",
                        &format!("{VOLUME}@{number}"),
                        "--disconnect-hosts",
                    ])?;
                } else {
                    let error = format!("{:#}", again.err().with_context(|| what.clone())?);
                    let says = if both_tcp { "export" } else { "shared" };
                    ensure!(error.contains(says), "{what}: {error}");
                }
                let number = made["id"].as_u64().context("a number")?;
                daemon.cli(&[
                    "export",
                    "delete",
                    &format!("{VOLUME}@{number}"),
                    "--disconnect-hosts",
                ])?;
            }
        }
    }
    daemon.stop()
}

struct Vm {
    disk: Box<dyn Disk>,
    queues: Vec<Box<dyn Queue>>,
}

impl Vm {
    fn new(target: &Target) -> Result<Self> {
        let options = Options {
            depth: 1,
            ..Options::default()
        };
        let mut disk = vm::connect(target, &options)?;
        let queues = disk.take_queues();
        Ok(Self { disk, queues })
    }

    fn end_of(&mut self, op: Op) -> Result<DiskStatus> {
        vm::end_of(&mut *self.queues[0], op)
    }

    fn end_of_write(&mut self, block: u64, byte: u8) -> Result<DiskStatus> {
        self.queues[0].put(0, &[byte; BLOCK]);
        self.end_of(Op::Write {
            offset_bytes: block * BLOCK as u64,
            bytes: BLOCK as u32,
        })
    }

    fn end_of_read(&mut self, block: u64) -> Result<(DiskStatus, Vec<u8>)> {
        let ended = self.end_of(Op::Read {
            offset_bytes: block * BLOCK as u64,
            bytes: BLOCK as u32,
        })?;
        let mut data = vec![0; BLOCK];
        self.queues[0].get(0, &mut data);
        Ok((ended, data))
    }

    fn close(self) -> Result<()> {
        drop(self.queues);
        Ok(self.disk.close()?)
    }
}

struct Three {
    host: Host,
    vms: [Vm; 2],
}

impl Three {
    fn new(daemon: &Daemon) -> Result<Self> {
        daemon.cli(&["volume", "create", VOLUME, "--size", "64M"])?;
        daemon.cli(&["export", "create", VOLUME, "--any-host", "--shared"])?;
        let vm = |frontend| {
            let target = vm::export_as(daemon, VOLUME, frontend, &["--shared"])?;
            Vm::new(&target)
        };
        Ok(Self {
            vms: [vm(Frontend::NvmePcie)?, vm(Frontend::VhostUser)?],
            host: Host::new(daemon, "a")?,
        })
    }

    fn close(self) -> Result<()> {
        for vm in self.vms {
            vm.close()?;
        }
        self.host.close()
    }
}

/// In turns over the same blocks: first holes, then mapped blocks.
#[test]
fn each_frontend_reads_writes_of_the_others() -> Result<()> {
    let mut daemon = vm::serve(&DaemonOptions::default(), "1G")?;
    let mut all = Three::new(&daemon)?;
    let mut byte = 0u8;
    for round in 0..8 {
        if round == 4 {
            let dead = daemon.kill_engine()?;
            daemon.wait_engine_after(dead.generation, MINUTE)?;
        }
        for block in [0, 100, 5000 + round] {
            for who in 0..3 {
                byte = byte.wrapping_add(1).max(1);
                let what = format!("round {round}, block {block}, written by {who}");
                match who {
                    0 => all.host.write(block, vec![byte; BLOCK])?,
                    _ => {
                        let ended = all.vms[who - 1].end_of_write(block, byte)?;
                        ensure!(ended == DiskStatus::Well, "{what}: {ended:?}");
                    }
                }
                let found = all.host.read(block, 1)?;
                ensure!(
                    found == vec![byte; BLOCK],
                    "{what}: the host reads {}",
                    found[0]
                );
                for (at, vm) in all.vms.iter_mut().enumerate() {
                    let (ended, found) = vm.end_of_read(block)?;
                    ensure!(ended == DiskStatus::Well, "{what}: {ended:?}");
                    let right = found == vec![byte; BLOCK];
                    ensure!(right, "{what}: machine {at} reads {}", found[0]);
                }
            }
        }
        // Zeroed data is visible to none.
        let block = 5000 + round;
        let gone = Op::WriteZeroes {
            offset_bytes: block * BLOCK as u64,
            bytes: BLOCK as u32,
        };
        let ended = all.vms[round as usize % 2].end_of(gone)?;
        ensure!(ended == DiskStatus::Well, "{ended:?}");
        ensure!(all.host.read(block, 1)? == vec![0; BLOCK]);
        let (_, found) = all.vms[1 - round as usize % 2].end_of_read(block)?;
        ensure!(found == vec![0; BLOCK]);
    }
    all.close()?;
    daemon.pool_check()?;
    daemon.stop()
}

const KEY: u64 = 0xa1;
const WRITE_EXCLUSIVE: u32 = 1 << 8;
const EXCLUSIVE_ACCESS: u32 = 2 << 8;

/// Checks whether VMs may read and write.
fn poll(all: &mut Three, may_read: bool, may_write: bool) -> Result<()> {
    let expected = |may: bool, at: usize| match (may, at) {
        (true, _) => DiskStatus::Well,
        (false, 0) => DiskStatus::Nvme(Status::RESERVATION_CONFLICT),
        (false, _) => DiskStatus::Virtio(1),
    };
    let plain = |ended: DiskStatus| match ended {
        DiskStatus::Nvme(status) => DiskStatus::Nvme(status.code()),
        other => other,
    };
    for (at, vm) in all.vms.iter_mut().enumerate() {
        let ended = plain(vm.end_of_read(7)?.0);
        ensure!(ended == expected(may_read, at), "{at} reads: {ended:?}");
        let zeroes = Op::WriteZeroes {
            offset_bytes: 7 * BLOCK as u64,
            bytes: BLOCK as u32,
        };
        let discard = Op::Discard {
            offset_bytes: 7 * BLOCK as u64,
            bytes: BLOCK as u32,
        };
        let writes = [
            vm.end_of_write(7, 0xbb)?,
            vm.end_of(zeroes)?,
            vm.end_of(discard)?,
            vm.end_of(Op::Flush)?,
        ];
        for ended in writes.map(plain) {
            ensure!(ended == expected(may_write, at), "{at} writes: {ended:?}");
        }
    }
    // Without write access for VMs, the holder reads its own data.
    all.host.write(7, vec![0xaa; BLOCK])?;
    if !may_write {
        for vm in &mut all.vms {
            vm.end_of_write(7, 0xbb)?;
        }
    }
    ensure!(all.host.read(7, 1)? == vec![0xaa; BLOCK]);
    Ok(())
}

#[test]
fn a_reservation_by_a_host_excludes_vms() -> Result<()> {
    let mut daemon = vm::serve(&DaemonOptions::default(), "1G")?;
    let mut all = Three::new(&daemon)?;
    poll(&mut all, true, true)?;
    all.host.reserve(nvm::RESERVATION_REGISTER, 0, [0, KEY])?;
    let acquire = nvm::RESERVATION_ACQUIRE;
    all.host.reserve(acquire, WRITE_EXCLUSIVE, [KEY, 0])?;
    poll(&mut all, true, false)?;
    let release = nvm::RESERVATION_RELEASE;
    all.host.reserve(release, WRITE_EXCLUSIVE, [KEY, 0])?;
    poll(&mut all, true, true)?;
    all.host.reserve(acquire, EXCLUSIVE_ACCESS, [KEY, 0])?;
    poll(&mut all, false, false)?;
    let dead = daemon.kill_engine()?;
    poll(&mut all, false, false).context("while the engine is replaced")?;
    daemon.wait_engine_after(dead.generation, MINUTE)?;
    poll(&mut all, false, false).context("after an engine's death")?;
    daemon.kill_daemon()?;
    poll(&mut all, false, false).context("without a daemon")?;
    daemon.start_again()?;
    poll(&mut all, false, false).context("after a daemon's death")?;
    let status = all
        .host
        .status_of(command::flush(1), HostTransfer::None, Vec::new())?;
    ensure!(status == Status::SUCCESS, "{status:?}");
    all.host.reserve(release, EXCLUSIVE_ACCESS, [KEY, 0])?;
    poll(&mut all, true, true)?;
    all.close()?;
    daemon.pool_check()?;
    daemon.stop()
}
