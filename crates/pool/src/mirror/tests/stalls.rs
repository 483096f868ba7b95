//! Two devices, each with a label and a copy, fail or hang at any operation and come back.
//!
//! A failed sync forgets writes, although reads still show them. A hanging device holds one
//! operation, which lands later or not, and fails others, as [`BoundedStore`](crate::BoundedStore)
//! does. Each life ends with a power cut or a kill.

use super::*;
use crate::{label::Label, mirror::lineage::Epoch};
use uuid::Uuid;

const AREA_AT: u64 = 8192;
const AREA: u64 = 120 * 4096;
const RING: u64 = 100;

#[derive(Clone, Copy, Debug)]
struct Trouble {
    /// The first failing operation of this life.
    at: u64,
    /// Further failing operations.
    lasts: u64,
    hangs: bool,
}

#[derive(Clone)]
struct Write {
    block: u64,
    data: Vec<u8>,
    /// A sync of it failed.
    is_lost: bool,
}

#[derive(Clone, Default)]
struct Disk {
    synced: Vec<u8>,
    writes: Vec<Write>,
    count: u64,
    troubles: Vec<Trouble>,
    /// Held while it hangs.
    held: Option<Held>,
}

#[derive(Clone)]
enum Held {
    Write(u64, Vec<u8>),
    Nothing,
}

type Disks = Arc<Mutex<[Disk; 2]>>;

/// Power fails for both at the same operation.
struct One(Disks, usize, Arc<Mutex<Option<u64>>>);

impl Disk {
    fn put(&mut self, offset: u64, data: &[u8]) {
        for (nth, data) in data.chunks(4096).enumerate() {
            self.writes.push(Write {
                block: offset / 4096 + nth as u64,
                data: data.to_vec(),
                is_lost: false,
            });
        }
    }

    fn land(&mut self) {
        if let Some(Held::Write(offset, data)) = self.held.take() {
            self.put(offset, &data);
        }
    }

    fn sync(&mut self) {
        let writes = std::mem::take(&mut self.writes);
        for write in writes {
            if write.is_lost {
                self.writes.push(write);
            } else {
                self.writes.retain(|lost| lost.block != write.block);
                let at = write.block as usize * 4096;
                self.synced[at..at + 4096].copy_from_slice(&write.data);
            }
        }
    }

    /// Before an operation: none, a failure, or the first that hangs.
    fn trouble(&mut self) -> Option<(Trouble, bool)> {
        let at = self.count;
        self.count += 1;
        let trouble = self
            .troubles
            .iter()
            .find(|trouble| (trouble.at..=trouble.at + trouble.lasts).contains(&at))
            .copied();
        match trouble {
            Some(trouble) => Some((trouble, !trouble.hangs || self.held.is_none())),
            None => {
                self.land();
                None
            }
        }
    }

    fn hang(&mut self, held: Held) -> io::Error {
        self.held = Some(held);
        io::ErrorKind::TimedOut.into()
    }

    fn cut(&mut self, mut keep: impl FnMut() -> bool) {
        self.land();
        for write in std::mem::take(&mut self.writes) {
            for (nth, sector) in write.data.chunks(512).enumerate() {
                if keep() {
                    let at = write.block as usize * 4096 + nth * 512;
                    self.synced[at..at + 512].copy_from_slice(sector);
                }
            }
        }
        *self = Disk {
            synced: std::mem::take(&mut self.synced),
            ..Disk::default()
        };
    }
}

impl One {
    fn with<T>(&self, work: impl FnOnce(&mut Disk) -> io::Result<T>) -> io::Result<T> {
        if let Some(left) = &mut *self.2.lock().unwrap() {
            match left {
                0 => return Err(io::Error::other("cut")),
                left => *left -= 1,
            }
        }
        work(&mut self.0.lock().unwrap()[self.1])
    }
}

