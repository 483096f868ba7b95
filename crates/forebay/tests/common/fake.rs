//! A fake daemon: the API's socket, with samples as answers. Bodies are parsed into the API's own
//! types.

use std::fmt::Debug;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, mpsc};

use forebay_control::model::error::{ApiError, ErrorBody};
use forebay_control::model::events::EventList;
use forebay_control::model::{
    DeviceAdd, DeviceDetails, DeviceState, Done, Export, ExportCreate, ExportUpdate, PoolCheck,
    PoolCreate, PoolOpen, PoolUpdate, Port, PortUpdate, SnapshotSpace, SnapshotsTake, Tenant,
    TenantCreate, Transfer, TransferPut, VolumeClone, VolumeCreate, VolumeRollback, VolumeUpdate,
    validate,
};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::samples::{check_result, device, export, image, in_ceph, pool, snapshot, volume};

pub(crate) struct Daemon {
    pub folder: tempfile::TempDir,
    /// Requests: method, path, and the body as text.
    pub asked: mpsc::Receiver<String>,
    is_stopping: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Daemon {
    pub(crate) fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(folder.path().join("api.sock")).unwrap();
        let (tell, asked) = mpsc::channel();
        let is_stopping = Arc::new(AtomicBool::new(false));
        let stops = is_stopping.clone();
        let thread = std::thread::spawn(move || {
            for stream in listener.incoming() {
                if stops.load(Relaxed) {
                    return;
                }
                serve(stream.unwrap(), &tell);
            }
        });
        Self {
            folder,
            asked,
            is_stopping,
            thread: Some(thread),
        }
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.folder.path().join("api.sock")
    }

