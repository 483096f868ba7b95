//! Entry points for fuzz targets (in `fuzz/`): the bytes of a broken or hostile disk. [`records`]
//! changes records under correct checksums and loads them. [`image`] changes bytes of a device;
//! opening yields the last committed pool or an error.

use crate::{
    BLOCK_BYTES, BatchId, BlockStore, Catalog, DeviceRun, ExportRecord, MemStore, NewClone,
    NewDevice, NewImageVolume, NewSnapshot, NewVolume, OpenDevice, Pool, PoolSettings, PoolSpec,
    Volumes, catalog::Usage, create, error::Result, journal::batch::Table, open,
    open::load::load_records,
};
use forebay_xlate::types::{DeviceIndex, ExtentIndex, VolumeId};
use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    io,
    sync::{Arc, Mutex, OnceLock, PoisonError},
};

const DEVICE_BYTES: usize = (11 << 20) + (256 << 16);
/// More would only test memory.
const MOST_EXTENTS: u64 = 1 << 20;

type Records = BTreeMap<(Table, u64, u64), Vec<u8>>;

struct Template {
    image: Arc<Vec<u8>>,
    records: Records,
    usage: Arc<Usage>,
    volumes: Vec<String>,
}

/// The template in the making.
struct Making {
    pool: Pool,
    catalog: Catalog,
}

impl Making {
    fn commit(&mut self) -> Result<()> {
        if let Some(batch) = self.pool.take_batch()? {
            self.catalog.commit(&batch)?;
            self.pool.committed(batch.id())?;
        }
        Ok(())
    }

    /// An RBD image and its snapshot, with a session of their client.
    fn add_images(&mut self) -> Result<()> {
        let mut new = NewImageVolume::example("r");
        let volume = self.pool.create_image_volume(&new, 0)?;
        new.snapshot_of = Some(volume);
        new.snapshot = Some("s".into());
        self.pool.create_image_volume(&new, 0)?;
        self.pool.note_client(DeviceIndex(255), "10.0.0.1:0/1")?;
        self.commit()
    }

    /// A snapshot with a clone, hidden extents, and a merge in progress.
    fn add_layers(&mut self) -> Result<()> {
        let of = |pool: &Pool, name| pool.volume_by_name("t", name).map(|volume| volume.id);
        for name in ["a", "b"] {
            let pool = &mut self.pool;
            let volume = of(pool, name)?;
            let name = "s".into();
            let taken = pool.snapshots().take(&[NewSnapshot { volume, name }], 0)?;
            self.commit()?;
            let pool = &mut self.pool;
            for logical in [3, 41, 521] {
                pool.fault(volume, ExtentIndex(logical), true)?;
            }
            if pool.snapshots().begin_copy(volume, ExtentIndex(0))?.is_ok() {
                pool.snapshots().end_copy(volume, ExtentIndex(0))?;
            }
            pool.commit_mappings(volume, u64::MAX, |_| true)?;
            pool.release(volume, ExtentIndex(7), 1, &BTreeSet::new())?;
            let clone = NewClone {
                snapshot: taken.first().copied().unwrap_or(volume),
                tenant: "t".into(),
                name: format!("{}2", pool.volume(volume)?.name),
                reserved_bytes: 0,
            };
            pool.snapshots().clone_snapshot(&clone, 0)?;
            self.commit()?;
        }
        // Only the volume needs this layer now.
        for name in ["b@s", "b2"] {
            let volume = of(&self.pool, name)?;
            self.pool.delete_volume(volume, &BTreeSet::new())?;
        }
        self.commit()?;
        let pool = &mut self.pool;
        if let Some(step) = pool.snapshots().next_merge(None) {
            pool.snapshots().merge(&step)?;
        }
        self.commit()
    }
}

fn make() -> Result<Template> {
    let store = Arc::new(MemStore::new(DEVICE_BYTES));
    let spec = PoolSpec {
        name: "p".into(),
        extent_bytes: 1 << 16,
        devices: vec![NewDevice {
            spec: "mem".into(),
            store: store.clone(),
            block_bytes: 512,
            known_zero: true,
        }],
        settings: PoolSettings::default(),
        force: false,
        now_s: 0,
    };
    let (pool, catalog) = create(&spec)?;
    let mut made = Making { pool, catalog };
    made.pool.create_tenant("t", 0)?;
    for name in ["a", "b", "c"] {
        let new = NewVolume {
            tenant: "t".into(),
            name: name.into(),
            size_bytes: 600 << 16,
            block_bytes: None,
            reserved_bytes: 0,
        };
        let volume = made.pool.create_volume(&new, 0)?;
        made.pool.reserve(volume, 16)?;
        made.commit()?;
        for logical in [0, 1, 2, 7, 40, 520] {
            made.pool.fault(volume, ExtentIndex(logical), true)?;
        }
        made.pool.commit_mappings(volume, u64::MAX, |_| true)?;
        made.commit()?;
    }
    made.add_layers()?;
    made.add_images()?;
    let mut records = Records::new();
    made.catalog.load(|table, a, b, value| {
        records.insert((table, a, b), value.to_vec());
        Ok(())
    })?;
    let mut image = vec![0; DEVICE_BYTES];
    store
        .read_at(0, &mut image)
        .map_err(|error| crate::PoolError::io("a copy", &error))?;
    Ok(Template {
        image: Arc::new(image),
        records,
        usage: made.catalog.usage(),
        volumes: names(made.pool.volumes()),
    })
}

