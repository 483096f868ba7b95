//! Tests [`forebay_tests::hold`] with another process, because the server's own must not touch the
//! file.

use std::os::unix::fs::FileExt;
use std::process::{Child, Command};
use std::time::Duration;

use anyhow::{Result, ensure};
use forebay_tests::hold::{Hold, find_block};
use xtask::process;

const LIMIT: Duration = Duration::from_secs(60);

fn dd(from: &std::path::Path, to: &std::path::Path, more: &[&str]) -> Result<Child> {
    let mut command = Command::new("dd");
    command
        .arg(format!("if={}", from.display()))
        .arg(format!("of={}", to.display()))
        .args(["bs=4096", "conv=notrunc", "status=none"])
        .args(more);
    Ok(command.spawn()?)
}

#[test]
fn holds_and_lets_go() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let (source, copy) = (folder.path().join("source"), folder.path().join("copy"));
    let data: Vec<u8> = (0..8192_u32)
        .map(|i| (i >> 12) as u8 ^ (i >> 4) as u8 ^ i as u8)
        .collect();
    std::fs::write(&source, &data)?;
    std::fs::write(&copy, [])?;
    let hold = Hold::new(folder.path(), 8 << 20)?;
    let disk = hold.path();
    let end = |mut child: Child| -> Result<()> {
        ensure!(process::wait(&mut child, LIMIT)?.success(), "dd failed");
        Ok(())
    };
    end(dd(&source, &disk, &["seek=3", "oflag=direct"])?)?;
    ensure!(find_block(hold.backing(), &data[..4096])? == 3 * 4096);
    end(dd(&disk, &copy, &["skip=3", "count=2", "iflag=direct"])?)?;
    ensure!(
        std::fs::read(&copy)? == data,
        "what is read is what was written"
    );

    hold.hold_writes(8 * 4096..9 * 4096);
    let writer = dd(&source, &disk, &["seek=8", "count=1", "oflag=direct"])?;
    let held = hold.wait_held(1)?;
    ensure!(
        held[0].is_write && held[0].offset_bytes == 8 * 4096,
        "{held:?}"
    );
    let mut now = [1; 4096];
    std::fs::File::open(hold.backing())?.read_exact_at(&mut now, 8 * 4096)?;
    ensure!(now == [0; 4096], "a held write isn't there yet");
    end(dd(&source, &disk, &["seek=9", "count=1", "oflag=direct"])?)?;
    hold.release();
    end(writer)?;
    std::fs::File::open(hold.backing())?.read_exact_at(&mut now, 8 * 4096)?;
    ensure!(now == data[..4096], "and then it is");
    Ok(())
}
