//! A session with a cluster.

use std::ffi::{CString, c_char};
use std::os::unix::ffi::OsStrExt;
use std::ptr;
use std::sync::Arc;
use std::time::Duration;

use rustix::io::Errno;

use super::{Pool, c_string, check, text_of, written_text};
use crate::config::{ClientConfig, ClusterUsage};
use crate::error::{CONFIGURE, CONNECT, RbdError};
use crate::library::{ClusterStat, Library, RadosHandle};

/// A RADOS client. Dropping it waits for its session's end.
#[derive(Debug)]
pub struct RadosClient {
    pub(super) library: Arc<Library>,
    rados: RadosHandle,
    /// For errors.
    pub(super) cluster: String,
}

// SAFETY: librados' calls may come from any thread, several at once. Its handle is shut down only
// by `drop`, when no reference exists.
unsafe impl Send for RadosClient {}
// SAFETY: as above.
unsafe impl Sync for RadosClient {}

impl RadosClient {
    /// Connects to the cluster. Waits for `config.monitor_limit` at most.
    ///
    /// # Errors
    /// The configuration is wrong, no monitor answers, or the cluster refuses the user.
    pub fn connect(library: &Arc<Library>, config: &ClientConfig) -> Result<Arc<Self>, RbdError> {
        let file = match &config.file {
            Some(file) => format!(" with {}", file.display()),
            None => String::new(),
        };
        let what = format!("cluster {} as client.{}{file}", config.cluster, config.user);
        let failed = |errno| RbdError::new(CONNECT, what.as_str(), errno);
        let client = Self::create(library, config).map_err(failed)?;
        client.configure(config)?;
        // SAFETY: the handle is not connected yet.
        check(unsafe { (library.functions.rados_connect)(client.rados) }).map_err(failed)?;
        Ok(Arc::new(client))
    }

    fn create(library: &Arc<Library>, config: &ClientConfig) -> Result<Self, Errno> {
        let cluster = c_string(&config.cluster)?;
        let user = c_string(&format!("client.{}", config.user))?;
        let mut rados = ptr::null_mut();
        // SAFETY: the strings and the handle's place are valid for the call.
        check(unsafe {
            (library.functions.rados_create2)(&mut rados, cluster.as_ptr(), user.as_ptr(), 0)
        })?;
        Ok(Self {
            library: Arc::clone(library),
            rados,
            cluster: config.cluster.clone(),
        })
    }

    fn configure(&self, config: &ClientConfig) -> Result<(), RbdError> {
        let shown = match &config.file {
            Some(file) => format!("the client with {}", file.display()),
            None => "the client with Ceph's configuration file".to_owned(),
        };
        let failed = |errno| RbdError::new(CONFIGURE, shown.as_str(), errno);
        let file = config
            .file
            .as_ref()
            .map(|file| CString::new(file.as_os_str().as_bytes()));
        let file = file.transpose().map_err(|_| failed(Errno::INVAL))?;
        let file = file.as_ref().map_or(ptr::null(), |file| file.as_ptr());
        // SAFETY: the path is null or a C string, and nothing else uses the handle yet.
        check(unsafe { (self.library.functions.rados_conf_read_file)(self.rados, file) })
            .map_err(failed)?;
        if let Some(keyring) = &config.keyring {
            self.set("keyring", keyring.as_os_str().as_bytes())?;
        }
        let monitor = seconds(config.monitor_limit).max(1).to_string();
        self.set("client_mount_timeout", monitor.as_bytes())?;
        self.set("rados_mon_op_timeout", monitor.as_bytes())?;
        let osd = seconds(config.osd_limit).to_string();
        self.set("rados_osd_op_timeout", osd.as_bytes())?;
        for (name, value) in &config.options {
            self.set(name, value.as_bytes())?;
        }
        Ok(())
    }

    fn set(&self, name: &str, value: &[u8]) -> Result<(), RbdError> {
        let what = format!("option {name} of the client");
        let failed = |errno| RbdError::new(CONFIGURE, what.as_str(), errno);
        if name == "key" {
            return Err(failed(Errno::PERM));
        }
        let name = c_string(name).map_err(failed)?;
        let value = CString::new(value).map_err(|_| failed(Errno::INVAL))?;
        // SAFETY: C strings, and nothing else uses the handle before it connects.
        check(unsafe {
            (self.library.functions.rados_conf_set)(self.rados, name.as_ptr(), value.as_ptr())
        })
        .map_err(failed)
    }

    pub(super) fn failed(&self, doing: &'static str) -> impl Fn(Errno) -> RbdError {
        let what = format!("cluster {}", self.cluster);
        move |errno| RbdError::new(doing, what.as_str(), errno)
    }

    /// The address that a blocklist names this client by, as in `10.0.0.1:0/1234567`.
    ///
    /// # Errors
    /// Ceph's.
    pub fn address(&self) -> Result<String, RbdError> {
        let functions = &self.library.functions;
        let mut address = ptr::null_mut();
        // SAFETY: the client is connected, and the place is valid.
        check(unsafe { (functions.rados_getaddrs)(self.rados, &mut address) })
            .map_err(self.failed("ask for the client's address at"))?;
        // SAFETY: a C string of ours to free; it isn't used afterwards.
        unsafe {
            let text = text_of(address);
            (functions.rados_buffer_free)(address);
            Ok(text)
        }
    }

