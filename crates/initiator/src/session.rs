//! A session: one association with one controller.
//!
//! A thread sends keep-alives and collects asynchronous events. Each I/O queue belongs to its user.
//! Dropping a session ends the association; [`Session::close`] also shuts the controller down. A
//! session does not reconnect.

use std::net::SocketAddr;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use forebay_nvme::Nqn;
use forebay_nvme::host::identify::{ControllerInfo, NamespaceInfo};
use forebay_nvme::host::{HostTransfer, command, identify};

use crate::admin::{Admin, AsyncEvent, Identity, connect_queue};
use crate::connection::{Connection, ConnectionOptions};
use crate::{Error, IoQueue};

/// Options of a session.
#[derive(Clone, Debug)]
pub struct Options {
    /// I/O queues to ask for; the controller may grant fewer.
    pub io_queues: u16,
    /// Entries of each I/O queue, one more than its depth; CAP.MQES may allow fewer.
    pub queue_entries: u32,
    /// Ask for header digests.
    pub header_digest: bool,
    /// Ask for data digests.
    pub data_digest: bool,
    /// Keep Alive Timeout in milliseconds; 0 disables it.
    pub kato_ms: u32,
    /// Disable submission queue flow control, so that the controller may omit responses (SUCCESS).
    pub disable_sq_flow_control: bool,
    /// Time limit for connecting, and again for enabling.
    pub connect_timeout: Duration,
    /// Time limit for a command.
    pub command_timeout: Duration,
    /// Host identifier; by default derived from the NQN.
    pub host_id: Option<[u8; 16]>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            io_queues: 1,
            queue_entries: 129,
            header_digest: false,
            data_digest: false,
            kato_ms: 15_000,
            disable_sq_flow_control: true,
            connect_timeout: Duration::from_secs(20),
            command_timeout: Duration::from_secs(30),
            host_id: None,
        }
    }
}

impl Options {
    pub(crate) fn connection(&self) -> ConnectionOptions {
        ConnectionOptions {
            header_digest: self.header_digest,
            data_digest: self.data_digest,
            connect_timeout: self.connect_timeout,
            command_timeout: self.command_timeout,
        }
    }

    pub(crate) fn identity(&self, subnqn: &str, hostnqn: &str) -> Result<Identity, Error> {
        let name = |what: &str, name: &str| {
            Nqn::parse(name).map_err(|e| Error::Argument(format!("{what} {name:?}: {e}")))
        };
        Ok(Identity {
            host_id: self.host_id.unwrap_or_else(|| host_id_of(hostnqn)),
            hostnqn: name("host NQN", hostnqn)?,
            subnqn: name("subsystem NQN", subnqn)?,
        })
    }
}

/// Two FNV-1a hashes in the form of a version 8 UUID.
fn host_id_of(hostnqn: &str) -> [u8; 16] {
    let hash = |start: u64| {
        hostnqn.bytes().fold(start, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
        })
    };
    let mut id = [0; 16];
    id[..8].copy_from_slice(&hash(0xcbf2_9ce4_8422_2325).to_be_bytes());
    id[8..].copy_from_slice(&hash(0x6295_c58d_62b8_2175).to_be_bytes());
    id[6] = 0x80 | id[6] & 0x0f;
    id[8] = 0x80 | id[8] & 0x3f;
    id
}

/// An association with a controller.
#[derive(Debug)]
pub struct Session {
    shared: Arc<SessionShared>,
    keeper: Option<JoinHandle<()>>,
    addr: SocketAddr,
    options: Options,
    identity: Identity,
    controller: ControllerInfo,
    namespaces: Vec<NamespaceInfo>,
    granted_queues: u16,
    next_qid: u16,
    cntlid: u16,
    entries: u32,
}

#[derive(Debug)]
struct SessionShared {
    admin: Mutex<Admin>,
    stop: Mutex<bool>,
    wake: Condvar,
    failure: Mutex<Option<Error>>,
}

