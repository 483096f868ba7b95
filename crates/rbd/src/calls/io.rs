//! Asynchronous I/O.
//!
//! **Design.** An operation in flight is a box: the caller's buffer, and what librbd's callback
//! needs. [`Image::submit`] gives the box to librbd, the callback gives it to [`Completions`].
//! Nothing is allocated beyond librbd's own structures.
//!
//! **Durability.** An OSD acknowledges a write once it is durable on all replicas, and librbd ends
//! it then unless a cache is on. A write with `force_unit_access` through a cache is followed by a
//! flush.

use std::ffi::c_void;
use std::fmt;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicPtr, Ordering::*};

use rustix::io::Errno;

use super::image::OpenImage;
use super::{Completions, Ended, Image};
use crate::error::errno;
use crate::library::RbdCompletion;

/// Memory of an operation. It is reused without allocation.
pub struct Buffer(Box<Operation>);

pub(super) struct Operation {
    bytes: Box<[u8]>,
    /// In the list of [`Completions`].
    pub(super) next: AtomicPtr<Operation>,
    token: u64,
    /// The request's length; then its result.
    length: usize,
    error: Option<Errno>,
    reads: bool,
    flush_after: bool,
    /// Only in flight.
    in_flight: Option<InFlight>,
    #[cfg(test)]
    witness: Option<Arc<()>>,
}

struct InFlight {
    image: Arc<OpenImage>,
    completions: Arc<Completions>,
}

impl Buffer {
    /// Zeroed memory of `capacity` bytes. Flushes, discards and zeroes need none.
    pub fn new(capacity: usize) -> Self {
        Self(Box::new(Operation {
            bytes: vec![0; capacity].into_boxed_slice(),
            next: AtomicPtr::new(ptr::null_mut()),
            token: 0,
            length: 0,
            error: None,
            reads: false,
            flush_after: false,
            in_flight: None,
            #[cfg(test)]
            witness: None,
        }))
    }

    /// All of its memory. A read fills the first bytes, and leaves the others as they were.
    pub fn bytes(&self) -> &[u8] {
        &self.0.bytes
    }

    /// All of its memory.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.0.bytes
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Not the bytes: they are a tenant's.
        f.debug_struct("Buffer")
            .field("capacity", &self.0.bytes.len())
            .finish_non_exhaustive()
    }
}

impl Operation {
    pub(super) fn into_ended(self: Box<Self>) -> Ended {
        Ended {
            token: self.token,
            result: match self.error {
                Some(error) => Err(error),
                None => Ok(self.length),
            },
            buffer: Buffer(self),
        }
    }

    /// Frees the image for its end, and gives the operation to its consumer.
    fn end(mut self: Box<Self>) {
        let Some(InFlight { image, completions }) = self.in_flight.take() else {
            return;
        };
        completions.push(self);
        image.in_flight.fetch_sub(1, Release);
    }
}

/// An operation on an image. Offsets and lengths are in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ImageRequest {
    /// Reads into the buffer's first bytes.
    Read {
        /// Where.
        offset: u64,
        /// How much; at most the buffer's capacity.
        length: usize,
    },
    /// Writes the buffer's first bytes. librbd ignores those beyond the image's end.
    Write {
        /// Where.
        offset: u64,
        /// How much; at most the buffer's capacity.
        length: usize,
        /// Whether its end means that it is durable even if librbd has a cache.
        force_unit_access: bool,
    },
    /// Frees space. Parts smaller than `rbd_discard_granularity_bytes` (64 KiB) keep their data.
    Discard {
        /// Where.
        offset: u64,
        /// How much.
        length: usize,
    },
    /// Makes a range read as zeros, and frees its space where possible.
    WriteZeroes {
        /// Where.
        offset: u64,
        /// How much.
        length: usize,
        /// As of a write.
        force_unit_access: bool,
    },
    /// Makes all writes that ended before durable.
    Flush,
}

/// An operation that did not begin, with its buffer.
#[derive(Debug)]
pub struct RefusedRequest {
    /// For the next operation.
    pub buffer: Buffer,
    /// `EINVAL` if the request is longer than the buffer.
    pub errno: Errno,
}

impl Image {
    /// Begins an operation. It ends in `completions`, with `token`, from a thread of librbd's.
    ///
    /// Never waits. Operations in flight have no order among them.
    ///
    /// # Errors
    /// The request is longer than the buffer, or librbd refuses it.
    pub fn submit(
        &self,
        request: ImageRequest,
        buffer: Buffer,
        token: u64,
        completions: &Arc<Completions>,
    ) -> Result<(), RefusedRequest> {
        let Buffer(mut operation) = buffer;
        let capacity = operation.bytes.len();
        let (length, flush_after) = match request {
            ImageRequest::Read { length, .. } => (length, false),
            ImageRequest::Write {
                length,
                force_unit_access,
                ..
            } => (length, force_unit_access),
            // These don't touch the buffer.
            ImageRequest::Discard { length, .. } => (length, false),
            ImageRequest::WriteZeroes {
                length,
                force_unit_access,
                ..
            } => (length, force_unit_access),
            ImageRequest::Flush => (0, false),
        };
        if matches!(
            request,
            ImageRequest::Read { .. } | ImageRequest::Write { .. }
        ) && length > capacity
        {
            return Err(RefusedRequest {
                buffer: Buffer(operation),
                errno: Errno::INVAL,
            });
        }
        operation.token = token;
        operation.length = length;
        operation.error = None;
        operation.reads = matches!(request, ImageRequest::Read { .. });
        operation.flush_after = flush_after && self.has_write_cache();
        operation.in_flight = Some(InFlight {
            image: Arc::clone(&self.open),
            completions: Arc::clone(completions),
        });
        self.open.in_flight.fetch_add(1, Relaxed);
        let operation = Box::into_raw(operation);
        // SAFETY: the box is ours to give away, and its bytes are as long as the request.
        let begun = unsafe { self.open.begin(request, operation) };
        begun.map_err(|errno| {
            // SAFETY: librbd refused the operation, so it gives the box back.
            let mut operation = unsafe { Box::from_raw(operation) };
            operation.in_flight = None;
            self.open.in_flight.fetch_sub(1, Release);
            RefusedRequest {
                buffer: Buffer(operation),
                errno,
            }
        })
    }
}

