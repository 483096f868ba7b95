//! Calls of the daemon's API, without the time and the processor time of a program's start.

use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

const LIMIT: Duration = Duration::from_secs(60);

/// The API's socket. Each call has its own connection, as the daemon ends idle ones.
pub(super) struct Api(pub(super) PathBuf);

impl Api {
    /// Takes `bench/VOLUME@NAME`; returns when the call began and ended.
    pub(super) fn snapshot(&self, name: &str) -> Result<(Instant, Instant)> {
        let body = json!({ "snapshots": [name] });
        self.post("/v1/tenants/bench/snapshots", &body)
    }

    /// Clones `bench/SNAPSHOT` as `bench/CLONE`.
    pub(super) fn clone_of(&self, snapshot: &str, clone: &str) -> Result<(Instant, Instant)> {
        let path = format!("/v1/tenants/bench/volumes/{snapshot}/clone");
        self.post(&path, &json!({ "name": clone }))
    }

    fn post(&self, path: &str, body: &Value) -> Result<(Instant, Instant)> {
        let body = body.to_string();
        let request = format!(
            "POST {path} HTTP/1.1\r\nhost: forebay\r\nconnection: close\r\n\
             content-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        );
        let begun = Instant::now();
        let mut stream = UnixStream::connect(&self.0)
            .with_context(|| format!("connect to {}", self.0.display()))?;
        stream.set_read_timeout(Some(LIMIT))?;
        stream.write_all(request.as_bytes())?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        let ended = Instant::now();
        ensure!(
            answer.starts_with("HTTP/1.1 2"),
            "POST {path} {body}: {answer}"
        );
        Ok((begun, ended))
    }
}