    /// The number that the cluster gave this session, as in `client.4123`.
    pub fn instance_id(&self) -> u64 {
        // SAFETY: the client is connected.
        unsafe { (self.library.functions.rados_get_instance_id)(self.rados) }
    }

    /// The cluster's id.
    ///
    /// # Errors
    /// Ceph's.
    pub fn cluster_id(&self) -> Result<String, RbdError> {
        // SAFETY: the buffer has the length given with it.
        written_text(|text, length| unsafe {
            (self.library.functions.rados_cluster_fsid)(self.rados, text, length)
        })
        .map_err(self.failed("ask for the id of"))
    }

    /// The cluster's space.
    ///
    /// # Errors
    /// No monitor answers, or a capability is missing.
    pub fn usage(&self) -> Result<ClusterUsage, RbdError> {
        let mut stat = ClusterStat::default();
        // SAFETY: `stat` is valid for writing.
        check(unsafe { (self.library.functions.rados_cluster_stat)(self.rados, &mut stat) })
            .map_err(self.failed("ask for the space of"))?;
        Ok(ClusterUsage {
            total_bytes: stat.kib.saturating_mul(1024),
            used_bytes: stat.kib_used.saturating_mul(1024),
        })
    }

    /// Has the cluster refuse all I/O of the client at `address` from now on, for `period`.
    ///
    /// OSDs learn of it before they next serve a client that knows the new map: call
    /// [`RadosClient::wait_for_latest_map`] before the first write that the other must not overtake.
    ///
    /// # Errors
    /// `EINVAL` for text that is no address; a capability is missing.
    pub fn blocklist(&self, address: &str, period: Duration) -> Result<(), RbdError> {
        let failed = self.failed("blocklist a client of");
        let functions = &self.library.functions;
        let add = functions
            .rados_blocklist_add
            .or(functions.rados_blacklist_add);
        let add = add.ok_or(Errno::NOSYS).map_err(&failed)?;
        let address = c_string(address).map_err(&failed)?.into_raw();
        let period = u32::try_from(seconds(period)).unwrap_or(u32::MAX);
        // SAFETY: the text is ours and mutable, as the signature wants; it is freed once.
        let returned = unsafe {
            let returned = add(self.rados, address, period);
            drop(CString::from_raw(address));
            returned
        };
        check(returned).map_err(failed)
    }

    /// Whether the client at `address` is blocklisted.
    ///
    /// # Errors
    /// No monitor answers, or a capability is missing.
    pub fn is_blocklisted(&self, address: &str) -> Result<bool, RbdError> {
        let list = self
            .monitor_command(c"{\"prefix\": \"osd blocklist ls\", \"format\": \"json\"}")
            .map_err(self.failed("ask for the blocklist of"))?;
        Ok(list.contains(&format!("\"{address}\"")))
    }

    fn monitor_command(&self, command: &std::ffi::CStr) -> Result<String, Errno> {
        let functions = &self.library.functions;
        let mut commands = [command.as_ptr()];
        let mut answer: *mut c_char = ptr::null_mut();
        let mut length = 0;
        // SAFETY: one command; no input and no status text are wanted; the places are valid.
        check(unsafe {
            (functions.rados_mon_command)(
                self.rados,
                commands.as_mut_ptr(),
                commands.len(),
                ptr::null(),
                0,
                &mut answer,
                &mut length,
                ptr::null_mut(),
                ptr::null_mut(),
            )
        })?;
        if answer.is_null() {
            return Ok(String::new());
        }
        // SAFETY: librados allocated `length` bytes for us; they are freed once, after the copy.
        unsafe {
            let bytes = std::slice::from_raw_parts(answer.cast::<u8>(), length);
            let text = String::from_utf8_lossy(bytes).into_owned();
            (functions.rados_buffer_free)(answer);
            Ok(text)
        }
    }

    /// Waits until this client knows the cluster's newest map.
    ///
    /// # Errors
    /// No monitor answers.
    pub fn wait_for_latest_map(&self) -> Result<(), RbdError> {
        // SAFETY: the client is connected.
        check(unsafe { (self.library.functions.rados_wait_for_latest_osdmap)(self.rados) })
            .map_err(self.failed("wait for the map of"))
    }

    /// The pool `name`, with `namespace` or its default one.
    ///
    /// A write to a full cluster or pool ends with `ENOSPC` or `EDQUOT`. Ceph's default is to let it
    /// wait until there is room.
    ///
    /// # Errors
    /// `ENOENT` for an unknown pool. A namespace is not checked.
    pub fn pool(
        self: &Arc<Self>,
        name: &str,
        namespace: Option<&str>,
    ) -> Result<Arc<Pool>, RbdError> {
        Pool::open(self, self.rados, name, namespace)
    }
}

impl Drop for RadosClient {
    fn drop(&mut self) {
        // SAFETY: pools and images hold the client, so they are closed. Nothing uses the handle now.
        unsafe { (self.library.functions.rados_shutdown)(self.rados) };
    }
}

/// Whole seconds, rounded up.
fn seconds(duration: Duration) -> u64 {
    duration.as_secs() + u64::from(duration.subsec_nanos() > 0)
}
