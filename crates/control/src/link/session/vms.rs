//! VM clients' sockets, VM files and descriptors, which the daemon holds like connections
//! ([`super::deposit`]).
//!
//! Each deposit is acknowledged, because the engine uses nothing that the daemon does not hold. It
//! closes a client whose deposit is refused for lack of descriptors.

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

/// The limit of deposits per client; engines stay below.
const MAX_DEPOSITS: usize = 4096;

#[derive(Debug)]
pub(super) struct VmClient {
    export: ExportId,
    /// Its socket and its VM file.
    fds: [Arc<OwnedFd>; 2],
    deposits: BTreeMap<u32, Arc<OwnedFd>>,
}

/// Drops a client's descriptors in another thread, because a close may block. Unchecked ones (a
/// socket may hold more) get a thread each, up to a limit.
pub(super) fn drop_elsewhere(what: impl Send + 'static, is_judged: bool) {
    type DropQueue = mpsc::Sender<Box<dyn Any + Send>>;
    static QUEUES: OnceLock<[DropQueue; 2]> = OnceLock::new();
    static THREADS: AtomicUsize = AtomicUsize::new(0);
    let queue = |name: &str| {
        let (sender, receiver) = mpsc::channel::<Box<dyn Any + Send>>();
        let thread = std::thread::Builder::new().name(name.to_owned());
        // Without the thread, the caller drops.
        if let Err(error) = thread.spawn(move || while receiver.recv().is_ok() {}) {
            tracing::warn!(%error, "can't start a thread");
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
        // Leaks if the thread does not start.
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

/// Drops descriptors, of which the engine has checked all but sockets.
fn drop_all(fds: impl IntoIterator<Item = Arc<OwnedFd>>) {
    let is_socket = |fd: &Arc<OwnedFd>| rustix::net::sockopt::socket_type(&**fd).is_ok();
    let (sockets, others): (Vec<_>, Vec<_>) = fds.into_iter().partition(is_socket);
    if !sockets.is_empty() {
        drop_elsewhere(sockets, false);
    }
    drop_elsewhere(others, true);
}

/// By the socket's number.
pub(super) type VmClients = BTreeMap<u64, VmClient>;

fn fits(fd: &OwnedFd, end: u64) -> bool {
    u64::from(fd.as_raw_fd().unsigned_abs()) < end
}

impl VmClient {
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
    /// False if there are too few descriptors: the client ends with its engine.
    pub(super) fn keep_vm(&self, socket: u64, export: ExportId, descriptors: Vec<OwnedFd>) -> bool {
        self.keep_vm_below(socket, export, descriptors, descriptors_end())
    }

    /// Keeps a client unless one of its descriptors is reserved.
    pub(crate) fn keep_vm_below(
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
                "too few descriptors (RLIMIT_NOFILE): a VM's connection will end with the engine"
            );
            return false;
        };
        let deposits = BTreeMap::new();
        let vm = VmClient {
            export,
            fds,
            deposits,
        };
        let mut deposit = self.deposit.borrow_mut();
        deposit.vms.insert(socket, vm);
        deposit.last_vm = socket;
        true
    }

    /// Keeps a client's descriptors, and acknowledges or refuses them.
    pub(super) fn keep_deposits(&self, socket: u64, numbers: &[u32], descriptors: Vec<OwnedFd>) {
        self.keep_deposits_below(socket, numbers, descriptors, descriptors_end());
    }

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
        let kept = match deposit.vms.get_mut(&socket) {
            Some(vm)
                if complete
                    && vm.deposits.len() + numbers.len() <= MAX_DEPOSITS
                    && descriptors.iter().all(|fd| fits(fd, end)) =>
            {
                let fds = descriptors.into_iter().map(Arc::new);
                vm.deposits.extend(numbers.iter().copied().zip(fds));
                true
            }
            _ => {
                drop_elsewhere(descriptors, false);
                false
            }
        };
        drop(deposit);
        if !kept {
            tracing::warn!(socket, "no room for a VM's descriptors");
        }
        self.say(&ToEngine::Deposited { socket, last, kept });
    }

    /// Keeps descriptors of the newest client, in a greeting.
    pub(super) fn keep_deposits_of_last(&self, numbers: &[u32], descriptors: Vec<OwnedFd>) {
        let socket = self.deposit.borrow().last_vm;
        self.keep_deposits(socket, numbers, descriptors);
    }

    pub(super) fn drop_deposits(&self, socket: u64, numbers: &[u32]) {
        if let Some(vm) = self.deposit.borrow_mut().vms.get_mut(&socket) {
            let removed = numbers.iter().filter_map(|n| vm.deposits.remove(n));
            drop_all(removed);
        }
    }

    pub(super) fn send_vms(&self, vms: &VmClients) {
        for (socket, vm) in vms {
            let (socket, export) = (*socket, vm.export);
            self.say_with(&ToEngine::Vm { socket, export }, vm.fds.to_vec());
            let all: Vec<(&u32, &Arc<OwnedFd>)> = vm.deposits.iter().collect();
            for some in all.chunks(MAX_DESCRIPTORS) {
                let each = some.iter().map(|(number, fd)| (**number, Arc::clone(fd)));
                let (numbers, descriptors) = each.unzip();
                self.say_with(&ToEngine::Deposits { numbers }, descriptors);
            }
        }
    }
}
