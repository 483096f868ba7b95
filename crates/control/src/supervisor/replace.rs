//! Replaces the running engine by one of the installed program or of firmware slot 2, for upgrades.
//!
//! First the program must start in check mode and speak the running engine's formats. The next
//! generation must be durable, and the engine must not wait for a device, which would delay its
//! end. Then the engine is killed and its successor takes over as after any death, the best tested
//! path. It does not count as a death.

use std::io;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use tokio::time::{sleep, timeout};

use super::{Supervisor, process};
use crate::config::EngineConfig;
use crate::firmware::{SERVES_LIMIT, Slot};
use crate::model::EngineState;
use crate::model::error::ApiError;
use crate::owner::Owner;

const BEGIN_LIMIT: Duration = Duration::from_secs(15);
/// How long the program may take to report its formats.
const ASK_LIMIT: Duration = Duration::from_secs(10);
const SAYS_AT_MOST_BYTES: usize = 4096;
/// How much longer to wait if another program may have to replace the first.
const FALL_BACK_LIMIT: Duration = Duration::from_secs(15);

impl Supervisor {
    /// By an engine of the program in `slot`, which stays the active one.
    pub(crate) async fn replace(&self, owner: &Owner, slot: Slot) -> Result<String, ApiError> {
        // A daemon that has just begun must first greet its engine.
        let before = self.next_serving(BEGIN_LIMIT, None).await.ok_or_else(|| {
            ApiError::unavailable("no engine serves").hint("`forebay status` says why")
        })?;
        let program = self.firmware.program(slot).await?;
        self.program_can_follow(&program).await?;
        if let Some(trouble) = owner.states.hang_troubles().into_iter().next() {
            return Err(ApiError::unavailable(trouble).hint(
                "an engine that waits for a device may not end: try again when the device answers",
            ));
        }
        // A daemon that has just begun may still have to commit it.
        let numbered = async {
            while self.next_generation.get().is_none() {
                sleep(Duration::from_millis(10)).await;
            }
        };
        if timeout(BEGIN_LIMIT, numbered).await.is_err() {
            let why = "the next engine's number is not in the catalog yet";
            return Err(ApiError::unavailable(why).hint(
                "try again in a moment; `forebay status` says what is wrong with the catalog",
            ));
        }
        self.firmware.set_next(slot).await?;
        let drops = self.line.drops();
        // If it died meanwhile, its successor already runs the new program.
        if self.serving_engine() == Some(before) {
            tracing::info!(generation = before, "the engine is replaced");
            self.replacing.set(true);
            // From here on, leaving the engine waits for the next one.
            self.view.borrow_mut().state = EngineState::Restarting;
            self.kill();
        }
        let limit = match slot {
            Slot::Installed => SERVES_LIMIT,
            // For slot 1's program, too.
            Slot::Downloaded => SERVES_LIMIT + FALL_BACK_LIMIT,
        };
        if (self.next_serving(limit, Some(before)).await).is_none() {
            let why = "the engine has ended, and no other one serves yet";
            return Err(ApiError::unavailable(why).hint("`forebay status` says why"));
        }
        if self.line.drops() != drops {
            let why = "another engine serves, but could not continue where the previous one stopped: hosts reconnect";
            return Err(ApiError::unavailable(why).hint("`forebay events` says why"));
        }
        let view = self.view();
        if view.slot != slot {
            let why = match self.firmware.fell_back() {
                Some(fell_back) => fell_back.why,
                None => "the engine died meanwhile".to_owned(),
            };
            let slot = u8::from(slot);
            return Err(ApiError::unavailable(format!(
                "the program in firmware slot {slot} does not serve, and the other one does: {why}"
            ))
            .hint("`forebay firmware slots` shows the slots, and `forebay events` says more"));
        }
        Ok(format!(
            "engine {} (pid {}, version {}) continues where engine {before} stopped",
            view.generation,
            view.pid.unwrap_or(0),
            view.version.unwrap_or_default()
        ))
    }

    fn serving_engine(&self) -> Option<u64> {
        let view = self.view();
        (view.state == EngineState::Running && view.pid.is_some()).then_some(view.generation)
    }

    async fn next_serving(&self, limit: Duration, not: Option<u64>) -> Option<u64> {
        let serves = async {
            loop {
                match self.serving_engine() {
                    Some(now) if Some(now) != not => return now,
                    _ => sleep(Duration::from_millis(10)).await,
                }
            }
        };
        timeout(limit, serves).await.ok()
    }

