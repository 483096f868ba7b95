//! Events about a client: refused maps, unshared memory.

use super::*;
use crate::frontend::vm::protocol::UNSHARED;

#[test]
fn a_refused_dma_map_is_reported() {
    let mut rig = Rig::new("ram", 1, false);
    let mut driver = rig.connect(0);
    driver.begin(&mut rig);
    let memfd = driver.memfd.try_clone().unwrap();
    for (payload, why) in [
        (Driver::map_message(BASE, MEMORY, 0), "overlaps memory"),
        (
            Driver::map_message(BASE << 20, MEMORY, 4096),
            "the file ends",
        ),
        (Driver::map_message(BASE << 20, 77, 0), "whole pages"),
    ] {
        let reply = driver.call(&mut rig, command::DMA_MAP, &payload, &[&memfd]);
        assert!(reply.header.is_error());
        rig.turns();
        let reported = rig.refused.pop().expect("it is told of");
        assert!(reported.contains(why), "{reported}");
    }
    // Their number is limited.
    let payload = Driver::map_message(BASE, MEMORY, 0);
    for _ in 0..100 {
        driver.call(&mut rig, command::DMA_MAP, &payload, &[&memfd]);
    }
    rig.turns();
    assert!(rig.refused.len() < 10 && rig.left.is_empty());
}

#[test]
fn unshared_memory_is_named() {
    let mut rig = Rig::new("ram", 1, false);
    let mut driver = rig.connect(0);
    driver.begin(&mut rig);
    let all = Driver::unmap_message(BASE, MEMORY);
    assert!(
        !driver
            .call(&mut rig, command::DMA_UNMAP, &all, &[])
            .header
            .is_error()
    );
    driver.write(&mut rig, pci_region::BAR0, 0x14, &0u32.to_le_bytes());
    driver.wait_register(&mut rig, 0x1C, 0);
    let whole = Driver::map_message(BASE, MEMORY, 0);
    assert!(
        !driver
            .call(&mut rig, command::DMA_MAP, &whole, &[])
            .header
            .is_error()
    );
    driver.write(
        &mut rig,
        pci_region::BAR0,
        0x14,
        &0x0046_0001u32.to_le_bytes(),
    );
    assert_eq!(driver.register(&mut rig, 0x1C) & 2, 2, "a fatal status");
    rig.turns();
    let reported = rig.refused.pop().expect("it is told of");
    assert!(
        reported.contains(UNSHARED) && reported.contains("share=on"),
        "{reported}"
    );
}