impl SessionShared {
    fn admin(&self) -> MutexGuard<'_, Admin> {
        self.admin.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

const EVENT_INTERVAL: Duration = Duration::from_millis(250);

impl Session {
    /// Connects to a subsystem and enables its controller, with events and keep-alive.
    pub fn connect(
        addr: SocketAddr,
        subnqn: &str,
        hostnqn: &str,
        options: &Options,
    ) -> Result<Self, Error> {
        let identity = options.identity(subnqn, hostnqn)?;
        let mut admin = Admin::open(addr, &identity, options.kato_ms, &options.connection())?;
        let controller = ControllerInfo::parse(&*admin.identify(command::cns::CONTROLLER, 0)?);
        let list = admin.identify(command::cns::ACTIVE_NAMESPACES, 0)?;
        let mut namespaces = Vec::new();
        for nsid in identify::active_namespaces(&list) {
            let data = admin.identify(command::cns::NAMESPACE, nsid)?;
            namespaces.extend(NamespaceInfo::parse(nsid, &data));
        }
        let granted_queues = if options.io_queues == 0 {
            0
        } else {
            let sqe = command::set_number_of_queues(options.io_queues);
            let what = "Set Features, Number of Queues";
            let done = admin.execute(what, sqe, HostTransfer::None, Vec::new())?;
            let granted = command::granted_queues(done.result);
            granted.min(u32::from(options.io_queues)) as u16
        };
        // Bit 8: namespace attribute notices (Base 5.27.1.8). They are optional.
        let sqe = command::set_async_events(1 << 8);
        let what = "Set Features, Asynchronous Event Configuration";
        if admin
            .execute(what, sqe, HostTransfer::None, Vec::new())
            .is_ok()
        {
            admin.request_event()?;
        }
        let entries = options
            .queue_entries
            .clamp(2, admin.max_queue_entries().max(2));
        let cntlid = admin.cntlid();
        let shared = Arc::new(SessionShared {
            admin: Mutex::new(admin),
            stop: Mutex::new(false),
            wake: Condvar::new(),
            failure: Mutex::new(None),
        });
        let keeper = {
            let shared = Arc::clone(&shared);
            let kato = Duration::from_millis(u64::from(options.kato_ms));
            let thread = std::thread::Builder::new().name("fb-keepalive".into());
            let spawned = thread.spawn(move || keep(&shared, kato));
            spawned.map_err(|source| Error::System {
                what: "start the keep-alive thread",
                source,
            })?
        };
        Ok(Self {
            shared,
            keeper: Some(keeper),
            addr,
            options: options.clone(),
            identity,
            controller,
            namespaces,
            granted_queues,
            next_qid: 1,
            cntlid,
            entries,
        })
    }

    /// The address of the target.
    #[must_use]
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// The controller.
    #[must_use]
    pub fn controller(&self) -> &ControllerInfo {
        &self.controller
    }

    /// The controller's identifier.
    #[must_use]
    pub fn cntlid(&self) -> u16 {
        self.cntlid
    }

    /// Namespaces when it connected.
    #[must_use]
    pub fn namespaces(&self) -> &[NamespaceInfo] {
        &self.namespaces
    }

    /// I/O queues that the controller granted.
    #[must_use]
    pub fn granted_queues(&self) -> u16 {
        self.granted_queues
    }

    /// The depth of each I/O queue.
    #[must_use]
    pub fn queue_depth(&self) -> usize {
        self.entries as usize - 1
    }

    /// Identifies a namespace again; `None` if it is gone.
    pub fn identify_namespace(&self, nsid: u32) -> Result<Option<NamespaceInfo>, Error> {
        let data = self
            .shared
            .admin()
            .identify(command::cns::NAMESPACE, nsid)?;
        Ok(NamespaceInfo::parse(nsid, &data))
    }

    /// A namespace's UUID, if any.
    pub fn namespace_uuid(&self, nsid: u32) -> Result<Option<[u8; 16]>, Error> {
        let data = self
            .shared
            .admin()
            .identify(command::cns::DESCRIPTORS, nsid)?;
        Ok(identify::uuid_descriptor(&data))
    }

    /// Reads and writes in the SMART log (Base 2.0, 5.16.1.3).
    pub fn host_commands(&self) -> Result<[u64; 2], Error> {
        let page = self.shared.admin().log_page(command::log::SMART, 0, 512)?;
        let word = |at: usize| {
            let bytes = page.get(at..at + 8).and_then(|b| b.try_into().ok());
            bytes.map_or(0, u64::from_le_bytes)
        };
        Ok([word(64), word(80)])
    }

