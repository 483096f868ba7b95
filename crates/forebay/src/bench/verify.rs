//! Writes random data at random places of a volume and verifies it.
//!
//! Each run has a new seed, so that earlier data fails the check.

use std::net::SocketAddr;
use std::ops::ControlFlow;
use std::time::{SystemTime, UNIX_EPOCH};

use forebay_initiator::verify::{Initial, Verifier, VerifySpec, WriteGoal};

use super::together::Share;
use crate::failure::{Failure, Outcome};

/// Less than an extent, more than a block.
const WRITE_BYTES: u32 = 16 * 1024;
const STEP_BYTES: u64 = 1 << 20;

pub(super) struct VerifyTarget {
    pub(super) addr: SocketAddr,
    pub(super) nqn: String,
    pub(super) host_nqn: String,
}

#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Verified {
    pub(super) written_bytes: u64,
    pub(super) read_bytes: u64,
}

pub(super) fn verify(target: &VerifyTarget, bytes: u64, share: &Share) -> Outcome<Verified> {
    let failed = |error: forebay_initiator::Error| Failure::new(error.to_string());
    let spec = VerifySpec {
        block_bytes: WRITE_BYTES,
        initial: Initial::Any,
        seed: seed(),
        ..VerifySpec::new(target.addr, &target.nqn, &target.host_nqn)
    };
    let mut verifier = Verifier::connect(spec).map_err(failed)?;
    let mut written_bytes = 0;
    // In steps: the first failed write ends the loop.
    while written_bytes < bytes {
        let step = STEP_BYTES.min(bytes - written_bytes);
        let written = verifier
            .write(WriteGoal::Bytes(step), &mut |_| ControlFlow::Continue(()))
            .map_err(failed)?;
        if let Some(error) = written.first_error {
            return Err(Failure::new(format!("a write failed: {error}")));
        }
        written_bytes += written.bytes;
        share.set(written_bytes as f64 / bytes as f64 / 2.0);
    }
    verifier.flush().map_err(failed)?;
    let read = verifier
        .read_back(&mut |at| share.set(0.5 + at.fraction / 2.0))
        .map_err(failed)?;
    if !read.is_clean() {
        return Err(Failure::new(format!("{} is damaged: {read}", target.nqn)));
    }
    verifier.close().map_err(failed)?;
    Ok(Verified {
        written_bytes,
        read_bytes: read.bytes,
    })
}

fn seed() -> u64 {
    let since = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    since.as_nanos() as u64
}
