//! Controllers of a management endpoint.

use super::*;
use crate::identify::{
    IdentifyController, IdentifyNamespace, PrimaryController, SecondaryControllers, cns,
};
use crate::log_page::*;
use crate::{NSID_ALL, feature};
use zerocopy::{FromBytes, IntoBytes};

fn controller(bench: &mut Bench) -> IdentifyController {
    IdentifyController::read_from_bytes(&bench.data(identify(cns::CONTROLLER, 0))).unwrap()
}

fn namespace(bench: &mut Bench, what: u8, nsid: u32) -> IdentifyNamespace {
    IdentifyNamespace::read_from_bytes(&bench.data(identify(what, nsid))).unwrap()
}

/// An Identify list from this CNTLID on.
fn from(what: u8, nsid: u32, cntlid: u16) -> Sqe {
    identify(what, nsid).with_cdw(10, u32::from(what) | u32::from(cntlid) << 16)
}

fn dwords(page: &[u8]) -> Vec<u32> {
    let dwords = page.chunks_exact(4);
    dwords
        .map(|d| u32::from_le_bytes(d.try_into().unwrap()))
        .collect()
}

/// A list without its unused end.
fn list(bench: &mut Bench, what: u8, after: u32) -> Vec<u32> {
    let mut list = dwords(&bench.data(identify(what, after)));
    list.truncate(list.iter().take_while(|nsid| **nsid != 0).count());
    list
}

fn controllers(bench: &mut Bench, sqe: Sqe) -> Vec<u16> {
    let page = bench.data(sqe);
    let ids = page.chunks_exact(2);
    let mut ids = ids.map(|id| u16::from_le_bytes([id[0], id[1]]));
    let count = usize::from(ids.next().unwrap());
    let (list, rest): (Vec<u16>, Vec<u16>) = (ids.by_ref().take(count).collect(), ids.collect());
    assert!(rest.iter().all(|id| *id == 0));
    list
}

#[test]
fn the_first_controller_is_administrative() {
    for (cntlid, kind, oncs) in [(0, 3, 0), (1, 1, 0b1101)] {
        let mut bench = Bench::management(cntlid);
        let id = controller(&mut bench);
        assert_eq!((id.cntlid.get(), id.cntrltype), (cntlid, kind));
        assert_eq!(
            (id.oncs.get(), id.oacs.get(), id.fna),
            (oncs, 0b1110, 0b1000)
        );
        assert_eq!((id.nvmsr, id.cmic, id.mdts, id.vwc), (1, 0b11, 4, 7));
        assert_eq!((id.frmw, id.fwug, id.elpe, id.lpa), (0x15, 1, 3, 0b10_0110));
        assert_eq!((id.nn.get(), id.mnan.get()), (0xFFFF_FFFE, 1024));
        assert_eq!((id.tnvmcap.get(), id.unvmcap.get()), (3 << 70, 5 << 40));
        assert_eq!((id.oaes.get(), id.kas.get(), id.maxcmd.get()), (0, 0, 0));
        assert_eq!((id.ctratt.get(), id.sgls.get(), id.anacap), (0, 0, 0));
        assert_eq!(Nqn::from_field(&id.subnqn), Ok(subsystem()));
        assert_eq!(bench.controller.csts(), Csts::new().with_rdy(true));
        assert_eq!(bench.controller.deadline_ns(), None);
    }
}

#[test]
fn lists_of_sparse_namespaces() {
    let mut bench = Bench::management(0);
    assert_eq!(
        list(&mut bench, cns::ALLOCATED_NAMESPACES, 0),
        [1, 70_000, 80_000]
    );
    assert_eq!(
        list(&mut bench, cns::ALLOCATED_NAMESPACES, 1),
        [70_000, 80_000]
    );
    assert_eq!(list(&mut bench, cns::ACTIVE_NAMESPACES, 0), []);
    let mut function = Bench::management(1);
    assert_eq!(
        list(&mut function, cns::CSI_ACTIVE_NAMESPACES, 0),
        [1, 70_000]
    );
    assert_eq!(list(&mut function, cns::ACTIVE_NAMESPACES, 1), [70_000]);
    let many = (0..2000).map(|n| (n * 1_000_000 + 9, vec![]));
    bench.world.volumes.borrow_mut().extend(many);
    bench.world.volumes.borrow_mut().insert(MAX_NSID, vec![]);
    let (mut all, mut after) = (Vec::new(), 0);
    loop {
        let part = list(&mut bench, cns::ALLOCATED_NAMESPACES, after);
        let Some(last) = part.last() else { break };
        after = *last;
        all.extend(part);
        if after == MAX_NSID {
            break;
        }
    }
    assert_eq!(all.len(), 2004);
    assert!(all.is_sorted());
    for nsid in [MAX_NSID, NSID_ALL] {
        for what in [cns::ALLOCATED_NAMESPACES, cns::ACTIVE_NAMESPACES] {
            let status = bench.fails(identify(what, nsid));
            assert_eq!(status, Status::INVALID_NAMESPACE_OR_FORMAT);
        }
    }
}

