//! One catalog transaction: records by key, each with its final value or none, so applying it twice
//! is harmless.

/// A batch's number; batches commit in this order.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct BatchId(pub u64);

/// Catalog tables. Their numbers order a batch and are not stored.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum Table {
    /// (class, bit): a feature's name, as UTF-8. Missing in earlier versions.
    Features,
    /// (0, 0): the pool's own record.
    Meta,
    /// (tenant, 0).
    Tenants,
    /// (volume, 0).
    Volumes,
    /// (layer, 0). Missing in earlier versions.
    Layers,
    /// (volume, 0): its RBD image. Missing in earlier versions.
    Images,
    /// (device, 0): a RADOS client. Missing in earlier versions.
    Clients,
    /// (export, 0).
    Exports,
    /// (function, 0): its export. Missing in earlier versions.
    Functions,
    /// (port's number, 0).
    Ports,
    /// (volume, 0): hosts' reservations.
    HostReservations,
    /// (tenant or volume, 0 or 1): budgets. Missing in earlier versions.
    Budgets,
    /// (tenant or volume, 0 or 1): stated values. Missing in earlier versions.
    StatedBudgets,
    /// (device, 0).
    Devices,
    /// (device, 0): its label's number. Missing in earlier versions.
    DeviceNumbers,
    /// (device, chunk of extents).
    States,
    /// (device, chunk of extents).
    Reservations,
    /// (map, chunk of logical extents).
    Maps,
    /// (map, chunk of logical extents): extents that hide those of layers below. Missing in earlier
    /// versions.
    Hidden,
}

impl Table {
    pub(crate) const ALL: [Table; 19] = [
        Table::Features,
        Table::Meta,
        Table::Tenants,
        Table::Volumes,
        Table::Layers,
        Table::Images,
        Table::Clients,
        Table::Exports,
        Table::Functions,
        Table::Ports,
        Table::HostReservations,
        Table::Budgets,
        Table::StatedBudgets,
        Table::Devices,
        Table::DeviceNumbers,
        Table::States,
        Table::Reservations,
        Table::Maps,
        Table::Hidden,
    ];

    pub(crate) const fn name(self) -> &'static str {
        match self {
            Table::Features => "features",
            Table::Meta => "meta",
            Table::Tenants => "tenants",
            Table::Volumes => "volumes",
            Table::Layers => "layers",
            Table::Images => "images",
            Table::Clients => "clients",
            Table::Exports => "exports",
            Table::Functions => "functions",
            Table::Ports => "ports",
            Table::HostReservations => "host_reservations",
            Table::Budgets => "budgets",
            Table::StatedBudgets => "stated_budgets",
            Table::Devices => "devices",
            Table::DeviceNumbers => "device_numbers",
            Table::States => "states",
            Table::Reservations => "reservations",
            Table::Maps => "maps",
            Table::Hidden => "hidden",
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct Key {
    pub(crate) table: Table,
    pub(crate) a: u64,
    pub(crate) b: u64,
}

impl Key {
    pub(crate) const fn new(table: Table, a: u64, b: u64) -> Self {
        Self { table, a, b }
    }
}

/// The records of one transaction.
#[derive(Clone, Debug)]
pub struct Batch {
    pub(crate) id: BatchId,
    pub(crate) records: Vec<(Key, Option<Vec<u8>>)>,
}

impl Batch {
    /// The batch's number.
    pub fn id(&self) -> BatchId {
        self.id
    }

    /// The number of records it writes or removes.
    pub fn records(&self) -> usize {
        self.records.len()
    }
}
