//! A wrapper that rejects the quick ways of zeroing and punching, as a real device would, to test
//! the slow ones.

use std::sync::Arc;

use rustix::io::Errno;

use crate::device::Device;
use crate::fence::Fence;
use crate::kind::Backend;
use crate::op::{Finish, Op, OpKind, Submitted};
use crate::ring::{Ring, RingIo};

#[derive(Debug)]
struct Plain(Arc<dyn Backend>);

pub(super) fn without_fallocate(device: &Device) -> Device {
    let below = device.backend.clone();
    Device::over(device.info().clone(), Arc::new(Plain(below)))
}

impl Backend for Plain {
    fn submit(&self, ring: &mut Ring, op: &mut Op, user_data: u64) -> Submitted {
        if matches!(op.kind, OpKind::WriteZeroes | OpKind::Punch)
            && let Some(RingIo::Fallocate { .. }) = self.0.request(op)
        {
            let unknown = Errno::OPNOTSUPP.raw_os_error().saturating_neg();
            let answer = ring.answer(unknown, user_data);
            return ring.push_request(&answer).into();
        }
        self.0.submit(ring, op, user_data)
    }

    fn finish(&self, op: Op, result: i32) -> Finish {
        self.0.finish(op, result)
    }

    fn is_native(&self) -> bool {
        self.0.is_native()
    }

    fn fence(&self) -> &dyn Fence {
        self.0.fence()
    }
}
