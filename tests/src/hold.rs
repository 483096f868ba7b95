//! A file whose reads and writes a test delays, even beyond the death of their process. The
//! engine's locks stay meanwhile, as in the kernel's late I/O.
//!
//! It is a FUSE server in the test process, with the protocol of `linux/fuse.h`, version 7.31, over
//! a sparse backing file. It needs root. The test itself must not touch the mounted file.

use std::fs::File;
use std::io::{Read, Write};
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use rustix::fs::FallocateFlags;
use rustix::io::Errno;
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};

use crate::wait;

const LARGEST_BYTES: usize = 1 << 20;
const LIMIT: Duration = Duration::from_secs(60);
const IN_HEADER_BYTES: usize = 40;
const FILE_NAME: &[u8] = b"disk\0";
const ROOT_NODE: u64 = 1;
const FILE_NODE: u64 = 2;

mod opcode {
    pub(super) const LOOKUP: u32 = 1;
    pub(super) const FORGET: u32 = 2;
    pub(super) const GETATTR: u32 = 3;
    pub(super) const SETATTR: u32 = 4;
    pub(super) const OPEN: u32 = 14;
    pub(super) const READ: u32 = 15;
    pub(super) const WRITE: u32 = 16;
    pub(super) const STATFS: u32 = 17;
    pub(super) const RELEASE: u32 = 18;
    pub(super) const FSYNC: u32 = 20;
    pub(super) const FLUSH: u32 = 25;
    pub(super) const INIT: u32 = 26;
    pub(super) const INTERRUPT: u32 = 36;
    pub(super) const BATCH_FORGET: u32 = 42;
    pub(super) const FALLOCATE: u32 = 43;
}

/// A delayed request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HeldIo {
    /// Whether it is a write; else it is a read.
    pub is_write: bool,
    /// Its offset.
    pub offset_bytes: u64,
    /// Its length.
    pub len_bytes: u32,
}

#[derive(Debug)]
struct Waiting {
    io: HeldIo,
    unique: u64,
    data: Vec<u8>,
}

#[derive(Debug, Default)]
struct State {
    reads: Option<Range<u64>>,
    writes: Option<Range<u64>>,
    waiting: Vec<Waiting>,
}

#[derive(Debug)]
struct Server {
    device: File,
    backing: File,
    size_bytes: u64,
    state: Mutex<State>,
}

/// The file. Dropping it releases all requests and unmounts.
#[derive(Debug)]
pub struct Hold {
    server: Arc<Server>,
    mounted: PathBuf,
    backing: PathBuf,
}

impl Hold {
    /// Makes the file below `folder`.
    pub fn new(folder: &Path, size_bytes: u64) -> Result<Self> {
        let (mounted, backing) = (folder.join("hold"), folder.join("hold.backing"));
        std::fs::create_dir_all(&mounted)?;
        File::create_new(&backing)?.set_len(size_bytes)?;
        let server = serve_at(&mounted, &backing)?;
        Ok(Self {
            server,
            mounted,
            backing,
        })
    }

    /// Ends the file system: open files get errors from now on.
    pub fn die(&self) -> Result<()> {
        let how = UnmountFlags::FORCE | UnmountFlags::DETACH;
        unmount(&self.mounted, how).context("unmounting FUSE")
    }

    /// Mounts the file again, with its content.
    pub fn come_back(&mut self) -> Result<()> {
        self.server = serve_at(&self.mounted, &self.backing)?;
        Ok(())
    }

    /// The file's path, for others to open.
    #[must_use]
    pub fn path(&self) -> PathBuf {
        self.mounted.join("disk")
    }

    /// The backing file, readable at any time.
    #[must_use]
    pub fn backing(&self) -> &Path {
        &self.backing
    }

    /// Delays reads that overlap this range.
    pub fn hold_reads(&self, range: Range<u64>) {
        self.server.state().reads = Some(range);
    }

    /// Delays writes that overlap this range.
    pub fn hold_writes(&self, range: Range<u64>) {
        self.server.state().writes = Some(range);
    }

    /// Delayed requests, oldest first.
    #[must_use]
    pub fn held(&self) -> Vec<HeldIo> {
        let state = self.server.state();
        state.waiting.iter().map(|waiting| waiting.io).collect()
    }

    /// Waits for at least `count` delayed requests.
    pub fn wait_held(&self, count: usize) -> Result<Vec<HeldIo>> {
        wait::until("reads or writes are held", LIMIT, || {
            let held = self.held();
            Ok((held.len() >= count).then_some(held))
        })
    }

