//! Memory that was mapped without a descriptor; clients that answer for it, or do not.

use super::*;
use crate::patience::patiently;
use forebay_nvme::Cqe;
use forebay_vfio_user::Header;
use forebay_vfio_user::wire::dma;

const FAR: u64 = BASE + (1 << 40);
const FAR_BYTES: usize = 1 << 20;

/// Memory that only the client can access.
struct Far {
    bytes: Vec<u8>,
    /// QEMU's structure: a count of 4 bytes followed by data; a write is answered by a header.
    short: bool,
    asked: usize,
}

impl Far {
    fn new(rig: &mut Rig, driver: &mut Driver, short: bool) -> Self {
        let payload = Driver::map_message(FAR, FAR_BYTES as u64, 0);
        let reply = driver.call(rig, command::DMA_MAP, &payload, &[]);
        assert!(!reply.header.is_error());
        Self {
            bytes: vec![0; FAR_BYTES],
            short,
            asked: 0,
        }
    }

    /// Answers one message; false: there is none.
    fn serve(&mut self, driver: &mut Driver) -> bool {
        let Some(asked) = driver.reply() else {
            return false;
        };
        let answer = self.answer(&asked);
        driver.send_raw(&answer, &[]);
        true
    }

    fn answer(&mut self, asked: &Reply) -> Vec<u8> {
        self.asked += 1;
        assert!(asked.header.is_command() && !asked.header.no_reply());
        let address = u64::from_le_bytes(asked.payload[..8].try_into().unwrap());
        let count = u32::from_le_bytes(asked.payload[8..12].try_into().unwrap());
        let from = if self.short { 12 } else { 16 };
        assert!(count <= 64 << 10);
        let at = (address - FAR) as usize;
        let there = &mut self.bytes[at..at + count as usize];
        let mut payload = asked.payload[..from].to_vec();
        match asked.header.command {
            command::DMA_READ => {
                payload.extend_from_slice(there);
                payload.resize(16 + count as usize, 0);
            }
            command::DMA_WRITE => {
                assert_eq!(asked.payload.len(), 16 + count as usize);
                there.copy_from_slice(&asked.payload[from..from + count as usize]);
                payload.truncate(if self.short { 0 } else { 12 });
            }
            other => panic!("asked {other}"),
        }
        let header = asked.header.reply(payload.len() as u32);
        [&header.to_bytes()[..], &payload].concat()
    }

    #[track_caller]
    fn run(&mut self, rig: &mut Rig, driver: &mut Driver, pair: &mut Pair, sqe: &Sqe) -> Status {
        driver.submit(pair, sqe);
        self.end(rig, driver, pair).status()
    }

    #[track_caller]
    fn end(&mut self, rig: &mut Rig, driver: &mut Driver, pair: &mut Pair) -> Cqe {
        for () in patiently() {
            self.serve(driver);
            if let Some(cqe) = driver.next(pair) {
                return cqe;
            }
            rig.turn();
        }
        panic!("no command ended");
    }
}

#[track_caller]
fn question(rig: &mut Rig, driver: &mut Driver) -> Reply {
    let mut asked = None;
    rig.until("a question", |_| {
        asked = driver.reply();
        asked.is_some()
    });
    asked.unwrap()
}

/// Leaves a command's message open: a DMA_WRITE (for a read), or a DMA_READ.
#[track_caller]
fn open_question(rig: &mut Rig, driver: &mut Driver, pair: &mut Pair, writes: bool) -> Reply {
    let (opcode, code) = match writes {
        true => (nvm::READ, command::DMA_WRITE),
        false => (nvm::WRITE, command::DMA_READ),
    };
    driver.submit(pair, &io(opcode, 1, 5, FAR));
    let asked = question(rig, driver);
    assert_eq!(asked.header.command, code);
    asked
}

fn ready_far(short: bool) -> (Rig, Driver, Pair, Far) {
    let (mut rig, mut driver, pair) = ready("file", Doorbells::Trapped);
    let far = Far::new(&mut rig, &mut driver, short);
    (rig, driver, pair, far)
}

