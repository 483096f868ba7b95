//! The client as a device: operations to the image of their span, and the fence.
//!
//! **Fence.** A dead client's writes may still lie in a queue of an OSD. The cluster refuses them
//! once the client's address is on its blocklist. Reads end in the dead process's own memory.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::{Duration, Instant};

use forebay_rbd::{RadosClient, RbdError};
use rustix::io::Errno;

use super::images::SpanState;
use super::{IMAGE_SPAN_BYTES, MAX_IMAGES};
use crate::fence::{Fence, FenceError};
use crate::kind::{Backend, RemoteImages};
use crate::op::{Finish, Op, OpKind, Submitted};
use crate::ring::Ring;

/// Longer than any OSD keeps a request.
const BLOCKLISTED_FOR: Duration = Duration::from_secs(24 * 3600);

#[derive(Debug)]
pub(super) struct CephClient {
    pub(super) rados: Arc<RadosClient>,
    pub(super) address: String,
    predecessors: Mutex<Vec<String>>,
    is_blocklisted: AtomicBool,
    pub(super) spans: Box<[RwLock<SpanState>]>,
}

impl CephClient {
    pub(super) fn new(rados: Arc<RadosClient>, address: String) -> Self {
        Self {
            rados,
            address,
            predecessors: Mutex::default(),
            is_blocklisted: AtomicBool::new(false),
            spans: (0..MAX_IMAGES)
                .map(|_| RwLock::new(SpanState::Waits))
                .collect(),
        }
    }

    pub(super) fn predecessors(&self) -> MutexGuard<'_, Vec<String>> {
        self.predecessors
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn set_predecessors(&self, addresses: Vec<String>) {
        *self.predecessors() = addresses;
    }

    pub(super) fn is_blocklisted(&self) -> bool {
        self.is_blocklisted.load(Relaxed)
    }

    /// Notes whether an error is of the whole client.
    pub(super) fn noted(&self, errno: Errno) -> Errno {
        if errno == Errno::SHUTDOWN {
            self.is_blocklisted.store(true, Relaxed);
        }
        errno
    }

    fn failed(&self, doing: &'static str) -> impl Fn(RbdError) -> FenceError {
        move |error| {
            self.noted(error.errno);
            FenceError::Io {
                device: format!("the Ceph client {}", self.address),
                doing,
                source: std::io::Error::other(error),
            }
        }
    }
}

impl Backend for CephClient {
    fn submit(&self, ring: &mut Ring, op: &mut Op, user_data: u64) -> Submitted {
        if op.kind == OpKind::Flush {
            // Writes are durable when they end.
            return Submitted::Done(Ok(()));
        }
        if self.is_blocklisted() {
            // The next client may do it.
            return Submitted::NotReady;
        }
        let span = usize::try_from(op.offset_bytes / IMAGE_SPAN_BYTES).unwrap_or(usize::MAX);
        let Some(span) = self.spans.get(span) else {
            return Submitted::Done(Err(Errno::INVAL));
        };
        // A reactor waits for no lock: the state is just being replaced.
        let Ok(state) = span.try_read() else {
            return Submitted::RingFull;
        };
        match &*state {
            SpanState::Waits => Submitted::NotReady,
            SpanState::Failed(errno) => Submitted::Done(Err(*errno)),
            SpanState::Open(image) => image.submit(ring, op, user_data),
        }
    }

    fn finish(&self, op: Op, result: i32) -> Finish {
        match u64::try_from(result) {
            Ok(bytes) if bytes >= op.len_bytes => Finish::Done,
            // The image has become smaller. No local device gives this error.
            Ok(_) => Finish::Failed(Errno::RANGE),
            Err(_) => Finish::Failed(self.noted(Errno::from_raw_os_error(-result))),
        }
    }

    fn images(&self) -> Option<&dyn RemoteImages> {
        Some(self)
    }

    fn fence(&self) -> &dyn Fence {
        self
    }
}

impl Fence for CephClient {
    fn take(&self, _generation: u64) -> Result<(), FenceError> {
        // The daemon notes the address before it grants the first write.
        Ok(())
    }

    fn predecessors_gone(&self, _generation: u64) -> Result<bool, FenceError> {
        let predecessors = self.predecessors().clone();
        for address in &predecessors {
            let listed = self.rados.is_blocklisted(address);
            if !listed.map_err(self.failed("asking for the blocklist"))? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn wait_for_predecessors(
        &self,
        _generation: u64,
        _limit: Duration,
    ) -> Result<Duration, FenceError> {
        let begun = Instant::now();
        let predecessors = self.predecessors().clone();
        #[cfg(feature = "test-device")]
        if std::env::var_os("FOREBAY_TEST_NO_BLOCKLIST").is_some() {
            return Ok(begun.elapsed());
        }
        for address in &predecessors {
            let listed = self.rados.blocklist(address, BLOCKLISTED_FOR);
            listed.map_err(self.failed("putting an earlier client on the blocklist"))?;
        }
        if !predecessors.is_empty() {
            let waited = self.rados.wait_for_latest_map();
            waited.map_err(self.failed("waiting for the cluster's map"))?;
        }
        Ok(begun.elapsed())
    }
}
