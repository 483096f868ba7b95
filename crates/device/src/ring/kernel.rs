//! Refuses kernels that are too old or forbid io_uring. The oldest supported kernel has every
//! feature in use, so none is probed.

use super::options::RingError;

/// The oldest kernel that is supported.
pub const MINIMUM_KERNEL: KernelVersion = KernelVersion { major: 6, minor: 1 };

/// A version of the Linux kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct KernelVersion {
    /// The first number.
    pub major: u32,
    /// The second number.
    pub minor: u32,
}

impl std::fmt::Display for KernelVersion {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// Reads the running kernel's version and refuses one that is too old.
pub fn check_kernel() -> Result<KernelVersion, RingError> {
    let uname = rustix::system::uname();
    let release = uname.release().to_string_lossy();
    let found = parse_release(&release).ok_or_else(|| RingError::UnknownKernel {
        release: release.to_string(),
    })?;
    if found < MINIMUM_KERNEL {
        return Err(RingError::KernelTooOld { found });
    }
    Ok(found)
}

fn parse_release(release: &str) -> Option<KernelVersion> {
    let mut parts = release.splitn(3, '.');
    let major = parts.next()?.parse().ok()?;
    let minor = parts.next()?;
    let digits = minor
        .find(|c: char| !c.is_ascii_digit())
        .unwrap_or(minor.len());
    Some(KernelVersion {
        major,
        minor: minor[..digits].parse().ok()?,
    })
}

/// Why io_uring is forbidden, by the content of `/proc/sys/kernel/io_uring_disabled`.
pub(crate) fn forbidden_reason(sysctl: Option<&str>) -> String {
    match sysctl.map(str::trim) {
        Some("1") => "kernel.io_uring_disabled is 1, so only members of kernel.io_uring_group may use it; join that \
             group or run `sysctl kernel.io_uring_disabled=0`"
            .to_owned(),
        Some("2") => "kernel.io_uring_disabled is 2; run `sysctl kernel.io_uring_disabled=0`".to_owned(),
        _ => "kernel.io_uring_disabled does not forbid it, so a seccomp filter does (a container's default profile?); \
             allow io_uring_setup, io_uring_enter and io_uring_register"
            .to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_kernel_releases() {
        let version = |major, minor| Some(KernelVersion { major, minor });
        assert_eq!(parse_release("6.1.0-37-amd64"), version(6, 1));
        assert_eq!(parse_release("6.18.44-fc-v657"), version(6, 18));
        assert_eq!(parse_release("5.15-rc1"), version(5, 15));
        assert_eq!(parse_release("10.0"), version(10, 0));
        assert_eq!(parse_release("linux"), None);
        assert_eq!(parse_release("6."), None);
        assert!(version(6, 0) < Some(MINIMUM_KERNEL));
        check_kernel().expect("this kernel will do");
    }

    #[test]
    fn says_who_forbids() {
        assert!(forbidden_reason(Some("2\n")).contains("io_uring_disabled=0"));
        assert!(forbidden_reason(Some("1")).contains("io_uring_group"));
        assert!(forbidden_reason(Some("0")).contains("seccomp"));
        assert!(forbidden_reason(None).contains("seccomp"));
    }
}
