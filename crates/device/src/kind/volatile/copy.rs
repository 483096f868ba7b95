//! Copies the data of a write for the journal.
#![allow(unsafe_code)]

use crate::mem::{Buf, IoMemory};

/// Only for a write operation in progress.
pub(super) fn to_vec(memory: &IoMemory) -> Vec<u8> {
    match memory {
        IoMemory::One(buf) => bytes(*buf),
        IoMemory::Many(bufs) => bufs.iter().flat_map(bytes).collect(),
    }
}

fn bytes(buf: Buf) -> Vec<u8> {
    let mut bytes = vec![0; buf.len_bytes() as usize];
    // SAFETY: called between a write's submission and the end of its `Device::finish`, so by
    // `Buf::new`'s contract the memory is mapped, readable and without a `&mut`; `bytes` is new.
    // Wrong for an operation that has ended.
    unsafe {
        std::ptr::copy_nonoverlapping(buf.ptr().as_ptr(), bytes.as_mut_ptr(), bytes.len());
    }
    bytes
}