    /// Refuses a program that does not run or could not take over.
    async fn program_can_follow(&self, program: &Path) -> Result<(), ApiError> {
        let theirs = self.ask_formats(program).await;
        let program = program.display();
        let theirs = theirs.map_err(|error| {
            ApiError::unavailable(format!("{program} can't be run: {error}"))
                .hint("the running engine continues")
        })?;
        // The running engine may be of another program than this daemon.
        let ours = match process::recorded(&self.run_dir) {
            Ok(Some(record)) if !record.formats.is_empty() => record.formats,
            _ => "unknown ones".to_owned(),
        };
        if theirs == ours {
            return Ok(());
        }
        let why = format!("{program} uses formats {theirs:?}, but the running engine uses {ours}");
        Err(ApiError::unavailable(why)
            .hint("`forebay shutdown` ends both in good order; then start the new version"))
    }

    /// Starts a program in check mode.
    async fn ask_formats(&self, program: &Path) -> io::Result<String> {
        let config = EngineConfig {
            program: program.to_owned(),
            ..self.config.clone()
        };
        let mut command = config.command(&self.run_dir.join("engine-check.sock"), 0);
        let mut child = command
            .arg("--check")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()?;
        let ended = process::watch(child.id());
        let in_time = match &ended {
            Ok(ended) => timeout(ASK_LIMIT, ended.readable()).await.is_ok(),
            Err(_) => false,
        };
        if !in_time {
            process::end(child);
            let why = format!("it did not end within {ASK_LIMIT:?}, and is killed");
            return Err(ended.err().unwrap_or_else(|| io::Error::other(why)));
        }
        // It has ended, so this doesn't wait. The pipe must not block either: a child of the
        // program may hold it.
        let status = child.wait()?;
        let mut said = [0; SAYS_AT_MOST_BYTES];
        let mut said_bytes = 0;
        if let Some(pipe) = &child.stdout {
            rustix::io::ioctl_fionbio(pipe, true)?;
            said_bytes = match rustix::io::read(pipe, &mut said) {
                Err(rustix::io::Errno::AGAIN) => 0,
                read => read?,
            };
        }
        match status.success() {
            true => Ok(String::from_utf8_lossy(&said[..said_bytes])
                .trim()
                .to_owned()),
            false => Err(io::Error::other(format!("its engine ended with {status}"))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::firmware::Firmware;
    use forebay_xlate::boundary::formats;
    use std::os::unix::fs::PermissionsExt;
    use std::rc::Rc;

    async fn said_by(folder: &Path, script: &str) -> Result<(), String> {
        let program = folder.join("program.sh");
        std::fs::write(&program, format!("#!/bin/sh\n{script}\n")).unwrap();
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o700)).unwrap();
        let config = EngineConfig {
            program: program.clone(),
            reactors: 1,
            cpus: Vec::new(),
            stuck_after: Duration::ZERO,
        };
        let firmware = Firmware::new(folder, program.clone(), Vec::new(), Rc::default());
        let supervisor = Supervisor::new(config, firmware, folder, folder, None, Rc::default());
        let said = supervisor.program_can_follow(&program).await;
        said.map_err(|error| error.message)
    }

    #[test]
    fn a_program_that_could_not_go_on_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let at = folder.path();
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        runtime.block_on(async {
            let ours = formats();
            let says = format!("echo {ours}");
            let unknown = said_by(at, &says).await.unwrap_err();
            assert!(unknown.contains("unknown ones"), "{unknown}");
            let record = process::EngineRecord {
                state: process::EngineState::Running,
                pid: Some(1),
                generation: 1,
                socket: at.join("s"),
                start_ticks: 0,
                daemon_pid: 1,
                formats: ours.clone(),
                slot: Slot::Installed,
            };
            crate::files::write_json(&process::record_path(at), &record, false).unwrap();
            assert_eq!(said_by(at, &says).await, Ok(()));
            let asked = format!("case \"$*\" in engine*--reactors*--check) echo {ours};; esac");
            assert_eq!(said_by(at, &asked).await, Ok(()));
            let other = said_by(at, "echo 0.0.0.0").await.unwrap_err();
            assert!(
                other.contains("\"0.0.0.0\"") && other.contains(&ours),
                "{other}"
            );
            let broken = said_by(at, &format!("{says}; exit 3")).await.unwrap_err();
            assert!(broken.contains("exit status: 3"), "{broken}");
        });
    }
}