fn template() -> &'static Template {
    static TEMPLATE: OnceLock<Template> = OnceLock::new();
    TEMPLATE.get_or_init(|| make().expect("a pool in memory"))
}

fn names(volumes: &Volumes) -> Vec<String> {
    let mut names: Vec<String> = volumes
        .records()
        .map(|volume| {
            let space = volumes.space_of(volume.id).map_or(0, |space| space.mapped);
            format!("{} {} {space}", volume.name, volume.size_bytes)
        })
        .collect();
    names.sort();
    names
}

/// Uses a loaded pool.
struct Exercise<'a>(&'a mut Pool);

impl Exercise<'_> {
    fn all(&mut self) {
        let pool = &mut *self.0;
        let _ = pool.finish_adoption(false);
        let report = pool.check().expect("adoption is finished");
        let _ = pool.repair(&report);
        let volumes: Vec<VolumeId> = pool.volumes().records().map(|volume| volume.id).collect();
        for volume in volumes.iter().copied().take(8) {
            for logical in [0, 1, 7, 41, 521].map(ExtentIndex) {
                let _ = pool.fault(volume, logical, false);
                let _ = pool.fault(volume, logical, true);
                let _ = pool.snapshots().begin_copy(volume, logical);
                let _ = pool.snapshots().end_copy(volume, logical);
            }
            let _ = pool.reserve(volume, 8);
            let _ = pool.release(volume, ExtentIndex(0), 2, &BTreeSet::new());
        }
        self.layers(&volumes);
        self.images(&volumes);
        let pool = &mut *self.0;
        let _: Vec<&ExportRecord> = pool.exports().iter().collect();
        for device in pool.devices().to_vec() {
            let _ = pool
                .allocator()
                .extent_state(DeviceRun::new(device.index, 0, 1));
            let _ = pool.take_dirty(device.index, 64);
        }
        let _ = pool.take_batch();
        let _ = pool.check();
    }

    fn images(&mut self, volumes: &[VolumeId]) {
        let pool = &mut *self.0;
        let _ = pool.create_image_volume(&NewImageVolume::example("r2"), 0);
        let clients: Vec<DeviceIndex> = pool.images().clients().map(|c| c.index).collect();
        for client in clients {
            let _ = pool.note_client(client, "10.0.0.1:0/2");
            pool.forget_clients(client, &["10.0.0.1:0/1".into()]);
        }
        for volume in volumes {
            let _ = pool.set_image_size(*volume, 3 << 22);
            let _ = pool.volumes().mapped_bytes(*volume, 1 << 22, 8);
            if pool.images().of(*volume).is_some() {
                let _ = pool.delete_volume(*volume, &BTreeSet::new());
            }
        }
    }

    fn layers(&mut self, volumes: &[VolumeId]) {
        let pool = &mut *self.0;
        let _ = pool.take_batch();
        let _ = pool.committed(BatchId(1));
        let merge = |pool: &mut Pool| {
            for _ in 0..8 {
                if let Some(step) = pool.snapshots().next_merge(None) {
                    let _ = pool.snapshots().merge(&step);
                }
                let _ = pool.delete_more();
            }
        };
        merge(pool);
        for volume in volumes.iter().copied().take(4) {
            let _ = pool.commit_mappings(volume, u64::MAX, |_| true);
            let batch = pool.take_batch();
            let _ = batch.map(|batch| batch.map(|batch| pool.committed(batch.id())));
            let _ = pool.volumes().mapped_bytes(volume, 0, 64);
            let name = "new".into();
            let taken = pool.snapshots().take(&[NewSnapshot { volume, name }], 0);
            for snapshot in taken.iter().flatten().chain(volumes.last()).copied() {
                let clone = NewClone {
                    snapshot,
                    tenant: "t".into(),
                    name: format!("c{}", snapshot.0),
                    reserved_bytes: 0,
                };
                let _ = pool.snapshots().clone_snapshot(&clone, 0);
                let _ = pool
                    .snapshots()
                    .roll_back(volume, Some(snapshot), &BTreeSet::new());
            }
            let _ = pool.delete_volume(volume, &BTreeSet::new());
        }
        merge(pool);
    }
}

