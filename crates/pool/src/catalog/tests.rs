//! The catalog fills its area, and damage is an error.

use super::*;
use crate::{
    journal::batch::{BatchId, Key},
    store::MemStore,
};

const BYTES: u64 = 3 << 20;

fn batch(keys: std::ops::Range<u64>, value: Option<usize>) -> Batch {
    let records = keys
        .map(|a| {
            (
                Key::new(Table::Volumes, a, 0),
                value.map(|bytes| vec![a as u8; bytes]),
            )
        })
        .collect();
    Batch {
        id: BatchId(1),
        records,
    }
}

fn contents(catalog: &Catalog) -> Vec<(u64, usize)> {
    let mut all = Vec::new();
    catalog
        .load(|_, a, _, value| {
            assert!(value.iter().all(|byte| *byte == a as u8));
            all.push((a, value.len()));
            Ok(())
        })
        .unwrap();
    all
}

/// The database can't double within 3 MiB, so it uses the rest. When full it refuses additions,
/// keeps its content, and accepts smaller records.
#[test]
fn a_database_uses_its_whole_area_and_survives_its_end() {
    let store = Arc::new(MemStore::new(BYTES as usize));
    let area = || {
        let device = forebay_xlate::types::DeviceIndex(0);
        Area::new(store.clone(), device, 0, BYTES, [1; 16]).unwrap()
    };
    let catalog = Catalog::create(vec![area()]).unwrap();
    let mut count = 0;
    let error = loop {
        match catalog.commit(&batch(count..count + 50, Some(1000))) {
            Ok(()) => count += 50,
            Err(error) => break error,
        }
        assert_eq!(catalog.usage().get().used_bytes, count * 1024);
    };
    assert_eq!(error.kind, ErrorKind::NoSpace, "{error}");
    assert_eq!(catalog.file.len(), catalog.file.capacity());
    assert!(count * 1000 > BYTES * 9 / 10, "only {count} records");
    let expected: Vec<_> = (0..count).map(|a| (a, 1000)).collect();
    assert_eq!(contents(&catalog), expected);
    assert!(
        catalog
            .commit(&batch(count..count + 50, Some(1000)))
            .is_err()
    );
    for from in (0..200).step_by(10) {
        catalog.commit(&batch(from..from + 10, None)).unwrap();
    }
    catalog
        .commit(&batch(count..count + 50, Some(1000)))
        .unwrap();
    drop(catalog);
    let catalog = Catalog::open(vec![FoundArea::new(area())], &[]).unwrap();
    let expected: Vec<_> = (200..count + 50).map(|a| (a, 1000)).collect();
    assert_eq!(contents(&catalog), expected);
    assert_eq!(catalog.usage().get().used_bytes, (count - 150) * 1024);
    catalog.check().unwrap();
}

fn area_on(store: &Arc<MemStore>) -> Area {
    let device = forebay_xlate::types::DeviceIndex(0);
    Area::new(store.clone(), device, 0, BYTES, [1; 16]).unwrap()
}

fn try_all(file: Mirror) -> Result<()> {
    let catalog = Catalog::new(file);
    catalog.load(|_, _, _, _| Ok(()))?;
    catalog.commit(&batch(5..200, Some(700)))?;
    catalog.commit(&batch(5..150, None))
}

