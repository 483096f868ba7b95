//! Tests of sessions, queues and discovery against a fake target.

mod fake;

use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use fake::{Config, HOSTNQN, SUBNQN, Target};
use forebay_initiator::{Error, Host, IoOp, Options, Session, Wait, dsm_ranges};
use forebay_nvme::Status;

const LIMIT: Duration = Duration::from_secs(120);

fn options() -> Options {
    Options {
        kato_ms: 0,
        command_timeout: Duration::from_secs(60),
        ..Options::default()
    }
}

fn pattern(bytes: usize, seed: u8) -> Vec<u8> {
    (0..bytes)
        .map(|i| (i as u8).wrapping_mul(31).wrapping_add(seed))
        .collect()
}

fn exercise(config: Config, options: &Options) {
    let target = Target::start(config);
    let mut session = Session::connect(target.addr(), SUBNQN, HOSTNQN, options).unwrap();
    assert_eq!(session.controller().serial, "0123456789abcdef0123");
    assert!(session.controller().volatile_write_cache);
    assert_eq!(session.namespaces()[0].size_bytes(), 1 << 20);
    assert_eq!(session.namespace_uuid(1).unwrap(), Some([0xab; 16]));
    let mut queue = session.open_queue(1).unwrap();
    // In-capsule, slightly larger, and large enough to be split by R2T and MAXH2CDATA.
    for (lba, blocks) in [(0, 1), (8, 8), (100, 9), (200, 200), (1000, 1000)] {
        let data = pattern(blocks as usize * 512, lba as u8);
        let write = IoOp::Write {
            lba,
            blocks,
            fua: false,
        };
        queue.execute(&write, data.clone(), LIMIT).unwrap();
        let at = lba as usize * 512;
        assert!(target.disk()[at..at + data.len()] == data);
        let read = IoOp::Read { lba, blocks };
        let back = queue.execute(&read, vec![0; data.len()], LIMIT).unwrap();
        assert!(back == data, "{blocks} blocks at {lba}");
    }
    queue.execute(&IoOp::Flush, Vec::new(), LIMIT).unwrap();
    let zeroes = IoOp::WriteZeroes {
        lba: 200,
        blocks: 100,
        deallocate: true,
    };
    queue.execute(&zeroes, Vec::new(), LIMIT).unwrap();
    let ranges = dsm_ranges(&[(1000, 10), (1990, 10)]);
    queue
        .execute(&IoOp::Deallocate { ranges: 2 }, ranges, LIMIT)
        .unwrap();
    let zero = |lba: usize, blocks: usize| {
        target.disk()[lba * 512..(lba + blocks) * 512]
            .iter()
            .all(|&b| b == 0)
    };
    assert!(zero(200, 100) && zero(1000, 10) && zero(1990, 10));
    assert!(!zero(300, 1) && !zero(1010, 1));
    let error = queue
        .execute(
            &IoOp::Read {
                lba: 2048,
                blocks: 1,
            },
            vec![0; 512],
            LIMIT,
        )
        .unwrap_err();
    assert_eq!(
        error.status().map(Status::code),
        Some(Status::LBA_OUT_OF_RANGE)
    );
    assert!(!error.is_connection_lost());
    assert!(target.counters().in_capsule_writes.load(SeqCst) >= 2);
    assert!(target.counters().r2ts.load(SeqCst) >= 3);
    drop(queue);
    session.close().unwrap();
    assert_eq!(target.counters().shutdowns.load(SeqCst), 1);
}

#[test]
fn data_travels_every_way() {
    exercise(Config::default(), &options());
}

#[test]
fn data_travels_every_way_with_digests_alignment_and_responses() {
    let mut config = Config {
        success: false,
        // Long enough to be received directly into the buffer.
        c2h_bytes: 1 << 20,
        ..Config::default()
    };
    config.offer.alignment_bytes = 72;
    let options = Options {
        header_digest: true,
        data_digest: true,
        ..options()
    };
    exercise(config, &options);
}

