//! The API's words for states, in tables and errors.

use serde::Serialize;

pub(crate) fn word<T: Serialize>(value: &T) -> String {
    match serde_json::to_value(value) {
        Ok(serde_json::Value::String(text)) => text,
        _ => "?".to_owned(),
    }
}
