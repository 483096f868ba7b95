//! Which reactor serves what of a tenant's queues.
//!
//! **Design.** `one-to-one`: a queue is one reactor's, for good. `stealing`: the same, and who is idle takes from the longest
//! queue. `one-to-n`: each I/O goes to whoever has the least before it; in the engine, of those that have no queue of their own
//! to serve.
//! **Not here:** the order rules of NVMe and virtio, which need a volume's home ([`Spread::home`] is it).

use serde::{Deserialize, Serialize};

/// See the module's text.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Hash, Serialize, Deserialize)]
pub enum Spread {
    /// A queue is one reactor's.
    OneToOne,
    /// And who is idle helps.
    Stealing,
    /// All serve all.
    #[default]
    OneToN,
}

impl Spread {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::OneToOne, Self::Stealing, Self::OneToN];

    /// Its name in a setting.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::OneToOne => "one-to-one",
            Self::Stealing => "stealing",
            Self::OneToN => "one-to-n",
        }
    }

    /// The reactor whose a lane is, of so many: with one-to-n, the one where what needs an order meets.
    #[must_use]
    pub const fn home(self, lane: usize, reactors: usize) -> usize {
        if reactors == 0 { 0 } else { lane % reactors }
    }
}
