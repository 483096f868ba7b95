//! Importing and exporting images: nothing is overwritten by accident, and only raw images are
//! accepted.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Output, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use forebay_initiator::{Options, Session};
use forebay_tests::daemon::{Daemon, DaemonOptions};
use forebay_tests::system::hold_by_pid;
use forebay_tests::wait;
use rustix::process::{Pid, Signal, kill_process};
use rustix::pty::{OpenptFlags, ioctl_tiocgptpeer, openpt, unlockpt};
use xtask::process;

const MIB: u64 = 1 << 20;
/// Time limit of a command.
const LIMIT: Duration = Duration::from_secs(60);

fn refused(daemon: &Daemon, args: &[&str], says: &[&str]) -> Result<()> {
    let output = daemon.cli_command(args).output()?;
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(!output.status.success(), "{args:?} was not refused");
    for part in says {
        ensure!(text.contains(part), "{args:?}: '{part}' is not in: {text}");
    }
    Ok(())
}

fn write(daemon: &Daemon, name: &str, bytes: &[u8]) -> Result<String> {
    let path = daemon.folder().join(name);
    std::fs::write(&path, bytes)?;
    text(&path)
}

fn text(path: &Path) -> Result<String> {
    Ok(path.to_str().context("a path")?.to_owned())
}

fn exported(daemon: &Daemon, volume: &str) -> Result<Vec<u8>> {
    let path: PathBuf = daemon.folder().join("out.img");
    daemon.cli(&["volume", "export", volume, &text(&path)?])?;
    let bytes = std::fs::read(&path)?;
    std::fs::remove_file(path)?;
    Ok(bytes)
}

fn mapped(daemon: &Daemon, volume: &str) -> Result<u64> {
    let shown = daemon.cli(&["volume", "show", volume])?;
    shown["mapped_bytes"].as_u64().context("mapped_bytes")
}

/// A stopped import, which the tenant's budget slows to 16 s.
fn import_on_hold(daemon: &Daemon, image: &str, volume: &str) -> Result<Child> {
    let budget = [
        "tenant",
        "budget",
        "t",
        "--burst-bandwidth",
        "4M",
        "--metered",
    ];
    daemon.cli(&budget)?;
    let mut importing = daemon
        .cli_command(&["volume", "import", image, volume])
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()?;
    wait::until("the import", Duration::from_secs(30), || {
        Ok((mapped(daemon, volume)? > 0).then_some(()))
    })?;
    hold_by_pid(importing.id(), true)?;
    ensure!(importing.try_wait()?.is_none(), "the import has ended");
    Ok(importing)
}

fn start(pool_bytes: &str) -> Result<Daemon> {
    let daemon = Daemon::start(&DaemonOptions::default())?;
    let device = format!("file:{}", daemon.folder().join("pool.img").display());
    daemon.create_pool(&["--device", &device, "--size", pool_bytes])?;
    daemon.cli(&["tenant", "create", "t"])?;
    Ok(daemon)
}

