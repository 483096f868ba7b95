//! Kills the daemon at random moments, also during snapshots and copies; compares grants, the grant
//! table, contents and the next daemon's pool.

use std::collections::HashMap;

use forebay_pool::{FaultAnswer, VolumeRecord};
use forebay_xlate::boundary::message::{FromEngine, Job, ToEngine};
use forebay_xlate::grants::{Grant, GrantTable, copied_for};
use forebay_xlate::shm::SharedMemory;
use forebay_xlate::{ExtentIndex, ExtentRange, Word};

use super::contents::Contents;
use super::*;
use crate::model::{VolumeClone, VolumeRollback};

const VOLUMES: u64 = 3;
const EXTENTS: u64 = 96;
const MOST_SNAPSHOTS: usize = 10;
const MOST_VOLUMES: usize = 6;
/// Never deleted, and snapshots of both are taken at once.
const GROUP: [&str; 2] = ["v0", "v1"];

fn listed(place: &Place, pool: [u8; 16]) -> Vec<Grant> {
    let copy = tempfile::NamedTempFile::new().unwrap();
    std::fs::copy(place.grants(), copy.path()).unwrap();
    let memory = SharedMemory::open(copy.path()).unwrap();
    let table = GrantTable::adopt(memory, &BOOT, &pool).unwrap().unwrap();
    table.iter().copied().collect()
}

/// By volume and extent; targets of copies belong to volumes that don't exist.
fn by_place(listed: &[Grant]) -> HashMap<(VolumeId, u64), Word> {
    let mut places = HashMap::new();
    for grant in listed {
        for at in 0..grant.range.count {
            let key = (grant.volume, grant.range.first + at);
            let before = places.insert(key, grant.word.advance(at));
            assert_eq!(before, None, "listed twice");
        }
    }
    places
}

/// `inherited`: jobs of earlier daemons.
fn assert_listed(fake: &Fake, inherited: &[u64], listed: &[Grant], seed: u64) {
    let places = by_place(listed);
    for ((volume, extent), word) in &fake.grants {
        let there = places.get(&(*volume, *extent));
        let effective = word.as_of(fake.epoch(*volume));
        let as_listed = match there {
            Some(there) if there == word => true,
            // A grant on its way replaces it.
            Some(there) => is_hole(*word) || !effective.writable() && there.writable(),
            None => false,
        };
        assert!(
            as_listed,
            "seed {seed}: {volume} {extent} {word:?}, listed {there:?}"
        );
    }
    for (number, job) in &fake.open_jobs {
        let Job::Copy { to, target, .. } = job else {
            continue;
        };
        // The daemon has adopted it, so its target is durably dirty.
        if inherited.contains(number) {
            continue;
        }
        let mut targets = listed.iter().filter(|g| copied_for(g.volume).is_some());
        let is_listed = targets.any(|g| (g.word.device(), g.word.extent()) == (*to, *target));
        assert!(is_listed, "seed {seed}: {job:?} is not listed");
    }
}

struct Chaos {
    random: fastrand::Rng,
    names: u64,
    contents: Rc<RefCell<Contents>>,
}

impl Chaos {
    fn new_name(&mut self) -> u64 {
        self.names += 1;
        self.names
    }

    fn choose<T: Clone>(&mut self, of: &[T]) -> Option<T> {
        (!of.is_empty()).then(|| of[self.random.usize(..of.len())].clone())
    }

    async fn some_time(&mut self, life: &mut Life) {
        for _ in 0..self.random.u64(..60) + 5 {
            let (volumes, snapshots): (Vec<_>, Vec<_>) = {
                let core = life.owner.base.core.borrow();
                let all = core.pool.volumes().records().cloned();
                all.partition(|volume| !volume.is_snapshot())
            };
            let (volume, name) = {
                let one = self.choose(&volumes).unwrap();
                (one.id, one.name)
            };
            let extent = self.random.u64(..EXTENTS);
            match self.random.u64(..25) {
                0..11 => {
                    let write = self.random.u64(..4) > 0;
                    life.fake.ask_fault(volume, extent, write);
                }
                11 => {
                    let is_served = |one: &&VolumeRecord| life.fake.epochs.contains_key(&one.id);
                    let served: Vec<VolumeId> = snapshots
                        .iter()
                        .filter(is_served)
                        .map(|one| one.id)
                        .collect();
                    if let Some(snapshot) = self.choose(&served) {
                        life.fake.ask_fault(snapshot, extent, false);
                    }
                }
                12..15 => {
                    let count = 1 + self.random.u64(..(EXTENTS - extent).min(12));
                    let range = ExtentRange::new(extent, count);
                    let release = life.fake.release(volume, range);
                    self.contents.borrow_mut().releases(&name, range, release);
                }
                15..17 => {
                    let sequence = life.fake.highest_sequence(volume);
                    life.fake
                        .say(&FromEngine::CommitWanted { volume, sequence });
                }
                17 if volumes.len() < MOST_VOLUMES => self.make(life),
                17 => Self::delete(life, name),
                18 => life.fake.answer_revokes = self.random.u64(..2) == 0,
                19 => life.fake.answer_jobs = self.random.u64(..4) > 0,
                _ => self.snapshots(life, name),
            }
            if self.random.u64(..3) == 0 {
                let time = Duration::from_millis(self.random.u64(..4));
                life.fake.listen(time).await;
            }
            if life.fake.answer_revokes {
                life.fake.answer_all_revokes();
            }
            if life.fake.answer_jobs {
                life.fake.answer_all_jobs();
            }
            self.use_grants(life);
        }
    }

