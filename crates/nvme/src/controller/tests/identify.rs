//! Identify agrees with the controller's behaviour.

use super::*;
use crate::NSID_ALL;
use crate::identify::{IdentifyController, IdentifyNamespace, IndependentNamespace, cns};
use zerocopy::FromBytes;

fn controller(bench: &mut Bench) -> IdentifyController {
    IdentifyController::read_from_bytes(&bench.data(identify(cns::CONTROLLER, 0))).unwrap()
}

#[test]
fn an_io_controller() {
    let mut bench = Bench::ready();
    let id = controller(&mut bench);
    assert_eq!(&id.sn, b"abc123              ");
    assert_eq!(&id.mn[..8], b"Forebay ");
    assert_eq!(
        u64::from(id.ver.get()),
        bench.controller.property_get(register::VS, false).unwrap()
    );
    assert_eq!((id.cntlid.get(), id.cntrltype, id.mdts), (3, 1, 7));
    assert_eq!(
        (id.oaes.get(), id.ctratt.get(), id.kas.get()),
        (0x900, 1, 1)
    );
    assert_eq!(
        (id.sqes, id.cqes, id.maxcmd.get(), id.nn.get()),
        (0x66, 0x44, 128, 1)
    );
    assert_eq!(
        (id.oncs.get(), id.fuses.get(), id.vwc, id.oacs.get()),
        (0x2D, 1, 7, 0)
    );
    assert_eq!(id.sgls.get(), 0x30_0001);
    assert_eq!(
        (id.ioccsz.get(), id.iorcsz.get(), id.icdoff.get(), id.msdbd),
        (516, 1, 0, 1)
    );
    assert_eq!((id.fcatt, id.ofcs.get(), id.cmic), (0, 0, 0b1011));
    // Linux requires a transition time, a count and a group in range for ANA.
    assert_eq!((id.anatt, id.anacap), (10, 0x47));
    assert_eq!((id.anagrpmax.get(), id.nanagrpid.get()), (1, 1));
    assert_eq!((id.nn.get(), id.mnan.get()), (1, 1));
    assert_eq!((id.awun.get(), id.awupf.get(), id.acwu.get()), (0, 0, 0));
    assert_eq!(Nqn::from_field(&id.subnqn), Ok(subsystem()));
    // Hosts enable Command Interrupted only with a retry delay.
    assert_ne!(id.crdt[0].get(), 0);
}

#[test]
fn a_discovery_controller() {
    let mut bench = Bench::discovery();
    let id = controller(&mut bench);
    assert_eq!(
        (id.cntrltype, id.nn.get(), id.oncs.get(), id.vwc),
        (2, 0, 0, 0)
    );
    assert_eq!((id.cmic, id.anacap, id.fuses.get()), (0, 0, 0));
    assert_eq!((id.oaes.get(), id.kas.get()), (1 << 31, 1));
    assert_eq!(Nqn::from_field(&id.subnqn), Ok(Nqn::discovery()));
    for what in 0..=255 {
        if what != cns::CONTROLLER {
            assert_eq!(
                bench.fails(identify(what, 1)),
                Status::INVALID_FIELD,
                "{what:#x}"
            );
        }
    }
}

#[test]
fn the_smallest_mdts_still_says_a_limit() {
    let mut bench = Bench::connected(ControllerConfig {
        mdts_bytes: 1,
        ..config()
    });
    bench.set_cc(0x46_0001).unwrap();
    assert_eq!(controller(&mut bench).mdts, 1);
    assert_eq!(bench.controller.config().mdts_bytes, 8192);
}

fn namespace(bench: &mut Bench) -> IdentifyNamespace {
    IdentifyNamespace::read_from_bytes(&bench.data(identify(cns::NAMESPACE, 1))).unwrap()
}

#[test]
fn a_namespace_and_its_growth() {
    let mut bench = Bench::ready();
    let id = namespace(&mut bench);
    assert_eq!(
        (id.nsze.get(), id.ncap.get(), id.nuse.get()),
        (1 << 20, 1 << 20, 384)
    );
    assert_eq!((id.block_bytes(), id.nlbaf, id.flbas), (Some(512), 0, 0));
    assert_eq!((id.nsfeat, id.nmic, id.dlfeat), (0x19, 1, 9));
    assert_eq!((id.npwg.get(), id.npwa.get()), (7, 7));
    assert_eq!(
        (id.npdg.get(), id.npda.get(), id.nows.get()),
        (127, 127, 127)
    );
    assert_eq!((id.nguid, id.eui64), ([0xA1; 16], [0; 8]));
    assert_eq!((id.rescap, id.anagrpid.get()), (0xFF, 1));
    bench.world.block_count.set(2 << 20);
    assert_eq!(namespace(&mut bench).nsze.get(), 2 << 20);
}

/// Also without the write protection feature (NWPC).
#[test]
fn a_write_protected_namespace_says_so() {
    let mut bench = Bench::ready();
    for protected in [false, true] {
        bench.world.write_protected.set(protected);
        let independent = bench.data(identify(cns::INDEPENDENT_NAMESPACE, 1));
        let independent = IndependentNamespace::read_from_bytes(&independent).unwrap();
        let nsattr = u8::from(protected);
        assert_eq!(namespace(&mut bench).nsattr, nsattr);
        assert_eq!((independent.nsattr, independent.nstat), (nsattr, 1));
        assert_eq!(controller(&mut bench).nwpc, 0);
    }
}

