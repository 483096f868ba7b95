//! The API's words for states, in tables and errors.

use serde::Serialize;

/// An enumeration's value as the API writes it.
pub(crate) fn word<T: Serialize>(value: &T) -> String {
    match serde_json::to_value(value) {
        Ok(serde_json::Value::String(text)) => text,
        _ => "?".to_owned(),
    }
}