    /// Sends a keep-alive now.
    pub fn keep_alive(&self) -> Result<(), Error> {
        let mut admin = self.shared.admin();
        admin.execute(
            "Keep Alive",
            command::keep_alive(),
            HostTransfer::None,
            Vec::new(),
        )?;
        Ok(())
    }

    /// Asynchronous events since the last call.
    pub fn take_events(&self) -> Result<Vec<AsyncEvent>, Error> {
        let mut admin = self.shared.admin();
        admin.service()?;
        Ok(admin.take_events())
    }

    /// Waits for asynchronous events; none after `limit`.
    pub fn wait_events(&self, limit: Duration) -> Result<Vec<AsyncEvent>, Error> {
        let deadline = Instant::now() + limit;
        loop {
            let events = self.take_events()?;
            if !events.is_empty() || Instant::now() >= deadline {
                return Ok(events);
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Why the association ended, if the keep-alive thread noticed. Returned once.
    #[must_use]
    pub fn take_failure(&self) -> Option<Error> {
        let mut failure = self
            .shared
            .failure
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        failure.take()
    }

    /// Opens the next I/O queue, for a namespace.
    pub fn open_queue(&mut self, nsid: u32) -> Result<IoQueue, Error> {
        let unusable = |what: String| Error::Unusable {
            addr: self.addr,
            what,
        };
        if self.next_qid > self.granted_queues {
            return Err(unusable(format!(
                "all {} granted I/O queues are open; ask for more in Options::io_queues",
                self.granted_queues
            )));
        }
        let Some(namespace) = self.namespaces.iter().find(|ns| ns.nsid == nsid) else {
            let subnqn = self.identity.subnqn.as_str();
            return Err(unusable(format!("{subnqn} has no usable namespace {nsid}")));
        };
        let options = self.options.connection();
        let depth = (self.entries - 1).min(1 << 15) as u16;
        let mut connection = Connection::open(self.addr, depth, &options)?;
        let flow_off = self.options.disable_sq_flow_control;
        let sqe = command::connect(self.next_qid, self.entries, 0, flow_off);
        let limit = self.options.command_timeout;
        connect_queue(&mut connection, sqe, &self.identity, self.cntlid, limit)?;
        connection.set_in_capsule_bytes(self.controller.io_in_capsule_bytes);
        let queue = IoQueue::new(connection, self.next_qid, nsid, namespace.block_bytes);
        self.next_qid += 1;
        Ok(queue)
    }

    /// Shuts the controller down and ends the association. Without confirmation it is an error, but
    /// the connection is closed.
    pub fn close(mut self) -> Result<(), Error> {
        self.stop_keeper();
        self.shared.admin().shut_down()
    }

    fn stop_keeper(&mut self) {
        *self
            .shared
            .stop
            .lock()
            .unwrap_or_else(PoisonError::into_inner) = true;
        self.shared.wake.notify_all();
        if let Some(keeper) = self.keeper.take() {
            let _ = keeper.join();
        }
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.stop_keeper();
    }
}

/// Sends each keep-alive half a timeout after the last one.
fn keep(shared: &SessionShared, kato: Duration) {
    let period = if kato.is_zero() {
        EVENT_INTERVAL
    } else {
        kato / 2
    };
    let interval = period.min(EVENT_INTERVAL);
    let mut due = Instant::now() + period;
    let mut stop = shared.stop.lock().unwrap_or_else(PoisonError::into_inner);
    while !*stop {
        let woken = shared.wake.wait_timeout(stop, interval);
        stop = woken.unwrap_or_else(PoisonError::into_inner).0;
        if *stop {
            return;
        }
        drop(stop);
        let result = {
            let mut admin = shared.admin();
            admin.service().and_then(|()| {
                if kato.is_zero() || Instant::now() < due {
                    return Ok(());
                }
                due = Instant::now() + period;
                let sqe = command::keep_alive();
                admin.execute("Keep Alive", sqe, HostTransfer::None, Vec::new())?;
                Ok(())
            })
        };
        if let Err(error) = result {
            let mut failure = shared
                .failure
                .lock()
                .unwrap_or_else(PoisonError::into_inner);
            *failure = Some(error);
            return;
        }
        stop = shared.stop.lock().unwrap_or_else(PoisonError::into_inner);
    }
}
