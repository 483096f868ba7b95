//! A damaged pool file is repaired with a message, or its damage is named. The daemon never panics,
//! loses data silently, or changes a pool that it can't open.
//!
//! Each case damages a copy of one small pool: bit flips, lost or foreign blocks, or older ranges,
//! at random places of label and catalog.

use std::fs::OpenOptions;
use std::net::SocketAddr;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use forebay_initiator::{IoOp, Options, Session};
use forebay_tests::daemon::{Daemon, DaemonOptions};
use forebay_tests::host::Dice;

const HOST: &str = "nqn.2026-01.test:host";
const LIMIT: Duration = Duration::from_secs(60);
const POOL: &str = "128M";

struct Lab {
    daemon: Daemon,
    path: PathBuf,
    /// End of label and catalog.
    data_offset_bytes: u64,
}

impl Lab {
    fn new() -> Result<Self> {
        let mut daemon = Daemon::start(&DaemonOptions::default())?;
        let path = daemon.folder().join("pool.img");
        let device = format!("file:{}", path.display());
        daemon.create_pool(&["--device", &device, "--size", POOL])?;
        daemon.cli(&["tenant", "create", "t"])?;
        daemon.cli(&["volume", "create", "t/v", "--size", "16M"])?;
        daemon.cli(&["export", "create", "t/v", "--any-host"])?;
        write(&daemon, 7)?;
        let devices = daemon.cli(&["device", "list"])?;
        let offset = devices[0]["data_offset_bytes"].as_u64();
        let data_offset_bytes = offset.context("data_offset_bytes")?;
        daemon.stop()?;
        Ok(Self {
            daemon,
            path,
            data_offset_bytes,
        })
    }

    /// True: the pool is open with all its data.
    fn opens(&mut self, what: &str) -> Result<bool> {
        self.daemon.start_again().context("it must come up")?;
        let status = self.daemon.status()?;
        let is_there = status["pool_trouble"].is_null();
        if is_there {
            let all = self.daemon.cli(&["volume", "list"])?;
            ensure!(
                all.as_array().is_some_and(|all| all.len() == 1),
                "{what}: {all}"
            );
            read(&self.daemon, 7).context(what.to_owned())?;
            // Only a repair overwrites foreign data in a label's place.
            self.daemon.cli(&["pool", "check", "--repair"])?;
            self.daemon.pool_check()?;
            write(&self.daemon, 7)?;
        } else {
            let text = status["pool_trouble"]["message"]
                .as_str()
                .unwrap_or_default();
            ensure!(text.len() > 10, "{what}: {status}");
            println!("{what}: {text}");
        }
        self.daemon.stop()?;
        for log in [
            "daemon.log",
            "var/state/log/forebay.log",
            "var/state/log/engine.log",
        ] {
            let said = std::fs::read_to_string(self.daemon.folder().join(log)).unwrap_or_default();
            ensure!(!said.contains("panicked"), "{what}: {said}");
        }
        Ok(is_there)
    }
}

fn io(daemon: &Daemon, op: &IoOp, data: Vec<u8>) -> Result<Vec<u8>> {
    let address: SocketAddr = format!("127.0.0.1:{}", daemon.port()).parse()?;
    let nqn = "nqn.2026-01.io.forebay:test:t.v";
    let mut session = Session::connect(address, nqn, HOST, &Options::default())?;
    let mut queue = session.open_queue(1)?;
    Ok(queue.execute(op, data, LIMIT)?)
}

fn write(daemon: &Daemon, byte: u8) -> Result<()> {
    let op = IoOp::Write {
        lba: 100,
        blocks: 128,
        fua: true,
    };
    io(daemon, &op, vec![byte; 128 * 4096]).map(|_| ())
}

fn read(daemon: &Daemon, byte: u8) -> Result<()> {
    let op = IoOp::Read {
        lba: 100,
        blocks: 128,
    };
    let got = io(daemon, &op, vec![0; 128 * 4096])?;
    ensure!(got.iter().all(|b| *b == byte), "the data is not there");
    Ok(())
}

