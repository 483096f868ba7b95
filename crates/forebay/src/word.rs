//! Words of the API.
//!
//! Purpose: tables and errors name a state as the API does.
//! Design: from the JSON.
//! Not here: the states (`forebay_control::model`).

use serde::Serialize;

/// How the API writes a word of an enumeration.
pub(crate) fn word<T: Serialize>(value: &T) -> String {
    match serde_json::to_value(value) {
        Ok(serde_json::Value::String(text)) => text,
        _ => "?".to_owned(),
    }
}
