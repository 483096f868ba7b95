//! SMART / Health log page and Identify Controller data of an NVMe drive.

use forebay_nvme::identify::IdentifyController;
use forebay_nvme::log_page::SmartHealth;
use zerocopy::little_endian::U128;

use super::{DriveHealth, DriveSource, text};

/// Size of the log page (NVMe Base 2.0, figure 207).
pub const LOG_BYTES: usize = size_of::<SmartHealth>();
/// Size of Identify Controller data (NVMe Base 2.0, figure 275).
pub const IDENTIFY_BYTES: usize = size_of::<IdentifyController>();

pub(super) const GET_LOG_PAGE: u8 = 0x02;
pub(super) const IDENTIFY: u8 = 0x06;
/// Dword 10 of Identify: the controller.
pub(super) const IDENTIFY_CONTROLLER: u32 = 0x01;
/// Dword 10 of Get Log Page: the page, and its dwords, 0's based.
pub(super) const SMART_LOG: u32 = 0x02 | (LOG_BYTES as u32 / 4 - 1) << 16;

const ZERO_CELSIUS_KELVIN: i32 = 273;
/// Above this, in kelvins, a temperature is an error of the firmware.
const HOT_KELVIN: i32 = 1000;

/// Interprets both pages. Any content gives a result.
#[must_use]
pub fn health(identify: &[u8; IDENTIFY_BYTES], log: &[u8; LOG_BYTES]) -> DriveHealth {
    let controller = zerocopy::transmute_ref!(identify);
    let IdentifyController { sn, mn, fr, .. } = controller;
    let log: &SmartHealth = zerocopy::transmute_ref!(log);
    let kelvin = i32::from(log.composite_temperature.get());
    let celsius = i16::try_from(kelvin - ZERO_CELSIUS_KELVIN).ok();
    DriveHealth {
        source: DriveSource::Nvme,
        model: text(mn.iter().copied()),
        serial: text(sn.iter().copied()),
        firmware: text(fr.iter().copied()),
        critical_warning: log.critical_warning,
        temperature_c: celsius.filter(|_| (1..HOT_KELVIN).contains(&kelvin)),
        spare_percent: Some(log.available_spare),
        spare_threshold_percent: Some(log.available_spare_threshold),
        used_percent: Some(log.percentage_used),
        media_errors: Some(saturated(log.media_errors)),
        power_on_hours: Some(saturated(log.power_on_hours)),
        unsafe_shutdowns: Some(saturated(log.unsafe_shutdowns)),
        reallocated_sectors: None,
        pending_sectors: None,
        uncorrectable_sectors: None,
    }
}

fn saturated(count: U128) -> u64 {
    u64::try_from(count.get()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The log page of QEMU's drive, with some numbers changed.
    fn log(changes: &[(usize, &[u8])]) -> [u8; LOG_BYTES] {
        let mut log = [0; LOG_BYTES];
        let qemu: [(usize, &[u8]); 1] = [(1, &[0x43, 0x01])];
        for (at, bytes) in qemu.iter().chain(changes) {
            log[*at..at + bytes.len()].copy_from_slice(bytes);
        }
        log
    }

    fn identity() -> [u8; IDENTIFY_BYTES] {
        let mut identity = [0; IDENTIFY_BYTES];
        for (at, bytes) in [
            (4, &b"emulated0           "[..]),
            (24, b"QEMU NVMe Ctrl                          "),
            (64, b"7.2.22  "),
        ] {
            identity[at..at + bytes.len()].copy_from_slice(bytes);
        }
        identity
    }

    #[test]
    fn the_pages_of_an_emulated_drive() {
        let health = health(&identity(), &log(&[]));
        let expected = DriveHealth {
            source: DriveSource::Nvme,
            model: "QEMU NVMe Ctrl".to_owned(),
            serial: "emulated0".to_owned(),
            firmware: "7.2.22".to_owned(),
            critical_warning: 0,
            temperature_c: Some(50),
            spare_percent: Some(0),
            spare_threshold_percent: Some(0),
            used_percent: Some(0),
            media_errors: Some(0),
            power_on_hours: Some(0),
            unsafe_shutdowns: Some(0),
            reallocated_sectors: None,
            pending_sectors: None,
            uncorrectable_sectors: None,
        };
        assert_eq!(health, expected);
    }

    #[test]
    fn a_worn_drive() {
        let log = log(&[
            (0, &[SPARE_AND_READ_ONLY]),
            (3, &[4, 10, 130]),
            (128, &[0x10, 0x27]),
            (144, &[0, 0, 0, 0, 0, 0, 0, 0, 1]),
            (160, &[9]),
        ]);
        const SPARE_AND_READ_ONLY: u8 = 0b1001;
        let health = health(&identity(), &log);
        assert_eq!(health.critical_warning, SPARE_AND_READ_ONLY);
        assert_eq!(health.spare_percent, Some(4));
        assert_eq!(health.spare_threshold_percent, Some(10));
        assert_eq!(health.used_percent, Some(130));
        assert_eq!(health.power_on_hours, Some(10_000));
        assert_eq!(health.unsafe_shutdowns, Some(u64::MAX));
        assert_eq!(health.media_errors, Some(9));
    }

    #[test]
    fn a_temperature_that_is_not_reported_is_left_out() {
        let celsius = |kelvin: u16| {
            let log = log(&[(1, &kelvin.to_le_bytes())]);
            health(&identity(), &log).temperature_c
        };
        assert_eq!(celsius(0), None);
        assert_eq!(celsius(1), Some(-272));
        assert_eq!(celsius(358), Some(85));
        assert_eq!(celsius(u16::MAX), None);
    }

    proptest! {
        #[test]
        fn any_pages_have_a_bounded_answer(
            names in any::<[u8; 32]>(),
            log in proptest::collection::vec(any::<u8>(), LOG_BYTES),
        ) {
            let mut identity = identity();
            identity[4..36].copy_from_slice(&names);
            let health = health(&identity, log.as_slice().try_into().unwrap());
            prop_assert!(health.serial.len() <= 20);
            prop_assert!(health.model.bytes().all(|byte| (b' '..=b'~').contains(&byte)));
            prop_assert_eq!(health.critical_warning, log[0]);
        }
    }
}
