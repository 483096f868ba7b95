//! Tests of creating, opening and finding pools on files.

use std::path::Path;

use super::*;
use crate::model::{DeviceAdd, PoolCreate};

fn body(devices: &[String], size_bytes: Option<u64>, force: bool) -> PoolCreate {
    PoolCreate {
        name: "p".to_owned(),
        devices: devices.to_vec(),
        force,
        extent_bytes: None,
        create: size_bytes.is_some(),
        size_bytes,
        ..PoolCreate::default()
    }
}

fn refused(result: Result<OpenPool, ApiError>) -> ApiError {
    result.err().expect("it is refused")
}

#[test]
fn a_device_in_use_is_overwritten_only_by_force() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("d");
    let spec = [path.display().to_string()];
    let error = refused(create(&body(&spec, None, false)));
    assert_eq!(error.kind, error::ErrorKind::NotFound);
    assert!(error.hint.is_some_and(|hint| hint.contains("size")));
    let pool = create(&body(&spec, Some(64 << 20), false)).unwrap();
    let uuid = pool.pool.info().uuid;
    drop(pool);
    let error = refused(create(&body(&spec, Some(64 << 20), false)));
    assert_eq!(error.kind, error::ErrorKind::InUse, "{error}");
    let named = format!("belongs to the Forebay pool p ({uuid})");
    assert!(error.message.contains(&named), "{error}");
    assert!(error.hint.is_some_and(|hint| hint.contains("--force")));
    assert!(path.exists(), "a refusal removes nothing that was there");
    assert_eq!(open(&spec).unwrap().pool.info().uuid, uuid);
    let other = create(&body(&spec, None, true)).unwrap();
    assert_ne!(other.pool.info().uuid, uuid);
    destroy(&other.devices).unwrap();
    drop(other);
    assert!(open(&spec).is_err());
}

#[test]
fn two_names_of_one_device_and_a_device_that_shrank_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let (a, b) = (folder.path().join("a"), folder.path().join("b"));
    std::fs::File::create(&a)
        .unwrap()
        .set_len(64 << 20)
        .unwrap();
    std::fs::hard_link(&a, &b).unwrap();
    let specs = [a.display().to_string(), b.display().to_string()];
    let error = refused(create(&body(&specs, None, false)));
    assert!(error.message.contains("same device"), "{error}");
    let pool = create(&body(&specs[..1], None, false)).unwrap();
    let add = DeviceAdd {
        spec: specs[1].clone(),
        force: true,
        create: false,
        size_bytes: None,
    };
    let error = open_new(&add).err().expect("it is refused");
    assert_eq!(error.kind, error::ErrorKind::InUse, "{error}");
    drop(pool);
    std::fs::File::options()
        .write(true)
        .open(&a)
        .unwrap()
        .set_len(40 << 20)
        .unwrap();
    let error = refused(open(&specs[..1]));
    assert_eq!(error.kind, error::ErrorKind::Damaged, "{error}");
}

#[test]
fn a_file_made_in_vain_is_removed() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("small");
    let error = refused(create(&body(
        &[path.display().to_string()],
        Some(1 << 20),
        false,
    )));
    assert_eq!(error.kind, error::ErrorKind::Invalid, "{error}");
    assert!(!path.exists());
}