#[test]
fn lists_of_controllers() {
    let mut bench = Bench::management(0);
    let of = cns::NAMESPACE_CONTROLLERS;
    assert_eq!(controllers(&mut bench, from(of, 1, 0)), [1, 2]);
    assert_eq!(controllers(&mut bench, from(of, 70_000, 0)), [1]);
    assert_eq!(controllers(&mut bench, from(of, 1, 2)), [2]);
    for nsid in [80_000, 2] {
        assert_eq!(controllers(&mut bench, from(of, nsid, 0)), []);
    }
    assert_eq!(bench.fails(from(of, NSID_ALL, 0)), Status::INVALID_FIELD);
    assert_eq!(
        bench.fails(from(of, 0, 0)),
        Status::INVALID_NAMESPACE_OR_FORMAT
    );
    assert_eq!(
        controllers(&mut bench, from(cns::CONTROLLERS, 0, 0)),
        [0, 1, 2]
    );
    assert_eq!(controllers(&mut bench, from(cns::CONTROLLERS, 0, 2)), [2]);
    let primary = bench.data(identify(cns::PRIMARY_CONTROLLER, 0));
    let primary = PrimaryController::read_from_bytes(&primary).unwrap();
    assert_eq!((primary.cntlid.get(), primary.crt), (0, 0));
    assert!(primary.as_bytes()[2..].iter().all(|b| *b == 0));
}

#[test]
fn secondaries_are_read_in_parts() {
    let mut bench = Bench::management(0);
    let functions = (3..300).map(|cntlid| SubsystemController {
        cntlid,
        online: false,
    });
    bench.world.controllers.borrow_mut().extend(functions);
    let mut found = Vec::new();
    loop {
        let next = found.last().map_or(0, |(cntlid, _)| cntlid + 1);
        let page = bench.data(from(cns::SECONDARY_CONTROLLERS, 0, next));
        let page = SecondaryControllers::read_from_bytes(&page).unwrap();
        let entries = &page.entries[..usize::from(page.count)];
        for entry in entries {
            assert_eq!((entry.pcid.get(), entry.vfn.get()), (0, 0));
            assert_eq!((entry.nvq.get(), entry.nvi.get()), (0, 0));
            found.push((entry.scid.get(), entry.scs));
        }
        if entries.len() < 127 {
            break;
        }
    }
    let expected: Vec<_> = (1..300)
        .map(|cntlid| (cntlid, u8::from(cntlid == 1)))
        .collect();
    assert_eq!(found, expected);
    let mut function = Bench::management(1);
    let sqe = from(cns::SECONDARY_CONTROLLERS, 0, 0);
    assert_eq!(function.fails(sqe), Status::INVALID_FIELD);
}

#[test]
fn namespaces_are_seen_from_their_controllers() {
    let mut bench = Bench::management(2);
    for (what, nsid, there) in [
        (cns::NAMESPACE, 1, true),
        // Allocated but not attached, and unallocated.
        (cns::NAMESPACE, 70_000, false),
        (cns::NAMESPACE, 2, false),
        (cns::INDEPENDENT_NAMESPACE, 70_000, false),
        (cns::ALLOCATED_NAMESPACE, 70_000, true),
        (cns::ALLOCATED_NAMESPACE, 80_000, true),
        (cns::ALLOCATED_NAMESPACE, 2, false),
        (cns::ALLOCATED_NAMESPACE, MAX_NSID, false),
    ] {
        let data = bench.data(identify(what, nsid));
        assert_eq!(data.iter().any(|b| *b != 0), there, "{what:#x} {nsid}");
    }
    let invalid = Status::INVALID_NAMESPACE_OR_FORMAT;
    assert_eq!(
        bench.fails(identify(cns::NAMESPACE_DESCRIPTORS, 70_000)),
        invalid
    );
    for what in [
        cns::CSI_NAMESPACE,
        cns::INDEPENDENT_NAMESPACE,
        cns::ALLOCATED_NAMESPACE,
    ] {
        for nsid in [0, NSID_ALL] {
            assert_eq!(bench.fails(identify(what, nsid)), invalid, "{what:#x}");
        }
    }
    assert_eq!(bench.fails(identify(cns::NAMESPACE, 0)), invalid);
}

