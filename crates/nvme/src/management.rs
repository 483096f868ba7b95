//! Admin commands that change the NVM subsystem: its namespaces and its firmware.

/// Block sizes of the LBA formats, in their order.
pub(crate) const BLOCK_BYTES: [u32; 2] = [512, 4096];
