//! Free TCP ports.

use std::net::TcpListener;
use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::{Context, Result};

/// Ports that are free now, and that the kernel never assigns on its own, so they survive a
/// daemon's restart.
pub fn free_ports(count: usize) -> Result<Vec<u16>> {
    /// Below the kernel's ephemeral ports.
    const PORTS: std::ops::Range<u32> = 10_240..32_768;
    static GIVEN: AtomicU32 = AtomicU32::new(0);
    // Concurrent test programs begin at different ports.
    let first = std::process::id().wrapping_mul(64);
    let mut tries = PORTS.map(|_| {
        let next = first.wrapping_add(GIVEN.fetch_add(1, Ordering::Relaxed));
        (PORTS.start + next % (PORTS.end - PORTS.start)) as u16
    });
    let free = |port: &u16| TcpListener::bind(("127.0.0.1", *port)).is_ok();
    (0..count)
        .map(|_| tries.find(free).context("no port is free"))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_used_port_is_not_given_and_none_is_given_twice() {
        let first = free_ports(1).unwrap()[0];
        let _used = TcpListener::bind(("127.0.0.1", first + 1));
        let mut ports = free_ports(20).unwrap();
        assert!(!ports.contains(&first) && !ports.contains(&(first + 1)));
        ports.sort_unstable();
        ports.dedup();
        assert_eq!(ports.len(), 20);
    }
}
