//! Carries out decisions of [`forebay_xlate::engine_side`], and converts reactors' messages for it.

use crate::upcall;
use crate::volume::Volume;
use forebay_xlate::boundary::message::{FaultAsk, GrantOf};
use forebay_xlate::engine_side::{ProtocolUpcall, Words};
use forebay_xlate::{ExtentRange, VolumeId, Word};
use std::collections::BTreeMap;
use std::sync::Arc;

#[derive(Default)]
pub(super) struct ServedVolumes(pub(super) BTreeMap<VolumeId, Arc<Volume>>);

impl Words for ServedVolumes {
    fn lookup(&self, volume: VolumeId, extent: u64) -> Option<Word> {
        Some(self.0.get(&volume)?.table.lookup(extent))
    }

    fn install(&mut self, grant: &GrantOf) -> bool {
        let Some(volume) = self.0.get(&grant.volume) else {
            return false;
        };
        let word = Word::from_bits(grant.word);
        // State that FLUSH needs comes first.
        volume.granted(grant.commit_sequence);
        if word.claimed().writable() {
            volume.may_write_to(word.device());
        }
        volume.table.install(grant.range, word);
        true
    }

    fn clear(&mut self, volume: VolumeId, range: ExtentRange) {
        if let Some(volume) = self.0.get(&volume) {
            volume.table.clear(range);
        }
    }

    fn freeze(&mut self, volume: VolumeId, epoch: u16) {
        if let Some(volume) = self.0.get(&volume) {
            volume.table.set_epoch(epoch);
        }
    }

    fn take_back(&mut self, volume: VolumeId, range: ExtentRange) -> Vec<ExtentRange> {
        let volume = self.0.get(&volume);
        volume.map_or_else(Vec::new, |volume| volume.table.take_back(range))
    }

    fn count_preallocated(&self, volume: VolumeId, range: ExtentRange) -> u64 {
        let volume = self.0.get(&volume);
        volume.map_or(0, |volume| volume.table.count_preallocated(range))
    }

    fn committed(&mut self, volume: VolumeId, sequence: u64) {
        if let Some(volume) = self.0.get(&volume) {
            volume.committed(sequence);
        }
    }

    fn is_committed(&self, volume: VolumeId, sequence: u64) -> bool {
        let volume = self.0.get(&volume);
        volume.is_some_and(|volume| volume.is_committed(sequence))
    }
}

/// Converts a reactor's message about the protocol; returns any other.
pub(super) fn from_reactor(upcall: upcall::Upcall) -> Result<ProtocolUpcall, upcall::Upcall> {
    use upcall::Upcall as From;
    Ok(match upcall {
        From::Fault {
            volume,
            extent,
            write,
            whole,
        } => ProtocolUpcall::Fault(FaultAsk {
            volume,
            extent,
            write,
            whole,
        }),
        From::CommitWanted { volume, sequence } => {
            ProtocolUpcall::CommitWanted { volume, sequence }
        }
        From::Release {
            io,
            generation,
            volume,
            range,
        } => ProtocolUpcall::Release {
            io,
            generation,
            volume,
            range,
        },
        From::AbandonRelease { io, generation } => {
            ProtocolUpcall::AbandonRelease { io, generation }
        }
        From::Drained { revoke } => ProtocolUpcall::Drained { revoke },
        From::Settled { job } => ProtocolUpcall::Settled { job },
        From::JobDone { job, error } => ProtocolUpcall::JobDone {
            job,
            errno: error.map(|e| e.raw_os_error()),
        },
        other @ (From::ExportSettled { .. }
        | From::Reserve(_)
        | From::ReserveGone(..)
        | From::LaneGone { .. }
        | From::SocketGone(_)
        | From::Deposits(..)
        | From::Withdrawn(..)
        | From::VmDetached(..)
        | From::VmRefused(..)
        | From::Stopped) => return Err(other),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_xlate::boundary::message::VolumeConfig;
    use forebay_xlate::{DeviceIndex, ExtentIndex};

    /// A FLUSH after a claimed write must cover the device and wait for the mapping, so this is set
    /// at the grant.
    #[test]
    fn a_flush_sees_a_preallocated_extent_like_any_grant() {
        let config = VolumeConfig {
            volume: VolumeId(1),
            uuid: [0; 16],
            read_only: false,
            size_bytes: 1 << 20,
            block_bytes: 4096,
            extent_bytes: 65536,
            epoch: 0,
            image: None,
        };
        let volume = Arc::new(Volume::new(config).unwrap());
        let mut volumes = ServedVolumes::default();
        volumes.0.insert(VolumeId(1), volume.clone());
        let range = ExtentRange::new(0, 4);
        let word = Word::preallocated(DeviceIndex(3), ExtentIndex(9)).unwrap();
        assert!(volumes.install(&GrantOf {
            volume: VolumeId(1),
            range,
            word: word.bits(),
            commit_sequence: 6,
        }));
        assert_eq!(volume.uncommitted(), 6);
        assert!(volume.written_devices().eq([DeviceIndex(3)]));
        assert_eq!(volumes.count_preallocated(VolumeId(1), range), 4);
        assert_eq!(volumes.take_back(VolumeId(1), range), [range]);
        assert_eq!(volumes.take_back(VolumeId(2), range), []);
    }
}
