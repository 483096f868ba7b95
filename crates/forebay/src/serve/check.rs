//! `forebay serve --check`: reports what would not be served; changes nothing.
//!
//! Addresses are bound for a moment. Those of a running daemon or engine count as available. Labels
//! and catalogs are not read.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::str::FromStr;
use std::time::Duration;

use forebay_control::api::client::Client;
use forebay_control::config::Listen;
use forebay_control::model::Status;
use forebay_device::ring::{Ring, RingOptions};
use forebay_device::{DeviceSpec, file_limit, mounts};
use forebay_pool::{DEFAULT_EXTENT_BYTES, check_room};
use rustix::fs::{Access, Mode, OFlags, access};
use rustix::io::Errno;
use rustix::thread::{CpuSet, sched_setaffinity};
use serde::Serialize;
use serde_json::Value;

use super::listen;
use crate::config::Config;
use crate::failure::Outcome;
use crate::limits;
use crate::output::{Output, table};

const ANSWER_LIMIT: Duration = Duration::from_secs(2);
const ANSWER_BYTES: u64 = 64 << 10;
/// The longest path of a Unix socket (`sockaddr_un`).
const SOCKET_PATH_BYTES: usize = 107;

const KERNELS: [&str; 2] = ["/proc", "/sys"];

#[derive(Debug, Serialize)]
struct Part {
    part: String,
    trouble: Option<String>,
}

#[derive(Default)]
struct Parts(Vec<Part>);

impl Parts {
    fn note(&mut self, part: String, tried: Result<(), String>) {
        self.0.push(Part {
            part,
            trouble: tried.err(),
        });
    }

    fn kernel(&mut self, config: &Config) {
        let ring = Ring::new(&RingOptions::default());
        self.note(
            "the kernel's io_uring".to_owned(),
            ring.map(drop).map_err(text),
        );
        let limits = limits::check(config.reactors);
        self.note("the resource limits".to_owned(), limits.map_err(text));
    }

    fn files(&mut self, config: &Config) {
        for (name, folder) in [
            ("state", &config.state_dir),
            ("run", &config.run_dir),
            ("VM sockets", &config.run_dir.join("machines")),
        ] {
            self.note(
                format!("the folder {} ({name})", folder.display()),
                folder_works(folder),
            );
        }
        let engine_log = config.state_dir.join("log/engine.log");
        for log in [&config.log_file, &engine_log] {
            self.note(format!("the log {}", log.display()), file_works(log));
        }
    }

    fn addresses(&mut self, config: &Config) {
        let socket = &config.api_socket;
        self.note(
            format!("the API socket {}", socket.display()),
            socket_works(socket, config),
        );
        let running: Option<Status> = Client::new(socket)
            .with_time_limit(ANSWER_LIMIT)
            .get("/v1/status")
            .ok();
        let is_left = running.is_none() && engine_lives(&config.run_dir);
        // Kept, so that conflicts between the addresses are found.
        let mut held = Vec::new();
        let listen = listen(config);
        for address in &config.nvme_tcp {
            let is_held = |status: &Status| status.nvme_tcp.contains(&address.to_string());
            let ours = is_left || running.as_ref().is_some_and(is_held);
            self.note(
                format!("the listener {address}"),
                address_works(*address, &listen, &mut held, || ours),
            );
        }
        if let Some(address) = config.metrics {
            let ours = || running.is_some() && has_metrics(address);
            self.note(
                format!("the metrics address {address}"),
                address_works(address, &listen, &mut held, ours),
            );
        }
    }

    fn devices(&mut self, config: &Config) {
        let recorded = recorded(config);
        for spec in config.devices.iter().chain(&recorded) {
            let tried = DeviceSpec::from_str(spec).map_err(text);
            self.note(
                format!("the device {spec}"),
                tried.and_then(|spec| device_works(spec.path())),
            );
        }
        // An existing pool needs no new file.
        if let (Some((path, size_bytes)), true) = (&config.embedded, recorded.is_empty()) {
            let tried = match path.exists() {
                true => device_works(path),
                false => new_pool_works(path, *size_bytes, config),
            };
            self.note(format!("the pool file {}", path.display()), tried);
        }
    }

