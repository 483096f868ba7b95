//! A client of a Ceph cluster, with the images that it has open.
//!
//! **Design.** Each image has a span of the device's addresses, so one device serves all volumes
//! of a tenant. The daemon makes its spec: users name images, not clients. Writes are durable when
//! they end, so a flush has nothing to do.
//!
//! **Full cluster.** Ceph's default is that a write waits until there is room. Here it ends with
//! `ENOSPC`, and with `EDQUOT` at a pool's quota ([`forebay_rbd::RadosClient::pool`]).

mod client;
mod images;

use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use forebay_rbd::{ClientConfig, Library, RadosClient};

use self::client::CephClient;
use super::info::{DeviceInfo, DeviceKind, Identity, OpenOptions};
use super::spec::{DeviceSpec, SpecError, SpecText};
use super::{Backend, BackendKind, Opened, SyncBackend};
use crate::error::DeviceError;

impl DeviceKind {
    /// A client of a Ceph cluster.
    #[allow(
        non_upper_case_globals,
        reason = "named as the variant of an enum that it was"
    )]
    pub const Rbd: Self = Self("rbd");
}

/// The addresses of one image: 64 TiB.
pub const IMAGE_SPAN_BYTES: u64 = 1 << 46;
/// The images of a client.
pub const MAX_IMAGES: u32 = 4096;
/// A folder with librados and librbd, instead of the system's.
const LIBRARIES: &str = "FOREBAY_CEPH_LIBRARIES";
const BLOCK_BYTES: u32 = 512;
const PHYSICAL_BLOCK_BYTES: u32 = 4096;

pub(super) struct RbdKind;

impl BackendKind for RbdKind {
    fn kind(&self) -> DeviceKind {
        DeviceKind::Rbd
    }

    fn example(&self) -> &'static str {
        ""
    }

    fn parse(&self, text: &SpecText<'_>) -> Result<DeviceSpec, SpecError> {
        let (path, options) = text.rest.split_once('?').unwrap_or((text.rest, ""));
        let spec = DeviceSpec::new(DeviceKind::Rbd, text.absolute(path)?).with_options(options);
        match ClientOptions::of(&spec) {
            Ok(_) => Ok(spec),
            Err(option) => Err(text.unknown_option(&option)),
        }
    }

    fn open(
        &self,
        spec: &DeviceSpec,
        _options: &OpenOptions,
    ) -> Result<Opened<Arc<dyn Backend>>, DeviceError> {
        let unusable = |what: String| DeviceError::Unusable {
            path: spec.path().to_owned(),
            what,
        };
        let parsed = ClientOptions::of(spec)
            .map_err(|option| unusable(format!("unknown option `{option}`")))?;
        let library = library().map_err(&unusable)?;
        let client = RadosClient::connect(&library, &parsed.config);
        let client = client.map_err(|error| unusable(error.to_string()))?;
        let address = client
            .address()
            .map_err(|error| unusable(error.to_string()))?;
        let info = DeviceInfo {
            spec: spec.clone(),
            kind: DeviceKind::Rbd,
            capacity_bytes: IMAGE_SPAN_BYTES * u64::from(MAX_IMAGES),
            block_bytes: BLOCK_BYTES,
            physical_block_bytes: PHYSICAL_BLOCK_BYTES,
            memory_align_bytes: 1,
            offset_align_bytes: BLOCK_BYTES,
            identity: Identity::Remote { id: parsed.id },
            can_punch: true,
            direct: true,
            notes: Vec::new(),
        };
        let backend = Arc::new(CephClient::new(client, address));
        Ok(Opened { info, backend })
    }

    fn open_sync(
        &self,
        spec: &DeviceSpec,
        _options: &OpenOptions,
    ) -> Result<Opened<Box<dyn SyncBackend>>, DeviceError> {
        Err(DeviceError::Unusable {
            path: spec.path().to_owned(),
            what: "a Ceph client is no device of a pool; create volumes with `--rbd`".to_owned(),
        })
    }
}

/// The libraries, loaded once.
fn library() -> Result<Arc<Library>, String> {
    static LIBRARY: OnceLock<Result<Arc<Library>, String>> = OnceLock::new();
    let load = || {
        let folder = std::env::var_os(LIBRARIES).map(PathBuf::from);
        Library::load(folder.as_deref()).map_err(|missing| missing.to_string())
    };
    LIBRARY.get_or_init(load).clone()
}

/// A client's options in a spec: `cluster`, `user`, `keyring`, and `client`, its identity.
struct ClientOptions {
    config: ClientConfig,
    id: [u8; 16],
}

impl ClientOptions {
    /// The error is the wrong option.
    fn of(spec: &DeviceSpec) -> Result<Self, String> {
        let mut config = ClientConfig::new("admin");
        config.file = Some(spec.path().to_owned());
        // Hosts have time limits of their own, and a write that has timed out might still land.
        config.osd_limit = Duration::ZERO;
        let mut id = None;
        for option in spec.options().split('&') {
            match option.split_once('=') {
                Some(("cluster", name)) => config.cluster = name.to_owned(),
                Some(("user", name)) => config.user = name.to_owned(),
                Some(("keyring", path)) => config.keyring = Some(path.into()),
                Some(("client", text)) if text.len() == 32 => {
                    id = u128::from_str_radix(text, 16).ok().map(u128::to_be_bytes);
                }
                _ => return Err(option.to_owned()),
            }
        }
        let id = id.ok_or("client")?;
        Ok(Self { config, id })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn specs_of_clients() {
        let id = "00112233445566778899aabbccddeeff";
        let text = format!("rbd:/etc/ceph/c.conf?cluster=c&user=u&keyring=/k&client={id}");
        let spec: DeviceSpec = text.parse().unwrap();
        assert_eq!(spec.to_string(), text);
        let options = ClientOptions::of(&spec).ok().unwrap();
        assert_eq!(options.config.user, "u");
        assert_eq!(options.id[..2], [0x00, 0x11]);
        for wrong in [
            "rbd:/c.conf".to_owned(),
            format!("rbd:/c.conf?key=secret&client={id}"),
            "rbd:/c.conf?client=12".to_owned(),
            format!("rbd:c.conf?client={id}"),
        ] {
            assert!(wrong.parse::<DeviceSpec>().is_err(), "{wrong}");
        }
    }
}
