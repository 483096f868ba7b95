//! The consistency check of the pool.
//!
//! It marks the extents that maps and spare runs claim, then looks for used extents without a
//! claim. It runs in pieces between other work, and ignores extents that change hands meanwhile.
//! Facts that must agree at one moment are compared within one piece.
//!
//! Only leaks are repaired: they become dirty. Anything else needs a decision about whose data it
//! is.

mod volumes;

use crate::{
    catalog::Catalog,
    error::{PoolError, Result},
    extents::ExtentState,
    extents::runs::DeviceRun,
    open::load::load,
    pool::Pool,
    records::DeviceRecord,
    records::{LayerId, MapId},
    volumes::layers::Node,
};
use forebay_xlate::types::{DeviceIndex, VolumeId};
use std::fmt;

/// Described problems; further ones are counted.
const PROBLEMS_AT_MOST: usize = 100;
const PIECE_EXTENTS: u64 = 1 << 16;

/// An inconsistency.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CheckProblem {
    /// The problem in a sentence.
    pub what: String,
    /// Whether [`Pool::repair`] fixes it.
    pub repairable: bool,
}

impl fmt::Display for CheckProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.what)
    }
}

/// A check's result.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct CheckReport {
    /// Extents checked.
    pub extents_checked: u64,
    /// Mapped extents checked.
    pub mappings_checked: u64,
    /// Volumes checked.
    pub volumes_checked: u64,
    /// Extents in use without a user.
    pub leaked_extents: u64,
    /// The problems.
    pub problems: Vec<CheckProblem>,
    /// Number of further problems.
    pub problems_left_out: u64,
    leaked: Vec<DeviceRun>,
    check: u64,
}

impl CheckReport {
    /// Whether there are no problems.
    pub fn is_clean(&self) -> bool {
        self.problems.is_empty()
    }

    fn problem(&mut self, what: String) {
        self.add(what, false);
    }

    fn add(&mut self, what: String, repairable: bool) {
        if self.problems.len() < PROBLEMS_AT_MOST {
            self.problems.push(CheckProblem { what, repairable });
        } else {
            self.problems_left_out += 1;
        }
    }
}

#[derive(Clone, Copy, Debug)]
enum CheckStage {
    Device(usize),
    /// Anything outside devices and volumes.
    Whole,
    /// A volume's counters and spare extents.
    Volume(VolumeId),
    /// A layer's links.
    Layer(LayerId),
    /// A map from a chunk on. It keeps its id when its holder changes.
    Map(MapId, u64),
    /// Leaks on a device from an extent on.
    Leaks(usize, u64),
    Done,
}

/// A running check.
#[derive(Debug)]
pub struct Check {
    stage: CheckStage,
    /// Bitmaps by device.
    claimed: Vec<Vec<u64>>,
    report: CheckReport,
}

impl Check {
    /// Begins a check and ends a running one.
    pub fn begin(pool: &mut Pool) -> Result<Self> {
        pool.ready()?;
        pool.allocator.extents.note_moves();
        pool.checking += 1;
        let words = |device: &DeviceRecord| vec![0; device.extents.div_ceil(64) as usize];
        Ok(Self {
            stage: CheckStage::Device(0),
            claimed: pool.devices.iter().map(words).collect(),
            report: CheckReport {
                check: pool.checking,
                ..CheckReport::default()
            },
        })
    }

    /// Checks about `extents` more; `true` when finished. The pool may change in between.
    pub fn step(&mut self, pool: &Pool, extents: u64) -> Result<bool> {
        if self.report.check != pool.checking {
            return Err(PoolError::in_use("another check of the pool has started"));
        }
        let extents = extents.max(1);
        self.stage = match self.stage {
            CheckStage::Device(device) => self.device(pool, device),
            CheckStage::Whole => self.whole(pool),
            CheckStage::Volume(from) => self.volume(pool, from),
            CheckStage::Layer(from) => self.layer(pool, from),
            CheckStage::Map(map, chunk) => self.map(pool, map, chunk, extents),
            CheckStage::Leaks(device, from) => self.leaks(pool, device, from, extents),
            CheckStage::Done => CheckStage::Done,
        };
        Ok(matches!(self.stage, CheckStage::Done))
    }

    /// A finished check's result.
    pub fn end(self) -> CheckReport {
        self.report
    }

