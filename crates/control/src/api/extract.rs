//! Extractors for paths, queries and bodies, whose errors are [`ApiError`]s that name the field.
//! The content type is not checked.

use std::net::SocketAddr;

use axum::body::Bytes;
use axum::extract::{FromRequest, FromRequestParts, Path, Query, Request};
use axum::http::StatusCode;
use axum::http::request::Parts;
use axum::response::Response;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use utoipa::IntoParams;

use crate::model::error::ApiError;
use crate::model::validate;

pub(super) struct Body<T>(pub(super) T);

impl<T: DeserializeOwned + Serialize, S: Send + Sync> FromRequest<S> for Body<T> {
    type Rejection = Response;

    async fn from_request(request: Request, state: &S) -> Result<Self, Response> {
        let bytes = Bytes::from_request(request, state)
            .await
            .map_err(|rejection| {
                let status = rejection.status();
                let error = if status == StatusCode::PAYLOAD_TOO_LARGE {
                    ApiError::invalid("the request body is too large")
                } else {
                    ApiError::invalid(format!(
                        "can't read the request body: {}",
                        rejection.body_text()
                    ))
                };
                error.with_status(status)
            })?;
        let refuse =
            |message: String| ApiError::invalid(message).with_status(StatusCode::BAD_REQUEST);
        let mut json = serde_json::Deserializer::from_slice(&bytes);
        let value = serde_path_to_error::deserialize(&mut json).map_err(|error| {
            let at = error.path().to_string();
            let what = error.into_inner();
            if at == "." || at == "?" {
                refuse(format!("the request body is not valid: {what}"))
            } else {
                refuse(format!("the request body is not valid: `{at}`: {what}"))
            }
        })?;
        json.end()
            .map_err(|error| refuse(format!("the request body is not valid: {error}")))?;
        if let Some((at, what)) = wrong_shape(&bytes, &value) {
            return Err(refuse(format!("the request body is not valid: {at}{what}")));
        }
        Ok(Self(value))
    }
}

/// Where a body's shape differs from the value read from it, and the expected shape. Serde accepts
/// an array for an object's fields, and an object with one field for a name.
fn wrong_shape<T: Serialize>(bytes: &[u8], read: &T) -> Option<(String, &'static str)> {
    fn find(said: &Value, read: &Value) -> Option<(String, &'static str)> {
        let here = |what| Some((String::new(), what));
        match (said, read) {
            (Value::Array(_), Value::Object(_)) => here("an object is expected, not an array"),
            (Value::Object(_), Value::String(_)) => here("a string is expected, not an object"),
            (Value::Object(_), Value::Array(_)) => here("an array is expected, not an object"),
            (Value::Object(_), Value::Bool(_) | Value::Number(_)) => {
                here("a single value is expected, not an object")
            }
            (Value::Object(said), Value::Object(read)) => said.iter().find_map(|(name, part)| {
                let (inner, what) = find(part, read.get(name)?)?;
                let at = match inner.as_str() {
                    "" => format!("`{name}`: "),
                    inner => format!("`{name}.{}", &inner[1..]),
                };
                Some((at, what))
            }),
            (Value::Array(said), Value::Array(read)) => said
                .iter()
                .zip(read)
                .find_map(|(said, read)| find(said, read)),
            _ => None,
        }
    }
    find(
        &serde_json::from_slice(bytes).ok()?,
        &serde_json::to_value(read).ok()?,
    )
}

pub(super) struct Parameters<T>(pub(super) T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequestParts<S> for Parameters<T> {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _state: &S) -> Result<Self, ApiError> {
        match Query::<T>::try_from_uri(&parts.uri) {
            Ok(Query(value)) => Ok(Self(value)),
            Err(rejection) => Err(ApiError::invalid(format!(
                "the query is not valid: {}",
                rejection.body_text()
            ))),
        }
    }
}

/// `{tenant}` of the path.
#[derive(IntoParams)]
#[into_params(names("tenant"), parameter_in = Path)]
pub(super) struct InTenant(
    /// Tenant
    pub(super) String,
);

