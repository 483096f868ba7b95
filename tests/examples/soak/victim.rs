//! A volume with one block that kills or blocks an engine when it is read.
//!
//! The command gets Internal Error at its third attempt, or its export is quarantined; other hosts
//! notice nothing. The block's content is unique, so that its place on the devices can be found.

use std::net::SocketAddr;
use std::path::PathBuf;

use anyhow::{Context, Result, bail, ensure};
use forebay_device::faulty::{self, Faults};
use forebay_initiator::{Error, IoOp, IoQueue, Options, Session};
use forebay_tests::daemon::Daemon;
use forebay_tests::hold::find_block;
use forebay_tests::host::HOST_NQN;
use forebay_tests::lab::{MINUTE, events};
use forebay_tests::wait;

const LBA: u64 = 3;
const VOLUME: &str = "t/victim";
const NQN: &str = "nqn.2026-01.io.forebay:test:t.victim";
/// Internal Error (Base 2.1, figure "Generic Command Status Values").
const INTERNAL_ERROR: (u8, u8) = (0, 6);

pub(crate) struct Victim {
    address: SocketAddr,
    content: Vec<u8>,
    /// The block's device, and its address there.
    device: PathBuf,
    pub(crate) place: u64,
    connection: Option<(Session, IoQueue)>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Touched {
    /// Correct content.
    Read,
    /// Internal Error with DNR set.
    Killed,
    /// The connection is lost or missing.
    Lost,
    /// Another device error, or a status that asks for a retry.
    Failed,
}

impl Victim {
    pub(crate) fn new(daemon: &Daemon, address: SocketAddr, devices: &[PathBuf]) -> Result<Self> {
        daemon.cli(&["volume", "create", VOLUME, "--size", "16M"])?;
        daemon.cli(&["export", "create", VOLUME, "--any-host"])?;
        let mut victim = Self {
            address,
            content: b"here it is, once".repeat(256),
            device: PathBuf::new(),
            place: 0,
            connection: None,
        };
        let mut connection = victim.connect()?;
        let write = IoOp::Write {
            lba: LBA,
            blocks: 1,
            fua: false,
        };
        let queue = &mut connection.1;
        queue.execute(&write, victim.content.clone(), MINUTE)?;
        queue.execute(&IoOp::Flush, vec![], MINUTE)?;
        let found = devices.iter().find_map(|device| {
            let place = find_block(device, &victim.content).ok()?;
            Some((device.clone(), place))
        });
        (victim.device, victim.place) = found.context("the block stands nowhere")?;
        victim.connection = Some(connection);
        Ok(victim)
    }

    fn connect(&self) -> Result<(Session, IoQueue), Error> {
        let options = Options {
            command_timeout: MINUTE,
            ..Options::default()
        };
        let mut session = Session::connect(self.address, NQN, HOST_NQN, &options)?;
        let queue = session.open_queue(1)?;
        Ok((session, queue))
    }

    pub(crate) fn trap(&self) -> (PathBuf, u64) {
        (self.device.clone(), self.place)
    }

    /// Reads the block; connects first if needed.
    pub(crate) fn touch(&mut self) -> Result<Touched> {
        let connected = match self.connection.take() {
            Some(connection) => Ok(connection),
            None => self.connect(),
        };
        let Ok(mut connection) = connected else {
            return Ok(Touched::Lost);
        };
        let read = IoOp::Read {
            lba: LBA,
            blocks: 1,
        };
        let touched = match connection.1.execute(&read, vec![0; 4096], MINUTE) {
            Ok(read) => {
                ensure!(read == self.content, "the victim's block has changed");
                Touched::Read
            }
            Err(Error::Status { status, .. })
                if (status.sct(), status.sc()) == INTERNAL_ERROR && status.dnr() =>
            {
                Touched::Killed
            }
            Err(Error::Status { .. }) => Touched::Failed,
            Err(error) if error.is_connection_lost() => return Ok(Touched::Lost),
            Err(error) => bail!("the victim: {error}"),
        };
        self.connection = Some(connection);
        Ok(touched)
    }

    /// Reads the block while `faults` are active.
    pub(crate) fn is_killed(&mut self, daemon: &Daemon, faults: &Faults) -> Result<()> {
        // The connection may have ended with both processes.
        self.connection = Some(self.connect()?);
        faulty::set(&self.device, faults)?;
        let touched = self.touch()?;
        faulty::set(&self.device, &Faults::default())?;
        match touched {
            Touched::Killed => {}
            Touched::Lost => {
                let kinds = events(daemon)?;
                ensure!(
                    kinds.contains_key("export_quarantined"),
                    "the victim's connection was lost for no reason: {kinds:?}"
                );
            }
            other => bail!("the block that kills: {other:?}"),
        }
        self.heal(daemon)
    }

    /// Resumes a quarantined export if needed.
    pub(crate) fn heal(&mut self, daemon: &Daemon) -> Result<()> {
        wait::until("the victim is served again", MINUTE, || {
            if self.touch()? == Touched::Read {
                return Ok(Some(()));
            }
            daemon.cli(&["export", "resume", VOLUME])?;
            Ok(None)
        })
    }
}
