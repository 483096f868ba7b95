//! A minimal host: PDUs over a blocking socket, made and read by the codec. It enforces no rules,
//! so that tests can break each. Every wait has a time limit.

use forebay_nvme::fabrics::{ConnectCommand, ConnectData, PropertyCommand};
use forebay_nvme::tcp::{
    self, C2hData, Frame, H2cData, IcReq, Parsed, Pdu, Phase, R2t, Role, TcpParams,
};
use forebay_nvme::{Cqe, Nqn, SglDescriptor, Sqe, Status};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;
use zerocopy::IntoBytes;

/// Limit of every wait.
const LIMIT: Duration = Duration::from_secs(120);

pub(crate) const READ: u8 = 2;
pub(crate) const WRITE: u8 = 1;
pub(crate) const FLUSH: u8 = 0;
pub(crate) const DSM: u8 = 9;
pub(crate) const WRITE_ZEROES: u8 = 8;

pub(crate) struct RawHost {
    pub socket: TcpStream,
    pub params: TcpParams,
    pub cid: u16,
    input: Vec<u8>,
}

#[derive(Clone, Copy)]
pub(crate) struct Ask {
    pub header_digest: bool,
    pub data_digest: bool,
    pub hpda: u8,
}

pub(crate) const PLAIN: Ask = Ask {
    header_digest: false,
    data_digest: false,
    hpda: 0,
};

pub(crate) fn ic_req(ask: Ask) -> IcReq {
    IcReq {
        pfv: 0,
        hpda: ask.hpda,
        header_digest: ask.header_digest,
        data_digest: ask.data_digest,
        max_r2t: 0,
    }
}

impl RawHost {
    /// A connection without any PDU.
    pub(crate) fn dial(address: SocketAddr) -> Self {
        let socket = TcpStream::connect(address).unwrap();
        socket.set_nodelay(true).unwrap();
        socket.set_read_timeout(Some(LIMIT)).unwrap();
        socket.set_write_timeout(Some(LIMIT)).unwrap();
        Self {
            socket,
            params: TcpParams::before(Role::Host),
            cid: 0,
            input: Vec::new(),
        }
    }

    /// With ICReq and ICResp exchanged.
    pub(crate) fn open(address: SocketAddr, ask: Ask) -> Self {
        let mut host = Self::dial(address);
        let request = ic_req(ask);
        let mut out = [0; tcp::MAX_HEADER_BYTES];
        let n = tcp::put_ic_req(&mut out, &request);
        host.say(&out[..n]);
        match host.hear().0 {
            Pdu::IcResp(response) => {
                host.params = TcpParams::connected(&request, &response).unwrap()
            }
            other => panic!("ICResp expected: {other:?}"),
        }
        assert_eq!(host.params.phase, Phase::Ready);
        host
    }

    pub(crate) fn say(&mut self, bytes: &[u8]) {
        self.socket.write_all(bytes).unwrap();
    }

    /// The next PDU and its data, whose digest is checked; `None` at the stream's end.
    pub(crate) fn try_hear(&mut self) -> Option<(Pdu, Vec<u8>)> {
        loop {
            match tcp::parse(&self.input, &self.params).unwrap() {
                Parsed::Pdu(frame) if self.input.len() >= frame.total_bytes() => {
                    let pdu: Vec<u8> = self.input.drain(..frame.total_bytes()).collect();
                    return Some((frame.pdu, self.data_of(&pdu, &frame)));
                }
                _ => {}
            }
            let mut more = [0; 65536];
            match self.socket.read(&mut more) {
                Ok(0) => {
                    assert!(self.input.is_empty(), "the stream ended inside a PDU");
                    return None;
                }
                Ok(n) => self.input.extend_from_slice(&more[..n]),
                Err(e) if e.kind() == std::io::ErrorKind::ConnectionReset => return None,
                // The test process was stopped and continued.
                Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
                Err(e) => panic!("waiting for a PDU: {e}"),
            }
        }
    }

    fn data_of(&self, pdu: &[u8], frame: &Frame) -> Vec<u8> {
        let (_, rest) = pdu.split_at(frame.header_bytes);
        let (data, digest) = rest.split_at(frame.data_bytes);
        if frame.data_bytes > 0 && !matches!(frame.pdu, Pdu::C2hTermReq(_)) {
            let alignment = usize::from(self.params.rx_alignment_bytes());
            assert!(
                frame.header_bytes.is_multiple_of(alignment),
                "data at {}",
                frame.header_bytes
            );
        }
        assert_eq!(
            frame.data_digest,
            self.params.data_digest && frame.data_bytes > 0 && !digest.is_empty()
        );
        if frame.data_digest {
            assert_eq!(digest, tcp::crc32c(data).to_le_bytes(), "data digest");
        }
        data.to_vec()
    }