impl BlockStore for One {
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        let disk = &mut self.0.lock().unwrap()[self.1];
        match disk.trouble() {
            Some((trouble, true)) if trouble.hangs => return Err(disk.hang(Held::Nothing)),
            Some(_) => return Err(io::Error::other("read")),
            None => {}
        }
        for (nth, piece) in buf.chunks_mut(4096).enumerate() {
            let block = offset / 4096 + nth as u64;
            let at = block as usize * 4096;
            let written = disk.writes.iter().rev().find(|write| write.block == block);
            piece.copy_from_slice(written.map_or(&disk.synced[at..at + 4096], |w| &w.data));
        }
        Ok(())
    }

    fn write_at(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.with(|disk| match disk.trouble() {
            Some((trouble, true)) if trouble.hangs => {
                Err(disk.hang(Held::Write(offset, data.to_vec())))
            }
            Some(_) => Err(io::Error::other("write")),
            None => {
                disk.put(offset, data);
                Ok(())
            }
        })
    }

    fn sync(&self) -> io::Result<()> {
        self.with(|disk| match disk.trouble() {
            Some((trouble, true)) if trouble.hangs => Err(disk.hang(Held::Nothing)),
            Some((trouble, _)) => {
                if !trouble.hangs {
                    for write in &mut disk.writes {
                        write.is_lost = true;
                    }
                }
                Err(io::Error::other("sync"))
            }
            None => {
                disk.sync();
                Ok(())
            }
        })
    }

    fn capacity(&self) -> io::Result<u64> {
        Ok(AREA_AT + AREA)
    }

    fn is_stuck(&self) -> bool {
        let disk = &mut self.0.lock().unwrap()[self.1];
        if disk.held.is_some() {
            disk.trouble();
        }
        disk.held.is_some()
    }
}

fn label(device: u8, epoch: Epoch) -> Label {
    Label {
        format: crate::label::LabelFormat::Old,
        generation: 1,
        pool_uuid: Uuid::from_bytes(OWNER),
        pool_name: "p".to_owned(),
        device_uuid: Uuid::from_bytes([device + 1; 16]),
        device_index: DeviceIndex(device),
        block_bytes: 4096,
        extent_bytes: 65536,
        catalog_offset_bytes: AREA_AT,
        catalog_bytes: AREA,
        catalog_areas: 1,
        data_offset_bytes: AREA_AT + AREA,
        data_extents: 0,
        epoch,
        owner: None,
        number: 0,
        is_clean: false,
    }
}

struct Lab {
    disks: Disks,
    left: Arc<Mutex<Option<u64>>>,
}

impl Lab {
    fn store(&self, at: usize) -> Arc<dyn BlockStore> {
        Arc::new(One(self.disks.clone(), at, self.left.clone()))
    }

    fn open(&self, which: &[usize]) -> io::Result<Mirror> {
        let (mut found, mut given, mut stores) = (Vec::new(), Vec::new(), Vec::new());
        let mut areas = Vec::new();
        for at in which {
            let store = self.store(*at);
            // Without a readable label it is no part of the pool.
            let Ok(label) = Label::read(store.as_ref()) else {
                continue;
            };
            let area = Area::new(store.clone(), DeviceIndex(*at as u8), AREA_AT, AREA, OWNER);
            areas.push(area.unwrap());
            found.push(FoundArea::new(areas[areas.len() - 1].clone()));
            given.push((at.to_string(), label.epoch));
            stores.push((label.device_uuid, store));
        }
        let mirror = Mirror::open(found, &given)?;
        for (device, store) in stores {
            mirror.add_label(device, &store);
        }
        let _ = mirror.settle(&areas);
        Ok(mirror)
    }

    fn copy(&self) -> Lab {
        Lab {
            disks: Arc::new(Mutex::new(self.disks.lock().unwrap().clone())),
            left: Arc::default(),
        }
    }
}

/// Block 0: a version, and the blocks that carry it.
fn head(mirror: &Mirror) -> io::Result<(u64, u64, u64)> {
    let mut bytes = [0; 24];
    mirror.read(0, &mut bytes)?;
    let number = |from: usize| u64::from_le_bytes(bytes[from..from + 8].try_into().unwrap());
    Ok((number(0), number(8), number(16)))
}

fn place(at: u64) -> u64 {
    at % RING * 4096 + 4096
}

/// If its blocks are intact.
fn version(mirror: &Mirror) -> io::Result<u64> {
    let (version, first, count) = head(mirror)?;
    for at in first..first + count {
        let mut content = [0; 4096];
        mirror.read(place(at), &mut content)?;
        if content[..8] != version.to_le_bytes() {
            return Err(io::Error::other(format!("block {at} is not of {version}")));
        }
    }
    Ok(version)
}

fn round(mirror: &Mirror, version: u64, count: u64) -> io::Result<()> {
    let (_, first, before) = head(mirror)?;
    let first = first + before;
    let mut content = [0; 4096];
    content[..8].copy_from_slice(&version.to_le_bytes());
    for at in first..first + count {
        mirror.write(place(at), &content)?;
    }
    mirror.sync()?;
    let named = [version, first, count].map(u64::to_le_bytes).concat();
    mirror.write(0, &named)
}

