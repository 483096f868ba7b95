//! Adds limits of values and possible refusals to the OpenAPI document. The tables use the
//! constants that the daemon checks.

use forebay_pool::{MAX_DEVICES, MAX_EXTENT_BYTES, MAX_VOLUME_BYTES, MIN_EXTENT_BYTES};
use forebay_qos::budget::{LEAST, MOST, MOST_CREDIT_SECONDS};
use forebay_xlate::boundary::message::MAX_VM_QUEUES;
use serde_json::Value;
use utoipa::Number;
use utoipa::openapi::path::{Operation, ParameterIn, PathItem};
use utoipa::openapi::schema::Object;
use utoipa::openapi::{ContentBuilder, OpenApi, Ref, RefOr, ResponseBuilder, Schema};

use crate::model::rbd::IMAGE_PATH_MAX;
use crate::model::validate::{
    HOSTS_MAX, MAX_PATH_BYTES, NAME_MAX, NQN_MAX, SNAPSHOTS_MAX, SPEC_MAX,
};

/// See `validate::name`.
const NAME: &str = "^[a-z0-9][a-z0-9-]{0,62}$";
/// See `validate::volume`.
const VOLUME: &str = "^[a-z0-9][a-z0-9-]{0,62}(@[a-z0-9][a-z0-9-]{0,62})?$";
/// See `validate::snapshot`.
const SNAPSHOT: &str = "^[a-z0-9][a-z0-9-]{0,62}@[a-z0-9][a-z0-9-]{0,62}$";
/// `@` and a number select one of several exports.
const EXPORT: &str = "^[a-z0-9][a-z0-9-]{0,62}(@[a-z0-9][a-z0-9-]{0,62})?(@[0-9]{1,20})?$";
/// See `validate::host_nqn`, which refuses more: not every tool's regular expressions can exclude
/// something.
const NQN: &str = r"^nqn\.[0-9]{4}-(0[1-9]|1[0-2])\.[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*(:[!-~]+)?$";
const TRANSFER_HOST: &str = r"^nqn\.2026-01\.io\.forebay:transfer:[!-~]+$";
/// PATH_MAX of Linux, without the NUL.
const FILE_PATH_MAX: usize = 4095;
const ADDRESS: &str = r"^(\[[0-9a-fA-F:.%]+\]|[0-9.]+):[0-9]{1,5}$";

#[derive(Clone, Copy)]
enum Is {
    Name,
    Volume,
    Snapshot,
    Export,
    Nqn,
    TransferHost,
    Address,
    /// An absolute path of a Unix socket.
    Socket,
    /// A limit in bytes.
    Text(usize),
    Whole(u64, u64),
    /// Minimum, maximum and unit.
    Bytes(u64, u64, u64),
    Real(f64, f64),
    Block,
}

const PERCENT: Is = Is::Whole(1, 100);
const NUMBER: Is = Is::Whole(0, u32::MAX as u64);
const VOLUME_BYTES: Is = Is::Bytes(512, MAX_VOLUME_BYTES, 512);
const RESERVED_BYTES: Is = Is::Whole(0, MAX_VOLUME_BYTES);