#[test]
fn import_never_overwrites() -> Result<()> {
    let mut daemon = start("1G")?;
    daemon.cli(&["volume", "create", "t/v", "--size", "256M"])?;
    let ones = vec![1; 32 * MIB as usize];
    let large = write(&daemon, "large.img", &ones)?;
    let small = write(&daemon, "small.img", &vec![2; MIB as usize])?;
    daemon.cli(&["volume", "import", &large, "t/v"])?;

    // Only --force overwrites, and it leaves no old data.
    refused(
        &daemon,
        &["volume", "import", &small, "t/v"],
        &["t/v holds", "--force"],
    )?;
    ensure!(
        exported(&daemon, "t/v")?.starts_with(&ones),
        "it was changed"
    );
    daemon.cli(&["volume", "import", &small, "t/v", "--force"])?;
    let now = exported(&daemon, "t/v")?;
    ensure!(now[..MIB as usize].iter().all(|byte| *byte == 2));
    ensure!(
        now[MIB as usize..].iter().all(|byte| *byte == 0),
        "a mixture"
    );
    ensure!(
        mapped(&daemon, "t/v")? <= 2 * MIB,
        "the rest is not deallocated"
    );

    // A running import excludes all others, also across the daemon's death.
    daemon.cli(&["volume", "create", "t/w", "--size", "64M"])?;
    let threes = vec![3; 64 * MIB as usize];
    let image = write(&daemon, "image.img", &threes)?;
    let mut importing = import_on_hold(&daemon, &image, "t/w")?;
    let out = text(&daemon.folder().join("out.img"))?;
    let says = &["t/w"];
    refused(&daemon, &["volume", "import", &small, "t/w"], says)?;
    refused(
        &daemon,
        &["volume", "import", &small, "t/w", "--force"],
        says,
    )?;
    refused(&daemon, &["volume", "export", "t/w", &out], says)?;
    let host = ["export", "set", "t/w", "--any-host"];
    refused(&daemon, &host, says)?;
    daemon.cli(&["tenant", "budget", "t", "--none"])?;
    daemon.kill_daemon()?;
    daemon.start_again()?;
    let again = ["volume", "import", &small, "t/w", "--force"];
    refused(&daemon, &again, &["t/w is in use"])?;
    hold_by_pid(importing.id(), false)?;
    ensure!(importing.wait()?.success(), "the import failed");
    ensure!(
        exported(&daemon, "t/w")? == threes,
        "the image is not as it was"
    );
    daemon.stop()
}

/// A host that connects during an import makes it fail.
#[test]
fn a_host_that_connects_meanwhile_fails_an_import() -> Result<()> {
    let mut daemon = start("1G")?;
    daemon.cli(&["volume", "create", "t/v", "--size", "64M"])?;
    daemon.cli(&["export", "create", "t/v", "--any-host"])?;
    let image = write(&daemon, "image.img", &vec![3; 64 * MIB as usize])?;
    let importing = import_on_hold(&daemon, &image, "t/v")?;
    let address: SocketAddr = format!("127.0.0.1:{}", daemon.port()).parse()?;
    let nqn = "nqn.2026-01.io.forebay:test:t.v";
    let host = "nqn.2026-01.test:host";
    let session = Session::connect(address, nqn, host, &Options::default())?;
    daemon.cli(&["tenant", "budget", "t", "--none"])?;
    hold_by_pid(importing.id(), false)?;
    let output = importing.wait_with_output()?;
    let text = String::from_utf8_lossy(&output.stderr);
    ensure!(!output.status.success() && text.contains(host), "{text}");
    session.close()?;
    daemon.stop()
}

/// The daemon owns a transfer's access, which ends when the program is killed.
#[test]
fn access_ends_with_its_transfer() -> Result<()> {
    let mut daemon = start("1G")?;
    daemon.cli(&["volume", "create", "t/v", "--size", "64M"])?;
    let image = write(&daemon, "image.img", &vec![3; 64 * MIB as usize])?;
    let kill = |daemon: &Daemon| -> Result<()> {
        let mut importing = import_on_hold(daemon, &image, "t/v")?;
        let exports = daemon.cli(&["export", "list"])?;
        ensure!(exports[0]["internal"] == true, "{exports}");
        let shown = daemon.cli_text(&["export", "show", "t/v"])?;
        ensure!(
            shown.contains("internal") && !shown.contains("nvme connect"),
            "{shown}"
        );
        // The budget may delay its end.
        let delete = ["volume", "delete", "t/v"];
        refused(
            daemon,
            &delete,
            &["an image is being imported", "try again"],
        )?;
        importing.kill()?;
        importing.wait()?;
        Ok(())
    };
    kill(&daemon)?;
    // A repeat and a deletion wait only for its end, not for the announcement's expiry.
    daemon.cli(&["tenant", "budget", "t", "--none"])?;
    daemon.cli(&["volume", "import", &image, "t/v", "--force"])?;
    daemon.cli(&["volume", "delete", "t/v"])?;
    daemon.cli(&["volume", "create", "t/v", "--size", "64M"])?;
    kill(&daemon)?;
    daemon.cli(&["volume", "delete", "t/v"])?;
    let events = daemon.cli_text(&["events"])?;
    ensure!(
        events.contains("internal: an image is transferred"),
        "{events}"
    );
    // Without either, it ends by itself, also across a restart of the daemon.
    daemon.cli(&["volume", "create", "t/v", "--size", "64M"])?;
    kill(&daemon)?;
    daemon.kill_daemon()?;
    daemon.start_again()?;
    wait::until("the end of the access", Duration::from_secs(60), || {
        let exports = daemon.cli(&["export", "list"])?;
        Ok((exports.as_array().is_some_and(Vec::is_empty)).then_some(()))
    })?;
    daemon.stop()
}