#[test]
fn success_replaces_the_response_only_without_sq_flow_control() {
    for (off, responses) in [(true, 1), (false, 2)] {
        let target = Target::start(Config::default());
        let options = Options {
            disable_sq_flow_control: off,
            ..options()
        };
        let mut session = Session::connect(target.addr(), SUBNQN, HOSTNQN, &options).unwrap();
        let before = target.counters().responses.load(SeqCst);
        let mut queue = session.open_queue(1).unwrap();
        let read = IoOp::Read { lba: 0, blocks: 1 };
        queue.execute(&read, vec![0; 512], LIMIT).unwrap();
        // Connect's response, and the read's if it has one.
        assert_eq!(target.counters().responses.load(SeqCst) - before, responses);
    }
}

#[test]
fn the_queue_fills_to_its_depth_and_all_end() {
    let target = Target::start(Config {
        mqes: 32,
        ..Config::default()
    });
    let mut session = Session::connect(target.addr(), SUBNQN, HOSTNQN, &options()).unwrap();
    assert_eq!(session.queue_depth(), 32);
    let mut queue = session.open_queue(1).unwrap();
    for round in 0..20u64 {
        let mut tag = 0;
        loop {
            let lba = tag * 16;
            let buf = pattern(16 * 512, (round + tag) as u8);
            let write = IoOp::Write {
                lba,
                blocks: 16,
                fua: false,
            };
            if queue.submit(&write, tag, buf).is_err() {
                break;
            }
            tag += 1;
        }
        assert_eq!(tag, 32);
        let mut out = Vec::new();
        while queue.in_flight() > 0 {
            assert!(queue.poll(&mut out, Wait::Block, LIMIT).unwrap() > 0);
        }
        let mut tags: Vec<_> = out.iter().map(|d| d.tag).collect();
        tags.sort_unstable();
        assert!(tags.into_iter().eq(0..32));
        for done in out {
            assert!(done.status.is_success());
            assert_eq!(done.buf, pattern(16 * 512, (round + done.tag) as u8));
        }
    }
}

#[test]
fn a_corrupted_read_is_noticed_by_its_digest() {
    let target = Target::start(Config {
        corrupt_read: 2,
        ..Config::default()
    });
    let options = Options {
        data_digest: true,
        ..options()
    };
    let mut session = Session::connect(target.addr(), SUBNQN, HOSTNQN, &options).unwrap();
    let mut queue = session.open_queue(1).unwrap();
    let read = IoOp::Read { lba: 0, blocks: 64 };
    queue.execute(&read, vec![0; 32768], LIMIT).unwrap();
    let error = queue.execute(&read, vec![0; 32768], LIMIT).unwrap_err();
    assert_eq!(error.status(), Some(Status::TRANSIENT_TRANSPORT_ERROR));
    queue.execute(&read, vec![0; 32768], LIMIT).unwrap();
}

#[test]
fn a_write_that_fails_while_its_data_is_on_the_way_keeps_its_buffer_until_then() {
    let target = Target::start(Config {
        fail_with_r2t: 1,
        ..Config::default()
    });
    let mut session = Session::connect(target.addr(), SUBNQN, HOSTNQN, &options()).unwrap();
    let mut queue = session.open_queue(1).unwrap();
    let write = IoOp::Write {
        lba: 0,
        blocks: 1000,
        fua: false,
    };
    let data = pattern(512_000, 3);
    queue.submit(&write, 7, data.clone()).unwrap();
    let mut out = Vec::new();
    while out.is_empty() {
        queue.poll(&mut out, Wait::Block, LIMIT).unwrap();
    }
    assert_eq!(out[0].status, Status::CAPACITY_EXCEEDED);
    assert!(out[0].tag == 7 && out[0].buf == data);
    queue.execute(&write, data, LIMIT).unwrap();
}