#[test]
fn memory_without_a_descriptor_is_reached_by_asking() {
    for short in [false, true] {
        let (mut rig, mut driver, mut pair, mut far) = ready_far(short);
        // 128 pages of both kinds in turn, by a list.
        let list = BASE + 0x6000;
        let pages: Vec<u64> = (0..128u64)
            .map(|n| match n % 3 {
                0 => DATA + n * BLOCK,
                _ => FAR + (127 - n) * BLOCK,
            })
            .collect();
        for (n, page) in pages.iter().enumerate() {
            // Leading zeros, so that data looks like the rest of an 8-byte count.
            let mut content = vec![n as u8 + 1; BLOCK as usize];
            content[..4].fill(0);
            match page.checked_sub(FAR) {
                Some(at) => far.bytes[at as usize..][..content.len()].copy_from_slice(&content),
                None => driver.put(*page, &content),
            }
            if n > 0 {
                driver.put(list + (n as u64 - 1) * 8, &page.to_le_bytes());
            }
        }
        let whole = |opcode| {
            let sqe = Sqe::new(opcode, 5).with_nsid(1).with_cdw(12, 127);
            prps(sqe, pages[0], list)
        };
        let mut run = |sqe: &Sqe, far: &mut Far| far.run(&mut rig, &mut driver, &mut pair, sqe);
        assert_eq!(run(&whole(nvm::WRITE), &mut far), Status::SUCCESS);
        assert_eq!(run(&whole(nvm::COMPARE), &mut far), Status::SUCCESS);
        let before = std::mem::replace(&mut far.bytes, vec![9; FAR_BYTES]);
        assert_eq!(run(&whole(nvm::READ), &mut far), Status::SUCCESS);
        for page in &pages {
            if let Some(at) = page.checked_sub(FAR) {
                let at = at as usize;
                assert!(
                    far.bytes[at..at + 4096] == before[at..at + 4096],
                    "{page:x}"
                );
            }
        }
        let durable = Sqe::new(nvm::READ, 7).with_nsid(1).with_cdw64(10, 3);
        let durable = prps(durable.with_cdw(12, 1 << 30), FAR + 17 * 4, FAR + 4096);
        assert_eq!(run(&durable, &mut far), Status::SUCCESS);
        assert_eq!(far.bytes[68..76], [0, 0, 0, 0, 4, 4, 4, 4]);
        let mut range = [0u8; 16];
        range[4] = 2;
        far.bytes[..16].copy_from_slice(&range);
        let dsm = Sqe::new(nvm::DATASET_MANAGEMENT, 7).with_nsid(1);
        let dsm = prps(dsm.with_cdw(11, 4), FAR, 0);
        assert_eq!(run(&dsm, &mut far), Status::SUCCESS);
        // Beyond its end.
        let beyond = io(nvm::WRITE, 1, 0, FAR + FAR_BYTES as u64);
        let failed = Status::DATA_TRANSFER_ERROR.with_dnr();
        assert_eq!(run(&beyond, &mut far), failed);
        let copied = rig.lane_record(0).copied_bytes.load(Relaxed);
        assert!(copied >= 3 * (512 << 10), "{copied}");
        // Accessible memory is not copied.
        let status = driver.run(&mut rig, &mut pair, &io(nvm::READ, 1, 9, DATA));
        assert_eq!(status, Status::SUCCESS);
        assert_eq!(rig.lane_record(0).copied_bytes.load(Relaxed), copied);
        assert!(rig.left.is_empty());
    }
}