    /// The daemon is to die during copies, which leave anything in their targets.
    async fn begin_copies(&mut self, life: &mut Life) {
        let fake = &mut life.fake;
        fake.answer_jobs = false;
        let mut shared: Vec<_> = fake.grants.keys().copied().collect();
        shared.retain(|(volume, extent)| {
            let word = fake.effective(*volume, *extent);
            word.is_some_and(|word| word.rights() == Some(Rights::Read))
        });
        shared.sort_unstable();
        for _ in 0..shared.len().min(8) {
            let (volume, extent) = shared[self.random.usize(..shared.len())];
            fake.ask_fault(volume, extent, true);
        }
        fake.listen(Duration::from_millis(5)).await;
        let jobs: Vec<Job> = fake.open_jobs.iter().map(|(_, job)| *job).collect();
        for job in jobs {
            if let Job::Copy { to, target, .. } = job
                && self.random.u64(..2) == 0
            {
                fake.contents.insert((to.0, target.0), u64::MAX);
            }
        }
    }

    /// Reads and writes under the grants that the engine has.
    fn use_grants(&mut self, life: &mut Life) {
        let core = life.owner.base.core.borrow();
        let (fake, contents) = (&mut life.fake, &mut *self.contents.borrow_mut());
        contents.see_new(&core.pool);
        contents.hear(&fake.log);
        let mut held: Vec<_> = fake.grants.keys().copied().collect();
        held.sort_unstable();
        for _ in 0..held.len().min(12) {
            let (volume, extent) = held[self.random.usize(..held.len())];
            let Ok(name) = core.pool.volume(volume).map(|record| record.name.clone()) else {
                continue;
            };
            let Some(word) = fake.effective(volume, extent) else {
                continue;
            };
            let at = (word.device().0, word.extent().0);
            let found = fake.contents.get(&at).copied().filter(|_| !is_hole(word));
            let possible = contents.may_be(&name, extent);
            assert!(
                possible.contains(&found),
                "{name} {extent} {word:?} has {found:?}, not one of {possible:?}"
            );
            if self.random.u64(..2) == 0
                && let Some(word) = fake.claim(volume, extent)
            {
                let at = (word.device().0, word.extent().0);
                let found = fake.contents.get(&at).copied();
                assert!(possible.contains(&found), "{name} {extent}: a first write");
                contents.wrote(&name, extent, fake.put_at(word));
            }
        }
    }

    fn make(&mut self, life: &Life) {
        let owner = life.owner.clone();
        let body = VolumeCreate {
            name: format!("n{}", self.new_name()),
            size_bytes: Some(EXTENTS * EXTENT),
            block_bytes: None,
            reserved_bytes: 0,
            rbd: None,
        };
        life.owner.base.spawn(async move {
            let _ = owner.volumes.volume_create("t".to_owned(), body).await;
        });
    }

    fn delete(life: &Life, name: String) {
        if GROUP.contains(&&*name) {
            return;
        }
        let owner = life.owner.clone();
        life.owner.base.spawn(async move {
            let _ = owner.volumes.volume_delete("t".to_owned(), name).await;
        });
    }

