//! The suite on a kind that exists only in tests.

use super::{Subject, run};
use crate::device::Device;
use crate::kind::OpenOptions;
use crate::kind::spec::DeviceSpec;

#[test]
fn a_kind_with_threads_and_a_fence_of_its_own_conforms() {
    let file = tempfile::NamedTempFile::new().expect("temporary file");
    file.as_file().set_len(16 << 20).expect("set length");
    let spec = format!("threads:{}", file.path().display());
    let spec: DeviceSpec = spec.parse().expect("a spec");
    let open = || Device::open(&spec, &OpenOptions::default()).expect("opens");
    assert_eq!(open().info().kind.name(), "threads");
    run(&Subject {
        open: &open,
        from_bytes: 0,
        keeps: true,
    });
}
