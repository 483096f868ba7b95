//! A Linux guest: a stock Debian kernel under QEMU, without `/dev/kvm` or root.
//!
//! A shell agent ([`init.sh`](self)) takes commands from a virtio-serial port ([`control`]). The
//! guest reaches the node's 127.0.0.1 as [`HOST_ADDRESS`]. It ends when [`Guest`] is dropped.

pub mod control;
pub mod cpio;
pub mod image;
pub mod modules;
pub mod qmp;
pub mod tape;
pub mod tools;
pub mod uml;

use std::fs::File;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use rustix::event::{PollFd, PollFlags, Timespec};
use serde_json::{Value, json};
use tempfile::TempDir;
use xtask::process;

pub use control::{Job, Output};

use crate::daemon::{Daemon, DaemonOptions};
use crate::wait;

use control::Control;
use qmp::Qmp;

/// The guest's address for the node's loopback.
pub const HOST_ADDRESS: &str = "10.0.2.2";
/// The export that [`serve_disk`] makes.
pub const DISK_NQN: &str = "nqn.2026-01.io.forebay:test:t.disk";

const MINUTE: Duration = Duration::from_secs(60);
/// `no_timer_check`: a kernel panics unless ten timer ticks come in time, and on a busy node they
/// may be late.
const KERNEL_ARGUMENTS: &str = "console=ttyS0 quiet loglevel=5 panic=-1 no_timer_check";
/// The kernel's message when QEMU corrupted a register.
const FAULT: &str = "PANIC: double fault";
const MOST_BOOTS: u32 = 3;
const POWER_OFF_LIMIT: Duration = Duration::from_secs(60);
const CONSOLE_TAIL_BYTES: usize = 6000;

/// Options of a guest.
#[derive(Debug, Clone)]
pub struct GuestOptions {
    /// Virtual CPUs.
    pub cpus: u32,
    /// Memory, which includes the initramfs.
    pub memory_mib: u32,
    /// Reserves room for [`Guest::plug_memory`].
    pub plugs_memory: bool,
    /// Time limit until the guest takes commands.
    pub boot_limit: Duration,
    /// A process whose network the guest reaches as [`HOST_ADDRESS`]; `None`: the test's own.
    pub network_of: Option<u32>,
    /// VM disks, for the QEMU of [`tools`].
    pub disks: Vec<VmDisk>,
    /// QEMU arguments for a VM disk and memory, for the QEMU of [`tools`]. `memory_mib` is then
    /// ignored.
    pub given: Vec<String>,
    /// Disks that QEMU emulates.
    pub drives: Vec<Drive>,
}

/// A file that is a disk of the guest.
#[derive(Debug, Clone)]
pub enum Drive {
    /// An NVMe namespace; the first is `/dev/nvme0n1`.
    Nvme(PathBuf),
    /// A namespace with properties of QEMU's `nvme` and `nvme-ns`.
    OddNvme(PathBuf, &'static str, &'static str),
    /// A SATA disk; the first is `/dev/sda`.
    Sata(PathBuf),
    /// A read-only virtio disk, as a tape for `tar x`.
    Tape(PathBuf),
}

/// A disk of a VM.
#[derive(Debug, Clone)]
pub enum VmDisk {
    /// An NVMe controller behind a vfio-user socket.
    VfioUser(PathBuf),
    /// A virtio disk behind a vhost-user-blk socket.
    VhostUser(PathBuf),
}

impl Default for GuestOptions {
    fn default() -> Self {
        Self {
            cpus: 2,
            memory_mib: 768,
            plugs_memory: false,
            boot_limit: Duration::from_secs(180),
            network_of: None,
            disks: Vec::new(),
            given: Vec::new(),
            drives: Vec::new(),
        }
    }
}

/// A daemon with a pool and the volume `t/disk`, exported to any host as [`DISK_NQN`].
pub fn serve_disk(options: &DaemonOptions, pool: &str, volume: &str) -> Result<Daemon> {
    let daemon = Daemon::start(options)?;
    let device = format!("file:{}", daemon.folder().join("pool.img").display());
    daemon.create_pool(&["--device", &device, "--size", pool])?;
    daemon.cli(&["tenant", "create", "t"])?;
    daemon.cli(&["volume", "create", "t/disk", "--size", volume])?;
    daemon.cli(&["export", "create", "t/disk", "--any-host"])?;
    Ok(daemon)
}

