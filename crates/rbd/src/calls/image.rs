//! An open image: its properties, its locks, its end. I/O is in [`super::io`].

use std::ffi::{c_int, c_void};
use std::mem::{self, MaybeUninit};
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Acquire};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

use rustix::io::Errno;

use super::{Pool, check, text_of, written_list, written_text};
use crate::error::{RbdError, errno};
use crate::image::{ImageInfo, ParentImage, feature};
use crate::library::{
    ConfigOption, ImageHandle, Library, LinkedImageSpec, RbdCompletion, SnapSpec, StatInfo,
};

/// How long a dropped image waits for its operations, and then for its end.
const DROP_LIMIT: Duration = Duration::from_secs(30);

/// An open image.
///
/// [`Image::close`] and drop wait for the operations in flight: let a thread do it that may wait,
/// never a reactor.
#[derive(Debug)]
pub struct Image {
    pub(super) pool: Arc<Pool>,
    pub(super) open: Arc<OpenImage>,
    /// As in errors.
    shown: String,
    has_write_cache: bool,
    closed: bool,
}

/// What an operation in flight needs of its image.
#[derive(Debug)]
pub(super) struct OpenImage {
    pub(super) library: Arc<Library>,
    /// Not closed while `in_flight` isn't zero.
    pub(super) handle: ImageHandle,
    pub(super) in_flight: AtomicUsize,
}

// SAFETY: librbd's calls on an image may come from any thread, several at once. `Image::finish`
// alone closes the handle, once nothing is in flight.
unsafe impl Send for OpenImage {}
// SAFETY: as above.
unsafe impl Sync for OpenImage {}

impl Image {
    pub(super) fn new(pool: &Arc<Pool>, handle: ImageHandle, name: &str) -> Self {
        let mut image = Self {
            pool: Arc::clone(pool),
            open: Arc::new(OpenImage {
                library: Arc::clone(&pool.client.library),
                handle,
                in_flight: AtomicUsize::new(0),
            }),
            shown: pool.shown(name),
            has_write_cache: true,
            closed: false,
        };
        image.has_write_cache = image.may_cache_writes();
        image
    }

    pub(super) fn failed(&self, doing: &'static str) -> impl Fn(Errno) -> RbdError {
        let what = self.shown.clone();
        move |errno| RbdError::new(doing, what.as_str(), errno)
    }

    /// Whether an ended write may be lost without a flush. Options of the image or its pool may
    /// turn librbd's cache on even if the client turned it off.
    pub fn has_write_cache(&self) -> bool {
        self.has_write_cache
    }

    fn may_cache_writes(&self) -> bool {
        let functions = &self.open.library.functions;
        // SAFETY: the array has room for `count` entries, of which the call writes the first.
        let listed = unsafe {
            written_list(|options: *mut ConfigOption, count| {
                let mut number = c_int::try_from(*count).unwrap_or(c_int::MAX);
                let result =
                    (functions.rbd_config_image_list)(self.open.handle, options, &mut number);
                *count = usize::try_from(number).unwrap_or(0);
                result
            })
        };
        let Ok(mut options) = listed else {
            return true;
        };
        let mut caches = false;
        for option in &options {
            // SAFETY: both are C strings until the list is freed below.
            let (name, value) = unsafe { (text_of(option.name), text_of(option.value)) };
            caches |= match name.as_str() {
                "rbd_cache" => value != "false",
                "rbd_persistent_cache_mode" => !matches!(value.as_str(), "disabled" | ""),
                _ => false,
            };
        }
        let count = c_int::try_from(options.len()).unwrap_or(0);
        // SAFETY: the list that librbd wrote is freed once.
        unsafe { (functions.rbd_config_image_list_cleanup)(options.as_mut_ptr(), count) };
        caches
    }

    /// The properties now.
    ///
    /// # Errors
    /// Ceph's; `ESHUTDOWN` if the client is blocklisted.
    pub fn info(&self) -> Result<ImageInfo, RbdError> {
        self.read_info().map_err(self.failed("examine"))
    }

    fn read_info(&self) -> Result<ImageInfo, Errno> {
        let functions = &self.open.library.functions;
        let handle = self.open.handle;
        let mut stat = MaybeUninit::<StatInfo>::zeroed();
        let mut features = 0;
        // SAFETY: the image is open; the places are valid and of the size given. All-zero bytes
        // are a valid `StatInfo`.
        let stat = unsafe {
            check((functions.rbd_stat)(
                handle,
                stat.as_mut_ptr(),
                size_of::<StatInfo>(),
            ))?;
            check((functions.rbd_get_features)(handle, &mut features))?;
            stat.assume_init()
        };
        // SAFETY: the buffer has the length given with it.
        let id =
            written_text(|text, length| unsafe { (functions.rbd_get_id)(handle, text, length) })?;
        Ok(ImageInfo {
            id,
            size_bytes: stat.size,
            object_bytes: stat.object_size,
            features,
            parent: self.parent()?,
        })
    }

