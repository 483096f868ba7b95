//! What one catalog transaction writes.
//!
//! **Design.** A batch is a set of records by key, each with its final value or none, so that
//! applying it twice is the same as once. Batches are numbered and must be committed in order.
//! **Not here:** how records are encoded (`codec`, `records`), or written (`catalog`).

/// A batch's number; they are committed in this order.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct BatchId(pub u64);

/// The catalog's tables. The numbers order a batch, and are not stored.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum Table {
    /// The pool's own record, at (0, 0).
    Meta,
    /// (tenant, 0).
    Tenants,
    /// (volume, 0).
    Volumes,
    /// (export, 0).
    Exports,
    /// (port's number, 0).
    Ports,
    /// (volume, 0): what hosts have reserved.
    HostReservations,
    /// (tenant or volume, 0 or 1): what it may use. A catalog of a version that knows no budgets has no such table.
    Budgets,
    /// (tenant or volume, 0 or 1): which parts of its budget were stated. Earlier versions know no such table.
    StatedBudgets,
    /// (device, 0).
    Devices,
    /// (device, 0): the number in its label. A catalog of a version that knows no numbers has no such table.
    DeviceNumbers,
    /// (device, chunk of extents).
    States,
    /// (device, chunk of extents).
    Reservations,
    /// (volume, chunk of logical extents).
    Maps,
}

impl Table {
    pub(crate) const ALL: [Table; 13] = [
        Table::Meta,
        Table::Tenants,
        Table::Volumes,
        Table::Exports,
        Table::Ports,
        Table::HostReservations,
        Table::Budgets,
        Table::StatedBudgets,
        Table::Devices,
        Table::DeviceNumbers,
        Table::States,
        Table::Reservations,
        Table::Maps,
    ];

    /// The table's name in the database.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Table::Meta => "meta",
            Table::Tenants => "tenants",
            Table::Volumes => "volumes",
            Table::Exports => "exports",
            Table::Ports => "ports",
            Table::HostReservations => "host_reservations",
            Table::Budgets => "budgets",
            Table::StatedBudgets => "stated_budgets",
            Table::Devices => "devices",
            Table::DeviceNumbers => "device_numbers",
            Table::States => "states",
            Table::Reservations => "reservations",
            Table::Maps => "maps",
        }
    }
}

/// Where a record is.
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

/// One transaction's worth of records.
#[derive(Clone, Debug)]
pub struct Batch {
    pub(crate) id: BatchId,
    pub(crate) records: Vec<(Key, Option<Vec<u8>>)>,
}

impl Batch {
    /// Its number.
    pub fn id(&self) -> BatchId {
        self.id
    }

    /// How many records it writes or removes.
    pub fn records(&self) -> usize {
        self.records.len()
    }
}
