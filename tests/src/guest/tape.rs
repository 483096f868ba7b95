//! The program under test, for guests that run Forebay inside.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::daemon::program;

/// A library of the program that the guest may lack.
const LIBRARY: &str = "libgcc_s.so.1";

/// Unpacks the tape, the guest's first virtio disk, and goes to its folder.
pub const UNPACK: &str = "modprobe virtio_blk
for try in $(seq 300); do [ -b /dev/vda ] && break; sleep 0.1; done
mkdir /tmp/forebay
tar xf /dev/vda -C /tmp/forebay
cd /tmp/forebay
export LD_LIBRARY_PATH=/tmp/forebay
";

/// In that folder: starts the daemon, and makes the shell function `fb`, its command line.
pub const SERVE: &str = "
printf '[node]\\nname = \"test\"\\n[listen]\\nnvme_tcp = [\"127.0.0.1:4420\"]\\napi = \"api.sock\"\\n' > forebay.toml
printf '[out_of_band]\\nserial = \"unix:mctp.sock\"\\n' >> forebay.toml
./forebay serve --config /tmp/forebay/forebay.toml > serve.log 2>&1 < /dev/null &
for try in $(seq 1200); do [ -S api.sock ] && break; sleep 0.1; done
fb() { ./forebay --socket /tmp/forebay/api.sock \"$@\"; }
";

/// Writes the program, and another one as `suite`, to a tape ([`super::Drive::Tape`]).
pub fn write(tape: &Path, suite: Option<&Path>) -> Result<()> {
    let program = program();
    let mut tar = Command::new("tar");
    tar.arg("cf").arg(tape);
    for file in [Some(&*program), suite].into_iter().flatten() {
        tar.arg("-C").arg(file.parent().context("a folder")?);
        tar.arg(file.file_name().context("a name")?);
    }
    tar.args(["-C", "/lib/x86_64-linux-gnu", "--dereference", LIBRARY]);
    if let Some(name) = suite.and_then(|suite| suite.file_name()?.to_str()) {
        tar.args(["--transform", &format!("s/^{name}$/suite/")]);
    }
    ensure!(tar.status()?.success(), "no tape");
    Ok(())
}
