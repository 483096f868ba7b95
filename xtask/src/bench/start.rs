//! `cargo xtask bench start`: time from the daemon's start to the first I/O.
//!
//! The pool is on a file. A host tries every millisecond to connect and read a block; the time
//! includes the client's start. See also `takeover` and `pool-open`.

use std::net::TcpStream;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use xtask::process;

use super::Options;
use super::forebay::{self, Forebay};
use super::measure::{Summary, median};
use super::tcp;

const LIMIT: Duration = Duration::from_secs(30);

pub(crate) fn run(options: &Options) -> Result<()> {
    let rounds = if options.quick { 5 } else { 30 };
    let program = forebay::build()?;
    let file =
        crate::cargo::target_folder().join(format!("bench-start-{}.img", std::process::id()));
    std::fs::File::create(&file)?.set_len(1 << 30)?;
    let spec = format!("file:{}", file.display());
    let mut forebay = Forebay::start_with(&program, &spec, tcp::TARGET_CPU, "256M")?;
    let mut accepted = Vec::new();
    let mut served = Vec::new();
    for _ in 0..rounds {
        forebay.stop()?;
        let begun = Instant::now();
        forebay.start_again()?;
        while TcpStream::connect(("127.0.0.1", forebay.port)).is_err() {
            if begun.elapsed() > LIMIT {
                bail!("nothing listened within {} s", LIMIT.as_secs());
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        accepted.push(begun.elapsed().as_secs_f64() * 1e3);
        while !read_once(&program, &forebay) {
            if begun.elapsed() > LIMIT {
                bail!("nothing was served within {} s", LIMIT.as_secs());
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        served.push(begun.elapsed().as_secs_f64() * 1e3);
    }
    let longest = served.iter().copied().fold(0.0, f64::max);
    let (accepted, served) = (median(accepted), median(served));
    println!("from the daemon's start, ms, median of {rounds}:");
    println!("{:<28}{accepted:>8.1}", "a connection is accepted");
    println!(
        "{:<28}{served:>8.1}   longest {longest:.1}",
        "a read is served"
    );
    let mut summary = Summary::default();
    summary.put("accepted_ms", accepted);
    summary.put("served_ms", served);
    summary.put("served_longest_ms", longest);
    drop(forebay);
    let _ = std::fs::remove_file(file);
    summary.print("start", options.json.as_deref())
}

/// Whether a host can read a block now.
fn read_once(program: &std::path::Path, forebay: &Forebay) -> bool {
    let mut command = Command::new(program);
    command
        .args(["--json", "bench", "load", "--addr"])
        .arg(format!("127.0.0.1:{}", forebay.port))
        .args(["--nqn", &forebay.nqn, "--rw", "randread", "--bs", "4K"])
        .args(["--qd", "1", "--span", "4K", "--once-per", "4K"]);
    process::text(&mut command, LIMIT).is_ok()
}
