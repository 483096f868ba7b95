//! IDENTIFY DEVICE data and SMART pages of a SATA drive.
//!
//! ACS-3 defines commands and checksums, and calls the attributes vendor specific. Their layout,
//! and the meaning of the numbers used here, is what makers have in common, and smartmontools
//! (`atacmds.cpp`) reads.

use super::{DriveHealth, DriveSource, RELIABILITY, TEMPERATURE, text};

/// Size of each page.
pub const PAGE_BYTES: usize = 512;

/// A command that reads one page (ACS-3, 7.12 and 7.48).
#[derive(Debug, Clone, Copy)]
pub(super) struct ReadCommand {
    pub(super) name: &'static str,
    pub(super) command: u8,
    pub(super) feature: u8,
    /// LBA bits 7:0, 15:8 and 23:16.
    pub(super) lba: [u8; 3],
}

pub(super) const IDENTIFY_DEVICE: ReadCommand = ReadCommand {
    name: "IDENTIFY DEVICE",
    command: 0xEC,
    feature: 0,
    lba: [0; 3],
};
pub(super) const SMART_READ_DATA: ReadCommand = ReadCommand {
    name: "SMART READ DATA",
    command: 0xB0,
    feature: 0xD0,
    lba: [0, 0x4F, 0xC2],
};
/// Obsolete since ATA-4, and still answered.
pub(super) const SMART_READ_THRESHOLDS: ReadCommand = ReadCommand {
    name: "SMART READ THRESHOLDS",
    command: 0xB0,
    feature: 0xD1,
    lba: [1, 0x4F, 0xC2],
};

const ATTRIBUTES: usize = 30;
const ATTRIBUTES_AT: usize = 2;
const ATTRIBUTE_BYTES: usize = 12;
/// Flag: at its threshold, the drive is about to fail.
const PRE_FAILURE: u8 = 1 << 0;

const REALLOCATED: u8 = 5;
const POWER_ON_HOURS: u8 = 9;
const REPORTED_UNCORRECTABLE: u8 = 187;
const AIRFLOW_TEMPERATURE: u8 = 190;
const DRIVE_TEMPERATURE: u8 = 194;
const PENDING: u8 = 197;
const OFFLINE_UNCORRECTABLE: u8 = 198;
/// Life left of SSDs, in their makers' numbers. Hard disks use the numbers for other things.
const LIFE_LEFT: [u8; 3] = [231, 233, 202];

/// Whether the drive has SMART, and it is enabled (ACS-3, 7.12.7, words 82 and 85).
pub(super) fn check_identity(identify: &[u8; PAGE_BYTES]) -> Result<(), String> {
    // Words of drives without these words are 0 or FFFFh.
    let has_bit = |word: u16| word & 1 != 0 && word != u16::MAX;
    if !has_bit(word(identify, 82)) {
        return Err("it has no SMART".to_owned());
    }
    if !has_bit(word(identify, 85)) {
        return Err("SMART is disabled; `smartctl --smart=on` enables it".to_owned());
    }
    Ok(())
}

