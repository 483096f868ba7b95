//! A hostile driver of a PCIe controller: registers, admin commands, data pointers.
//!
//! The input has steps and 64 KiB of memory. No panic; ranges add up to the command's data; the
//! state can always be restored; doorbells keep cursors in their queue.

#![no_main]

use forebay_nvme::controller::{AdminEnv, ControllerConfig, NamespaceInfo};
use forebay_nvme::io::NamespaceGeometry;
use forebay_nvme::pcie::queue::{Cq, Sq};
use forebay_nvme::pcie::{Function, Memory, RegisterEffect, data};
use forebay_nvme::{Nqn, Sqe};
use libfuzzer_sys::fuzz_target;
use std::cell::RefCell;
use zerocopy::FromBytes;

const MEMORY_BYTES: usize = 64 << 10;

struct Flat(RefCell<Vec<u8>>);

impl Memory for Flat {
    fn read(&self, address: u64, into: &mut [u8]) -> bool {
        let memory = self.0.borrow();
        let from = usize::try_from(address).ok();
        let from = from.and_then(|at| memory.get(at..at.checked_add(into.len())?));
        from.map(|from| into.copy_from_slice(from)).is_some()
    }
    fn write(&self, address: u64, from: &[u8]) -> bool {
        let mut memory = self.0.borrow_mut();
        let to = usize::try_from(address).ok();
        let to = to.and_then(|at| memory.get_mut(at..at.checked_add(from.len())?));
        to.map(|to| to.copy_from_slice(from)).is_some()
    }
    fn holds(&self, address: u64, bytes: u64, _write: bool) -> bool {
        let end = address.checked_add(bytes);
        end.is_some_and(|end| end <= MEMORY_BYTES as u64)
    }
}

struct World;

impl AdminEnv for World {
    fn namespace(&self, nsid: u32) -> Option<NamespaceInfo> {
        (nsid == 1).then_some(NamespaceInfo {
            geometry: NamespaceGeometry {
                block_bytes: 512,
                block_count: 1 << 20,
                write_protected: false,
            },
            used_blocks: 8,
            extent_bytes: 64 << 10,
            nguid: [1; 16],
            uuid: [2; 16],
        })
    }
}

fn config() -> ControllerConfig {
    let subsystem = Nqn::parse("nqn.2026-01.io.forebay:alice.db").expect("a name");
    ControllerConfig::pcie(3, subsystem, "abc123")
}

fuzz_target!(|bytes: &[u8]| {
    let memory = Flat(RefCell::new(vec![0; MEMORY_BYTES]));
    let mut function = Function::new(config());
    let mut scratch = vec![0; 512 << 10];
    let (mut sq, mut cq) = (Sq::new(7, 1, 0), Cq::new(5, None, 0, 0));
    let mut posted = 0;
    let mut rest = bytes;
    while let Some((step, after)) = rest.split_at_checked(12) {
        rest = after;
        let at = u64::from_le_bytes([step[1], step[2], step[3], 0, 0, 0, 0, 0]);
        let value = &step[4..];
        match step[0] % 8 {
            0 => drop(memory.write(at % MEMORY_BYTES as u64, value)),
            1 | 2 => {
                let from = &value[..if step[0] & 8 == 0 { 4 } else { 8 }];
                let effect = function.write_registers(at % 0x80, from, &memory, 1);
                if matches!(effect, RegisterEffect::Reset | RegisterEffect::Shutdown) {
                    function.quiesced();
                }
            }
            3 => {
                if function.write_config(at % 300, value) {
                    function.begin_reset();
                    function.quiesced();
                }
                function.write_msix(at % 2000, value);
            }
            4 | 5 => {
                let Some((entry, after)) = rest.split_at_checked(64) else {
                    return;
                };
                rest = after;
                let Ok(sqe) = Sqe::read_from_bytes(entry) else {
                    return;
                };
                if function.ready() && function.outbox_room(posted) > 0 {
                    function.run_admin(&sqe, &memory, &World, &mut scratch, 1);
                    function.gather_events(posted);
                    posted = function.admin_completed();
                }
                let wanted = u32::from(step[1]) << 9;
                let mut sum = 0;
                let walked = data::pieces(&sqe, wanted, &memory, |_, len| {
                    assert!(len > 0);
                    sum += len;
                    Ok(())
                });
                assert!(walked.is_err() || sum == wanted);
            }
            6 => {
                let tail = u32::from(step[1] % 9);
                assert_eq!(sq.set_tail(tail).is_err(), tail >= 7);
                let (from, run) = sq.run();
                assert!(from + run <= 7 && run < 7);
                let count = run.min(cq.room());
                sq.consume(count);
                (0..count).for_each(|_| cq.reserve());
            }
            _ => {
                while cq.reserved() > u32::from(step[2] % 4) {
                    assert!(cq.next().0 < 5);
                    cq.post();
                }
                let _ = cq.set_head(u32::from(step[1] % 7));
                assert!(cq.room() <= 4);
            }
        }
        if function.admin_completed() == 0 {
            posted = 0;
        }
        let mut into = [0; 64];
        function.read_registers(at % 0x4000, &mut into);
        function.read_config(at, &mut into);
        function.read_msix(at, &[0; 2], &mut into);
        let state = *function.state();
        function = Function::restore(config(), &state).expect("a state that it reached itself");
    }
});