/// A transfer must not adopt a user's export without hosts.
#[test]
fn an_export_without_hosts_stays() -> Result<()> {
    let mut daemon = start("256M")?;
    daemon.cli(&["volume", "create", "t/v", "--size", "4M"])?;
    let image = write(&daemon, "image.img", &vec![3; 4 * MIB as usize])?;
    let host = "nqn.2014-08.org.example:host";
    daemon.cli(&["export", "create", "t/v", "--host", host])?;
    daemon.cli(&["export", "set", "t/v", "--remove-host", host])?;
    let import = ["volume", "import", &image, "t/v"];
    refused(&daemon, &import, &["lists no host", "export set t/v"])?;
    let exports = daemon.cli(&["export", "list"])?;
    ensure!(exports[0]["hosts"] == serde_json::json!([]), "{exports}");
    daemon.cli(&["export", "set", "t/v", "--add-host", host])?;
    daemon.cli(&import)?;
    let exports = daemon.cli(&["export", "list"])?;
    ensure!(
        exports[0]["hosts"] == serde_json::json!([host]),
        "{exports}"
    );
    daemon.stop()
}

#[test]
fn an_image_of_a_vm_volume_can_be_exported() -> Result<()> {
    let mut daemon = start("256M")?;
    daemon.cli(&["volume", "create", "t/v", "--size", "4M"])?;
    let ones = vec![1; MIB as usize];
    let image = write(&daemon, "image.img", &ones)?;
    daemon.cli(&["volume", "import", &image, "t/v"])?;
    daemon.cli(&["export", "create", "t/v", "--nvme-pcie"])?;
    ensure!(exported(&daemon, "t/v")?.starts_with(&ones), "its bytes");
    refused(
        &daemon,
        &["volume", "import", &image, "t/v", "--force"],
        &["a VM"],
    )?;
    let exports = daemon.cli(&["export", "list"])?;
    ensure!(
        exports.as_array().is_some_and(|all| all.len() == 1),
        "{exports}"
    );
    daemon.stop()
}

fn ended(mut command: Child) -> Result<Output> {
    let stdout = command.stdout.take();
    let reader = std::thread::spawn(move || -> std::io::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        if let Some(mut stdout) = stdout {
            stdout.read_to_end(&mut bytes)?;
        }
        Ok(bytes)
    });
    let status = process::wait(&mut command, LIMIT)?;
    let mut stderr = Vec::new();
    let mut pipe = command.stderr.take().context("no pipe")?;
    pipe.read_to_end(&mut stderr)?;
    let stdout = reader.join().ok().context("the reader panicked")??;
    Ok(Output {
        status,
        stdout,
        stderr,
    })
}

fn piped(daemon: &Daemon, args: &[&str], input: Vec<u8>) -> Result<Output> {
    let mut command = daemon
        .cli_command(args)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    let mut pipe = command.stdin.take().context("no pipe")?;
    let sender = std::thread::spawn(move || {
        // The head arrives in more than one read. A command that refuses stops reading.
        let (first, rest) = input.split_at(input.len().min(1000));
        let _ = pipe.write_all(first).and_then(|()| {
            std::thread::sleep(Duration::from_millis(50));
            pipe.write_all(rest)
        });
    });
    let output = ended(command)?;
    sender.join().ok().context("the sender panicked")?;
    Ok(output)
}

