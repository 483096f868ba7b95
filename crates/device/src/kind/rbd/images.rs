//! The images of a client: their states, their locks, and operations on them.
//!
//! **Locks.** An image with the feature `exclusive-lock` is locked for as long as it is open:
//! librbd then refuses other clients that ask for the lock. A live owner is refused by its address;
//! librbd would ask it to give way.

use std::mem;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::*};
use std::sync::{Arc, PoisonError, RwLock};

use forebay_rbd::{Image, ImageRequest, OpenMode, RbdError, UpdateWatch};
use rustix::io::Errno;

use super::client::CephClient;
use super::{IMAGE_SPAN_BYTES, MAX_IMAGES};
use crate::kind::{ImageChanged, ImageName, RemoteImages};
use crate::op::{Op, OpKind, Submitted};
use crate::ring::Ring;

#[derive(Debug)]
pub(super) enum SpanState {
    /// The image is not open yet: operations wait.
    Waits,
    Open(Arc<OpenedImage>),
    /// Operations fail.
    Failed(Errno),
}

#[derive(Debug)]
pub(super) struct OpenedImage {
    /// Ends before the image.
    _watch: UpdateWatch,
    image: Arc<Image>,
    is_snapshot: bool,
    /// librbd may have a cache: each write is followed by a flush.
    caches: bool,
    size_bytes: AtomicU64,
    is_writable: AtomicBool,
}

impl OpenedImage {
    pub(super) fn submit(&self, ring: &mut Ring, op: &Op, user_data: u64) -> Submitted {
        if op.kind != OpKind::Read {
            if self.is_snapshot {
                return Submitted::Done(Err(Errno::ROFS));
            }
            if !self.is_writable.load(Acquire) {
                return Submitted::NotReady;
            }
        }
        let offset = op.offset_bytes % IMAGE_SPAN_BYTES;
        // librbd would ignore the part of a write beyond the end, without an error.
        let left = self.size_bytes.load(Relaxed).checked_sub(offset);
        if left.is_none_or(|left| left < op.len_bytes) {
            return Submitted::Done(Err(Errno::RANGE));
        }
        let Ok(length) = usize::try_from(op.len_bytes) else {
            return Submitted::Done(Err(Errno::INVAL));
        };
        let force_unit_access = self.caches;
        let request = match op.kind {
            OpKind::Read => ImageRequest::Read { offset, length },
            OpKind::Write => ImageRequest::Write {
                offset,
                length,
                force_unit_access,
            },
            // A discard may keep small parts, which must read as zeros.
            OpKind::WriteZeroes | OpKind::Punch | OpKind::Flush => ImageRequest::WriteZeroes {
                offset,
                length,
                force_unit_access,
            },
        };
        ring.begin_remote(&self.image, request, op.memory(), user_data)
    }
}

impl CephClient {
    fn span(&self, span: u32) -> Result<&RwLock<SpanState>, String> {
        let too_many = || format!("a Ceph client has at most {MAX_IMAGES} images");
        self.spans.get(span as usize).ok_or_else(too_many)
    }

    fn opened(&self, span: u32) -> Result<Arc<OpenedImage>, String> {
        let state = self.span(span)?.read();
        match &*state.unwrap_or_else(PoisonError::into_inner) {
            SpanState::Open(opened) => Ok(Arc::clone(opened)),
            SpanState::Waits | SpanState::Failed(_) => Err("the image is not open".to_owned()),
        }
    }

    fn text(&self, error: RbdError) -> String {
        self.noted(error.errno);
        error.to_string()
    }

    fn open_named(&self, name: &ImageName, changed: ImageChanged) -> Result<OpenedImage, RbdError> {
        let namespace = Some(name.namespace.as_str()).filter(|name| !name.is_empty());
        let pool = self.rados.pool(&name.pool, namespace)?;
        let mode = match &name.snapshot {
            Some(snapshot) => OpenMode::Snapshot(snapshot),
            None => OpenMode::ReadWrite,
        };
        let image = Arc::new(pool.image(&name.image, mode)?);
        // Watched first: no change is missed.
        let watch = UpdateWatch::new(&image, changed)?;
        let size_bytes = image.info()?.size_bytes;
        Ok(OpenedImage {
            is_snapshot: name.snapshot.is_some(),
            caches: image.has_write_cache(),
            size_bytes: AtomicU64::new(size_bytes),
            is_writable: AtomicBool::new(false),
            image,
            _watch: watch,
        })
    }

    /// The client that keeps us from writing, if any: by its address.
    fn other_owner(&self, image: &Image) -> Result<Option<String>, RbdError> {
        let owners = image.lock_owners()?;
        if owners.is_empty() {
            return Ok(image.advisory_lockers()?.pop());
        }
        let watchers = image.watchers()?;
        let predecessors = self.predecessors().clone();
        // A dead client watches nothing; librbd breaks its lock.
        let is_other = |owner: &String| {
            *owner != self.address && !predecessors.contains(owner) && watchers.contains(owner)
        };
        Ok(owners.into_iter().find(is_other))
    }
}

/// The earlier state is dropped here, without the lock: an image's end takes long.
fn replace(span: &RwLock<SpanState>, state: SpanState) {
    let mut place = span.write().unwrap_or_else(PoisonError::into_inner);
    let before = mem::replace(&mut *place, state);
    drop(place);
    drop(before);
}

impl RemoteImages for CephClient {
    fn client_address(&self) -> &str {
        &self.address
    }

    fn set_predecessors(&self, addresses: Vec<String>) {
        self.set_predecessors(addresses);
    }

    fn is_blocklisted(&self) -> bool {
        self.is_blocklisted()
    }

    fn open(&self, span: u32, name: &ImageName, changed: ImageChanged) -> Result<u64, String> {
        let span = self.span(span)?;
        // The earlier image's lock goes with it.
        replace(span, SpanState::Waits);
        let (state, result) = match self.open_named(name, changed) {
            Ok(opened) => match opened.size_bytes.load(Relaxed) {
                size_bytes @ 0..=IMAGE_SPAN_BYTES => {
                    (SpanState::Open(Arc::new(opened)), Ok(size_bytes))
                }
                _ => (
                    SpanState::Failed(Errno::FBIG),
                    Err(format!("image {} is larger than 64 TiB", name.image)),
                ),
            },
            Err(error) => (SpanState::Failed(error.errno), Err(self.text(error))),
        };
        replace(span, state);
        result
    }

    fn lock(&self, span: u32) -> Result<(), String> {
        let opened = self.opened(span)?;
        if opened.is_snapshot {
            return Ok(());
        }
        let refused = |owner: String| {
            format!("the image is locked by the client at {owner}: stop it, or let it unlock first")
        };
        let image = &opened.image;
        if let Some(owner) = self.other_owner(image).map_err(|error| self.text(error))? {
            return Err(refused(owner));
        }
        if let Err(error) = image.acquire_lock() {
            // Another client may just have taken it.
            return Err(match self.other_owner(image) {
                Ok(Some(owner)) => refused(owner),
                _ => self.text(error),
            });
        }
        opened.is_writable.store(true, Release);
        Ok(())
    }

    fn size_bytes(&self, span: u32) -> Result<u64, String> {
        let opened = self.opened(span)?;
        let info = opened.image.info().map_err(|error| self.text(error))?;
        opened.size_bytes.store(info.size_bytes, Relaxed);
        Ok(info.size_bytes)
    }

    fn close(&self, span: u32) {
        if let Ok(span) = self.span(span) {
            replace(span, SpanState::Failed(Errno::NODEV));
        }
    }
}
