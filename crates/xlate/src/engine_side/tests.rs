//! Inputs and their effects.

use super::*;
use crate::types::{ExtentIndex, Rights};

const V: VolumeId = VolumeId(7);

#[derive(Default)]
struct One {
    words: [u64; 8],
    epoch: u16,
    committed: u64,
}

impl Words for One {
    fn lookup(&self, volume: VolumeId, extent: u64) -> Option<Word> {
        let word = self.words.get(extent as usize).copied().unwrap_or(0);
        (volume == V).then_some(Word::from_bits(word).as_of(self.epoch))
    }
    fn install(&mut self, grant: &GrantOf) -> bool {
        let word = Word::from_bits(grant.word);
        for extent in grant.range.first..grant.range.end() {
            self.words[extent as usize] = word.advance(extent - grant.range.first).bits();
        }
        grant.volume == V
    }
    fn clear(&mut self, _: VolumeId, range: ExtentRange) {
        self.words[range.first as usize..range.end() as usize].fill(0);
    }
    fn freeze(&mut self, _: VolumeId, epoch: u16) {
        self.epoch = epoch;
    }
    fn take_back(&mut self, _: VolumeId, range: ExtentRange) -> Vec<ExtentRange> {
        let preallocated =
            |extent: &u64| Word::from_bits(self.words[*extent as usize]).is_preallocated();
        let taken: Vec<u64> = (range.first..range.end().min(8))
            .filter(preallocated)
            .collect();
        for extent in &taken {
            self.words[*extent as usize] = 0;
        }
        let one = |extent| ExtentRange::new(extent, 1);
        taken.into_iter().map(one).collect()
    }
    fn count_preallocated(&self, _: VolumeId, range: ExtentRange) -> u64 {
        let all = &self.words[range.first as usize..range.end().min(8) as usize];
        let preallocated = |word: &&u64| Word::from_bits(**word).is_preallocated();
        all.iter().filter(preallocated).count() as u64
    }
    fn committed(&mut self, _: VolumeId, sequence: u64) {
        self.committed = sequence;
    }
    fn is_committed(&self, _: VolumeId, sequence: u64) -> bool {
        self.committed >= sequence
    }
}

struct Rig {
    side: EngineSide,
    words: One,
}

impl Rig {
    fn new(reactors: usize, max_drains: usize) -> Self {
        Self {
            side: EngineSide::new(reactors, max_drains),
            words: One::default(),
        }
    }

    fn hear(&mut self, message: ToEngine) -> Vec<Effect> {
        let mut out = Vec::new();
        assert_eq!(self.side.hear(message, &mut self.words, &mut out), None);
        out
    }

    fn upcall(&mut self, reactor: usize, upcall: ProtocolUpcall) -> Vec<Effect> {
        let mut out = Vec::new();
        self.side.upcall(reactor, upcall, &self.words, &mut out);
        self.side.end_turn(&mut out);
        out
    }

    fn miss(&mut self, reactor: usize, extent: u64, write: bool) -> Vec<Effect> {
        self.upcall(reactor, ProtocolUpcall::Fault(ask(extent, write)))
    }

    fn revoke(&mut self, revoke: u64, extent: u64, release: Option<u64>) -> Vec<Effect> {
        self.hear(ToEngine::Revoke {
            revoke,
            volume: V,
            range: ExtentRange::new(extent, 1),
            freeze: None,
            release,
        })
    }
}

fn ask(extent: u64, write: bool) -> FaultAsk {
    FaultAsk {
        volume: V,
        extent,
        write,
        whole: false,
    }
}

fn asked(extent: u64, write: bool) -> Vec<Effect> {
    let faults = vec![ask(extent, write)];
    vec![Effect::Say(FromEngine::Faults { faults })]
}

fn grants(extent: u64, word: Word) -> ToEngine {
    ToEngine::Grants {
        grants: vec![GrantOf {
            volume: V,
            range: ExtentRange::new(extent, 1),
            word: word.bits(),
            commit_sequence: 0,
        }],
    }
}

fn stored() -> Word {
    Word::new(DeviceIndex(0), ExtentIndex(5), Rights::ReadWrite).unwrap()
}

fn posted(who: usize, post: ProtocolPost) -> Effect {
    Effect::Post(ReactorSet::one(who), post)
}

fn revoke_post(revoke: u64, extent: u64) -> ProtocolPost {
    ProtocolPost::Revoke {
        revoke,
        volume: V,
        range: ExtentRange::new(extent, 1),
        writes_only: false,
    }
}

