//! Interrupts: masked, pending and raised vectors. Masks and pending bits are in the VM file,
//! the function mask is here.

use super::record::CommandRecords;
use super::slot;
use crate::frontend::vm::client::Client;
use crate::frontend::vm::descriptor;
use crate::frontend::vm::protocol::DepositedFd;
use forebay_nvme::pcie::VECTORS;
use forebay_vfio_user::wire::pci_irq;
use forebay_vfio_user::{Device, Errno, IrqAction, IrqData, SetIrqs};

fn slot_of(index: u32, number: u32) -> Option<usize> {
    match index {
        pci_irq::MSIX => u16::try_from(number).ok().map(slot::vector),
        pci_irq::ERR => Some(slot::ERR),
        pci_irq::REQ => Some(slot::REQ),
        _ => None,
    }
}

#[derive(Default)]
pub(super) struct Vectors {
    pub masks_all: bool,
}

impl Vectors {
    #[inline]
    pub(super) fn raise(&self, records: &CommandRecords, client: &mut Client, vector: u16) {
        if self.masks_all || records.is_masked(vector) {
            records.set_pending(vector, true);
        } else {
            client.raise(slot::vector(vector));
        }
    }

    /// Raises pending vectors that are no longer masked.
    pub(super) fn raise_pending(&self, records: &CommandRecords, client: &mut Client) {
        let pending = records.pending();
        for vector in 0..VECTORS {
            if pending[usize::from(vector / 64)] & 1 << (vector % 64) != 0 {
                records.set_pending(vector, false);
                self.raise(records, client, vector);
            }
        }
    }

    /// Carries out VFIO_USER_DEVICE_SET_IRQS.
    pub(super) fn set(
        &self,
        records: &CommandRecords,
        device: &Device,
        client: &mut Client,
        may_raise: bool,
        irqs: &SetIrqs<'_>,
        descriptors: &[DepositedFd],
    ) -> Result<(), Errno> {
        let (index, start) = (irqs.index, irqs.start);
        if irqs.count == 0 {
            let count = device.irqs.get(index as usize);
            for number in 0..count.map_or(0, |irq| irq.count) {
                if let Some(slot) = slot_of(index, number) {
                    client.hold(slot, None);
                }
            }
            return Ok(());
        }
        if let IrqData::Eventfd(true) = irqs.data {
            if !descriptors.iter().all(|d| descriptor::is_eventfd(&*d.fd)) {
                return Err(Errno::EINVAL);
            }
            for (number, deposit) in (start..).zip(descriptors) {
                if let Some(slot) = slot_of(index, number) {
                    client.hold(slot, Some(deposit));
                }
            }
            return Ok(());
        }
        for (at, number) in (start..start + irqs.count).enumerate() {
            let Some(slot) = slot_of(index, number) else {
                continue;
            };
            let chosen = match irqs.data {
                IrqData::None => true,
                IrqData::Bool(bools) => bools.get(at).is_some_and(|b| *b != 0),
                IrqData::Eventfd(_) => {
                    client.hold(slot, None);
                    continue;
                }
            };
            if !chosen {
                continue;
            }
            // Only vectors can be masked.
            let vector = number as u16;
            match irqs.action {
                IrqAction::Trigger => client.raise(slot),
                IrqAction::Mask => records.set_masked(vector, true),
                IrqAction::Unmask => {
                    records.set_masked(vector, false);
                    if may_raise {
                        self.raise_pending(records, client);
                    }
                }
            }
        }
        Ok(())
    }
}
