//! Starts an engine, as a process (`forebay engine`) or inside a test. **Not here:** the command
//! line.

use crate::bell::ControlBell;
use crate::control::Control;
use crate::core::staging::Staging;
use crate::core::{Core, Links, links};
use crate::device_heartbeat::{Heart, Pulse};
use crate::exports::ExportTable;
use crate::frontend;
use crate::frontend::vm::closer::Closer;
use crate::memory::{Memory, ReactorMemory};
use crate::reactor::mailbox::{ReactorEnd, mailbox};
use crate::reactor::{Reactor, Sockets};
use forebay_device::ring::{Ring, RingOptions};
use forebay_xlate::boundary::message::Spread;
use forebay_xlate::boundary::region::{MAX_REACTORS, Region};
use rustix::thread::CpuSet;
use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;

/// Start parameters; the daemon sends the rest.
#[derive(Clone, Debug)]
pub struct EngineConfig {
    /// Path of the socket for the daemon.
    pub socket: PathBuf,
    /// Larger than any before on these devices.
    pub generation: u64,
    /// State region; `None`: an anonymous file (tests).
    pub region: Option<PathBuf>,
    /// Number of reactors.
    pub reactors: usize,
    /// CPUs to pin them to, round-robin; empty: none.
    pub cpus: Vec<usize>,
    /// Seconds after which it ends if no daemon has configured it.
    pub orphan_limit_s: u64,
}

/// Why an engine could not start.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// The kernel is too old or forbids io_uring.
    #[error(transparent)]
    Ring(#[from] forebay_device::ring::RingError),
    /// A system call failed.
    #[error("{what}: {source}")]
    System {
        /// The operation.
        what: String,
        /// Its error.
        source: io::Error,
    },
    /// A parameter is invalid.
    #[error("{0}")]
    Config(String),
}

fn system(what: impl Into<String>) -> impl FnOnce(io::Error) -> EngineError {
    let what = what.into();
    move |source| EngineError::System { what, source }
}

/// A running engine.
#[derive(Debug)]
pub struct Engine {
    control: JoinHandle<()>,
    reactors: Vec<JoinHandle<()>>,
}

impl Engine {
    /// Starts an engine.
    ///
    /// # Errors
    /// See [`EngineError`].
    pub fn start(config: EngineConfig) -> Result<Engine, EngineError> {
        Self::start_with(config, None)
    }

    /// Starts an engine that has a channel to its daemon.
    ///
    /// # Errors
    /// See [`EngineError`].
    pub fn start_with(
        config: EngineConfig,
        channel: Option<OwnedFd>,
    ) -> Result<Engine, EngineError> {
        forebay_device::ring::check_kernel()?;
        if config.reactors == 0 || config.reactors > MAX_REACTORS {
            return Err(EngineError::Config(format!(
                "{} reactors requested: give a number from 1 to {MAX_REACTORS}",
                config.reactors
            )));
        }
        let region = make_region(&config)?;
        let memory = Memory::create().map_err(system("creating the engine's memory"))?;
        if channel.is_some() {
            // Any crash in this process is the engine's.
            crate::crash::record_in(&region).map_err(system("watching for crashes"))?;
        }
        let bell = ControlBell::new().map_err(system("creating an eventfd"))?;
        let closer = Closer::start().map_err(system("starting the closer"))?;
        let (mut mailboxes, mut theirs) = (Vec::new(), Vec::new());
        for _ in 0..config.reactors {
            let (to_reactor, to_control) =
                mailbox(bell.clone()).map_err(system("creating a mailbox"))?;
            mailboxes.push(to_reactor);
            theirs.push(to_control);
        }
        let pulse = Arc::new(Pulse::default());
        let bells: Vec<_> = theirs.iter().map(ReactorEnd::bell).collect();
        let theirs = theirs.into_iter().zip(links(&bells)).enumerate();
        let reactors = theirs
            .map(|(number, (mailbox, links))| {
                start_reactor(NewReactor {
                    number,
                    cpu: (!config.cpus.is_empty()).then(|| config.cpus[number % config.cpus.len()]),
                    // Before any reactor is pinned: threads inherit the affinity.
                    everywhere: rustix::thread::sched_getaffinity(None).ok(),
                    region: region.clone(),
                    memory,
                    pulse: pulse.clone(),
                    closer: closer.clone(),
                    mailbox,
                    links,
                })
            })
            .collect::<Result<Vec<_>, _>>()?;
        let exports = ExportTable::default();
        let mut control = Control::new(&config, region, memory, mailboxes, bell, exports, closer)
            .map_err(system(format!("listening on {}", config.socket.display())))?;
        let heart = Heart::start(pulse).map_err(system("starting the heartbeat"))?;
        control.set_heart(heart);
        if let Some(channel) = channel {
            control.converse(channel);
        }
        let control = std::thread::Builder::new()
            .name("control".into())
            .spawn(move || control.run())
            .map_err(system("starting the control thread"))?;
        Ok(Engine { control, reactors })
    }

