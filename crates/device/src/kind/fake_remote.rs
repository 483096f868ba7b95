//! A kind for this crate's tests: threads and a fence of its own, as a remote device has them.
//!
//! A "server" in this process has the bytes. Each open device has an association with a thread,
//! which ends with its last operation: the fence.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::CStr;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;

use super::info::{DeviceInfo, DeviceKind, DeviceNow, Identity, OpenOptions};
use super::ram_map::{read_by_call, write_by_call};
use super::spec::{DeviceSpec, SpecError, SpecText};
use super::{Backend, BackendKind, Opened, SyncBackend};
use crate::error::DeviceError;
use crate::fence::{Claims, Fence, FenceError, Holder, Predecessor};
use crate::op::{Finish, Op, OpKind, Submitted};
use crate::ring::Ring;

const THREADS: DeviceKind = DeviceKind("threads");

pub(super) struct ThreadsKind;

impl BackendKind for ThreadsKind {
    fn kind(&self) -> DeviceKind {
        THREADS
    }

    fn example(&self) -> &'static str {
        ""
    }

    fn parse(&self, text: &SpecText<'_>) -> Result<DeviceSpec, SpecError> {
        text.only_path(THREADS)
    }

    fn open(
        &self,
        spec: &DeviceSpec,
        _options: &OpenOptions,
    ) -> Result<Opened<Arc<dyn Backend>>, DeviceError> {
        let server = ByteServer::of(spec.path())?;
        let info = server.info(spec);
        let backend = Arc::new(Threads::new(server));
        Ok(Opened { info, backend })
    }

    fn open_sync(
        &self,
        spec: &DeviceSpec,
        _options: &OpenOptions,
    ) -> Result<Opened<Box<dyn SyncBackend>>, DeviceError> {
        let server = ByteServer::of(spec.path())?;
        let info = server.info(spec);
        let backend = Box::new(SyncThreads(server));
        Ok(Opened { info, backend })
    }
}

#[derive(Debug)]
struct ByteServer {
    path: PathBuf,
    file: File,
    size_bytes: u64,
    engines: Mutex<BTreeSet<u64>>,
    is_claimed: Mutex<bool>,
}

impl ByteServer {
    fn of(path: &Path) -> Result<Arc<Self>, DeviceError> {
        static SERVERS: Mutex<BTreeMap<PathBuf, Arc<ByteServer>>> = Mutex::new(BTreeMap::new());
        let failed = |source| DeviceError::Io {
            path: path.to_owned(),
            doing: "opening it",
            source,
        };
        let mut servers = lock(&SERVERS);
        if let Some(server) = servers.get(path) {
            return Ok(server.clone());
        }
        let file = File::options().read(true).write(true).open(path);
        let file = file.map_err(failed)?;
        let server = Arc::new(Self {
            path: path.to_owned(),
            size_bytes: file.metadata().map_err(failed)?.len(),
            file,
            engines: Mutex::default(),
            is_claimed: Mutex::default(),
        });
        servers.insert(path.to_owned(), server.clone());
        Ok(server)
    }

    fn info(&self, spec: &DeviceSpec) -> DeviceInfo {
        let mut id = [0; 16];
        for (at, byte) in self.path.as_os_str().as_encoded_bytes().iter().enumerate() {
            id[at % 16] ^= *byte;
        }
        DeviceInfo {
            spec: spec.clone(),
            kind: THREADS,
            capacity_bytes: self.size_bytes,
            block_bytes: 512,
            physical_block_bytes: 4096,
            memory_align_bytes: 1,
            offset_align_bytes: 512,
            identity: Identity::Remote { id },
            can_punch: false,
            direct: false,
            notes: Vec::new(),
        }
    }

    fn carry_out(&self, op: &Op) -> Result<(), Errno> {
        let (fd, at) = (self.file.as_fd(), op.offset_bytes);
        match (op.kind, op.memory()) {
            (OpKind::Read, Some(memory)) => {
                memory.try_each(|before, buf| read_by_call(fd, at + before, buf))
            }
            (OpKind::Write, Some(memory)) => {
                memory.try_each(|before, buf| write_by_call(fd, at + before, buf))
            }
            (OpKind::WriteZeroes | OpKind::Punch, _) => {
                let zeros = vec![0; op.len_bytes as usize];
                let written = self.file.write_all_at(&zeros, at);
                written.map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))
            }
            _ => Ok(rustix::fs::fdatasync(fd)?),
        }
    }

    fn first_before(&self, generation: u64) -> Option<u64> {
        lock(&self.engines).range(..generation).next().copied()
    }

    fn name(&self) -> String {
        self.path.display().to_string()
    }
}

struct ThreadOp {
    op: Op,
    place: Arc<OpOutcome>,
}

#[derive(Debug)]
struct OpOutcome {
    result: Mutex<Result<(), Errno>>,
    ended: OwnedFd,
}

#[derive(Debug)]
struct Threads {
    server: Arc<ByteServer>,
    generation: Arc<Mutex<Option<u64>>>,
    jobs: Sender<ThreadOp>,
    /// Index: an operation's note, less one.
    places: Mutex<Vec<Option<Arc<OpOutcome>>>>,
}

