//! `forebay serve`: from a configuration to a running daemon. Problems are checked first, so that
//! errors come at once and on stderr.

use std::os::unix::fs::DirBuilderExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use forebay_control::config::{
    DaemonConfig, EmbeddedPool, EngineConfig, FirmwareConfig, Listen, Reloaded,
};
use forebay_control::{EndedBy, firmware};
use forebay_device::ring::{Ring, RingOptions};

use crate::config::{self, Config};
use crate::failure::{Failure, Outcome, While};
use crate::output::Output;
use crate::{limits, logging};

mod check;

/// There is work for an idle thread every few minutes.
const THREADS_KEPT: Duration = Duration::from_secs(3600);

const FIND_PROGRAM: &str = "find this program's executable";

#[derive(Debug, Args)]
pub(crate) struct ServeArgs {
    /// The configuration [default: ./forebay.toml if it exists, else built-in defaults]
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// The folder for all files without a configured location [default: ./var]
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Leave the engine running after SIGTERM or SIGINT; the next daemon continues with it
    #[arg(long)]
    keep_engine: bool,
    /// Check the configuration without changing anything; fails if any part of it would not work
    #[arg(long)]
    check: bool,
    /// Exit with this code after `forebay shutdown`, so that a service manager can recognize it
    #[arg(long, value_name = "CODE", default_value_t = 0)]
    shutdown_code: u8,
    /// Stop when the process that started this one ends
    #[arg(long, hide = true)]
    with_parent: bool,
}

struct Program {
    log: logging::Log,
    file: Option<PathBuf>,
    dir: Option<PathBuf>,
}

impl forebay_control::config::Program for Program {
    fn reload(&self) -> Result<Reloaded, String> {
        self.log.close();
        let config = config::load(self.file.as_deref(), self.dir.as_deref())
            .map_err(|failure| failure.to_string())?;
        self.log.set_level(&config.log_level);
        Ok(Reloaded {
            listen: listen(&config),
            clusters: config.clusters,
        })
    }

    fn open_log(&self) -> Result<(), String> {
        self.log.open()
    }
}

fn listen(config: &Config) -> Listen {
    Listen {
        nvme_tcp: config.nvme_tcp.clone(),
        metrics: config.metrics,
    }
}

pub(crate) fn serve(
    args: &ServeArgs,
    socket: Option<PathBuf>,
    output: Output,
) -> Outcome<ExitCode> {
    forebay_engine::signals::reset().while_doing("reset inherited signals")?;
    limits::raise();
    if args.check {
        return warn_beforehand(args, socket, output);
    }
    let config = configuration(args, socket)?;
    limits::check(config.reactors)?;
    #[cfg(feature = "test-device")]
    forebay_xlate::kill::arm_from_environment().map_err(Failure::new)?;
    if args.with_parent {
        stop_with_parent()?;
    }
    // Report a problem of the engine here rather than in its log.
    drop(Ring::new(&RingOptions::default()).map_err(|error| {
        Failure::new(error.to_string())
            .hint("Forebay needs Linux 6.1 or newer with io_uring allowed")
    })?);
    for folder in [&config.state_dir, &config.run_dir] {
        make_folder(folder)?;
    }
    follow_firmware(&config)?;
    let log = logging::start(&config.log_level, config.log_format, &config.log_file);
    let program = Program {
        log,
        // The working directory may change by then.
        file: config.source.clone(),
        dir: args
            .dir
            .as_deref()
            .map(std::path::absolute)
            .transpose()
            .while_doing("find the folder")?,
    };
    match &config.source {
        Some(path) => tracing::info!("configuration: {}", path.display()),
        None => tracing::info!("no configuration file: using built-in defaults"),
    }
    tracing::info!(
        descriptors = limits::descriptors(),
        "limit of open files; each connection of a host needs one"
    );
    #[cfg(feature = "test-device")]
    if config.allow_faulty {
        forebay_device::faulty::allow();
    }
    let config = DaemonConfig {
        keep_engine: args.keep_engine,
        ..daemon_config(config)?
    };
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        // The runtime panics when it cannot start a thread.
        .thread_keep_alive(THREADS_KEPT)
        .build()
        .while_doing("start the runtime")?;
    let ended = runtime.block_on(forebay_control::run(config, Box::new(program)));
    let ended_by = ended.map_err(|error| {
        let hint = error.hint().map(str::to_owned);
        tracing::error!("{error}");
        let failure = Failure::new(error.to_string());
        match hint {
            Some(hint) => failure.hint(hint),
            None => failure,
        }
    })?;
    Ok(match ended_by {
        EndedBy::Signal => ExitCode::SUCCESS,
        EndedBy::Request => args.shutdown_code.into(),
    })
}

fn configuration(args: &ServeArgs, socket: Option<PathBuf>) -> Outcome<Config> {
    let mut config = config::load(args.config.as_deref(), args.dir.as_deref())?;
    if let Some(socket) = socket {
        config.api_socket =
            std::path::absolute(&socket).while_doing(format!("find {}", socket.display()))?;
    }
    Ok(config)
}

fn warn_beforehand(args: &ServeArgs, socket: Option<PathBuf>, output: Output) -> Outcome<ExitCode> {
    let config = configuration(args, socket)?;
    Ok(match check::check(&config, output)? {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    })
}

fn make_folder(path: &Path) -> Outcome {
    std::fs::DirBuilder::new()
        .recursive(true)
        .mode(0o750)
        .create(path)
        .while_doing(format!("make the folder {}", path.display()))
}

/// Continues as a daemon of firmware slot 2's program, if that one is active.
fn follow_firmware(config: &Config) -> Outcome {
    let own = std::env::current_exe().while_doing(FIND_PROGRAM)?;
    if let Some(program) = firmware::follow(&config.state_dir, &config.firmware_keys, &own) {
        let mut command = std::process::Command::new(&program);
        let error = command.args(std::env::args_os().skip(1)).exec();
        firmware::can_not_follow(&config.state_dir, &error);
    }
    Ok(())
}

fn daemon_config(config: Config) -> Outcome<DaemonConfig> {
    let own = std::env::current_exe().while_doing(FIND_PROGRAM)?;
    let (program, installed_version) = firmware::installed(&config.state_dir, own);
    Ok(DaemonConfig {
        listen: listen(&config),
        node_name: config.node_name,
        state_dir: config.state_dir,
        run_dir: config.run_dir,
        api_socket: config.api_socket,
        engine: EngineConfig {
            program,
            reactors: config.reactors,
            cpus: config.cpus,
            stuck_after: Duration::from_secs(config.stuck_s.into()),
        },
        embedded_pool: config
            .embedded
            .map(|(path, size_bytes)| EmbeddedPool { path, size_bytes }),
        pool_devices: config.devices,
        keep_engine: false,
        version: forebay_xlate::boundary::version().to_owned(),
        firmware: FirmwareConfig {
            keys: config.firmware_keys,
            installed_version,
        },
        out_of_band: config.out_of_band,
        clusters: config.clusters,
    })
}

/// SIGTERM at the parent's end; fails if it has ended.
fn stop_with_parent() -> Outcome {
    let parent = rustix::process::getppid();
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::TERM))
        .while_doing("request a signal for the parent's exit")?;
    if rustix::process::getppid() != parent || parent.is_none() {
        return Err(Failure::new(
            "the process that started this daemon has exited",
        ));
    }
    Ok(())
}
