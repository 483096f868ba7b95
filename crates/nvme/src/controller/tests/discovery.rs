//! The Discovery log page, read in pieces while it changes.

use super::*;
use crate::log_page::DISCOVERY;

fn number(page: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(page[at..at + 8].try_into().unwrap())
}

#[test]
fn pieces_of_any_size_make_the_same_page() {
    let mut bench = Bench::discovery();
    let whole = bench.data(get_log(DISCOVERY, 0, 4096));
    assert_eq!((number(&whole, 0), number(&whole, 8)), (7, 3));
    for (index, entry) in whole[1024..].chunks(1024).enumerate() {
        assert_eq!(entry[..4], [3, 1, 2, 2]);
        let nqn = format!("nqn.2026-01.io.forebay:alice.v{index}\0");
        assert!(entry[256..].starts_with(nqn.as_bytes()));
        assert!(entry[512..].starts_with(b"127.0.0.1 ") && entry[32..].starts_with(b"4420 "));
    }
    for step in [4, 100, 1000, 1024, 1500] {
        let mut got = Vec::new();
        while got.len() < 4096 {
            got.extend(bench.data(get_log(DISCOVERY, got.len() as u64, step)));
        }
        got.truncate(4096);
        assert_eq!(got, whole, "{step}");
    }
}

#[test]
fn past_the_end() {
    let mut bench = Bench::discovery();
    let page = bench.data(get_log(DISCOVERY, 0, 8192));
    assert!(page[4096..].iter().all(|&b| b == 0));
    bench.data(get_log(DISCOVERY, 4096, 4));
    assert_eq!(
        bench.fails(get_log(DISCOVERY, 4100, 4)),
        Status::INVALID_FIELD
    );
    assert_eq!(
        bench.fails(get_log(DISCOVERY, u64::MAX - 3, 4)),
        Status::INVALID_FIELD
    );
}

#[test]
fn a_list_that_shrinks_under_the_reader_says_start_again() {
    let mut bench = Bench::discovery();
    bench.data(get_log(DISCOVERY, 0, 1024));
    bench.world.generation.set(8);
    bench.world.entries.set(1);
    assert_eq!(
        bench.fails(get_log(DISCOVERY, 3072, 1024)),
        Status::DISCOVER_RESTART
    );
    let header = bench.data(get_log(DISCOVERY, 0, 1024));
    assert_eq!((number(&header, 0), number(&header, 8)), (8, 1));
    assert_eq!(
        bench.fails(get_log(DISCOVERY, 3072, 1024)),
        Status::INVALID_FIELD
    );
}

#[test]
fn an_io_controller_has_no_such_page() {
    assert_eq!(
        Bench::ready().fails(get_log(DISCOVERY, 0, 1024)),
        Status::INVALID_FIELD
    );
}
