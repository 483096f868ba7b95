//! Enable, reset, shutdown, and the property commands.

use super::*;
use crate::fabrics::PropertyCommand;
use crate::register::{Cap, Cc};

#[test]
fn properties_of_a_new_controller() {
    let bench = Bench::connected(config());
    let get = |offset, wide| bench.controller.property_get(offset, wide);
    let cap = Cap::from_bits(get(register::CAP, true).unwrap());
    assert_eq!(
        (cap.mqes(), cap.cqr(), cap.css(), cap.mpsmin(), cap.mpsmax()),
        (127, true, 1, 0, 0)
    );
    assert_eq!(cap.crms(), 1);
    assert_eq!(get(register::VS, false), Ok(0x2_0000));
    assert_eq!(get(register::CC, false), Ok(0));
    assert_eq!(get(register::CSTS, false), Ok(0));
    // CAP.CRMS requires CRTO, at least CAP.TO.
    assert_eq!(get(register::CRTO, false), Ok(u64::from(cap.to())));
    for (offset, wide) in [
        (register::CAP, false),
        (register::CC, true),
        (0x20, false),
        (0x24, false),
    ] {
        assert_eq!(
            get(offset, wide),
            Err(Status::INVALID_FIELD),
            "{offset:#x} {wide}"
        );
    }
}

#[test]
fn property_commands_work_before_enabling_and_others_do_not() {
    let mut bench = Bench::connected(config());
    assert_eq!(bench.fails(identify(1, 0)), Status::COMMAND_SEQUENCE_ERROR);
    assert_eq!(
        bench.fails(Sqe::new(admin::KEEP_ALIVE, 1)),
        Status::COMMAND_SEQUENCE_ERROR
    );
    assert_eq!(
        bench.fails(event_request(1)),
        Status::COMMAND_SEQUENCE_ERROR
    );
    let get = PropertyCommand::get(1, register::CAP, true).to_sqe();
    assert_eq!(bench.ok(get), bench.controller.cap().into_bits());
    let set = PropertyCommand::set(2, register::CC, false, 0x46_0001).to_sqe();
    assert_eq!(
        bench.run(set),
        AdminOutcome::Complete {
            status: Status::SUCCESS,
            result: 0,
            data_bytes: 0,
            effect: Effect::Enabled
        }
    );
    assert!(bench.csts().rdy());
    bench.data(identify(1, 0));
}

#[test]
fn bad_fabrics_commands() {
    let mut bench = Bench::ready();
    let mut reserved_width = PropertyCommand::get(1, register::CAP, true);
    reserved_width.attrib = 2;
    assert_eq!(bench.fails(reserved_width.to_sqe()), Status::INVALID_FIELD);
    let read_only = PropertyCommand::set(1, register::CSTS, false, 0).to_sqe();
    assert_eq!(bench.fails(read_only), Status::INVALID_FIELD);
    let again = ConnectCommand::new(1, 0, 32, 0).to_sqe();
    assert_eq!(bench.fails(again), Status::COMMAND_SEQUENCE_ERROR);
    let mut disconnect = again;
    disconnect.nsid = u32::from(opcode::fctype::DISCONNECT).into();
    assert_eq!(bench.fails(disconnect), Status::INVALID_OPCODE);
}

#[test]
fn settings_that_can_not_be_enabled_are_fatal() {
    // Invalid CSS, MPS, AMS, IOSQES, IOCQES.
    for cc in [0x46_0011, 0x46_0081, 0x46_0801, 0x45_0001, 0x36_0001, 0x1] {
        let mut bench = Bench::connected(config());
        assert_eq!(bench.set_cc(cc), Ok(Effect::None), "{cc:#x}");
        assert!(bench.csts().cfs() && !bench.csts().rdy(), "{cc:#x}");
        assert_eq!(bench.fails(identify(1, 0)), Status::COMMAND_SEQUENCE_ERROR);
        assert_eq!(bench.set_cc(0), Ok(Effect::Reset));
        bench.controller.quiesced();
        assert_eq!(bench.csts(), Csts::new());
        assert_eq!(bench.set_cc(0x46_0001), Ok(Effect::Enabled));
    }
    // Discovery has no I/O entry sizes.
    let mut bench = Bench::connected(ControllerConfig::discovery(1));
    assert_eq!(bench.set_cc(1), Ok(Effect::Enabled));
}

