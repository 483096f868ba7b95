//! Chooses the copy that is the catalog.
//!
//! It is the one that includes all others ([`Lineage`](crate::mirror::lineage::Lineage)). Damaged
//! copies count by their header, missing ones by the labels. If such a copy has more than the best
//! readable one, opening is refused before any write.

use super::{FoundArea, Mirror};
use crate::{
    mirror::area::{AreaHeader, NO_DEVICE, Unusable, damaged},
    mirror::lineage::Epoch,
};
use forebay_xlate::types::DeviceIndex;
use std::io;

impl Mirror {
    pub(super) fn best(found: &[FoundArea]) -> io::Result<usize> {
        for found in found {
            if let Err(Unusable::Version(version)) = &found.content {
                return Err(io::Error::new(
                    io::ErrorKind::Unsupported,
                    format!(
                        "the catalog on {} has format {version}, which this Forebay can't read: \
                         use the version that made it",
                        found.area.device
                    ),
                ));
            }
        }
        let sound: Vec<(usize, &AreaHeader)> = found
            .iter()
            .enumerate()
            .filter_map(|(at, found)| Some((at, &found.content.as_ref().ok()?.header)))
            .collect();
        let contains = |one: &AreaHeader, other: &AreaHeader| {
            one.lineage.contains(one.seq, &other.lineage, other.seq)
        };
        let best = sound
            .iter()
            .find(|(_, one)| sound.iter().all(|(_, other)| contains(one, other)));
        if let Some((at, _)) = best {
            return Ok(*at);
        }
        if !sound.is_empty() {
            let on: Vec<String> = sound
                .iter()
                .map(|(at, header)| format!("{} (sync {})", found[*at].area.device, header.seq))
                .collect();
            return Err(damaged(format!(
                "the catalog's copies on {} have diverged, or one is too old to tell: open the \
                 pool with only one of these devices, the one that was used last",
                on.join(" and ")
            )));
        }
        let mut what = Vec::new();
        for found in found {
            match &found.content {
                Err(Unusable::Damaged(error)) => {
                    what.push(format!("on {}: {error}", found.area.device));
                }
                Err(Unusable::Other) => what.push(format!(
                    "on {}: it belongs to another pool",
                    found.area.device
                )),
                Err(Unusable::Blank | Unusable::Version(_)) | Ok(_) => {}
            }
        }
        if what.is_empty() {
            return Err(io::Error::new(
                io::ErrorKind::NotFound,
                "no copy of the catalog is on the devices that are present",
            ));
        }
        Err(damaged(format!(
            "no good copy of the catalog ({})",
            what.join("; ")
        )))
    }

    /// Refuses if a newer copy is missing or unreadable.
    pub(super) fn refuse_older(
        found: &[FoundArea],
        best: usize,
        given: &[(String, Epoch)],
    ) -> io::Result<()> {
        let at = found[best].area.device;
        let Ok(content) = &found[best].content else {
            return Err(damaged("the catalog's best copy can't be read"));
        };
        let best = &content.header;
        for other in found {
            let Err(Unusable::Damaged(error)) = &other.content else {
                continue;
            };
            let Some(header) = other.area.newest_header() else {
                continue;
            };
            // With several copies, a sync counted only once all had it.
            let had = match header.alone {
                true => header.seq,
                false => header.seq.saturating_sub(1),
            };
            if !best.lineage.contains(best.seq, &header.lineage, had) {
                return Err(damaged(format!(
                    "the newest copy of the catalog, on {} (sync {}), is damaged ({error}), and the one on {at} (sync \
                     {}) is older: nothing was changed. Make {} readable again, or restore it from a backup; no other \
                     copy has the changes acknowledged since",
                    other.area.device, header.seq, best.seq, other.area.device
                )));
            }
        }
        for (spec, epoch) in given {
            if best.lineage.knows(epoch) {
                continue;
            }
            let copies = epoch.copies.iter().filter(|device| **device != NO_DEVICE);
            let copies: Vec<String> = copies.map(|at| DeviceIndex(*at).to_string()).collect();
            return Err(damaged(format!(
                "the best readable copy of the catalog, on {at}, was left behind: the label of {spec} records a newer \
                 catalog (epoch {}, this copy has {}) on {}. Nothing was changed. Open the pool with a good copy of \
                 that catalog, and without devices whose copies diverged",
                epoch.number,
                best.lineage.number(),
                copies.join(" and ")
            )));
        }
        Ok(())
    }
}