    pub(crate) fn hear(&mut self) -> (Pdu, Vec<u8>) {
        self.try_hear().expect("the connection ended")
    }

    pub(crate) fn response(&mut self) -> Cqe {
        match self.hear().0 {
            Pdu::CapsuleResp(cqe) => cqe,
            other => panic!("response expected: {other:?}"),
        }
    }

    pub(crate) fn r2t(&mut self) -> R2t {
        match self.hear().0 {
            Pdu::R2t(r2t) => r2t,
            other => panic!("R2T expected: {other:?}"),
        }
    }

    /// The connection ends without another PDU, or with a C2HTermReq, which is returned.
    pub(crate) fn end(mut self) -> Option<tcp::TermReq> {
        let term = self.try_hear().map(|(pdu, _)| match pdu {
            Pdu::C2hTermReq(term) => term,
            other => panic!("end expected: {other:?}"),
        });
        if term.is_some() {
            assert!(self.try_hear().is_none(), "nothing follows a C2HTermReq");
        }
        term
    }

    pub(crate) fn next_cid(&mut self) -> u16 {
        self.cid = self.cid.wrapping_add(1);
        self.cid
    }

    pub(crate) fn capsule_bytes(&self, sqe: &Sqe, data: &[u8]) -> Vec<u8> {
        let mut out = vec![0; tcp::MAX_HEADER_BYTES];
        let n = tcp::put_capsule_cmd(&mut out, &self.params, sqe, data.len() as u32);
        out.truncate(n);
        self.add_data(&mut out, data);
        out
    }

    fn add_data(&self, out: &mut Vec<u8>, data: &[u8]) {
        out.extend_from_slice(data);
        if self.params.data_digest && !data.is_empty() {
            out.extend_from_slice(&tcp::crc32c(data).to_le_bytes());
        }
    }

    pub(crate) fn capsule(&mut self, sqe: &Sqe, data: &[u8]) {
        let bytes = self.capsule_bytes(sqe, data);
        self.say(&bytes);
    }

    pub(crate) fn h2c_bytes(&self, header: &H2cData, data: &[u8]) -> Vec<u8> {
        let mut out = vec![0; tcp::MAX_HEADER_BYTES];
        let n = tcp::put_h2c_data(&mut out, &self.params, header);
        out.truncate(n);
        self.add_data(&mut out, data);
        out
    }

    /// Answers an R2T, in parts of at most `part` bytes.
    pub(crate) fn answer_r2t(&mut self, r2t: &R2t, data: &[u8], part: usize) {
        assert_eq!(r2t.length_bytes as usize, data.len());
        let mut at = 0;
        for chunk in data.chunks(part.min(self.params.max_h2c_data_bytes as usize)) {
            let header = H2cData {
                cid: r2t.cid,
                ttag: r2t.ttag,
                offset_bytes: r2t.offset_bytes + at as u32,
                length_bytes: chunk.len() as u32,
                last: at + chunk.len() == data.len(),
            };
            at += chunk.len();
            let bytes = self.h2c_bytes(&header, chunk);
            self.say(&bytes);
        }
    }

    pub(crate) fn connect(&mut self, command: ConnectCommand, data: &ConnectData) -> Cqe {
        let sqe = command
            .to_sqe()
            .with_sgl(SglDescriptor::in_capsule(0, 1024));
        self.capsule(&sqe, data.as_bytes());
        self.response()
    }

    /// A property, 8 bytes if `wide`, else 4.
    pub(crate) fn property_get(&mut self, offset: u32, wide: bool) -> u64 {
        let cid = self.next_cid();
        self.capsule(&PropertyCommand::get(cid, offset, wide).to_sqe(), &[]);
        let cqe = self.response();
        assert_eq!((cqe.cid(), cqe.status()), (cid, Status::SUCCESS));
        cqe.result()
    }

    pub(crate) fn property_set(&mut self, offset: u32, value: u64) -> Cqe {
        let cid = self.next_cid();
        self.capsule(
            &PropertyCommand::set(cid, offset, false, value).to_sqe(),
            &[],
        );
        self.response()
    }

    /// CC.EN = 1 with the usual entry sizes, and CSTS.RDY.
    pub(crate) fn enable(&mut self) {
        assert_eq!(
            self.property_set(0x14, 0x0046_0001).status(),
            Status::SUCCESS
        );
        assert_eq!(self.property_get(0x1c, false) & 1, 1);
        self.number_of_queues(8);
    }

