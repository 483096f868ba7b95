//! Extents that change hands while the power is cut at every step.
//!
//! A life of a small pool is cut one catalog operation later each time; its data devices lose
//! unflushed writes. Then all free extents are handed out.

mod common;
#[allow(dead_code)]
#[path = "pool_model/disk.rs"]
mod disk;

use common::{Choices, DRAINED, EXTENT, commit, powercut::Power, spec};
use disk::{Bytes, Disk, Place};
use forebay_pool::{
    Catalog, FaultAnswer, NewDevice, NewVolume, OpenDevice, Pool, PoolSpec, Result, create, open,
};
use forebay_xlate::types::{DeviceIndex, ExtentIndex, VolumeId};
use std::collections::BTreeMap;

const EXTENTS: u64 = 24;
const SEEDS: u64 = 6;

fn new_pool(power: &Power) -> (Pool, Catalog) {
    create(&PoolSpec {
        devices: vec![NewDevice {
            spec: "mem:0".into(),
            store: power.stores()[0].clone(),
            block_bytes: 512,
            known_zero: true,
        }],
        ..spec(&[], true)
    })
    .unwrap()
}

fn reopen(power: &Power) -> (Pool, Catalog) {
    let opened = open(&[OpenDevice {
        spec: "mem:0".into(),
        store: power.stores()[0].clone(),
        forced: false,
    }])
    .unwrap();
    (opened.pool, opened.catalog)
}

struct Life {
    pool: Pool,
    catalog: Catalog,
    disk: Disk,
    version: u64,
}

impl Life {
    fn volume(&mut self, name: &str) -> VolumeId {
        let new = NewVolume {
            tenant: "t".into(),
            name: name.into(),
            size_bytes: EXTENTS * 2 * EXTENT,
            block_bytes: None,
            reserved_bytes: 0,
        };
        self.pool.create_volume(&new, 0).unwrap()
    }

    fn commit(&mut self) -> Result<()> {
        if let Some(batch) = self.pool.take_batch()? {
            self.catalog.commit(&batch)?;
            self.pool.committed(batch.id())?;
        }
        Ok(())
    }

    fn flush(&mut self, volume: VolumeId) -> Result<()> {
        self.disk.flush(0);
        self.pool.commit_mappings(volume, u64::MAX, |_| true)?;
        self.commit()
    }

    fn zero_fill(&mut self) -> Result<()> {
        let runs = self.pool.take_dirty(DeviceIndex(0), u64::MAX);
        for run in &runs {
            for extent in run.first.0..run.end() {
                self.disk.write((0, extent), [None; 2]);
            }
        }
        self.disk.flush(0);
        for run in runs {
            self.pool.zero_filled(run)?;
        }
        self.commit()
    }

    /// Writes one extent; `None` if the pool is full. A new extent must read as zeros, now and
    /// after any cut.
    fn write(&mut self, volume: VolumeId, logical: u64) -> Result<Option<Place>> {
        loop {
            let answer = self.pool.fault(volume, ExtentIndex(logical), true)?;
            let place = match answer {
                FaultAnswer::Allocated { device, extent, .. } => {
                    let place = (device.0, extent.0);
                    assert!(self.disk.is_zero(place), "{place:?} shows old bytes");
                    place
                }
                FaultAnswer::Mapped { device, extent, .. } => (device.0, extent.0),
                FaultAnswer::NeedReserve { count } => {
                    self.pool.reserve(volume, count)?;
                    self.commit()?;
                    continue;
                }
                FaultAnswer::AwaitCommit { .. } => {
                    self.commit()?;
                    continue;
                }
                FaultAnswer::AwaitZeroFill => {
                    self.commit()?;
                    self.zero_fill()?;
                    continue;
                }
                FaultAnswer::NoSpace => return Ok(None),
                other => panic!("{other:?}"),
            };
            self.version += 1;
            let bytes = Bytes {
                volume: volume.0,
                logical,
                version: self.version,
            };
            self.disk.write(place, [Some(bytes); 2]);
            return Ok(Some(place));
        }
    }

