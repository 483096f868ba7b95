//! Kills the daemon at random moments; compares grants, the grant table and the next daemon's pool.

use std::collections::HashMap;

use forebay_xlate::boundary::message::{FromEngine, ToEngine};
use forebay_xlate::grants::GrantTable;
use forebay_xlate::shm::SharedMemory;
use forebay_xlate::{ExtentIndex, ExtentRange, Word};

use super::*;

const VOLUMES: u64 = 3;
const EXTENTS: u64 = 96;

fn listed(place: &Place, pool: [u8; 16]) -> HashMap<(VolumeId, u64), Word> {
    let copy = tempfile::NamedTempFile::new().unwrap();
    std::fs::copy(place.grants(), copy.path()).unwrap();
    let memory = SharedMemory::open(copy.path()).unwrap();
    let table = GrantTable::adopt(memory, &BOOT, &pool).unwrap().unwrap();
    let mut places = HashMap::new();
    for grant in table.iter() {
        for at in 0..grant.range.count {
            let key = (grant.volume, grant.range.first + at);
            let before = places.insert(key, grant.word.advance(at));
            assert_eq!(before, None, "listed twice");
        }
    }
    places
}

fn assert_listed(fake: &Fake, listed: &HashMap<(VolumeId, u64), Word>, seed: u64) {
    for (key, word) in &fake.grants {
        // If a grant on its way replaces the hole, the table lists that grant.
        let there = listed.get(key);
        let as_listed = there == Some(word) || is_hole(*word) && there.is_some();
        assert!(as_listed, "seed {seed}: {key:?} {word:?}, listed {there:?}");
    }
}

async fn some_time(life: &mut Life, random: &mut fastrand::Rng, names: &mut u64) {
    for _ in 0..random.u64(..60) + 5 {
        let volumes: Vec<VolumeId> = {
            let core = life.owner.base.core.borrow();
            core.pool
                .volumes()
                .records()
                .map(|volume| volume.id)
                .collect()
        };
        let volume = volumes[random.usize(..volumes.len())];
        let extent = random.u64(..EXTENTS);
        match random.u64(..20) {
            0..12 => life.fake.ask_fault(volume, extent, random.u64(..4) > 0),
            12..15 => {
                let count = 1 + random.u64(..(EXTENTS - extent).min(12));
                life.fake.release(volume, ExtentRange::new(extent, count));
            }
            15..17 => {
                let sequence = life.fake.highest_sequence(volume);
                life.fake
                    .say(&FromEngine::CommitWanted { volume, sequence });
            }
            17 => {
                let owner = life.owner.clone();
                let name = owner
                    .base
                    .core
                    .borrow()
                    .pool
                    .volume(volume)
                    .unwrap()
                    .name
                    .clone();
                *names += 1;
                let body = VolumeCreate {
                    name: format!("n{names}"),
                    size_bytes: EXTENTS * EXTENT,
                    block_bytes: None,
                    reserved_bytes: 0,
                };
                life.owner.base.spawn(async move {
                    let _ = owner.volumes.volume_create("t".to_owned(), body).await;
                    let _ = owner.volumes.volume_delete("t".to_owned(), name).await;
                });
            }
            18 => life.fake.answer_revokes = random.u64(..2) == 0,
            _ => life.fake.answer_jobs = random.u64(..4) > 0,
        }
        if random.u64(..3) == 0 {
            life.fake
                .listen(Duration::from_millis(random.u64(..4)))
                .await;
        }
        if life.fake.answer_revokes {
            life.fake.answer_all_revokes();
        }
        if life.fake.answer_jobs {
            life.fake.answer_all_jobs();
        }
    }
}

async fn lives_of(seed: u64) {
    let place = Place::with_devices(2);
    let mut random = fastrand::Rng::with_seed(seed);
    let begin = |generation| {
        let mut begin = Begin {
            size_bytes: 32 << 20,
            // Small, so that grants are evicted.
            capacity: 96,
            generation,
            ..Begin::default()
        };
        begin.limits.sync_every = Duration::from_millis(10);
        begin.limits.inherited = Duration::from_millis(20);
        begin
    };
    let mut life = Life::first(&place, begin(1)).await;
    let (mut generation, mut names) = (1, 0);
    for name in 0..VOLUMES {
        life.volume(&format!("v{name}"), EXTENTS * EXTENT).await;
    }
    for _ in 0..6 {
        some_time(&mut life, &mut random, &mut names).await;
        let pool = life.owner.base.core.borrow().pool.info().uuid.into_bytes();
        let mut fake = life.kill().await;
        fake.take_the_rest();
        assert_listed(&fake, &listed(&place, pool), seed);
        fake.answer_revokes = true;
        fake.answer_jobs = true;
        life = if random.u64(..2) == 0 {
            fake.answer_all_revokes_silently();
            Life::take_over(&place, begin(generation), fake).await
        } else {
            generation += 1;
            Life::next(&place, begin(generation), &fake).await
        };
        life.fake.listen(Duration::from_millis(20)).await;
        let held: Vec<_> = life.fake.grants.iter().map(|(k, w)| (*k, *w)).collect();
        for ((volume, extent), word) in held.into_iter().filter(|(_, word)| !is_hole(*word)) {
            let pool = &mut life.owner.base.core.borrow_mut().pool;
            let found = pool.fault(volume, ExtentIndex(extent), false);
            let agrees = matches!(
                found,
                Ok(forebay_pool::FaultAnswer::Mapped { device, extent: at, .. })
                    if (device, at) == (word.device(), word.extent())
            );
            assert!(
                agrees,
                "seed {seed}: {volume} {extent} is held at {word:?}: {found:?}"
            );
        }
        let report = life.owner.base.core.borrow_mut().pool.check().unwrap();
        assert!(report.is_clean(), "seed {seed}: {report:?}");
    }
    let refused = |m: &ToEngine| matches!(m, ToEngine::CommitFailed { .. });
    assert!(!life.fake.log.iter().any(refused), "seed {seed}");
}

#[test]
fn grant_table_matches_after_kill() {
    let only = std::env::var("FOREBAY_SEED").ok();
    let only: Option<u64> = only.map(|seed| seed.parse().unwrap());
    for seed in only.map_or(0..24, |seed| seed..seed + 1) {
        run(lives_of(seed));
    }
}
