//! Clients' memory, registered with the ring.

use super::*;
use crate::lane::{Lane, LaneIndex};
use crate::volume::Volume;
use forebay_xlate::boundary::message::VolumeConfig;

impl Rig {
    /// Runs until this many bytes of the client's memory are registered.
    fn registers(&mut self, bytes: u64) {
        for _ in crate::patience::patiently() {
            self.turn();
            if self
                .vms
                .all
                .iter()
                .flatten()
                .next()
                .map(|m| m.client.registered_bytes())
                == Some(bytes)
            {
                return;
            }
        }
        panic!("{bytes} bytes are not registered");
    }
}

fn touched() -> OwnedFd {
    let memory = memory();
    rustix::io::pwrite(&memory, &[1; 4096], 0).unwrap();
    memory
}

#[test]
fn memory_is_registered_behind_the_clients_back_and_forgotten_with_it() {
    let mut rig = Rig::of(Kind::NvmePcie {
        mapped_doorbells: false,
        pinned_memory: true,
    });
    let yes = 1u32.to_le_bytes();
    for page in [1, 2] {
        rig.send(&message(Map, page, b""), &[touched().as_fd()]);
    }
    // Untouched memory is not pinned.
    rig.send(&message(Map, 3, b""), &[memory().as_fd()]);
    rig.run();
    assert_eq!(rig.answers(), [yes, yes, yes].concat(), "at once");
    if !can_register() {
        println!("skipped: registered memory needs Linux 6.13");
        return;
    }
    rig.registers(2 * 4096);
    rig.succeed(None);
    assert_eq!(rig.client().registered_bytes(), 0);
    rig.send(&message(Echo, 0, b"x"), &[]);
    rig.run();
    assert_eq!(rig.answers(), message(Echo, 0, b"x"));
    rig.registers(2 * 4096);
    // Unmapped memory is forgotten before the answer; the answer waits for its users.
    rig.send(&message(Use, 2, b""), &[]);
    rig.run();
    rig.answers();
    rig.send(&message(Unmap, 2, b""), &[]);
    for _ in 0..10 {
        rig.turn();
        assert!(rig.answers().is_empty());
        assert_eq!(rig.client().registered_bytes(), 2 * 4096);
    }
    USED.set(None);
    let mut answered = Vec::new();
    for _ in crate::patience::patiently() {
        rig.turn();
        answered = rig.answers();
        if !answered.is_empty() {
            break;
        }
    }
    assert_eq!(answered, yes);
    assert_eq!(rig.client().registered_bytes(), 4096);
    drop(std::mem::replace(&mut rig.client, bell()));
    for _ in crate::patience::patiently() {
        rig.turn();
        if !rig.left.is_empty() {
            break;
        }
    }
    assert_eq!(rig.left.len(), 1);
}

#[test]
fn memory_that_its_client_may_take_pages_out_of_is_not_registered() {
    let mut rig = Rig::new();
    rig.send(&message(Map, 1, b""), &[touched().as_fd()]);
    rig.run();
    rig.answers();
    assert!(!rig.client().has_memory_registered());
    let mut promised = Rig::of(Kind::VhostUser {
        queues: 1,
        pinned_memory: true,
    });
    assert!(promised.client().has_memory_registered());
}

#[test]
fn the_memory_of_a_departed_client_is_marked_retired() {
    let mut rig = Rig::new();
    rig.send(&message(Map, 1, b""), &[touched().as_fd()]);
    rig.run();
    let region = &rig.client().memory().regions()[0];
    let mapping = region.mapping().unwrap().clone();
    assert!(!mapping.is_retired());
    drop(std::mem::replace(&mut rig.client, bell()));
    for _ in crate::patience::patiently() {
        rig.turn();
        if !rig.left.is_empty() {
            break;
        }
    }
    assert!(mapping.is_retired());
}

#[test]
fn a_lane_that_is_anothers_now_is_left_alone() {
    let mut rig = Rig::new();
    let config = VolumeConfig {
        volume: rig.export.volume,
        uuid: [2; 16],
        read_only: false,
        size_bytes: 1 << 20,
        block_bytes: 4096,
        extent_bytes: 1 << 20,
        epoch: 0,
        image: None,
    };
    let volume = Arc::new(Volume::new(config).unwrap());
    let region = Arc::new(Region::anonymous(1).unwrap());
    let home = Some(LaneIndex(3));
    let lane = Lane::new(LaneIndex(3), volume, rig.export.clone(), region);
    rig.core.set_lane(lane);
    let Rig { core, vms, .. } = &mut rig;
    let client = &mut vms.all[0].as_mut().unwrap().client;
    // Its export is removed; the lane waits for its commands.
    (client.lane, client.home) = (None, home);
    assert_eq!(client.own_lane(core), home);
    // As if the lane now belonged to another export.
    client.export = Arc::new(ExportConfig {
        export: ExportId(77),
        ..(*client.export).clone()
    });
    assert_eq!(client.own_lane(core), None);
}

fn can_register() -> bool {
    let memory = forebay_device::mem::StaticRegion::anonymous(4096).unwrap();
    let pinned = forebay_device::Pinned::of_region(&memory).unwrap();
    let mut ring = Ring::new(&RingOptions::default()).unwrap();
    ring.register(pinned).is_ok()
}