#[test]
fn a_command_timeout_differs_from_a_dead_target() {
    let target = Target::start(Config {
        ignore_command: 1,
        ..Config::default()
    });
    let options = Options {
        io_queues: 2,
        command_timeout: Duration::from_secs(3),
        ..options()
    };
    let mut session = Session::connect(target.addr(), SUBNQN, HOSTNQN, &options).unwrap();
    let mut queue = session.open_queue(1).unwrap();
    let mut dead = session.open_queue(1).unwrap();
    let write = IoOp::Write {
        lba: 5,
        blocks: 1,
        fua: true,
    };
    queue.submit(&write, 42, vec![1; 512]).unwrap();
    let mut out = Vec::new();
    let error = queue.poll(&mut out, Wait::Block, LIMIT).unwrap_err();
    assert!(matches!(error, Error::TimedOut { .. }), "{error}");
    assert!(error.is_connection_lost());
    assert_eq!(queue.abandon(), [(42, vec![1; 512])]);
    target.die(false);
    dead.submit(&write, 43, vec![2; 512]).unwrap();
    let error = dead.poll(&mut out, Wait::Block, LIMIT).unwrap_err();
    assert!(error.is_connection_lost(), "{error}");
    assert_eq!(dead.abandon(), [(43, vec![2; 512])]);
    let error = Session::connect(target.addr(), SUBNQN, HOSTNQN, &options).unwrap_err();
    assert!(error.is_connection_lost(), "{error}");
}

#[test]
fn a_queue_that_was_idle_gives_its_next_command_the_whole_limit() {
    let target = Target::start(Config {
        ignore_command: 1,
        ..Config::default()
    });
    let limit = Duration::from_secs(2);
    let options = Options {
        command_timeout: limit,
        ..options()
    };
    let mut session = Session::connect(target.addr(), SUBNQN, HOSTNQN, &options).unwrap();
    let mut queue = session.open_queue(1).unwrap();
    let read = IoOp::Read { lba: 0, blocks: 1 };
    std::thread::sleep(limit + Duration::from_millis(500));
    queue.submit(&read, 1, vec![0; 512]).unwrap();
    let ended = queue.poll(&mut Vec::new(), Wait::Block, Duration::ZERO);
    assert_eq!(ended.unwrap(), 0);
}

#[test]
fn a_host_off_the_list_gets_a_clear_error() {
    let target = Target::start(Config::default());
    let stranger = "nqn.2014-08.org.nvmexpress:uuid:stranger";
    let error = Session::connect(target.addr(), SUBNQN, stranger, &options()).unwrap_err();
    assert!(
        error.to_string().contains("not on the export's list"),
        "{error}"
    );
    let error = Session::connect(target.addr(), "bad", HOSTNQN, &options()).unwrap_err();
    assert!(matches!(error, Error::Argument(_)), "{error}");
}

#[test]
fn discovery_reads_a_log_longer_than_one_command() {
    let target = Target::start(Config::default());
    let found = Host::discover(target.addr(), HOSTNQN).unwrap();
    assert_eq!(found.len(), 20);
    assert_eq!(found[19].subnqn, format!("{SUBNQN}19"));
    assert_eq!(found[0].traddr, "127.0.0.1");
    assert_eq!(found[0].trsvcid, target.addr().port().to_string());
    assert!(found.iter().all(|d| d.is_nvm_tcp()));
}

#[test]
fn keep_alives_go_out_and_growth_is_seen() {
    let target = Target::start(Config::default());
    let options = Options {
        kato_ms: 200,
        ..options()
    };
    let session = Session::connect(target.addr(), SUBNQN, HOSTNQN, &options).unwrap();
    while target.counters().keep_alives.load(SeqCst) < 3 {
        std::thread::sleep(Duration::from_millis(10));
        assert!(session.take_failure().is_none());
    }
    target.grow(4096);
    let events = session.wait_events(LIMIT).unwrap();
    assert_eq!((events[0].kind, events[0].info), (2, 0));
    assert_eq!(events[0].changed_nsids, [1]);
    let namespace = session.identify_namespace(1).unwrap().unwrap();
    assert_eq!(namespace.size_blocks, 4096);
    target.grow(8192);
    assert_eq!(session.wait_events(LIMIT).unwrap().len(), 1);
}
