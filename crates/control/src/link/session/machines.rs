//! Machines' clients, as the engine deposits them.
//!
//! Purpose: a machine's socket, its machine file and the descriptors that its client sent survive the
//! engine because the daemon holds them too.
//! Design: as with connections ([`super::deposit`]), but that each deposit is acknowledged: the engine
//! acts on nothing that the daemon does not hold. What there is no room for is refused, and the engine
//! closes that client.
//! Not here: what the descriptors are.

use std::any::Any;
use std::collections::BTreeMap;
use std::mem::ManuallyDrop;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicUsize, Ordering::AcqRel};
use std::sync::{Arc, OnceLock, mpsc};

use forebay_xlate::boundary::message::{ExportId, ToEngine};
use forebay_xlate::boundary::socket::MAX_DESCRIPTORS;

use super::Session;
use super::deposit::descriptors_end;

/// Deposits that a client may have; an engine keeps to fewer.
const MAX_DEPOSITS: usize = 4096;

/// A client of a machine's.
#[derive(Debug)]
pub(super) struct VmClient {
    export: ExportId,
    /// Its socket and its machine file.
    fds: [Arc<OwnedFd>; 2],
    deposits: BTreeMap<u32, Arc<OwnedFd>>,
}

/// Drops what a client sent, which may take as long as it likes, on a thread that does nothing else. What nobody has
/// judged (a socket, in which more may wait) has a thread for itself, while there are not too many of these.
pub(super) fn drop_elsewhere(what: impl Send + 'static, is_judged: bool) {
    type DropQueue = mpsc::Sender<Box<dyn Any + Send>>;
    static QUEUES: OnceLock<[DropQueue; 2]> = OnceLock::new();
    static THREADS: AtomicUsize = AtomicUsize::new(0);
    let queue = |name: &str| {
        let (sender, receiver) = mpsc::channel::<Box<dyn Any + Send>>();
        let thread = std::thread::Builder::new().name(name.to_owned());
        // Without it, whoever drops does so where it is.
        if let Err(error) = thread.spawn(move || while receiver.recv().is_ok() {}) {
            tracing::warn!(%error, "starting a thread");
        }
        sender
    };
    let [judged, others] = QUEUES.get_or_init(|| [queue("closer"), queue("suspects")]);
    let what: Box<dyn Any + Send> = Box::new(what);
    if is_judged {
        let _ = judged.send(what);
        return;
    }
    if THREADS.fetch_add(1, AcqRel) < 32 {
        // In a box that is left be should the thread not start.
        let what = ManuallyDrop::new(what);
        let thread = std::thread::Builder::new().name("suspect".to_owned());
        let started = thread.spawn(move || {
            drop(ManuallyDrop::into_inner(what));
            THREADS.fetch_sub(1, AcqRel);
        });
        if started.is_err() {
            THREADS.fetch_sub(1, AcqRel);
        }
        return;
    }
    THREADS.fetch_sub(1, AcqRel);
    let _ = others.send(what);
}

/// The same of descriptors that the engine has judged: but for sockets.
fn drop_all(fds: impl IntoIterator<Item = Arc<OwnedFd>>) {
    let is_socket = |fd: &Arc<OwnedFd>| rustix::net::sockopt::socket_type(&**fd).is_ok();
    let (sockets, others): (Vec<_>, Vec<_>) = fds.into_iter().partition(is_socket);
    if !sockets.is_empty() {
        drop_elsewhere(sockets, false);
    }
    drop_elsewhere(others, true);
}

/// All of them, by their sockets' numbers.
pub(super) type VmClients = BTreeMap<u64, VmClient>;

fn fits(fd: &OwnedFd, end: u64) -> bool {
    u64::from(fd.as_raw_fd().unsigned_abs()) < end
}

impl VmClient {
    /// Lets go of all of it.
    pub(super) fn end(self) {
        let Self {
            export: _,
            fds,
            deposits,
        } = self;
        drop_all(deposits.into_values());
        drop_elsewhere(fds, false);
    }
}