impl GuestOptions {
    fn is_served(&self) -> bool {
        !(self.disks.is_empty() && self.given.is_empty())
    }
}

/// A running guest.
#[derive(Debug)]
pub struct Guest {
    qemu: Child,
    control: Control,
    monitor: PathBuf,
    console: PathBuf,
    kernel_release: String,
    _folder: TempDir,
}

impl Guest {
    /// Boots a guest and waits until it takes commands.
    pub fn boot(options: &GuestOptions) -> Result<Self> {
        let mut boots = 1;
        loop {
            let booted = Self::boot_once(options);
            // This early, the fault is the emulator's.
            let is_emulators = |error: &anyhow::Error| format!("{error:?}").contains(FAULT);
            match booted {
                Err(error) if boots < MOST_BOOTS && is_emulators(&error) => boots += 1,
                booted => return booted,
            }
        }
    }

    fn boot_once(options: &GuestOptions) -> Result<Self> {
        let image = image::prepare()?;
        // Not below the target folder, because a socket's path must be short.
        let folder = tempfile::Builder::new()
            .prefix("forebay-guest-")
            .tempdir()?;
        let socket = folder.path().join("control");
        let console = folder.path().join("console");
        let monitor = folder.path().join("monitor");
        let listener = UnixListener::bind(&socket)?;
        let messages = File::create(folder.path().join("qemu"))?;

        // One thread for all virtual CPUs. With a thread each, QEMU 7.2 corrupts a register more
        // often, and the guest dies of a double fault.
        const QEMU: &str = "qemu-system-x86_64";
        let mut command = match options.network_of {
            _ if options.is_served() => tools::Tools::prepare()?.qemu(),
            None => Command::new(QEMU),
            Some(process) => {
                let mut command = Command::new("nsenter");
                command.args([&format!("--net=/proc/{process}/ns/net"), QEMU]);
                command
            }
        };
        add_disks(&mut command, options);
        add_drives(&mut command, options);
        command
            .args(["-accel", "tcg,thread=single", "-cpu", "max"])
            .args(["-smp", &options.cpus.to_string()])
            .args(["-nodefaults", "-display", "none", "-no-reboot"])
            .arg("-kernel")
            .arg(&image.kernel)
            .arg("-initrd")
            .arg(&image.initramfs)
            .args(["-append", KERNEL_ARGUMENTS])
            .args(["-serial", &format!("file:{}", console.display())])
            .args(["-netdev", "user,id=net"])
            .args(["-device", "virtio-net-pci,netdev=net,romfile="])
            .arg("-chardev")
            .arg(format!("socket,id=control,path={}", socket.display()))
            .args(["-device", "virtio-serial-pci"])
            .arg("-qmp")
            .arg(format!("unix:{},server=on,wait=off", monitor.display()))
            .args([
                "-device",
                "virtserialport,chardev=control,name=forebay.control",
            ])
            .stdin(Stdio::null())
            .stdout(messages.try_clone()?)
            .stderr(messages);
        let qemu = command
            .spawn()
            .context("cannot start qemu-system-x86_64 (package qemu-system-x86)")?;

        // From here, dropping `guest` kills it.
        let mut guest = Self {
            qemu,
            control: Control::unconnected(),
            monitor,
            console,
            kernel_release: image.kernel_release,
            _folder: folder,
        };
        let booted = accept(&listener, &mut guest.qemu).and_then(|stream| {
            guest.control = Control::start(stream)?;
            guest.control.wait_ready(options.boot_limit)
        });
        match booted {
            Ok(()) => Ok(guest),
            Err(error) => {
                let said = std::fs::read_to_string(guest._folder.path().join("qemu"));
                let said = said.unwrap_or_default();
                Err(guest.with_console(error.context(format!("the guest did not boot\n{said}"))))
            }
        }
    }