fn piped_is_refused(daemon: &Daemon, args: &[&str], input: Vec<u8>, says: &[&str]) -> Result<()> {
    let output = piped(daemon, args, input)?;
    let text = String::from_utf8_lossy(&output.stderr);
    ensure!(!output.status.success(), "{args:?} was not refused");
    for part in says {
        ensure!(text.contains(part), "{args:?}: '{part}' is not in: {text}");
    }
    Ok(())
}

fn no_access_is_left(daemon: &Daemon) -> Result<()> {
    let exports = daemon.cli(&["export", "list"])?;
    ensure!(exports.as_array().is_some_and(Vec::is_empty), "{exports}");
    Ok(())
}

fn interrupt(command: &Child) -> Result<()> {
    let pid = Pid::from_raw(command.id().try_into()?).context("no process")?;
    Ok(kill_process(pid, Signal::INT)?)
}

/// The program's end and the screen's.
fn terminal() -> Result<(OwnedFd, OwnedFd)> {
    let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
    let behind = openpt(flags)?;
    unlockpt(&behind)?;
    let terminal = ioctl_tiocgptpeer(&behind, flags)?;
    Ok((terminal, behind))
}

/// Data, zeros and an odd length.
fn image(bytes: usize) -> Vec<u8> {
    let mut image: Vec<u8> = (0..bytes).map(|at| (at / 13 % 251) as u8).collect();
    let zeros = bytes / 4..bytes / 2;
    image[zeros].fill(0);
    image
}

#[test]
fn a_pipe_goes_in_and_comes_out() -> Result<()> {
    let mut daemon = start("1G")?;
    daemon.cli(&["volume", "create", "t/v", "--size", "16M"])?;
    let whole = 16 * MIB as usize;
    let import = ["volume", "import", "-", "t/v", "--force"];
    // The last one ends within a block and replaces a longer image.
    for bytes in [1, 4608, whole, 5 * MIB as usize + 4321] {
        let mut expected = image(bytes);
        let output = piped(&daemon, &import, expected.clone())?;
        ensure!(output.status.success(), "{output:?}");
        let said: serde_json::Value = serde_json::from_slice(&output.stdout)?;
        ensure!(said["done"].is_string(), "{said}");
        expected.resize(whole, 0);
        ensure!(exported(&daemon, "t/v")? == expected, "{bytes} bytes in");
        // Only the image is on stdout; messages are on stderr.
        let output = piped(&daemon, &["volume", "export", "t/v", "-"], Vec::new())?;
        ensure!(output.status.success(), "{:?}", output.status);
        ensure!(output.stdout == expected, "{bytes} bytes out");
        let said: serde_json::Value = serde_json::from_slice(&output.stderr)?;
        ensure!(said["done"].is_string(), "{said}");
    }
    ensure!(mapped(&daemon, "t/v")? <= 6 * MIB, "zeros are mapped");
    // A redirected file is read from its current offset.
    let mut file = File::open(write(&daemon, "image", &image(MIB as usize))?)?;
    file.seek(SeekFrom::Start(1000))?;
    let redirected = daemon.cli_command(&import).stdin(file).output()?;
    ensure!(redirected.status.success(), "{redirected:?}");
    ensure!(exported(&daemon, "t/v")?.starts_with(&image(MIB as usize)[1000..]));
    no_access_is_left(&daemon)?;
    daemon.stop()
}

