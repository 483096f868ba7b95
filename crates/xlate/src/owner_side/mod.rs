//! The owner's side of grants.
//!
//! Pure: no clock, socket or catalog. Only [`OwnerSide::grant`] makes a [`GrantOf`], and writes the
//! table's entry first. To move a range, [`OwnerSide::begin_take_back`] it and go through the [`Stage`]s in
//! order; it is not granted until its entry is forgotten.
//!
//! A revoke counts when the engine reports the range unused *and* is fenced on its devices. Before
//! that, requests of an earlier engine may be in flight. If the conversation ends first, the next
//! engine is asked again.
//!
//! A freeze ([`OwnerSide::freezing`]) revokes only the write right, by a new epoch. Its entries stay
//! listed with their old epochs, so a successor gets no write right back.

use crate::boundary::message::GrantOf;
use crate::grants::{Full, Grant, GrantTable, copied_for};
use crate::types::{DeviceIndex, ExtentRange, Rights, VolumeId};
use crate::word::Word;
use std::collections::{BTreeMap, BTreeSet};

/// Identifies a taken range.
pub type TakingId = u64;

/// The progress of a taken range.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum Stage {
    /// New grants have stopped; existing ones are valid.
    Taken,
    /// A revoke was sent to an engine.
    Asked {
        /// The engine's generation.
        generation: u64,
        /// The engine has reported the range unused.
        acknowledged: bool,
    },
    /// The revoke timed out.
    GivenUp {
        /// The generation of the engine with requests in flight.
        generation: u64,
        /// The engine has answered a later message, so it has cleared the words.
        heard: bool,
        /// Devices whose requests from before the clearing have ended.
        settled: BTreeSet<DeviceIndex>,
    },
    /// Unused, except for requests that hung devices hold.
    Drained {
        /// Devices on which the extents must be quarantined.
        undrained: BTreeSet<DeviceIndex>,
    },
    /// The pool has changed the range, but not durably.
    Changed,
    /// The table may forget the range.
    Durable,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
struct Taking {
    volume: VolumeId,
    range: ExtentRange,
    /// The range's devices at the first revoke.
    devices: BTreeSet<DeviceIndex>,
    /// The parts concerned, if not the whole range ([`OwnerSide::took_back`]).
    parts: Option<Vec<ExtentRange>>,
    /// Only the write right is revoked.
    frozen: bool,
    stage: Stage,
}

/// Why nothing was granted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Refused {
    /// The range is being changed.
    Taken,
    /// This part is listed elsewhere; revoke that first.
    Elsewhere(ExtentRange),
    /// The table is full.
    Full,
}

/// A step that the present [`Stage`] does not allow.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("a step out of order: {step}, while the range is {stage:?}")]
pub struct OutOfOrder {
    /// The refused step.
    pub step: &'static str,
    /// The present stage; `None`: the range is not taken.
    pub stage: Option<Stage>,
}

/// Why an entry was not forgotten.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum NotForgotten {
    /// No room for the rest of a split entry.
    #[error("the grant table is full")]
    Full,
    /// See [`OutOfOrder`].
    #[error("{0}")]
    OutOfOrder(#[from] OutOfOrder),
}

/// How a listed word compares with a wanted one; both are effective.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Fit {
    /// It allows as much.
    Covered,
    /// It is a hole, to be replaced.
    Hole,
    /// It allows less, to be replaced.
    Less,
    /// It must be revoked first.
    Elsewhere,
}

impl Fit {
    fn of(listed: Word, wanted: Word) -> Fit {
        let is_hole = |word: Word| word.rights() == Some(Rights::Hole) && !word.is_preallocated();
        if is_hole(listed) {
            return if is_hole(wanted) {
                Fit::Covered
            } else {
                Fit::Hole
            };
        }
        let writable = listed.claimed().writable();
        if !listed.same_place(wanted) {
            if writable || is_hole(wanted) {
                Fit::Elsewhere
            } else {
                Fit::Less
            }
        } else if writable || !wanted.claimed().writable() {
            Fit::Covered
        } else {
            Fit::Less
        }
    }
}

fn told(grant: &Grant, word: Word) -> GrantOf {
    GrantOf {
        volume: grant.volume,
        range: grant.range,
        word: word.bits(),
        commit_sequence: grant.commit_sequence,
    }
}

/// The ranges that are being changed.
#[derive(Clone, PartialEq, Eq, Hash, Default, Debug)]
pub struct OwnerSide {
    next: TakingId,
    takings: BTreeMap<TakingId, Taking>,
}

