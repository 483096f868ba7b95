//! Begins a session: sends a greeting and reads what the engine holds.
//!
//! Messages that come earlier are kept for later. The session keeps descriptors that a successor
//! would need.

use std::cell::{Cell, RefCell};
use std::io;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use forebay_xlate::boundary::message::{BOUNDARY_VERSION, FromEngine, Held, Job, ToEngine};
use forebay_xlate::boundary::region::Region;
use forebay_xlate::shm::SharedMemory;

use super::{DeviceState, Session, monotonic_ns};
use crate::changed::Signal;
use crate::link::wire::Wire;
use crate::readiness::in_time;

/// The shown part of an engine's version.
const VERSION_MAX_CHARS: usize = 64;

/// Why a session did not begin.
#[derive(Debug, thiserror::Error)]
pub(crate) enum GreetError {
    #[error("can't use the engine's socket: {0}")]
    Io(#[from] io::Error),
    #[error("the engine did not answer a greeting within {0:?}")]
    TimedOut(Duration),
    #[error(
        "the running engine (pid {pid}) uses version {theirs} of the control protocol, but this daemon uses \
        {BOUNDARY_VERSION}"
    )]
    Version { pid: u32, theirs: u32 },
    #[error("the running engine (pid {pid}) serves another pool")]
    OtherPool { pid: u32 },
}

#[derive(Debug)]
pub(crate) struct Greeting {
    pub(crate) session: Rc<Session>,
    /// Volumes, exports, listeners and other objects that the engine holds.
    pub(crate) held: Vec<(Held, Vec<OwnedFd>)>,
    /// The grant table that an earlier daemon deposited.
    pub(crate) table: Option<OwnedFd>,
    /// Messages that came meanwhile.
    pub(crate) early: Vec<(FromEngine, Vec<OwnedFd>)>,
}

impl Session {
    /// Greets an engine on a connected socket. Deposits `table` there; without one, returns the
    /// deposited table.
    pub(crate) async fn greet(
        fd: OwnedFd,
        pool: [u8; 16],
        table: Option<OwnedFd>,
        limit: Duration,
    ) -> Result<Greeting, GreetError> {
        let wire = Wire::new(fd)?;
        in_time(limit, Self::greet_on(wire, pool, table))
            .await
            .ok_or(GreetError::TimedOut(limit))?
    }

    async fn greet_on(
        wire: Wire,
        pool: [u8; 16],
        table: Option<OwnedFd>,
    ) -> Result<Greeting, GreetError> {
        let hello = ToEngine::Hello {
            version: BOUNDARY_VERSION,
            daemon_pid: std::process::id(),
            pool,
        };
        wire.send(&hello, table.into_iter().map(Arc::new).collect())?;
        let unexpected = |what: &str| io::Error::new(io::ErrorKind::InvalidData, what.to_owned());
        let (welcome, descriptors) = wire.next().await?;
        let FromEngine::Welcome {
            version,
            engine_pid,
            generation,
            pool: theirs,
            program,
        } = welcome
        else {
            return Err(unexpected("its first message is not a welcome").into());
        };
        if version != BOUNDARY_VERSION {
            return Err(GreetError::Version {
                pid: engine_pid,
                theirs: version,
            });
        }
        if theirs != pool && theirs != [0; 16] {
            return Err(GreetError::OtherPool { pid: engine_pid });
        }
        let mut descriptors = descriptors.into_iter();
        let region = descriptors
            .next()
            .ok_or_else(|| unexpected("no state region arrived"))?;
        let session = Session {
            pid: engine_pid,
            generation,
            version: program.chars().take(VERSION_MAX_CHARS).collect(),
            region: Rc::new(Region::adopt(SharedMemory::from_fd(region)?)?),
            deposit: RefCell::default(),
            conversion: RefCell::default(),
            wire,
            grants: RefCell::default(),
            next_number: Cell::new(monotonic_ns()),
            open: RefCell::default(),
            settling: RefCell::default(),
            asked_preallocated: RefCell::default(),
            devices: RefCell::default(),
            inherited_revokes: RefCell::default(),
            inherited_jobs: RefCell::default(),
            quarantined_before: Cell::new(None),
            ended: Cell::new(false),
            changed: Signal::new(),
        };
        let (mut held, mut early) = (Vec::new(), Vec::new());
        loop {
            match session.wire.next().await? {
                (FromEngine::HeldEnd, _) => break,
                (FromEngine::Held(one), fds) => {
                    held.extend(session.note_held(one, fds));
                }
                other => early.push(other),
            }
        }
        Ok(Greeting {
            session: Rc::new(session),
            held,
            table: descriptors.next(),
            early,
        })
    }

    /// Takes the parts that the session manages; returns the rest for the owner.
    fn note_held(&self, held: Held, descriptors: Vec<OwnedFd>) -> Option<(Held, Vec<OwnedFd>)> {
        match &held {
            Held::Device(config, ready) => {
                let state = if *ready {
                    DeviceState::Ready
                } else {
                    DeviceState::Opening
                };
                self.devices.borrow_mut().insert(config.device, state);
            }
            Held::Revoke(number) => self.inherited_revokes.borrow_mut().push(*number),
            Held::Job(number, work) => {
                // Other jobs don't change extents.
                if let Job::ZeroFill { device, .. }
                | Job::Copy { to: device, .. }
                | Job::Overwrite { to: device, .. } = work
                {
                    self.inherited_jobs.borrow_mut().push((*number, *device));
                }
            }
            Held::Socket(socket) => {
                self.keep_socket(*socket, descriptors);
                return None;
            }
            Held::Vm(socket, export) => {
                self.keep_vm(*socket, *export, descriptors);
                return None;
            }
            Held::Deposits(numbers) => {
                self.keep_deposits_of_last(numbers, descriptors);
                return None;
            }
            Held::Memory => {
                self.keep_memory(descriptors);
                return None;
            }
            Held::Volume(_) | Held::Export(_) | Held::Listener(_) | Held::VmListener(_) => {}
        }
        Some((held, descriptors))
    }
}