    /// Files only: a cluster that doesn't answer stops nothing.
    fn clusters(&mut self, config: &Config) {
        for (name, cluster) in &config.clusters {
            let files = [
                ("configuration", Some(&cluster.config)),
                ("keyring", cluster.keyring.as_ref()),
            ];
            for (what, file) in files {
                let Some(file) = file else { continue };
                let part = format!("the {what} {} of [ceph.{name}]", file.display());
                self.note(part, file_reads(file));
            }
        }
    }
}

pub(super) fn check(config: &Config, output: Output) -> Outcome<bool> {
    let mut parts = Parts::default();
    parts.kernel(config);
    parts.files(config);
    parts.addresses(config);
    for cpu in &config.cpus {
        parts.note(format!("CPU {cpu}"), cpu_works((*cpu).into()));
    }
    parts.devices(config);
    parts.clusters(config);
    let Parts(parts) = parts;
    let is_well = parts.iter().all(|part| part.trouble.is_none());
    output.show(&parts, |parts| {
        let said = |part: &Part| {
            let trouble = part.trouble.clone();
            [
                part.part.clone(),
                trouble.unwrap_or_else(|| "ok".to_owned()),
            ]
        };
        table(["part", "state"], parts.iter().map(said))
    })?;
    Ok(is_well)
}

fn text(error: impl ToString) -> String {
    error.to_string()
}

/// The folder, or the parent in which it would be made.
fn folder_works(folder: &Path) -> Result<(), String> {
    let there = folder
        .ancestors()
        .find(|above| above.symlink_metadata().is_ok());
    let there = there.unwrap_or(Path::new("/"));
    if !there.is_dir() {
        return Err(format!("{} is not a folder", there.display()));
    }
    can_make(there).map_err(|error| format!("can't write to {}: {error}", there.display()))
}

/// Makes an unnamed temporary file.
fn can_make(folder: &Path) -> Result<(), Errno> {
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    match rustix::fs::open(folder, flags, Mode::RUSR | Mode::WUSR) {
        Ok(_) => Ok(()),
        // Not every file system can. `/proc` and `/sys` allow no files at all.
        Err(error @ (Errno::OPNOTSUPP | Errno::ISDIR | Errno::NOENT)) => {
            match KERNELS.iter().any(|kernels| folder.starts_with(kernels)) {
                true => Err(error),
                false => access(folder, Access::WRITE_OK | Access::EXEC_OK),
            }
        }
        Err(error) => Err(error),
    }
}

fn file_works(file: &Path) -> Result<(), String> {
    match OpenOptions::new().append(true).open(file) {
        Ok(_) => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            folder_works(file.parent().unwrap_or(Path::new("/")))
        }
        Err(error) => Err(format!("can't be written: {error}")),
    }
}

fn file_reads(file: &Path) -> Result<(), String> {
    let failed = |error| format!("can't be read: {error}");
    // The open of a pipe would wait.
    if !std::fs::metadata(file).map_err(failed)?.is_file() {
        return Err("is not a file".to_owned());
    }
    File::open(file).map(drop).map_err(failed)
}

/// The file's folder exists, or is made at the start.
fn has_folder(file: &Path, config: &Config) -> Result<(), String> {
    let folder = file.parent().unwrap_or(Path::new("/"));
    let made = [&config.state_dir, &config.run_dir];
    if !folder.exists() && !made.iter().any(|made| made.starts_with(folder)) {
        return Err(format!("the folder {} does not exist", folder.display()));
    }
    folder_works(folder)
}

