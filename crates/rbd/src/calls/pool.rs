//! A namespace of a pool: its images by name.

use std::ffi::CString;
use std::ptr;
use std::sync::Arc;

use rustix::io::Errno;

use super::{Image, RadosClient, c_string, check, text_of, written_list};
use crate::error::RbdError;
use crate::image::{ImageOptions, OpenMode};
use crate::library::{OptionsHandle, PoolHandle, RadosHandle, option};

/// A pool with a namespace.
#[derive(Debug)]
pub struct Pool {
    pub(super) client: Arc<RadosClient>,
    pub(super) handle: PoolHandle,
    /// `CLUSTER/POOL[/NAMESPACE]`.
    shown: String,
}

// SAFETY: the handle's settings change only in `open`; all other calls may come from any thread,
// several at once. It is destroyed only by `drop`.
unsafe impl Send for Pool {}
// SAFETY: as above.
unsafe impl Sync for Pool {}

impl Pool {
    pub(super) fn open(
        client: &Arc<RadosClient>,
        rados: RadosHandle,
        name: &str,
        namespace: Option<&str>,
    ) -> Result<Arc<Self>, RbdError> {
        let functions = &client.library.functions;
        let mut shown = format!("{}/{name}", client.cluster);
        if let Some(namespace) = namespace {
            shown = format!("{shown}/{namespace}");
        }
        let failed = |errno| RbdError::new("open", format!("pool {shown}"), errno);
        let name = c_string(name).map_err(failed)?;
        let namespace = namespace.map(c_string).transpose().map_err(failed)?;
        let mut handle = ptr::null_mut();
        // SAFETY: the client is connected; the name and the handle's place are valid.
        check(unsafe { (functions.rados_ioctx_create)(rados, name.as_ptr(), &mut handle) })
            .map_err(failed)?;
        if let Some(namespace) = namespace {
            // SAFETY: no other thread has the handle yet; the library copies the text.
            unsafe { (functions.rados_ioctx_set_namespace)(handle, namespace.as_ptr()) };
        }
        // SAFETY: as above.
        unsafe { (functions.rados_set_pool_full_try)(handle) };
        Ok(Arc::new(Self {
            client: Arc::clone(client),
            handle,
            shown,
        }))
    }

    pub(super) fn shown(&self, image: &str) -> String {
        format!("image {}/{image}", self.shown)
    }

    fn failed(&self, doing: &'static str, image: &str) -> impl Fn(Errno) -> RbdError {
        let what = self.shown(image);
        move |errno| RbdError::new(doing, what.as_str(), errno)
    }

    /// The names of all images.
    ///
    /// # Errors
    /// Ceph's; `ERANGE` for more than a million images.
    pub fn images(&self) -> Result<Vec<String>, RbdError> {
        let functions = &self.client.library.functions;
        // SAFETY: the array has room for `count` entries, of which the call writes the first.
        let mut specs = unsafe {
            written_list(|specs, count| (functions.rbd_list2)(self.handle, specs, count))
        }
        .map_err(|errno| RbdError::new("list images of", format!("pool {}", self.shown), errno))?;
        // SAFETY: the entries' texts are C strings until they are freed here, once.
        unsafe {
            let names = specs.iter().map(|spec| text_of(spec.name)).collect();
            (functions.rbd_image_spec_list_cleanup)(specs.as_mut_ptr(), specs.len());
            Ok(names)
        }
    }

    /// Creates an image.
    ///
    /// # Errors
    /// `EEXIST` if the name is taken; `EINVAL` for options that don't go together.
    pub fn create(&self, name: &str, size: u64, options: &ImageOptions) -> Result<(), RbdError> {
        let failed = self.failed("create", name);
        let functions = &self.client.library.functions;
        let options = CreateOptions::new(&self.client, options).map_err(&failed)?;
        let name = c_string(name).map_err(&failed)?;
        // SAFETY: handles and name are valid for the call.
        check(unsafe { (functions.rbd_create4)(self.handle, name.as_ptr(), size, options.handle) })
            .map_err(failed)
    }

