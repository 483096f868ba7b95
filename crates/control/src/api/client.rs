//! A client of the API: HTTP/1.1 on a blocking Unix socket, one connection per request, with limits
//! on time and size. No redirects, TLS or keep-alive, which our server does not use.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::TIME_LIMIT;
use crate::model::error::{ApiError, ErrorBody};

const ANSWER_MAX_BYTES: usize = 64 * 1024 * 1024;
const HEADERS_MAX: usize = 64;

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
        let mut stream =
            UnixStream::connect(&self.socket).map_err(|source| ClientError::NoDaemon {
                socket: self.socket.clone(),
                source,
            })?;
        let unusable = |reason: String| ClientError::Answer {
            request: format!("{method} {path}"),
            reason,
        };
        let failed = |error: io::Error| match error.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => unusable(format!(
                "no data arrived for {} s",
                self.time_limit.as_secs()
            )),
            _ => unusable(error.to_string()),
        };
        stream
            .set_read_timeout(Some(self.time_limit))
            .map_err(failed)?;
        stream
            .set_write_timeout(Some(self.time_limit))
            .map_err(failed)?;
        let mut request =
            format!("{method} {path} HTTP/1.1\r\nhost: forebay\r\nconnection: close\r\n");
        if let Some(body) = body {
            request.push_str("content-type: application/json\r\n");
            request.push_str(&format!("content-length: {}\r\n", body.len()));
        }
        request.push_str("\r\n");
        let mut request = request.into_bytes();
        request.extend_from_slice(body.unwrap_or_default());
        // A server that refuses early may close before it has read everything: its answer counts.
        let sent = stream.write_all(&request);
        let mut answer = Vec::new();
        let received = (&mut stream)
            .take(ANSWER_MAX_BYTES as u64 + 1)
            .read_to_end(&mut answer);
        if answer.is_empty() {
            sent.map_err(failed)?;
            received.map_err(failed)?;
            return Err(unusable(
                "the connection was closed without an answer".to_owned(),
            ));
        }
        if answer.len() > ANSWER_MAX_BYTES {
            return Err(unusable(format!(
                "it is longer than {ANSWER_MAX_BYTES} bytes"
            )));
        }
        parse(&answer).map_err(unusable)
    }
}

fn parse(answer: &[u8]) -> Result<(u16, Vec<u8>), String> {
    let mut headers = [httparse::EMPTY_HEADER; HEADERS_MAX];
    let mut head = httparse::Response::new(&mut headers);
    let head_bytes = match head.parse(answer) {
        Ok(httparse::Status::Complete(bytes)) => bytes,
        Ok(httparse::Status::Partial) => return Err("it ends inside its header".to_owned()),
        Err(error) => return Err(format!("it is not HTTP: {error}")),
    };
    let status = head.code.ok_or("it has no status code")?;
    let body = answer.get(head_bytes..).unwrap_or_default();
    let header = |name: &str| {
        head.headers
            .iter()
            .find(|header| header.name.eq_ignore_ascii_case(name))
            .map(|h| h.value)
    };
    if header("transfer-encoding").is_some_and(|value| value.eq_ignore_ascii_case(b"chunked")) {
        return Ok((status, dechunk(body)?));
    }
    let Some(length) = header("content-length") else {
        return Ok((status, body.to_vec()));
    };
    let length: usize = std::str::from_utf8(length)
        .ok()
        .and_then(|text| text.trim().parse().ok())
        .ok_or("its content-length is not a number")?;
    match body.get(..length) {
        Some(body) => Ok((status, body.to_vec())),
        None => Err(format!("it ends after {} of {length} bytes", body.len())),
    }
}

fn dechunk(mut rest: &[u8]) -> Result<Vec<u8>, String> {
    const CUT: &str = "it ends inside a chunk";
    let mut body = Vec::new();
    loop {
        let (used, length) = match httparse::parse_chunk_size(rest) {
            Ok(httparse::Status::Complete(found)) => found,
            Ok(httparse::Status::Partial) => return Err(CUT.to_owned()),
            Err(_) => return Err("a chunk's size is not a number".to_owned()),
        };
        if length == 0 {
            return Ok(body);
        }
        let length = usize::try_from(length).map_err(|_| CUT)?;
        let end = used.checked_add(length).ok_or(CUT)?;
        body.extend_from_slice(rest.get(used..end).ok_or(CUT)?);
        rest = rest
            .get(end..)
            .and_then(|rest| rest.strip_prefix(b"\r\n"))
            .ok_or(CUT)?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn bodies_by_length_chunks_and_end() {
        let parse = |text: &str| parse(text.as_bytes());
        assert_eq!(
            parse("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}").unwrap(),
            (200, b"{}".to_vec())
        );
        assert_eq!(
            parse("HTTP/1.1 201 Made\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{\r\n1\r\n}\r\n0\r\n\r\n")
                .unwrap(),
            (201, b"{}".to_vec())
        );
        assert_eq!(
            parse("HTTP/1.1 500 No\r\n\r\nabc").unwrap(),
            (500, b"abc".to_vec())
        );
    }

    #[test]
    fn cut_answers_are_refused() {
        for text in [
            "HTTP/1.1 200",
            "HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\n{}",
            "HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n{}",
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab",
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\nab",
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nab",
            "SSH-2.0-x\r\n\r\n",
        ] {
            parse(text.as_bytes()).unwrap_err();
        }
    }

    proptest! {
        #[test]
        fn no_answer_panics(bytes in prop::collection::vec(any::<u8>(), 0..200), chunked: bool) {
            let mut answer = b"HTTP/1.1 200 OK\r\n".to_vec();
            if chunked {
                answer.extend_from_slice(b"transfer-encoding: chunked\r\n\r\n");
            }
            answer.extend_from_slice(&bytes);
            let _ = parse(&answer);
            let _ = dechunk(&bytes);
        }
    }
}
