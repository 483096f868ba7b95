//! The recorded part of an object: its name, and the differences. Long ones are cut.

use serde_json::{Map, Value};

const OBJECT_MAX_BYTES: usize = 8 * 1024;

pub(super) fn name_of(made: &Value) -> Option<String> {
    if let Value::Array(all) = made {
        let names: Vec<String> = all.iter().filter_map(name_of).collect();
        return (!names.is_empty()).then(|| names.join(", "));
    }
    let text = |key: &str| made.get(key).and_then(Value::as_str);
    match (text("name"), text("tenant"), text("volume")) {
        (Some(name), ..) => Some(name.to_owned()),
        (None, Some(tenant), Some(volume)) => Some(format!("{tenant}/{volume}")),
        _ => None,
    }
}

pub(super) fn differences(
    before: Option<Value>,
    after: Option<Value>,
) -> (Option<Value>, Option<Value>) {
    let (before, after) = match (before, after) {
        (Some(Value::Object(before)), Some(Value::Object(after))) => {
            let only = |one: &Map<String, Value>, other: &Map<String, Value>| {
                let differs = |(key, value): &(&String, &Value)| other.get(*key) != Some(value);
                let some = one.iter().filter(differs);
                Value::Object(
                    some.map(|(key, value)| (key.clone(), value.clone()))
                        .collect(),
                )
            };
            (Some(only(&before, &after)), Some(only(&after, &before)))
        }
        (Some(Value::Array(before)), Some(Value::Array(after))) => {
            let only = |one: &[Value], other: &[Value]| {
                let some = one.iter().filter(|value| !other.contains(value));
                Value::Array(some.cloned().collect())
            };
            (Some(only(&before, &after)), Some(only(&after, &before)))
        }
        other => other,
    };
    (before.map(cut), after.map(cut))
}

fn cut(value: Value) -> Value {
    let text = value.to_string();
    if text.len() <= OBJECT_MAX_BYTES {
        return value;
    }
    let end = text.floor_char_boundary(OBJECT_MAX_BYTES);
    Value::String(format!("{}...", &text[..end]))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn of_what_changed_the_difference_is_kept() {
        let (before, after) = differences(
            Some(json!({"name": "a", "size": 1, "hosts": ["x"]})),
            Some(json!({"name": "a", "size": 2, "hosts": ["x"]})),
        );
        assert_eq!(
            (before, after),
            (Some(json!({"size": 1})), Some(json!({"size": 2})))
        );
        let gone = differences(Some(json!({"name": "a"})), None);
        assert_eq!(gone, (Some(json!({"name": "a"})), None));
        let list = differences(Some(json!([1, 2])), Some(json!([1, 3])));
        assert_eq!(list, (Some(json!([2])), Some(json!([3]))));
        let long = differences(
            None,
            Some(json!({"text": "\u{e4}".repeat(OBJECT_MAX_BYTES)})),
        );
        assert!(long.1.unwrap().as_str().unwrap().len() <= OBJECT_MAX_BYTES + 3);
    }

    #[test]
    fn created_objects_are_named_in_the_audit_log() {
        let name = |made: Value| name_of(&made).unwrap_or_default();
        assert_eq!(name(json!({"tenant": "acme", "name": "db"})), "db");
        assert_eq!(name(json!({"tenant": "acme", "volume": "db"})), "acme/db");
        assert_eq!(name(json!([])), "");
        let several = json!([{"name": "db@a"}, {"name": "log@a"}]);
        assert_eq!(name(several), "db@a, log@a");
    }
}
