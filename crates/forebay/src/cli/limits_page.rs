//! The book's page of limits says what the program enforces.
//!
//! Purpose: `docs/src/limits.md` can't fall behind the constants.
//! Design: each row of its tables that names a number is made here from the constant and looked for.
//! Not here: the limits.

use forebay_control::api::validate::{HOSTS_MAX, NAME_MAX, NQN_MAX};
use forebay_control::api::{BODY_MAX_BYTES, TIME_LIMIT};
use forebay_engine::core::OWNER_WAIT_LIMIT_NS;
use forebay_nvme::reservation::MAX_REGISTRANTS;
use forebay_xlate::boundary::region::{
    MAX_CONTROLLERS, MAX_DEVICES, MAX_LANES, MAX_QUEUE_ENTRIES, MAX_QUEUES, MAX_REACTORS,
};

#[test]
fn the_page_of_limits_has_not_drifted() {
    let page = include_str!("../../../../docs/src/limits.md");
    for (what, number) in [
        ("exports", MAX_LANES.to_string()),
        (
            "controllers (a host has one for each connect)",
            MAX_CONTROLLERS.to_string(),
        ),
        (
            "queues, that is connections, admin queues included",
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
        ("bytes of an NQN", NQN_MAX.to_string()),
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
            format!("{} s", OWNER_WAIT_LIMIT_NS / 1_000_000_000),
        ),
    ] {
        let row = format!("| {what} | {number} |");
        assert!(page.contains(&row), "docs/src/limits.md lacks: {row}");
    }
}