#[test]
fn formats_and_capacity_of_a_namespace() {
    let mut bench = Bench::management(1);
    for (block_bytes, format) in [(4096, 0), (512, 1)] {
        bench.world.block_bytes.set(block_bytes);
        let id = namespace(&mut bench, cns::NAMESPACE, 1);
        assert_eq!((id.flbas, id.nlbaf), (format, 1));
        assert_eq!(id.block_bytes(), Some(block_bytes));
        assert_eq!(id.nvmcap.get(), 384 * u128::from(block_bytes));
        assert_eq!((id.nmic, id.rescap, id.anagrpid.get()), (1, 0, 0));
        assert_eq!((id.nsze.get(), id.nguid), (1 << 20, [0xA1; 16]));
    }
    let common = namespace(&mut bench, cns::NAMESPACE, NSID_ALL);
    assert_eq!((common.nsfeat, common.nmic, common.dlfeat), (0x9, 1, 9));
    assert_eq!(
        (common.nlbaf, common.nsze.get(), common.nguid),
        (1, 0, [0; 16])
    );
    assert_eq!(
        [common.lbaf[0].get() >> 16, common.lbaf[1].get() >> 16],
        [12, 9]
    );
}

#[test]
fn commands_of_hosts_and_of_the_owner_are_refused() {
    for cntlid in [0, 1] {
        let mut bench = Bench::management(cntlid);
        for op in [
            admin::ASYNC_EVENT_REQUEST,
            admin::ABORT,
            admin::KEEP_ALIVE,
            admin::CREATE_IO_SQ,
            admin::VIRTUALIZATION_MANAGEMENT,
            opcode::FABRICS,
            admin::NAMESPACE_MANAGEMENT,
            admin::NAMESPACE_ATTACHMENT,
            admin::FIRMWARE_COMMIT,
            admin::FIRMWARE_DOWNLOAD,
            admin::FORMAT_NVM,
            0x84,
            0xC1,
        ] {
            assert_eq!(
                bench.fails(Sqe::new(op, 1)),
                Status::INVALID_OPCODE,
                "{op:#x}"
            );
        }
    }
}

#[test]
fn firmware_slots() {
    let mut bench = Bench::management(0);
    let page = bench.data(get_log(FIRMWARE_SLOT, 0, 512));
    assert_eq!((page[0], &page[8..16]), (1, &controller(&mut bench).fr[..]));
    bench.world.firmware.set(Some(Firmware {
        active_slot: 2,
        next_slot: 1,
        revisions: [Some(*b"1.0     "), Some(*b"2.0     ")],
    }));
    let page = bench.data(get_log(FIRMWARE_SLOT, 0, 512));
    assert_eq!((page[0], &page[8..24]), (0x12, &b"1.0     2.0     "[..]));
    assert!(page[24..].iter().all(|b| *b == 0));
    assert_eq!(&controller(&mut bench).fr, b"2.0     ");
    // An owner's mistake.
    bench.world.firmware.set(Some(Firmware {
        active_slot: 9,
        next_slot: 0,
        revisions: [None; 2],
    }));
    assert_eq!(
        controller(&mut bench).fr,
        bench.controller.config().firmware
    );
}

