//! The health of drives below devices, as `forebay pool` and `forebay device` print it.

use forebay_control::model::{DeviceInfo, DriveHealth};

use crate::output;

/// Empty if no device has a drive that reports its health.
pub(super) fn table(devices: &[DeviceInfo]) -> String {
    let known = devices.iter().filter_map(|device| {
        let drive = device.drive.as_ref()?;
        Some([
            device.index.to_string(),
            drive.path.clone(),
            drive.model.clone(),
            stated(drive.temperature_c, " C"),
            stated(drive.spare_percent, " %"),
            stated(drive.used_percent, " %"),
            stated(drive.media_errors, ""),
            stated(drive.power_on_hours, ""),
            warnings(drive),
        ])
    });
    let known: Vec<_> = known.collect();
    if known.is_empty() {
        return String::new();
    }
    let header = [
        ">INDEX",
        "DRIVE",
        "MODEL",
        ">TEMPERATURE",
        ">SPARE",
        ">LIFE USED",
        ">MEDIA ERRORS",
        ">HOURS",
        "WARNINGS",
    ];
    format!("\n\n{}", output::table(header, known))
}

/// The lines of one device.
pub(super) fn pairs(drive: &DriveHealth) -> Vec<(&'static str, String)> {
    let numbers = [
        (
            "  temperature",
            drive.temperature_c.map(|c| format!("{c} C")),
        ),
        ("  spare", spare(drive)),
        (
            "  life used",
            drive.used_percent.map(|used| format!("{used} %")),
        ),
        (
            "  media errors",
            drive.media_errors.map(|count| count.to_string()),
        ),
        (
            "  hours",
            drive.power_on_hours.map(|hours| hours.to_string()),
        ),
        (
            "  unsafe shutdowns",
            drive.unsafe_shutdowns.map(|count| count.to_string()),
        ),
        (
            "  reallocated sectors",
            drive.reallocated_sectors.map(|count| count.to_string()),
        ),
        (
            "  pending sectors",
            drive.pending_sectors.map(|count| count.to_string()),
        ),
        (
            "  uncorrectable sectors",
            drive.uncorrectable_sectors.map(|count| count.to_string()),
        ),
        ("  warnings", Some(warnings(drive))),
    ];
    let known = numbers
        .into_iter()
        .filter_map(|(name, value)| Some((name, value?)));
    let DriveHealth {
        path,
        model,
        serial,
        firmware,
        ..
    } = drive;
    let name = format!("{path}, {model}, serial number {serial}, firmware {firmware}");
    std::iter::once(("drive", name)).chain(known).collect()
}

fn spare(drive: &DriveHealth) -> Option<String> {
    let spare = drive.spare_percent?;
    Some(match drive.spare_threshold_percent {
        Some(threshold) => format!("{spare} %, warns below {threshold} %"),
        None => format!("{spare} %"),
    })
}

fn stated(number: Option<impl ToString>, unit: &str) -> String {
    number.map_or_else(|| "-".to_owned(), |number| number.to_string() + unit)
}

fn warnings(drive: &DriveHealth) -> String {
    match drive.warnings.as_slice() {
        [] => "none".to_owned(),
        warnings => warnings.join("; "),
    }
}
