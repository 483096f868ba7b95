//! VM sockets of the control thread: listeners and clients.
//!
//! **Design.** Each VM's export has a listening socket from the daemon and one client. A second
//! client is closed at once, unless the first has hung up: then it waits in the kernel. The daemon
//! gets copies of each client's socket, state file and deposited descriptors, and the reactor uses
//! no descriptor before the daemon's acknowledgement. A successor hands a dead engine's clients to
//! their reactors. **Not here:** their messages ([`crate::frontend::vm`]).

use super::Control;
use crate::core::FenceSet;
use crate::core::RecoveredSpan;
use crate::frontend::vm::VmMessage;
use crate::frontend::vm::closer::Closer;
use crate::frontend::vm::file::VmFile;
use crate::frontend::vm::protocol::{Closing, DepositedFd};
use crate::frontend::vm::{NewVm, blamed_of};
use crate::reactor::mailbox::Post;
use crate::takeover::{Inheritance, ServedLanes};
use forebay_xlate::boundary::message::{Blamed, ExportId, FromEngine, Held};
use forebay_xlate::boundary::socket::MAX_DESCRIPTORS;
use forebay_xlate::kill_point;
use rustix::event::{PollFd, PollFlags, epoll};
use rustix::io::Errno;
use rustix::net::{Shutdown, SocketFlags};
use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

pub(super) const KEY_BYTE: u64 = 0xC3;

/// Accepts per event, so that the control thread gets to its other work.
const ACCEPT_BATCH: usize = 4;

/// Interval of reports of clients turned away.
const REPORT_INTERVAL: Duration = Duration::from_secs(60);

struct Listener {
    fd: OwnedFd,
    /// Not polled: descriptors ran out, or the previous client is not cleaned up.
    muted: bool,
}

fn inode(socket: &OwnedFd) -> Option<u64> {
    rustix::fs::fstat(socket).ok().map(|socket| socket.st_ino)
}

struct VmListener {
    export: ExportId,
    fd: Arc<OwnedFd>,
    file: Arc<OwnedFd>,
    deposits: BTreeMap<u32, Arc<OwnedFd>>,
    turned_away: TurnedAway,
}

#[derive(Default)]
struct TurnedAway {
    reported: Option<Instant>,
    /// Since `reported`.
    count: u32,
}

impl TurnedAway {
    /// Returns the number to report if due. A monitor that reconnects would cause a report each
    /// second.
    fn add(&mut self, now: Instant) -> Option<u32> {
        self.count = self.count.saturating_add(1);
        let is_due = self
            .reported
            .is_none_or(|reported| now - reported >= REPORT_INTERVAL);
        is_due.then(|| {
            self.reported = Some(now);
            std::mem::take(&mut self.count)
        })
    }
}

#[derive(Debug)]
pub(super) struct Gathered {
    socket: u64,
    export: ExportId,
    fds: Option<[OwnedFd; 2]>,
    deposits: BTreeMap<u32, Arc<OwnedFd>>,
    /// All descriptors came.
    complete: bool,
}

pub(super) struct VmListeners {
    listeners: BTreeMap<ExportId, Listener>,
    clients: BTreeMap<u64, VmListener>,
    closer: Closer,
}

impl Listener {
    fn mute(&mut self, epoll: impl AsFd, export: ExportId) {
        let none = epoll::EventFlags::empty();
        self.muted = epoll::modify(epoll, &self.fd, key(export), none).is_ok();
    }

    fn listen(&mut self, epoll: impl AsFd, export: ExportId) {
        if self.muted {
            let flags = epoll::EventFlags::IN;
            self.muted = epoll::modify(epoll, &self.fd, key(export), flags).is_err();
        }
    }
}

impl VmListeners {
    pub(super) fn new(closer: Closer) -> Self {
        Self {
            listeners: BTreeMap::new(),
            clients: BTreeMap::new(),
            closer,
        }
    }

    fn of(&self, export: ExportId) -> Option<&VmListener> {
        self.clients.values().find(|known| known.export == export)
    }

    fn of_mut(&mut self, export: ExportId) -> Option<&mut VmListener> {
        let mut clients = self.clients.values_mut();
        clients.find(|known| known.export == export)
    }
}

