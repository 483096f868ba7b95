//! A Linux guest: a stock kernel with its stock drivers.
//!
//! Purpose: tests use Forebay as a Linux host does. [`Guest::boot`] starts a Debian kernel under QEMU;
//! commands run in it at any time, several at once, while the test does things outside.
//! Design: QEMU emulates the CPU (`tcg`), so it runs anywhere, without `/dev/kvm` and without root. The
//! kernel and the programs are Debian packages, unpacked and made into an initramfs once ([`image`]);
//! nothing is written outside the cache folder. Inside, a small shell agent ([`init.sh`](self)) takes
//! commands from a virtio-serial port and answers with their exit code and output ([`control`]). The
//! guest reaches the machine's 127.0.0.1 as [`HOST_ADDRESS`]. It ends when [`Guest`] is dropped.
//! Not here: what is tested; other ways to boot.

pub mod control;
pub mod cpio;
pub mod image;
pub mod modules;
pub mod qmp;
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

/// Where the guest finds the machine's loopback address.
pub const HOST_ADDRESS: &str = "10.0.2.2";
/// The export that [`serve_disk`] makes.
pub const DISK_NQN: &str = "nqn.2026-01.io.forebay:test:t.disk";

const MINUTE: Duration = Duration::from_secs(60);
/// A kernel checks whether ten ticks of its timer come in the time of ten, and panics if not: on a busy machine they may come late.
const KERNEL_ARGUMENTS: &str = "console=ttyS0 quiet loglevel=5 panic=-1 no_timer_check";
/// What a kernel says that dies because QEMU corrupted a register.
const FAULT: &str = "PANIC: double fault";
const MOST_BOOTS: u32 = 3;
const POWER_OFF_LIMIT: Duration = Duration::from_secs(60);
/// How much of the console an error shows.
const CONSOLE_TAIL_BYTES: usize = 6000;

/// How to boot a guest.
#[derive(Debug, Clone)]
pub struct GuestOptions {
    /// Virtual CPUs.
    pub cpus: u32,
    /// Memory; the initramfs stays in it.
    pub memory_mib: u32,
    /// There is room for more memory ([`Guest::plug_memory`]).
    pub plugs_memory: bool,
    /// Until the guest takes commands.
    pub boot_limit: Duration,
    /// A process whose network is the machine that the guest knows as [`HOST_ADDRESS`]; `None`: the test's own.
    pub network_of: Option<u32>,
    /// Disks that are a machine's own; with any, QEMU is the one of [`tools`], and memory is shared.
    pub disks: Vec<MachineDisk>,
    /// Arguments that give QEMU (again that of [`tools`]) such a disk, and its memory: `memory_mib` is not asked then.
    pub given: Vec<String>,
    /// Files that are disks which QEMU itself emulates.
    pub drives: Vec<Drive>,
}

/// A file that is a disk of the guest.
#[derive(Debug, Clone)]
pub enum Drive {
    /// An NVMe namespace, `/dev/nvme0n1` if it is the first.
    Nvme(PathBuf),
    /// One of an unusual controller: properties of QEMU's `nvme`, and of its `nvme-ns`.
    OddNvme(PathBuf, &'static str, &'static str),
    /// A virtio disk that can't be written: a tape for `tar x`.
    Tape(PathBuf),
}

/// A disk of the machine that a guest is.
#[derive(Debug, Clone)]
pub enum MachineDisk {
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

/// A daemon with a pool of `pool` bytes and the volume `t/disk` of `volume` bytes in it, for any host ([`DISK_NQN`]).
///
/// # Errors
/// If it can't be had.
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
    /// Whether any disk is a machine's own.
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
    ///
    /// # Errors
    /// If the image can't be made, QEMU can't be started, or the guest is not up within its limit; the
    /// error shows the end of the console.
    pub fn boot(options: &GuestOptions) -> Result<Self> {
        let mut boots = 1;
        loop {
            let booted = Self::boot_once(options);
            // That early, the fault is the emulator's.
            let is_emulators = |error: &anyhow::Error| format!("{error:?}").contains(FAULT);
            match booted {
                Err(error) if boots < MOST_BOOTS && is_emulators(&error) => boots += 1,
                booted => return booted,
            }
        }
    }

