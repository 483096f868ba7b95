//! The C interface of librados and librbd, as far as it is used: Ceph 16's, which newer releases
//! keep.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::fmt;
use std::ptr::NonNull;

/// A `rados_t`.
pub(crate) type RadosHandle = *mut c_void;
/// A `rados_ioctx_t`.
pub(crate) type PoolHandle = *mut c_void;
/// An `rbd_image_t`.
pub(crate) type ImageHandle = *mut c_void;
/// An `rbd_image_options_t`.
pub(crate) type OptionsHandle = *mut c_void;
/// An `rbd_completion_t`.
pub(crate) type RbdCompletion = *mut c_void;

type Callback = unsafe extern "C" fn(RbdCompletion, *mut c_void);
type UpdateCallback = unsafe extern "C" fn(*mut c_void);
type ProgressCallback = extern "C" fn(u64, u64, *mut c_void) -> c_int;

/// Numbers of `RBD_IMAGE_OPTION_...`.
pub(crate) mod option {
    use std::ffi::c_int;

    pub(crate) const FEATURES: c_int = 1;
    pub(crate) const ORDER: c_int = 2;
    pub(crate) const STRIPE_UNIT: c_int = 3;
    pub(crate) const STRIPE_COUNT: c_int = 4;
    pub(crate) const DATA_POOL: c_int = 10;
}

/// `rados_cluster_stat_t`.
#[repr(C)]
#[derive(Default)]
pub(crate) struct ClusterStat {
    pub(crate) kib: u64,
    pub(crate) kib_used: u64,
    pub(crate) kib_available: u64,
    pub(crate) objects: u64,
}

/// `rbd_image_info_t`.
#[repr(C)]
pub(crate) struct StatInfo {
    pub(crate) size: u64,
    pub(crate) object_size: u64,
    pub(crate) objects: u64,
    pub(crate) order: c_int,
    pub(crate) block_name_prefix: [c_char; 24],
    pub(crate) parent_pool: i64,
    pub(crate) parent_name: [c_char; 96],
}

/// `rbd_image_spec_t`.
#[repr(C)]
pub(crate) struct ImageSpec {
    pub(crate) id: *mut c_char,
    pub(crate) name: *mut c_char,
}

/// `rbd_linked_image_spec_t`.
#[repr(C)]
pub(crate) struct LinkedImageSpec {
    pub(crate) pool_id: i64,
    pub(crate) pool_name: *mut c_char,
    pub(crate) pool_namespace: *mut c_char,
    pub(crate) image_id: *mut c_char,
    pub(crate) image_name: *mut c_char,
    pub(crate) trash: bool,
}

/// `rbd_snap_spec_t`.
#[repr(C)]
pub(crate) struct SnapSpec {
    pub(crate) id: u64,
    pub(crate) namespace_type: c_int,
    pub(crate) name: *mut c_char,
}

/// `rbd_snap_info_t`.
#[repr(C)]
pub(crate) struct SnapInfo {
    pub(crate) id: u64,
    pub(crate) size: u64,
    pub(crate) name: *const c_char,
}

/// `rbd_image_watcher_t`.
#[repr(C)]
pub(crate) struct ImageWatcher {
    pub(crate) address: *mut c_char,
    pub(crate) id: i64,
    pub(crate) cookie: u64,
}

/// `rbd_config_option_t`.
#[repr(C)]
pub(crate) struct ConfigOption {
    pub(crate) name: *mut c_char,
    pub(crate) value: *mut c_char,
    pub(crate) source: c_int,
}

macro_rules! functions {
    (
        $($name:ident($($argument:ty),*) $(-> $result:ty)?;)*
        [$($other:ident($($other_argument:ty),*) $(-> $other_result:ty)?;)*]
    ) => {
        /// Each function by its name in C.
        pub(crate) struct Functions {
            $(pub(crate) $name: unsafe extern "C" fn($($argument),*) $(-> $result)?,)*
            $(pub(crate) $other: Option<unsafe extern "C" fn($($other_argument),*) $(-> $other_result)?>,)*
        }

        impl Functions {
            /// Finds all of them; the error is the name of a missing one.
            pub(super) fn load(
                find: impl Fn(&CStr) -> Option<NonNull<c_void>>,
            ) -> Result<Self, &'static str> {
                let find = |name: &'static str| {
                    CString::new(name).ok().and_then(|name| find(&name)).ok_or(name)
                };
                // SAFETY: a symbol of this name has this signature in all releases since Ceph 16.
                // Wrong if a later one changes a signature under the same name.
                unsafe {
                    Ok(Self {
                        $($name: std::mem::transmute::<
                            NonNull<c_void>,
                            unsafe extern "C" fn($($argument),*) $(-> $result)?
                        >(find(stringify!($name))?),)*
                        $($other: find(stringify!($other)).ok().map(|symbol| std::mem::transmute::<
                            NonNull<c_void>,
                            unsafe extern "C" fn($($other_argument),*) $(-> $other_result)?
                        >(symbol)),)*
                    })
                }
            }
        }
    };
}