/// Fields of request bodies: model, field and limit. A list's limit is that of its items.
const FIELDS: &[(&str, &str, Is)] = &[
    ("FirmwareInstall", "path", Is::Text(FILE_PATH_MAX)),
    ("FirmwareActivate", "slot", Is::Whole(1, 2)),
    ("TenantCreate", "name", Is::Name),
    ("PoolCreate", "name", Is::Name),
    ("PoolCreate", "warn_percent", PERCENT),
    ("PoolCreate", "critical_percent", PERCENT),
    (
        "PoolCreate",
        "extent_bytes",
        Is::Bytes(MIN_EXTENT_BYTES, MAX_EXTENT_BYTES, MIN_EXTENT_BYTES),
    ),
    ("PoolCreate", "devices", Is::Text(SPEC_MAX)),
    ("PoolOpen", "devices", Is::Text(SPEC_MAX)),
    ("DeviceAdd", "spec", Is::Text(SPEC_MAX)),
    ("PoolUpdate", "warn_percent", PERCENT),
    ("PoolUpdate", "critical_percent", PERCENT),
    ("VolumeCreate", "name", Is::Name),
    ("VolumeCreate", "size_bytes", VOLUME_BYTES),
    ("VolumeCreate", "block_bytes", Is::Block),
    ("VolumeCreate", "reserved_bytes", RESERVED_BYTES),
    ("VolumeCreate", "rbd", Is::Text(IMAGE_PATH_MAX)),
    ("VolumeUpdate", "size_bytes", VOLUME_BYTES),
    ("VolumeUpdate", "reserved_bytes", RESERVED_BYTES),
    ("SnapshotsTake", "snapshots", Is::Snapshot),
    ("VolumeClone", "tenant", Is::Name),
    ("VolumeClone", "name", Is::Name),
    ("VolumeClone", "reserved_bytes", RESERVED_BYTES),
    ("VolumeClone", "rbd", Is::Text(IMAGE_PATH_MAX)),
    ("VolumeRollback", "snapshot", Is::Snapshot),
    ("ExportCreate", "tenant", Is::Name),
    ("ExportCreate", "volume", Is::Volume),
    ("ExportCreate", "hosts", Is::Nqn),
    ("ExportCreate", "queues", Is::Whole(1, MAX_VM_QUEUES as u64)),
    ("ExportCreate", "socket", Is::Socket),
    ("ExportCreate", "socket_user", NUMBER),
    ("ExportCreate", "socket_group", NUMBER),
    ("ExportUpdate", "add_hosts", Is::Nqn),
    ("ExportUpdate", "remove_hosts", Is::Nqn),
    ("TransferPut", "host", Is::TransferHost),
    ("RateParts", "iops", Is::Whole(LEAST.iops, MOST.iops)),
    ("RateParts", "bytes_s", Is::Whole(LEAST.bytes, MOST.bytes)),
    (
        "BudgetParts",
        "credit_s",
        Is::Whole(1, MOST_CREDIT_SECONDS as u64),
    ),
    ("SchedulingUpdate", "oversubscription", Is::Real(1.0, 100.0)),
    ("SchedulingUpdate", "wants_base", Is::Real(0.0, 1.0)),
    ("CalibrationPut", "seconds", Is::Whole(1, 600)),
    ("CostsPut", "note", Is::Text(1000)),
    ("CostProfile", "header_bytes", NUMBER),
];

const LISTS: &[(&str, &str, usize)] = &[
    ("PoolCreate", "devices", MAX_DEVICES),
    ("PoolOpen", "devices", MAX_DEVICES),
    ("SnapshotsTake", "snapshots", SNAPSHOTS_MAX),
    ("ExportCreate", "hosts", HOSTS_MAX),
    ("ExportUpdate", "add_hosts", HOSTS_MAX),
    ("ExportUpdate", "remove_hosts", HOSTS_MAX),
];

const PARAMETERS: &[(&str, Is)] = &[
    ("tenant", Is::Name),
    ("volume", Is::Volume),
    ("address", Is::Address),
    ("host", Is::TransferHost),
    // The pool's name or UUID.
    ("name", Is::Text(NAME_MAX)),
    ("index", Is::Whole(0, MAX_DEVICES as u64 - 1)),
];

impl Is {
    fn say(self, value: &mut Object) {
        let mut text = |pattern: Option<&str>, least, most| {
            value.pattern = pattern.map(ToOwned::to_owned);
            (value.min_length, value.max_length) = (Some(least), Some(most));
        };
        match self {
            Self::Name => text(Some(NAME), 1, NAME_MAX),
            Self::Volume => text(Some(VOLUME), 1, 2 * NAME_MAX + 1),
            Self::Snapshot => text(Some(SNAPSHOT), 3, 2 * NAME_MAX + 1),
            Self::Export => text(Some(EXPORT), 1, 2 * NAME_MAX + 22),
            Self::Nqn => text(Some(NQN), 1, NQN_MAX),
            Self::TransferHost => text(Some(TRANSFER_HOST), 1, NQN_MAX),
            Self::Address => text(Some(ADDRESS), 9, 64),
            Self::Socket => text(Some("^/"), 1, MAX_PATH_BYTES),
            Self::Text(most) => text(None, 0, most),
            Self::Whole(least, most) => Self::limit(value, whole(least), whole(most)),
            Self::Bytes(least, most, of) => {
                value.multiple_of = Some(whole(of));
                Self::limit(value, whole(least), whole(most));
            }
            Self::Block => {
                value.enum_values = Some(vec![512.into(), 4096.into(), Value::Null]);
            }
            Self::Real(least, most) => {
                Self::limit(value, Number::Float(least), Number::Float(most));
            }
        }
    }