    /// Marks a holder's run and reports contradictions.
    fn claim(&mut self, pool: &Pool, volume: Node, run: DeviceRun, wanted: ExtentState) {
        let Some(claimed) = self.claimed.get_mut(usize::from(run.device.0)) else {
            // The device is new, or does not exist.
            if pool
                .allocator
                .extents
                .get(run.device, run.first.0)
                .is_none()
            {
                let what = format!(
                    "{volume} has extents on {}, which does not exist",
                    run.device
                );
                self.report.problem(what);
            }
            return;
        };
        for extent in run.first.0..run.end() {
            let Some(state) = pool.allocator.extents.get(run.device, extent) else {
                let what = format!(
                    "{volume} has extent {extent} of {}, which is past the end of the device",
                    run.device
                );
                self.report.problem(what);
                return;
            };
            if state != wanted {
                self.report.problem(format!(
                    "{volume} has extent {extent} of {} as {wanted:?}, but its state is {state:?}",
                    run.device
                ));
            }
            let (word, bit) = ((extent / 64) as usize, 1u64 << (extent % 64));
            let Some(word) = claimed.get_mut(word) else {
                return;
            };
            if *word & bit != 0 && !pool.allocator.extents.has_moved(run.device, extent) {
                self.report.problem(format!(
                    "extent {extent} of {} has two owners, one of them {volume}",
                    run.device
                ));
            }
            *word |= bit;
        }
    }

    /// Reserved, but not mapped durably.
    fn claim_reserved(&mut self, pool: &Pool, volume: VolumeId, run: DeviceRun) {
        self.claim(pool, Node::Volume(volume), run, ExtentState::Reserved);
        let parts = pool.allocator.reservations.within(run);
        let right = parts.iter().all(|(_, holder)| *holder == volume)
            && parts.iter().map(|(part, _)| part.count).sum::<u64>() == run.count;
        if !right {
            self.report.problem(format!(
                "{volume} has extents {}..{} of {}, which are not reserved for it",
                run.first.0,
                run.end(),
                run.device
            ));
        }
    }

    fn device(&mut self, pool: &Pool, at: usize) -> CheckStage {
        // A pool has at most 256 devices.
        let index = DeviceIndex(at as u8);
        if let Some(what) = pool.allocator.extents.contradiction(index) {
            self.report.problem(format!("{index}: {what}"));
        }
        let recorded = pool.devices.get(at).map(|device| device.extents);
        let there = pool
            .allocator
            .extents
            .device_space(index)
            .map(|space| space.total);
        if recorded != there {
            self.report.problem(format!(
                "{index} is recorded with {recorded:?} extents but has {there:?}"
            ));
        }
        self.report.extents_checked += there.unwrap_or(0);
        if at + 1 < self.claimed.len() {
            CheckStage::Device(at + 1)
        } else {
            CheckStage::Whole
        }
    }

    fn whole(&mut self, pool: &Pool) -> CheckStage {
        let mut compare = |what: &str, says: u64, is: u64| {
            if says != is {
                self.report
                    .problem(format!("{what}: {says} recorded, but {is} found"));
            }
        };
        let count = |state| pool.allocator.extents.count(state);
        let (_, extents) = pool.allocator.reservations.contents();
        compare("reserved extents", extents, count(ExtentState::Reserved));
        let quarantined = pool.allocator.quarantine.iter().map(|run| run.count).sum();
        compare(
            "extents listed as quarantined",
            quarantined,
            count(ExtentState::Quarantined),
        );
        compare(
            "extents to be freed",
            pool.journal.extents_to_free(),
            count(ExtentState::Freed),
        );
        let volumes = || pool.volumes.by_id.values();
        let entitlement = volumes().map(|volume| volume.entitlement).sum();
        compare("promised extents", pool.volumes.promised, entitlement);
        let bytes = volumes().map(|volume| volume.catalog_bytes).sum();
        compare(
            "promised catalog bytes",
            pool.volumes.catalog_promised,
            bytes,
        );
        compare(
            "volume names",
            pool.volumes.names.len() as u64,
            pool.volumes.by_id.len() as u64,
        );
        compare(
            "volumes in RBD images",
            pool.images.by_volume.len() as u64,
            volumes().filter(|volume| volume.image.is_some()).count() as u64,
        );
        compare(
            "exported volumes",
            pool.exports
                .by_volume
                .values()
                .map(|e| e.len() as u64)
                .sum(),
            pool.exports.by_id.len() as u64,
        );
        self.links(pool);
        CheckStage::Volume(VolumeId(0))
    }

    fn links(&mut self, pool: &Pool) {
        let (runs, _) = pool.allocator.reservations.contents();
        for (run, volume) in runs {
            if pool.volumes.any(volume).is_none() {
                self.report.problem(format!(
                    "extents {}..{} of {} are reserved for {volume}, which does not exist",
                    run.first.0,
                    run.end(),
                    run.device
                ));
            }
        }
        for run in pool.allocator.quarantine.iter() {
            if !pool
                .allocator
                .extents
                .all(run, |state| state == ExtentState::Quarantined)
            {
                self.report.problem(format!(
                    "extents {}..{} of {} are listed as quarantined but are not",
                    run.first.0,
                    run.end(),
                    run.device
                ));
            }
        }
        for export in pool.exports.by_id.values() {
            let of_volume = pool.exports.by_volume.get(&export.volume);
            if !of_volume.is_some_and(|exports| exports.contains(&export.id))
                || !pool.volumes.by_id.contains_key(&export.volume)
            {
                self.report.problem(format!(
                    "{} and {} do not refer to each other",
                    export.id, export.volume
                ));
            }
        }
    }

