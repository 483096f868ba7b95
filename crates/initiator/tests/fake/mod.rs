//! A small NVMe/TCP target for the initiator's tests, written from the specification: one namespace
//! in memory, and faults on request.

#![allow(dead_code)]

use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use forebay_nvme::fabrics::{
    ConnectCommand, ConnectData, DiscoveryLogEntry, PropertyCommand, fctype,
};
use forebay_nvme::nqn::DISCOVERY_NQN;
use forebay_nvme::opcode::{self, admin, nvm};
use forebay_nvme::tcp::{
    C2hData, DataPlace, Frame, MAX_HEADER_BYTES, Offer, Parsed, Pdu, R2t, Role, TcpParams, crc32c,
    decode_sgl, parse, put_c2h_data, put_capsule_resp, put_ic_resp, put_r2t,
};
use forebay_nvme::{Cqe, Nqn, Sqe, Status};
use zerocopy::{FromBytes, IntoBytes};

pub(crate) const SUBNQN: &str = "nqn.2026-01.io.forebay:test.disk";
pub(crate) const HOSTNQN: &str =
    "nqn.2014-08.org.nvmexpress:uuid:11111111-2222-3333-4444-555555555555";
pub(crate) const BLOCK: u32 = 512;

/// Commands are counted from 1; 0 disables a fault.
#[derive(Clone, Debug)]
pub(crate) struct Config {
    pub(crate) size_bytes: usize,
    pub(crate) offer: Offer,
    pub(crate) io_in_capsule_bytes: u32,
    pub(crate) mqes: u16,
    /// C2HData with SUCCESS instead of a response.
    pub(crate) success: bool,
    /// Largest C2HData.
    pub(crate) c2h_bytes: u32,
    /// Largest R2T.
    pub(crate) r2t_bytes: u32,
    /// This write is acknowledged but not executed.
    pub(crate) lose_write: u64,
    /// This write goes to the following block.
    pub(crate) misplace_write: u64,
    /// This write fails.
    pub(crate) fail_write: u64,
    /// A bit of this read's data is flipped after its digest was made.
    pub(crate) corrupt_read: u64,
    /// This I/O command is never answered.
    pub(crate) ignore_command: u64,
    /// This write gets an R2T for all its data, and fails at the same time.
    pub(crate) fail_with_r2t: u64,
    /// Flushes succeed but make nothing durable.
    pub(crate) ignore_flushes: bool,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            size_bytes: 1 << 20,
            offer: Offer {
                max_h2c_data_bytes: 4096,
                ..Offer::default()
            },
            io_in_capsule_bytes: 4096,
            mqes: 128,
            success: true,
            c2h_bytes: 8192,
            r2t_bytes: 16384,
            lose_write: 0,
            misplace_write: 0,
            fail_write: 0,
            corrupt_read: 0,
            ignore_command: 0,
            ignore_flushes: false,
            fail_with_r2t: 0,
        }
    }
}

#[derive(Default)]
pub(crate) struct Counters {
    pub(crate) writes: AtomicU64,
    pub(crate) reads: AtomicU64,
    pub(crate) flushes: AtomicU64,
    pub(crate) commands: AtomicU64,
    pub(crate) keep_alives: AtomicU64,
    pub(crate) shutdowns: AtomicU64,
    pub(crate) in_capsule_writes: AtomicU64,
    pub(crate) r2ts: AtomicU64,
    pub(crate) responses: AtomicU64,
    pub(crate) connects: AtomicU64,
}

struct State {
    config: Config,
    addr: SocketAddr,
    /// Now, and at the last flush.
    disk: Mutex<Vec<u8>>,
    flushed: Mutex<Vec<u8>>,
    counters: Counters,
    refusing: AtomicBool,
    stop: AtomicBool,
    streams: Mutex<Vec<TcpStream>>,
    /// An event is due.
    notify: AtomicBool,
    size_blocks: AtomicU64,
}

pub(crate) struct Target {
    state: Arc<State>,
    thread: Option<JoinHandle<()>>,
}

