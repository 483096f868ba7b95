//! The owner's side of grants: what may be granted, and the way on which it is taken back.
//!
//! **Design.** Pure: no clock, no socket, no catalog. The grant table is handed in, because it lives
//! in shared memory. Two rules are kept here, whatever the tasks around them do:
//! - **Granting.** [`OwnerSide::grant`] is the only maker of a [`GrantOf`]: it looks whether somebody
//!   changes the range, whether the extents are listed at another place, and writes the table's entry;
//!   only then there is something to say to the engine.
//! - **Taking back.** Who changes where a range lies *takes* it ([`OwnerSide::take`]), and goes
//!   through the [`Stage`]s in their order: revoke asked, nothing uses it any more (or it is given up,
//!   and the devices that hang are known), the pool changed, that made durable, the entry forgotten. A
//!   step out of order is refused with [`OutOfOrder`]. Until the entry is forgotten, nothing of the
//!   range is granted.
//!
//! A revoke counts when an engine says that nothing uses the range *and* this engine has its fence on
//! the devices concerned: until then requests of an engine before it may be on their way. When the
//! conversation ends before, the next engine is asked again.
//!
//! **Not here:** extents and their states (the pool), time limits and messages (the control crate).

use crate::boundary::message::GrantOf;
use crate::grants::{Full, Grant, GrantTable};
use crate::types::{DeviceIndex, ExtentRange, Rights, VolumeId};
use std::collections::{BTreeMap, BTreeSet};

/// The number of a range that is taken.
pub type TakingId = u64;

/// How far a taking is.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum Stage {
    /// Nothing of it is granted any more; what was granted stands.
    Taken,
    /// A revoke is with the engine of this generation.
    Asked {
        /// Which engine.
        generation: u64,
        /// It has said that nothing uses the range.
        acknowledged: bool,
    },
    /// The revoke is given up: what is in flight has not ended.
    GivenUp {
        /// Which engine has it in flight.
        generation: u64,
        /// It has answered something said later: so it has heard the revoke, and cleared the words.
        heard: bool,
        /// Devices where everything has ended that was in flight there after the words were cleared.
        settled: BTreeSet<DeviceIndex>,
    },
    /// Nothing uses it, but for requests that these devices don't end.
    Drained {
        /// There the extents must be quarantined.
        undrained: BTreeSet<DeviceIndex>,
    },
    /// The pool has changed it, not durably yet.
    Changed,
    /// That is durable: the table may forget it.
    Durable,
}

/// A range that somebody changes.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
struct Taking {
    volume: VolumeId,
    range: ExtentRange,
    /// Devices that the range's entries name, as of the first revoke.
    devices: BTreeSet<DeviceIndex>,
    /// What it is about, where that is not the whole range ([`OwnerSide::took_back`]).
    parts: Option<Vec<ExtentRange>>,
    stage: Stage,
}

/// Why nothing was granted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Refused {
    /// Somebody changes the range.
    Taken,
    /// This part is listed at another place, which must be taken back first.
    Elsewhere(ExtentRange),
    /// The table is full.
    Full,
}

/// A step that must not be taken yet (or any more).
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("a step out of order: {step}, while the range is {stage:?}")]
pub struct OutOfOrder {
    /// What was to be done.
    pub step: &'static str,
    /// How far it is; `None`: nobody has taken it.
    pub stage: Option<Stage>,
}

/// Why an entry was not forgotten.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum NotForgotten {
    /// The table has no room for what remains of an entry.
    #[error("the grant table is full")]
    Full,
    /// See there.
    #[error("{0}")]
    OutOfOrder(#[from] OutOfOrder),
}

