//! Syntax checks of requests, before the owner sees them. Errors state the permitted syntax. Checks
//! that need the pool are elsewhere.

use forebay_pool::{MAX_DEVICES, SNAPSHOT_MARK};
use forebay_xlate::boundary::message::MAX_VM_QUEUES;
use uuid::Uuid;
use uuid::fmt::Hyphenated;

use super::error::ApiError;
use super::{ExportCreate, ExportFrontend, TRANSFER_HOST_PREFIX};

/// The longest path of a Unix socket (sockaddr_un: 108 bytes with its NUL).
pub const MAX_PATH_BYTES: usize = 107;

/// The longest tenant or volume name.
pub const NAME_MAX: usize = 63;
/// The most snapshots at one moment, well below the drains that an engine has at once.
pub const SNAPSHOTS_MAX: usize = 32;
/// The longest NQN (NVMe Base 2.1, 4.7: 223 bytes).
pub const NQN_MAX: usize = 223;
/// The longest specification of a device: a path and options.
pub const SPEC_MAX: usize = 4096 + 256;
/// The most hosts that one export may list.
pub use forebay_pool::MAX_HOSTS as HOSTS_MAX;

/// Checks a tenant's, volume's or pool's name.
///
/// # Errors
/// `invalid`, with the permitted syntax.
pub fn name(what: &str, name: &str) -> Result<(), ApiError> {
    let allowed = |byte: u8| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'-');
    let is_long = name.is_empty() || name.len() > NAME_MAX;
    if is_long || name.starts_with('-') || !name.bytes().all(allowed) {
        // Escaped and cut, because it may contain anything.
        let shown: String = name
            .chars()
            .take(80)
            .flat_map(char::escape_default)
            .collect();
        return Err(
            ApiError::invalid(format!("`{shown}` can't be a {what}'s name"))
                .hint("names have 1 to 63 characters of a-z, 0-9 and -, and don't begin with -"),
        );
    }
    Ok(())
}

/// Checks the name of a volume or, with `@`, of a snapshot.
///
/// # Errors
/// `invalid`, with the permitted syntax.
pub fn volume(text: &str) -> Result<(), ApiError> {
    match text.contains(SNAPSHOT_MARK) {
        true => snapshot(text),
        false => name("volume", text),
    }
}

/// Checks a snapshot's name, `VOLUME@NAME`.
///
/// # Errors
/// `invalid`, with the permitted syntax.
pub fn snapshot(text: &str) -> Result<(), ApiError> {
    let Some((of, own)) = text.split_once(SNAPSHOT_MARK) else {
        name("snapshot", text)?;
        return Err(ApiError::invalid(format!("`{text}` names no snapshot"))
            .hint("a snapshot is named VOLUME@NAME"));
    };
    name("volume", of)?;
    name("snapshot", own)
}

/// Checks the names of snapshots to take at one moment.
///
/// # Errors
/// `invalid`, for none, for too many, or for a wrong one.
pub fn snapshots(names: &[String]) -> Result<(), ApiError> {
    if !(1..=SNAPSHOTS_MAX).contains(&names.len()) {
        return Err(ApiError::invalid(format!(
            "{} snapshots: 1 to {SNAPSHOTS_MAX} can be taken at one moment",
            names.len()
        )));
    }
    names.iter().try_for_each(|name| snapshot(name))
}

/// Checks how an export is named: a volume or a snapshot, then perhaps `@` and the export's number.
///
/// # Errors
/// `invalid`, with the permitted syntax.
pub fn export(text: &str) -> Result<(), ApiError> {
    match text.rsplit_once(SNAPSHOT_MARK) {
        Some((of, number)) if number.parse::<u64>().is_ok() => volume(of),
        _ => volume(text),
    }
}

/// Whether a text is an NQN (NVMe Base 2.1, 4.7): `nqn.yyyy-mm.`, a reverse domain name, then
/// optionally `:` and a unique part. Printable ASCII only.
fn is_nqn(text: &str) -> bool {
    let Some(rest) = text.strip_prefix("nqn.") else {
        return false;
    };
    let (domain, unique) = match rest.split_once(':') {
        Some((domain, unique)) => (domain, Some(unique)),
        None => (rest, None),
    };
    let Some((date, domain)) = domain.split_once('.') else {
        return false;
    };
    let digits =
        |text: &str, count| text.len() == count && text.bytes().all(|b| b.is_ascii_digit());
    let is_date = date.split_once('-').is_some_and(|(year, month)| {
        digits(year, 4) && digits(month, 2) && ("01"..="12").contains(&month)
    });
    let is_label = |label: &str| {
        !label.is_empty()
            && label
                .bytes()
                .all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_'))
    };
    is_date
        && domain.split('.').all(is_label)
        && unique.is_none_or(|unique| !unique.is_empty())
        && text.bytes().all(|byte| byte.is_ascii_graphic())
        && text.len() <= NQN_MAX
}

