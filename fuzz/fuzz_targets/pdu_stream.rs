//! NVMe/TCP streams for controllers and hosts.
//!
//! The first byte selects role and digests; hosts have commands in flight. No panic; PDUs respect
//! the connection's limits and the commands' data lengths.

#![no_main]

use forebay_nvme::host::{HostQueue, HostTransfer, command};
use forebay_nvme::tcp::{Parsed, Pdu, Phase, Role, TcpParams, parse};
use libfuzzer_sys::fuzz_target;

const DATA_LIMIT_BYTES: u32 = 64 << 10;
const PDU_LIMIT_BYTES: usize = (DATA_LIMIT_BYTES as usize) + 8192 + 1024;

fuzz_target!(|bytes: &[u8]| {
    let Some((choice, mut stream)) = bytes.split_first() else {
        return;
    };
    let bit = |n: u8| choice & (1 << n) != 0;
    let role = if bit(0) { Role::Host } else { Role::Controller };
    let params = TcpParams {
        phase: if bit(1) {
            Phase::Initialize
        } else {
            Phase::Ready
        },
        header_digest: bit(2),
        data_digest: bit(3),
        max_data_bytes: DATA_LIMIT_BYTES,
        max_h2c_data_bytes: DATA_LIMIT_BYTES,
        max_in_capsule_bytes: 8192,
        host_alignment_bytes: if bit(4) { 128 } else { 4 },
        controller_alignment_bytes: if bit(5) { 128 } else { 4 },
        ..TcpParams::before(role)
    };
    let mut queue = HostQueue::new(4, &params);
    let _ = queue.begin(command::read(1, 0, 8), HostTransfer::ToHost(4096));
    let _ = queue.begin(
        command::write(1, 0, 64, false),
        HostTransfer::ToController(32 << 10),
    );
    let _ = queue.begin(command::flush(1), HostTransfer::None);
    loop {
        match parse(stream, &params) {
            Ok(Parsed::NeedMore(bytes)) => {
                assert!(bytes > stream.len() && bytes < PDU_LIMIT_BYTES);
                return;
            }
            Ok(Parsed::Pdu(frame)) => {
                assert!(frame.total_bytes() < PDU_LIMIT_BYTES);
                assert!(frame.header_bytes <= stream.len());
                if let Pdu::H2cData(data) = frame.pdu {
                    assert!(data.length_bytes <= DATA_LIMIT_BYTES);
                }
                if role == Role::Host && queue.on_pdu(&frame).is_err() {
                    return;
                }
                match stream.get(frame.total_bytes()..) {
                    Some(rest) => stream = rest,
                    None => return,
                }
            }
            Err(_) => return,
        }
    }
});