fn key(export: ExportId) -> epoll::EventData {
    epoll::EventData::new_u64(KEY_BYTE << 56 | export.0 & ((1 << 56) - 1))
}

fn has_hung_up(fd: impl AsFd) -> bool {
    let mut poll = [PollFd::from_borrowed_fd(fd.as_fd(), PollFlags::RDHUP)];
    let none = rustix::event::Timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    let _ = rustix::event::poll(&mut poll, Some(&none));
    poll[0]
        .revents()
        .intersects(PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR)
}

impl Control {
    pub(super) fn set_vm_listener(
        &mut self,
        export: ExportId,
        fd: Option<OwnedFd>,
    ) -> Result<(), String> {
        let known = self.lanes.exports.get(&export);
        if !known.is_some_and(|known| known.config.frontend.is_vm()) {
            return Err("there is no such VM export".to_string());
        }
        let before = self.vms.listeners.get(&export).map(|l| &l.fd);
        let Some(fd) = fd else {
            let missing = "the message came without its socket".to_string();
            return before.map(|_| ()).ok_or(missing);
        };
        if before.is_some_and(|before| inode(before) == inode(&fd)) {
            return Ok(());
        }
        self.remove_vm_listener(export);
        rustix::io::ioctl_fionbio(&fd, true).map_err(|e| format!("listening: {e}"))?;
        epoll::add(&*self.epoll, &fd, key(export), epoll::EventFlags::IN)
            .map_err(|e| format!("listening: {e}"))?;
        let listener = Listener { fd, muted: false };
        self.vms.listeners.insert(export, listener);
        Ok(())
    }

    pub(super) fn remove_vm_listener(&mut self, export: ExportId) {
        if let Some(listener) = self.vms.listeners.remove(&export) {
            let _ = epoll::delete(&*self.epoll, &listener.fd);
            // Other processes hold it too.
            let _ = rustix::net::shutdown(&listener.fd, Shutdown::Both);
            self.vms.closer.close_suspect(listener.fd);
        }
    }

    pub(super) fn remove_vm_listeners(&mut self) {
        for listener in std::mem::take(&mut self.vms.listeners).into_values() {
            let _ = epoll::delete(&*self.epoll, &listener.fd);
            self.vms.closer.close_suspect(listener.fd);
        }
    }

    pub(super) fn accept_vm(&mut self, key: u64) {
        let export = ExportId(key & ((1 << 56) - 1));
        for _ in 0..ACCEPT_BATCH {
            let present = self.vms.of(export).map(|known| known.fd.clone());
            let Some(listener) = self.vms.listeners.get_mut(&export) else {
                return;
            };
            if present.is_some_and(|present| has_hung_up(&*present)) {
                return listener.mute(&self.epoll, export);
            }
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            match rustix::net::accept_with(&listener.fd, flags) {
                Ok(fd) => self.admit_vm(export, fd),
                Err(Errno::CONNABORTED | Errno::INTR) => {}
                Err(Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM) => {
                    return listener.mute(&self.epoll, export);
                }
                Err(_) => return,
            }
        }
    }

    /// Retries accepts: descriptors may be free again.
    pub(super) fn tick_vms(&mut self) {
        for (export, listener) in &mut self.vms.listeners {
            listener.listen(&self.epoll, *export);
        }
    }

    pub(super) fn is_muted(&self) -> bool {
        self.vms.listeners.values().any(|l| l.muted)
    }

