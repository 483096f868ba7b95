//! A hostile host's I/O, admin and Connect commands, in any order.
//!
//! Each 64-byte command is followed by its data length in units of 16. No panic; accepted I/O is
//! within namespace and MDTS; a controller returns no more data than announced; its state can
//! always be restored.

#![no_main]

use forebay_nvme::controller::{
    AdminEnv, AdminOutcome, Controller, ControllerConfig, Effect, NamespaceInfo,
    check_admin_connect,
};
use forebay_nvme::fabrics::{ConnectCommand, ConnectData};
use forebay_nvme::io::{self, IoCommand, NamespaceGeometry};
use forebay_nvme::{Nqn, Sqe};
use libfuzzer_sys::fuzz_target;
use zerocopy::FromBytes;

const MDTS_BYTES: u32 = 64 << 10;
const GEOMETRY: NamespaceGeometry = NamespaceGeometry {
    block_bytes: 512,
    block_count: 1 << 20,
    write_protected: false,
};

struct World;

impl AdminEnv for World {
    fn namespace(&self, nsid: u32) -> Option<NamespaceInfo> {
        (nsid == 1).then_some(NamespaceInfo {
            geometry: GEOMETRY,
            used_blocks: 8,
            extent_bytes: 64 << 10,
            nguid: [1; 16],
            uuid: [2; 16],
        })
    }
}

fn nqn(name: &str) -> Nqn {
    Nqn::parse(name).expect("a name")
}

fn controller() -> Controller {
    let subsystem = nqn("nqn.2026-01.io.forebay:alice.db");
    let host = nqn("nqn.2014-08.org.nvmexpress:uuid:0c4f5a43-5f4a-4f6e-b0d0-2a6fe4a8b7f1");
    let data = ConnectData::new([5; 16], 0xFFFF, &subsystem, &host);
    let connect = check_admin_connect(&ConnectCommand::new(1, 0, 32, 5000), &data, 4096)
        .expect("a sound Connect");
    let config = ControllerConfig {
        mdts_bytes: MDTS_BYTES,
        ..ControllerConfig::io(3, subsystem, "abc123")
    };
    Controller::new(config, &connect, 1)
}

fn io_command(sqe: &Sqe, data: &[u8]) {
    let command = match sqe.fuse() {
        0 => io::decode(sqe, 1, &GEOMETRY, MDTS_BYTES),
        _ => io::decode_fused(sqe, 1, &GEOMETRY, MDTS_BYTES),
    };
    let Ok(command) = command else {
        return;
    };
    assert!(command.transfer(&GEOMETRY).bytes() <= MDTS_BYTES);
    match command {
        IoCommand::Read { lba, blocks, .. }
        | IoCommand::Write { lba, blocks, .. }
        | IoCommand::Compare { lba, blocks, .. } => {
            assert!(GEOMETRY.contains(lba, blocks));
            assert!(u64::from(blocks) * 512 <= u64::from(MDTS_BYTES));
        }
        IoCommand::Deallocate { ranges, .. } => {
            if let Ok(ranges) = io::dsm_ranges(data, ranges, &GEOMETRY) {
                for (lba, blocks) in ranges {
                    assert!(GEOMETRY.contains(lba, blocks));
                }
            }
        }
        _ => {}
    }
}

fuzz_target!(|bytes: &[u8]| {
    let mut controller = controller();
    let mut out = vec![0; 1 << 17];
    let mut now_ns = 1u64;
    let mut rest = bytes;
    while let Some((command, after)) = rest.split_at_checked(65) {
        let Ok(sqe) = Sqe::read_from_bytes(&command[..64]) else {
            return;
        };
        let data_bytes = (usize::from(command[64]) * 16).min(after.len());
        let (data, after) = after.split_at(data_bytes);
        rest = after;
        now_ns += 1_000_000;
        io_command(&sqe, data);
        if let Ok((connect_data, _)) = ConnectData::ref_from_prefix(data) {
            let _ = check_admin_connect(ConnectCommand::of(&sqe), connect_data, 4096);
        }
        if let AdminOutcome::Complete {
            data_bytes, effect, ..
        } = controller.admin(&sqe, data, &mut out, &World, now_ns)
        {
            assert!(data_bytes <= MDTS_BYTES.max(4096));
            if matches!(effect, Effect::Reset | Effect::Shutdown) {
                controller.quiesced();
            }
        }
        while controller.next_event().is_some() {}
        controller = Controller::restore(*controller.config(), controller.state())
            .expect("a state that it reached itself");
    }
});