    fn parent(&self) -> Result<Option<ParentImage>, Errno> {
        let functions = &self.open.library.functions;
        let mut image = MaybeUninit::<LinkedImageSpec>::zeroed();
        let mut snapshot = MaybeUninit::<SnapSpec>::zeroed();
        // SAFETY: the image is open, and the places are valid.
        let result = check(unsafe {
            (functions.rbd_get_parent)(self.open.handle, image.as_mut_ptr(), snapshot.as_mut_ptr())
        });
        if result == Err(Errno::NOENT) {
            return Ok(None);
        }
        result?;
        // SAFETY: the call filled both with C strings, which are freed once, after the copies.
        unsafe {
            let (mut image, mut snapshot) = (image.assume_init(), snapshot.assume_init());
            let parent = ParentImage {
                pool: text_of(image.pool_name),
                namespace: text_of(image.pool_namespace),
                image: text_of(image.image_name),
                snapshot: text_of(snapshot.name),
            };
            (functions.rbd_linked_image_spec_cleanup)(&mut image);
            (functions.rbd_snap_spec_cleanup)(&mut snapshot);
            Ok(Some(parent))
        }
    }

    /// Grows or shrinks the image. Shrinking loses the data beyond the new size.
    ///
    /// # Errors
    /// Ceph's; `EROFS` if it is open for reading only.
    pub fn resize(&self, size_bytes: u64) -> Result<(), RbdError> {
        // SAFETY: the image is open; the callback needs no argument.
        check(unsafe {
            (self.open.library.functions.rbd_resize2)(
                self.open.handle,
                size_bytes,
                true,
                ignore_progress,
                ptr::null_mut(),
            )
        })
        .map_err(self.failed("resize"))
    }

    /// Copies what a clone shares with its parent, and parts it from it. Takes as long as that.
    ///
    /// # Errors
    /// `EINVAL` if the image is no clone.
    pub fn flatten(&self) -> Result<(), RbdError> {
        // SAFETY: the image is open.
        check(unsafe { (self.open.library.functions.rbd_flatten)(self.open.handle) })
            .map_err(self.failed("flatten"))
    }

    /// Whether this client holds the exclusive lock.
    ///
    /// # Errors
    /// Ceph's.
    pub fn is_lock_owner(&self) -> Result<bool, RbdError> {
        let mut owner = 0;
        // SAFETY: the image is open, and the place is valid.
        check(unsafe {
            (self.open.library.functions.rbd_is_exclusive_lock_owner)(self.open.handle, &mut owner)
        })
        .map_err(self.failed("examine the lock of"))?;
        Ok(owner != 0)
    }

    /// Takes the exclusive lock, and keeps it from clients that ask for it. An image without that
    /// feature has no lock to take.
    ///
    /// # Errors
    /// `EBUSY` or `EROFS` if another client keeps it.
    pub fn acquire_lock(&self) -> Result<(), RbdError> {
        const EXCLUSIVE: c_int = 0;
        if self.info()?.features & feature::EXCLUSIVE_LOCK == 0 {
            return Ok(());
        }
        // SAFETY: the image is open.
        check(unsafe {
            (self.open.library.functions.rbd_lock_acquire)(self.open.handle, EXCLUSIVE)
        })
        .map_err(self.failed("lock"))
    }

    /// The addresses of the clients that hold the exclusive lock, as [`RadosClient::address`] has
    /// them. An image without that feature, or opened for reading only, shows none.
    ///
    /// [`RadosClient::address`]: super::RadosClient::address
    ///
    /// # Errors
    /// Ceph's.
    pub fn lock_owners(&self) -> Result<Vec<String>, RbdError> {
        let functions = &self.open.library.functions;
        let mut mode = 0;
        // SAFETY: the array has room for `count` entries, of which the call writes the first.
        let owners = unsafe {
            written_list(|owners, count| {
                (functions.rbd_lock_get_owners)(self.open.handle, &mut mode, owners, count)
            })
        };
        // Busy: an advisory lock has its place.
        if matches!(owners, Err(Errno::NOENT | Errno::BUSY | Errno::INVAL)) {
            return Ok(Vec::new());
        }
        let mut owners = owners.map_err(self.failed("examine the lock of"))?;
        // SAFETY: the entries are C strings until they are freed here, once.
        unsafe {
            let addresses = owners.iter().map(|owner| text_of(*owner)).collect();
            (functions.rbd_lock_get_owners_cleanup)(owners.as_mut_ptr(), owners.len());
            Ok(addresses)
        }
    }

