//! Opening a pool from the devices present.
//!
//! Labels identify devices and locate the catalog areas; the best copy of the catalog lists the
//! devices. One good copy suffices; missing devices are reported. Contradictions (two pools, one
//! device twice) are errors; damage is repaired and reported.

pub(crate) mod add;
pub(crate) mod create;
pub(crate) mod load;
pub(crate) mod stamp;

use crate::{
    catalog::Catalog,
    error::{PoolError, Result},
    extents::DeviceHealth,
    journal::batch::Table,
    label::{Label, LabelFormat},
    mirror::FoundArea,
    mirror::lineage::Epoch,
    pool::Pool,
    records::DeviceRecord,
    store::BlockStore,
};
use create::areas_of;
use forebay_xlate::types::DeviceIndex;
use load::load;
use std::sync::Arc;
use uuid::Uuid;

/// A device that may belong to a pool.
#[derive(Clone)]
pub struct OpenDevice {
    /// Where it is, for example `file:/path`.
    pub spec: String,
    /// Its content.
    pub store: Arc<dyn BlockStore>,
    /// Take it even if it is outdated.
    pub forced: bool,
}

/// A missing device of the pool.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct MissingDevice {
    /// Its index in the pool.
    pub index: DeviceIndex,
    /// Its identity, as its label says.
    pub uuid: Uuid,
    /// Where it was last found.
    pub spec: String,
    /// Why it is not used, if present.
    pub why: Option<String>,
}

/// An opened pool.
#[derive(Debug)]
pub struct Opened {
    /// The pool. Next, adopt its grants ([`Pool::adopt_grant`], [`Pool::finish_adoption`]).
    pub pool: Pool,
    /// Its catalog.
    pub catalog: Catalog,
    /// The index of each given device; `None` if it is not part of the pool, as a note explains.
    pub indexes: Vec<Option<DeviceIndex>>,
    /// The missing devices.
    pub missing: Vec<MissingDevice>,
    /// Findings and repairs.
    pub notes: Vec<String>,
}

/// `at` is its position among the given devices.
struct Labelled<'a> {
    at: usize,
    label: Label,
    device: &'a OpenDevice,
}

/// Opens the pool of these devices, in any order.
pub fn open(devices: &[OpenDevice]) -> Result<Opened> {
    let mut notes = Vec::new();
    let labelled = read_labels(devices, &mut notes)?;
    refuse_mixtures(&labelled)?;
    let found = areas_to_trust(&labelled)?;
    let name = &labelled[0].label.pool_name;
    let given: Vec<(String, Epoch)> = labelled
        .iter()
        .map(|one| (one.device.spec.clone(), one.label.epoch))
        .collect();
    let catalog = Catalog::open(found, &given).map_err(|error| {
        PoolError::new(
            error.kind,
            format!(
                "pool {name:?}, of which {} devices are present: {}",
                labelled.len(),
                error.message
            ),
        )
    })?;
    let mut pool = load(&catalog, |record| match find(&labelled, record) {
        Some(one) => agrees(one, record),
        None => Ok(()),
    })?;
    refuse_older_catalog(&labelled, &catalog, pool.info.opens)?;
    let Matched { indexes, missing } =
        Matched::find(&labelled, devices.len(), &mut pool, &mut notes)?;
    let newest = labelled.iter().map(|one| one.label.number).max();
    pool.info.opens = pool.info.opens.max(newest.unwrap_or(0));
    let mut areas = Vec::new();
    for one in labelled.iter().filter(|one| indexes[one.at].is_some()) {
        areas.extend(areas_of(&one.label, &one.device.store)?);
        match Label::read_and_repair(one.device.store.as_ref()) {
            Ok((_, false)) => {}
            Ok((label, true)) => catalog.note_repaired_label(label.device_index),
            Err(error) => notes.push(format!(
                "the label on {} can't be repaired: {error}",
                one.device.spec
            )),
        }
        catalog.add_label(one.label.device_uuid, &one.device.store);
    }
    if let Err(error) = catalog.settle(&areas) {
        notes.push(format!("the catalog has no second copy: {error}"));
    }
    notes.extend(catalog.health().notes);
    pool.begin_opening();
    Ok(Opened {
        pool,
        catalog,
        indexes,
        missing,
        notes,
    })
}