impl OwnerSide {
    fn overlapping(
        &self,
        volume: VolumeId,
        range: ExtentRange,
    ) -> impl Iterator<Item = ExtentRange> + '_ {
        self.takings
            .values()
            .filter(move |t| t.volume == volume && t.range.overlaps(&range))
            .map(|t| t.range)
    }

    /// Number of free extents from `first` on, at most `limit`.
    pub fn free_run(&self, volume: VolumeId, first: u64, limit: u64) -> u64 {
        self.overlapping(volume, ExtentRange::new(first, limit))
            .map(|taken| taken.first.saturating_sub(first))
            .min()
            .unwrap_or(limit)
    }

    /// The parts of a range that are not taken.
    pub fn free_parts(&self, volume: VolumeId, range: ExtentRange) -> Vec<ExtentRange> {
        let mut taken: Vec<_> = self.overlapping(volume, range).collect();
        taken.sort_unstable();
        let (mut at, mut parts) = (range.first, Vec::new());
        for one in taken {
            if at < one.first {
                parts.push(ExtentRange::new(at, one.first - at));
            }
            at = at.max(one.end());
        }
        if at < range.end() {
            parts.push(ExtentRange::new(at, range.end() - at));
        }
        parts
    }

    /// Lists a grant in the volume's present epoch and returns what to tell the engine. Only a free
    /// part, not listed elsewhere with the write right, is granted.
    ///
    /// A listed hole is replaced. So is a read-only word: at the same place this is an upgrade, and
    /// elsewhere the caller has copied the extent, and reuses the old place only when reads of it
    /// have ended.
    pub fn grant(
        &self,
        table: &mut GrantTable,
        mut grant: Grant,
        epoch: u16,
    ) -> Result<GrantOf, Refused> {
        let Grant { volume, range, .. } = grant;
        let said = grant.word.with_epoch(epoch);
        grant.word = said.claimed();
        let free = self.free_run(volume, range.first, range.count);
        if free == 0 {
            return Err(Refused::Taken);
        }
        grant.range.count = free;
        // The usual case while a volume is being filled.
        if table.insert_new(grant).map_err(|Full| Refused::Full)? {
            return Ok(told(&grant, said));
        }
        let fit = |listed: &Grant| {
            let wanted = grant.word.advance(listed.range.first - range.first);
            Fit::of(listed.word.as_of(epoch), wanted.as_of(epoch))
        };
        let listed = table.granted(volume, grant.range);
        let elsewhere = listed.iter().find(|listed| fit(listed) == Fit::Elsewhere);
        match elsewhere {
            Some(other) if other.range.first <= range.first => {
                return Err(Refused::Elsewhere(other.range));
            }
            Some(other) => grant.range.count = other.range.first - range.first,
            None => {}
        }
        let mut missing = Vec::new();
        let mut at = range.first;
        let mut new = true;
        for listed in table.granted(volume, grant.range) {
            new &= fit(&listed) == Fit::Hole;
            if fit(&listed) != Fit::Covered {
                continue;
            }
            if at < listed.range.first {
                missing.push(ExtentRange::new(at, listed.range.first - at));
            }
            at = listed.range.end();
        }
        if at < grant.range.end() {
            missing.push(ExtentRange::new(at, grant.range.end() - at));
        }
        for part in missing {
            let word = grant.word.advance(part.first - range.first);
            let entry = Grant {
                range: part,
                word,
                ..grant
            };
            table.insert(entry).map_err(|Full| Refused::Full)?;
        }
        Ok(told(&grant, if new { said } else { grant.word }))
    }

    /// Every listed grant with data, for a new engine: its devices belong to a FLUSH, its commits
    /// are awaited. A taken part has count 0: it may not be used.
    pub fn republish(&self, table: &GrantTable) -> Vec<GrantOf> {
        let mut all = Vec::new();
        for grant in table.iter() {
            self.republish_one(grant, &mut all);
        }
        all
    }

    /// As above, for one entry.
    pub fn republish_one(&self, grant: &Grant, all: &mut Vec<GrantOf>) {
        if grant.word.rights() == Some(Rights::Hole) || copied_for(grant.volume).is_some() {
            return;
        }
        let parts = self.free_parts(grant.volume, grant.range);
        let taken = parts.iter().map(|part| part.count).sum::<u64>() < grant.range.count;
        let nothing = taken.then_some(ExtentRange::new(grant.range.first, 0));
        for range in parts.into_iter().chain(nothing) {
            all.push(GrantOf {
                volume: grant.volume,
                range,
                word: grant.word.advance(range.first - grant.range.first).bits(),
                commit_sequence: grant.commit_sequence,
            });
        }
    }

    /// Takes a range, unless part of it is taken. End with [`OwnerSide::let_go`].
    pub fn begin_take_back(&mut self, volume: VolumeId, range: ExtentRange) -> Option<TakingId> {
        if self.overlapping(volume, range).next().is_some() {
            return None;
        }
        let id = self.next;
        self.next += 1;
        let taking = Taking {
            volume,
            range,
            devices: BTreeSet::new(),
            parts: None,
            frozen: false,
            stage: Stage::Taken,
        };
        self.takings.insert(id, taking);
        Some(id)
    }

    /// Releases a range at any stage; its entries hold again.
    pub fn let_go(&mut self, id: TakingId) {
        self.takings.remove(&id);
    }

    /// The stage of a taken range.
    pub fn stage(&self, id: TakingId) -> Option<&Stage> {
        Some(&self.takings.get(&id)?.stage)
    }

    /// The range's devices at the first revoke.
    pub fn devices(&self, id: TakingId) -> BTreeSet<DeviceIndex> {
        self.takings
            .get(&id)
            .map(|t| t.devices.clone())
            .unwrap_or_default()
    }

    fn refuse(&self, id: TakingId, step: &'static str) -> OutOfOrder {
        OutOfOrder {
            step,
            stage: self.stage(id).cloned(),
        }
    }

    /// A revoke is about to be sent to this engine.
    pub fn asked(
        &mut self,
        id: TakingId,
        table: &GrantTable,
        generation: u64,
    ) -> Result<(), OutOfOrder> {
        let taken = self.takings.get(&id);
        let listed = taken.map(|taking| table.granted(taking.volume, taking.range));
        let listed = listed.unwrap_or_default().into_iter();
        let stored = listed.filter(|grant| grant.word.rights() != Some(Rights::Hole));
        let devices = stored.map(|grant| grant.word.device()).collect();
        self.ask(id, devices, generation, false)
    }

    /// A freeze of the range is about to be sent to this engine. `devices`: all to which the range
    /// may be written. They are not searched in the table, whose size a freeze must not depend on.
    pub fn freezing(
        &mut self,
        id: TakingId,
        devices: BTreeSet<DeviceIndex>,
        generation: u64,
    ) -> Result<(), OutOfOrder> {
        self.ask(id, devices, generation, true)
    }

    fn ask(
        &mut self,
        id: TakingId,
        devices: BTreeSet<DeviceIndex>,
        generation: u64,
        frozen: bool,
    ) -> Result<(), OutOfOrder> {
        match self.takings.get_mut(&id) {
            Some(taking) if taking.stage == Stage::Taken => {
                taking.devices = devices;
                taking.frozen = frozen;
                taking.stage = Stage::Asked {
                    generation,
                    acknowledged: false,
                };
                Ok(())
            }
            _ => Err(self.refuse(id, "a revoke")),
        }
    }

    /// Skips the revoke or freeze of an unlisted range.
    pub fn unlisted(&mut self, id: TakingId, table: &GrantTable) -> Result<(), OutOfOrder> {
        match self.takings.get_mut(&id) {
            Some(t) if t.stage == Stage::Taken && !table.has_any(t.volume, t.range) => {
                t.stage = Stage::Drained {
                    undrained: BTreeSet::new(),
                };
                Ok(())
            }
            _ => Err(self.refuse(id, "a change without a revoke")),
        }
    }

    /// The engine gave back `taken`, never written; only these change from now on. They need no
    /// fence: an earlier engine wrote only to extents listed as stored.
    pub fn took_back(
        &mut self,
        id: TakingId,
        taken: &[ExtentRange],
    ) -> Result<Vec<ExtentRange>, OutOfOrder> {
        match self.takings.get_mut(&id) {
            Some(t) if t.stage == Stage::Taken => {
                let range = t.range;
                let within = |part: &&ExtentRange| {
                    part.count > 0 && range.first <= part.first && part.end() <= range.end()
                };
                let parts: Vec<_> = taken.iter().filter(within).copied().collect();
                t.parts = Some(parts.clone());
                t.stage = Stage::Drained {
                    undrained: BTreeSet::new(),
                };
                Ok(parts)
            }
            _ => Err(self.refuse(id, "taking back")),
        }
    }

    /// The conversation ended too early: send the revoke again.
    pub fn gone(&mut self, id: TakingId) {
        if let Some(taking) = self.takings.get_mut(&id)
            && matches!(taking.stage, Stage::Asked { .. } | Stage::GivenUp { .. })
        {
            taking.stage = Stage::Taken;
        }
    }

    /// The engine of `generation` reports the range unused.
    pub fn acknowledged(&mut self, id: TakingId, generation: u64) {
        if let Some(taking) = self.takings.get_mut(&id)
            && let Stage::Asked {
                generation: asked,
                acknowledged,
            } = &mut taking.stage
            && *asked == generation
        {
            *acknowledged = true;
        }
    }

    /// Whether the range may be changed: acknowledged, and `fenced` on all its devices.
    pub fn is_drained(&mut self, id: TakingId, fenced: impl Fn(DeviceIndex) -> bool) -> bool {
        let Some(taking) = self.takings.get_mut(&id) else {
            return false;
        };
        match &taking.stage {
            Stage::Asked { acknowledged, .. }
                if *acknowledged && taking.devices.iter().all(|d| fenced(*d)) =>
            {
                taking.stage = Stage::Drained {
                    undrained: BTreeSet::new(),
                };
                true
            }
            Stage::Drained { .. } => true,
            _ => false,
        }
    }

    /// The revoke timed out. True: send `Abandon` and settle the devices. False: only fences are
    /// missing.
    pub fn give_up(&mut self, id: TakingId) -> bool {
        let Some(taking) = self.takings.get_mut(&id) else {
            return false;
        };
        let Stage::Asked {
            generation,
            acknowledged,
        } = taking.stage
        else {
            return false;
        };
        let settled = if acknowledged {
            taking.devices.clone()
        } else {
            BTreeSet::new()
        };
        taking.stage = Stage::GivenUp {
            generation,
            heard: acknowledged,
            settled,
        };
        !acknowledged
    }

    /// The engine has answered a message after `Abandon`. Until then the revoke may be lost with
    /// the daemon.
    pub fn heard(&mut self, id: TakingId, generation: u64) {
        if let Some(taking) = self.takings.get_mut(&id)
            && let Stage::GivenUp {
                generation: given_up,
                heard,
                ..
            } = &mut taking.stage
            && *given_up == generation
        {
            *heard = true;
        }
    }

    /// The device has ended every request from before `Abandon`.
    pub fn settled(&mut self, id: TakingId, device: DeviceIndex, generation: u64) {
        if let Some(taking) = self.takings.get_mut(&id)
            && let Stage::GivenUp {
                generation: given_up,
                settled,
                ..
            } = &mut taking.stage
            && *given_up == generation
        {
            settled.insert(device);
        }
        self.heard(id, generation);
    }

    /// Stops waiting for an abandoned revoke. Devices that are not settled and `fenced` hang.
    /// Without an answer, the revoke counts as never sent.
    pub fn settle(&mut self, id: TakingId, fenced: impl Fn(DeviceIndex) -> bool) {
        if let Some(taking) = self.takings.get_mut(&id)
            && let Stage::GivenUp { heard, settled, .. } = &taking.stage
        {
            if !heard {
                taking.stage = Stage::Taken;
                return;
            }
            let hangs = |d: &&DeviceIndex| !settled.contains(d) || !fenced(**d);
            let undrained = taking.devices.iter().filter(hangs).copied().collect();
            taking.stage = Stage::Drained { undrained };
        }
    }

    /// The devices on which to quarantine the extents of a drained range.
    pub fn may_change(&self, id: TakingId) -> Result<&BTreeSet<DeviceIndex>, OutOfOrder> {
        match self.stage(id) {
            Some(Stage::Drained { undrained }) => Ok(undrained),
            _ => Err(self.refuse(id, "a change")),
        }
    }

    /// The pool has changed the range. A freeze that left writes in flight must fail instead.
    pub fn changed(&mut self, id: TakingId) -> Result<(), OutOfOrder> {
        let is_drained = self.may_change(id)?.is_empty();
        match self.takings.get_mut(&id) {
            Some(taking) if is_drained || !taking.frozen => {
                taking.stage = Stage::Changed;
                Ok(())
            }
            _ => Err(self.refuse(id, "a snapshot with writes in flight")),
        }
    }

    /// The pool's change is durable.
    pub fn durable(&mut self, id: TakingId) -> Result<(), OutOfOrder> {
        match self.takings.get_mut(&id) {
            Some(taking) if taking.stage == Stage::Changed => {
                taking.stage = Stage::Durable;
                Ok(())
            }
            _ => Err(self.refuse(id, "a commit")),
        }
    }

    /// Removes the range's entries, if its change is durable, or if it is unused and unchanged. Those
    /// of a freeze stay: the engine still reads under them.
    pub fn forget(&self, id: TakingId, table: &mut GrantTable) -> Result<(), NotForgotten> {
        let drained = Stage::Drained {
            undrained: BTreeSet::new(),
        };
        match self.takings.get(&id) {
            Some(t) if !t.frozen && (t.stage == Stage::Durable || t.stage == drained) => {
                let whole = std::slice::from_ref(&t.range);
                for part in t.parts.as_deref().unwrap_or(whole) {
                    table
                        .remove(t.volume, *part)
                        .map_err(|Full| NotForgotten::Full)?;
                }
                Ok(())
            }
            _ => Err(self.refuse(id, "forgetting a grant").into()),
        }
    }
}

#[cfg(test)]
mod tests;