    fn leaks(&mut self, pool: &Pool, device: usize, from: u64, budget: u64) -> CheckStage {
        let Some(claimed) = self.claimed.get(device) else {
            self.finish();
            return CheckStage::Done;
        };
        let index = DeviceIndex(device as u8);
        let words = claimed.len() as u64;
        let to = (from + budget.div_ceil(64)).min(words);
        for word in from..to {
            let known = claimed.get(word as usize).copied().unwrap_or(0);
            let mut lost = pool.allocator.extents.used_word(index, word) & !known;
            while lost != 0 {
                let extent = word * 64 + u64::from(lost.trailing_zeros());
                lost &= lost - 1;
                if pool.allocator.extents.has_moved(index, extent) {
                    continue;
                }
                self.report.leaked_extents += 1;
                match self.report.leaked.last_mut() {
                    Some(run) if run.device == index && run.end() == extent => run.count += 1,
                    _ => self.report.leaked.push(DeviceRun::new(index, extent, 1)),
                }
            }
        }
        if to < words {
            CheckStage::Leaks(device, to)
        } else {
            CheckStage::Leaks(device + 1, 0)
        }
    }

    fn finish(&mut self) {
        if let Some(run) = self.report.leaked.first() {
            let what = format!(
                "{} extents belong to no volume; the first is extent {} of {}",
                self.report.leaked_extents, run.first.0, run.device
            );
            self.report.add(what, true);
        }
    }
}

impl Pool {
    /// A whole check at once. Use pieces for a large pool.
    pub fn check(&mut self) -> Result<CheckReport> {
        let mut check = Check::begin(self)?;
        while !check.step(self, PIECE_EXTENTS)? {}
        Ok(check.end())
    }

    /// Frees the newest check's leaks: dirty once the open batch is durable. Returns their number.
    pub fn repair(&mut self, report: &CheckReport) -> Result<u64> {
        self.ready()?;
        if report.check != self.checking {
            return Err(PoolError::in_use(
                "the pool has been checked again since: repair what the newest check found",
            ));
        }
        let mut repaired = 0;
        for run in &report.leaked {
            for extent in run.first.0..run.end() {
                let one = DeviceRun::new(run.device, extent, 1);
                let used = |state| matches!(state, ExtentState::Owned | ExtentState::Reserved);
                // Freeing marks it, so no repair happens twice.
                if !self.allocator.extents.has_moved(run.device, extent)
                    && self.allocator.extents.all(one, used)
                {
                    self.allocator.free(&mut self.journal, one);
                    repaired += 1;
                }
            }
        }
        self.allocator.leaked = self.allocator.leaked.saturating_sub(repaired);
        Ok(repaired)
    }
}

/// Checks a catalog on disk by reading it as an opening does. Blocks.
pub fn check_catalog(catalog: &Catalog, devices: &[DeviceRecord]) -> CheckReport {
    let extents: Vec<u64> = devices.iter().map(|device| device.extents).collect();
    let mut report = CheckReport::default();
    let known = |record: &DeviceRecord| {
        let same = |device: &DeviceRecord| device.extents == record.extents;
        if devices.get(usize::from(record.index.0)).is_some_and(same) {
            return Ok(());
        }
        Err(PoolError::damaged(format!(
            "{} has a different size in the catalog",
            record.index
        )))
    };
    match load(catalog, known) {
        Err(error) => report.problem(error.to_string()),
        Ok(pool) => {
            report.extents_checked = extents.iter().sum();
            report.volumes_checked = pool.volumes.by_id.len() as u64;
            let volumes = pool
                .volumes
                .by_id
                .values()
                .chain(pool.volumes.deleting.values());
            let mapped = volumes.map(|volume| volume.map.mapped());
            let layers = pool.volumes.layers.by_id.values();
            let frozen = layers.map(|layer| layer.map.mapped());
            report.mappings_checked = mapped.chain(frozen).sum();
            report.leaked_extents = pool.allocator.leaked_extents();
            if report.leaked_extents > 0 {
                let what = format!(
                    "{} extents belong to no volume in the catalog",
                    report.leaked_extents
                );
                report.add(what, true);
            }
        }
    }
    report
}

#[cfg(test)]
mod tests;
