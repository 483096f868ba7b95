//! Paths of the API.
//!
//! Purpose: where a volume or an export is, for every command that asks for one.
//! Design: names are escaped, because they may be anything that was typed.
//! Not here: the routes themselves (`forebay_control`).

use crate::cli::names::VolumeName;

/// Of a volume.
pub(crate) fn volume(name: &VolumeName) -> String {
    format!("{}/{}", volumes(&name.tenant), segment(&name.volume))
}

/// Of a tenant's volumes.
pub(crate) fn volumes(tenant: &str) -> String {
    format!("/v1/tenants/{}/volumes", segment(tenant))
}

/// Of an export.
pub(crate) fn export(name: &VolumeName) -> String {
    format!(
        "/v1/exports/{}/{}",
        segment(&name.tenant),
        segment(&name.volume)
    )
}

/// A path segment: names with anything but our own characters are escaped, so that the daemon sees,
/// and refuses, exactly what was typed.
pub(crate) fn segment(name: &str) -> String {
    let mut text = String::with_capacity(name.len());
    for byte in name.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' => text.push(byte.into()),
            _ => text.push_str(&format!("%{byte:02X}")),
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::segment;

    #[test]
    fn segments_keep_to_themselves() {
        assert_eq!(segment("a-1"), "a-1");
        assert_eq!(segment("../x y?ä"), "%2E%2E%2Fx%20y%3F%C3%A4");
    }
}