/// NVM Express's prefix for NQNs with a UUID (NVMe Base 2.1, 4.7).
const OF_UUID: &str = "nqn.2014-08.org.nvmexpress:uuid:";
/// The discovery service's NQN, which no host has.
const DISCOVERY: &str = "nqn.2014-08.org.nvmexpress.discovery";

fn is_uuid(text: &str) -> bool {
    text.len() == Hyphenated::LENGTH && Uuid::try_parse(text).is_ok()
}

/// Checks a host's NQN, at most 223 bytes.
///
/// # Errors
/// `invalid`, with the permitted syntax.
pub fn host_nqn(nqn: &str) -> Result<(), ApiError> {
    if nqn == DISCOVERY {
        return Err(ApiError::invalid(format!(
            "`{nqn}` is the discovery service's name, not a host's"
        ))
        .hint("a Linux host's NQN is in /etc/nvme/hostnqn"));
    }
    let is_of_uuid = nqn.strip_prefix(OF_UUID).is_none_or(is_uuid);
    if !is_nqn(nqn) || !is_of_uuid {
        let shown: String = nqn
            .chars()
            .take(240)
            .flat_map(char::escape_default)
            .collect();
        return Err(ApiError::invalid(format!("`{shown}` is not a host NQN")).hint(
            "a host NQN looks like nqn.2014-08.org.nvmexpress:uuid:UUID, with at most 223 characters; a Linux host's \
            is in /etc/nvme/hostnqn",
        ));
    }
    Ok(())
}

/// Checks a list of hosts.
///
/// # Errors
/// `invalid`, for the first wrong one, or for too many.
pub fn host_list(hosts: &[String]) -> Result<(), ApiError> {
    if hosts.len() > HOSTS_MAX {
        return Err(ApiError::invalid(format!(
            "{} hosts are more than an export can list ({HOSTS_MAX})",
            hosts.len()
        )));
    }
    for nqn in hosts {
        host_nqn(nqn)?;
        if nqn.starts_with(TRANSFER_HOST_PREFIX) {
            return Err(ApiError::invalid(format!(
                "`{nqn}` can't be listed: such names are reserved for transfers of images, whose access ends by itself"
            )));
        }
    }
    Ok(())
}

/// Checks device specifications, before any device is opened.
///
/// # Errors
/// `invalid`, for too many, or for one that is too long.
pub fn device_specs<'a>(specs: impl ExactSizeIterator<Item = &'a String>) -> Result<(), ApiError> {
    if specs.len() > MAX_DEVICES {
        return Err(ApiError::invalid(format!(
            "{} devices: a pool has 1 to {MAX_DEVICES}",
            specs.len()
        )));
    }
    for spec in specs {
        if spec.len() > SPEC_MAX {
            return Err(ApiError::invalid(format!(
                "a device's specification has {} bytes: at most {SPEC_MAX} are accepted",
                spec.len()
            )));
        }
    }
    Ok(())
}