impl<S: Send + Sync> FromRequestParts<S> for InTenant {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        let Path(tenant) = path::<String, S>(parts, state).await?;
        validate::name("tenant", &tenant)?;
        Ok(Self(tenant))
    }
}

/// `{tenant}` and `{volume}` of the path, which may be a snapshot.
#[derive(IntoParams)]
#[into_params(names("tenant", "volume"), parameter_in = Path)]
pub(super) struct OfVolume(
    /// Tenant
    pub(super) String,
    /// Volume
    pub(super) String,
);

impl<S: Send + Sync> FromRequestParts<S> for OfVolume {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        let Path((tenant, volume)) = path::<(String, String), S>(parts, state).await?;
        validate::name("tenant", &tenant)?;
        validate::volume(&volume)?;
        Ok(Self(tenant, volume))
    }
}

/// `@` and a number may follow the volume or snapshot, to select one of several exports.
pub(super) struct OfExport(pub(super) String, pub(super) String);

impl<S: Send + Sync> FromRequestParts<S> for OfExport {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        let Path((tenant, export)) = path::<(String, String), S>(parts, state).await?;
        validate::name("tenant", &tenant)?;
        validate::export(&export)?;
        Ok(Self(tenant, export))
    }
}

pub(super) struct DeviceAt(pub(super) u8);

impl<S: Send + Sync> FromRequestParts<S> for DeviceAt {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        let Path(index) = path::<u8, S>(parts, state).await?;
        Ok(Self(index))
    }
}

pub(super) struct PortAt(pub(super) SocketAddr);

impl<S: Send + Sync> FromRequestParts<S> for PortAt {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        let Path(address) = path::<SocketAddr, S>(parts, state).await?;
        Ok(Self(address))
    }
}

async fn path<T, S>(parts: &mut Parts, state: &S) -> Result<Path<T>, ApiError>
where
    T: DeserializeOwned + Send,
    S: Send + Sync,
{
    Path::<T>::from_request_parts(parts, state)
        .await
        .map_err(|rejection| {
            ApiError::invalid(format!("the path is not valid: {}", rejection.body_text()))
        })
}

#[cfg(test)]
mod tests {
    use axum::body::{Body as Bytes, to_bytes};

    use super::*;
    use crate::model::scheduling::{CostsPut, SchedulingUpdate};
    use crate::model::{ExportCreate, PoolUpdate, PortUpdate, TransferPut};

    async fn refusal<T: DeserializeOwned + Serialize>(body: &str) -> String {
        let request = Request::new(Bytes::from(body.to_owned()));
        let Err(response) = Body::<T>::from_request(request, &()).await else {
            return String::new();
        };
        assert_eq!(response.status(), StatusCode::BAD_REQUEST, "{body}");
        let text = to_bytes(response.into_body(), 10_000).await.unwrap();
        String::from_utf8(text.to_vec()).unwrap()
    }

    #[tokio::test]
    async fn a_name_is_not_an_object() {
        let costs = |operation: &str| {
            let zeros = "[0,0,0,0,0,0]";
            format!(
                r#"{{"profiles":[{{"frontend":"nvme_tcp","operation":{operation},"cpu_ns":{zeros},"device_ns":{zeros},"header_bytes":0}}]}}"#
            )
        };
        let name = r#""read""#;
        assert_eq!(refusal::<CostsPut>(&costs(name)).await, "");
        for refused in [
            refusal::<PoolUpdate>(r#"{"placement":{"fill":null}}"#).await,
            refusal::<ExportCreate>(r#"{"tenant":"a","volume":"b","frontend":{"nvme_tcp":null}}"#)
                .await,
            refusal::<TransferPut>(r#"{"host":"a","kind":{"import":null}}"#).await,
            refusal::<PortUpdate>(r#"{"ana":{"optimized":null}}"#).await,
            refusal::<SchedulingUpdate>(r#"{"spread":{"one_to_n":null}}"#).await,
            refusal::<CostsPut>(&costs(r#"{"read":null}"#)).await,
        ] {
            assert!(refused.contains("a string is expected"), "{refused}");
        }
        let array = refusal::<PoolUpdate>("[null,null,null]").await;
        assert!(array.contains("an object is expected"), "{array}");
    }
}