#[test]
fn the_record_of_devices_is_found_again() {
    let folder = tempfile::tempdir().unwrap();
    assert_eq!(recorded(folder.path()).unwrap(), None);
    let spec = format!("file:{}", folder.path().join("d").display());
    let pool = create(&body(std::slice::from_ref(&spec), Some(64 << 20), false)).unwrap();
    record(folder.path(), &pool.pool).unwrap();
    let found = recorded(folder.path()).unwrap().unwrap();
    assert_eq!(found.pool, pool.pool.info().uuid);
    assert_eq!(found.devices[0].spec, spec);
    for (text, part) in [
        (r#"{"version":9,"devices":[]}"#, "format 9"),
        (r#"{"version":2,"devices":[]}"#, "missing field"),
        ("[1", "EOF"),
    ] {
        std::fs::write(record_path(folder.path()), text).unwrap();
        let error = recorded(folder.path()).unwrap_err().to_string();
        assert!(
            error.contains(part) && error.contains("devices.json"),
            "{error}"
        );
    }
}

fn remembered(folder: &Path) -> Places {
    Places {
        recorded: recorded(folder).unwrap(),
        ..Places::default()
    }
}

#[test]
fn renamed_and_swapped_files_are_recognised_by_their_labels() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let specs: Vec<String> = ["a", "b"]
        .map(|name| at(name).display().to_string())
        .to_vec();
    let made = create(&body(&specs, Some(64 << 20), false)).unwrap();
    let uuid = made.pool.info().uuid;
    record(folder.path(), &made.pool).unwrap();
    drop(made);
    // The files swap names, and then one gets a third name.
    std::fs::rename(at("a"), at("c")).unwrap();
    std::fs::rename(at("b"), at("a")).unwrap();
    let open = open_at(&remembered(folder.path())).unwrap();
    assert_eq!(open.pool.info().uuid, uuid);
    let found: Vec<&str> = open.devices.iter().map(|d| d.spec.as_str()).collect();
    let expected = [at("c"), at("a")].map(|path| format!("file:{}", path.display()));
    assert_eq!(found, expected);
    record(folder.path(), &open.pool).unwrap();
    drop(open);
    let again = recorded(folder.path()).unwrap().unwrap();
    assert_eq!(again.devices[0].spec, expected[0]);
}

#[test]
fn moved_elsewhere_a_pool_is_opened_where_one_says_it_is() {
    let folder = tempfile::tempdir().unwrap();
    let other = tempfile::tempdir().unwrap();
    let path = folder.path().join("d");
    let spec = path.display().to_string();
    let made = create(&body(std::slice::from_ref(&spec), Some(64 << 20), false)).unwrap();
    record(folder.path(), &made.pool).unwrap();
    drop(made);
    let moved = other.path().join("moved");
    std::fs::rename(&path, &moved).unwrap_or_else(|_| {
        std::fs::copy(&path, &moved).unwrap();
        std::fs::remove_file(&path).unwrap();
    });
    let error = refused(open_at(&remembered(folder.path())));
    assert_eq!(error.kind, error::ErrorKind::NotFound);
    assert!(error.message.contains("pool p can't be opened"), "{error}");
    assert!(error.message.contains("there is no such file"), "{error}");
    assert!(error.hint.unwrap().contains("forebay pool open --device"));
    for given in [true, false] {
        let mut places = remembered(folder.path());
        let list = if given {
            &mut places.given
        } else {
            &mut places.configured
        };
        list.push(moved.display().to_string());
        drop(open_at(&places).unwrap());
    }
    drop(open(&[moved.display().to_string()]).unwrap());
}

#[test]
fn devices_of_another_pool_and_copies_are_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).display().to_string();
    for name in ["a", "b"] {
        let body = PoolCreate {
            name: format!("pool-{name}"),
            ..body(&[at(name)], Some(64 << 20), false)
        };
        let made = create(&body).unwrap();
        record(folder.path(), &made.pool).unwrap();
    }
    std::fs::copy(at("a"), at("copy")).unwrap();
    let error = refused(open(&[at("a"), at("b")]));
    assert_eq!(error.kind, error::ErrorKind::Invalid);
    assert!(error.message.contains("belongs to pool pool-b"), "{error}");
    let error = refused(open(&[at("a"), at("copy")]));
    assert!(error.message.contains("one is a copy"), "{error}");
    // A copy of a recorded device is refused too, wherever it is named.
    let mut places = remembered(folder.path());
    std::fs::copy(at("b"), at("copy")).unwrap();
    places.configured = vec![at("copy")];
    let error = refused(open_at(&places));
    assert!(error.message.contains("one is a copy"), "{error}");
    // Without a moved device, no search finds the copy.
    drop(open_at(&remembered(folder.path())).unwrap());
    // The record is of pool b: the wrong file in its place is named too.
    std::fs::remove_file(at("copy")).unwrap();
    std::fs::rename(at("b"), folder.path().join("../fb-away-b")).unwrap();
    std::fs::rename(at("a"), at("b")).unwrap();
    let error = refused(open_at(&remembered(folder.path())));
    std::fs::remove_file(folder.path().join("../fb-away-b")).unwrap();
    assert!(error.message.contains("belongs to pool pool-a"), "{error}");
    let detour = at("../").clone() + folder.path().file_name().unwrap().to_str().unwrap() + "/b";
    let open = open(&[detour, at("b")]).unwrap();
    let real = folder.path().canonicalize().unwrap().join("b");
    assert_eq!(open.devices[0].spec, format!("file:{}", real.display()));
}

#[test]
fn a_device_that_another_daemon_serves_is_not_passed_over() {
    let folder = tempfile::tempdir().unwrap();
    let spec = folder.path().join("d").display().to_string();
    let made = create(&body(&[spec], Some(64 << 20), false)).unwrap();
    record(folder.path(), &made.pool).unwrap();
    let error = refused(open_at(&remembered(folder.path())));
    assert_eq!(error.kind, error::ErrorKind::InUse, "{error}");
    drop(made);
    drop(open_at(&remembered(folder.path())).unwrap());
}

#[test]
fn a_device_cut_short_in_use_is_opened_only_by_force() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).display().to_string();
    let specs = [at("a"), at("b")];
    let made = create(&body(&specs, Some(64 << 20), false)).unwrap();
    record(folder.path(), &made.pool).unwrap();
    let uuid = made.pool.devices()[1].uuid;
    mark_cut_short(folder.path(), &uuid, 4096).unwrap();
    record(folder.path(), &made.pool).unwrap();
    drop(made);
    let open = open_at(&remembered(folder.path())).unwrap();
    assert_eq!(open.missing[0].uuid, uuid);
    assert!(
        open.missing[0].why.contains("cut short"),
        "{:?}",
        open.missing
    );
    drop(open);
    let mut places = remembered(folder.path());
    places.given = vec![at("b")];
    let error = refused(open_at(&places));
    assert!(error.message.contains("--force"), "{error}");
    // Only named devices are forced.
    places.forced = true;
    places.given = vec![at("a")];
    assert_eq!(open_at(&places).unwrap().missing.len(), 1);
    places.given = vec![at("b")];
    assert!(open_at(&places).unwrap().missing.is_empty());
    forgive_cut_short(folder.path(), &[uuid]).unwrap();
    let open = open_at(&remembered(folder.path())).unwrap();
    assert!(open.missing.is_empty());
}
