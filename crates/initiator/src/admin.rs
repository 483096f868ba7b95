//! The admin queue of an association: one command at a time, and asynchronous events beside it.
//!
//! Reading an event's log page allows the next event; then its request is renewed.
//! [`crate::session`] has the thread for this.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use forebay_nvme::fabrics::ConnectData;
use forebay_nvme::host::{HostTransfer, command};
use forebay_nvme::{NSID_ALL, Nqn, Sqe};
use zerocopy::IntoBytes;

use crate::connection::{Connection, ConnectionOptions};
use crate::{Done, Error, Wait};

/// The least that a controller must accept (Base 5.16.1.23, ASQSZ).
const ADMIN_ENTRIES: u16 = 32;
const TAG_COMMAND: u64 = 0;
const TAG_EVENT: u64 = 1;

/// An asynchronous event (Base 5.2.1).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AsyncEvent {
    /// Asynchronous Event Type: 2 is a notice.
    pub kind: u8,
    /// Asynchronous Event Information: notice 0 is Namespace Attribute Changed.
    pub info: u8,
    /// The log page with the details.
    pub log_page: u8,
    /// The namespaces of a Namespace Attribute Changed; FFFFFFFFh alone means too many to list.
    pub changed_nsids: Vec<u32>,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Identity {
    pub(crate) host_id: [u8; 16],
    pub(crate) hostnqn: Nqn,
    pub(crate) subnqn: Nqn,
}

#[derive(Debug)]
pub(crate) struct Admin {
    connection: Connection,
    limit: Duration,
    cntlid: u16,
    cap: u64,
    events: Vec<AsyncEvent>,
    unserviced: Vec<AsyncEvent>,
    scratch: Vec<Done>,
}

impl Admin {
    /// Connects, creates the association (Base 6.3) and enables the controller (Base 3.5.1).
    pub(crate) fn open(
        addr: SocketAddr,
        identity: &Identity,
        kato_ms: u32,
        options: &ConnectionOptions,
    ) -> Result<Self, Error> {
        let connection = Connection::open(addr, ADMIN_ENTRIES - 1, options)?;
        let mut admin = Self {
            connection,
            limit: options.command_timeout,
            cntlid: ConnectData::CNTLID_DYNAMIC,
            cap: 0,
            events: Vec::new(),
            unserviced: Vec::new(),
            scratch: Vec::with_capacity(4),
        };
        let sqe = command::connect(0, u32::from(ADMIN_ENTRIES), kato_ms, true);
        let result = connect_queue(
            &mut admin.connection,
            sqe,
            identity,
            admin.cntlid,
            admin.limit,
        )?;
        admin.cntlid = result as u16;
        admin.enable(options.connect_timeout)?;
        Ok(admin)
    }

    fn enable(&mut self, limit: Duration) -> Result<(), Error> {
        self.cap = self.property_get(command::property::CAP, true)?;
        // CAP.TO, bits 31:24: the limit for enabling, in units of 500 ms (Base 3.1.3.1).
        let allowed = Duration::from_millis(500 * (self.cap >> 24 & 0xff).max(1));
        self.property_set(command::property::CC, command::CC_ENABLE)?;
        let what = "CSTS.RDY after CC.EN was set";
        self.wait_csts(
            command::CSTS_RDY,
            command::CSTS_RDY,
            allowed.max(limit),
            what,
        )
    }