#[test]
fn namespaces_that_are_not_there() {
    let mut bench = Bench::ready();
    for what in [
        cns::NAMESPACE,
        cns::CSI_NAMESPACE,
        cns::INDEPENDENT_NAMESPACE,
        cns::NAMESPACE_DESCRIPTORS,
    ] {
        for nsid in [0, 2, 65, 0xFFFF_FFFE, NSID_ALL] {
            let status = bench.fails(identify(what, nsid));
            assert_eq!(
                status,
                Status::INVALID_NAMESPACE_OR_FORMAT,
                "{what:#x} {nsid:#x}"
            );
        }
    }
    // Valid but inactive: zeros.
    bench.world.present.set(false);
    for what in [
        cns::NAMESPACE,
        cns::CSI_NAMESPACE,
        cns::INDEPENDENT_NAMESPACE,
    ] {
        assert!(
            bench.data(identify(what, 1)).iter().all(|&b| b == 0),
            "{what:#x}"
        );
    }
    let status = bench.fails(identify(cns::NAMESPACE_DESCRIPTORS, 1));
    assert_eq!(status, Status::INVALID_NAMESPACE_OR_FORMAT);
}

#[test]
fn namespace_lists() {
    let mut bench = Bench::ready();
    for what in [cns::ACTIVE_NAMESPACES, cns::CSI_ACTIVE_NAMESPACES] {
        let list = bench.data(identify(what, 0));
        assert_eq!(list[..8], [1, 0, 0, 0, 0, 0, 0, 0]);
        assert!(bench.data(identify(what, 1)).iter().all(|&b| b == 0));
        assert!(
            bench
                .data(identify(what, 0xFFFF_FFFD))
                .iter()
                .all(|&b| b == 0)
        );
        for nsid in [0xFFFF_FFFE, NSID_ALL] {
            let status = bench.fails(identify(what, nsid));
            assert_eq!(status, Status::INVALID_NAMESPACE_OR_FORMAT);
        }
    }
    bench.world.present.set(false);
    assert!(
        bench
            .data(identify(cns::ACTIVE_NAMESPACES, 0))
            .iter()
            .all(|&b| b == 0)
    );
}

#[test]
fn descriptors_end_with_the_command_set() {
    let mut bench = Bench::ready();
    let list = bench.data(identify(cns::NAMESPACE_DESCRIPTORS, 1));
    assert_eq!(list[..4], [2, 16, 0, 0]);
    assert_eq!(list[4..20], [0xA1; 16]);
    assert_eq!(list[20..24], [3, 16, 0, 0]);
    assert_eq!(list[24..40], [0xB2; 16]);
    assert_eq!(list[40..46], [4, 1, 0, 0, 0, 0]);
    assert!(list[45..].iter().all(|&b| b == 0));
}

#[test]
fn command_set_specific() {
    let mut bench = Bench::ready();
    assert!(
        bench
            .data(identify(cns::CSI_CONTROLLER, 0))
            .iter()
            .all(|&b| b == 0)
    );
    let id = bench.data(identify(cns::INDEPENDENT_NAMESPACE, 1));
    let id = IndependentNamespace::read_from_bytes(&id).unwrap();
    assert_eq!((id.nsfeat, id.nmic, id.nstat), (8, 1, 1));
    let zoned = 2 << 24;
    for what in [
        cns::CSI_NAMESPACE,
        cns::CSI_CONTROLLER,
        cns::CSI_ACTIVE_NAMESPACES,
    ] {
        let status = bench.fails(identify(what, 1).with_cdw(11, zoned));
        assert_eq!(status, Status::INVALID_FIELD, "{what:#x}");
    }
    let sets = bench.data(identify(cns::COMMAND_SETS, 0).with_cdw(10, 0xFFFF_001C));
    assert_eq!(sets[..9], [1, 0, 0, 0, 0, 0, 0, 0, 0]);
    let other = identify(cns::COMMAND_SETS, 0).with_cdw(10, 0x0009_001C);
    assert_eq!(bench.fails(other), Status::INVALID_FIELD);
    let primary = identify(cns::PRIMARY_CONTROLLER, 0);
    assert_eq!(bench.fails(primary), Status::INVALID_FIELD);
    let cntlid = bench.controller.cntlid();
    for (what, nsid) in [(cns::NAMESPACE_CONTROLLERS, 1), (cns::CONTROLLERS, 0)] {
        let list = bench.data(identify(what, nsid));
        assert_eq!(list[..2], [1, 0]);
        assert_eq!(list[2..4], cntlid.to_le_bytes());
    }
    bench.world.present.set(false);
    let list = bench.data(identify(cns::NAMESPACE_CONTROLLERS, 1));
    assert!(list.iter().all(|b| *b == 0));
}

#[test]
fn a_buffer_that_is_too_small_is_our_own_mistake() {
    let mut bench = Bench::ready();
    bench.out.truncate(4095);
    assert_eq!(
        bench.run(identify(cns::CONTROLLER, 0)),
        AdminOutcome::Complete {
            status: Status::INTERNAL_ERROR,
            result: 0,
            data_bytes: 0,
            effect: Effect::None
        }
    );
}