    pub(crate) fn was_asked(&self, part: &str) {
        let asked: Vec<String> = self.asked.try_iter().collect();
        assert!(
            asked.iter().any(|one| one.contains(part)),
            "{part}: {asked:#?}"
        );
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        self.is_stopping.store(true, Relaxed);
        let _ = UnixStream::connect(self.socket());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn serve(stream: UnixStream, tell: &mpsc::Sender<String>) {
    let mut reader = BufReader::new(&stream);
    let mut head = Vec::new();
    while head.last().is_none_or(|line: &String| line != "\r\n") {
        let mut line = String::new();
        if reader.read_line(&mut line).unwrap_or(0) == 0 {
            return;
        }
        head.push(line);
    }
    let length = head.iter().find_map(|line| {
        let (name, value) = line.split_once(':')?;
        (name.eq_ignore_ascii_case("content-length")).then(|| value.trim().parse().unwrap())
    });
    let mut body = vec![0; length.unwrap_or(0)];
    reader.read_exact(&mut body).unwrap();
    let mut words = head[0].split(' ');
    let (method, target) = (words.next().unwrap(), decoded(words.next().unwrap()));
    let request = Request {
        line: format!("{method} {target}"),
        body,
        tell,
    };
    let path = target.split('?').next().unwrap_or_default();
    let parts: Vec<&str> = path.split('/').skip(2).collect();
    let (status, body) = match answer(&request, method, &parts) {
        Ok(body) => (200, serde_json::to_vec(&body).unwrap()),
        Err(error) => {
            let status = error.kind.status().as_u16();
            (status, serde_json::to_vec(&ErrorBody { error }).unwrap())
        }
    };
    let head = format!(
        "HTTP/1.1 {status} x\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    let _ = (&stream).write_all(&[head.as_bytes(), &body].concat());
}

/// Decodes percent escapes (`%2E`).
fn decoded(text: &str) -> String {
    let mut parts = text.split('%');
    let mut bytes = parts.next().unwrap().as_bytes().to_vec();
    for part in parts {
        bytes.push(u8::from_str_radix(&part[..2], 16).unwrap());
        bytes.extend_from_slice(&part.as_bytes()[2..]);
    }
    String::from_utf8(bytes).unwrap()
}

struct Request<'a> {
    line: String,
    body: Vec<u8>,
    tell: &'a mpsc::Sender<String>,
}

impl Request<'_> {
    fn without_body(&self) {
        let _ = self.tell.send(self.line.clone());
    }

    fn body<T: DeserializeOwned + Debug>(&self) -> T {
        let body: T = serde_json::from_slice(&self.body).unwrap();
        let _ = self.tell.send(format!("{} {body:?}", self.line));
        body
    }
}

fn json(value: impl Serialize) -> Result<Value, ApiError> {
    Ok(serde_json::to_value(value).unwrap())
}

fn answer(request: &Request<'_>, method: &str, path: &[&str]) -> Result<Value, ApiError> {
    if matches!(method, "GET" | "DELETE") {
        request.without_body();
    }
    match (method, path) {
        ("POST", ["tenants"]) => tenant(request.body()),
        ("GET", ["tenants"]) => json([(); 0]),
        ("DELETE", ["tenants", _, "volumes", _]) => json(Done {
            done: "deleted".to_owned(),
        }),
        ("DELETE", ["tenants", name @ ..]) => {
            validate::name("tenant", &name.join("/"))?;
            json(Done {
                done: "deleted".to_owned(),
            })
        }
        ("GET", ["volumes"] | ["tenants", _, "volumes"]) => {
            json([volume(1 << 30), snapshot("disk@monday".to_owned())])
        }
        ("POST", ["tenants", _, "volumes"]) => {
            let size_bytes = request.body::<VolumeCreate>().size_bytes;
            json(volume(size_bytes.unwrap_or(1 << 30)))
        }
        ("GET", ["tenants", _, "volumes", "silent", "image"]) => {
            Err(ApiError::unavailable("Ceph cluster east does not answer"))
        }
        ("GET", ["tenants", _, "volumes", _, "image"]) => json(image()),
        ("GET", ["tenants", _, "volumes", name @ ("ceph" | "silent")]) => json(in_ceph(name)),
        ("GET", ["tenants", _, "volumes", _]) => json(volume(1 << 20)),
        ("GET", ["tenants", _, "snapshots"]) => json([SnapshotSpace {
            volume: snapshot("disk@monday".to_owned()),
            alone_bytes: 3 << 20,
        }]),
        ("POST", ["tenants", _, "snapshots"]) => {
            let names = request.body::<SnapshotsTake>().snapshots;
            json(names.into_iter().map(snapshot).collect::<Vec<_>>())
        }
        ("POST", ["tenants", _, "volumes", _, "clone"]) => {
            request.body::<VolumeClone>();
            json(volume(1 << 20))
        }
        ("POST", ["tenants", _, "volumes", _, "rollback"]) => {
            request.body::<VolumeRollback>();
            json(volume(1 << 20))
        }
        ("PATCH", ["tenants", _, "volumes", _]) => {
            let size_bytes = request.body::<VolumeUpdate>().size_bytes;
            json(volume(size_bytes.unwrap_or(1 << 30)))
        }
        ("PUT", ["tenants", _, "volumes", _, "transfer"]) => {
            request.body::<TransferPut>();
            json(Transfer {
                volume: volume(1 << 20),
                nqn: "nqn.2026-01.io.forebay:acme.disk".to_owned(),
                addresses: Vec::new(),
                in_use_by: Vec::new(),
            })
        }
        ("GET", ["exports"]) => json([
            export(),
            Export {
                volume: "bad".to_owned(),
                quarantined: Some("engines died of it".to_owned()),
                ..export()
            },
        ]),
        ("POST", ["exports"]) => {
            request.body::<ExportCreate>();
            json(export())
        }
        ("PATCH", ["exports", _, _]) => {
            request.body::<ExportUpdate>();
            json(export())
        }
        ("GET", ["exports", _, _]) => json(export()),
        ("PATCH", ["ports", address]) => json(Port {
            address: (*address).to_owned(),
            id: 1,
            ana: request.body::<PortUpdate>().ana,
            changes: 3,
        }),
        ("GET", ["events"]) => json(EventList::default()),
        ("GET" | "POST" | "PATCH" | "DELETE", ["pool", ..]) => of_pool(request, method, &path[1..]),
        ("GET", ["devices", _]) => json(DeviceDetails {
            device: device(DeviceState::Online),
            volumes: vec!["acme/disk".to_owned()],
        }),
        ("POST", ["devices"]) => {
            request.body::<DeviceAdd>();
            json(device(DeviceState::Online))
        }
        _ => Err(ApiError::unavailable("the daemon is stopping")),
    }
}

fn of_pool(request: &Request<'_>, method: &str, path: &[&str]) -> Result<Value, ApiError> {
    match (method, path) {
        ("POST", []) => drop(request.body::<PoolCreate>()),
        ("PATCH", []) => drop(request.body::<PoolUpdate>()),
        ("POST", ["open"]) => drop(request.body::<PoolOpen>()),
        ("POST", ["check"]) => return json(check_result(request.body::<PoolCheck>().repair)),
        ("DELETE", _) => {
            return json(Done {
                done: "pool destroyed".to_owned(),
            });
        }
        _ => {}
    }
    json(pool())
}

fn tenant(body: TenantCreate) -> Result<Value, ApiError> {
    validate::name("tenant", &body.name)?;
    if body.name == "taken" {
        return Err(ApiError::exists("tenant taken exists").hint("choose another name"));
    }
    json(Tenant {
        name: body.name,
        volumes: 0,
        provisioned_bytes: 0,
        allocated_bytes: 0,
        budget: None,
        credit: None,
    })
}