/// The catalog areas of devices that took part in the last start or stop. Others join once the
/// catalog allows it.
fn areas_to_trust(labelled: &[Labelled<'_>]) -> Result<Vec<FoundArea>> {
    let newest = labelled.iter().map(|one| one.label.number).max();
    let is_behind = |one: &&Labelled<'_>| {
        one.label.format == LabelFormat::Current && Some(one.label.number) < newest
    };
    let found_on = |devices: &mut dyn Iterator<Item = &Labelled<'_>>| -> Result<Vec<FoundArea>> {
        let mut found = Vec::new();
        for one in devices {
            let areas = areas_of(&one.label, &one.device.store)?;
            found.extend(areas.into_iter().map(FoundArea::new));
        }
        Ok(found)
    };
    let found = found_on(&mut labelled.iter().filter(|one| !is_behind(one)))?;
    if found.iter().any(FoundArea::is_copy) {
        return Ok(found);
    }
    found_on(&mut labelled.iter())
}

/// Refuses a catalog older than a label, unless its devices are forced.
fn refuse_older_catalog(labelled: &[Labelled<'_>], catalog: &Catalog, number: u64) -> Result<()> {
    let Some(newest) = labelled.iter().max_by_key(|one| one.label.number) else {
        return Ok(());
    };
    if newest.label.number <= number {
        return Ok(());
    }
    let copies = catalog.health().copies;
    let holders = labelled.iter().filter(|one| {
        let index = one.label.device_index;
        copies.iter().any(|copy| copy.device == index)
    });
    let (forced, left): (Vec<_>, Vec<_>) = holders.partition(|one| one.device.forced);
    if left.is_empty() && !forced.is_empty() {
        return Ok(());
    }
    let left: Vec<&str> = left.iter().map(|one| one.device.spec.as_str()).collect();
    Err(PoolError::damaged(format!(
        "the pool's catalog on {} is from start {}, but {} took part in start {}: the device that holds the catalog \
         is an older copy. Bring the right one back",
        left.join(" and "),
        number,
        newest.device.spec,
        newest.label.number
    )))
}

/// Fails if no label can be read.
fn read_labels<'a>(
    devices: &'a [OpenDevice],
    notes: &mut Vec<String>,
) -> Result<Vec<Labelled<'a>>> {
    let mut labelled = Vec::with_capacity(devices.len());
    let mut first_error = None;
    for (at, device) in devices.iter().enumerate() {
        match Label::read(device.store.as_ref()) {
            Ok(label) => labelled.push(Labelled { at, label, device }),
            Err(error) => {
                let message = format!("{}: {}", device.spec, error.message);
                notes.push(message.clone());
                first_error = first_error.or(Some(PoolError::new(error.kind, message)));
            }
        }
    }
    match first_error {
        Some(error) if labelled.is_empty() => Err(error),
        _ if labelled.is_empty() => Err(PoolError::invalid("a pool has at least one device")),
        _ => Ok(labelled),
    }
}

fn refuse_mixtures(labelled: &[Labelled<'_>]) -> Result<()> {
    let Some((first, others)) = labelled.split_first() else {
        return Ok(());
    };
    for other in others {
        let (one, two) = (&first.label, &other.label);
        if one.pool_uuid != two.pool_uuid {
            return Err(PoolError::invalid(format!(
                "{} belongs to pool {:?} ({}), {} to pool {:?} ({}): open one pool at a time",
                first.device.spec,
                one.pool_name,
                one.pool_uuid,
                other.device.spec,
                two.pool_name,
                two.pool_uuid
            )));
        }
    }
    for (at, one) in labelled.iter().enumerate() {
        let twin = labelled[at + 1..]
            .iter()
            .find(|two| two.label.device_uuid == one.label.device_uuid);
        if let Some(twin) = twin {
            return Err(PoolError::invalid(format!(
                "{} and {} are the same device of the pool, or one is a copy of the other: give only one of them",
                one.device.spec, twin.device.spec
            )));
        }
    }
    Ok(())
}

fn find<'a, 'b>(labelled: &'b [Labelled<'a>], record: &DeviceRecord) -> Option<&'b Labelled<'a>> {
    labelled
        .iter()
        .find(|one| one.label.device_uuid == record.uuid)
}