    fn admit_vm(&mut self, export: ExportId, fd: OwnedFd) {
        if let Some(known) = self.vms.of_mut(export) {
            let reported = known.turned_away.add(Instant::now());
            self.vms.closer.close_suspect(fd);
            if let Some(count) = reported {
                let why = "a second VM was refused: one is already connected, and a socket serves one at a time";
                self.vm_refused(export, why.to_string(), count);
            }
            return;
        }
        let Some((config, reactor)) = self.lanes.of_vm(export) else {
            self.vms.closer.close_suspect(fd);
            return;
        };
        let made = VmFile::create(export, config.frontend.word());
        let file = made.and_then(|file| Ok((file.fd().try_clone_to_owned()?, file)));
        let Ok((held, file)) = file else {
            self.vms.closer.close_suspect(fd);
            let why = "it was refused: no memory or file descriptor is left for it";
            self.vm_refused(export, why.to_string(), 1);
            return;
        };
        let socket = self.listener.number();
        let known = VmListener {
            export,
            fd: Arc::new(fd),
            file: Arc::new(held),
            deposits: BTreeMap::new(),
            turned_away: TurnedAway::default(),
        };
        let fd = known.fd.clone();
        let descriptors = vec![known.fd.clone(), known.file.clone()];
        self.vms.clients.insert(socket, known);
        self.say_shared(&FromEngine::Vm { socket, export }, descriptors);
        kill_point!("vm.accepted");
        let new = NewVm {
            socket,
            fd,
            export: config,
            file,
            inherited: None,
            blamed: None,
        };
        self.mailboxes[reactor].post(Post::Frontend(Box::new(VmMessage::Client(Box::new(new)))));
    }

    pub(super) fn vm_refused(&mut self, export: ExportId, why: String, count: u32) {
        self.say(&FromEngine::HostRefused {
            host: String::new(),
            subsystem: export.0.to_string(),
            why,
            count,
        });
    }

    pub(super) fn vm_deposits(&mut self, socket: u64, deposits: Vec<DepositedFd>) {
        let Some(known) = self.vms.clients.get_mut(&socket) else {
            return;
        };
        for deposit in &deposits {
            known.deposits.insert(deposit.number, deposit.fd.clone());
        }
        for some in deposits.chunks(MAX_DESCRIPTORS) {
            let numbers = some.iter().map(|deposit| deposit.number).collect();
            let fds = some.iter().map(|deposit| deposit.fd.clone()).collect();
            self.say_shared(&FromEngine::Deposits { socket, numbers }, fds);
        }
    }

    /// The daemon has acknowledged deposits.
    pub(super) fn vm_deposited(&mut self, socket: u64, last: u32, kept: bool) {
        let known = self.vms.clients.get(&socket);
        if let Some((_, reactor)) = known.and_then(|known| self.lanes.of_vm(known.export)) {
            self.mailboxes[reactor].post(Post::Frontend(Box::new(VmMessage::Deposited(
                socket, last, kept,
            ))));
        }
    }

    pub(super) fn vm_withdrawn(&mut self, socket: u64, numbers: Vec<u32>) {
        if let Some(known) = self.vms.clients.get_mut(&socket) {
            let fds = numbers.iter().filter_map(|n| known.deposits.remove(n));
            self.vms.closer.close_all(fds);
        }
        self.say(&FromEngine::Withdrawn { socket, numbers });
    }

    /// A client is cleaned up: the next one may connect.
    pub(super) fn vm_detached(&mut self, socket: u64, export: ExportId, why: Closing) {
        if let Some(known) = self.vms.clients.remove(&socket) {
            self.vms.closer.close(known.file);
            self.vms.closer.close_all(known.deposits.into_values());
            self.vms.closer.close_suspect(known.fd);
        }
        let why = why.0.to_string();
        self.say(&FromEngine::VmDetached { export, why });
        self.say(&FromEngine::SocketGone { socket });
        if let Some(listener) = self.vms.listeners.get_mut(&export) {
            listener.listen(&self.epoll, export);
        }
    }

    pub(super) fn say_vms(&mut self) {
        let clients: Vec<_> = (self.vms.clients.iter())
            .map(|(socket, known)| {
                let fds = vec![known.fd.clone(), known.file.clone()];
                (*socket, known.export, fds, known.deposits.clone())
            })
            .collect();
        for (socket, export, fds, deposits) in clients {
            self.say_shared(&FromEngine::Held(Held::Vm(socket, export)), fds);
            let all: Vec<(u32, Arc<OwnedFd>)> = deposits.into_iter().collect();
            for some in all.chunks(MAX_DESCRIPTORS) {
                let (numbers, fds) = some.iter().cloned().unzip();
                self.say_shared(&FromEngine::Held(Held::Deposits(numbers)), fds);
            }
        }
        let listeners: Vec<_> = (self.vms.listeners.iter())
            .filter_map(|(export, l)| Some((*export, l.fd.try_clone().ok()?)))
            .collect();
        for (export, fd) in listeners {
            self.say_with(&FromEngine::Held(Held::VmListener(export)), vec![fd]);
        }
    }

