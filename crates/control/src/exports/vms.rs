//! Listening sockets of VM exports, which the daemon makes and holds and the engine accepts from.
//!
//! A file at the path is replaced only if it is a socket without a listener. A path may lie on a
//! file system that hangs. So a thread per export accesses it, and callers wait at most [`LIMIT`].
//! A missing socket is made again every few seconds.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, FileTypeExt};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Duration;

use forebay_pool::{ExportId, ExportRecord, SocketOwner, VolumeRecord};
use forebay_xlate::boundary::message::{ExportId as EngineExportId, FromEngine, Held, ToEngine};
use rustix::fs::{AtFlags, FileType, Gid, Mode, OFlags, Uid};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use tokio::sync::oneshot;
use tokio::time::{sleep, timeout};

use crate::base::Base;
use crate::base::show::{export_label, tenant_name};
use crate::events::EventFields;
use crate::exports::hosts::Hosts;
use crate::exports::quarantine::Quarantine;
use crate::link::session::{AskError, PendingAnswer, Session};
use crate::link::{Link, engine_error};
use crate::model::error::ApiError;
use crate::model::events::EventKind;
use crate::model::validate::MAX_PATH_BYTES;

/// How long callers wait for a path.
const LIMIT: Duration = Duration::from_secs(5);
const RETRY: Duration = Duration::from_secs(5);
const BACKLOG: i32 = 4;

#[derive(Debug)]
pub(crate) struct VmSockets {
    pub(super) base: Rc<Base>,
    pub(super) link: Rc<Link>,
    pub(super) hosts: Rc<Hosts>,
    pub(super) quarantine: Rc<Quarantine>,
    pub(super) making: RefCell<BTreeSet<ExportId>>,
    /// The folder of default paths.
    folder: RefCell<PathBuf>,
    listeners: RefCell<BTreeMap<ExportId, OwnedFd>>,
    /// Exports whose path a thread is busy with.
    busy: RefCell<BTreeSet<ExportId>>,
    /// Exports whose socket could not be made, with a warning for each.
    missing: RefCell<BTreeMap<ExportId, String>>,
}

impl VmSockets {
    pub(crate) fn new(
        base: &Rc<Base>,
        link: &Rc<Link>,
        hosts: &Rc<Hosts>,
        quarantine: &Rc<Quarantine>,
    ) -> Rc<Self> {
        Rc::new(Self {
            base: base.clone(),
            link: link.clone(),
            hosts: hosts.clone(),
            quarantine: quarantine.clone(),
            making: RefCell::default(),
            folder: Default::default(),
            listeners: Default::default(),
            busy: Default::default(),
            missing: Default::default(),
        })
    }
}

fn with_path(path: &Path, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{}: {error}", path.display()))
}

fn remove_dead(path: &Path) -> io::Result<()> {
    let there = match std::fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        there => there?,
    };
    let refuse = |why: &str| Err(io::Error::new(io::ErrorKind::AlreadyExists, why));
    if !there.file_type().is_socket() {
        return refuse("the file there is not a socket");
    }
    let address = SocketAddrUnix::new(path)?;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let kind = SocketType::STREAM;
    let probe = rustix::net::socket_with(AddressFamily::UNIX, kind, flags, None)?;
    match rustix::net::connect(&probe, &address) {
        Err(Errno::CONNREFUSED) => std::fs::remove_file(path),
        Err(Errno::NOENT) => Ok(()),
        Ok(()) | Err(Errno::AGAIN | Errno::PROTOTYPE) => refuse("another process listens there"),
        Err(error) => Err(error.into()),
    }
}

/// With this socket name, as SPDK uses it, clients get only the folder.
const IN_FOLDER: &str = "cntrl";