#[test]
fn a_pipe_is_refused() -> Result<()> {
    let mut daemon = start("1G")?;
    daemon.cli(&["volume", "create", "t/v", "--size", "4M"])?;
    let import = ["volume", "import", "-", "t/v"];
    let is_refused =
        |input: Vec<u8>, says: &[&str]| piped_is_refused(&daemon, &import, input, says);
    is_refused(Vec::new(), &["standard input is empty"])?;
    let mut qcow2 = image(MIB as usize);
    qcow2[..4].copy_from_slice(b"QFI\xfb");
    is_refused(
        qcow2.clone(),
        &[
            "standard input is a qcow2 image",
            "qemu-img convert",
            "--raw",
        ],
    )?;
    // Its length is known before any read.
    let large = write(&daemon, "large", &image(5 * MIB as usize))?;
    let output = daemon
        .cli_command(&import)
        .stdin(File::open(large)?)
        .output()?;
    let text = String::from_utf8_lossy(&output.stderr);
    ensure!(text.contains("5 MiB (5242880 bytes)"), "{text}");
    ensure!(mapped(&daemon, "t/v")? == 0, "something was written");
    // A pipe's length is not known; the next import may need --force.
    is_refused(
        image(4 * MIB as usize + 1),
        &[
            "at least 4 MiB (4194305 bytes)",
            "only 4 MiB (4194304 bytes)",
            "--force",
        ],
    )?;
    // The failed import may have written nothing.
    let force = ["volume", "import", "-", "t/v", "--force"];
    let output = piped(&daemon, &force, image(MIB as usize))?;
    ensure!(output.status.success(), "{output:?}");
    is_refused(image(MIB as usize), &["t/v holds", "--force"])?;
    // A fixed VHD has its mark at the end.
    let mut vhd = image(MIB as usize);
    let end = vhd.len() - 512;
    vhd[end..end + 8].copy_from_slice(b"conectix");
    piped_is_refused(
        &daemon,
        &force,
        vhd,
        &["a VHD image", "a part of the image"],
    )?;
    let raw = ["volume", "import", "-", "t/v", "--force", "--raw"];
    let output = piped(&daemon, &raw, qcow2.clone())?;
    ensure!(output.status.success(), "{output:?}");
    ensure!(exported(&daemon, "t/v")?.starts_with(&qcow2));
    // Neither end may be a terminal.
    let (terminal, _behind) = terminal()?;
    let mut from_terminal = daemon.cli_command(&import);
    from_terminal.stdin(terminal.try_clone()?);
    let mut to_terminal = daemon.cli_command(&["volume", "export", "t/v", "-"]);
    to_terminal.stdout(terminal);
    for (command, says) in [
        (&mut from_terminal, "standard input is a terminal"),
        (&mut to_terminal, "standard output is a terminal"),
    ] {
        let output = ended(command.stderr(Stdio::piped()).spawn()?)?;
        let text = String::from_utf8_lossy(&output.stderr);
        ensure!(text.contains(says), "{text}");
    }
    no_access_is_left(&daemon)?;
    daemon.stop()
}

/// A reader that leaves, and an interrupt while the pipe's other end is blocked.
#[test]
fn a_pipe_that_ends_leaves_no_access() -> Result<()> {
    let mut daemon = start("1G")?;
    daemon.cli(&["volume", "create", "t/v", "--size", "16M"])?;
    let ones = write(&daemon, "ones", &vec![1; 16 * MIB as usize])?;
    daemon.cli(&["volume", "import", &ones, "t/v"])?;
    let pipes = |args: &[&str]| {
        daemon
            .cli_command(args)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
    };
    let failure = |command: Child| -> Result<String> {
        let output = ended(command)?;
        ensure!(output.status.code() == Some(1), "{:?}", output.status);
        Ok(String::from_utf8(output.stderr)?)
    };
    let export = ["volume", "export", "t/v", "-"];
    let mut command = pipes(&export)?;
    let mut reader = command.stdout.take().context("no pipe")?;
    reader.read_exact(&mut [0; 100_000])?;
    drop(reader);
    let text = failure(command)?;
    ensure!(text.contains("Broken pipe"), "{text}");
    no_access_is_left(&daemon)?;

    // More than the pipe holds, and no further reads.
    let mut command = pipes(&export)?;
    let mut reader = command.stdout.take().context("no pipe")?;
    reader.read_exact(&mut [0; 100_000])?;
    interrupt(&command)?;
    let text = failure(command)?;
    ensure!(text.contains("interrupted"), "{text}");
    no_access_is_left(&daemon)?;

    let mut command = pipes(&["volume", "import", "-", "t/v", "--force"])?;
    let mut sender = command.stdin.take().context("no pipe")?;
    sender.write_all(&vec![2; 2 * MIB as usize])?;
    wait::until("the import", LIMIT, || {
        let exports = daemon.cli(&["export", "list"])?;
        Ok(exports
            .as_array()
            .is_some_and(|all| !all.is_empty())
            .then_some(()))
    })?;
    interrupt(&command)?;
    let text = failure(command)?;
    ensure!(text.contains("interrupted"), "{text}");
    no_access_is_left(&daemon)?;
    daemon.stop()
}

