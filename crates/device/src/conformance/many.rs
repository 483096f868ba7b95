//! Random operations on disjoint chunks, many in flight and some scattered, against a model.

use std::collections::HashMap;

use super::driver::{Driver, Rng, random_bytes};
use super::scattered;
use crate::device::Device;
use crate::op::Op;

pub(super) fn many_in_flight(driver: &mut Driver, device: &Device, from: u64, seed: u64) {
    const CHUNKS: u64 = 48;
    const CHUNK_BYTES: usize = 32 * 1024;
    let block = device.info().block_bytes as usize;
    let blocks = (CHUNK_BYTES / block) as u64;
    let mut rng = Rng::with_seed(seed);
    let at = |chunk: u64| from + (5 << 20) + chunk * CHUNK_BYTES as u64;
    let mut model: Vec<Vec<u8>> = Vec::new();
    for chunk in 0..CHUNKS {
        driver
            .run(device, Op::write_zeroes(at(chunk), CHUNK_BYTES as u64))
            .expect("zeroing");
        model.push(vec![0; CHUNK_BYTES]);
    }
    let mut expected: HashMap<u64, Vec<u8>> = HashMap::new();
    let judge = |driver: &Driver, expected: &mut HashMap<u64, Vec<u8>>, chunk: u64, result| {
        assert_eq!(result, Ok(()), "chunk {chunk}");
        if let Some(bytes) = expected.remove(&chunk) {
            let found = driver.bytes(chunk as u32, bytes.len());
            assert!(found == bytes, "chunk {chunk} reads wrong");
        }
    };
    let mut busy = vec![false; CHUNKS as usize];
    for round in 0..2000 {
        let chunk = rng.u64(..CHUNKS);
        while busy[chunk as usize] {
            let (ended, result) = driver.next(device);
            busy[ended as usize] = false;
            if ended < CHUNKS {
                judge(driver, &mut expected, ended, result);
            }
        }
        let first = rng.u64(..blocks);
        let count = 1 + rng.u64(..blocks - first);
        let (start, len) = (first as usize * block, count as usize * block);
        let offset = at(chunk) + start as u64;
        let part = &mut model[chunk as usize][start..start + len];
        let op = match rng.u64(..8) {
            0..=2 => {
                part.copy_from_slice(&random_bytes(&mut rng, len));
                let buf = driver.fill(chunk as u32, part);
                let op = match scattered::in_pieces(driver, chunk, buf, block, &mut rng) {
                    Some(bufs) => Op::write_pieces(offset, bufs),
                    None => Op::write(offset, buf),
                };
                if round % 50 == 0 { op.with_dsync() } else { op }
            }
            3 => {
                part.fill(0);
                Op::punch(offset, len as u64)
            }
            4 => {
                part.fill(0);
                Op::write_zeroes(offset, len as u64)
            }
            5 if round % 20 == 0 => Op::flush(),
            _ => {
                expected.insert(chunk, part.to_vec());
                let buf = driver.buf(chunk as u32, len as u32);
                match scattered::in_pieces(driver, chunk, buf, block, &mut rng) {
                    Some(bufs) => Op::read_pieces(offset, bufs),
                    None => Op::read(offset, buf),
                }
            }
        };
        match driver.start(device, op, chunk) {
            Some(result) => judge(driver, &mut expected, chunk, result),
            None => busy[chunk as usize] = true,
        }
    }
    while busy.contains(&true) {
        let (ended, result) = driver.next(device);
        busy[ended as usize] = false;
        judge(driver, &mut expected, ended, result);
    }
    for (chunk, bytes) in model.iter().enumerate() {
        let found = driver.read(device, at(chunk as u64), CHUNK_BYTES);
        assert!(found == *bytes, "chunk {chunk} at the end");
    }
}