/// See the module's text.
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

    /// How many extents from `first` on nobody has taken, up to `limit`; 0 when `first` is taken.
    pub fn free_run(&self, volume: VolumeId, first: u64, limit: u64) -> u64 {
        self.overlapping(volume, ExtentRange::new(first, limit))
            .map(|taken| taken.first.saturating_sub(first))
            .min()
            .unwrap_or(limit)
    }

    /// The parts of a range that nobody has taken.
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

    /// Lists a grant and gives back what to tell the engine: of the range as much as nobody has taken
    /// and as is not listed elsewhere, at least its first extent. What is listed so already is not
    /// written again; a listed hole is replaced.
    ///
    /// # Errors
    /// See [`Refused`]; then nothing is to be told.
    pub fn grant(&self, table: &mut GrantTable, mut grant: Grant) -> Result<GrantOf, Refused> {
        let Grant { volume, range, .. } = grant;
        let said = grant.word;
        grant.word = said.claimed();
        let free = self.free_run(volume, range.first, range.count);
        if free == 0 {
            return Err(Refused::Taken);
        }
        grant.range.count = free;
        // Nearly always, while a volume is filled.
        if table.insert_new(grant).map_err(|Full| Refused::Full)? {
            return Ok(GrantOf {
                volume,
                range: grant.range,
                word: said.bits(),
                commit_sequence: grant.commit_sequence,
            });
        }
        let place_of = |listed: &Grant| grant.word.advance(listed.range.first - range.first);
        let listed = table.granted(volume, grant.range);
        let elsewhere = listed.iter().find(|listed| {
            listed.word.rights() != Some(Rights::Hole) && listed.word != place_of(listed)
        });
        match elsewhere {
            Some(other) if other.range.first <= range.first => {
                return Err(Refused::Elsewhere(other.range));
            }
            Some(other) => grant.range.count = other.range.first - range.first,
            None => {}
        }
        let mut missing = Vec::new();
        let mut at = range.first;
        for listed in table.granted(volume, grant.range) {
            if listed.word != place_of(&listed) {
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
        let new = missing == [grant.range];
        for part in missing {
            let word = grant.word.advance(part.first - range.first);
            let entry = Grant {
                range: part,
                word,
                ..grant
            };
            table.insert(entry).map_err(|Full| Refused::Full)?;
        }
        Ok(GrantOf {
            volume,
            range: grant.range,
            word: if new { said } else { grant.word }.bits(),
            commit_sequence: grant.commit_sequence,
        })
    }

    /// Everything listed that stores something, as a new conversation is told of it: so an engine
    /// knows which devices a FLUSH must cover, and what of it waits for a commit. A part that somebody
    /// has taken is told with a count of 0: its device counts, nothing of it may be used.
    pub fn tell_again(&self, table: &GrantTable) -> Vec<GrantOf> {
        let mut all = Vec::new();
        for grant in table.iter() {
            self.tell_one_again(grant, &mut all);
        }
        all
    }

    /// The same of one entry.
    pub fn tell_one_again(&self, grant: &Grant, all: &mut Vec<GrantOf>) {
        if grant.word.rights() == Some(Rights::Hole) {
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

    /// Takes a range, if nobody has a part of it. It must be let go in the end.
    pub fn take(&mut self, volume: VolumeId, range: ExtentRange) -> Option<TakingId> {
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
            stage: Stage::Taken,
        };
        self.takings.insert(id, taking);
        Some(id)
    }

    /// Lets a range go, however far it came: what its entries say holds again.
    pub fn let_go(&mut self, id: TakingId) {
        self.takings.remove(&id);
    }

    /// How far a taking is.
    pub fn stage(&self, id: TakingId) -> Option<&Stage> {
        Some(&self.takings.get(&id)?.stage)
    }

    /// The devices that the range's entries named when the revoke was asked.
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

    /// A revoke of the range is about to be said to the engine of this generation.
    ///
    /// # Errors
    /// When it is past that.
    pub fn asked(
        &mut self,
        id: TakingId,
        table: &GrantTable,
        generation: u64,
    ) -> Result<(), OutOfOrder> {
        match self.takings.get_mut(&id) {
            Some(taking) if taking.stage == Stage::Taken => {
                let listed = table.granted(taking.volume, taking.range);
                let stored = listed
                    .iter()
                    .filter(|grant| grant.word.rights() != Some(Rights::Hole));
                taking.devices = stored.map(|grant| grant.word.device()).collect();
                taking.stage = Stage::Asked {
                    generation,
                    acknowledged: false,
                };
                Ok(())
            }
            _ => Err(self.refuse(id, "a revoke")),
        }
    }

    /// Nothing of the range is listed, so there is nothing to revoke.
    ///
    /// # Errors
    /// When something is.
    pub fn unlisted(&mut self, id: TakingId, table: &GrantTable) -> Result<(), OutOfOrder> {
        match self.takings.get_mut(&id) {
            Some(t) if t.stage == Stage::Taken && table.granted(t.volume, t.range).is_empty() => {
                t.stage = Stage::Drained {
                    undrained: BTreeSet::new(),
                };
                Ok(())
            }
            _ => Err(self.refuse(id, "a change without a revoke")),
        }
    }

    /// The engine has answered `TakeBack` of the range: `taken` were places ahead, and never written. From
    /// here on the taking is about these alone, which are given back; nothing else of the range changes.
    /// They are drained, and need no fence: an engine before this one may have written only to what this
    /// one was told as stored, and what it was told as ahead was clean when it was told.
    ///
    /// # Errors
    /// When a revoke of the range was asked.
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

    /// The conversation in which the revoke was asked is over, without the revoke being through: it
    /// must be asked again.
    pub fn gone(&mut self, id: TakingId) {
        if let Some(taking) = self.takings.get_mut(&id)
            && matches!(taking.stage, Stage::Asked { .. } | Stage::GivenUp { .. })
        {
            taking.stage = Stage::Taken;
        }
    }

    /// The engine of `generation` says that nothing uses the range.
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

    /// Whether the range is drained: acknowledged by an engine that is `fenced` on all its devices.
    /// From then on it may be changed.
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

    /// Time is over. True: the engine must be told with `Abandon` that the revoke is given up, and
    /// asked to settle the devices. False: it was acknowledged, only fences are missing.
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

    /// The engine of `generation` has answered something that was said after `Abandon`. Until it has,
    /// the revoke may be among what it never hears, if the daemon dies.
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

    /// The engine of `generation` has ended, at this device, everything that was in flight when it was
    /// asked to, after `Abandon`.
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

    /// A revoke that was given up waits no longer: the devices that are not both settled and `fenced`
    /// hang, and what lies there can only be quarantined. An engine that has answered nothing has
    /// perhaps heard nothing: then it is as if nothing had been asked.
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

    /// The devices where the range's extents must be quarantined when the pool changes it now.
    ///
    /// # Errors
    /// When it is not drained.
    pub fn may_change(&self, id: TakingId) -> Result<&BTreeSet<DeviceIndex>, OutOfOrder> {
        match self.stage(id) {
            Some(Stage::Drained { undrained }) => Ok(undrained),
            _ => Err(self.refuse(id, "a change")),
        }
    }

    /// The pool has changed the range.
    ///
    /// # Errors
    /// When it was not drained before.
    pub fn changed(&mut self, id: TakingId) -> Result<(), OutOfOrder> {
        self.may_change(id)?;
        if let Some(taking) = self.takings.get_mut(&id) {
            taking.stage = Stage::Changed;
        }
        Ok(())
    }

    /// What the pool changed is durable.
    ///
    /// # Errors
    /// When it has changed nothing.
    pub fn durable(&mut self, id: TakingId) -> Result<(), OutOfOrder> {
        match self.takings.get_mut(&id) {
            Some(taking) if taking.stage == Stage::Changed => {
                taking.stage = Stage::Durable;
                Ok(())
            }
            _ => Err(self.refuse(id, "a commit")),
        }
    }

    /// Takes the range's entries off the table: what became of its extents is durable, or they stay
    /// what they were and nothing uses them.
    ///
    /// # Errors
    /// When that is not so, or when there is no room for what remains of an entry.
    pub fn forget(&self, id: TakingId, table: &mut GrantTable) -> Result<(), NotForgotten> {
        let drained = Stage::Drained {
            undrained: BTreeSet::new(),
        };
        match self.takings.get(&id) {
            Some(t) if t.stage == Stage::Durable || t.stage == drained => {
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