    /// The release of its kernel.
    #[must_use]
    pub fn kernel_release(&self) -> &str {
        &self.kernel_release
    }

    /// Runs a shell command, for at most [`PATIENCE`](wait::PATIENCE) times `limit`. A failed
    /// command is no error: see [`Output::code`].
    pub fn run(&self, command: &str, limit: Duration) -> Result<Output> {
        self.spawn(command)?
            .wait(limit * wait::PATIENCE)
            .map_err(|error| self.with_console(error))
    }

    /// Runs a shell command that must succeed; returns its output.
    pub fn check(&self, command: &str, limit: Duration) -> Result<String> {
        let output = self.run(command, limit)?;
        if output.code != 0 {
            let error = anyhow::anyhow!(
                "in the guest, exit code {}: {command}\n{}",
                output.code,
                output.text
            );
            return Err(self.with_console(error));
        }
        Ok(output.text)
    }

    /// Connects to [`DISK_NQN`] at a port of the node, with further options of nvme-cli.
    pub fn connect(&self, port: u16, options: &str) -> Result<()> {
        self.check("modprobe nvme-tcp", MINUTE)?;
        let connect =
            format!("nvme connect -t tcp -a {HOST_ADDRESS} -s {port} -n {DISK_NQN} {options}");
        self.check(&connect, MINUTE).map(drop)
    }

    /// Waits for the only NVMe disk; returns its path.
    pub fn wait_disk(&self) -> Result<String> {
        let find = "for try in $(seq 300); do ls /dev/nvme*n1 2> /dev/null && exit 0; sleep 0.1; done; exit 1";
        let disk = self.check(find, MINUTE)?.trim().to_owned();
        if disk.contains(char::is_whitespace) {
            bail!("more than one disk: {disk}");
        }
        Ok(disk)
    }

    /// Starts a shell command, which runs beside others.
    pub fn spawn(&self, command: &str) -> Result<Job> {
        self.control
            .spawn(command)
            .map_err(|error| self.with_console(error))
    }

    /// Hot-plugs a disk, numbered after [`GuestOptions::disks`].
    pub fn plug(&self, number: usize, disk: &VmDisk) -> Result<()> {
        let VmDisk::VfioUser(path) = disk else {
            bail!("only vfio-user disks are plugged by tests");
        };
        let mut monitor = Qmp::connect(&self.monitor)?;
        let plugged = monitor.execute("device_add", vfio_user(number, path));
        plugged.map(drop).map_err(|error| self.with_console(error))
    }

    /// Hot-plugs memory ([`GuestOptions::plugs_memory`]).
    pub fn plug_memory(&self, mib: u32) -> Result<()> {
        let mut monitor = Qmp::connect(&self.monitor)?;
        let size = u64::from(mib) << 20;
        let backend = json!({
            "qom-type": "memory-backend-memfd", "id": "spare", "size": size, "share": true,
        });
        let plugged = monitor.execute("object-add", backend).and_then(|_| {
            let dimm = json!({ "driver": "pc-dimm", "id": "dimm", "memdev": "spare" });
            monitor.execute("device_add", dimm)
        });
        plugged.map(drop).map_err(|error| self.with_console(error))
    }

    /// Asks the guest to release that memory; then QEMU unplugs it.
    pub fn unplug_memory(&self) -> Result<()> {
        let mut monitor = Qmp::connect(&self.monitor)?;
        let asked = monitor.execute("device_del", json!({ "id": "dimm" }));
        asked.map(drop).map_err(|error| self.with_console(error))
    }