/// Interprets the pages.
///
/// # Errors
/// A page with a wrong checksum.
pub fn health(
    identify: &[u8; PAGE_BYTES],
    data: &[u8; PAGE_BYTES],
    thresholds: &[u8; PAGE_BYTES],
) -> Result<DriveHealth, String> {
    for (page, name) in [(data, "attributes"), (thresholds, "thresholds")] {
        if page.iter().fold(0, |sum: u8, byte| sum.wrapping_add(*byte)) != 0 {
            return Err(format!("its page of SMART {name} has a wrong checksum"));
        }
    }
    let find = |id: u8| attributes(data).find(|attribute| attribute.id == id);
    let count = |id: u8| find(id).map(|attribute| attribute.raw);
    // Word 217 (ACS-3, 7.12.7.83): 1 is a drive that does not rotate.
    let is_ssd = word(identify, 217) == 1;
    let life = LIFE_LEFT.iter().filter(|_| is_ssd).find_map(|id| find(*id));
    let temperature = find(DRIVE_TEMPERATURE).or_else(|| find(AIRFLOW_TEMPERATURE));
    Ok(DriveHealth {
        source: DriveSource::Ata,
        model: words_text(identify, 27, 20),
        serial: words_text(identify, 10, 10),
        firmware: words_text(identify, 23, 4),
        critical_warning: critical_warning(data, thresholds),
        temperature_c: temperature.and_then(|attribute| celsius(attribute.raw)),
        spare_percent: None,
        spare_threshold_percent: None,
        used_percent: life.map(|attribute| 100_u8.saturating_sub(attribute.value)),
        media_errors: count(REPORTED_UNCORRECTABLE),
        // Some drives keep minutes or milliseconds above, and other counts.
        power_on_hours: count(POWER_ON_HOURS).map(|raw| raw & 0xFF_FFFF),
        unsafe_shutdowns: None,
        reallocated_sectors: count(REALLOCATED).map(|raw| raw & 0xFFFF),
        pending_sectors: count(PENDING),
        uncorrectable_sectors: count(OFFLINE_UNCORRECTABLE),
    })
}

#[derive(Debug, Clone, Copy)]
struct Attribute {
    id: u8,
    flags: u8,
    /// Normalized: less is worse.
    value: u8,
    /// 48 bits.
    raw: u64,
}

fn entries(page: &[u8; PAGE_BYTES]) -> impl Iterator<Item = &[u8; ATTRIBUTE_BYTES]> {
    let (entries, _) = page[ATTRIBUTES_AT..].as_chunks();
    entries
        .iter()
        .take(ATTRIBUTES)
        .filter(|entry| entry[0] != 0)
}

fn attributes(data: &[u8; PAGE_BYTES]) -> impl Iterator<Item = Attribute> {
    entries(data).map(|entry| {
        let [id, flags, _, value, _, a, b, c, d, e, f, _] = *entry;
        Attribute {
            id,
            flags,
            value,
            raw: u64::from_le_bytes([a, b, c, d, e, f, 0, 0]),
        }
    })
}

/// The bits for attributes that have reached their thresholds.
fn critical_warning(data: &[u8; PAGE_BYTES], thresholds: &[u8; PAGE_BYTES]) -> u8 {
    let threshold_of = |id: u8| {
        let found = entries(thresholds).find(|entry| entry[0] == id);
        found.map_or(0, |entry| entry[1])
    };
    let mut bits = 0;
    for Attribute {
        id, flags, value, ..
    } in attributes(data)
    {
        // 0 never warns; 254 and 255, and values of 0, are not valid.
        let threshold = threshold_of(id);
        if !(1..0xFE).contains(&threshold) || value == 0 || value > threshold {
            continue;
        }
        if [DRIVE_TEMPERATURE, AIRFLOW_TEMPERATURE].contains(&id) {
            bits |= TEMPERATURE;
        } else if flags & PRE_FAILURE != 0 {
            bits |= RELIABILITY;
        }
    }
    bits
}

/// The lowest byte is the temperature; the others are often its extremes.
fn celsius(raw: u64) -> Option<i16> {
    let celsius = i16::from(raw.to_le_bytes()[0].cast_signed());
    (-40..=125).contains(&celsius).then_some(celsius)
}

fn word(identify: &[u8; PAGE_BYTES], at: usize) -> u16 {
    let (words, _) = identify.as_chunks();
    words.get(at).map_or(0, |word| u16::from_le_bytes(*word))
}