    fn limit(value: &mut Object, least: Number, most: Number) {
        (value.minimum, value.maximum) = (Some(least), Some(most));
    }
}

fn whole(number: u64) -> Number {
    Number::UInt(usize::try_from(number).unwrap_or(usize::MAX))
}

pub(super) fn add(document: &mut OpenApi) {
    for (model, field, is) in FIELDS {
        if let Some(RefOr::T(Schema::Object(value))) = property(document, model, field) {
            is.say(value);
        }
        if let Some(RefOr::T(Schema::Array(list))) = property(document, model, field)
            && let utoipa::openapi::schema::ArrayItems::RefOrSchema(items) = &mut list.items
            && let RefOr::T(Schema::Object(value)) = items.as_mut()
        {
            is.say(value);
        }
    }
    for (model, field, most) in LISTS {
        if let Some(RefOr::T(Schema::Array(list))) = property(document, model, field) {
            list.max_items = Some(*most);
        }
    }
    if let Some(components) = &mut document.components {
        for (_, name, description) in REFUSALS {
            let body = ContentBuilder::new().schema(Some(Ref::from_schema_name("ErrorBody")));
            let answer = ResponseBuilder::new()
                .description(*description)
                .content("application/json", body.build());
            let responses = &mut components.responses;
            responses.insert((*name).to_owned(), answer.build().into());
        }
    }
    for (path, item) in &mut document.paths.paths {
        for (method, operation) in operations(item) {
            parameters(path, operation);
            refusals(path, method, operation);
        }
    }
}

fn property<'a>(
    document: &'a mut OpenApi,
    model: &str,
    field: &str,
) -> Option<&'a mut RefOr<Schema>> {
    let models = &mut document.components.as_mut()?.schemas;
    match models.get_mut(model)? {
        RefOr::T(Schema::Object(model)) => model.properties.get_mut(field),
        _ => None,
    }
}

fn operations(item: &mut PathItem) -> impl Iterator<Item = (&'static str, &mut Operation)> {
    let all = [
        ("get", &mut item.get),
        ("post", &mut item.post),
        ("put", &mut item.put),
        ("patch", &mut item.patch),
        ("delete", &mut item.delete),
    ];
    all.into_iter()
        .filter_map(|(method, operation)| Some((method, operation.as_mut()?)))
}

fn parameters(path: &str, operation: &mut Operation) {
    for parameter in operation.parameters.iter_mut().flatten() {
        let RefOr::T(parameter) = parameter else {
            continue;
        };
        let is_exports = path.starts_with("/v1/exports") && parameter.name == "volume";
        let is = match PARAMETERS.iter().find(|(name, _)| *name == parameter.name) {
            Some(_) if is_exports => Is::Export,
            Some((_, is)) => *is,
            None => continue,
        };
        if let Some(RefOr::T(Schema::Object(value))) = &mut parameter.schema {
            is.say(value);
        }
    }
}