    /// Its console output so far.
    #[must_use]
    pub fn console(&self) -> String {
        let bytes = std::fs::read(&self.console).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// Syncs, powers off, and waits until QEMU has ended.
    pub fn power_off(mut self) -> Result<()> {
        self.control.power_off()?;
        match process::wait(&mut self.qemu, POWER_OFF_LIMIT) {
            Ok(status) if status.success() => Ok(()),
            Ok(status) => Err(self.with_console(anyhow::anyhow!("QEMU failed: {status}"))),
            Err(error) => Err(self.with_console(error.context("the guest did not power off"))),
        }
    }

    fn with_console(&self, error: anyhow::Error) -> anyhow::Error {
        let console = self.console();
        let mut begin = console.len().saturating_sub(CONSOLE_TAIL_BYTES);
        while !console.is_char_boundary(begin) {
            begin += 1;
        }
        let said = std::fs::read_to_string(self._folder.path().join("qemu"));
        let said = said.unwrap_or_default();
        let error = match said.trim() {
            "" => error,
            said => error.context(format!("QEMU's output:\n{said}")),
        };
        error.context(format!(
            "--- the end of the guest's console ---\n{}\n---",
            console[begin..].trim_end()
        ))
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        let _ = self.qemu.kill();
        let _ = self.qemu.wait();
    }
}

fn add_disks(command: &mut Command, options: &GuestOptions) {
    command.args(["-machine", "q35"]).args(&options.given);
    if options.given.is_empty() {
        command.args(["-m", &options.memory_mib.to_string()]);
    }
    if options.plugs_memory {
        command.args(["-m", "slots=1,maxmem=8G"]);
    }
    if !options.is_served() {
        return;
    }
    if options.given.is_empty() {
        let memory = format!(
            "memory-backend-memfd,id=mem,size={}M,share=on",
            options.memory_mib
        );
        command.args(["-machine", "memory-backend=mem", "-object", &memory]);
    }
    // One more port for hot-plug.
    for number in 0..=options.disks.len() {
        let port = format!("pcie-root-port,id=port{number},chassis={number},slot={number}");
        command.args(["-device", &port]);
    }
    for (number, disk) in options.disks.iter().enumerate() {
        let device = match disk {
            VmDisk::VfioUser(path) => vfio_user(number, path),
            VmDisk::VhostUser(path) => {
                let socket = format!("socket,id=socket{number},path={}", path.display());
                command.args(["-chardev", &socket]);
                json!({
                    "driver": "vhost-user-blk-pci",
                    "id": format!("disk{number}"),
                    "bus": format!("port{number}"),
                    "chardev": format!("socket{number}"),
                    "num-queues": options.cpus,
                })
            }
        };
        command.args(["-device", &device.to_string()]);
    }
}

fn vfio_user(number: usize, path: &Path) -> Value {
    json!({
        "driver": "vfio-user-pci",
        "id": format!("disk{number}"),
        "bus": format!("port{number}"),
        "socket": { "type": "unix", "path": path },
    })
}

fn add_drives(command: &mut Command, options: &GuestOptions) {
    for (number, drive) in options.drives.iter().enumerate() {
        let (path, more, device) = match drive {
            Drive::Nvme(path) => (path, "", format!("nvme,serial=emulated{number}")),
            Drive::OddNvme(path, controller, namespace) => {
                let controller =
                    format!("nvme,serial=emulated{number},id=odd{number},{controller}");
                command.args(["-device", &controller]);
                (path, "", format!("nvme-ns,bus=odd{number},{namespace}"))
            }
            Drive::Sata(path) => (path, "", format!("ide-hd,serial=emulated{number}")),
            Drive::Tape(path) => (path, ",readonly=on", "virtio-blk-pci".to_owned()),
        };
        let file = format!(
            "if=none,id=drive{number},format=raw{more},file={}",
            path.display()
        );
        command.args(["-drive", &file]);
        command.args(["-device", &format!("{device},drive=drive{number}")]);
    }
}

/// Accepts QEMU's connection to the control socket.
fn accept(listener: &UnixListener, qemu: &mut Child) -> Result<std::os::unix::net::UnixStream> {
    for _ in 0..1200 {
        let mut socket = [PollFd::new(listener, PollFlags::IN)];
        let tenth = Timespec {
            tv_sec: 0,
            tv_nsec: 100_000_000,
        };
        if rustix::event::poll(&mut socket, Some(&tenth))? > 0 {
            return Ok(listener.accept()?.0);
        }
        if let Some(status) = qemu.try_wait()? {
            bail!("QEMU exited at once: {status}");
        }
    }
    bail!("QEMU did not open its control socket within two minutes");
}
