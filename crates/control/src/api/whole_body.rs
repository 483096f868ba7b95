//! Reads a request's body before any layer answers. A client that is still sending would otherwise
//! see a broken pipe. This outermost layer limits size and time.

use std::time::Duration;

use axum::body::Body;
use axum::extract::Request;
use axum::http::StatusCode;
use axum::middleware::Next;
use axum::response::Response;
use http_body_util::BodyExt;

use super::router::BODY_MAX_BYTES;
use crate::model::error::ApiError;

/// How much of a too large body is read before the connection is closed.
const READ_MAX_BYTES: usize = 64 * BODY_MAX_BYTES;
const TIME_LIMIT: Duration = Duration::from_secs(30);

pub(super) async fn read(request: Request, next: Next) -> Response {
    let (parts, body) = request.into_parts();
    match tokio::time::timeout(TIME_LIMIT, whole(body)).await {
        Ok(Ok(bytes)) => {
            next.run(Request::from_parts(parts, Body::from(bytes)))
                .await
        }
        Ok(Err(refused)) => refused,
        Err(_) => ApiError::invalid(format!(
            "the request body did not arrive within {} s",
            TIME_LIMIT.as_secs()
        ))
        .with_status(StatusCode::REQUEST_TIMEOUT),
    }
}

async fn whole(mut body: Body) -> Result<Vec<u8>, Response> {
    let mut bytes = Vec::new();
    let mut read_bytes = 0;
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|error| {
            ApiError::invalid(format!("can't read the request body: {error}"))
                .with_status(StatusCode::BAD_REQUEST)
        })?;
        let Some(data) = frame.data_ref() else {
            continue;
        };
        read_bytes += data.len();
        if read_bytes > READ_MAX_BYTES {
            break;
        }
        if read_bytes <= BODY_MAX_BYTES {
            bytes.extend_from_slice(data);
        }
    }
    if read_bytes > BODY_MAX_BYTES {
        return Err(ApiError::invalid(format!(
            "the request body is too large: at most {BODY_MAX_BYTES} bytes are read"
        ))
        .with_status(StatusCode::PAYLOAD_TOO_LARGE));
    }
    Ok(bytes)
}