#[test]
fn effects_of_commands() {
    let mut bench = Bench::management(0);
    let effects = dwords(&bench.data(get_log(COMMANDS_SUPPORTED_AND_EFFECTS, 0, 4096)));
    for (op, expected) in [
        (admin::IDENTIFY, SUPPORTED | SCOPE_CONTROLLER),
        (
            admin::NAMESPACE_MANAGEMENT,
            SUPPORTED | EFFECT_NIC | SCOPE_SUBSYSTEM,
        ),
        (
            admin::NAMESPACE_ATTACHMENT,
            SUPPORTED | EFFECT_NIC | SCOPE_SUBSYSTEM,
        ),
        (admin::FIRMWARE_COMMIT, SUPPORTED | SCOPE_SUBSYSTEM),
        (
            admin::FORMAT_NVM,
            SUPPORTED | EFFECT_LBCC | EFFECT_NCC | SCOPE_NAMESPACE,
        ),
        (0xC1, SUPPORTED | SCOPE_SUBSYSTEM),
        (0xC2, 0),
    ] {
        assert_eq!(effects[usize::from(op)], expected, "{op:#x}");
    }
    let logs = dwords(&bench.data(get_log(SUPPORTED_LOG_PAGES, 0, 1024)));
    let listed: Vec<usize> = (0..256).filter(|lid| logs[*lid] != 0).collect();
    assert_eq!(listed, [0, 1, 2, 3, 4, 5, 0x12, 0x13, 0x80, 0xC0, 0xC3]);
    assert_eq!(bench.fails(get_log(0xC0, 0, 4)), Status::INVALID_FIELD);
}

#[test]
fn logs_of_the_whole_subsystem() {
    let mut bench = Bench::management(0);
    for nsid in [0, NSID_ALL] {
        let page = bench.data(get_log(SMART_HEALTH, 0, 512).with_nsid(nsid));
        assert_eq!((page[3], page[32], page[80]), (100, 2, 9));
    }
    let page = bench.data(get_log(RESERVATION_NOTIFICATION, 0, 64));
    assert!(page.iter().all(|b| *b == 0));
    let page = bench.data(get_log(ERROR_INFORMATION, 0, 64 << 10));
    assert_eq!(page.len(), 64 << 10);
    let sqe = get_log(ERROR_INFORMATION, 0, (64 << 10) + 4);
    assert_eq!(bench.fails(sqe), Status::INVALID_FIELD);
}

fn changed(bench: &mut Bench, retain: bool) -> Vec<u32> {
    let sqe = get_log(CHANGED_NAMESPACE_LIST, 0, 4096);
    let mut list = dwords(&bench.data(if retain { retained(sqe) } else { sqe }));
    list.truncate(list.iter().take_while(|nsid| **nsid != 0).count());
    list
}

#[test]
fn changed_namespaces_with_any_identifier() {
    let mut bench = Bench::management(0);
    for nsid in [70_000, 1, MAX_NSID, 70_000] {
        bench.controller.namespace_changed(nsid);
    }
    assert_eq!(changed(&mut bench, true), [1, 70_000, MAX_NSID]);
    // Between the pieces.
    bench.controller.namespace_changed(1);
    bench.controller.namespace_changed(2);
    bench.data(get_log(CHANGED_NAMESPACE_LIST, 2048, 2048));
    assert_eq!(changed(&mut bench, false), [1, 2]);
    assert_eq!(changed(&mut bench, false), []);
    // Too many for the list.
    (1..=1024).for_each(|nsid| bench.controller.namespace_changed(nsid));
    assert_eq!(changed(&mut bench, true).len(), 1024);
    bench.controller.namespace_changed(2000);
    assert_eq!(changed(&mut bench, true), [NSID_ALL]);
    bench.controller.namespace_changed(3000);
    bench.data(get_log(CHANGED_NAMESPACE_LIST, 4, 4092));
    assert_eq!(changed(&mut bench, false), [NSID_ALL]);
    assert_eq!(changed(&mut bench, false), []);
}

#[test]
fn features_of_the_node() {
    let mut bench = Bench::management(0);
    let features = dwords(&bench.data(get_log(FEATURES_SUPPORTED_AND_EFFECTS, 0, 1024)));
    let listed: Vec<usize> = (0..256).filter(|fid| features[*fid] != 0).collect();
    assert_eq!(listed, [0x02, 0x04]);
    bench.ok(set_feature(feature::TEMPERATURE_THRESHOLD, 340));
    assert_eq!(
        bench.ok(get_feature(feature::TEMPERATURE_THRESHOLD, 0)),
        340
    );
    let cache = get_feature(feature::VOLATILE_WRITE_CACHE, 0);
    assert_eq!(bench.fails(cache), Status::INVALID_FIELD);
    let state = set_feature(feature::POWER_MANAGEMENT, 1);
    assert_eq!(bench.fails(state), Status::INVALID_FIELD);
}