    fn snapshots(&mut self, life: &Life, name: String) {
        let (owner, contents, t) = (life.owner.clone(), self.contents.clone(), "t".to_owned());
        let all: Vec<String> = {
            let core = owner.base.core.borrow();
            let records = core.pool.volumes().records();
            let all = records.filter(|record| record.is_snapshot());
            all.map(|record| record.name.clone()).collect()
        };
        let Some(snapshot) = self.choose(&all) else {
            return self.take(life, &[name]);
        };
        let number = self.new_name();
        match self.random.u64(..8) {
            0..3 if all.len() < MOST_SNAPSHOTS => {
                let group = match self.random.u64(..2) {
                    0 => GROUP.map(str::to_owned).to_vec(),
                    _ => vec![name],
                };
                self.take(life, &group);
            }
            3 => {
                let clone = format!("c{number}");
                contents.borrow_mut().will_clone(&snapshot, &clone);
                let body = VolumeClone {
                    tenant: None,
                    name: clone,
                    reserved_bytes: 0,
                    rbd: None,
                };
                owner.base.clone().spawn(async move {
                    let _ = owner.volumes.snapshot_clone(t, snapshot, body).await;
                });
            }
            4 => {
                let Some((volume, _)) = snapshot.split_once('@') else {
                    return;
                };
                let volume = volume.to_owned();
                let change = contents
                    .borrow_mut()
                    .rolls_back(&volume, &snapshot, EXTENTS);
                let body = VolumeRollback {
                    snapshot,
                    while_connected: true,
                };
                owner.base.clone().spawn(async move {
                    let done = owner.volumes.volume_roll_back(t, volume, body).await;
                    let mut contents = contents.borrow_mut();
                    contents.see_new(&owner.base.core.borrow().pool);
                    contents.ended(change, done.is_ok());
                });
            }
            5 => {
                let body = ExportCreate {
                    tenant: t,
                    volume: snapshot,
                    any_host: true,
                    ..ExportCreate::default()
                };
                owner.base.clone().spawn(async move {
                    let _ = owner.exports.export_create(body).await;
                });
            }
            _ => owner.base.clone().spawn(async move {
                let (exports, volumes) = (&owner.exports, &owner.volumes);
                let _ = exports
                    .export_delete(t.clone(), snapshot.clone(), true)
                    .await;
                let _ = volumes.volume_delete(t, snapshot).await;
            }),
        }
    }

    fn take(&mut self, life: &Life, volumes: &[String]) {
        let number = self.new_name();
        let names = volumes.iter().map(|volume| format!("{volume}@s{number}"));
        let (owner, names) = (life.owner.clone(), names.collect());
        life.owner.base.spawn(async move {
            let _ = owner.volumes.snapshots_take("t".to_owned(), names).await;
        });
    }
}

/// What the engine holds is where the pool has it, and only a volume's own extents are written.
fn assert_agrees(life: &Life, seed: u64) {
    let pool = &mut life.owner.base.core.borrow_mut().pool;
    for ((volume, extent), word) in &life.fake.grants {
        let word = word.as_of(life.fake.epoch(*volume));
        if is_hole(word) {
            continue;
        }
        let found = pool.fault(*volume, ExtentIndex(*extent), false);
        let agrees = match found {
            Ok(FaultAnswer::Mapped {
                device, extent: at, ..
            }) => (device, at) == (word.device(), word.extent()),
            Ok(FaultAnswer::Shared {
                device, extent: at, ..
            }) => (device, at) == (word.device(), word.extent()) && !word.writable(),
            _ => false,
        };
        assert!(
            agrees,
            "seed {seed}: {volume} {extent} is held at {word:?}: {found:?}"
        );
    }
}

async fn lives_of(seed: u64) {
    let place = Place::with_devices(2);
    let contents = Rc::new(RefCell::new(Contents::default()));
    let mut chaos = Chaos {
        random: fastrand::Rng::with_seed(seed),
        names: 0,
        contents: contents.clone(),
    };
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
    let mut generation = 1;
    let mut inherited = Vec::new();
    for name in 0..VOLUMES {
        life.volume(&format!("v{name}"), EXTENTS * EXTENT).await;
    }
    for _ in 0..6 {
        chaos.some_time(&mut life).await;
        if chaos.random.u64(..2) == 0 {
            chaos.begin_copies(&mut life).await;
        }
        let pool = {
            let core = life.owner.base.core.borrow();
            contents.borrow_mut().see_new(&core.pool);
            core.pool.info().uuid.into_bytes()
        };
        let mut fake = life.kill().await;
        contents.borrow_mut().all_ended();
        fake.take_the_rest();
        assert_listed(&fake, &inherited, &listed(&place, pool), seed);
        inherited = fake.open_jobs.iter().map(|(number, _)| *number).collect();
        fake.answer_revokes = true;
        fake.answer_jobs = true;
        life = if chaos.random.u64(..2) == 0 {
            fake.answer_all_revokes_silently();
            Life::take_over(&place, begin(generation), fake).await
        } else {
            generation += 1;
            Life::next(&place, begin(generation), &fake).await
        };
        life.fake.listen(Duration::from_millis(20)).await;
        assert_agrees(&life, seed);
        {
            let pool = &mut life.owner.base.core.borrow_mut().pool;
            contents
                .borrow_mut()
                .compare(pool, &life.fake, EXTENTS, seed);
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
    for seed in only.map_or(0..16, |seed| seed..seed + 1) {
        run(lives_of(seed));
    }
}
