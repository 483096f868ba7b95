//! What a device holds before it becomes part of a pool.
//!
//! **Design.** Only two answers need care: a Forebay label, and nothing at all; anything else is
//! someone's. The first MiB, where every common format has its mark, decides. **Not here:** naming
//! foreign formats (the `device` crate does), taking the device.

use crate::{
    error::{ErrorKind, PoolError, Result},
    label::Label,
    store::BlockStore,
};

const PROBE_BYTES: u64 = 1 << 20;

/// What a device holds.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Probe {
    /// Zeros where anything would have its mark.
    Blank,
    /// A pool's label.
    Forebay(Box<Label>),
    /// A pool's label that can't be used; the text says why not.
    Unusable(String),
    /// Something else; the text says what.
    Other(String),
}

/// Looks at a device without changing it.
pub fn probe(store: &dyn BlockStore) -> Result<Probe> {
    match Label::read(store) {
        Ok(label) => return Ok(Probe::Forebay(Box::new(label))),
        Err(error) if error.kind == ErrorKind::NotFound => {}
        Err(error) if error.kind == ErrorKind::Io => return Err(error),
        Err(error) => return Ok(Probe::Unusable(error.message)),
    }
    let io = |error| PoolError::io("looking at what a device holds", &error);
    let capacity = store.capacity().map_err(io)?;
    let mut chunk = vec![0; 64 << 10];
    let mut at = 0;
    while at < capacity.min(PROBE_BYTES) {
        let count = (capacity - at).min(chunk.len() as u64) as usize;
        // Whole blocks only: what is left of a file that is no multiple of them tells nothing.
        let count = count - count % crate::store::BLOCK_BYTES;
        if count == 0 {
            break;
        }
        store.read_at(at, &mut chunk[..count]).map_err(io)?;
        if chunk[..count].iter().any(|byte| *byte != 0) {
            return Ok(Probe::Other("data that is not Forebay's".into()));
        }
        at += count as u64;
    }
    Ok(Probe::Blank)
}