#[test]
fn a_reset_is_over_when_the_owner_says_so() {
    let mut bench = Bench::ready();
    bench.ok(set_feature(crate::feature::ARBITRATION, 3));
    assert_eq!(bench.run(event_request(9)), AdminOutcome::Parked);
    bench.controller.namespace_changed(1);
    assert_eq!(bench.set_cc(0x46_0000), Ok(Effect::Reset));
    assert!(bench.csts().rdy() && !bench.controller.ready());
    // CSTS.RDY must clear first.
    assert_eq!(bench.set_cc(0x46_0001), Err(Status::COMMAND_SEQUENCE_ERROR));
    bench.controller.quiesced();
    assert_eq!(bench.csts(), Csts::new());
    assert_eq!(bench.set_cc(0x46_0001), Ok(Effect::Enabled));
    assert_eq!(bench.ok(get_feature(crate::feature::ARBITRATION, 0)), 0);
    bench.ok(set_feature(
        crate::feature::ASYNC_EVENT_CONFIGURATION,
        0x100,
    ));
    bench.controller.namespace_changed(1);
    assert_eq!(bench.controller.next_event(), None);
}

#[test]
fn a_shutdown_is_over_when_the_owner_says_so() {
    for shn in [1, 2] {
        let mut bench = Bench::ready();
        assert_eq!(bench.set_cc(0x46_0001 | shn << 14), Ok(Effect::Shutdown));
        assert_eq!(bench.csts().shst(), Csts::SHST_OCCURRING);
        assert_eq!(bench.fails(identify(1, 0)), Status::COMMAND_SEQUENCE_ERROR);
        assert_eq!(bench.set_cc(0x46_0001 | shn << 14), Ok(Effect::None));
        bench.controller.quiesced();
        assert_eq!(bench.csts().shst(), Csts::SHST_COMPLETE);
        assert!(bench.csts().rdy());
        assert_eq!(bench.set_cc(0x46_0001), Ok(Effect::None));
        assert!(!bench.controller.ready());
        assert_eq!(bench.set_cc(0x46_4001), Ok(Effect::None));
        assert_eq!(bench.csts().shst(), Csts::SHST_COMPLETE);
        assert_eq!(bench.set_cc(0x46_0000), Ok(Effect::Reset));
        bench.controller.quiesced();
        assert_eq!(bench.set_cc(0x46_0001), Ok(Effect::Enabled));
        assert!(bench.controller.ready());
    }
}

#[test]
fn shutdown_of_a_controller_that_is_not_enabled_is_complete_at_once() {
    let mut bench = Bench::connected(config());
    assert_eq!(bench.set_cc(1 << 14), Ok(Effect::None));
    assert_eq!(bench.csts().shst(), Csts::SHST_COMPLETE);
}

#[test]
fn a_discovery_controller_needs_no_owner_to_shut_down() {
    let mut bench = Bench::discovery();
    assert_eq!(bench.set_cc(0x46_4001), Ok(Effect::None));
    assert_eq!(bench.csts().shst(), Csts::SHST_COMPLETE);
    let mut bench = Bench::discovery();
    assert_eq!(bench.set_cc(0x46_0000), Ok(Effect::None));
    assert!(!bench.csts().rdy());
}

#[test]
fn while_enabled_only_enable_and_shutdown_change() {
    let mut bench = Bench::ready();
    assert_eq!(bench.set_cc(0x35_0081), Ok(Effect::None));
    assert_eq!(bench.controller.cc(), Cc::from_bits(0x46_0001));
    assert!(bench.controller.ready());
}

#[test]
fn a_failed_controller_runs_nothing() {
    let mut bench = Bench::ready();
    bench.controller.fail();
    assert!(bench.csts().cfs());
    assert_eq!(bench.fails(identify(1, 0)), Status::COMMAND_SEQUENCE_ERROR);
}