/// Writes `image` with random damage; `before` is an older state.
fn damage(path: &Path, image: &[u8], before: &[u8], dice: &mut Dice) -> Result<String> {
    let file = OpenOptions::new().write(true).open(path)?;
    file.write_all_at(image, 0)?;
    // Most of the catalog's area is empty.
    let used: Vec<u64> = (0..image.len() as u64 / 4096)
        .filter(|block| {
            let at = (block * 4096) as usize;
            image[at..at + 4096].iter().any(|byte| *byte != 0)
        })
        .collect();
    let block = used[dice.usize(..used.len())];
    // Damage the label, which is the first block, more often.
    let block = if dice.u64(..8) == 0 { 0 } else { block };
    let at = block * 4096;
    let mut bytes = image[at as usize..at as usize + 4096].to_vec();
    let what = match dice.u64(..6) {
        4 | 5 => {
            // As if the writes of these blocks were lost.
            let old = |block: u64| &before[block as usize * 4096..][..4096];
            let new = |block: u64| &image[block as usize * 4096..][..4096];
            let changed: Vec<u64> = used.into_iter().filter(|b| old(*b) != new(*b)).collect();
            let first = changed[dice.usize(..changed.len())];
            let count = 1 + dice.u64(..4);
            let last = (first + count).min(image.len() as u64 / 4096);
            for block in first..last {
                file.write_all_at(old(block), block * 4096)?;
            }
            return Ok(format!("blocks {first}..{last} as they were"));
        }
        0 | 1 => {
            let bit = dice.u64(..4096 * 8);
            bytes[(bit / 8) as usize] ^= 1 << (bit % 8);
            format!("bit {bit} of block {block} flipped")
        }
        2 => {
            bytes.fill(0);
            format!("block {block} lost")
        }
        _ => {
            let other = used[dice.usize(..used.len())] as usize * 4096;
            bytes.copy_from_slice(&image[other..other + 4096]);
            format!("block {block} has what block {} has", other / 4096)
        }
    };
    file.write_all_at(&bytes, at)?;
    Ok(what)
}

#[test]
fn a_damaged_pool_file_is_repaired_or_named() -> Result<()> {
    let mut lab = Lab::new()?;
    let mut before = vec![0; lab.data_offset_bytes as usize];
    std::fs::File::open(&lab.path)?.read_exact_at(&mut before, 0)?;
    lab.daemon.start_again()?;
    for _ in 0..3 {
        lab.daemon
            .cli(&["volume", "create", "t/w", "--size", "16M"])?;
        lab.daemon.cli(&["volume", "delete", "t/w"])?;
    }
    lab.daemon.stop()?;
    let mut image = vec![0; lab.data_offset_bytes as usize];
    std::fs::File::open(&lab.path)?.read_exact_at(&mut image, 0)?;
    let mut dice = Dice::with_seed(17);
    let mut there = 0;
    for case in 0..24 {
        let what = damage(&lab.path, &image, &before, &mut dice)?;
        let is_there = lab
            .opens(&what)
            .with_context(|| format!("case {case}: {what}"))?;
        println!(
            "case {case}: {what}: {}",
            if is_there { "there" } else { "refused" }
        );
        there += u32::from(is_there);
    }
    let log = lab.daemon.folder().join("var/state/log/forebay.log");
    let log = std::fs::read_to_string(log)?;
    let reported = log.lines().filter(|line| line.contains("repaired")).count();
    ensure!(reported >= 6, "repairs were told {reported} times: {log}");
    // One damaged block is never fatal, because the catalog has two copies.
    ensure!(there >= 18, "only {there} of 24 opened");
    let file = OpenOptions::new().write(true).open(&lab.path)?;
    file.write_all_at(&image, 0)?;
    ensure!(lab.opens("undamaged")?);
    Ok(())
}

#[test]
fn a_foreign_file_in_the_pools_place_is_named() -> Result<()> {
    let mut lab = Lab::new()?;
    // The daemon does not search this folder.
    std::fs::create_dir(lab.daemon.folder().join("away"))?;
    let kept = lab.daemon.folder().join("away/kept.img");
    std::fs::rename(&lab.path, &kept)?;
    let size = std::fs::metadata(&kept)?.len();
    // The magic of the catalog's database.
    let database = b"redb\x1a\x0a\xa9\x0d\x0a".as_slice();
    for (begin, at) in [
        (database, 0),
        (database, 1 << 20),
        (b"\x55\xaa".as_slice(), 510),
    ] {
        let file = std::fs::File::create(&lab.path)?;
        file.set_len(size)?;
        file.write_all_at(begin, at)?;
        ensure!(!lab.opens("a foreign file")?, "it was taken for a pool");
        let now = std::fs::read(&lab.path)?;
        let at = at as usize;
        ensure!(&now[at..at + begin.len()] == begin, "it was written to");
    }
    // Another program's database, as the device and below our label.
    let foreign = other_database(&lab.daemon.folder().join("away/other.redb"))?;
    for at in [0, 1 << 20] {
        if at == 0 {
            std::fs::File::create(&lab.path)?.set_len(size)?;
        } else {
            std::fs::copy(&kept, &lab.path)?;
        }
        let file = OpenOptions::new().write(true).open(&lab.path)?;
        file.write_all_at(&foreign[..foreign.len().min(2 << 20)], at)?;
        if at > 0 {
            // Over both copies.
            let area = vec![0x5a; (lab.data_offset_bytes - (3 << 20)) as usize];
            file.write_all_at(&area, 3 << 20)?;
        }
        ensure!(!lab.opens("another's database")?, "it was taken for a pool");
        let mut now = vec![0; 1 << 20];
        std::fs::File::open(&lab.path)?.read_exact_at(&mut now, at)?;
        ensure!(now == foreign[..1 << 20], "it was written to");
    }
    std::fs::copy(&kept, &lab.path)?;
    let file = OpenOptions::new().write(true).open(&lab.path)?;
    let area = vec![0x5a; (lab.data_offset_bytes - (1 << 20)) as usize];
    file.write_all_at(&area, 1 << 20)?;
    file.write_all_at(database, 1 << 20)?;
    ensure!(
        !lab.opens("a foreign catalog")?,
        "it was taken for a catalog"
    );
    std::fs::copy(&kept, &lab.path)?;
    ensure!(lab.opens("undamaged")?);
    Ok(())
}

