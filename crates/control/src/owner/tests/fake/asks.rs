//! Requests of the fake engine.

use super::*;

impl Fake {
    /// Faults, and checks that the answer fits.
    pub(in super::super) async fn fault(
        &mut self,
        volume: VolumeId,
        extent: u64,
        write: bool,
    ) -> Result<Word, FaultFailure> {
        self.ask_fault(volume, extent, write);
        self.answer_to(volume, extent, write).await
    }

    pub(in super::super) fn ask_fault(&mut self, volume: VolumeId, extent: u64, write: bool) {
        self.ask(FaultAsk {
            volume,
            extent,
            write,
            whole: false,
        });
    }

    /// Faults for a command that writes the whole extent. Returns the content it will write.
    pub(in super::super) fn ask_whole(&mut self, volume: VolumeId, extent: u64) -> u64 {
        self.written += 1;
        self.whole.insert((volume, extent), self.written);
        self.ask(FaultAsk {
            volume,
            extent,
            write: true,
            whole: true,
        });
        self.written
    }

    fn ask(&mut self, fault: FaultAsk) {
        let faults = vec![fault];
        self.say(&FromEngine::Faults { faults });
    }

    pub(in super::super) fn last_grant(&self) -> GrantOf {
        match self.log.last() {
            Some(ToEngine::Grants { grants }) => *grants.last().unwrap(),
            other => panic!("{other:?}"),
        }
    }

    pub(in super::super) async fn answer_to(
        &mut self,
        volume: VolumeId,
        extent: u64,
        write: bool,
    ) -> Result<Word, FaultFailure> {
        let answer = self
            .until(|message| match message {
                ToEngine::Grants { grants } => grants.iter().rev().find_map(|grant| {
                    if grant.volume != volume || !grant.range.contains(extent) {
                        return None;
                    }
                    // Grants have the present epoch.
                    let word = Word::from_bits(grant.word).advance(extent - grant.range.first);
                    let mut word = word.as_of(word.epoch());
                    if write {
                        word = word.claimed();
                    }
                    (!write || word.writable()).then_some(Ok(word))
                }),
                ToEngine::FaultFailed {
                    volume: v,
                    range,
                    write: w,
                    reason,
                } if *v == volume && *w == write && range.contains(extent) => Some(Err(*reason)),
                _ => None,
            })
            .await;
        if write && answer.is_ok() {
            self.claim(volume, extent);
        }
        answer
    }

    /// First write to a preallocated extent; returns its writable word.
    pub(in super::super) fn claim(&mut self, volume: VolumeId, extent: u64) -> Option<Word> {
        let epoch = self.epoch(volume);
        let word = self.grants.get_mut(&(volume, extent))?;
        if word.as_of(epoch).is_preallocated() {
            *word = word.claimed();
        }
        Some(word.as_of(epoch)).filter(|word| word.writable())
    }

    pub(in super::super) async fn write(&mut self, volume: VolumeId, extent: u64) -> Word {
        match self.claim(volume, extent) {
            Some(word) => word,
            None => self.fault(volume, extent, true).await.unwrap(),
        }
    }

    pub(in super::super) fn release(&mut self, volume: VolumeId, range: ExtentRange) -> u64 {
        let release = self.next_release;
        self.next_release += 1;
        self.say(&FromEngine::Release {
            release,
            volume,
            range,
        });
        release
    }

    pub(in super::super) async fn released(&mut self, release: u64) {
        self.until(|m| (*m == ToEngine::ReleaseDone { release }).then_some(()))
            .await;
    }

    pub(in super::super) async fn not_released(&mut self, release: u64) {
        self.until(|m| (*m == ToEngine::ReleaseFailed { release }).then_some(()))
            .await;
    }

    pub(in super::super) async fn flush(&mut self, volume: VolumeId, sequence: u64) -> bool {
        self.say(&FromEngine::CommitWanted { volume, sequence });
        self.until(|message| match message {
            ToEngine::Committed {
                volume: v,
                sequence: s,
            } if *v == volume && *s >= sequence => Some(true),
            ToEngine::CommitFailed {
                volume: v,
                sequence: s,
            } if *v == volume && *s >= sequence => Some(false),
            _ => None,
        })
        .await
    }

    pub(in super::super) fn highest_sequence(&self, volume: VolumeId) -> u64 {
        self.log
            .iter()
            .flat_map(|message| match message {
                ToEngine::Grants { grants } => &grants[..],
                _ => &[],
            })
            .filter(|grant| grant.volume == volume)
            .map(|grant| grant.commit_sequence)
            .max()
            .unwrap_or(0)
    }
}