fn listen(path: &Path, is_default: bool, owner: SocketOwner) -> io::Result<OwnedFd> {
    let is_in_folder = path.file_name().is_some_and(|name| name == IN_FOLDER);
    if let Some(folder) = path.parent()
        && (is_default || is_in_folder && !folder.is_dir())
    {
        // Anyone with access to the runtime folder can reach the socket, which has its own mode.
        std::fs::DirBuilder::new()
            .recursive(is_default)
            .mode(0o711)
            .create(folder)?;
    }
    remove_dead(path)?;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let fd = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    // The narrowest mode first; the requested one follows.
    rustix::fs::fchmod(&fd, Mode::RUSR | Mode::WUSR)?;
    rustix::net::bind(&fd, &SocketAddrUnix::new(path)?)?;
    let finish = || -> io::Result<()> {
        // Whoever may write to the folder may have replaced the file. Change the socket itself, not
        // the file that now has its name.
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = rustix::fs::open(path, flags, Mode::empty())?;
        if FileType::from_raw_mode(rustix::fs::fstat(&file)?.st_mode) != FileType::Socket {
            return Err(io::Error::other("the file there is not the new socket"));
        }
        if owner != SocketOwner::default() {
            let user = owner.user.map(Uid::from_raw);
            let group = owner.group.map(Gid::from_raw);
            rustix::fs::chownat(&file, "", user, group, AtFlags::EMPTY_PATH)?;
        }
        let by_descriptor = format!("/proc/self/fd/{}", file.as_raw_fd());
        rustix::fs::chmod(by_descriptor, Mode::from_raw_mode(0o660))?;
        rustix::net::listen(&fd, BACKLOG)?;
        Ok(())
    };
    finish().inspect_err(|_| {
        let _ = std::fs::remove_file(path);
    })?;
    Ok(fd)
}

impl VmSockets {
    /// Sets the folder of default paths, and begins to make missing sockets.
    pub(crate) fn begin_vms(self: &Rc<Self>, folder: PathBuf) {
        *self.folder.borrow_mut() = folder;
        self.base.spawn(self.clone().run_vms());
    }

    pub(crate) fn socket_path(&self, export: &ExportRecord, volume: &VolumeRecord) -> PathBuf {
        if let Some(path) = &export.socket {
            return PathBuf::from(path);
        }
        let core = self.base.core.borrow();
        let name = format!("{}.sock", export_label(export, volume));
        let folder = self.folder.borrow();
        folder.join(tenant_name(&core, volume)).join(name)
    }

    /// `None` if it is not a VM's export.
    pub(crate) fn vm_path(&self, id: ExportId) -> Option<PathBuf> {
        let core = self.base.core.borrow();
        let export = core.pool.exports().get(id).ok()?;
        let volume = core.pool.volume(export.volume).ok()?;
        let is_vm = export.frontend.is_vm();
        is_vm.then(|| self.socket_path(export, volume))
    }

