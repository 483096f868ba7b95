//! A client of the API: HTTP/1.1 on a blocking Unix socket, one connection per request, with limits
//! on time and size. No redirects, TLS or keep-alive, which our server does not use.

use std::fmt::Display;
use std::future::Future;
use std::io;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use http_body_util::{BodyExt, Full};
use hyper::body::Bytes;
use hyper::{Request, header};
use hyper_util::rt::TokioIo;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::time::timeout;

use super::TIME_LIMIT;
use crate::model::error::{ApiError, ErrorBody};

const ANSWER_MAX_BYTES: usize = 64 * 1024 * 1024;

/// A client of one daemon.
#[derive(Debug, Clone)]
pub struct Client {
    socket: PathBuf,
    time_limit: Duration,
}

/// Why a call failed.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// No daemon answers at the socket.
    #[error("no daemon answers at {}: {source}", socket.display())]
    NoDaemon {
        /// The socket.
        socket: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The daemon refused.
    #[error(transparent)]
    Refused(#[from] ApiError),
    /// The daemon did not answer, or its answer is not understood.
    #[error("the daemon's answer to {request} can't be used: {reason}")]
    Answer {
        /// Method and path.
        request: String,
        /// The fault.
        reason: String,
    },
}

impl ClientError {
    /// Suggests a remedy.
    #[must_use]
    pub fn hint(&self) -> Option<String> {
        match self {
            Self::NoDaemon { source, .. } if source.kind() == io::ErrorKind::PermissionDenied => {
                Some("call as root, or as the user the daemon runs as".to_owned())
            }
            Self::NoDaemon { .. } => Some(
                "start one with `forebay serve`, or name its socket with --socket or \
                 FOREBAY_SOCKET"
                    .to_owned(),
            ),
            Self::Refused(error) => error.hint.clone(),
            Self::Answer { .. } => None,
        }
    }
}

impl Client {
    /// Makes a client for the API at `socket`.
    #[must_use]
    pub fn new(socket: &Path) -> Self {
        // Longer than the limits of daemon and audit, so that their error arrives.
        Self {
            socket: socket.to_owned(),
            time_limit: TIME_LIMIT + Duration::from_secs(10),
        }
    }

    /// Sets how long the daemon may be silent.
    #[must_use]
    pub fn with_time_limit(mut self, time_limit: Duration) -> Self {
        self.time_limit = time_limit;
        self
    }

    /// The API's socket.
    #[must_use]
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// `GET path`.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, ClientError> {
        self.call("GET", path, None)
    }

    /// `POST path` with a body.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn post<B: Serialize, T: DeserializeOwned>(
        &self,
        path: &str,
        body: &B,
    ) -> Result<T, ClientError> {
        self.with_body("POST", path, body)
    }

    /// `PUT path` with a body.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn put<B: Serialize, T: DeserializeOwned>(
        &self,
        path: &str,
        body: &B,
    ) -> Result<T, ClientError> {
        self.with_body("PUT", path, body)
    }

    /// `PATCH path` with a body.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn patch<B: Serialize, T: DeserializeOwned>(
        &self,
        path: &str,
        body: &B,
    ) -> Result<T, ClientError> {
        self.with_body("PATCH", path, body)
    }

    /// `DELETE path`.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn delete<T: DeserializeOwned>(&self, path: &str) -> Result<T, ClientError> {
        self.call("DELETE", path, None)
    }

    fn with_body<B: Serialize, T: DeserializeOwned>(
        &self,
        method: &str,
        path: &str,
        body: &B,
    ) -> Result<T, ClientError> {
        let body = serde_json::to_vec(body).map_err(|error| ClientError::Answer {
            request: format!("{method} {path}"),
            reason: format!("the request can't be written as JSON: {error}"),
        })?;
        self.call(method, path, Some(&body))
    }

    fn call<T: DeserializeOwned>(
        &self,
        method: &str,
        path: &str,
        body: Option<&[u8]>,
    ) -> Result<T, ClientError> {
        let (status, answer) = self.exchange(method, path, body)?;
        let unusable = |reason: String| ClientError::Answer {
            request: format!("{method} {path}"),
            reason,
        };
        if (200..300).contains(&status) {
            return serde_json::from_slice(&answer).map_err(|error| unusable(error.to_string()));
        }
        match serde_json::from_slice::<ErrorBody>(&answer) {
            Ok(body) => Err(ClientError::Refused(body.error)),
            Err(_) => Err(unusable(format!(
                "HTTP status {status} has no error in its body"
            ))),
        }
    }

    /// Sends a request with any body; returns the answer's status and body.
    ///
    /// # Errors
    /// See [`ClientError`]; a refusal is not an error here.
    pub fn exchange(
        &self,
        method: &str,
        path: &str,
        body: Option<&[u8]>,
    ) -> Result<(u16, Vec<u8>), ClientError> {
        let stream = UnixStream::connect(&self.socket).map_err(|source| ClientError::NoDaemon {
            socket: self.socket.clone(),
            source,
        })?;
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build();
        runtime
            .map_err(|error| error.to_string())
            .and_then(|runtime| runtime.block_on(self.speak(stream, method, path, body)))
            .map_err(|reason| ClientError::Answer {
                request: format!("{method} {path}"),
                reason,
            })
    }

    async fn speak(
        &self,
        stream: UnixStream,
        method: &str,
        path: &str,
        body: Option<&[u8]>,
    ) -> Result<(u16, Vec<u8>), String> {
        stream.set_nonblocking(true).map_err(text)?;
        let stream = tokio::net::UnixStream::from_std(stream).map_err(text)?;
        let mut request = Request::builder()
            .method(method)
            .uri(path)
            .header(header::HOST, "forebay")
            .header(header::CONNECTION, "close");
        if body.is_some() {
            request = request.header(header::CONTENT_TYPE, "application/json");
        }
        let body = Bytes::copy_from_slice(body.unwrap_or_default());
        let request = request.body(Full::new(body)).map_err(text)?;
        let io = TokioIo::new(stream);
        let (mut sender, connection) = hyper::client::conn::http1::handshake(io)
            .await
            .map_err(text)?;
        tokio::spawn(connection);
        let mut answer = self
            .limited(sender.send_request(request))
            .await?
            .map_err(text)?;
        let mut content = Vec::new();
        while let Some(frame) = self.limited(answer.frame()).await? {
            content.extend_from_slice(&frame.map_err(text)?.into_data().unwrap_or_default());
            if content.len() > ANSWER_MAX_BYTES {
                return Err(format!("it is longer than {ANSWER_MAX_BYTES} bytes"));
            }
        }
        Ok((answer.status().as_u16(), content))
    }

    async fn limited<F: Future>(&self, wait: F) -> Result<F::Output, String> {
        timeout(self.time_limit, wait)
            .await
            .map_err(|_| format!("nothing came for {} s", self.time_limit.as_secs()))
    }
}