    /// Executes delayed reads, oldest first, and delays no more.
    pub fn release_reads(&self) {
        let mut state = self.server.state();
        state.reads = None;
        let waiting = std::mem::take(&mut state.waiting);
        let (writes, reads) = waiting.into_iter().partition(|waiting| waiting.io.is_write);
        state.waiting = writes;
        for waiting in reads {
            self.server.carry_out(&waiting);
        }
    }

    /// Executes all delayed requests, oldest first, and delays no more.
    pub fn release(&self) {
        let mut state = self.server.state();
        (state.reads, state.writes) = (None, None);
        for waiting in std::mem::take(&mut state.waiting) {
            self.server.carry_out(&waiting);
        }
    }
}

fn serve_at(mounted: &Path, backing: &Path) -> Result<Arc<Server>> {
    let device = File::options()
        .read(true)
        .write(true)
        .open("/dev/fuse")
        .context("/dev/fuse")?;
    let file = File::options().read(true).write(true).open(backing)?;
    let size_bytes = file.metadata()?.len();
    let options = format!(
        "fd={},rootmode=40000,user_id=0,group_id=0",
        device.as_raw_fd()
    );
    let options = std::ffi::CString::new(options)?;
    mount("hold", mounted, "fuse", MountFlags::empty(), &*options)
        .context("mounting FUSE (root?)")?;
    let server = Arc::new(Server {
        device,
        backing: file,
        size_bytes,
        state: Mutex::default(),
    });
    let serving = server.clone();
    std::thread::Builder::new()
        .name("fuse-hold".into())
        .spawn(move || serving.serve())?;
    Ok(server)
}

impl Drop for Hold {
    fn drop(&mut self) {
        self.release();
        if let Err(errno) = unmount(&self.mounted, UnmountFlags::DETACH) {
            eprintln!("unmounting {}: {errno}", self.mounted.display());
        }
    }
}

impl Server {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn serve(&self) {
        let mut buf = vec![0; LARGEST_BYTES + 4096];
        loop {
            match (&self.device).read(&mut buf) {
                Ok(n) if n >= IN_HEADER_BYTES => self.answer(&buf[..n]),
                Err(error)
                    if [Errno::INTR, Errno::AGAIN, Errno::NOENT]
                        .contains(&Errno::from_io_error(&error).unwrap_or(Errno::NODEV)) => {}
                // Unmounted.
                _ => return,
            }
        }
    }

    fn answer(&self, request: &[u8]) {
        let (op, unique, node) = (u32_at(request, 4), u64_at(request, 8), u64_at(request, 16));
        let body = &request[IN_HEADER_BYTES..];
        match op {
            opcode::INIT => self.reply(unique, &init_out()),
            opcode::LOOKUP if node == ROOT_NODE && body == FILE_NAME => {
                let mut out = Out::default();
                // Node, generation, validity of name and attributes (s, then ns).
                out.u64(FILE_NODE).u64(0).u64(3600).u64(3600).u32(0).u32(0);
                self.reply(unique, &self.attributes(out, FILE_NODE).0);
            }
            opcode::GETATTR | opcode::SETATTR => {
                let mut out = Out::default();
                out.u64(3600).u32(0).u32(0);
                self.reply(unique, &self.attributes(out, node).0);
            }
            opcode::OPEN if node == FILE_NODE => {
                let mut out = Out::default();
                // FOPEN_DIRECT_IO and FOPEN_PARALLEL_DIRECT_WRITES: no page cache, parallel writes.
                out.u64(1).u32(1 | 1 << 6).u32(0);
                self.reply(unique, &out.0);
            }
            opcode::READ | opcode::WRITE => self.transfer(op == opcode::WRITE, unique, body),
            opcode::FALLOCATE => {
                let mode = FallocateFlags::from_bits_retain(u32_at(body, 24));
                let (offset, len) = (u64_at(body, 8), u64_at(body, 16));
                match rustix::fs::fallocate(&self.backing, mode, offset, len) {
                    Ok(()) => self.reply(unique, &[]),
                    Err(errno) => self.fail(unique, errno),
                }
            }
            opcode::FSYNC | opcode::FLUSH | opcode::RELEASE => self.reply(unique, &[]),
            opcode::STATFS => self.reply(unique, &[0; 80]),
            opcode::FORGET | opcode::BATCH_FORGET | opcode::INTERRUPT => {}
            opcode::LOOKUP => self.fail(unique, Errno::NOENT),
            _ => self.fail(unique, Errno::NOSYS),
        }
    }

