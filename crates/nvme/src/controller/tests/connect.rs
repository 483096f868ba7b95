//! Connect, of Admin and I/O queues.

use super::*;

fn admin_data() -> ConnectData {
    ConnectData::new([5; 16], 0xFFFF, &subsystem(), &host())
}

fn io_data() -> ConnectData {
    ConnectData::new([5; 16], 3, &subsystem(), &host())
}

fn parameter(in_data: bool, offset: u64) -> Refusal {
    Refusal {
        status: Status::CONNECT_INVALID_PARAMETERS.with_dnr(),
        result: offset | u64::from(in_data) << 16,
    }
}

fn refused(status: Status) -> Refusal {
    Refusal {
        status: status.with_dnr(),
        result: 0,
    }
}

#[test]
fn an_admin_queue() {
    let mut command = ConnectCommand::new(1, 0, 32, 15_000);
    command.cattr = ConnectCommand::CATTR_DISABLE_SQ_FLOW_CONTROL;
    assert_eq!(
        check_admin_connect(&command, &admin_data(), 32),
        Ok(AdminConnect {
            subnqn: subsystem(),
            hostnqn: host(),
            hostid: [5; 16],
            entries: 32,
            kato_ms: 15_000,
            disable_sq_flow_control: true,
        })
    );
    let check = |command: &ConnectCommand, data: &ConnectData| {
        check_admin_connect(command, data, 32).unwrap_err()
    };
    let good = ConnectCommand::new(1, 0, 32, 0);
    assert_eq!(
        check(&ConnectCommand::new(1, 0, 1, 0), &admin_data()),
        parameter(false, 44)
    );
    assert_eq!(
        check(&ConnectCommand::new(1, 0, 33, 0), &admin_data()),
        parameter(false, 44)
    );
    assert_eq!(
        check(&ConnectCommand::new(1, 1, 32, 0), &admin_data()),
        parameter(false, 42)
    );
    assert_eq!(check(&good, &io_data()), parameter(true, 16));
    let mut format = good;
    format.recfmt = 1.into();
    assert_eq!(
        check(&format, &admin_data()),
        refused(Status::CONNECT_INCOMPATIBLE_FORMAT)
    );
    let mut data = admin_data();
    data.subnqn = [b'x'; 256];
    assert_eq!(check(&good, &data), parameter(true, 256));
    let mut data = admin_data();
    data.hostnqn[0] = 0xff;
    assert_eq!(check(&good, &data), parameter(true, 512));
}

#[test]
fn io_queues_come_and_go() {
    let mut bench = Bench::ready();
    bench.ok(set_feature(crate::feature::NUMBER_OF_QUEUES, 0x1_0001));
    let connect = |bench: &mut Bench, qid| {
        bench
            .controller
            .connect_io_queue(&ConnectCommand::new(1, qid, 128, 0), &io_data())
    };
    assert_eq!(
        connect(&mut bench, 1),
        Ok(IoQueue {
            qid: 1,
            entries: 128,
            disable_sq_flow_control: false
        })
    );
    assert_eq!(
        connect(&mut bench, 1),
        Err(refused(Status::COMMAND_SEQUENCE_ERROR))
    );
    assert!(connect(&mut bench, 2).is_ok());
    for qid in [0, 3, 64, 128, 129, u16::MAX] {
        assert_eq!(connect(&mut bench, qid), Err(parameter(false, 42)), "{qid}");
        assert!(!bench.controller.io_queue_connected(qid));
        bench.controller.io_queue_gone(qid);
    }
    let more = set_feature(crate::feature::NUMBER_OF_QUEUES, 0x7_0007);
    assert_eq!(bench.fails(more), Status::COMMAND_SEQUENCE_ERROR);
    bench.controller.io_queue_gone(1);
    assert!(connect(&mut bench, 1).is_ok());
    bench.controller.io_queue_gone(1);
    bench.controller.io_queue_gone(2);
    bench.ok(more);
}

#[test]
fn every_queue_can_be_connected() {
    let mut bench = Bench::connected(ControllerConfig {
        max_io_queues: MAX_IO_QUEUES,
        ..config()
    });
    bench.set_cc(0x46_0001).unwrap();
    for qid in 1..=MAX_IO_QUEUES {
        let command = ConnectCommand::new(1, qid, 2, 0);
        assert!(
            bench
                .controller
                .connect_io_queue(&command, &io_data())
                .is_ok(),
            "{qid}"
        );
    }
    let state = *bench.controller.state();
    assert_eq!(state.io_queues, [u64::MAX; 2]);
    assert!(Controller::restore(*bench.controller.config(), &state).is_ok());
    bench.set_cc(0x46_0000).unwrap();
    bench.controller.quiesced();
    assert_eq!(bench.controller.state().io_queues, [0; 2]);
}

#[test]
fn io_queues_belong_to_the_association() {
    let mut bench = Bench::ready();
    let command = ConnectCommand::new(1, 1, 128, 0);
    let other = Nqn::parse("nqn.2026-01.io.forebay:mallory").unwrap();
    for (data, refusal) in [
        (
            ConnectData::new([5; 16], 4, &subsystem(), &host()),
            parameter(true, 16),
        ),
        (
            ConnectData::new([5; 16], 0xFFFF, &subsystem(), &host()),
            parameter(true, 16),
        ),
        (
            ConnectData::new([5; 16], 3, &other, &host()),
            parameter(true, 256),
        ),
        (
            ConnectData::new([5; 16], 3, &subsystem(), &other),
            parameter(true, 512),
        ),
        (
            ConnectData::new([6; 16], 3, &subsystem(), &host()),
            parameter(true, 512),
        ),
    ] {
        assert_eq!(
            bench.controller.connect_io_queue(&command, &data),
            Err(refusal)
        );
    }
    let large = ConnectCommand::new(1, 1, 129, 0);
    assert_eq!(
        bench.controller.connect_io_queue(&large, &io_data()),
        Err(parameter(false, 44))
    );
    let mut early = Bench::connected(config());
    assert_eq!(
        early.controller.connect_io_queue(&command, &io_data()),
        Err(refused(Status::COMMAND_SEQUENCE_ERROR))
    );
    let mut discovery = Bench::discovery();
    let data = ConnectData::new([5; 16], 4, &Nqn::discovery(), &host());
    assert_eq!(
        discovery.controller.connect_io_queue(&command, &data),
        Err(parameter(false, 42))
    );
}

#[test]
fn a_forgotten_event_request_is_not_completed() {
    let mut bench = super::Bench::ready();
    bench.controller.state.event_request(7).unwrap();
    bench.controller.state.event_request(8).unwrap();
    bench.controller.forget_event_request(7);
    bench.controller.forget_event_request(9);
    let waiting = bench.controller.state().event_slots;
    assert_eq!(waiting.iter().filter(|s| **s != 0).count(), 1);
}
