//! The first exchange on a connection: ICReq and ICResp (TCP 3.4).
//!
//! The socket still blocks here. Nothing is read past the answer.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use forebay_nvme::tcp::{
    IcReq, MAX_TERM_REQ_BYTES, Parsed, Pdu, PduError, Role, TcpParams, parse, put_ic_req,
};

use crate::Error;

pub(crate) fn initialize(
    stream: &mut TcpStream,
    addr: SocketAddr,
    req: &IcReq,
    deadline: Instant,
    limit: Duration,
) -> Result<TcpParams, Error> {
    let before = TcpParams::before(Role::Host);
    let mut pdu = [0; MAX_TERM_REQ_BYTES];
    let bytes = put_ic_req(&mut pdu, req);
    let socket_error = |source: std::io::Error| match source.kind() {
        ErrorKind::WouldBlock | ErrorKind::TimedOut => Error::TimedOut {
            addr,
            what: "the answer to ICReq (is it an NVMe/TCP target?)".into(),
            waited: limit,
        },
        ErrorKind::UnexpectedEof => Error::Closed { addr, in_flight: 0 },
        _ => Error::Socket { addr, source },
    };
    let left = || {
        Some(
            deadline
                .saturating_duration_since(Instant::now())
                .max(Duration::from_millis(1)),
        )
    };
    stream.set_write_timeout(left()).map_err(socket_error)?;
    stream.write_all(&pdu[..bytes]).map_err(socket_error)?;
    let mut have = 0;
    loop {
        match parse(&pdu[..have], &before).map_err(|error| Error::Pdu { addr, error })? {
            Parsed::NeedMore(need) => {
                stream.set_read_timeout(left()).map_err(socket_error)?;
                let space = pdu.get_mut(have..need).unwrap_or_default();
                stream.read_exact(space).map_err(socket_error)?;
                have = need;
            }
            Parsed::Pdu(frame) => {
                return match frame.pdu {
                    Pdu::IcResp(resp) => {
                        TcpParams::connected(req, &resp).map_err(|error| Error::Pdu { addr, error })
                    }
                    Pdu::C2hTermReq(term) => Err(Error::Terminated { addr, term }),
                    _ => Err(Error::Pdu {
                        addr,
                        error: PduError::SEQUENCE,
                    }),
                };
            }
        }
    }
}