    /// Creates an image here as a clone of another's snapshot.
    ///
    /// # Errors
    /// `EEXIST` if the name is taken; `EINVAL` if the cluster wants the snapshot protected first.
    pub fn create_clone(
        &self,
        name: &str,
        parent: &Pool,
        parent_image: &str,
        snapshot: &str,
        options: &ImageOptions,
    ) -> Result<(), RbdError> {
        let failed = self.failed("create clone", name);
        let functions = &self.client.library.functions;
        let options = CreateOptions::new(&self.client, options).map_err(&failed)?;
        let [name, parent_image, snapshot] =
            [name, parent_image, snapshot].map(|text| c_string(text).map_err(&failed));
        let (name, parent_image, snapshot) = (name?, parent_image?, snapshot?);
        // SAFETY: handles and names are valid for the call.
        check(unsafe {
            (functions.rbd_clone3)(
                parent.handle,
                parent_image.as_ptr(),
                snapshot.as_ptr(),
                self.handle,
                name.as_ptr(),
                options.handle,
            )
        })
        .map_err(failed)
    }

    /// Removes an image.
    ///
    /// # Errors
    /// `ENOTEMPTY` while it has snapshots; `EBUSY` while a client has it open, and up to 30 s
    /// after one died.
    pub fn remove(&self, name: &str) -> Result<(), RbdError> {
        let failed = self.failed("remove", name);
        let name = c_string(name).map_err(&failed)?;
        // SAFETY: handle and name are valid for the call.
        check(unsafe { (self.client.library.functions.rbd_remove)(self.handle, name.as_ptr()) })
            .map_err(failed)
    }

    /// Opens an image.
    ///
    /// # Errors
    /// `ENOENT` without such an image or snapshot.
    pub fn image(self: &Arc<Self>, name: &str, mode: OpenMode<'_>) -> Result<Image, RbdError> {
        let failed = self.failed("open", name);
        let functions = &self.client.library.functions;
        let c_name = c_string(name).map_err(&failed)?;
        let (open, snapshot) = match mode {
            OpenMode::ReadWrite => (functions.rbd_open, None),
            OpenMode::ReadOnly => (functions.rbd_open_read_only, None),
            OpenMode::Snapshot(snapshot) => (functions.rbd_open_read_only, Some(snapshot)),
        };
        let snapshot: Option<CString> = snapshot.map(c_string).transpose().map_err(&failed)?;
        let snapshot = snapshot
            .as_ref()
            .map_or(ptr::null(), |snapshot| snapshot.as_ptr());
        let mut image = ptr::null_mut();
        // SAFETY: handle, names (or null) and the place for the image are valid.
        check(unsafe { open(self.handle, c_name.as_ptr(), &mut image, snapshot) })
            .map_err(failed)?;
        Ok(Image::new(self, image, name))
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        // SAFETY: images hold the pool, so they are closed. The handle isn't used again.
        unsafe { (self.client.library.functions.rados_ioctx_destroy)(self.handle) };
    }
}

/// CreateOptions in librbd's form.
struct CreateOptions<'a> {
    client: &'a RadosClient,
    handle: OptionsHandle,
}

impl<'a> CreateOptions<'a> {
    fn new(client: &'a RadosClient, options: &ImageOptions) -> Result<Self, Errno> {
        let functions = &client.library.functions;
        let mut handle = ptr::null_mut();
        // SAFETY: the place is valid; the handle is destroyed by `drop`.
        unsafe { (functions.rbd_image_options_create)(&mut handle) };
        let made = Self { client, handle };
        let (unit, count) = options.stripe.unzip();
        let numbers = [
            (option::FEATURES, options.features),
            (option::ORDER, options.order.map(u64::from)),
            (option::STRIPE_UNIT, unit),
            (option::STRIPE_COUNT, count),
        ];
        for (name, value) in numbers {
            let Some(value) = value else { continue };
            // SAFETY: the handle is valid.
            check(unsafe { (functions.rbd_image_options_set_uint64)(handle, name, value) })?;
        }
        if let Some(pool) = &options.data_pool {
            let pool = c_string(pool)?;
            // SAFETY: the handle is valid; the library copies the text.
            check(unsafe {
                (functions.rbd_image_options_set_string)(handle, option::DATA_POOL, pool.as_ptr())
            })?;
        }
        Ok(made)
    }
}

impl Drop for CreateOptions<'_> {
    fn drop(&mut self) {
        // SAFETY: the handle isn't used again.
        unsafe { (self.client.library.functions.rbd_image_options_destroy)(self.handle) };
    }
}
