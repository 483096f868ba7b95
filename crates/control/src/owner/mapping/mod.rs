//! The owner of the maps of the pool's volumes.
//!
//! Purpose: answers the engine's faults, deallocations and commits for the volumes of one pool.
//! Design: each part owns one duty and holds the parts that it needs: faults stand on revokes and zero-fill, revokes on
//! flushes.
//! Not here: other owners of maps.

pub(crate) mod adopt;
pub(crate) mod evict;
pub(crate) mod fault;
pub(crate) mod flush;
pub(crate) mod locks;
pub(crate) mod preallocated;
pub(crate) mod release;
pub(crate) mod revoke;
pub(crate) mod tell;
pub(crate) mod zero_fill;

use std::rc::Rc;

use forebay_xlate::ExtentRange;

use crate::owner::base::Base;
use crate::owner::link::Link;
use crate::owner::mapping::adopt::{Adopter, Adoption};
use crate::owner::mapping::fault::Faults;
use crate::owner::mapping::flush::Flusher;
use crate::owner::mapping::release::Releaser;
use crate::owner::mapping::revoke::Revoker;
use crate::owner::mapping::zero_fill::ZeroFill;
use crate::owner::states::DeviceStates;

/// See the module's text.
#[derive(Debug)]
pub(crate) struct PoolOwner {
    pub(crate) flusher: Rc<Flusher>,
    pub(crate) revoker: Rc<Revoker>,
    pub(crate) releaser: Rc<Releaser>,
    pub(crate) zero_fill: Rc<ZeroFill>,
    pub(crate) adopter: Rc<Adopter>,
    pub(crate) faults: Rc<Faults>,
}

impl PoolOwner {
    pub(crate) fn new(
        base: &Rc<Base>,
        link: &Rc<Link>,
        states: &Rc<DeviceStates>,
        adoption: &Rc<Adoption>,
    ) -> Rc<Self> {
        let flusher = Flusher::new(base, link, states, adoption);
        let revoker = Revoker::new(base, link, states, &flusher);
        let zero_fill = ZeroFill::new(base, link, states, adoption);
        Rc::new(Self {
            releaser: Releaser::new(base, link, &revoker),
            adopter: Adopter::new(base, &flusher, &revoker, adoption),
            faults: Faults::new(base, link, &revoker, &zero_fill),
            flusher,
            revoker,
            zero_fill,
        })
    }
}

/// All of a volume's extents, grown or not.
pub(crate) const ALL_EXTENTS: ExtentRange = ExtentRange::new(0, u64::MAX);