    fn map(&mut self, volume: VolumeId) -> BTreeMap<u64, Place> {
        let mut map = BTreeMap::new();
        for logical in 0..EXTENTS * 2 {
            let answer = self.pool.fault(volume, ExtentIndex(logical), false);
            if let Ok(FaultAnswer::Mapped { device, extent, .. }) = answer {
                map.insert(logical, (device.0, extent.0));
            }
        }
        map
    }

    /// Mapped extents belong to their volume; all others can be handed out.
    fn all_is_well(&mut self) {
        let volumes: Vec<VolumeId> = self
            .pool
            .volumes()
            .records()
            .map(|volume| volume.id)
            .collect();
        let mut places = BTreeMap::new();
        for volume in volumes {
            for (logical, place) in self.map(volume) {
                assert_eq!(
                    places.insert(place, volume),
                    None,
                    "{place:?} has two owners"
                );
                for bytes in self.disk.read(place).into_iter().flatten() {
                    let whose = (bytes.volume, bytes.logical);
                    assert_eq!(whose, (volume.0, logical), "another's bytes in {place:?}");
                }
            }
        }
        let heir = self.volume("heir");
        let mut logical = 0;
        while let Some(place) = self.write(heir, logical).unwrap() {
            assert_eq!(places.insert(place, heir), None, "{place:?} has two owners");
            logical += 1;
        }
        assert_eq!(places.len() as u64, EXTENTS, "some are lost");
        assert_eq!(self.pool.check().unwrap().problems, []);
    }
}

fn cut_everywhere(live: fn(&mut Life) -> Result<()>) {
    let power = Power::new(&[common::FIRST_DATA_BYTES + EXTENTS * EXTENT]);
    let (mut pool, catalog) = new_pool(&power);
    pool.create_tenant("t", 0).unwrap();
    commit(&mut pool, &catalog);
    drop((pool, catalog));
    let mut cuts = 0;
    loop {
        let power = power.after_kill();
        let (pool, catalog) = reopen(&power);
        let mut life = Life {
            pool,
            catalog,
            disk: Disk::default(),
            version: 0,
        };
        life.pool.finish_adoption(true).unwrap();
        life.commit().unwrap();
        power.fail_after(cuts);
        let over = live(&mut life).is_ok();
        for seed in 0..SEEDS {
            let power = power.after_cut(seed);
            let (pool, catalog) = reopen(&power);
            let mut after = Life {
                pool,
                catalog,
                disk: life.disk.clone(),
                version: life.version,
            };
            after.disk.cut(&mut Choices::with_seed(seed));
            after.pool.finish_adoption(false).unwrap();
            after.commit().unwrap();
            after.all_is_well();
        }
        if over {
            break;
        }
        cuts += 1;
    }
    assert!(cuts > 20, "only {cuts} operations");
}

#[test]
fn delete_crash_no_double_owner() {
    cut_everywhere(|life| {
        let (gone, stays) = (life.volume("gone"), life.volume("stays"));
        for logical in 0..8 {
            life.write(gone, logical)?;
            life.write(stays, logical)?;
        }
        life.flush(gone)?;
        life.flush(stays)?;
        life.write(gone, 9)?;
        life.pool.delete_volume(gone, &DRAINED)?;
        for logical in 8..EXTENTS {
            life.write(stays, logical)?;
        }
        life.flush(stays)
    });
}

#[test]
fn freed_extent_never_shows_old_bytes() {
    cut_everywhere(|life| {
        let (first, second) = (life.volume("first"), life.volume("second"));
        for round in 0..2 {
            for logical in 0..EXTENTS / 2 {
                life.write(first, logical)?;
            }
            life.flush(first)?;
            life.pool
                .release(first, ExtentIndex(round), EXTENTS / 2 - 1, &DRAINED)?;
            for logical in 0..EXTENTS / 2 {
                life.write(second, logical)?;
            }
            life.pool
                .release(second, ExtentIndex(0), EXTENTS, &DRAINED)?;
            life.commit()?;
            life.zero_fill()?;
        }
        Ok(())
    });
}
