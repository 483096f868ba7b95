//! Paths of the API, with escaped names.

use crate::cli::names::VolumeName;

pub(crate) fn volume(name: &VolumeName) -> String {
    format!("{}/{}", volumes(&name.tenant), segment(&name.volume))
}

pub(crate) fn volumes(tenant: &str) -> String {
    format!("/v1/tenants/{}/volumes", segment(tenant))
}

pub(crate) fn snapshots(tenant: &str) -> String {
    format!("/v1/tenants/{}/snapshots", segment(tenant))
}

pub(crate) fn export(name: &VolumeName) -> String {
    format!(
        "/v1/exports/{}/{}",
        segment(&name.tenant),
        segment(&name.volume)
    )
}

/// The daemon must see, and refuse, exactly the typed name.
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