#[derive(Clone, Debug)]
struct Life {
    /// Blocks of each, and whether copies are healed before.
    rounds: Vec<(u64, bool)>,
    troubles: Vec<(usize, Trouble)>,
    /// Writes and syncs before the power cut.
    left: u64,
    seed: u64,
}

fn life() -> impl Strategy<Value = Life> {
    let trouble = (0usize..2, 0u64..90, 0u64..40, any::<bool>());
    let trouble = trouble.prop_map(|(disk, at, lasts, hangs)| (disk, Trouble { at, lasts, hangs }));
    (
        prop::collection::vec((1u64..8, any::<bool>()), 1..7),
        prop::collection::vec(trouble, 0..4),
        1u64..250,
        any::<u64>(),
    )
        .prop_map(|(rounds, troubles, left, seed)| Life {
            rounds,
            troubles,
            left,
            seed,
        })
}

fn outlive(lives: Vec<Life>) -> Result<(), TestCaseError> {
    let disk = || Disk {
        synced: vec![0; (AREA_AT + AREA) as usize],
        ..Disk::default()
    };
    let lab = Lab {
        disks: Arc::new(Mutex::new([disk(), disk()])),
        left: Arc::default(),
    };
    let areas = [0, 1]
        .map(|at| Area::new(lab.store(at), DeviceIndex(at as u8), AREA_AT, AREA, OWNER).unwrap());
    let mirror = Mirror::format(areas.to_vec()).unwrap();
    mirror.set_len(mirror.capacity()).unwrap();
    mirror.sync().unwrap();
    for at in 0..2 {
        let label = label(at, mirror.epoch());
        label.write(lab.store(usize::from(at)).as_ref()).unwrap();
    }
    drop(mirror);
    let (mut last, mut next) = (0, 0);
    for life in lives {
        for (disk, trouble) in &life.troubles {
            lab.disks.lock().unwrap()[*disk].troubles.push(*trouble);
        }
        *lab.left.lock().unwrap() = Some(life.left);
        // If the opening fails, there is nothing to check.
        let mut candidates = vec![last];
        let mut behind = [false; 2];
        if let Ok(mirror) = lab.open(&[0, 1]) {
            for (count, heals) in &life.rounds {
                if *heals {
                    let _ = heal(&mirror);
                }
                next += 1;
                let written = round(&mirror, next, *count);
                if written.is_ok() {
                    candidates.push(next);
                }
                // The catalog reopens after an error.
                if written.and_then(|()| mirror.sync()).is_ok() {
                    last = next;
                    candidates = vec![last];
                }
            }
            for copy in mirror.health().copies {
                behind[usize::from(copy.device.0)] |= copy.state != CopyState::Good;
            }
        } else {
            behind = [true; 2];
        }
        let mut choices = fastrand::Rng::with_seed(life.seed);
        for disk in &mut *lab.disks.lock().unwrap() {
            disk.cut(|| match life.seed % 4 {
                0 => false,
                1 => true,
                _ => choices.bool(),
            });
        }
        *lab.left.lock().unwrap() = None;
        for at in (0..2).filter(|at| !behind[*at]) {
            let alone = lab.copy().open(&[at]);
            let found = alone.and_then(|mirror| version(&mirror));
            prop_assert!(
                found.as_ref().is_ok_and(|found| candidates.contains(found)),
                "{at} alone: {found:?} of {candidates:?}"
            );
        }
        let opened = lab.open(&[0, 1]);
        prop_assert!(opened.is_ok(), "{:?}", opened.err());
        let mirror = opened.unwrap();
        let found = version(&mirror);
        prop_assert!(
            found.as_ref().is_ok_and(|found| candidates.contains(found)),
            "{found:?} of {candidates:?}, {behind:?}"
        );
        last = found.unwrap();
        prop_assert!(mirror.sync().is_ok() && heal(&mirror).is_ok());
        prop_assert_eq!(states(&mirror), [CopyState::Good, CopyState::Good]);
        drop(mirror);
        for at in 0..2 {
            let found = lab.copy().open(&[at]).and_then(|mirror| version(&mirror));
            prop_assert!(
                found.as_ref().is_ok_and(|found| *found == last),
                "{found:?}"
            );
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(cases(300)))]

    /// Only the acknowledged state, or the one being synced, remains.
    #[test]
    fn failing_and_hanging_copies_lose_nothing(lives in prop::collection::vec(life(), 1..5)) {
        outlive(lives)?;
    }
}