functions! {
    rados_create2(*mut RadosHandle, *const c_char, *const c_char, u64) -> c_int;
    rados_conf_read_file(RadosHandle, *const c_char) -> c_int;
    rados_conf_set(RadosHandle, *const c_char, *const c_char) -> c_int;
    rados_connect(RadosHandle) -> c_int;
    rados_shutdown(RadosHandle);
    rados_getaddrs(RadosHandle, *mut *mut c_char) -> c_int;
    rados_get_instance_id(RadosHandle) -> u64;
    rados_cluster_fsid(RadosHandle, *mut c_char, usize) -> c_int;
    rados_cluster_stat(RadosHandle, *mut ClusterStat) -> c_int;
    rados_wait_for_latest_osdmap(RadosHandle) -> c_int;
    rados_mon_command(
        RadosHandle,
        *mut *const c_char,
        usize,
        *const c_char,
        usize,
        *mut *mut c_char,
        *mut usize,
        *mut *mut c_char,
        *mut usize
    ) -> c_int;
    rados_buffer_free(*mut c_char);
    rados_ioctx_create(RadosHandle, *const c_char, *mut PoolHandle) -> c_int;
    rados_ioctx_set_namespace(PoolHandle, *const c_char);
    rados_ioctx_destroy(PoolHandle);
    rados_set_pool_full_try(PoolHandle);

    rbd_image_options_create(*mut OptionsHandle);
    rbd_image_options_destroy(OptionsHandle);
    rbd_image_options_set_uint64(OptionsHandle, c_int, u64) -> c_int;
    rbd_image_options_set_string(OptionsHandle, c_int, *const c_char) -> c_int;
    rbd_list2(PoolHandle, *mut ImageSpec, *mut usize) -> c_int;
    rbd_image_spec_list_cleanup(*mut ImageSpec, usize);
    rbd_create4(PoolHandle, *const c_char, u64, OptionsHandle) -> c_int;
    rbd_clone3(
        PoolHandle,
        *const c_char,
        *const c_char,
        PoolHandle,
        *const c_char,
        OptionsHandle
    ) -> c_int;
    rbd_remove(PoolHandle, *const c_char) -> c_int;
    rbd_open(PoolHandle, *const c_char, *mut ImageHandle, *const c_char) -> c_int;
    rbd_open_read_only(PoolHandle, *const c_char, *mut ImageHandle, *const c_char) -> c_int;
    rbd_aio_close(ImageHandle, RbdCompletion) -> c_int;
    rbd_stat(ImageHandle, *mut StatInfo, usize) -> c_int;
    rbd_get_id(ImageHandle, *mut c_char, usize) -> c_int;
    rbd_get_features(ImageHandle, *mut u64) -> c_int;
    rbd_get_parent(ImageHandle, *mut LinkedImageSpec, *mut SnapSpec) -> c_int;
    rbd_linked_image_spec_cleanup(*mut LinkedImageSpec);
    rbd_snap_spec_cleanup(*mut SnapSpec);
    rbd_config_image_list(ImageHandle, *mut ConfigOption, *mut c_int) -> c_int;
    rbd_config_image_list_cleanup(*mut ConfigOption, c_int);
    rbd_resize2(ImageHandle, u64, bool, ProgressCallback, *mut c_void) -> c_int;
    rbd_flatten(ImageHandle) -> c_int;
    rbd_is_exclusive_lock_owner(ImageHandle, *mut c_int) -> c_int;
    rbd_lock_acquire(ImageHandle, c_int) -> c_int;
    rbd_lock_get_owners(ImageHandle, *mut c_int, *mut *mut c_char, *mut usize) -> c_int;
    rbd_lock_get_owners_cleanup(*mut *mut c_char, usize);
    rbd_list_lockers(
        ImageHandle,
        *mut c_int,
        *mut c_char,
        *mut usize,
        *mut c_char,
        *mut usize,
        *mut c_char,
        *mut usize,
        *mut c_char,
        *mut usize
    ) -> isize;
    rbd_watchers_list(ImageHandle, *mut ImageWatcher, *mut usize) -> c_int;
    rbd_watchers_list_cleanup(*mut ImageWatcher, usize);
    rbd_snap_list(ImageHandle, *mut SnapInfo, *mut c_int) -> c_int;
    rbd_snap_list_end(*mut SnapInfo);
    rbd_snap_create(ImageHandle, *const c_char) -> c_int;
    rbd_snap_remove(ImageHandle, *const c_char) -> c_int;
    rbd_snap_rollback(ImageHandle, *const c_char) -> c_int;
    rbd_snap_protect(ImageHandle, *const c_char) -> c_int;
    rbd_snap_unprotect(ImageHandle, *const c_char) -> c_int;
    rbd_snap_is_protected(ImageHandle, *const c_char, *mut c_int) -> c_int;
    rbd_update_watch(ImageHandle, *mut u64, UpdateCallback, *mut c_void) -> c_int;
    rbd_update_unwatch(ImageHandle, u64) -> c_int;

    rbd_aio_create_completion(*mut c_void, Callback, *mut RbdCompletion) -> c_int;
    rbd_aio_get_return_value(RbdCompletion) -> isize;
    rbd_aio_release(RbdCompletion);
    rbd_aio_read(ImageHandle, u64, usize, *mut c_char, RbdCompletion) -> c_int;
    rbd_aio_write(ImageHandle, u64, usize, *const c_char, RbdCompletion) -> c_int;
    rbd_aio_discard(ImageHandle, u64, u64, RbdCompletion) -> c_int;
    rbd_aio_write_zeroes(ImageHandle, u64, usize, RbdCompletion, c_int, c_int) -> c_int;
    rbd_aio_flush(ImageHandle, RbdCompletion) -> c_int;

    // Those that a release may lack.
    [
        rados_blocklist_add(RadosHandle, *mut c_char, u32) -> c_int;
        rados_blacklist_add(RadosHandle, *mut c_char, u32) -> c_int;
    ]
}

impl fmt::Debug for Functions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Functions").finish_non_exhaustive()
    }
}