    fn transfer(&self, is_write: bool, unique: u64, body: &[u8]) {
        let (offset_bytes, len_bytes) = (u64_at(body, 8), u32_at(body, 16));
        let io = HeldIo {
            is_write,
            offset_bytes,
            len_bytes,
        };
        let data = if is_write {
            body[40..].to_vec()
        } else {
            vec![]
        };
        let waiting = Waiting { io, unique, data };
        let mut state = self.state();
        let range = if is_write {
            &state.writes
        } else {
            &state.reads
        };
        let overlaps = |range: &Range<u64>| {
            range.start < offset_bytes + u64::from(len_bytes) && offset_bytes < range.end
        };
        if range.as_ref().is_some_and(overlaps) {
            state.waiting.push(waiting);
        } else {
            drop(state);
            self.carry_out(&waiting);
        }
    }

    fn carry_out(&self, waiting: &Waiting) {
        let HeldIo {
            is_write,
            offset_bytes,
            len_bytes,
        } = waiting.io;
        if is_write {
            match self.backing.write_all_at(&waiting.data, offset_bytes) {
                Ok(()) => {
                    let mut out = Out::default();
                    out.u32(len_bytes).u32(0);
                    self.reply(waiting.unique, &out.0);
                }
                Err(_) => self.fail(waiting.unique, Errno::IO),
            }
            return;
        }
        let mut data = vec![0; len_bytes as usize];
        match self.backing.read_exact_at(&mut data, offset_bytes) {
            Ok(()) => self.reply(waiting.unique, &data),
            Err(_) => self.fail(waiting.unique, Errno::IO),
        }
    }

    fn attributes(&self, mut out: Out, node: u64) -> Out {
        let (kind, size) = match node {
            ROOT_NODE => (0o040_755, 0),
            _ => (0o100_600, self.size_bytes),
        };
        out.u64(node).u64(size).u64(size / 512);
        // Times.
        out.u64(0).u64(0).u64(0).u32(0).u32(0).u32(0);
        // Mode, links, owner, group, device, block size, flags.
        out.u32(kind).u32(1).u32(0).u32(0).u32(0).u32(4096).u32(0);
        out
    }

    fn reply(&self, unique: u64, body: &[u8]) {
        self.send(unique, 0, body);
    }

    fn fail(&self, unique: u64, errno: Errno) {
        self.send(unique, errno.raw_os_error().saturating_neg(), &[]);
    }

    fn send(&self, unique: u64, error: i32, body: &[u8]) {
        let mut out = Out::default();
        out.u32(16 + body.len() as u32)
            .u32(error.cast_unsigned())
            .u64(unique);
        out.0.extend_from_slice(body);
        // The process that asked may be dead.
        let _ = (&self.device).write(&out.0);
    }
}

fn init_out() -> Vec<u8> {
    // FUSE_ASYNC_READ, FUSE_BIG_WRITES, FUSE_ASYNC_DIO, FUSE_MAX_PAGES.
    let flags = 1 | 1 << 5 | 1 << 15 | 1 << 22;
    let mut out = Out::default();
    // Version, read-ahead, flags; then the background limit and congestion threshold in one word.
    out.u32(7).u32(31).u32(0).u32(flags).u32(1024 | 1000 << 16);
    // Longest write, time granularity, longest request in pages.
    out.u32(LARGEST_BYTES as u32).u32(1);
    out.u32((LARGEST_BYTES / 4096) as u32);
    out.0.resize(64, 0);
    out.0
}

/// Words in native byte order.
#[derive(Default)]
struct Out(Vec<u8>);

impl Out {
    fn u32(&mut self, word: u32) -> &mut Self {
        self.0.extend_from_slice(&word.to_ne_bytes());
        self
    }

    fn u64(&mut self, word: u64) -> &mut Self {
        self.0.extend_from_slice(&word.to_ne_bytes());
        self
    }
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_ne_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_ne_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}

/// The only offset of this block in a sparse file.
pub fn find_block(file: &Path, block: &[u8]) -> Result<u64> {
    let file = File::open(file)?;
    let size = file.metadata()?.len();
    let mut found = Vec::new();
    let mut data = vec![0; block.len()];
    let mut at = 0;
    while at < size {
        match rustix::fs::seek(&file, rustix::fs::SeekFrom::Data(at)) {
            Ok(next) => at = next - next % block.len() as u64,
            Err(Errno::NXIO) => break,
            Err(errno) => return Err(errno.into()),
        }
        let hole = rustix::fs::seek(&file, rustix::fs::SeekFrom::Hole(at + 1))?;
        while at < hole && at + block.len() as u64 <= size {
            file.read_exact_at(&mut data, at)?;
            if data == block {
                found.push(at);
            }
            at += block.len() as u64;
        }
    }
    ensure!(found.len() == 1, "the block is at {found:?}");
    Ok(found[0])
}