#[test]
fn more_commands_than_places_and_a_client_that_refuses() {
    let (mut rig, mut driver, mut pair, mut far) = ready_far(false);
    for n in 0..20u16 {
        let at = usize::from(n) * 4096;
        far.bytes[at..at + 4096].fill(n as u8 + 1);
        let write = io(nvm::WRITE, n, n.into(), FAR + at as u64);
        driver.queue(&mut pair, &write);
    }
    driver.ring(8, pair.tail);
    for _ in 0..20 {
        let cqe = far.end(&mut rig, &mut driver, &mut pair);
        assert_eq!(cqe.status(), Status::SUCCESS);
    }
    for n in 0..20u16 {
        let read = io(nvm::READ, 1, n.into(), DATA);
        assert_eq!(driver.run(&mut rig, &mut pair, &read), Status::SUCCESS);
        assert_eq!(driver.get(DATA, 2), [n as u8 + 1; 2]);
    }
    // An error, a short answer, and one without a message.
    for wrong in ["error", "short", "nothing"] {
        driver.submit(&mut pair, &io(nvm::WRITE, 1, 0, FAR));
        let mut asked = None;
        rig.until("a question", |_| {
            asked = driver.reply();
            asked.is_some()
        });
        let asked = asked.unwrap();
        let mut answer = far.answer(&asked);
        let good = answer.clone();
        match wrong {
            "error" => {
                let error = forebay_vfio_user::Errno::EACCES;
                answer = asked.header.error_reply(error).to_bytes().to_vec();
            }
            "short" => {
                answer.truncate(answer.len() - 8);
                answer[4..8].copy_from_slice(&(4096 + 24u32).to_le_bytes());
            }
            _ => {
                let other = Header {
                    id: asked.header.id.wrapping_add(7),
                    ..asked.header
                };
                answer = other.reply(0).to_bytes().to_vec();
                answer.extend(good);
            }
        }
        driver.send_raw(&answer, &[]);
        let status = driver.completion(&mut rig, &mut pair).status();
        let expected = match wrong {
            "nothing" => Status::SUCCESS,
            _ => Status::DATA_TRANSFER_ERROR.with_dnr(),
        };
        assert_eq!(status, expected, "{wrong}");
    }
    driver.submit(&mut pair, &io(nvm::WRITE, 1, 0, FAR));
    rig.until("a question", |_| driver.reply().is_some());
    rig.pass_time(21_000_000_000);
    rig.until("its end", |rig| !rig.left.is_empty());
    assert_eq!(
        rig.left,
        ["it did not answer a request for memory that only it can access"]
    );
}

#[test]
fn an_engine_that_dies_while_it_asks_is_not_noticed_and_a_reset_waits() {
    for answered_late in [false, true] {
        let (mut rig, mut driver, mut pair, mut far) = ready_far(true);
        far.bytes[..4096].fill(7);
        driver.submit(&mut pair, &io(nvm::WRITE, 1, 5, FAR));
        // The first is an empty write.
        let first = question(&mut rig, &mut driver);
        let answer = far.answer(&first);
        driver.send_raw(&answer, &[]);
        let old = question(&mut rig, &mut driver);
        assert_eq!(old.header.command, command::DMA_READ);
        rig.kill();
        if answered_late {
            let answer = far.answer(&old);
            driver.send_raw(&answer, &[]);
        }
        assert!(rig.succeed(None));
        rig.fence();
        rig.turns();
        if !answered_late {
            // One message at a time, across engines.
            assert!(driver.reply().is_none());
            let answer = far.answer(&old);
            driver.send_raw(&answer, &[]);
        }
        let cqe = far.end(&mut rig, &mut driver, &mut pair);
        assert_eq!((cqe.cid(), cqe.status()), (1, Status::SUCCESS));
        let read = io(nvm::READ, 1, 5, DATA);
        assert_eq!(driver.run(&mut rig, &mut pair, &read), Status::SUCCESS);
        assert_eq!(driver.get(DATA, 4096), [7; 4096]);
        // A reset waits until the client has written.
        let asked = open_question(&mut rig, &mut driver, &mut pair, true);
        let mut payload = Driver::access(pci_region::BAR0, 0x14, 4);
        payload.extend(0x0046_0000u32.to_le_bytes());
        let id = driver.send(command::REGION_WRITE, &payload, &[]);
        driver.answered(&mut rig, id);
        assert_eq!(driver.register(&mut rig, 0x1C), 1);
        let answer = far.answer(&asked);
        driver.send_raw(&answer, &[]);
        driver.wait_register(&mut rig, 0x1C, 0);
        assert_eq!(driver.next(&mut pair), None);
        driver.enable(&mut rig);
        let mut pair = driver.make_pair(&mut rig, 1, 64);
        let again = far.run(
            &mut rig,
            &mut driver,
            &mut pair,
            &io(nvm::READ, 1, 5, FAR + 8192),
        );
        assert_eq!(again, Status::SUCCESS);
        assert_eq!(far.bytes[8192..8200], [7; 8]);
        assert!(rig.left.is_empty());
    }
}