#[test]
fn fault_answers_reach_only_the_reactors_that_asked() {
    let mut rig = Rig::new(3, 4);
    assert_eq!(rig.miss(1, 2, true), asked(2, true));
    assert_eq!(rig.miss(1, 2, true), []);
    assert_eq!(rig.miss(2, 2, false), asked(2, false));
    let granted = ProtocolPost::Granted(V, ExtentRange::new(2, 1));
    assert_eq!(rig.hear(grants(2, Word::HOLE)), [posted(2, granted)]);
    // The write is still open; its failure does not affect reads.
    assert_eq!(rig.miss(2, 2, false), [posted(2, granted)]);
    let failed = ToEngine::FaultFailed {
        volume: V,
        range: ExtentRange::new(2, 1),
        write: true,
        reason: FaultFailure::NoSpace,
    };
    let reported =
        ProtocolPost::FaultFailed(V, ExtentRange::new(2, 1), true, FaultFailure::NoSpace);
    assert_eq!(rig.hear(failed), [posted(1, reported)]);
    assert_eq!(rig.hear(grants(2, stored())), []);
    assert_eq!(
        rig.miss(0, 2, true),
        [posted(0, granted)],
        "it came meanwhile"
    );
}

#[test]
fn faults_of_a_turn_are_one_message() {
    let mut rig = Rig::new(1, 4);
    let mut out = Vec::new();
    for extent in 0..8 {
        let miss = ProtocolUpcall::Fault(ask(extent, true));
        rig.side.upcall(0, miss, &rig.words, &mut out);
    }
    assert_eq!(out, []);
    rig.side.end_turn(&mut out);
    let [Effect::Say(FromEngine::Faults { faults })] = &out[..] else {
        panic!("{out:?}")
    };
    assert_eq!(faults.len(), 8);
    let mut out = Vec::new();
    rig.side.ask_again(&mut out);
    rig.side.end_turn(&mut out);
    assert_eq!(out.len(), 1);
}

#[test]
fn a_revoke_is_acknowledged_when_every_reactor_has_drained() {
    let mut rig = Rig::new(2, 4);
    rig.hear(grants(3, stored()));
    let post = Effect::Post(ReactorSet::first(2), revoke_post(9, 3));
    assert_eq!(rig.revoke(9, 3, None), [post]);
    assert_eq!(rig.words.words[3], 0);
    assert_eq!(rig.revoke(9, 3, None), [], "said twice");
    assert_eq!(rig.upcall(0, ProtocolUpcall::Drained { revoke: 9 }), []);
    assert_eq!(rig.upcall(0, ProtocolUpcall::Drained { revoke: 9 }), []);
    assert_eq!(rig.side.held().collect::<Vec<_>>(), [Held::Revoke(9)]);
    let done = Effect::Say(FromEngine::RevokeDone { revoke: 9 });
    assert_eq!(rig.upcall(1, ProtocolUpcall::Drained { revoke: 9 }), [done]);
    assert_eq!(rig.upcall(1, ProtocolUpcall::Drained { revoke: 9 }), []);
}

#[test]
fn hung_revokes_rotate_and_keep_their_answers() {
    let mut rig = Rig::new(2, 1);
    rig.hear(grants(4, stored()));
    rig.revoke(1, 3, None);
    assert_eq!(rig.revoke(2, 4, None), [], "held back");
    assert_eq!(rig.words.words[4], 0, "but its words are cleared at once");
    rig.upcall(0, ProtocolUpcall::Drained { revoke: 1 });
    let mut out = Vec::new();
    rig.side.rotate_revokes(&mut out);
    assert_eq!(out, [], "it has a whole turn");
    rig.side.rotate_revokes(&mut out);
    assert_eq!(
        out,
        [
            posted(1, ProtocolPost::Abandon(1)),
            Effect::Post(ReactorSet::first(2), revoke_post(2, 4))
        ]
    );
    // A late answer counts.
    rig.upcall(0, ProtocolUpcall::Drained { revoke: 2 });
    let done = |revoke| Effect::Say(FromEngine::RevokeDone { revoke });
    assert_eq!(
        rig.upcall(1, ProtocolUpcall::Drained { revoke: 2 }),
        [done(2), posted(1, revoke_post(1, 3))],
        "the first comes back, to who has not answered"
    );
    assert_eq!(
        rig.upcall(1, ProtocolUpcall::Drained { revoke: 1 }),
        [done(1)]
    );
    out.clear();
    rig.side.rotate_revokes(&mut out);
    assert_eq!(out, []);
}