    /// Waits until all threads have ended.
    pub fn join(self) {
        let _ = self.control.join();
        for reactor in self.reactors {
            let _ = reactor.join();
        }
    }
}

fn make_region(config: &EngineConfig) -> Result<Arc<Region>, EngineError> {
    let region = match &config.region {
        Some(path) => Region::create(path, config.generation).map_err(system(format!(
            "creating the state region {}",
            path.display()
        )))?,
        None => {
            Region::anonymous(config.generation).map_err(system("creating the state region"))?
        }
    };
    region
        .header()
        .reactors
        .store(config.reactors as u64, std::sync::atomic::Ordering::Relaxed);
    Ok(Arc::new(region))
}

struct NewReactor {
    number: usize,
    cpu: Option<usize>,
    everywhere: Option<CpuSet>,
    region: Arc<Region>,
    memory: &'static Memory,
    pulse: Arc<Pulse>,
    closer: Closer,
    mailbox: ReactorEnd,
    links: Links,
}

fn start_reactor(new: NewReactor) -> Result<JoinHandle<()>, EngineError> {
    let number = new.number;
    let (started, starting) = mpsc::channel();
    let thread = std::thread::Builder::new()
        .name(format!("reactor-{number}"))
        .spawn(move || {
            crate::crash::this_is_reactor(number);
            match new.make() {
                Ok(reactor) => {
                    let _ = started.send(Ok(()));
                    reactor.run();
                }
                Err(e) => {
                    let _ = started.send(Err(e));
                }
            }
        })
        .map_err(system("starting a reactor"))?;
    starting
        .recv()
        .map_err(|_| EngineError::Config(format!("reactor {number} ended while it started")))??;
    Ok(thread)
}

impl NewReactor {
    fn make(self) -> Result<Reactor, EngineError> {
        let Self { number, region, .. } = self;
        // The reactor then runs on any CPU. The daemon warns and retries.
        let cpu = self.cpu.filter(|cpu| {
            let pinned = pin(*cpu);
            if let Err(error) = &pinned {
                eprintln!("forebay: {error}: the reactor runs on any processor");
            }
            pinned.is_ok()
        });
        // The ring belongs to the thread that uses it.
        let options = RingOptions {
            // More workers than one hung device can occupy.
            iowq_bounded: 16,
            iowq_cpus: cpu.into_iter().collect(),
            ..RingOptions::default()
        };
        let ring = Ring::new(&options)?;
        let ReactorMemory { receive, staging } = self
            .memory
            .reactor(number)
            .ok_or_else(|| EngineError::Config(format!("reactor {number} is configured twice")))?;
        let mut core = Core::new(number, region.clone(), Staging::over(staging), ring);
        core.devices.set_pulse(self.pulse);
        core.offload.link(self.links);
        core.set_spread(Spread::default());
        let sockets =
            Sockets::new(self.mailbox.wake_fd()).map_err(system("watching the mailbox"))?;
        let frontends = frontend::all(frontend::FrontendParts {
            reactor: number,
            region,
            epoll: sockets.epoll().clone(),
            memory: self.memory,
            receive: Some(receive),
            closer: self.closer,
            cpus: self.everywhere,
        });
        Ok(Reactor {
            core,
            frontends,
            mailbox: self.mailbox,
            sockets,
        })
    }
}

fn pin(cpu: usize) -> Result<(), EngineError> {
    let mut set = rustix::thread::CpuSet::new();
    if cpu >= rustix::thread::CpuSet::MAX_CPU {
        return Err(EngineError::Config(format!(
            "processor {cpu} is out of range"
        )));
    }
    set.set(cpu);
    rustix::thread::sched_setaffinity(None, &set)
        .map_err(|e| system(format!("pinning a reactor to processor {cpu}"))(e.into()))
}
