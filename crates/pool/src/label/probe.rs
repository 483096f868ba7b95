//! A device's content before it joins a pool: a Forebay label, nothing, or something else.
//!
//! The first MiB, where every common format has its mark, decides.
//!
//! **Not here:** naming foreign formats (the `device` crate).

use crate::{
    error::{ErrorKind, PoolError, Result},
    label::Label,
    store::BlockStore,
};

const PROBE_BYTES: u64 = 1 << 20;

/// A device's content.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Probe {
    /// Zeros in the first MiB.
    Blank,
    /// A pool's label.
    Forebay(Box<Label>),
    /// An unusable pool label; the text says why.
    Unusable(String),
    /// Something else; the text names it.
    Other(String),
}

/// Examines a device without changing it.
pub fn probe(store: &dyn BlockStore) -> Result<Probe> {
    match Label::read(store) {
        Ok(label) => return Ok(Probe::Forebay(Box::new(label))),
        Err(error) if error.kind == ErrorKind::NotFound => {}
        Err(error) if error.kind == ErrorKind::Io => return Err(error),
        Err(error) => return Ok(Probe::Unusable(error.message)),
    }
    let io = |error| PoolError::io("inspecting what a device holds", &error);
    let capacity = store.capacity().map_err(io)?;
    let mut chunk = vec![0; 64 << 10];
    let mut at = 0;
    while at < capacity.min(PROBE_BYTES) {
        let count = (capacity - at).min(chunk.len() as u64) as usize;
        // The partial block at a file's end does not matter.
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