#[test]
fn import_refuses_other_formats() -> Result<()> {
    let mut daemon = start("256M")?;
    for (volume, block_size) in [("t/small", "512"), ("t/large", "4096")] {
        let create = [
            "volume",
            "create",
            volume,
            "--size",
            "16M",
            "--block-size",
            block_size,
        ];
        daemon.cli(&create)?;
    }
    let with = |at: usize, magic: &[u8]| {
        let mut bytes = vec![0; 2 * MIB as usize];
        bytes[at..at + magic.len()].copy_from_slice(magic);
        bytes
    };
    let end = 2 * MIB as usize - 512;
    let formats: [(&str, usize, &[u8], &str); 9] = [
        ("qcow2", 0, b"QFI\xfb", "qemu-img convert -O raw"),
        ("VMDK", 0, b"KDMV", "qemu-img convert -O raw"),
        ("VHD", 0, b"conectix", "qemu-img convert -O raw"),
        ("VHD", end, b"conectix", "qemu-img convert -O raw"),
        ("VHDX", 0, b"vhdxfile", "qemu-img convert -O raw"),
        ("VDI", 64, b"\x7f\x10\xda\xbe", "qemu-img convert -O raw"),
        ("gzip", 0, b"\x1f\x8b\x08", "gzip -dc"),
        ("xz", 0, b"\xfd7zXZ\0", "xz -dc"),
        ("zstd", 0, b"\x28\xb5\x2f\xfd", "zstd -dc"),
    ];
    for (name, at, magic, command) in formats {
        let image = write(&daemon, "image", &with(at, magic))?;
        let says = &[name, command, &image];
        refused(&daemon, &["volume", "import", &image, "t/large"], says)?;
    }
    ensure!(mapped(&daemon, "t/large")? == 0, "something was written");
    let gpt = write(&daemon, "gpt", &with(512, b"EFI PART"))?;
    refused(
        &daemon,
        &["volume", "import", &gpt, "t/large"],
        &["512", "4096", "--block-size 512"],
    )?;
    daemon.cli(&["volume", "import", &gpt, "t/small"])?;
    let gpt = write(&daemon, "gpt", &with(4096, b"EFI PART"))?;
    refused(
        &daemon,
        &["volume", "import", &gpt, "t/small"],
        &["--block-size 4096"],
    )?;
    let raw = with(0, b"QFI\xfb");
    let image = write(&daemon, "image", &raw)?;
    daemon.cli(&["volume", "import", &image, "t/large", "--raw"])?;
    ensure!(exported(&daemon, "t/large")?.starts_with(&raw));
    daemon.stop()
}

/// Reading holes would exceed the time limit.
#[test]
fn an_export_reads_no_holes() -> Result<()> {
    const VOLUME: u64 = 8 << 40;
    let mut daemon = start("1G")?;
    daemon.cli(&["volume", "create", "t/v", "--size", "8T"])?;
    let sparse = daemon.folder().join("sparse.img");
    let file = std::fs::File::create(&sparse)?;
    let places = [0, 5 << 40, VOLUME / 2 - 4096];
    for place in places {
        file.write_all_at(&[7; 4096], place)?;
    }
    daemon.cli(&["volume", "import", &text(&sparse)?, "t/v"])?;
    let out = daemon.folder().join("out.img");
    daemon.cli(&["volume", "export", "t/v", &text(&out)?])?;
    let out = std::fs::File::open(out)?;
    ensure!(out.metadata()?.len() == VOLUME);
    for place in places {
        let mut block = [0; 4096];
        out.read_exact_at(&mut block, place)?;
        ensure!(block == [7; 4096], "at {place}");
    }
    daemon.stop()
}