fn disable(rig: &mut Rig, driver: &mut Driver) {
    driver.write(rig, pci_region::BAR0, 0x14, &0x0046_0000u32.to_le_bytes());
}

#[test]
fn a_reset_waits_for_writes_of_dead_engines() {
    // Deaths before the reset, during it, and both.
    for (before, within) in [(1, 0), (0, 1), (2, 2)] {
        let (mut rig, mut driver, mut pair, mut far) = ready_far(false);
        // So that the client's structure is known.
        let write = io(nvm::WRITE, 1, 5, FAR);
        let status = far.run(&mut rig, &mut driver, &mut pair, &write);
        assert_eq!(status, Status::SUCCESS);
        let asked = open_question(&mut rig, &mut driver, &mut pair, true);
        let dies = |rig: &mut Rig| {
            rig.kill();
            assert!(rig.succeed(None));
            rig.fence();
            rig.turns();
        };
        for _ in 0..before {
            dies(&mut rig);
        }
        disable(&mut rig, &mut driver);
        for _ in 0..within {
            dies(&mut rig);
        }
        rig.turns();
        assert_eq!(driver.register(&mut rig, 0x1C), 1, "{before} {within}");
        let answer = far.answer(&asked);
        driver.send_raw(&answer, &[]);
        driver.wait_register(&mut rig, 0x1C, 0);
        driver.enable(&mut rig);
        let mut pair = driver.make_pair(&mut rig, 1, 64);
        let read = io(nvm::READ, 2, 5, FAR + 4096);
        let status = far.run(&mut rig, &mut driver, &mut pair, &read);
        assert_eq!(status, Status::SUCCESS);
        assert!(rig.left.is_empty(), "{:?}", rig.left);
    }
}

#[test]
fn a_bus_reset_with_an_open_question_is_soon_answered() {
    for writes in [true, false] {
        let (mut rig, mut driver, mut pair, mut far) = ready_far(true);
        let write = io(nvm::WRITE, 1, 5, FAR);
        let status = far.run(&mut rig, &mut driver, &mut pair, &write);
        assert_eq!(status, Status::SUCCESS);
        let asked = open_question(&mut rig, &mut driver, &mut pair, writes);
        let id = driver.send(command::DEVICE_RESET, &[], &[]);
        rig.turns();
        if writes {
            // It waits as long as a function may take, in case the client itself is waiting.
            assert!(driver.reply().is_none());
            rig.pass_time(99_000_000);
            rig.turns();
            assert!(driver.reply().is_none());
            rig.pass_time(1_000_000);
        }
        let reply = driver.answered(&mut rig, id);
        assert_eq!(reply.header.is_error(), writes);
        // In both cases client memory is untouched once it is ready again.
        let answer = far.answer(&asked);
        driver.send_raw(&answer, &[]);
        driver.enable(&mut rig);
        let mut pair = driver.make_pair(&mut rig, 1, 64);
        far.bytes[..4096].fill(9);
        let write = io(nvm::WRITE, 2, 5, FAR);
        let status = far.run(&mut rig, &mut driver, &mut pair, &write);
        assert_eq!(status, Status::SUCCESS);
        let read = io(nvm::READ, 3, 5, DATA);
        assert_eq!(driver.run(&mut rig, &mut pair, &read), Status::SUCCESS);
        assert_eq!(driver.get(DATA, 4096), [9; 4096]);
        assert!(rig.left.is_empty(), "{:?}", rig.left);
    }
}

#[test]
fn a_question_is_asked_once_wherever_the_engine_dies() {
    for (point, at) in [
        ("vm.asking", 1),
        ("vm.asking", 2),
        ("vm.asked", 1),
        ("vm.asked", 2),
    ] {
        let (mut rig, mut driver, mut pair, mut far) = ready_far(false);
        far.bytes[..4096].fill(7);
        rig.arm(point, at);
        driver.submit(&mut pair, &io(nvm::WRITE, 1, 5, FAR));
        for () in patiently() {
            if !rig.turn() {
                break;
            }
            far.serve(&mut driver);
        }
        assert!(rig.is_dead(), "{point} {at}");
        let unanswered = driver.reply();
        assert_eq!(unanswered.is_some(), point == "vm.asked");
        assert!(rig.succeed(None));
        rig.fence();
        rig.turns();
        if let Some(asked) = unanswered {
            assert!(driver.reply().is_none(), "one at a time");
            let answer = far.answer(&asked);
            driver.send_raw(&answer, &[]);
        }
        let cqe = far.end(&mut rig, &mut driver, &mut pair);
        assert_eq!(cqe.status(), Status::SUCCESS);
        let read = io(nvm::READ, 1, 5, DATA);
        assert_eq!(driver.run(&mut rig, &mut pair, &read), Status::SUCCESS);
        assert_eq!(driver.get(DATA, 4096), [7; 4096]);
        assert!(rig.left.is_empty(), "{point} {at}: {:?}", rig.left);
    }
}

