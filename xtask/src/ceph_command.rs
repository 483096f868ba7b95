//! `cargo xtask ceph`: starts a small Ceph cluster that goes on, or stops it.

use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use xtask::ceph::{self, Cluster, Options, POOL, Release};

use crate::cargo::target_folder;

/// The cluster's folder in the target folder, if none is named.
const FOLDER: &str = "ceph";

#[derive(Debug)]
enum Task {
    Up(Options),
    Down(PathBuf),
}

pub(crate) fn run(args: &[String]) -> Result<bool> {
    match parse(args, target_folder().join(FOLDER))? {
        Task::Up(options) => up(&options)?,
        Task::Down(folder) => {
            ceph::stop(&folder)?;
            println!("stopped and removed {}", folder.display());
        }
    }
    Ok(true)
}

fn parse(args: &[String], folder: PathBuf) -> Result<Task> {
    let Some((task, args)) = args.split_first() else {
        bail!("`ceph` needs `up` or `down`");
    };
    let mut options = Options::new(&folder, Release::V16);
    options.is_left_running = true;
    let mut is_named = false;
    let mut args = args.iter();
    let is_up = match task.as_str() {
        "up" => true,
        "down" => false,
        other => bail!("`ceph` needs `up` or `down`, not `{other}`"),
    };
    while let Some(arg) = args.next() {
        match arg.as_str() {
            "--osds" if is_up => {
                let count = args.next().context("--osds needs a number")?;
                let count = count.parse().ok().filter(|count| *count > 0);
                options.osds = count.context("--osds needs a number from 1")?;
            }
            "--release" if is_up => {
                options.release = Release::parse(args.next().context("--release needs a number")?)?;
            }
            "--cephx" if is_up => options.has_cephx = true,
            folder if !folder.starts_with('-') && !is_named => {
                options.folder = folder.into();
                is_named = true;
            }
            other => bail!("`ceph {task}` takes no `{other}`"),
        }
    }
    Ok(match is_up {
        true => Task::Up(options),
        false => Task::Down(options.folder),
    })
}

fn up(options: &Options) -> Result<()> {
    let start = Instant::now();
    let cluster = Cluster::start(options)?;
    let folder = cluster.folder().display();
    println!(
        "Ceph {} runs since {:.1} s, with the pool `{POOL}` and the monitor {}:",
        options.release.number(),
        start.elapsed().as_secs_f64(),
        cluster.monitor()
    );
    for daemon in cluster.daemons() {
        println!("  {daemon:<8} pid {}", cluster.pid(daemon)?);
    }
    println!("CEPH_CONF={}", cluster.config_file().display());
    println!(
        "LD_LIBRARY_PATH={}",
        cluster.programs().client_libraries().display()
    );
    println!("programs: {folder}/bin    keys: {folder}/keys    logs: {folder}/log");
    println!("stop it with: cargo xtask ceph down {folder}");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(line: &str) -> Result<Task> {
        let args: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
        parse(&args, "target/ceph".into())
    }

    #[test]
    fn arguments_are_parsed() {
        let Task::Up(options) = parsed("up").unwrap() else {
            panic!("not up");
        };
        assert_eq!(options.folder, PathBuf::from("target/ceph"));
        assert_eq!((options.release, options.osds), (Release::V16, 1));
        assert!(!options.has_cephx && options.is_left_running);
        let Task::Up(options) = parsed("up --osds 3 --release 20 --cephx /x").unwrap() else {
            panic!("not up");
        };
        assert_eq!(options.folder, PathBuf::from("/x"));
        assert_eq!((options.release, options.osds), (Release::V20, 3));
        assert!(options.has_cephx);
        let Task::Down(folder) = parsed("down /x").unwrap() else {
            panic!("not down");
        };
        assert_eq!(folder, PathBuf::from("/x"));
    }

    #[test]
    fn wrong_arguments_are_named() {
        for (line, word) in [
            ("", "up"),
            ("start", "start"),
            ("up --osds 0", "--osds"),
            ("up --osds", "--osds"),
            ("up --release 17", "17"),
            ("up a b", "`b`"),
            ("down --osds 1", "--osds"),
            ("up --quick", "--quick"),
        ] {
            let error = parsed(line).unwrap_err().to_string();
            assert!(error.contains(word), "{line}: {error}");
        }
    }
}
