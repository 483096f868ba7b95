//! Refuses a device file above `RLIMIT_FSIZE`, where later writes would fail.

use std::path::Path;

use rustix::process::{Resource, getrlimit};

use crate::error::DeviceError;
use crate::size::format_bytes;

/// Fails if `size_bytes` is above the process's limit.
pub fn check(path: &Path, size_bytes: u64) -> Result<(), DeviceError> {
    within(path, size_bytes, getrlimit(Resource::Fsize).current)
}

fn within(path: &Path, size_bytes: u64, limit_bytes: Option<u64>) -> Result<(), DeviceError> {
    let Some(limit_bytes) = limit_bytes.filter(|limit| size_bytes > *limit) else {
        return Ok(());
    };
    Err(DeviceError::Unusable {
        path: path.to_owned(),
        what: format!(
            "the file size limit of this process is {}, but this file has {}; raise the limit where Forebay is \
             started (`ulimit -f` in a shell, `LimitFSIZE=` in a systemd unit), or choose a smaller size",
            format_bytes(limit_bytes),
            format_bytes(size_bytes)
        ),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_above_the_limit_is_refused_by_its_name() {
        let path = Path::new("/x");
        for (size, limit) in [(0, Some(0)), (7, Some(7)), (u64::MAX, None)] {
            assert!(within(path, size, limit).is_ok(), "{size} {limit:?}");
        }
        let error = within(path, 2 << 30, Some(1 << 30))
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("is 1 GiB") && error.contains("LimitFSIZE"),
            "{error}"
        );
    }
}