/// Nonsense pages under correct checksums must not panic.
#[test]
fn nonsense_under_right_checksums_is_no_panic() {
    use crate::store::{BLOCK_BYTES, BlockStore};
    let store = Arc::new(MemStore::new(BYTES as usize));
    let catalog = Catalog::create(vec![area_on(&store)]).unwrap();
    for from in (0..400).step_by(40) {
        catalog.commit(&batch(from..from + 40, Some(300))).unwrap();
    }
    let blocks = catalog.file.len() / BLOCK_BYTES as u64;
    drop(catalog);
    let mut image = vec![0; BYTES as usize];
    store.read_at(0, &mut image).unwrap();
    let mut random = fastrand::Rng::with_seed(7);
    let mut choose = |below: u64| random.u64(..below);
    let (mut refused, mut survived) = (0, 0);
    for _ in 0..400 {
        let store = Arc::new(MemStore::new(BYTES as usize));
        store.write_at(0, &image).unwrap();
        let file = Mirror::open(vec![FoundArea::new(area_on(&store))], &[]).unwrap();
        for _ in 0..=choose(3) {
            // Block 0 is as long as the header keeps.
            let block = if choose(4) == 0 { 0 } else { choose(blocks) };
            let bytes = if block == 0 { 320 } else { BLOCK_BYTES };
            let mut content = vec![0; bytes];
            file.read(block * BLOCK_BYTES as u64, &mut content).unwrap();
            match choose(3) {
                0 => content
                    .iter_mut()
                    .for_each(|byte| *byte = choose(256) as u8),
                1 => {
                    let from = choose(blocks - 1) + 1;
                    file.read(from * BLOCK_BYTES as u64, &mut content).unwrap();
                }
                _ => {
                    for _ in 0..4 {
                        content[choose(64) as usize] = choose(256) as u8;
                    }
                }
            }
            file.write(block * BLOCK_BYTES as u64, &content).unwrap();
        }
        file.sync().unwrap();
        match try_all(file) {
            Ok(()) => survived += 1,
            Err(_) => refused += 1,
        }
    }
    assert!(refused > 50 && survived > 50, "{refused} {survived}");
}

#[test]
fn a_foreign_database_is_named() {
    let store = Arc::new(MemStore::new(BYTES as usize));
    let file = Arc::new(Mirror::format(vec![area_on(&store)]).unwrap());
    let database = redb::Builder::new()
        .create_with_backend(Backend(file.clone()))
        .unwrap();
    let transaction = database.begin_write().unwrap();
    let theirs: TableDefinition<'_, u64, u64> = TableDefinition::new("theirs");
    transaction
        .open_table(theirs)
        .unwrap()
        .insert(1, 2)
        .unwrap();
    let other: TableDefinition<'_, u64, u64> = TableDefinition::new("volumes");
    transaction.open_table(other).unwrap().insert(1, 2).unwrap();
    transaction.commit().unwrap();
    drop((database, file));
    let catalog = Catalog::open(vec![FoundArea::new(area_on(&store))], &[]).unwrap();
    let error = catalog.load(|_, _, _, _| Ok(())).unwrap_err();
    assert_eq!(error.kind, ErrorKind::Damaged, "{error}");
    assert!(
        error.message.contains("does not hold a Forebay catalog"),
        "{error}"
    );
    let error = catalog.commit(&batch(0..5, Some(9))).unwrap_err();
    assert_eq!(error.kind, ErrorKind::Damaged, "{error}");
}

#[test]
fn a_catalog_of_before_there_were_budgets_is_read_and_gets_some() {
    let store = Arc::new(MemStore::new(BYTES as usize));
    let device = forebay_xlate::types::DeviceIndex(0);
    let area = Area::new(store, device, 0, BYTES, [1; 16]).unwrap();
    let catalog = Catalog::create(vec![area]).unwrap();
    catalog.commit(&batch(1..3, Some(5))).unwrap();
    let without = |table| {
        let dropped = catalog.with_database(|database| {
            let transaction = begin(database)?;
            transaction
                .delete_table(definition(table))
                .map_err(convert)?;
            transaction.commit().map_err(convert)
        });
        dropped.unwrap();
    };
    without(Table::Budgets);
    assert_eq!(contents(&catalog), [(1, 5), (2, 5)]);
    let one = Batch {
        id: BatchId(2),
        records: vec![(Key::new(Table::Budgets, 7, 0), Some(vec![7; 9]))],
    };
    catalog.commit(&one).unwrap();
    assert_eq!(contents(&catalog), [(1, 5), (2, 5), (7, 9)]);
    // All other tables are mandatory.
    without(Table::Ports);
    assert!(catalog.load(|_, _, _, _| Ok(())).is_err());
}
