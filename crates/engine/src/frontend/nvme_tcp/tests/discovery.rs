//! Discovery at scale: work is counted in exports scanned.

use super::*;
use crate::exports::{ExportTable, Served};
use forebay_nvme::opcode;
use forebay_xlate::boundary::message::{ExportConfig, ExportId};
use rig::Rig;

const EXPORTS: u64 = 1000;
const LISTED: u64 = 255;
const HOSTS: u64 = 60;

fn host_name(host: u64) -> String {
    format!("nqn.2014-08.org.example:host-{host}")
}

fn served(export: u64, hosts: std::ops::Range<u64>) -> Served {
    let config = ExportConfig {
        export: ExportId(export),
        volume: V,
        nqn: format!("nqn.2026-01.io.forebay:t.{export}"),
        serial: "s".into(),
        hosts: hosts.map(host_name).collect(),
        any_host: false,
        frontend: Default::default(),
    };
    Served {
        config: Arc::new(config),
        reactor: 0,
    }
}

/// A discovery controller that asks for change events.
fn discovery(rig: &mut Rig) -> Host {
    let mut host = rig.connect(ConnectCommand::new(0, 0, 32, 0), 0xffff);
    assert_eq!(host.response().unwrap().status(), Status::SUCCESS);
    let enable = PropertyCommand::set(1, 0x14, false, 0x46_0001);
    host.say(&enable.to_sqe(), &[]);
    rig.turns(1);
    assert_eq!(host.response().unwrap().status(), Status::SUCCESS);
    // Set Features, Asynchronous Event Configuration: Discovery Log Page Change.
    let set = Sqe::new(opcode::admin::SET_FEATURES, 3)
        .with_cdw(10, 0x0b)
        .with_cdw(11, 1 << 31);
    host.say(&set, &[]);
    host.say(&Sqe::new(opcode::admin::ASYNC_EVENT_REQUEST, 4), &[]);
    rig.turns(1);
    assert_eq!(host.response().unwrap().status(), Status::SUCCESS);
    host
}

#[test]
fn discovery_at_scale_keeps_turns_short() {
    let exports = ExportTable::default();
    for export in 0..EXPORTS {
        exports.set(served(export, 0..LISTED));
    }
    let mut rig = rig();
    rig.discovery = Some(exports.clone());
    let mut hosts = Vec::new();
    for host in 0..HOSTS {
        rig.host = host_name(host).leak();
        hosts.push(discovery(&mut rig));
    }
    // Each host's list was made once.
    assert_eq!(exports.checked(), HOSTS * EXPORTS);
    for host in &mut hosts {
        host.say(&Sqe::new(opcode::admin::KEEP_ALIVE, 9), &[]);
    }
    rig.turns(2);
    for host in &mut hosts {
        assert_eq!(host.response().unwrap().cid(), 9);
    }
    assert_eq!(exports.checked(), HOSTS * EXPORTS);
    // A second controller of a host shares its list.
    let again = discovery(&mut rig);
    hosts.push(again);
    assert_eq!(exports.checked(), HOSTS * EXPORTS);

    // One more export, hidden from the first host: each turn scans each export once.
    exports.set(served(EXPORTS, 1..LISTED));
    let before = exports.checked();
    rig.frontend.discovery_changed();
    let mut reported = vec![false; hosts.len()];
    for _ in 0..=hosts.len() {
        let checked = exports.checked();
        assert!(!reported.iter().all(|reported| *reported));
        rig.turns(1);
        let allowed = u64::from(lifecycle::LISTS_A_TURN) * (EXPORTS + 1);
        assert!(exports.checked() - checked <= allowed);
        for (reported, host) in reported.iter_mut().zip(&mut hosts) {
            *reported |= host.response().is_some_and(|cqe| cqe.cid() == 4);
        }
    }
    assert!(rig.is_idle());
    assert_eq!(exports.checked() - before, HOSTS * (EXPORTS + 1));
    assert!(!reported[0] && reported[1..].iter().all(|reported| *reported));
}