/// Checks that all options belong to the frontend.
///
/// # Errors
/// `invalid`, for the first that doesn't.
pub fn frontend(body: &ExportCreate) -> Result<(), ApiError> {
    let refuse = |what: &str| Err(ApiError::invalid(what.to_owned()));
    let of_machines =
        body.socket.is_some() || body.socket_user.is_some() || body.socket_group.is_some();
    match body.frontend {
        ExportFrontend::NvmeTcp if of_machines => {
            return refuse("an export over NVMe/TCP has no socket of its own");
        }
        ExportFrontend::NvmePcie | ExportFrontend::NvmeTcp if body.queues.is_some() => {
            return refuse("only a vhost-user export has a number of queues");
        }
        ExportFrontend::NvmeTcp if body.pinned_memory => {
            return refuse("only the memory of a VM can be pinned");
        }
        ExportFrontend::VhostUser | ExportFrontend::NvmeTcp if body.mapped_doorbells => {
            return refuse("only NVMe over vfio-user has doorbells");
        }
        _ => {}
    }
    if body
        .queues
        .is_some_and(|queues| !(1..=MAX_VM_QUEUES).contains(&queues))
    {
        return Err(ApiError::invalid(format!(
            "a vhost-user disk has 1 to {MAX_VM_QUEUES} queues"
        )));
    }
    match &body.socket {
        Some(path) if !path.starts_with('/') || path.contains('\0') => {
            refuse("a socket's path must be absolute")
        }
        Some(path) if path.len() > MAX_PATH_BYTES => Err(ApiError::invalid(format!(
            "a socket's path has at most {MAX_PATH_BYTES} bytes"
        ))),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names() {
        for good in ["a", "a-1", "0", &"x".repeat(63)] {
            name("tenant", good).unwrap();
        }
        for bad in [
            "",
            "-a",
            "A",
            "a.b",
            "a/b",
            "ä",
            "a b",
            "a\n",
            &"x".repeat(64),
        ] {
            name("tenant", bad).unwrap_err();
        }
    }

    #[test]
    fn snapshots_and_exports_are_named_after_volumes() {
        for good in ["db@monday", "db@7", "0@0"] {
            snapshot(good).unwrap();
            volume(good).unwrap();
            export(good).unwrap();
            name("volume", good).unwrap_err();
        }
        for good in ["db", "db@7", "db@monday@7"] {
            export(good).unwrap();
        }
        volume("db").unwrap();
        for bad in [
            "", "db@", "@monday", "db@a@b", "db@-a", "db@A", "db@@7", "-@7", "db@a/b",
        ] {
            snapshot(bad).unwrap_err();
            volume(bad).unwrap_err();
            export(bad).unwrap_err();
        }
        let error = snapshot("db").unwrap_err();
        assert!(error.hint.unwrap().contains("VOLUME@NAME"));
        snapshots(&[]).unwrap_err();
        snapshots(&vec!["db@a".to_owned(); SNAPSHOTS_MAX]).unwrap();
        snapshots(&vec!["db@a".to_owned(); SNAPSHOTS_MAX + 1]).unwrap_err();
        snapshots(&["db@a".to_owned(), "log".to_owned()]).unwrap_err();
    }

    #[test]
    fn nqns() {
        host_nqn("nqn.2014-08.org.nvmexpress:uuid:2d5a0d1f-0000-4000-8000-000000000000").unwrap();
        host_nqn(&format!("nqn.2026-01.a:{}", "x".repeat(208))).unwrap();
        host_nqn("nqn.2014-08.org.nvmexpress:uuid:2D5A0D1F-0000-4000-8000-00000000000F").unwrap();
        // As older hosts have them.
        host_nqn("nqn.2014-08.org.nvmexpress:NVMf:uuid:2d5a0d1f-0000-4000-8000-000000000000")
            .unwrap();
        let of_transfer = format!("{TRANSFER_HOST_PREFIX}a");
        host_nqn(&of_transfer).unwrap();
        host_list(&[of_transfer]).unwrap_err();
        host_nqn("nqn.2026-12.host-7.example_a.org:a:b").unwrap();
        for bad in [
            "",
            "nqn.",
            "iqn.2001-01.x:y",
            "nqn.host",
            "nqn.2026.org:a",
            "nqn.2026-13.org:a",
            "nqn.2026-1.org:a",
            "nqn.2026-01.:a",
            "nqn.2026-01.org:",
            "nqn.2026-01.a..b:a",
            "nqn.2026-01.a:b c",
            "nqn.a b",
            "nqn.\u{e4}",
            "nqn.a\0",
            "nqn.2014-08.org.nvmexpress.discovery",
            "nqn.2014-08.org.nvmexpress:uuid:not-a-uuid",
            "nqn.2014-08.org.nvmexpress:uuid:2d5a0d1f-0000-4000-8000-00000000000",
            "nqn.2014-08.org.nvmexpress:uuid:2d5a0d1f-0000-4000-8000-0000000000000",
            "nqn.2014-08.org.nvmexpress:uuid:2d5a0d1f-0000-4000-8000-000000000000-1",
            "nqn.2014-08.org.nvmexpress:uuid:2d5a0d1f-0000-4000-8000-00000000000g",
            "nqn.2014-08.org.nvmexpress:uuid:2d5a0d1f00004000800000000000000000",
        ] {
            host_nqn(bad).unwrap_err();
        }
        host_nqn(&format!("nqn.2026-01.a:{}", "x".repeat(210))).unwrap_err();
    }

    #[test]
    fn export_options_must_match_the_frontend() {
        let of = |frontend| ExportCreate {
            frontend,
            ..ExportCreate::default()
        };
        let pinned = |frontend| ExportCreate {
            pinned_memory: true,
            ..of(frontend)
        };
        let mapped = |frontend| ExportCreate {
            mapped_doorbells: true,
            ..of(frontend)
        };
        let queues = |frontend, queues| ExportCreate {
            queues: Some(queues),
            ..of(frontend)
        };
        use ExportFrontend::{NvmePcie, NvmeTcp, VhostUser};
        for good in [
            of(NvmeTcp),
            pinned(NvmePcie),
            pinned(VhostUser),
            mapped(NvmePcie),
            queues(VhostUser, MAX_VM_QUEUES),
        ] {
            frontend(&good).unwrap();
        }
        for bad in [
            pinned(NvmeTcp),
            mapped(NvmeTcp),
            mapped(VhostUser),
            queues(NvmeTcp, 1),
            queues(NvmePcie, 1),
            queues(VhostUser, 0),
            queues(VhostUser, MAX_VM_QUEUES + 1),
            ExportCreate {
                socket: Some("/s".to_owned()),
                ..of(NvmeTcp)
            },
            ExportCreate {
                socket: Some("s".to_owned()),
                ..of(NvmePcie)
            },
        ] {
            frontend(&bad).unwrap_err();
        }
    }
}