fn text(error: impl Display) -> String {
    error.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::os::unix::net::UnixListener;

    /// The client's result for an answer followed by zeros, then silence or the end.
    fn heard(text: &'static str, zeros: usize, ends: bool) -> Result<(u16, Vec<u8>), String> {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("api.sock");
        let listener = UnixListener::bind(&socket).unwrap();
        let server = std::thread::spawn(move || {
            let mut stream = listener.accept().unwrap().0;
            assert!(stream.read(&mut [0; 4096]).unwrap() > 0);
            let _ = stream.write_all(text.as_bytes());
            let _ = stream.write_all(&vec![0; zeros]);
            (!ends).then_some(stream)
        });
        let client = Client::new(&socket).with_time_limit(Duration::from_secs(1));
        let answer = client.exchange("GET", "/v1/status", None);
        server.join().unwrap();
        answer.map_err(|error| error.to_string())
    }

    #[test]
    fn whole_answers_are_taken_and_no_others() {
        for text in [
            "HTTP/1.1 201 Made\r\nContent-Length: 2\r\n\r\n{}",
            "HTTP/1.1 201 Made\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{\r\n1\r\n}\r\n0\r\n\r\n",
            "HTTP/1.1 201 Made\r\n\r\n{}",
        ] {
            assert_eq!(heard(text, 0, true).unwrap(), (201, b"{}".to_vec()));
        }
        for text in [
            "",
            "HTTP/1.1 200",
            "HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\n{}",
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab",
            "SSH-2.0-x\r\n\r\n",
        ] {
            heard(text, 0, true).unwrap_err();
        }
    }

    #[test]
    fn no_answer_is_waited_for_or_read_without_end() {
        for text in ["", "HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\n{}"] {
            let error = heard(text, 0, false).unwrap_err();
            assert!(error.contains("nothing came for 1 s"), "{error}");
        }
        let error = heard("HTTP/1.1 200 OK\r\n\r\n", ANSWER_MAX_BYTES + 1, true).unwrap_err();
        assert!(error.contains("it is longer than"), "{error}");
    }
}