    pub(super) fn has_vms(&self) -> bool {
        !self.vms.clients.is_empty()
    }

    pub(super) fn resume_vms(&mut self, vms: &[NewVm]) {
        for new in vms {
            let Ok(file) = new.file.fd().try_clone_to_owned() else {
                continue;
            };
            let known = VmListener {
                export: new.export.export,
                fd: new.fd.clone(),
                file: Arc::new(file),
                deposits: new.inherited.clone().unwrap_or_default(),
                turned_away: TurnedAway::default(),
            };
            self.vms.clients.insert(new.socket, known);
        }
    }
}

impl Gathered {
    pub(super) fn new(socket: u64, export: ExportId, descriptors: Vec<OwnedFd>) -> Self {
        let fds: Option<[OwnedFd; 2]> = descriptors.try_into().ok();
        Self {
            socket,
            export,
            complete: fds.is_some(),
            fds,
            deposits: BTreeMap::new(),
        }
    }

    pub(super) fn add(&mut self, numbers: &[u32], descriptors: Vec<OwnedFd>) {
        self.complete &= numbers.len() == descriptors.len();
        let fds = descriptors.into_iter().map(Arc::new);
        self.deposits.extend(numbers.iter().copied().zip(fds));
    }
}

#[derive(Debug, Default)]
pub(super) struct Converted {
    /// Clients that end, reported after `Resume`.
    pub closed: Vec<(u64, ExportId, Option<OwnedFd>, Closing)>,
}

/// Decides which clients continue, without side effects.
pub(super) fn convert(
    gathered: Vec<Gathered>,
    lanes: &ServedLanes,
    blamed: Option<Blamed>,
    inheritance: &mut Inheritance,
) -> Converted {
    let mut converted = Converted::default();
    for one in gathered {
        let Gathered {
            socket,
            export,
            fds,
            deposits,
            complete,
        } = one;
        let lane = lanes.get(&export);
        let lane = lane.filter(|lane| lane.served.config.frontend.is_vm());
        let Some(lane) = lane else {
            let fd = fds.map(|[fd, _]| fd);
            let why = Closing("its export is no longer served");
            converted.closed.push((socket, export, fd, why));
            continue;
        };
        let Some(part) = inheritance.parts.get_mut(lane.served.reactor) else {
            continue;
        };
        let config = &lane.served.config;
        let (fd, adopted) = match fds {
            Some([fd, file]) if complete => (
                Some(fd),
                VmFile::adopt(file, export, config.frontend.word())
                    .map_err(|_| Closing("its saved state is damaged")),
            ),
            fds => {
                let fd = fds.map(|[fd, _]| fd);
                (fd, Err(Closing("this engine ran out of file descriptors")))
            }
        };
        match (fd, adopted) {
            (Some(fd), Ok(file)) => part.vms.push(NewVm {
                socket,
                fd: Arc::new(fd),
                export: config.clone(),
                file,
                inherited: Some(deposits),
                blamed: blamed_of(blamed, export),
            }),
            (fd, adopted) => {
                // Unknown operations may be at devices: the whole volume waits.
                part.recovered.push(RecoveredSpan {
                    volume: lane.volume.id(),
                    bytes: 0..u64::MAX,
                    write: true,
                    devices: FenceSet::ALL,
                    command: None,
                });
                let why = adopted.err().unwrap_or(Closing("it has no socket"));
                converted.closed.push((socket, export, fd, why));
            }
        }
    }
    converted
}

impl Control {
    pub(super) fn close_vms(&mut self, converted: Converted) {
        for (socket, export, fd, why) in converted.closed {
            if let Some(fd) = fd {
                // The daemon holds it too.
                let _ = rustix::net::shutdown(&fd, Shutdown::Both);
                self.vms.closer.close_suspect(fd);
            }
            self.vm_detached(socket, export, why);
        }
    }
}