    /// The addresses of clients with an advisory lock (`rbd lock add`), alive or dead.
    ///
    /// # Errors
    /// Ceph's.
    pub fn advisory_lockers(&self) -> Result<Vec<String>, RbdError> {
        let mut texts = [const { [0u8; 64 << 10] }; 3];
        let mut lengths = [texts[0].len(); 3];
        let mut tag = [0u8; 4096];
        let (mut tag_length, mut is_exclusive) = (tag.len(), 0);
        let [clients, cookies, addresses] = &mut texts;
        let [clients_length, cookies_length, addresses_length] = &mut lengths;
        // SAFETY: the image is open, and each buffer has the length given with it.
        let count = unsafe {
            (self.open.library.functions.rbd_list_lockers)(
                self.open.handle,
                &mut is_exclusive,
                tag.as_mut_ptr().cast(),
                &mut tag_length,
                clients.as_mut_ptr().cast(),
                clients_length,
                cookies.as_mut_ptr().cast(),
                cookies_length,
                addresses.as_mut_ptr().cast(),
                addresses_length,
            )
        };
        let failed = self.failed("examine the locks of");
        if count < 0 {
            return Err(failed(errno(count as i64)));
        }
        // Each text ends with NUL.
        let [cookies, addresses] = [cookies, addresses].map(|texts| texts.split(|byte| *byte == 0));
        // librbd's own locks are listed as they were at the last change of the header.
        let lockers = cookies.zip(addresses).take(count.unsigned_abs());
        let advisory = lockers.filter(|(cookie, _)| !cookie.starts_with(b"auto "));
        let shown = advisory.map(|(_, address)| String::from_utf8_lossy(address).into_owned());
        Ok(shown.collect())
    }

    /// The addresses of the clients that have the image open for writing. A client that died stays
    /// among them for about 30 s.
    ///
    /// # Errors
    /// Ceph's.
    pub fn watchers(&self) -> Result<Vec<String>, RbdError> {
        let functions = &self.open.library.functions;
        // SAFETY: the array has room for `count` entries, of which the call writes the first.
        let watchers = unsafe {
            written_list(|watchers, count| {
                (functions.rbd_watchers_list)(self.open.handle, watchers, count)
            })
        };
        let mut watchers = watchers.map_err(self.failed("examine the watchers of"))?;
        // SAFETY: the entries' texts are C strings until they are freed here, once.
        unsafe {
            let addresses = watchers
                .iter()
                .map(|watcher| text_of(watcher.address))
                .collect();
            (functions.rbd_watchers_list_cleanup)(watchers.as_mut_ptr(), watchers.len());
            Ok(addresses)
        }
    }

    /// Closes the image once its operations have ended. Waits for both, for `limit` each.
    ///
    /// # Errors
    /// `ETIMEDOUT`: then the image and its client stay in memory for good.
    pub fn close(mut self, limit: Duration) -> Result<(), RbdError> {
        self.finish(limit).map_err(self.failed("close"))
    }

    fn finish(&mut self, limit: Duration) -> Result<(), Errno> {
        if mem::replace(&mut self.closed, true) {
            return Ok(());
        }
        match self.wait_and_close(limit) {
            Ok(0..) => Ok(()),
            Ok(returned) => Err(errno(returned)),
            Err(still_open) => {
                mem::forget(Arc::clone(&self.pool)); // librbd still uses it
                Err(still_open)
            }
        }
    }

    /// The result of librbd's close; an error if the image is still open.
    fn wait_and_close(&self, limit: Duration) -> Result<i64, Errno> {
        let start = Instant::now();
        while self.open.in_flight.load(Acquire) > 0 {
            if start.elapsed() >= limit {
                return Err(Errno::TIMEDOUT);
            }
            thread::sleep(Duration::from_millis(1));
        }
        let functions = &self.open.library.functions;
        let (sender, receiver) = sync_channel(1);
        let argument = Box::into_raw(Box::new(CloseCall {
            library: Arc::clone(&self.open.library),
            sender,
        }));
        let mut completion = ptr::null_mut();
        // SAFETY: `closed` takes the argument over, once. Nothing is in flight, and the
        // image is being consumed or dropped, so no other call uses the handle.
        unsafe {
            check((functions.rbd_aio_create_completion)(
                argument.cast(),
                closed,
                &mut completion,
            ))?;
            check((functions.rbd_aio_close)(self.open.handle, completion))?;
        }
        receiver.recv_timeout(limit).map_err(|_| Errno::TIMEDOUT)
    }
}

impl Drop for Image {
    fn drop(&mut self) {
        // An error has no reader; an image that can't be closed stays open.
        let _ = self.finish(DROP_LIMIT);
    }
}

struct CloseCall {
    library: Arc<Library>,
    sender: SyncSender<i64>,
}

unsafe extern "C" fn closed(completion: RbdCompletion, argument: *mut c_void) {
    // SAFETY: the argument is the box that `wait_and_close` gave away, and this is the only call.
    let closing = unsafe { Box::from_raw(argument.cast::<CloseCall>()) };
    let functions = &closing.library.functions;
    // SAFETY: the completion has ended; it isn't used after its release.
    let result = unsafe {
        let result = (functions.rbd_aio_get_return_value)(completion);
        (functions.rbd_aio_release)(completion);
        result
    };
    // The receiver has gone if its wait passed the limit.
    let _ = closing.sender.try_send(result as i64);
}

extern "C" fn ignore_progress(_done: u64, _total: u64, _argument: *mut c_void) -> c_int {
    0
}