/// Adds the 4xx answers of an operation; other errors are the `default`.
fn refusals(path: &str, method: &str, operation: &mut Operation) {
    let has_body = operation.request_body.is_some();
    let parameters = operation.parameters.iter().flatten();
    let mut in_path = false;
    let mut has_any = false;
    for parameter in parameters {
        if let RefOr::T(parameter) = parameter {
            has_any = true;
            in_path |= parameter.parameter_in == ParameterIn::Path;
        }
    }
    let needs_pool = !NEED_NO_POOL.contains(&(method, path));
    let changes = method != "get";
    let names_devices = (method, path) == ("post", "/v1/pool");
    let may_be = |status: &str| match status {
        "400" => has_body || has_any,
        "404" => in_path || needs_pool || names_devices,
        "408" | "413" => has_body,
        "409" => changes && needs_pool || names_devices,
        _ => true,
    };
    for (status, name, _) in REFUSALS.iter().filter(|(status, ..)| may_be(status)) {
        let answer = RefOr::Ref(Ref::from_response_name(*name));
        let answers = &mut operation.responses.responses;
        answers.insert((*status).to_owned(), answer);
    }
}

/// Status, component name and description.
const REFUSALS: &[(&str, &str, &str)] = &[
    ("400", "Wrong", "The request is not valid"),
    (
        "403",
        "Forbidden",
        "The caller is neither root nor the daemon's user",
    ),
    ("404", "Missing", "The object, or the pool, does not exist"),
    ("408", "Late", "The request body did not arrive in time"),
    (
        "409",
        "Conflict",
        "The object exists already, or it is in use",
    ),
    ("413", "Large", "The request body is too large"),
];

const NEED_NO_POOL: &[(&str, &str)] = &[
    ("get", "/v1/openapi.json"),
    ("get", "/v1/status"),
    ("get", "/v1/stats"),
    ("get", "/v1/metrics"),
    ("get", "/v1/events"),
    ("get", "/v1/ports"),
    ("get", "/v1/firmware"),
    ("post", "/v1/firmware/install"),
    ("post", "/v1/firmware/activate"),
    ("post", "/v1/pool"),
    ("post", "/v1/shutdown"),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_limit_finds_its_field() {
        let mut document = super::super::build();
        for (model, field, _) in FIELDS {
            let found = property(&mut document, model, field);
            let is_said = match found {
                Some(RefOr::T(Schema::Object(value))) => {
                    let is_limited = value.maximum.is_some() || value.max_length.is_some();
                    is_limited || value.enum_values.is_some()
                }
                Some(RefOr::T(Schema::Array(_))) => true,
                _ => false,
            };
            assert!(is_said, "{model}.{field}");
        }
        for (model, field, most) in LISTS {
            let found = property(&mut document, model, field);
            let is_said = matches!(
                found, Some(RefOr::T(Schema::Array(list))) if list.max_items == Some(*most)
            );
            assert!(is_said, "{model}.{field}");
        }
    }

    #[test]
    fn each_list_and_number_has_a_limit() {
        let document = serde_json::to_value(super::super::build()).unwrap();
        let has = |value: &Value, key: &str| !value[key].is_null();
        for model in [
            "PoolCreate",
            "PoolOpen",
            "PoolUpdate",
            "ExportCreate",
            "ExportUpdate",
            "VolumeCreate",
            "VolumeUpdate",
            "SnapshotsTake",
            "VolumeClone",
            "VolumeRollback",
        ] {
            let fields = document["components"]["schemas"][model]["properties"].as_object();
            for (name, field) in fields.unwrap() {
                let of = field["type"].to_string();
                // A file's size has the file system's limit.
                let is_file = (model, name.as_str()) == ("PoolCreate", "size_bytes");
                let is_limited = has(field, "maximum") || has(field, "enum") || is_file;
                assert!(!of.contains("integer") || is_limited, "{model}.{name}");
                let is_list = of.contains("array");
                assert!(!is_list || has(field, "maxItems"), "{model}.{name}");
            }
        }
        for (path, item) in document["paths"].as_object().unwrap() {
            for (method, operation) in item.as_object().unwrap() {
                for parameter in operation["parameters"].as_array().into_iter().flatten() {
                    let is_in_path = parameter["in"] == "path";
                    let schema = &parameter["schema"];
                    let is_limited = has(schema, "maximum") || has(schema, "maxLength");
                    assert!(!is_in_path || is_limited, "{method} {path} {parameter}");
                }
            }
        }
        let made = &document["paths"]["/v1/pool"]["post"]["responses"];
        assert!(has(made, "404") && has(made, "409"), "{made}");
    }
}