impl Target {
    pub(crate) fn start(config: Config) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let addr = listener.local_addr().unwrap();
        let blocks = config.size_bytes as u64 / u64::from(BLOCK);
        let state = Arc::new(State {
            disk: Mutex::new(vec![0; config.size_bytes]),
            flushed: Mutex::new(vec![0; config.size_bytes]),
            config,
            addr,
            counters: Counters::default(),
            refusing: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            streams: Mutex::new(Vec::new()),
            notify: AtomicBool::new(false),
            size_blocks: AtomicU64::new(blocks),
        });
        let accepting = Arc::clone(&state);
        let thread = std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                if accepting.stop.load(SeqCst) {
                    return;
                }
                if accepting.refusing.load(SeqCst) {
                    continue;
                }
                let twin = stream.try_clone().unwrap();
                accepting.streams.lock().unwrap().push(twin);
                let state = Arc::clone(&accepting);
                std::thread::spawn(move || {
                    let twin = stream.try_clone().unwrap();
                    let _ = Serve::new(&state, stream).run();
                    let _ = twin.shutdown(Shutdown::Both);
                });
            }
        });
        Self {
            state,
            thread: Some(thread),
        }
    }

    pub(crate) fn addr(&self) -> SocketAddr {
        self.state.addr
    }

    pub(crate) fn counters(&self) -> &Counters {
        &self.state.counters
    }

    /// With `lose_cache`, unflushed data is lost.
    pub(crate) fn die(&self, lose_cache: bool) {
        self.state.refusing.store(true, SeqCst);
        for stream in self.state.streams.lock().unwrap().drain(..) {
            let _ = stream.shutdown(Shutdown::Both);
        }
        if lose_cache {
            let mut disk = self.state.disk.lock().unwrap();
            disk.clone_from(&self.state.flushed.lock().unwrap());
        }
    }

    pub(crate) fn live(&self) {
        self.state.refusing.store(false, SeqCst);
    }

    pub(crate) fn disk(&self) -> std::sync::MutexGuard<'_, Vec<u8>> {
        self.state.disk.lock().unwrap()
    }

    pub(crate) fn grow(&self, blocks: u64) {
        self.state.size_blocks.store(blocks, SeqCst);
        self.state.notify.store(true, SeqCst);
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        self.state.stop.store(true, SeqCst);
        self.die(false);
        let _ = TcpStream::connect(self.state.addr);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

struct Serve<'a> {
    state: &'a State,
    stream: TcpStream,
    params: TcpParams,
    buf: Vec<u8>,
    properties: BTreeMap<u32, u64>,
    sqhd: u16,
    admin: bool,
    discovery: bool,
    sq_flow_off: bool,
    held_event: Option<u16>,
}

impl<'a> Serve<'a> {
    fn new(state: &'a State, stream: TcpStream) -> Self {
        stream.set_nodelay(true).unwrap();
        let timeout = Some(std::time::Duration::from_millis(20));
        stream.set_read_timeout(timeout).unwrap();
        let cap = u64::from(state.config.mqes) | 1 << 16 | 1 << 24 | 1 << 37;
        Self {
            state,
            stream,
            params: TcpParams::before(Role::Controller),
            buf: Vec::new(),
            properties: BTreeMap::from([(0, cap), (8, 0x2_0000), (0x14, 0), (0x1c, 0)]),
            sqhd: 0,
            admin: false,
            discovery: false,
            sq_flow_off: false,
            held_event: None,
        }
    }

    fn run(&mut self) -> io::Result<()> {
        loop {
            let (frame, data) = self.pdu()?;
            match frame.pdu {
                Pdu::IcReq(req) => {
                    let (params, resp) = TcpParams::accept(&req, &self.state.config.offer).unwrap();
                    self.params = params;
                    let mut out = [0; 128];
                    put_ic_resp(&mut out, &resp);
                    self.stream.write_all(&out)?;
                }
                Pdu::CapsuleCmd(sqe) => self.command(&sqe, data)?,
                Pdu::H2cData(_) if self.state.config.fail_with_r2t != 0 => {}
                other => panic!("unexpected {other:?}"),
            }
        }
    }

    fn ask_and_fail(&mut self, cid: u16, length_bytes: u32) -> io::Result<()> {
        let r2t = R2t {
            cid,
            ttag: 1,
            offset_bytes: 0,
            length_bytes,
        };
        let mut out = [0; 56];
        let n = put_r2t(&mut out, &self.params, &r2t);
        let cqe = Cqe::new(0, self.sqhd, 0, cid, Status::CAPACITY_EXCEEDED);
        let n = n + put_capsule_resp(&mut out[n..], &self.params, &cqe);
        self.stream.write_all(&out[..n])
    }