    fn wait_csts(
        &mut self,
        mask: u32,
        value: u32,
        limit: Duration,
        what: &str,
    ) -> Result<(), Error> {
        let addr = self.connection.addr();
        let deadline = Instant::now() + limit;
        let mut pause = Duration::from_millis(1);
        loop {
            let csts = self.property_get(command::property::CSTS, false)? as u32;
            if csts & mask == value {
                return Ok(());
            }
            if csts & command::CSTS_CFS != 0 {
                return Err(Error::Unusable {
                    addr,
                    what: format!("the controller reports a fatal status (CSTS {csts:#x})"),
                });
            }
            if Instant::now() >= deadline {
                return Err(Error::TimedOut {
                    addr,
                    what: what.into(),
                    waited: limit,
                });
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(Duration::from_millis(50));
        }
    }

    /// Normal shutdown (Base 3.6.1).
    pub(crate) fn shut_down(&mut self) -> Result<(), Error> {
        let cc = command::CC_ENABLE | command::CC_SHN_NORMAL;
        self.property_set(command::property::CC, cc)?;
        self.wait_csts(
            command::CSTS_SHST_MASK,
            command::CSTS_SHST_COMPLETE,
            self.limit,
            "CSTS.SHST to say that shutdown is complete",
        )
    }

    pub(crate) fn cntlid(&self) -> u16 {
        self.cntlid
    }

    /// CAP.MQES + 1: the most entries of an I/O queue (Base 3.1.3.1).
    pub(crate) fn max_queue_entries(&self) -> u32 {
        (self.cap as u32 & 0xffff) + 1
    }

    pub(crate) fn property_get(&mut self, offset: u32, wide: bool) -> Result<u64, Error> {
        let what = format!("Property Get {offset:#x}");
        let sqe = command::property_get(offset, wide);
        Ok(self
            .execute(&what, sqe, HostTransfer::None, Vec::new())?
            .result)
    }

    pub(crate) fn property_set(&mut self, offset: u32, value: u32) -> Result<(), Error> {
        let what = format!("Property Set {offset:#x}");
        let sqe = command::property_set(offset, value);
        self.execute(&what, sqe, HostTransfer::None, Vec::new())?;
        Ok(())
    }

    pub(crate) fn identify(&mut self, cns: u8, nsid: u32) -> Result<Box<[u8; 4096]>, Error> {
        let what = format!("Identify CNS {cns:#04x} of namespace {nsid:#x}");
        let sqe = command::identify(cns, nsid);
        let done = self.execute(&what, sqe, HostTransfer::ToHost(4096), vec![0; 4096])?;
        let mut data = Box::new([0; 4096]);
        data.copy_from_slice(&done.buf);
        Ok(data)
    }

    pub(crate) fn log_page(&mut self, lid: u8, offset: u64, bytes: u32) -> Result<Vec<u8>, Error> {
        let what = format!("Get Log Page {lid:#04x}");
        let nsid = if lid == command::log::DISCOVERY {
            0
        } else {
            NSID_ALL
        };
        let sqe = command::get_log_page(lid, nsid, offset, bytes);
        let buf = vec![0; bytes as usize];
        Ok(self
            .execute(&what, sqe, HostTransfer::ToHost(bytes), buf)?
            .buf)
    }

    /// Executes a command; any status but success is an error.
    pub(crate) fn execute(
        &mut self,
        what: &str,
        sqe: Sqe,
        transfer: HostTransfer,
        buf: Vec<u8>,
    ) -> Result<Done, Error> {
        let others = &mut self.scratch;
        let limit = self.limit;
        let done = execute(
            &mut self.connection,
            what,
            sqe,
            transfer,
            buf,
            limit,
            others,
        );
        self.sort_events();
        done
    }

    pub(crate) fn request_event(&mut self) -> Result<(), Error> {
        let sqe = command::async_event_request();
        let submitted =
            self.connection
                .submit(sqe, HostTransfer::None, TAG_EVENT, Vec::new(), false);
        submitted.map_err(|_| Error::Argument("the admin queue is full".into()))
    }

    fn sort_events(&mut self) {
        for done in self.scratch.drain(..) {
            if done.tag == TAG_EVENT && done.status.is_success() {
                self.unserviced.push(AsyncEvent {
                    kind: done.result as u8 & 7,
                    info: (done.result >> 8) as u8,
                    log_page: (done.result >> 16) as u8,
                    changed_nsids: Vec::new(),
                });
            }
        }
    }

    /// Receives without waiting, reads events' log pages and renews their requests.
    pub(crate) fn service(&mut self) -> Result<(), Error> {
        self.connection.progress(&mut self.scratch)?;
        self.sort_events();
        while let Some(mut event) = self.unserviced.pop() {
            if event.log_page == command::log::CHANGED_NAMESPACES {
                let page = self.log_page(event.log_page, 0, 4096)?;
                let ids = page.chunks_exact(4);
                let ids = ids.map(|id| u32::from_le_bytes([id[0], id[1], id[2], id[3]]));
                event.changed_nsids = ids.take_while(|&id| id != 0).collect();
            } else if event.log_page != 0 && event.log_page != command::log::DISCOVERY {
                self.log_page(event.log_page, 0, 512)?;
            }
            self.request_event()?;
            self.events.push(event);
        }
        self.connection.progress(&mut self.scratch)?;
        self.sort_events();
        Ok(())
    }

    pub(crate) fn take_events(&mut self) -> Vec<AsyncEvent> {
        std::mem::take(&mut self.events)
    }
}

/// Connect (Base 6.3); returns dwords 0 and 1 of the result.
pub(crate) fn connect_queue(
    connection: &mut Connection,
    sqe: Sqe,
    identity: &Identity,
    cntlid: u16,
    limit: Duration,
) -> Result<u64, Error> {
    let data = ConnectData::new(
        identity.host_id,
        cntlid,
        &identity.subnqn,
        &identity.hostnqn,
    );
    let buf = data.as_bytes().to_vec();
    let transfer = HostTransfer::ToController(buf.len() as u32);
    let what = format!("Connect to {}", identity.subnqn.as_str());
    let mut others = Vec::new();
    let done = execute(connection, &what, sqe, transfer, buf, limit, &mut others)?;
    Ok(done.result)
}

/// Submits and waits. Other commands that end meanwhile go to `others`.
fn execute(
    connection: &mut Connection,
    what: &str,
    sqe: Sqe,
    transfer: HostTransfer,
    buf: Vec<u8>,
    limit: Duration,
    others: &mut Vec<Done>,
) -> Result<Done, Error> {
    let addr = connection.addr();
    let submitted = connection.submit(sqe, transfer, TAG_COMMAND, buf, true);
    if submitted.is_err() {
        return Err(Error::Argument(format!("{what}: the queue is full")));
    }
    let deadline = Instant::now() + limit;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        connection.poll(others, Wait::Block, left)?;
        if let Some(at) = others.iter().position(|done| done.tag == TAG_COMMAND) {
            let done = others.swap_remove(at);
            if done.status.is_success() {
                return Ok(done);
            }
            return Err(Error::Status {
                addr,
                what: what.into(),
                status: done.status,
            });
        }
        if left.is_zero() {
            return Err(Error::TimedOut {
                addr,
                what: what.into(),
                waited: limit,
            });
        }
    }
}