fn new_pool_works(path: &Path, size_bytes: u64, config: &Config) -> Result<(), String> {
    has_folder(path, config)?;
    if let Some(kind) = mounts::device_folder(path) {
        return Err(format!("a file there would be in memory: {kind}"));
    }
    file_limit::check(path, size_bytes).map_err(text)?;
    check_room(&[size_bytes], DEFAULT_EXTENT_BYTES).map_err(text)
}

fn socket_works(socket: &Path, config: &Config) -> Result<(), String> {
    if socket.as_os_str().len() > SOCKET_PATH_BYTES {
        return Err(format!("its path is longer than {SOCKET_PATH_BYTES} bytes"));
    }
    if socket.is_dir() {
        return Err("the path is a folder".to_owned());
    }
    has_folder(socket, config)
}

fn address_works(
    address: SocketAddr,
    listen: &Listen,
    held: &mut Vec<TcpListener>,
    is_ours: impl FnOnce() -> bool,
) -> Result<(), String> {
    match TcpListener::bind(address) {
        Ok(listener) => {
            held.push(listener);
            Ok(())
        }
        Err(error) if error.kind() == io::ErrorKind::AddrInUse && is_ours() => Ok(()),
        Err(error) => Err(match listen.in_the_way_of(address) {
            Some(other) => format!("can't listen there: {error}; {other} conflicts with it"),
            None => format!("can't listen there: {error}"),
        }),
    }
}

fn has_metrics(address: SocketAddr) -> bool {
    let ask = || -> io::Result<Vec<u8>> {
        let mut stream = TcpStream::connect_timeout(&address, ANSWER_LIMIT)?;
        stream.set_read_timeout(Some(ANSWER_LIMIT))?;
        stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: forebay\r\nConnection: close\r\n\r\n")?;
        let mut said = Vec::new();
        stream.take(ANSWER_BYTES).read_to_end(&mut said)?;
        Ok(said)
    };
    ask().is_ok_and(|said| String::from_utf8_lossy(&said).contains("\nforebay_"))
}

fn cpu_works(cpu: usize) -> Result<(), String> {
    if cpu >= CpuSet::MAX_CPU {
        return Err("there is no such CPU".to_owned());
    }
    // In a thread of its own, to keep this one's affinity.
    let tried = std::thread::spawn(move || {
        let mut set = CpuSet::new();
        set.set(cpu);
        sched_setaffinity(None, &set)
    });
    match tried.join() {
        Ok(Ok(())) => Ok(()),
        Ok(Err(error)) => Err(format!(
            "can't be used: {error}; it is offline or outside the cpuset"
        )),
        Err(_) => Err("can't be checked".to_owned()),
    }
}

fn device_works(path: &Path) -> Result<(), String> {
    let mut options = OpenOptions::new();
    let opened = options.read(true).write(true).open(path);
    let file = opened.map_err(|error| format!("can't be opened: {error}"))?;
    let there = file.metadata().map_err(text)?;
    if there.is_file() {
        file_limit::check(path, there.len()).map_err(text)?;
    }
    Ok(())
}

fn recorded(config: &Config) -> Vec<String> {
    let read = |file| std::fs::read(file).ok();
    let record = read(config.state_dir.join("devices.json"));
    let record: Option<Value> = record.and_then(|said| serde_json::from_slice(&said).ok());
    let devices = record.and_then(|record| record["devices"].as_array().cloned());
    let specs = devices.into_iter().flatten();
    let specs = specs.filter_map(|device| device["spec"].as_str().map(str::to_owned));
    specs
        .filter(|spec| !config.devices.contains(spec))
        .collect()
}

/// Whether an earlier daemon's engine still has the addresses.
fn engine_lives(run_dir: &Path) -> bool {
    let record = std::fs::read(run_dir.join("engine.json")).ok();
    let record: Option<Value> = record.and_then(|said| serde_json::from_slice(&said).ok());
    let pid = record.and_then(|record| record["pid"].as_u64());
    pid.is_some_and(|pid| pid != 0 && Path::new(&format!("/proc/{pid}")).exists())
}
