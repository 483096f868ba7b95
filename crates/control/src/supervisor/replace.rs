//! An engine makes way for another one, of the program as it is installed now.
//!
//! Purpose: an upgrade of which hosts and machines notice nothing but a pause.
//! Design: the program is first asked which formats it speaks: one that can't be run, or could not go on with what the
//! running engine leaves, ends nothing. Then the engine is killed, and its successor goes on as after any death: there is
//! one way to take over, and it is the one that is tested most. But it is told of as what it is, and no death is counted.
//! Not here: the daemon's own replacement (whoever started it starts another), what a successor does.

use std::io;
use std::process::{Command, Stdio};
use std::time::Duration;

use forebay_xlate::boundary::formats;
use tokio::time::{sleep, timeout};

use super::{Supervisor, process};
use crate::api::error::ApiError;
use crate::api::model::EngineState;

/// How long it is waited for an engine that can be replaced.
const BEGIN_LIMIT: Duration = Duration::from_secs(15);
/// How long the program may take to say which formats it speaks.
const ASK_LIMIT: Duration = Duration::from_secs(10);
/// How long it is waited for that the successor serves; it goes on to be started beyond that.
const SERVES_LIMIT: Duration = Duration::from_secs(30);

impl Supervisor {
    /// Ends the running engine so that another one goes on. The answer says which.
    pub(crate) async fn replace(&self) -> Result<String, ApiError> {
        // A daemon that has just begun has yet to greet its engine.
        let before = self.next_serving(BEGIN_LIMIT, None).await.ok_or_else(|| {
            ApiError::unavailable("no engine serves").hint("`forebay status` says why")
        })?;
        self.program_can_follow().await?;
        // It may have died meanwhile, and its successor is of that program.
        if self.serving_engine() == Some(before) {
            tracing::info!(generation = before, "the engine is replaced");
            self.replacing.set(true);
            self.kill();
        }
        if (self.next_serving(SERVES_LIMIT, Some(before)).await).is_none() {
            let why = "the engine has ended, and no other one serves yet";
            return Err(ApiError::unavailable(why).hint("`forebay status` says why"));
        }
        let view = self.view();
        Ok(format!(
            "engine {} (pid {}) goes on where engine {before} stopped",
            view.generation,
            view.pid.unwrap_or(0)
        ))
    }

    /// The generation of the engine that serves.
    fn serving_engine(&self) -> Option<u64> {
        let view = self.view();
        (view.state == EngineState::Running && view.pid.is_some()).then_some(view.generation)
    }

    /// Waits for one that serves and is not this one.
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

    /// Refuses a program that does not run, or that could not go on with what the running engine leaves.
    async fn program_can_follow(&self) -> Result<(), ApiError> {
        let program = self.config.program.display();
        let theirs = self.ask_formats().await.map_err(|error| {
            ApiError::unavailable(format!("{program} can't be run: {error}"))
                .hint("the running engine goes on")
        })?;
        let ours = formats();
        if theirs == ours {
            return Ok(());
        }
        let why = format!(
            "{program} speaks formats {theirs:?}, and what is to be taken over is in {ours}"
        );
        Err(ApiError::unavailable(why)
            .hint("`forebay shutdown` ends both in good order; then start the new version"))
    }

    /// The formats that the program as it is now speaks.
    async fn ask_formats(&self) -> io::Result<String> {
        let mut child = Command::new(&self.config.program)
            .arg("formats")
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
            let _ = child.kill();
        }
        // It has ended: nothing of this waits.
        let output = child.wait_with_output()?;
        match in_time && output.status.success() {
            true => Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned()),
            false => Err(io::Error::other(format!(
                "asked for its formats, it ended with {}",
                output.status
            ))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::EngineConfig;
    use std::os::unix::fs::PermissionsExt;
    use std::path::Path;
    use std::rc::Rc;

    async fn said_by(folder: &Path, script: &str) -> Result<(), String> {
        let program = folder.join("program.sh");
        std::fs::write(&program, format!("#!/bin/sh\n{script}\n")).unwrap();
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o700)).unwrap();
        let config = EngineConfig {
            program,
            reactors: 1,
            cpus: Vec::new(),
            stuck_after: Duration::ZERO,
        };
        let supervisor = Supervisor::new(config, folder, folder, None, Rc::default());
        let said = supervisor.program_can_follow().await;
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
            assert_eq!(said_by(at, &format!("echo {ours}")).await, Ok(()));
            let asked = said_by(at, &format!("[ \"$*\" = formats ] && echo {ours}")).await;
            assert_eq!(asked, Ok(()));
            let other = said_by(at, "echo 0.0.0.0").await.unwrap_err();
            assert!(
                other.contains("\"0.0.0.0\"") && other.contains(&ours),
                "{other}"
            );
            let broken = said_by(at, &format!("echo {ours}; exit 3"))
                .await
                .unwrap_err();
            assert!(broken.contains("exit status: 3"), "{broken}");
        });
    }
}