impl OpenImage {
    /// Gives an operation to librbd, which calls [`ended`] once; after an error, never.
    ///
    /// # Safety
    /// `operation` is a box given away, with `in_flight` set and bytes for the request.
    unsafe fn begin(&self, request: ImageRequest, operation: *mut Operation) -> Result<(), Errno> {
        let functions = &self.library.functions;
        let mut completion: RbdCompletion = ptr::null_mut();
        // SAFETY: the place is valid; `operation` is valid until `ended` takes it.
        let created = unsafe {
            (functions.rbd_aio_create_completion)(operation.cast(), ended, &mut completion)
        };
        if created < 0 {
            return Err(errno(created.into()));
        }
        // SAFETY: the image is open, since `in_flight` isn't zero. librbd uses the bytes until the
        // callback only: it delays that until it has dropped all references to a write's data.
        // Nothing here touches the operation once a call below has begun it.
        let begun = unsafe {
            let bytes = (*operation).bytes.as_mut_ptr().cast();
            let image = self.handle;
            match request {
                ImageRequest::Read { offset, length } => {
                    (functions.rbd_aio_read)(image, offset, length, bytes, completion)
                }
                ImageRequest::Write { offset, length, .. } => {
                    (functions.rbd_aio_write)(image, offset, length, bytes, completion)
                }
                ImageRequest::Discard { offset, length } => {
                    (functions.rbd_aio_discard)(image, offset, length as u64, completion)
                }
                ImageRequest::WriteZeroes { offset, length, .. } => {
                    (functions.rbd_aio_write_zeroes)(image, offset, length, completion, 0, 0)
                }
                ImageRequest::Flush => (functions.rbd_aio_flush)(image, completion),
            }
        };
        if begun < 0 {
            // SAFETY: an error means that librbd began nothing, so it does not use the completion.
            unsafe { (functions.rbd_aio_release)(completion) };
            return Err(errno(begun.into()));
        }
        Ok(())
    }
}

/// librbd's callback. A panic in it would abort the process, as its ABI can't unwind.
unsafe extern "C" fn ended(completion: RbdCompletion, argument: *mut c_void) {
    // SAFETY: the argument is the box that `submit` gave away. librbd calls once for each begun
    // operation, after its last access to the bytes.
    let mut operation = unsafe { Box::from_raw(argument.cast::<Operation>()) };
    let Some(InFlight { image, .. }) = &operation.in_flight else {
        return;
    };
    let functions = &image.library.functions;
    // SAFETY: the completion has ended; it isn't used after its release.
    let result = unsafe {
        let result = (functions.rbd_aio_get_return_value)(completion);
        (functions.rbd_aio_release)(completion);
        result
    };
    if result < 0 {
        operation.error = Some(errno(result as i64));
    } else if operation.flush_after {
        operation.flush_after = false;
        let image = Arc::clone(image);
        let operation = Box::into_raw(operation);
        // SAFETY: the box is given away again, and a flush has no bytes.
        if let Err(errno) = unsafe { image.begin(ImageRequest::Flush, operation) } {
            // SAFETY: librbd refused it, so it gives the box back.
            let mut operation = unsafe { Box::from_raw(operation) };
            operation.error = Some(errno);
            operation.end();
        }
        return;
    } else if operation.reads {
        operation.length = operation.length.min(result.unsigned_abs());
    }
    operation.end();
}

#[cfg(any(test, feature = "test-device"))]
impl Buffer {
    pub(super) fn into_ended_operation(
        self,
        token: u64,
        result: Result<usize, Errno>,
    ) -> Box<Operation> {
        let Self(mut operation) = self;
        operation.token = token;
        operation.length = result.unwrap_or(0);
        operation.error = result.err();
        operation
    }
}

#[cfg(test)]
impl Operation {
    pub(super) fn ended(token: u64, result: Result<usize, Errno>) -> Box<Self> {
        Buffer::new(0).into_ended_operation(token, result)
    }

    pub(super) fn ended_with_witness(token: u64, witness: &Arc<()>) -> Box<Self> {
        let mut operation = Self::ended(token, Ok(0));
        operation.witness = Some(Arc::clone(witness));
        operation
    }
}