/// Whether a device's record and label agree.
fn agrees(one: &Labelled<'_>, record: &DeviceRecord) -> Result<()> {
    let label = &one.label;
    if label.device_index == record.index
        && label.data_offset_bytes == record.data_offset_bytes
        && label.data_extents == record.extents
    {
        return Ok(());
    }
    Err(PoolError::damaged(format!(
        "{} and the pool's catalog disagree about the device",
        one.device.spec
    )))
}

fn older_copy(spec: &str, number: u64, known: u64) -> String {
    format!(
        "{spec} is an older copy of the device: its label has number {number}, but the pool's catalog has number \
        {known}"
    )
}

/// The given devices' indexes, and the missing devices.
struct Matched {
    indexes: Vec<Option<DeviceIndex>>,
    missing: Vec<MissingDevice>,
}

impl Matched {
    /// Matches devices with records.
    fn find(
        labelled: &[Labelled<'_>],
        given: usize,
        pool: &mut Pool,
        notes: &mut Vec<String>,
    ) -> Result<Self> {
        let mut indexes = vec![None; given];
        let mut missing = Vec::new();
        for record in pool.devices().to_vec() {
            let Some(one) = find(labelled, &record) else {
                pool.set_device_health(record.index, DeviceHealth::Missing)?;
                missing.push(MissingDevice {
                    index: record.index,
                    uuid: record.uuid,
                    spec: record.spec,
                    why: None,
                });
                continue;
            };
            let known = pool.device_numbers.get(&record.index).copied().unwrap_or(0);
            let number = one.label.number;
            let is_older = one.label.format == LabelFormat::Current && number < known;
            if is_older && !one.device.forced {
                pool.set_device_health(record.index, DeviceHealth::Missing)?;
                notes.push(older_copy(&one.device.spec, number, known));
                missing.push(MissingDevice {
                    index: record.index,
                    uuid: record.uuid,
                    why: Some(older_copy(&one.device.spec, number, known)),
                    spec: record.spec,
                });
                continue;
            }
            if is_older || number > pool.info.opens {
                notes.push(format!(
                "{} is accepted although its number {number} is not the catalog's {}: its unmapped extents are \
                 zero-filled before their next use, and data that volumes map may be outdated",
                one.device.spec,
                known.max(pool.info.opens)
            ));
                // They may hold deleted data.
                let (allocator, journal) = (&mut pool.allocator, &mut pool.journal);
                allocator.free_all(journal, &pool.volumes.take_spare_on(record.index));
                allocator.distrust_clean(journal, record.index);
            }
            if one.label.extent_bytes != pool.info().extent_bytes {
                return Err(PoolError::damaged(format!(
                    "{} and the pool's catalog disagree about the size of extents",
                    one.device.spec
                )));
            }
            if record.spec != one.device.spec {
                notes.push(format!(
                    "{} was at {} and is now at {}",
                    record.index, record.spec, one.device.spec
                ));
                let index = record.index;
                if let Some(record) = pool.devices.get_mut(usize::from(index.0)) {
                    record.spec = one.device.spec.clone();
                    pool.journal.touch(Table::Devices, u64::from(index.0), 0);
                }
            }
            indexes[one.at] = Some(record.index);
        }
        let is_known = |one: &&Labelled<'_>| {
            let uuid = one.label.device_uuid;
            pool.devices().iter().any(|record| record.uuid == uuid)
        };
        for one in labelled.iter().filter(|one| !is_known(one)) {
            notes.push(format!(
            "{} has the label of pool {:?}, but the pool does not know it: adding it did not finish. It is left \
             unchanged; you can add it again",
            one.device.spec, one.label.pool_name
        ));
        }
        Ok(Self { indexes, missing })
    }
}