impl Session {
    /// Keeps a client. False: there is no room for it, and it ends with its engine.
    pub(super) fn keep_machine(
        &self,
        socket: u64,
        export: ExportId,
        descriptors: Vec<OwnedFd>,
    ) -> bool {
        self.keep_machine_below(socket, export, descriptors, descriptors_end())
    }

    /// Keeps a client unless one of its descriptors is one that is reserved.
    pub(crate) fn keep_machine_below(
        &self,
        socket: u64,
        export: ExportId,
        descriptors: Vec<OwnedFd>,
        end: u64,
    ) -> bool {
        let kept: Result<[OwnedFd; 2], _> = descriptors.try_into();
        let Some(fds) = kept
            .ok()
            .filter(|fds| fds.iter().all(|fd| fits(fd, end)))
            .map(|fds| fds.map(Arc::new))
        else {
            tracing::warn!(
                export = export.0,
                "too few descriptors (RLIMIT_NOFILE): a machine's client that ends with the engine"
            );
            return false;
        };
        let deposits = BTreeMap::new();
        let machine = VmClient {
            export,
            fds,
            deposits,
        };
        let mut deposit = self.deposit.borrow_mut();
        deposit.machines.insert(socket, machine);
        deposit.last_machine = socket;
        true
    }

    /// Keeps what a client sent, and tells the engine so, or that there is no room.
    pub(super) fn keep_deposits(&self, socket: u64, numbers: &[u32], descriptors: Vec<OwnedFd>) {
        self.keep_deposits_below(socket, numbers, descriptors, descriptors_end());
    }

    /// The same, but for descriptors that are reserved.
    pub(crate) fn keep_deposits_below(
        &self,
        socket: u64,
        numbers: &[u32],
        descriptors: Vec<OwnedFd>,
        end: u64,
    ) {
        let Some(last) = numbers.last().copied() else {
            return;
        };
        let complete = descriptors.len() == numbers.len();
        let mut deposit = self.deposit.borrow_mut();
        let kept = match deposit.machines.get_mut(&socket) {
            Some(machine)
                if complete
                    && machine.deposits.len() + numbers.len() <= MAX_DEPOSITS
                    && descriptors.iter().all(|fd| fits(fd, end)) =>
            {
                let fds = descriptors.into_iter().map(Arc::new);
                machine.deposits.extend(numbers.iter().copied().zip(fds));
                true
            }
            _ => {
                drop_elsewhere(descriptors, false);
                false
            }
        };
        drop(deposit);
        if !kept {
            tracing::warn!(socket, "a machine's descriptors that there is no room for");
        }
        self.say(&ToEngine::Deposited { socket, last, kept });
    }

    /// The same for the client that was told of last, in a greeting.
    pub(super) fn keep_deposits_of_last(&self, numbers: &[u32], descriptors: Vec<OwnedFd>) {
        let socket = self.deposit.borrow().last_machine;
        self.keep_deposits(socket, numbers, descriptors);
    }

    /// These are used no more.
    pub(super) fn drop_deposits(&self, socket: u64, numbers: &[u32]) {
        if let Some(machine) = self.deposit.borrow_mut().machines.get_mut(&socket) {
            let removed = numbers.iter().filter_map(|n| machine.deposits.remove(n));
            drop_all(removed);
        }
    }

    /// Gives a successor all clients of a dead engine.
    pub(super) fn send_machines(&self, machines: &VmClients) {
        for (socket, machine) in machines {
            let (socket, export) = (*socket, machine.export);
            self.say_with(&ToEngine::Machine { socket, export }, machine.fds.to_vec());
            let all: Vec<(&u32, &Arc<OwnedFd>)> = machine.deposits.iter().collect();
            for some in all.chunks(MAX_DESCRIPTORS) {
                let each = some.iter().map(|(number, fd)| (**number, Arc::clone(fd)));
                let (numbers, descriptors) = each.unzip();
                self.say_with(&ToEngine::Deposits { numbers }, descriptors);
            }
        }
    }
}
