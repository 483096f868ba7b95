//! Tests that the book matches the program's limits and events; `UPDATE_DOCS=1` updates
//! `docs/src/limits.md`.

use forebay_control::api::{BODY_MAX_BYTES, TIME_LIMIT};
use forebay_control::firmware::image::PROGRAM_MAX_BYTES;
use forebay_control::model::validate::{HOSTS_MAX, NAME_MAX, NQN_MAX, SNAPSHOTS_MAX};
use forebay_engine::documented_limits as limits;
use forebay_nvme::reservation::MAX_REGISTRANTS;
use forebay_qos::budget::{MOST, MOST_CREDIT_SECONDS};
use forebay_xlate::boundary::message::MAX_VM_QUEUES;
use forebay_xlate::boundary::region::{
    MAX_CONTROLLERS, MAX_DEVICES, MAX_LANES, MAX_QUEUE_ENTRIES, MAX_QUEUES, MAX_REACTORS,
    MAX_TENANTS, R2T_PARTS,
};

#[test]
fn the_page_of_limits_has_not_drifted() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/src/limits.md");
    let mut page = std::fs::read_to_string(path).unwrap();
    assert_eq!(limits::NVME_QUEUES, MAX_VM_QUEUES);
    for (what, number) in [
        ("exports", MAX_LANES.to_string()),
        (
            "controllers (one for each connect of a host)",
            MAX_CONTROLLERS.to_string(),
        ),
        (
            "queues (connections), including admin queues",
            MAX_QUEUES.to_string(),
        ),
        (
            "commands in flight on one queue",
            MAX_QUEUE_ENTRIES.to_string(),
        ),
        ("reactors", MAX_REACTORS.to_string()),
        ("devices of a pool", MAX_DEVICES.to_string()),
        ("hosts on an export's list", HOSTS_MAX.to_string()),
        (
            "hosts that may register with a volume (reservations)",
            MAX_REGISTRANTS.to_string(),
        ),
        (
            "characters of a tenant's or volume's name",
            NAME_MAX.to_string(),
        ),
        ("snapshots at one moment", SNAPSHOTS_MAX.to_string()),
        ("bytes of an NQN", NQN_MAX.to_string()),
        (
            "tenants with exports, if there are budgets",
            MAX_TENANTS.to_string(),
        ),
        ("IOPS of a base or a burst limit", MOST.iops.to_string()),
        (
            "bytes per second of a base or a burst limit",
            MOST.bytes.to_string(),
        ),
        (
            "seconds of a base that can be saved (credit)",
            MOST_CREDIT_SECONDS.to_string(),
        ),
        (
            "data of one command (MDTS)",
            format!("{} KiB", limits::TRANSFER_BYTES / 1024),
        ),
        (
            "R2Ts of one command at once, if its host accepts several (MAXR2T)",
            R2T_PARTS.to_string(),
        ),
        (
            "queues of an NVMe disk (pairs), of a virtio disk",
            limits::NVME_QUEUES.to_string(),
        ),
        ("entries of a queue", limits::QUEUE_ENTRIES.to_string()),
        (
            "data of one NVMe command (MDTS)",
            format!("{} KiB", limits::TRANSFER_BYTES / 1024),
        ),
        (
            "memory pieces (scatter/gather) of one command's data",
            limits::PIECES.to_string(),
        ),
        (
            "commands in flight on one NVMe controller, over all its queues",
            limits::NVME_COMMANDS.to_string(),
        ),
        (
            "memory ranges; their total size",
            format!(
                "{}; {} TiB",
                limits::MEMORY_REGIONS,
                limits::MEMORY_BYTES >> 40
            ),
        ),
        (
            "file descriptors passed by a client; in one message",
            format!("{}; {}", limits::DESCRIPTORS, limits::DESCRIPTORS_AT_ONCE),
        ),
        (
            "time for one message",
            format!("{} s", limits::MESSAGE_NS / 1_000_000_000),
        ),
        (
            "time for a client's answer to a request by Forebay (memory without a descriptor)",
            format!("{} s", limits::ASK_NS / 1_000_000_000),
        ),
        (
            "commands at once with data in such memory",
            limits::ASKING.to_string(),
        ),
        (
            "pinned parts of its memory (`--pinned-memory`); ring entries for them",
            format!("{}; {}", limits::HELD_PARTS, limits::HELD_ENTRIES),
        ),
        (
            "program of a firmware image",
            format!("{} MiB", PROGRAM_MAX_BYTES >> 20),
        ),
        (
            "body of a request",
            format!("{} KiB", BODY_MAX_BYTES / 1024),
        ),
        (
            "the daemon's answer to a request",
            format!("{} s", TIME_LIMIT.as_secs()),
        ),
        (
            "a command's wait for the daemon",
            format!("{} s", limits::OWNER_WAIT_NS / 1_000_000_000),
        ),
    ] {
        let row = format!("| {what} | {number} |");
        if std::env::var_os("UPDATE_DOCS").is_some() {
            page = with_row(&page, what, &row);
            std::fs::write(path, &page).unwrap();
        }
        assert!(
            page.contains(&row),
            "docs/src/limits.md lacks: {row}; rewrite it with \
             UPDATE_DOCS=1 cargo test -p forebay the_page_of_limits_has_not_drifted"
        );
    }
}

/// Replaces the rows that begin with `what` by `row`.
fn with_row(page: &str, what: &str, row: &str) -> String {
    let begin = format!("| {what} | ");
    page.lines()
        .map(|line| match line.starts_with(&begin) {
            true => format!("{row}\n"),
            false => format!("{line}\n"),
        })
        .collect()
}

#[test]
fn every_kind_of_event_is_in_the_book() {
    let api: serde_json::Value =
        serde_json::from_str(include_str!("../../../../docs/openapi.json")).unwrap();
    let book = include_str!("../../../../docs/src/operations.md");
    let kinds = &api["components"]["schemas"]["EventKind"];
    // Values with descriptions are listed as constants.
    let named = kinds["enum"].as_array().into_iter().flatten();
    let described = kinds["oneOf"].as_array().into_iter().flatten();
    let described = described.flat_map(|kind| kind["enum"].as_array().into_iter().flatten());
    let kinds: Vec<_> = named
        .chain(described)
        .filter_map(|kind| kind.as_str())
        .collect();
    assert!(kinds.len() > 10, "{kinds:?}");
    for kind in kinds {
        assert!(book.contains(&format!("`{kind}`")), "{kind}");
    }
}