#[test]
fn a_client_that_is_not_heard_has_answered_in_time() {
    let (mut rig, mut driver, mut pair, mut far) = ready_far(false);
    let write = io(nvm::WRITE, 1, 0, FAR);
    let status = far.run(&mut rig, &mut driver, &mut pair, &write);
    assert_eq!(status, Status::SUCCESS);
    // An unmapping waits for a device, and so do the client's next messages.
    let other = FAR + (1 << 30);
    let map = Driver::map_message(other, BLOCK, DATA - BASE);
    let memory = driver.memfd.try_clone().unwrap();
    let reply = driver.call(&mut rig, command::DMA_MAP, &map, &[&memory]);
    assert!(!reply.header.is_error());
    rig.gate.hold();
    driver.submit(&mut pair, &io(nvm::WRITE, 2, 1, other));
    rig.until("a write at the device", |rig| rig.gate.held() >= 1);
    driver.submit(&mut pair, &io(nvm::WRITE, 3, 2, FAR));
    let mut asked = None;
    rig.until("a question", |_| {
        asked = driver.reply();
        asked.is_some()
    });
    let unmap = Driver::unmap_message(other, BLOCK);
    let id = driver.send(command::DMA_UNMAP, &unmap, &[]);
    rig.turns();
    let answer = far.answer(&asked.unwrap());
    driver.send_raw(&answer, &[]);
    rig.pass_time(21_000_000_000);
    rig.turns();
    assert!(rig.left.is_empty(), "{:?}", rig.left);
    rig.gate.release();
    driver.answered(&mut rig, id);
    for _ in 0..2 {
        let cqe = far.end(&mut rig, &mut driver, &mut pair);
        assert_eq!(cqe.status(), Status::SUCCESS);
    }
    assert!(rig.left.is_empty());
}

#[test]
fn a_fua_read_keeps_order_and_read_only_memory_is_not_written() {
    let (mut rig, mut driver, mut pair) = ready("ram", Doorbells::Trapped);
    let mut far = Far::new(&mut rig, &mut driver, false);
    let durable = io(nvm::READ, 100, 0, FAR);
    let durable = durable.with_cdw(12, 1 << 30);
    driver.queue(&mut pair, &durable);
    for n in 0..20 {
        driver.queue(&mut pair, &io(nvm::WRITE, n, 1, FAR + 4096));
    }
    driver.ring(8, pair.tail);
    let mut ended = Vec::new();
    for _ in 0..21 {
        let cqe = far.end(&mut rig, &mut driver, &mut pair);
        assert_eq!(cqe.status(), Status::SUCCESS);
        ended.push(cqe.cid());
    }
    let at = ended.iter().position(|cid| *cid == 100);
    assert!(at.is_some_and(|at| at < 20), "{ended:?}");
    // Read-only memory: the client is asked only for its content.
    let fixed = FAR + (1 << 30);
    let mut map = Driver::map_message(fixed, BLOCK, 0);
    map[4..8].copy_from_slice(&dma::READABLE.to_le_bytes());
    let reply = driver.call(&mut rig, command::DMA_MAP, &map, &[]);
    assert!(!reply.header.is_error());
    let asked = far.asked;
    let read = io(nvm::READ, 1, 0, fixed);
    let status = far.run(&mut rig, &mut driver, &mut pair, &read);
    assert_eq!(status, Status::DATA_TRANSFER_ERROR.with_dnr());
    assert_eq!(far.asked, asked);
    assert!(rig.left.is_empty());
}
