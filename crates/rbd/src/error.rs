//! The error of calls about clusters, pools and images. I/O ends with an [`Errno`].

use rustix::io::Errno;

pub(crate) const CONFIGURE: &str = "configure";
pub(crate) const CONNECT: &str = "connect to";

/// What failed, and with which error of Ceph.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("cannot {doing} {what}: {errno}{}", hint(.doing, *.errno))]
pub struct RbdError {
    /// The action, as in `open`.
    pub doing: &'static str,
    /// Its object, as `image CLUSTER/POOL[/NAMESPACE]/IMAGE`.
    pub what: String,
    /// Ceph's error. `ESHUTDOWN` means that the client is blocklisted.
    pub errno: Errno,
}

impl RbdError {
    pub(crate) fn new(doing: &'static str, what: impl Into<String>, errno: Errno) -> Self {
        Self {
            doing,
            what: what.into(),
            errno,
        }
    }
}

/// What to do about it, where that is known.
fn hint(doing: &str, errno: Errno) -> &'static str {
    match (doing, errno) {
        (CONFIGURE, Errno::NOENT) => "; check that the file or the option exists",
        (CONNECT, Errno::NOENT) => "; the user has no keyring: check its file name",
        (CONNECT, Errno::ACCESS | Errno::PERM) => {
            "; the cluster refuses the key: check the user and its keyring"
        }
        (CONNECT, Errno::TIMEDOUT) => {
            "; no monitor answers: check `mon host` in the configuration, and the network"
        }
        (_, Errno::NOENT) => "; no such pool, namespace, image or snapshot: check the names",
        (_, Errno::ACCESS | Errno::PERM) => {
            "; the user lacks a capability: `ceph auth get` shows those it has"
        }
        (_, Errno::TIMEDOUT) => "; the cluster does not answer in time: check `ceph health`",
        (_, Errno::SHUTDOWN) => "; the client is blocklisted: it must connect again",
        (_, Errno::BUSY) => "; it is protected, or another client uses it",
        (_, Errno::EXIST) => "; choose another name",
        (_, Errno::ROFS) => "; it is open for reading only, or locked by another client",
        (_, Errno::NOSPC) => "; the cluster is full: add space or remove data",
        (_, Errno::DQUOT) => "; the pool's quota is reached: raise it or remove data",
        _ => "",
    }
}

/// The error that a negative return value of Ceph stands for.
pub(crate) fn errno(returned: i64) -> Errno {
    let positive = returned
        .checked_neg()
        .and_then(|value| i32::try_from(value).ok());
    match positive {
        Some(value @ 1..=4095) => Errno::from_raw_os_error(value),
        _ => Errno::IO,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_say_what_where_and_what_to_do() {
        let shown = |doing, errno| RbdError::new(doing, "image ceph/rbd/vm", errno).to_string();
        assert_eq!(
            shown("open", Errno::NOENT),
            "cannot open image ceph/rbd/vm: No such file or directory (os error 2); \
             no such pool, namespace, image or snapshot: check the names"
        );
        assert!(shown(CONNECT, Errno::NOENT).contains("keyring"));
        assert!(shown(CONNECT, Errno::TIMEDOUT).contains("no monitor answers"));
        assert!(shown("resize", Errno::SHUTDOWN).contains("blocklisted"));
        assert!(shown("resize", Errno::XDEV).ends_with("(os error 18)"));
    }

    #[test]
    fn return_values_become_errors() {
        assert_eq!(errno(-108), Errno::SHUTDOWN);
        for strange in [0, 1, -4096, i64::MIN, i64::MAX] {
            assert_eq!(errno(strange), Errno::IO, "{strange}");
        }
    }
}