/// The first character is in the upper byte of a word.
fn words_text(identify: &[u8; PAGE_BYTES], at: usize, count: usize) -> String {
    text((at..at + count).flat_map(|at| word(identify, at).to_be_bytes()))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// IDENTIFY DEVICE data with SMART; `rotation` is word 217.
    fn identity(rotation: u16) -> [u8; PAGE_BYTES] {
        let mut page = [0; PAGE_BYTES];
        for (at, bytes) in [
            (20, &b"MQ0000 1            "[..]),
            (46, b".2+5    "),
            (54, b"EQUMH RADDSI K                          "),
        ] {
            page[at..at + bytes.len()].copy_from_slice(bytes);
        }
        for (word, value) in [(82, 0x4021_u16), (85, 0x4021), (217, rotation)] {
            page[word * 2..word * 2 + 2].copy_from_slice(&value.to_le_bytes());
        }
        page
    }

    fn page(entries: &[[u8; ATTRIBUTE_BYTES]]) -> [u8; PAGE_BYTES] {
        let mut page = [0; PAGE_BYTES];
        page[0] = 1;
        for (at, entry) in entries.iter().enumerate() {
            let at = ATTRIBUTES_AT + at * ATTRIBUTE_BYTES;
            page[at..at + ATTRIBUTE_BYTES].copy_from_slice(entry);
        }
        with_checksum(page)
    }

    fn with_checksum(mut page: [u8; PAGE_BYTES]) -> [u8; PAGE_BYTES] {
        page[511] = 0;
        let sum = page.iter().fold(0, |sum: u8, byte| sum.wrapping_add(*byte));
        page[511] = sum.wrapping_neg();
        page
    }

    fn threshold(id: u8, threshold: u8) -> [u8; ATTRIBUTE_BYTES] {
        [id, threshold, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]
    }

    /// The attributes of QEMU's disk, as it sends them.
    const QEMU: [[u8; ATTRIBUTE_BYTES]; 7] = [
        [1, 3, 0, 100, 100, 0, 0, 0, 0, 0, 0, 0],
        [3, 3, 0, 100, 100, 0, 0, 0, 0, 0, 0, 0],
        [4, 2, 0, 100, 100, 100, 0, 0, 0, 0, 0, 0],
        [5, 3, 0, 100, 100, 0, 0, 0, 0, 0, 0, 0],
        [9, 3, 0, 100, 100, 1, 0, 0, 0, 0, 0, 0],
        [12, 3, 0, 100, 100, 0, 0, 0, 0, 0, 0, 0],
        [190, 3, 0, 69, 69, 31, 0, 31, 31, 0, 0, 0],
    ];
    const QEMU_THRESHOLDS: [(u8, u8); 7] =
        [(1, 6), (3, 0), (4, 20), (5, 36), (9, 0), (12, 0), (190, 50)];

    fn qemu_thresholds() -> [u8; PAGE_BYTES] {
        page(&QEMU_THRESHOLDS.map(|(id, least)| threshold(id, least)))
    }

    #[test]
    fn the_pages_of_an_emulated_disk() {
        let health = health(&identity(0), &page(&QEMU), &qemu_thresholds()).unwrap();
        let expected = DriveHealth {
            source: DriveSource::Ata,
            model: "QEMU HARDDISK".to_owned(),
            serial: "QM00001".to_owned(),
            firmware: "2.5+".to_owned(),
            critical_warning: 0,
            temperature_c: Some(31),
            spare_percent: None,
            spare_threshold_percent: None,
            used_percent: None,
            media_errors: None,
            power_on_hours: Some(1),
            unsafe_shutdowns: None,
            reallocated_sectors: Some(0),
            pending_sectors: None,
            uncorrectable_sectors: None,
        };
        assert_eq!(health, expected);
    }

    #[test]
    fn an_ssd_tells_its_life_and_its_errors() {
        let data = page(&[
            [5, 0x33, 0, 100, 100, 7, 0, 1, 0, 0, 0, 0],
            [9, 0x32, 0, 99, 99, 0x10, 0x27, 0, 0xAA, 0xBB, 0, 0],
            [187, 0x32, 0, 100, 100, 3, 0, 0, 0, 0, 1, 0],
            [194, 0x22, 0, 68, 50, 0xFB, 0xFF, 0xF0, 0xFF, 50, 0, 0],
            [197, 0x12, 0, 100, 100, 9, 0, 0, 0, 0, 0, 0],
            [198, 0x10, 0, 100, 100, 4, 0, 0, 0, 0, 0, 0],
            [202, 0x30, 0, 88, 88, 12, 0, 0, 0, 0, 0, 0],
        ]);
        let thresholds = page(&[threshold(5, 10)]);
        let ssd = health(&identity(1), &data, &thresholds).unwrap();
        assert_eq!(ssd.reallocated_sectors, Some(7));
        assert_eq!(ssd.power_on_hours, Some(10_000));
        assert_eq!(ssd.media_errors, Some(3 | 1 << 40));
        assert_eq!(ssd.temperature_c, Some(-5));
        assert_eq!(ssd.pending_sectors, Some(9));
        assert_eq!(ssd.uncorrectable_sectors, Some(4));
        assert_eq!(ssd.used_percent, Some(12));
        assert_eq!(ssd.critical_warning, 0);
        // A hard disk counts something else in 202.
        let disk = health(&identity(7200), &data, &thresholds).unwrap();
        assert_eq!(disk.used_percent, None);
    }

    #[test]
    fn an_attribute_at_its_threshold_is_a_warning() {
        let warns = |attribute: [u8; ATTRIBUTE_BYTES], least| {
            let thresholds = page(&[threshold(attribute[0], least)]);
            let health = health(&identity(0), &page(&[attribute]), &thresholds);
            health.unwrap().critical_warning
        };
        let with = |id, flags, value| [id, flags, 0, value, value, 0, 0, 0, 0, 0, 0, 0];
        assert_eq!(warns(with(5, 3, 37), 36), 0);
        assert_eq!(warns(with(5, 3, 36), 36), RELIABILITY);
        assert_eq!(warns(with(190, 2, 50), 50), TEMPERATURE);
        // It only ages.
        assert_eq!(warns(with(9, 2, 1), 36), 0);
        // No threshold, and invalid values.
        assert_eq!(warns(with(5, 3, 1), 0), 0);
        assert_eq!(warns(with(5, 3, 1), 0xFE), 0);
        assert_eq!(warns(with(5, 3, 0), 36), 0);
    }

    #[test]
    fn a_page_with_a_wrong_checksum_is_refused() {
        let (good, thresholds) = (page(&QEMU), qemu_thresholds());
        for at in [0, 3, 400, 511] {
            let mut bad = good;
            bad[at] ^= 4;
            let error = health(&identity(0), &bad, &thresholds).unwrap_err();
            assert!(error.contains("SMART attributes"), "{error}");
            let error = health(&identity(0), &good, &bad).unwrap_err();
            assert!(error.contains("SMART thresholds"), "{error}");
        }
    }

    #[test]
    fn a_drive_without_smart_is_not_asked_for_it() {
        let with = |word_82: u16, word_85: u16| {
            let mut page = identity(0);
            page[164..166].copy_from_slice(&word_82.to_le_bytes());
            page[170..172].copy_from_slice(&word_85.to_le_bytes());
            check_identity(&page)
        };
        assert_eq!(with(1, 1), Ok(()));
        assert!(with(0x4000, 1).unwrap_err().contains("no SMART"));
        assert!(with(0xFFFF, 0xFFFF).unwrap_err().contains("no SMART"));
        assert!(with(1, 0x4000).unwrap_err().contains("disabled"));
    }

    #[test]
    fn unlikely_temperatures_are_left_out() {
        assert_eq!(celsius(0x0000_2D1F_0000 | 31), Some(31));
        assert_eq!(celsius(126), None);
        assert_eq!(celsius(0x80), None);
    }

    proptest! {
        #[test]
        fn any_pages_have_a_bounded_answer(
            pages in proptest::collection::vec(any::<u8>(), 3 * PAGE_BYTES)
        ) {
            let (pages, _) = pages.as_chunks::<PAGE_BYTES>();
            let (data, thresholds) = (with_checksum(pages[1]), with_checksum(pages[2]));
            let health = health(&pages[0], &data, &thresholds).unwrap();
            prop_assert!(health.model.len() <= 40 && health.serial.len() <= 20);
            let printable = |text: &str| text.bytes().all(|byte| (b' '..=b'~').contains(&byte));
            prop_assert!(printable(&health.model) && printable(&health.firmware));
            prop_assert!(health.used_percent.is_none_or(|used| used <= 100));
        }
    }
}