    /// The thread may hang.
    async fn at_path<T: Send + 'static>(
        self: &Rc<Self>,
        id: ExportId,
        path: &Path,
        work: impl FnOnce(&Path) -> io::Result<T> + Send + 'static,
    ) -> io::Result<T> {
        if !self.busy.borrow_mut().insert(id) {
            let error = io::Error::new(io::ErrorKind::TimedOut, "it has not answered yet");
            return Err(with_path(path, &error));
        }
        let (owner, path) = (self.clone(), path.to_owned());
        let (sender, answer) = oneshot::channel();
        let working = {
            let path = path.clone();
            tokio::task::spawn_blocking(move || work(&path))
        };
        // Outlives the caller.
        tokio::task::spawn_local(async move {
            let result = working.await;
            owner.busy.borrow_mut().remove(&id);
            let _ = sender.send(result);
        });
        let no_answer = || {
            io::Error::new(
                io::ErrorKind::TimedOut,
                format!("no answer within {LIMIT:?}"),
            )
        };
        let result = match timeout(LIMIT, answer).await {
            Ok(Ok(Ok(result))) => result,
            Ok(_) => Err(io::Error::other("a thread of the daemon failed")),
            Err(_) => Err(no_answer()),
        };
        result.map_err(|error| with_path(&path, &error))
    }

    /// Also has the engine accept from it.
    pub(crate) async fn listen_for_vm(self: &Rc<Self>, id: ExportId) -> Result<(), ApiError> {
        let (path, is_default, owner) = {
            let (export, volume) = {
                let core = self.base.core.borrow();
                let Ok(export) = core.pool.exports().get(id) else {
                    return Ok(());
                };
                let Ok(volume) = core.pool.volume(export.volume) else {
                    return Ok(());
                };
                (export.clone(), volume.clone())
            };
            if !export.frontend.is_vm() {
                return Ok(());
            }
            let path = self.socket_path(&export, &volume);
            (path, export.socket.is_none(), export.socket_owner)
        };
        if !self.has_vm_listener(id) {
            if path.as_os_str().len() > MAX_PATH_BYTES {
                return Err(ApiError::invalid(format!(
                    "the socket's path is too long (at most {MAX_PATH_BYTES} bytes): {}",
                    path.display()
                ))
                .hint("give a shorter one with --vm-socket"));
            }
            let making = self.at_path(id, &path, move |path| listen(path, is_default, owner));
            let fd = making.await.map_err(|error| {
                ApiError::unavailable(format!("can't create the socket {error}"))
                    .hint("give another path with --vm-socket, or another owner with --owner")
            })?;
            // It may have been deleted or quarantined meanwhile.
            let is_deleted = self.base.core.borrow().pool.exports().get(id).is_err();
            if is_deleted || self.quarantine.has(id) {
                drop(fd);
                if is_deleted {
                    self.remove_vm_listener(id, &path).await;
                }
                return Ok(());
            }
            self.listeners.borrow_mut().insert(id, fd);
        }
        if let Some(session) = self.link.session()
            && let Some(mut pending) = self.say_vm_listener(&session, id)
        {
            match pending.within(self.base.limits.request).await {
                // The next engine is told of it.
                Ok(()) | Err(AskError::Gone) => {}
                Err(error) => return Err(engine_error(&error)),
            }
        }
        Ok(())
    }

    fn say_vm_listener(&self, session: &Session, id: ExportId) -> Option<PendingAnswer> {
        if self.quarantine.has(id) {
            return None;
        }
        let listeners = self.listeners.borrow();
        let fd = listeners.get(&id)?.as_fd().try_clone_to_owned();
        let fd = fd
            .inspect_err(
                |error| tracing::error!(%error, "can't duplicate the descriptor of a VM's socket"),
            )
            .ok()?;
        let export = EngineExportId(id.0);
        let message = |request| ToEngine::SetVmListener { request, export };
        Some(session.request_with("a VM's socket", fd, message))
    }

    /// Closes the last descriptor, as the engine is dead: clients get an error at once while the
    /// export is quarantined.
    pub(crate) fn forget_vm_listener(&self, id: ExportId) {
        self.listeners.borrow_mut().remove(&id);
    }

    pub(crate) fn keep_vm_listener(&self, export: EngineExportId, fd: Option<OwnedFd>) {
        if let Some(fd) = fd {
            let mut listeners = self.listeners.borrow_mut();
            listeners.entry(ExportId(export.0)).or_insert(fd);
        }
    }

    pub(crate) fn keep_vm_listeners(&self, held: &mut [(Held, Vec<OwnedFd>)]) {
        for (held, descriptors) in held {
            if let Held::VmListener(export) = held {
                self.keep_vm_listener(*export, descriptors.pop());
            }
        }
    }

    pub(crate) fn has_vm_listener(&self, id: ExportId) -> bool {
        self.listeners.borrow().contains_key(&id)
    }

    pub(crate) fn say_vm_listeners(&self, session: &Session) -> Vec<(String, PendingAnswer)> {
        let ids: Vec<ExportId> = self.listeners.borrow().keys().copied().collect();
        let known = |id: &ExportId| self.base.core.borrow().pool.exports().get(*id).is_ok();
        let ids = ids.into_iter().filter(known);
        ids.filter_map(|id| {
            Some((
                format!("socket of {id}"),
                self.say_vm_listener(session, id)?,
            ))
        })
        .collect()
    }

    pub(crate) async fn remove_vm_listener(self: &Rc<Self>, id: ExportId, path: &Path) {
        self.missing.borrow_mut().remove(&id);
        self.listeners.borrow_mut().remove(&id);
        // The engine has closed it too, so it has no listener unless another process uses the path
        // now.
        if let Err(error) = self.at_path(id, path, remove_dead).await {
            tracing::warn!(%error, "can't remove a VM's socket");
        }
    }

    async fn run_vms(self: Rc<Self>) {
        loop {
            let served: Vec<ExportId> = {
                let core = self.base.core.borrow();
                let vms = core.pool.exports().iter().filter(|e| e.frontend.is_vm());
                let served = vms.filter(|e| !self.quarantine.has(e.id));
                served.map(|export| export.id).collect()
            };
            for id in served {
                let busy = self.busy.borrow().contains(&id);
                if busy || self.making_export(id) {
                    continue;
                }
                self.forget_lost_socket(id).await;
                let made = match self.has_vm_listener(id) {
                    true => Ok(()),
                    false => self.listen_for_vm(id).await,
                };
                self.note_socket(id, made);
            }
            sleep(RETRY).await;
        }
    }

    /// A socket without a file is of no use to clients.
    async fn forget_lost_socket(self: &Rc<Self>, id: ExportId) {
        let Some(path) = self.vm_path(id) else {
            return;
        };
        if !self.has_vm_listener(id) {
            return;
        }
        let is_lost = |path: &Path| match path.symlink_metadata() {
            Ok(there) => Ok(!there.file_type().is_socket()),
            Err(error) => Ok(matches!(
                error.kind(),
                io::ErrorKind::NotFound | io::ErrorKind::NotADirectory
            )),
        };
        // A path that does not answer is not lost.
        if self.at_path(id, &path, is_lost).await.unwrap_or(false) {
            self.listeners.borrow_mut().remove(&id);
        }
    }

    fn note_socket(&self, id: ExportId, made: Result<(), ApiError>) {
        let name = self.hosts.export_name(id);
        let fields = match made {
            Ok(()) => {
                let returned = self.missing.borrow_mut().remove(&id);
                returned.map(|_| {
                    let text = format!("VMs can connect to {name} again");
                    (EventKind::PartReturned, text)
                })
            }
            Err(error) => {
                let text =
                    format!("VMs can't connect to {name}: {error}; the daemon keeps retrying");
                let before = self.missing.borrow_mut().insert(id, text.clone());
                (before.as_ref() != Some(&text)).then_some((EventKind::PartMissing, text))
            }
        };
        if let Some((kind, text)) = fields {
            self.base.report(kind, text, EventFields::default());
        }
    }

    pub(crate) fn socket_warnings(&self) -> Vec<String> {
        self.missing.borrow().values().cloned().collect()
    }

    fn making_export(&self, id: ExportId) -> bool {
        self.making.borrow().contains(&id)
    }

    pub(crate) fn report_vm(&self, session: &Session, fields: &FromEngine) {
        let (export, kind, did) = match fields {
            FromEngine::Vm { export, .. } => (
                *export,
                EventKind::HostConnected,
                "a VM connected to".to_owned(),
            ),
            FromEngine::VmDetached { export, why } => (
                *export,
                EventKind::HostDisconnected,
                format!("a VM was disconnected ({why}) from"),
            ),
            _ => return,
        };
        let name = self.hosts.export_name(ExportId(export.0));
        let fields = EventFields {
            export: Some(name.clone()),
            count: Some(1),
            ..EventFields::default()
        };
        let text = format!("{did} {name}");
        self.base
            .events
            .report(kind, session.generation, text, fields);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_dead_socket_is_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("t/v.sock");
        let nobody = SocketOwner::default();
        let first = listen(&path, true, nobody).unwrap();
        let mode = std::fs::metadata(&path).unwrap();
        use std::os::unix::fs::PermissionsExt;
        assert_eq!(mode.permissions().mode() & 0o777, 0o660);
        let error = listen(&path, true, nobody).unwrap_err();
        assert!(error.to_string().contains("another process"), "{error}");
        assert!(remove_dead(&path).is_err() && path.exists());
        drop(first);
        drop(listen(&path, true, nobody).unwrap());
        remove_dead(&path).unwrap();
        assert!(!path.exists());
        remove_dead(&path).unwrap();
        std::fs::write(&path, "precious").unwrap();
        assert!(listen(&path, true, nobody).is_err());
        assert_eq!(std::fs::read(&path).unwrap(), b"precious");
    }

    #[test]
    fn a_socket_that_is_found_by_its_folder_has_one_made() {
        let folder = tempfile::tempdir().unwrap();
        let nobody = SocketOwner::default();
        let path = folder.path().join("disk/cntrl");
        drop(listen(&path, false, nobody).unwrap());
        std::fs::write(folder.path().join("disk/other"), "precious").unwrap();
        let second = listen(&path, false, nobody).unwrap();
        assert!(listen(&path, false, nobody).is_err());
        drop(second);
        remove_dead(&path).unwrap();
        let left = std::fs::read(folder.path().join("disk/other"));
        assert_eq!(left.unwrap(), b"precious");
        for path in ["none/v.sock", "none/none/cntrl"] {
            assert!(listen(&folder.path().join(path), false, nobody).is_err());
        }
        assert!(!folder.path().join("none").exists());
    }
}