    pub(crate) fn number_of_queues(&mut self, queues: u32) -> Cqe {
        let cid = self.next_cid();
        let count = queues - 1;
        self.capsule(
            &Sqe::new(0x09, cid)
                .with_cdw(10, 7)
                .with_cdw(11, count << 16 | count),
            &[],
        );
        self.response()
    }

    /// A command without data; its completion.
    pub(crate) fn command(&mut self, sqe: Sqe) -> Cqe {
        let cid = self.next_cid();
        let sqe = Sqe {
            cid: cid.into(),
            ..sqe
        };
        self.capsule(&sqe, &[]);
        let cqe = self.response();
        assert_eq!(cqe.cid(), cid);
        cqe
    }

    /// A command with data for the host: the data, and its completion (`None`: SUCCESS in the
    /// data).
    pub(crate) fn fetch(&mut self, sqe: Sqe, bytes: u32) -> (Vec<u8>, Option<Cqe>) {
        let cid = self.next_cid();
        let sqe = Sqe {
            cid: cid.into(),
            ..sqe
        }
        .with_sgl(SglDescriptor::transport(bytes));
        self.capsule(&sqe, &[]);
        self.fetched(cid)
    }

    pub(crate) fn fetched(&mut self, cid: u16) -> (Vec<u8>, Option<Cqe>) {
        match self.hear() {
            (
                Pdu::C2hData(C2hData {
                    cid: c,
                    offset_bytes: 0,
                    last: true,
                    success,
                    ..
                }),
                data,
            ) => {
                assert_eq!(c, cid);
                (data, (!success).then(|| self.response()))
            }
            (Pdu::CapsuleResp(cqe), _) => (vec![], Some(cqe)),
            other => panic!("data expected: {other:?}"),
        }
    }

    /// Writes, with the data in the capsule.
    pub(crate) fn write(&mut self, lba: u64, data: &[u8], block: usize) -> Cqe {
        let cid = self.next_cid();
        let sqe = rw(WRITE, cid, lba, (data.len() / block) as u32)
            .with_sgl(SglDescriptor::in_capsule(0, data.len() as u32));
        self.capsule(&sqe, data);
        self.response()
    }

    pub(crate) fn read(&mut self, lba: u64, blocks: u32, block: u32) -> Vec<u8> {
        let (data, cqe) = self.fetch(rw(READ, 0, lba, blocks), blocks * block);
        assert!(cqe.is_none_or(|c| c.status() == Status::SUCCESS), "{cqe:?}");
        data
    }
}

/// A command on blocks of namespace 1.
pub(crate) fn rw(opcode: u8, cid: u16, lba: u64, blocks: u32) -> Sqe {
    Sqe::new(opcode, cid)
        .with_nsid(1)
        .with_cdw64(10, lba)
        .with_cdw(12, blocks - 1)
}

pub(crate) fn connect_data(cntlid: u16, subsystem: &str, host: &str) -> ConnectData {
    ConnectData::new(
        [9; 16],
        cntlid,
        &Nqn::parse(subsystem).unwrap(),
        &Nqn::parse(host).unwrap(),
    )
}

/// An enabled admin queue without keep-alive time, and the controller's id.
pub(crate) fn admin(address: SocketAddr, subsystem: &str, ask: Ask) -> (RawHost, u16) {
    let mut host = RawHost::open(address, ask);
    let cqe = host.connect(
        ConnectCommand::new(0, 0, 32, 0),
        &connect_data(0xffff, subsystem, super::HOST),
    );
    assert_eq!(cqe.status(), Status::SUCCESS);
    host.enable();
    (host, cqe.result() as u16)
}

/// An I/O queue; without SQ flow control if `free`.
pub(crate) fn io_queue(
    address: SocketAddr,
    subsystem: &str,
    cntlid: u16,
    qid: u16,
    entries: u32,
    ask: Ask,
    free: bool,
) -> RawHost {
    let mut host = RawHost::open(address, ask);
    let mut command = ConnectCommand::new(0, qid, entries, 0);
    if free {
        command.cattr = ConnectCommand::CATTR_DISABLE_SQ_FLOW_CONTROL;
    }
    let cqe = host.connect(command, &connect_data(cntlid, subsystem, super::HOST));
    assert_eq!(cqe.status(), Status::SUCCESS);
    assert_eq!(cqe.result() as u16, cntlid);
    host
}

/// An admin queue, and I/O queue 1 of 128 entries.
pub(crate) fn attach(
    address: SocketAddr,
    subsystem: &str,
    ask: Ask,
    free: bool,
) -> (RawHost, RawHost) {
    let (admin, cntlid) = admin(address, subsystem, ask);
    let io = io_queue(address, subsystem, cntlid, 1, 128, ask, free);
    (admin, io)
}