fn other_database(path: &Path) -> Result<Vec<u8>> {
    let table = redb::TableDefinition::<u64, &[u8]>::new("volumes");
    let database = redb::Database::create(path)?;
    let transaction = database.begin_write()?;
    {
        let mut table = transaction.open_table(table)?;
        for key in 0..1000 {
            table.insert(key, [key as u8; 2000].as_slice())?;
        }
    }
    transaction.commit()?;
    drop(database);
    Ok(std::fs::read(path)?)
}

#[test]
fn a_pool_of_another_version_is_named() -> Result<()> {
    let mut lab = Lab::new()?;
    let file = OpenOptions::new().read(true).write(true).open(&lab.path)?;
    // The format version in both copies of the label.
    for copy in [0, 512 << 10] {
        file.write_all_at(&2_u32.to_le_bytes(), copy + 16)?;
    }
    let image = std::fs::read(&lab.path)?;
    ensure!(!lab.opens("another version")?);
    lab.daemon.start_again()?;
    let device = format!("file:{}", lab.path.display());
    let status = lab.daemon.status()?["pool_trouble"].to_string();
    ensure!(status.contains("another version"), "{status}");
    let mut asked = vec![lab.daemon.cli(&["pool", "open", "--device", &device])];
    asked.push(lab.daemon.cli(&["pool", "create", "--device", &device]));
    for refused in asked {
        let said = format!("{:#}", refused.err().context("it was taken")?);
        ensure!(
            said.contains("another version") && said.contains("format 2"),
            "{said}"
        );
    }
    lab.daemon.stop()?;
    ensure!(std::fs::read(&lab.path)? == image, "it was written to");
    Ok(())
}

#[test]
fn a_device_of_another_pool_is_named() -> Result<()> {
    let mut daemon = Daemon::start(&DaemonOptions::default())?;
    let path = |name: &str| daemon.folder().join(name);
    let (a0, a1, b) = (path("a0"), path("a1"), path("b"));
    let spec = |path: &Path| format!("file:{}", path.display());
    let (a0_spec, a1_spec) = (spec(&a0), spec(&a1));
    let mut other = Daemon::start(&DaemonOptions::default())?;
    other.create_pool(&["--device", &spec(&b), "--size", POOL, "--name", "other"])?;
    other.stop()?;
    daemon.create_pool(&["--device", &a0_spec, "--device", &a1_spec, "--size", POOL])?;
    daemon.cli(&["tenant", "create", "t"])?;
    daemon.cli(&["volume", "create", "t/v", "--size", "16M"])?;
    daemon.cli(&["export", "create", "t/v", "--any-host"])?;
    write(&daemon, 7)?;
    daemon.stop()?;

    std::fs::create_dir(daemon.folder().join("away"))?;
    let away = daemon.folder().join("away/a1");
    std::fs::rename(&a1, &away)?;
    std::fs::copy(&b, &a1)?;
    daemon.start_again()?;
    let status = daemon.status()?;
    let said = format!(
        "{status} {}",
        daemon.cli(&["device", "list"]).unwrap_or_default()
    );
    ensure!(
        said.contains("other") || said.contains("another pool"),
        "{said}"
    );
    daemon.stop()?;
    ensure!(
        std::fs::read(&a1)? == std::fs::read(&b)?,
        "another pool's device was written to"
    );

    std::fs::rename(&a0, &a1)?;
    std::fs::rename(&away, &a0)?;
    daemon.start_again()?;
    let status = daemon.status()?;
    ensure!(status["pool_trouble"].is_null(), "{status}");
    read(&daemon, 7).context("with the devices exchanged")?;
    daemon.pool_check()?;
    daemon.stop()
}