#[test]
fn an_abandoned_revoke_makes_room_and_is_not_answered() {
    let mut rig = Rig::new(1, 1);
    rig.revoke(1, 3, None);
    rig.revoke(2, 4, None);
    rig.revoke(3, 5, None);
    assert_eq!(rig.hear(ToEngine::Abandon { revoke: 2 }), []);
    assert_eq!(
        rig.hear(ToEngine::Abandon { revoke: 1 }),
        [
            posted(0, ProtocolPost::Abandon(1)),
            posted(0, revoke_post(3, 5))
        ]
    );
    assert_eq!(rig.upcall(0, ProtocolUpcall::Drained { revoke: 1 }), []);
    assert_eq!(rig.side.held().collect::<Vec<_>>(), [Held::Revoke(3)]);
}

#[test]
fn a_release_can_be_given_up_until_its_revoke_comes() {
    let mut rig = Rig::new(1, 4);
    let release = ProtocolUpcall::Release {
        io: 4,
        generation: 2,
        volume: V,
        range: ExtentRange::new(1, 1),
    };
    let abandon = ProtocolUpcall::AbandonRelease {
        io: 4,
        generation: 2,
    };
    rig.upcall(0, release);
    assert_eq!(
        rig.upcall(0, abandon),
        [posted(0, ProtocolPost::ReleaseAbandoned(4, 2))]
    );
    let refused = Effect::Say(FromEngine::RevokeRefused { revoke: 8 });
    rig.hear(grants(1, stored()));
    assert_eq!(rig.revoke(8, 1, Some(1)), [refused]);
    assert_ne!(rig.words.words[1], 0, "nothing was revoked");
    rig.upcall(0, release);
    rig.revoke(9, 1, Some(2));
    assert_eq!(rig.upcall(0, abandon), [], "it has begun");
    let mut out = Vec::new();
    rig.side.hung_up(&mut out);
    assert_eq!(
        out,
        [Effect::Post(ReactorSet::first(1), ProtocolPost::HungUp)]
    );
    out.clear();
    rig.side.ask_again(&mut out);
    assert!(matches!(
        out[..],
        [Effect::Say(FromEngine::Release { release: 2, .. })]
    ));
    assert_eq!(
        rig.upcall(0, abandon),
        [posted(0, ProtocolPost::ReleaseAbandoned(4, 2))]
    );
}

#[test]
fn a_device_is_settled_when_every_reactor_says_so() {
    let mut rig = Rig::new(2, 4);
    let work = Job::Settle {
        device: DeviceIndex(3),
    };
    let post = ProtocolPost::Settle(6, DeviceIndex(3));
    let message = ToEngine::Job { job: 6, work };
    let all = ReactorSet::first(2);
    assert_eq!(rig.hear(message.clone()), [Effect::Post(all, post)]);
    assert_eq!(rig.hear(message), [], "said twice");
    assert_eq!(rig.upcall(1, ProtocolUpcall::Settled { job: 6 }), []);
    assert_eq!(rig.upcall(1, ProtocolUpcall::Settled { job: 6 }), []);
    assert_eq!(rig.side.held().collect::<Vec<_>>(), [Held::Job(6, work)]);
    let done = Effect::Say(FromEngine::JobDone {
        job: 6,
        errno: None,
    });
    assert_eq!(rig.upcall(0, ProtocolUpcall::Settled { job: 6 }), [done]);
    assert_eq!(rig.side.held().count(), 0);
}

#[test]
fn kept_messages_are_bounded_without_an_owner() {
    let mut r = Rig::new(2, 4);
    r.side.hung_up(&mut Vec::new());
    for extent in 0..MAX_FAULTS as u64 {
        assert_eq!(r.miss(0, extent, true), asked(extent, true));
    }
    assert_eq!(r.side.faults_outstanding(), MAX_FAULTS);
    // Beyond the bound, a miss is refused at once.
    let range = ExtentRange::new(MAX_FAULTS as u64, 1);
    let busy = ProtocolPost::FaultFailed(V, range, true, FaultFailure::Busy);
    for _ in 0..3 {
        assert_eq!(r.miss(1, range.first, true), [posted(1, busy)]);
    }
    assert_eq!(r.miss(1, 5, true), []);
    assert_eq!(r.side.faults_outstanding(), MAX_FAULTS);

    for hour in 1..100 {
        for io in 0..8 {
            let range = ExtentRange::new(u64::from(io), 1);
            r.upcall(
                0,
                ProtocolUpcall::Release {
                    io,
                    generation: hour,
                    volume: V,
                    range,
                },
            );
            let sequence = u64::from(hour * 8 + io);
            r.upcall(
                1,
                ProtocolUpcall::CommitWanted {
                    volume: V,
                    sequence,
                },
            );
        }
        assert_eq!((r.side.releases.len(), r.side.commits.len()), (8, 1));
        for io in 0..8 {
            let generation = hour;
            r.upcall(0, ProtocolUpcall::AbandonRelease { io, generation });
        }
        assert_eq!(r.side.releases.len(), 0);
    }

    let mut out = Vec::new();
    r.side.ask_again(&mut out);
    let Some(Effect::Say(FromEngine::Notice { text })) = out.first() else {
        panic!("{:?}", out.first());
    };
    assert!(text.starts_with("3 faults were refused"), "{text}");
    let faults = out.iter().map(|effect| match effect {
        Effect::Say(FromEngine::Faults { faults }) => faults.len(),
        _ => 0,
    });
    assert_eq!(faults.sum::<usize>(), MAX_FAULTS);
    out.clear();
    r.side.ask_again(&mut out);
    assert!(!matches!(out[0], Effect::Say(FromEngine::Notice { .. })));
    r.hear(grants(0, stored()));
    assert_eq!(r.miss(1, range.first, true), asked(range.first, true));
}

