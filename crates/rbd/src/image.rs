//! Images as values: their options, properties and snapshots.

/// Bits of an image's features.
pub mod feature {
    /// It can be a clone, or have clones.
    pub const LAYERING: u64 = 1 << 0;
    /// It is striped over objects.
    pub const STRIPING: u64 = 1 << 1;
    /// One client at a time writes.
    pub const EXCLUSIVE_LOCK: u64 = 1 << 2;
    /// A bitmap of existing objects; needs [`EXCLUSIVE_LOCK`].
    pub const OBJECT_MAP: u64 = 1 << 3;
    /// Differences from the object map; needs [`OBJECT_MAP`].
    pub const FAST_DIFF: u64 = 1 << 4;
    /// Flattening includes snapshots.
    pub const DEEP_FLATTEN: u64 = 1 << 5;
    /// Its data is in another pool.
    pub const DATA_POOL: u64 = 1 << 7;
}

/// How an image or a clone is created. Each `None` leaves the choice to the cluster.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ImageOptions {
    /// Bits of [`feature`].
    pub features: Option<u64>,
    /// The size of its objects as a power of two: 22 is 4 MiB.
    pub order: Option<u8>,
    /// Bytes of a stripe, and the number of objects that a stripe spans.
    pub stripe: Option<(u64, u64)>,
    /// The pool of its data.
    pub data_pool: Option<String>,
}

/// The part of an image to open, and the access to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OpenMode<'a> {
    /// The image, for reading and writing.
    ReadWrite,
    /// The image, for reading.
    ReadOnly,
    /// The snapshot of this name, for reading.
    Snapshot(&'a str),
}

/// An open image's properties.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImageInfo {
    /// Its id, which a new name does not change.
    pub id: String,
    /// Its size, or that of the open snapshot.
    pub size_bytes: u64,
    /// The size of its objects.
    pub object_bytes: u64,
    /// Bits of [`feature`].
    pub features: u64,
    /// Its parent if it is a clone that was not flattened.
    pub parent: Option<ParentImage>,
}

/// The snapshot that an image is a clone of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParentImage {
    /// The pool.
    pub pool: String,
    /// The namespace; empty for the default one.
    pub namespace: String,
    /// The image.
    pub image: String,
    /// The image's snapshot.
    pub snapshot: String,
}

/// A snapshot of an image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Snapshot {
    /// Its id.
    pub id: u64,
    /// Its name.
    pub name: String,
    /// The image's size when it was taken.
    pub size_bytes: u64,
    /// Whether it is protected from removal.
    pub protected: bool,
}