    fn pdu(&mut self) -> io::Result<(Frame, Vec<u8>)> {
        let frame = loop {
            match parse(&self.buf, &self.params) {
                Ok(Parsed::NeedMore(n)) => self.fill(n)?,
                Ok(Parsed::Pdu(frame)) => break frame,
                Err(e) => panic!("the host sent a bad PDU: {e}"),
            }
        };
        self.fill(frame.total_bytes())?;
        let rest = self.buf.split_off(frame.total_bytes());
        let pdu = std::mem::replace(&mut self.buf, rest);
        let data = pdu[frame.header_bytes..][..frame.data_bytes].to_vec();
        if frame.data_digest {
            assert_eq!(pdu[pdu.len() - 4..], crc32c(&data).to_le_bytes());
        }
        Ok((frame, data))
    }

    fn fill(&mut self, bytes: usize) -> io::Result<()> {
        let mut chunk = [0; 65536];
        while self.buf.len() < bytes {
            match self.stream.read(&mut chunk) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(n) => self.buf.extend_from_slice(&chunk[..n]),
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => self.idle()?,
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }

    fn idle(&mut self) -> io::Result<()> {
        if self.held_event.is_some() && self.state.notify.swap(false, SeqCst) {
            let cid = self.held_event.take().unwrap();
            return self.respond(cid, Status::SUCCESS, 0x0004_0002);
        }
        Ok(())
    }

    fn respond(&mut self, cid: u16, status: Status, result: u64) -> io::Result<()> {
        self.state.counters.responses.fetch_add(1, SeqCst);
        let mut out = [0; 28];
        let cqe = Cqe::new(result, self.sqhd, 0, cid, status);
        let n = put_capsule_resp(&mut out, &self.params, &cqe);
        self.stream.write_all(&out[..n])
    }

    fn send_data(&mut self, cid: u16, data: &[u8], corrupt: bool) -> io::Result<()> {
        let mut at = 0;
        let success = self.state.config.success && self.sq_flow_off && !self.admin;
        while at < data.len() {
            let n = (data.len() - at).min(self.state.config.c2h_bytes as usize);
            let last = at + n == data.len();
            let header = C2hData {
                cid,
                offset_bytes: at as u32,
                length_bytes: n as u32,
                last,
                success: last && success,
            };
            let mut out = vec![0; MAX_HEADER_BYTES];
            let header_bytes = put_c2h_data(&mut out, &self.params, &header);
            out.truncate(header_bytes);
            out.extend_from_slice(&data[at..at + n]);
            if self.params.data_digest {
                out.extend_from_slice(&crc32c(&data[at..at + n]).to_le_bytes());
            }
            if corrupt {
                out[header_bytes + n / 2] ^= 0x10;
            }
            self.stream.write_all(&out)?;
            at += n;
        }
        if success {
            return Ok(());
        }
        self.respond(cid, Status::SUCCESS, 0)
    }

    fn take_data(&mut self, sqe: &Sqe, in_capsule: Vec<u8>) -> io::Result<Vec<u8>> {
        match decode_sgl(sqe, in_capsule.len() as u32).unwrap() {
            DataPlace::InCapsule {
                offset_bytes,
                length_bytes,
            } => {
                self.state.counters.in_capsule_writes.fetch_add(1, SeqCst);
                Ok(in_capsule[offset_bytes as usize..][..length_bytes as usize].to_vec())
            }
            DataPlace::Transport { length_bytes } => {
                let mut all = Vec::new();
                while all.len() < length_bytes as usize {
                    self.state.counters.r2ts.fetch_add(1, SeqCst);
                    let left = length_bytes - all.len() as u32;
                    let r2t = R2t {
                        cid: sqe.cid(),
                        ttag: 0x55,
                        offset_bytes: all.len() as u32,
                        length_bytes: left.min(self.state.config.r2t_bytes),
                    };
                    let mut out = [0; 28];
                    let n = put_r2t(&mut out, &self.params, &r2t);
                    self.stream.write_all(&out[..n])?;
                    self.answer_of(&r2t, &mut all)?;
                }
                Ok(all)
            }
        }
    }

    fn answer_of(&mut self, r2t: &R2t, all: &mut Vec<u8>) -> io::Result<()> {
        let end = (r2t.offset_bytes + r2t.length_bytes) as usize;
        let mut later = Vec::new();
        while all.len() < end {
            let (frame, data) = self.pdu()?;
            match frame.pdu {
                Pdu::H2cData(h2c) => {
                    assert_eq!((h2c.cid, h2c.ttag), (r2t.cid, r2t.ttag));
                    assert_eq!(h2c.offset_bytes as usize, all.len());
                    all.extend_from_slice(&data);
                    assert_eq!(h2c.last, all.len() == end);
                }
                Pdu::CapsuleCmd(sqe) => later.push((sqe, data)),
                other => panic!("unexpected {other:?}"),
            }
        }
        for (sqe, data) in later {
            self.command(&sqe, data)?;
        }
        Ok(())
    }

    fn command(&mut self, sqe: &Sqe, data: Vec<u8>) -> io::Result<()> {
        self.sqhd = self.sqhd.wrapping_add(1);
        let cid = sqe.cid();
        if sqe.opcode() == opcode::FABRICS {
            return self.fabrics(sqe, data);
        }
        if self.admin {
            return self.admin_command(sqe, cid);
        }
        let number = self.state.counters.commands.fetch_add(1, SeqCst) + 1;
        if number == self.state.config.ignore_command {
            return Ok(());
        }
        let block = u64::from(BLOCK);
        let from = (sqe.cdw64(10) * block) as usize;
        let bytes = (u64::from(sqe.cdw(12) & 0xffff) + 1) * block;
        let to = from + bytes as usize;
        let past_end = to as u64 > self.state.size_blocks.load(SeqCst) * block
            || to > self.state.config.size_bytes;
        match sqe.opcode() {
            nvm::READ | nvm::WRITE | nvm::WRITE_ZEROES if past_end => {
                self.respond(cid, Status::LBA_OUT_OF_RANGE.with_dnr(), 0)
            }
            nvm::READ => {
                let number = self.state.counters.reads.fetch_add(1, SeqCst) + 1;
                let data = self.state.disk.lock().unwrap()[from..to].to_vec();
                self.send_data(cid, &data, number == self.state.config.corrupt_read)
            }
            nvm::WRITE => {
                let config = &self.state.config;
                let number = self.state.counters.writes.fetch_add(1, SeqCst) + 1;
                if number == config.fail_with_r2t {
                    return self.ask_and_fail(cid, bytes as u32);
                }
                let data = self.take_data(sqe, data)?;
                assert_eq!(data.len(), to - from);
                if number == config.fail_write {
                    return self.respond(cid, Status::CAPACITY_EXCEEDED, 0);
                }
                let shift = if number == config.misplace_write {
                    to - from
                } else {
                    0
                };
                if number != config.lose_write {
                    let mut disk = self.state.disk.lock().unwrap();
                    let at = (from + shift) % (disk.len() - data.len() + 1);
                    disk[at..at + data.len()].copy_from_slice(&data);
                }
                self.respond(cid, Status::SUCCESS, 0)
            }
            nvm::WRITE_ZEROES => {
                self.state.disk.lock().unwrap()[from..to].fill(0);
                self.respond(cid, Status::SUCCESS, 0)
            }
            nvm::DATASET_MANAGEMENT => {
                let ranges = self.take_data(sqe, data)?;
                assert_eq!(ranges.len(), (sqe.cdw(10) as usize + 1) * 16);
                for range in ranges.chunks_exact(16) {
                    let blocks = u32::from_le_bytes(range[4..8].try_into().unwrap()) as usize;
                    let lba = u64::from_le_bytes(range[8..].try_into().unwrap()) as usize;
                    let block = BLOCK as usize;
                    let mut disk = self.state.disk.lock().unwrap();
                    disk[lba * block..(lba + blocks) * block].fill(0);
                }
                self.respond(cid, Status::SUCCESS, 0)
            }
            nvm::FLUSH => {
                self.state.counters.flushes.fetch_add(1, SeqCst);
                if !self.state.config.ignore_flushes {
                    let disk = self.state.disk.lock().unwrap().clone();
                    *self.state.flushed.lock().unwrap() = disk;
                }
                self.respond(cid, Status::SUCCESS, 0)
            }
            _ => self.respond(cid, Status::INVALID_OPCODE.with_dnr(), 0),
        }
    }

    fn fabrics(&mut self, sqe: &Sqe, data: Vec<u8>) -> io::Result<()> {
        let cid = sqe.cid();
        match fctype(sqe) {
            opcode::fctype::CONNECT => {
                let connect = ConnectCommand::of(sqe);
                let data = ConnectData::ref_from_bytes(&data).unwrap();
                if data.hostnqn().unwrap().as_str() != HOSTNQN {
                    return self.respond(cid, Status::CONNECT_INVALID_HOST.with_dnr(), 0);
                }
                self.admin = connect.qid.get() == 0;
                self.discovery = data.subnqn().unwrap().as_str() == DISCOVERY_NQN;
                let flag = ConnectCommand::CATTR_DISABLE_SQ_FLOW_CONTROL;
                self.sq_flow_off = connect.cattr & flag != 0;
                if !self.admin {
                    assert_eq!(data.cntlid.get(), 7);
                    assert!(connect.sqsize.get() <= self.state.config.mqes);
                    self.params.max_in_capsule_bytes = self.state.config.io_in_capsule_bytes;
                }
                self.state.counters.connects.fetch_add(1, SeqCst);
                self.respond(cid, Status::SUCCESS, 7)
            }
            opcode::fctype::PROPERTY_GET => {
                let value = self.properties[&PropertyCommand::of(sqe).ofst.get()];
                self.respond(cid, Status::SUCCESS, value)
            }
            opcode::fctype::PROPERTY_SET => {
                let set = PropertyCommand::of(sqe);
                let cc = set.value.get();
                self.properties.insert(set.ofst.get(), cc);
                let mut csts = cc & 1;
                if cc >> 14 & 3 != 0 {
                    self.state.counters.shutdowns.fetch_add(1, SeqCst);
                    csts |= 2 << 2;
                }
                self.properties.insert(0x1c, csts);
                self.respond(cid, Status::SUCCESS, 0)
            }
            _ => self.respond(cid, Status::INVALID_OPCODE, 0),
        }
    }

    fn admin_command(&mut self, sqe: &Sqe, cid: u16) -> io::Result<()> {
        match sqe.opcode() {
            admin::IDENTIFY => {
                let mut data = vec![0; 4096];
                match sqe.cdw(10) & 0xff {
                    1 => {
                        data[4..24].copy_from_slice(b"0123456789abcdef0123");
                        let ioccsz = (self.state.config.io_in_capsule_bytes + 64) / 16;
                        data[1792..1796].copy_from_slice(&ioccsz.to_le_bytes());
                        data[525] = 1;
                    }
                    2 => data[0] = 1,
                    0 => {
                        let blocks = self.state.size_blocks.load(SeqCst);
                        data[..8].copy_from_slice(&blocks.to_le_bytes());
                        data[130] = 9;
                    }
                    _ => {
                        data[..2].copy_from_slice(&[3, 16]);
                        data[4..20].fill(0xab);
                    }
                }
                self.send_data(cid, &data, false)
            }
            admin::SET_FEATURES if sqe.cdw(10) & 0xff == 7 => {
                self.respond(cid, Status::SUCCESS, 0x0001_0001)
            }
            admin::SET_FEATURES => self.respond(cid, Status::SUCCESS, 0),
            admin::KEEP_ALIVE => {
                self.state.counters.keep_alives.fetch_add(1, SeqCst);
                self.respond(cid, Status::SUCCESS, 0)
            }
            admin::ASYNC_EVENT_REQUEST => {
                self.held_event = Some(cid);
                Ok(())
            }
            admin::GET_LOG_PAGE => {
                let bytes = ((sqe.cdw(10) >> 16 | (sqe.cdw(11) & 0xffff) << 16) as usize + 1) * 4;
                let offset = sqe.cdw64(12) as usize;
                let mut page = vec![0; 1 << 20];
                if self.discovery {
                    page[8] = 20;
                    for i in 0..20 {
                        let nqn = Nqn::parse(&format!("{SUBNQN}{i}")).unwrap();
                        let entry = DiscoveryLogEntry::tcp(2, &nqn, self.state.addr, 1, 32);
                        let at = 1024 * (i + 1);
                        page[at..at + 1024].copy_from_slice(entry.as_bytes());
                    }
                } else {
                    page[0] = 1;
                }
                self.send_data(cid, &page[offset..offset + bytes], false)
            }
            _ => self.respond(cid, Status::INVALID_OPCODE.with_dnr(), 0),
        }
    }
}