    fn boot_once(options: &GuestOptions) -> Result<Self> {
        let image = image::prepare()?;
        // A socket's path must be short, so this is not below the target folder.
        let folder = tempfile::Builder::new()
            .prefix("forebay-guest-")
            .tempdir()?;
        let socket = folder.path().join("control");
        let console = folder.path().join("console");
        let monitor = folder.path().join("monitor");
        let listener = UnixListener::bind(&socket)?;
        let messages = File::create(folder.path().join("qemu"))?;

        // One thread for all of the guest's processors: with a thread each, QEMU 7.2 corrupts a register
        // more often, and the guest's kernel dies of a double fault.
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

        // From here on, dropping `guest` kills it.
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

    /// The release of the kernel it runs.
    #[must_use]
    pub fn kernel_release(&self) -> &str {
        &self.kernel_release
    }

    /// Runs a shell command to its end.
    ///
    /// # Errors
    /// If it has not ended within [`PATIENCE`](wait::PATIENCE) times `limit`, or the guest is gone. A command that fails is no error:
    /// see [`Output::code`].
    pub fn run(&self, command: &str, limit: Duration) -> Result<Output> {
        self.spawn(command)?
            .wait(limit * wait::PATIENCE)
            .map_err(|error| self.with_console(error))
    }

    /// Runs a shell command that must succeed; returns what it printed.
    ///
    /// # Errors
    /// As [`run`](Self::run), and if the command fails.
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

    /// Connects to [`DISK_NQN`] at a port of the machine; `options` are more of nvme's.
    ///
    /// # Errors
    /// If it is refused.
    pub fn connect(&self, port: u16, options: &str) -> Result<()> {
        self.check("modprobe nvme-tcp", MINUTE)?;
        let connect =
            format!("nvme connect -t tcp -a {HOST_ADDRESS} -s {port} -n {DISK_NQN} {options}");
        self.check(&connect, MINUTE).map(drop)
    }

    /// Waits for the only NVMe disk; returns its path.
    ///
    /// # Errors
    /// If there is none within half a minute, or more than one.
    pub fn wait_disk(&self) -> Result<String> {
        let find = "for try in $(seq 300); do ls /dev/nvme*n1 2> /dev/null && exit 0; sleep 0.1; done; exit 1";
        let disk = self.check(find, MINUTE)?.trim().to_owned();
        if disk.contains(char::is_whitespace) {
            bail!("more than one disk: {disk}");
        }
        Ok(disk)
    }

    /// Starts a shell command; it runs beside others.
    ///
    /// # Errors
    /// If the guest is gone.
    pub fn spawn(&self, command: &str) -> Result<Job> {
        self.control
            .spawn(command)
            .map_err(|error| self.with_console(error))
    }

    /// Puts a disk in while the guest runs: of the number that follows those of [`GuestOptions::disks`].
    ///
    /// # Errors
    /// If QEMU refuses.
    pub fn plug(&self, number: usize, disk: &MachineDisk) -> Result<()> {
        let MachineDisk::VfioUser(path) = disk else {
            bail!("only vfio-user disks are plugged by tests");
        };
        let mut monitor = Qmp::connect(&self.monitor)?;
        let plugged = monitor.execute("device_add", vfio_user(number, path));
        plugged.map(drop).map_err(|error| self.with_console(error))
    }

    /// Puts memory in while the guest runs ([`GuestOptions::plugs_memory`]).
    ///
    /// # Errors
    /// If QEMU refuses.
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

    /// Asks the guest to give that memory back. When it has, QEMU takes it out.
    ///
    /// # Errors
    /// If QEMU refuses.
    pub fn unplug_memory(&self) -> Result<()> {
        let mut monitor = Qmp::connect(&self.monitor)?;
        let asked = monitor.execute("device_del", json!({ "id": "dimm" }));
        asked.map(drop).map_err(|error| self.with_console(error))
    }

    /// What has been printed on its console so far.
    #[must_use]
    pub fn console(&self) -> String {
        let bytes = std::fs::read(&self.console).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// Syncs, powers off, and waits until QEMU has ended.
    ///
    /// # Errors
    /// If it does not end within a minute.
    pub fn power_off(mut self) -> Result<()> {
        self.control.power_off()?;
        match process::wait(&mut self.qemu, POWER_OFF_LIMIT) {
            Ok(status) if status.success() => Ok(()),
            Ok(status) => Err(self.with_console(anyhow::anyhow!("QEMU ended badly: {status}"))),
            Err(error) => Err(self.with_console(error.context("the guest does not power off"))),
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
            said => error.context(format!("QEMU says:\n{said}")),
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

/// The machine, with its memory and disks.
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
    // One more, to plug something in.
    for number in 0..=options.disks.len() {
        let port = format!("pcie-root-port,id=port{number},chassis={number},slot={number}");
        command.args(["-device", &port]);
    }
    for (number, disk) in options.disks.iter().enumerate() {
        let device = match disk {
            MachineDisk::VfioUser(path) => vfio_user(number, path),
            MachineDisk::VhostUser(path) => {
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

/// A vfio-user device, in the port of its number.
fn vfio_user(number: usize, path: &Path) -> Value {
    json!({
        "driver": "vfio-user-pci",
        "id": format!("disk{number}"),
        "bus": format!("port{number}"),
        "socket": { "type": "unix", "path": path },
    })
}

/// What QEMU emulates by itself.
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

/// Takes QEMU's connection to the control socket, which it makes as it starts.
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
            bail!("QEMU ended at once: {status}");
        }
    }
    bail!("QEMU has not opened its control socket within two minutes");
}