impl Threads {
    fn new(server: Arc<ByteServer>) -> Self {
        let (jobs, next) = mpsc::channel::<ThreadOp>();
        let generation = Arc::new(Mutex::new(None));
        let (serves, whose) = (server.clone(), generation.clone());
        std::thread::spawn(move || {
            for ThreadOp { op, place } in next {
                *lock(&place.result) = serves.carry_out(&op);
                let _ = rustix::io::write(&place.ended, &1_u64.to_ne_bytes());
            }
            // The device was dropped, and all its operations have ended.
            if let Some(generation) = *lock(&whose) {
                lock(&serves.engines).remove(&generation);
            }
        });
        Self {
            server,
            generation,
            jobs,
            places: Mutex::default(),
        }
    }
}

impl Backend for Threads {
    fn submit(&self, ring: &mut Ring, op: &mut Op, user_data: u64) -> Submitted {
        let place = match eventfd(0, EventfdFlags::CLOEXEC) {
            Ok(ended) => Arc::new(OpOutcome {
                result: Mutex::new(Ok(())),
                ended,
            }),
            Err(errno) => return Submitted::Done(Err(errno)),
        };
        let pushed = ring.poll_add(&place.ended, libc::POLLIN as u32, user_data);
        if pushed.is_ok() {
            let mut places = lock(&self.places);
            let free = places.iter().position(Option::is_none);
            let at = free.unwrap_or_else(|| {
                places.push(None);
                places.len() - 1
            });
            places[at] = Some(place.clone());
            op.note = at as u32 + 1;
            let job = ThreadOp { op: *op, place };
            self.jobs.send(job).expect("the thread lives");
        }
        pushed.into()
    }

    fn finish(&self, op: Op, result: i32) -> Finish {
        if result < 0 {
            return Finish::Failed(Errno::from_raw_os_error(-result));
        }
        let at = op.note as usize - 1;
        let place = lock(&self.places)[at].take().expect("was submitted");
        let result = *lock(&place.result);
        result.map_or_else(Finish::Failed, |()| Finish::Done)
    }

    fn fence(&self) -> &dyn Fence {
        self
    }
}

impl Fence for Threads {
    fn take(&self, generation: u64) -> Result<(), FenceError> {
        let device = self.server.name();
        let mut engines = lock(&self.server.engines);
        if let Some(newer) = engines.range(generation + 1..).next() {
            return Err(FenceError::NewerEngine {
                device,
                own: generation,
                newer: *newer,
            });
        }
        if !engines.insert(generation) {
            let holder = Holder::Engine { generation };
            return Err(FenceError::Held { device, holder });
        }
        *lock(&self.generation) = Some(generation);
        Ok(())
    }

    fn predecessors_gone(&self, generation: u64) -> Result<bool, FenceError> {
        Ok(self.server.first_before(generation).is_none())
    }

    fn wait_for_predecessors(
        &self,
        generation: u64,
        limit: Duration,
    ) -> Result<Duration, FenceError> {
        let begin = Instant::now();
        while let Some(predecessor) = self.server.first_before(generation) {
            let waited = begin.elapsed();
            if waited >= limit {
                return Err(FenceError::TimedOut {
                    device: self.server.name(),
                    predecessor,
                    process: Predecessor {
                        generation: predecessor,
                        process: None,
                    },
                    waited,
                });
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(begin.elapsed())
    }
}

#[derive(Debug)]
struct SyncThreads(Arc<ByteServer>);

impl SyncBackend for SyncThreads {
    fn read_at(&self, offset_bytes: u64, into: &mut [u8]) -> io::Result<()> {
        self.0.file.read_exact_at(into, offset_bytes)
    }

    fn write_at(&self, offset_bytes: u64, from: &[u8]) -> io::Result<()> {
        self.0.file.write_all_at(from, offset_bytes)
    }

    fn sync(&self) -> io::Result<()> {
        self.0.file.sync_data()
    }

    fn poll_now(&self) -> io::Result<DeviceNow> {
        Ok(DeviceNow {
            size_bytes: self.0.file.metadata()?.len(),
            has_name: true,
            is_at_path: true,
        })
    }

    fn claims(&self) -> &dyn Claims {
        self
    }
}

impl Claims for SyncThreads {
    fn claim(&self, inside: &CStr) -> Result<(), FenceError> {
        self.would_pass_over(inside)?;
        *lock(&self.0.is_claimed) = true;
        Ok(())
    }

    fn would_pass_over(&self, _inside: &CStr) -> Result<bool, FenceError> {
        if !*lock(&self.0.is_claimed) {
            return Ok(false);
        }
        let (device, holder) = (self.0.name(), Holder::Daemon);
        Err(FenceError::Held { device, holder })
    }

    fn holders(&self) -> Result<Vec<Holder>, FenceError> {
        let engines = lock(&self.0.engines);
        let engines = engines.iter().map(|generation| Holder::Engine {
            generation: *generation,
        });
        Ok(engines.collect())
    }

    fn predecessor(&self, generation: u64) -> Result<Option<Predecessor>, FenceError> {
        let found = self.0.first_before(generation);
        Ok(found.map(|generation| Predecessor {
            generation,
            process: None,
        }))
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