#[test]
fn a_preallocated_extent_is_returned_unless_claimed() {
    let mut rig = Rig::new(2, 1);
    let preallocated = |extent| Word::preallocated(DeviceIndex(0), ExtentIndex(extent)).unwrap();
    assert_eq!(rig.miss(1, 2, true), asked(2, true));
    let granted = ProtocolPost::Granted(V, ExtentRange::new(2, 1));
    assert_eq!(rig.hear(grants(2, preallocated(5))), [posted(1, granted)]);
    assert_eq!(
        rig.miss(0, 2, true),
        [posted(0, granted)],
        "claimed, not asked"
    );
    rig.hear(grants(3, preallocated(6)));
    rig.hear(grants(4, preallocated(7)));
    rig.words.words[3] = preallocated(6).claimed().bits();
    let count = ToEngine::CountPreallocated {
        count: 4,
        volume: V,
        range: ExtentRange::new(3, u64::MAX),
    };
    let counted = FromEngine::PreallocatedCounted {
        count: 4,
        preallocated: 1,
    };
    assert_eq!(rig.hear(count), [Effect::Say(counted)]);
    let take_back = ToEngine::TakeBack {
        revoke: 8,
        volume: V,
        range: ExtentRange::new(0, u64::MAX),
    };
    let taken = vec![ExtentRange::new(2, 1), ExtentRange::new(4, 1)];
    let took_back = |taken| [Effect::Say(FromEngine::TookBack { revoke: 8, taken })];
    assert_eq!(rig.hear(take_back.clone()), took_back(taken));
    assert_eq!(rig.hear(take_back), took_back(Vec::new()));
    assert_eq!(rig.miss(0, 2, true), asked(2, true));
    assert_eq!(rig.words.words[3], preallocated(6).claimed().bits());
}

#[test]
fn a_freeze_leaves_the_words_and_drains_writes() {
    let mut rig = Rig::new(2, 4);
    rig.hear(grants(3, stored()));
    let range = ExtentRange::new(0, 8);
    let freeze = ToEngine::Revoke {
        revoke: 9,
        volume: V,
        range,
        freeze: Some(1),
        release: None,
    };
    let post = ProtocolPost::Revoke {
        revoke: 9,
        volume: V,
        range,
        writes_only: true,
    };
    let posted_to_all = Effect::Post(ReactorSet::first(2), post);
    assert_eq!(rig.hear(freeze.clone()), [posted_to_all]);
    assert_eq!(rig.words.lookup(V, 3), Some(stored().read_only()));
    rig.words.epoch = 0;
    assert_eq!(rig.hear(freeze), [], "said twice");
    assert_eq!(rig.words.epoch, 0, "the failed one gave the right back");
    rig.words.epoch = 1;
    let granted = ProtocolPost::Granted(V, ExtentRange::new(3, 1));
    assert_eq!(rig.miss(1, 3, false), [posted(1, granted)]);
    assert_eq!(rig.miss(1, 3, true), asked(3, true));
    assert_eq!(rig.upcall(0, ProtocolUpcall::Drained { revoke: 9 }), []);
    let done = Effect::Say(FromEngine::RevokeDone { revoke: 9 });
    assert_eq!(rig.upcall(1, ProtocolUpcall::Drained { revoke: 9 }), [done]);
    let copied = stored().advance(2).with_epoch(1);
    assert_eq!(rig.hear(grants(3, copied)), [posted(1, granted)]);
    assert_eq!(rig.miss(1, 3, true), [posted(1, granted)]);
}