/// Changes records, loads and uses the pool. The input is a list of changes: table, key (two
/// bytes), action (replace, overwrite from an offset, remove), offset, length, bytes.
pub fn records(mut input: &[u8]) {
    let template = template();
    let mut records = template.records.clone();
    while let Some((head, rest)) = input.split_at_checked(6) {
        let table = Table::ALL[usize::from(head[0]) % Table::ALL.len()];
        let key = (table, u64::from(head[1]), u64::from(head[2]));
        let (offset, length) = (usize::from(head[4]), usize::from(head[5]).min(rest.len()));
        let (bytes, rest) = rest.split_at(length);
        input = rest;
        match head[3] % 3 {
            0 => {
                records.insert(key, bytes.to_vec());
            }
            1 => {
                let value = records.entry(key).or_default();
                value.resize(value.len().max(offset + length), 0);
                value[offset..offset + length].copy_from_slice(bytes);
            }
            _ => {
                records.remove(&key);
            }
        }
    }
    let source = |visit: crate::open::load::Visit<'_>| {
        records
            .iter()
            .try_for_each(|((table, a, b), value)| visit(*table, *a, *b, value))
    };
    let small = |device: &crate::DeviceRecord| match device.extents {
        0..=MOST_EXTENTS => Ok(()),
        _ => Err(crate::PoolError::invalid("a large device")),
    };
    if let Ok(mut pool) = load_records(source, template.usage.clone(), small) {
        Exercise(&mut pool).all();
    }
}

/// A shared image with changed blocks.
struct Overlay {
    base: Arc<Vec<u8>>,
    changed: Mutex<HashMap<u64, Box<[u8; BLOCK_BYTES]>>>,
    capacity: u64,
}

impl Overlay {
    fn change(&self, block: u64, with: impl FnOnce(&mut [u8; BLOCK_BYTES])) {
        let mut changed = self.changed.lock().unwrap_or_else(PoisonError::into_inner);
        let at = block as usize * BLOCK_BYTES;
        with(changed.entry(block).or_insert_with(|| {
            let mut content = Box::new([0; BLOCK_BYTES]);
            content.copy_from_slice(&self.base[at..at + BLOCK_BYTES]);
            content
        }));
    }

    fn check(&self, offset: u64, bytes: usize) -> io::Result<()> {
        if offset + bytes as u64 > self.capacity {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Ok(())
    }
}

impl BlockStore for Overlay {
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        self.check(offset, buf.len())?;
        let changed = self.changed.lock().unwrap_or_else(PoisonError::into_inner);
        for (at, part) in buf.chunks_mut(BLOCK_BYTES).enumerate() {
            let from = offset as usize + at * BLOCK_BYTES;
            match changed.get(&((from / BLOCK_BYTES) as u64)) {
                Some(content) => part.copy_from_slice(&content[..]),
                None => part.copy_from_slice(&self.base[from..from + BLOCK_BYTES]),
            }
        }
        Ok(())
    }

    fn write_at(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.check(offset, data.len())?;
        for (at, part) in data.chunks(BLOCK_BYTES).enumerate() {
            self.change(offset / BLOCK_BYTES as u64 + at as u64, |content| {
                content.copy_from_slice(part);
            });
        }
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        Ok(())
    }

    fn capacity(&self) -> io::Result<u64> {
        Ok(self.capacity)
    }
}

/// Changes bytes of the device and opens it. The input is a list of changes: place (three bytes,
/// spread over labels and catalog), length, bytes. The first byte may truncate the device.
pub fn image(input: &[u8]) {
    let template = template();
    let Some((cut, mut input)) = input.split_first() else {
        return;
    };
    let store = Arc::new(Overlay {
        base: template.image.clone(),
        changed: Mutex::default(),
        capacity: match cut {
            0 => DEVICE_BYTES as u64 / 255 * u64::from(input.first().copied().unwrap_or(0)),
            _ => DEVICE_BYTES as u64,
        } & !(BLOCK_BYTES as u64 - 1),
    });
    while let Some((head, rest)) = input.split_at_checked(4) {
        let place = usize::from(head[0]) | usize::from(head[1]) << 8 | usize::from(head[2]) << 16;
        let place = place % (DEVICE_BYTES - 512);
        let length = usize::from(head[3]).min(rest.len());
        let (bytes, rest) = rest.split_at(length);
        input = rest;
        for (at, byte) in bytes.iter().enumerate() {
            let at = place + at;
            store.change((at / BLOCK_BYTES) as u64, |content| {
                content[at % BLOCK_BYTES] = *byte;
            });
        }
    }
    let device = OpenDevice {
        spec: "mem".into(),
        store,
        forced: false,
    };
    if let Ok(mut opened) = open(&[device]) {
        assert_eq!(
            names(opened.pool.volumes()),
            template.volumes,
            "a silent loss"
        );
        Exercise(&mut opened.pool).all();
    }
}
