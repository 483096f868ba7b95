//! Attaches clients, new ones and those of a dead engine. One that cannot be served is reported as
//! gone. If it was a dead engine's, unknown commands may be at devices, so all of its volume's
//! commands wait for the fence. **Not here:** detaching ([`super::detach`]).

use super::client::{Client, ClientPlace};
use super::closer::Closer;
use super::file::VmFile;
use super::protocol::{Closing, Protocol, Turn};
use super::registered::Registrar;
use super::signal::Signals;
use super::talk::Talk;
use super::{Life, Make, Vm, Vms, blame, key};
use crate::core::{Core, FenceSet, RecoveredSpan};
use crate::lane::LaneIndex;
use crate::upcall::Upcall;
use forebay_xlate::boundary::message::{Blamed, ExportConfig, ExportId};
use forebay_xlate::kill_point;
use rustix::event::epoll;
use rustix::net::Shutdown;
use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// Engines that may crash in a row over a client's message or rings before it is closed.
const MAX_TRIES: u64 = 2;

#[derive(Debug)]
pub(crate) struct NewVm {
    pub socket: u64,
    pub fd: Arc<OwnedFd>,
    pub export: Arc<ExportConfig>,
    pub file: VmFile,
    /// `None`: a new client; otherwise a dead engine's deposits by number.
    pub inherited: Option<BTreeMap<u32, Arc<OwnedFd>>>,
    /// The dead engine crashed over this client, and over this command if known.
    pub blamed: Option<Option<u16>>,
}

pub(crate) fn blamed_of(blamed: Option<Blamed>, export: ExportId) -> Option<Option<u16>> {
    match blamed {
        Some(Blamed::Vm { export: of, slot }) if of == export => Some(slot),
        _ => None,
    }
}

impl Vms {
    pub(crate) fn adopt(&mut self, core: &mut Core, new: NewVm) {
        let (socket, fd, export) = (new.socket, new.fd.clone(), new.export.clone());
        let lane = core.lanes.of_export(export.export);
        let inherited = new.inherited.is_some();
        if let Err(why) = self.attach(core, new, lane) {
            if inherited {
                self.recover_unknown(core, lane);
            }
            let _ = rustix::net::shutdown(&*fd, Shutdown::Both);
            self.closer.close_suspect(fd);
            core.upcalls
                .push_back(Upcall::VmDetached(socket, export.export, why));
        }
    }

    /// Makes all commands of its volume wait for the fence.
    fn recover_unknown(&self, core: &mut Core, lane: Option<LaneIndex>) {
        let known = lane.and_then(|lane| Some((lane, core.lane(lane)?.volume.id())));
        if let Some((lane, volume)) = known {
            let span = RecoveredSpan {
                volume,
                bytes: 0..u64::MAX,
                write: true,
                devices: FenceSet::ALL,
                command: None,
            };
            core.recovered.recover_vm(lane, &[span]);
        }
    }

    fn attach(
        &mut self,
        core: &mut Core,
        new: NewVm,
        lane: Option<LaneIndex>,
    ) -> Result<(), Closing> {
        if self.stopping {
            return Err(Closing("the engine is stopping"));
        }
        if self.signals.is_none() {
            let made = Signals::new();
            self.signals = Some(made.map_err(|_| {
                Closing("the kernel has no room for its interrupts: raise fs.aio-max-nr")
            })?);
        }
        let at = self.all.iter().position(Option::is_none);
        let at = at.unwrap_or(self.all.len());
        self.generation = self.generation.wrapping_add(1);
        if self.registrar.is_none() {
            self.registrar = Registrar::start(self.cpus).ok();
        }
        // Other clients may replace pages of their memory.
        let keeps = new.export.frontend.keeps_memory();
        let registrar = self.registrar.as_ref().filter(|_| keeps);
        let place = ClientPlace {
            frontend: self.index,
            index: at as u32,
            generation: self.generation,
            epoll: self.epoll.clone(),
            closer: self.closer.clone(),
            asker: registrar.map(|r| r.for_client((at as u32, self.generation))),
        };
        let (fd, closer) = (new.fd, self.closer.clone());
        let mut client = Client::new(new.socket, new.export, lane, new.file, place);
        let begun = begin(
            core,
            &mut client,
            &fd,
            (new.inherited, new.blamed),
            closer,
            self.make,
        );
        let data = epoll::EventData::new_u64(key(self.index, at as u32, self.generation, 0));
        let flags = epoll::EventFlags::IN | epoll::EventFlags::RDHUP | epoll::EventFlags::ET;
        let begun = begun.and_then(|begun| match epoll::add(&*self.epoll, &fd, data, flags) {
            Ok(()) => Ok(begun),
            Err(_) => Err(Closing("its socket can't be watched")),
        });
        let (talk, frontend) = match begun {
            Ok(begun) => begun,
            Err(why) => {
                client.detach();
                client.end();
                return Err(why);
            }
        };
        client.withdraw_unused();
        let vm = Vm {
            client,
            talk,
            frontend,
            fd,
            life: Life::Open,
            watches_room: false,
        };
        vm.show(core);
        match self.all.get_mut(at) {
            Some(free) => *free = Some(Box::new(vm)),
            None => self.all.push(Some(Box::new(vm))),
        }
        Ok(())
    }
}

type Deposits = BTreeMap<u32, Arc<OwnedFd>>;

fn begin(
    core: &mut Core,
    client: &mut Client,
    fd: &Arc<OwnedFd>,
    (inherited, blamed): (Option<Deposits>, Option<Option<u16>>),
    closer: Closer,
    make: Make,
) -> Result<(Talk, Box<dyn Protocol>), Closing> {
    let Some(deposits) = inherited else {
        let talk = Talk::new(fd.clone(), closer)?;
        return Ok((talk, make(&mut Turn { core, client })?));
    };
    if blamed == Some(None) {
        let tries = client.file().tries();
        if tries + 1 >= MAX_TRIES {
            return Err(Closing(
                "engines crashed repeatedly on its messages or its rings",
            ));
        }
        client.file().set_tries(tries + 1);
    }
    let (talk, again) = Talk::resume(fd.clone(), client, closer)?;
    client.inherit(deposits, again)?;
    blame(core, client);
    let mut frontend = make(&mut Turn { core, client })?;
    frontend.resume(&mut Turn { core, client }, blamed.flatten())?;
    core.blame(None);
    kill_point!("vm.resumed");
    Ok((talk, frontend))
}
