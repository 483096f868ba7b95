//! A copy of what a write brings, for the journal.
//!
//! **Purpose.** A record holds the bytes themselves, wherever the operation's memory is.
//!
//! **Not here:** anything but that one read of foreign memory.
#![allow(unsafe_code)]

use crate::mem::{Buf, IoMemory};

/// A copy of the memory. Only for a write operation in progress.
pub(super) fn to_vec(memory: &IoMemory) -> Vec<u8> {
    match memory {
        IoMemory::One(buf) => bytes(*buf),
        IoMemory::Many(bufs) => bufs.iter().flat_map(bytes).collect(),
    }
}

fn bytes(buf: Buf) -> Vec<u8> {
    let mut bytes = vec![0; buf.len_bytes() as usize];
    // SAFETY: called between the submission of a write and the end of its `Device::finish`, so the contract of `Buf::new`
    // says mapped and readable, and nobody has a `&mut` to it; `bytes` is new. Wrong if it were called for the buffer of
    // an operation that has ended.
    unsafe {
        std::ptr::copy_nonoverlapping(buf.ptr().as_ptr(), bytes.as_mut_ptr(), bytes.len());
    }
    bytes
}
