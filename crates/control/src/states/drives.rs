//! Asks the drives below the devices for their health, each once a minute.
//!
//! A drive may hang, so a thread asks, and a drive that has not answered is not asked again.
//! Meanwhile its last answer stays. A drive's warning is one event when it begins, and one when it
//! ends.

use std::rc::Rc;
use std::time::Duration;

use forebay_device::health::{self, CRITICAL_WARNINGS, NoHealth};
use forebay_xlate::DeviceIndex;
use tokio::time::{Instant, timeout};

use crate::clock::now_unix_ms;
use crate::model::events::EventKind;
use crate::model::{DriveHealth, DriveSource};
use crate::states::DeviceStates;

const ASK_EVERY: Duration = Duration::from_secs(60);
/// After this time without an answer, the drive is reported.
const ANSWER_LIMIT: Duration = Duration::from_secs(5);

type DriveAnswer = Result<(String, health::DriveHealth), NoHealth>;

#[derive(Debug, Default)]
pub(crate) struct AskedDrive {
    asked: Option<Instant>,
    is_asking: bool,
    /// It has not answered in time.
    is_silent: bool,
    health: Option<DriveHealth>,
    /// Why nothing, or nothing newer, is known.
    note: Option<String>,
}

impl AskedDrive {
    /// Whether it should be asked now; then it counts as asked.
    fn is_due(&mut self, now: Instant) -> bool {
        let is_recent = self.asked.is_some_and(|asked| now - asked < ASK_EVERY);
        let is_due = !self.is_asking && !is_recent;
        if is_due {
            (self.asked, self.is_asking) = (Some(now), true);
        }
        is_due
    }

    /// Returns warnings that begin, and warnings that end.
    fn answered(&mut self, answer: DriveAnswer, at_unix_ms: u64) -> [Vec<String>; 2] {
        let before = self.warnings();
        (self.is_asking, self.is_silent, self.note) = (false, false, None);
        match answer {
            Ok((path, health)) => self.health = Some(shown(path, health, at_unix_ms)),
            Err(error @ NoHealth::NoDrive(_)) => {
                (self.health, self.note) = (None, Some(error.to_string()));
            }
            Err(error) => self.note = Some(error.to_string()),
        }
        self.changes_since(&before)
    }

    fn silent(&mut self) -> [Vec<String>; 2] {
        let before = self.warnings();
        (self.is_silent, self.note) = (true, Some("it does not answer".to_owned()));
        self.changes_since(&before)
    }

    fn changes_since(&self, before: &[String]) -> [Vec<String>; 2] {
        let now = self.warnings();
        let begun = now.iter().filter(|text| !before.contains(text));
        let ended = before.iter().filter(|text| !now.contains(text));
        [begun.cloned().collect(), ended.cloned().collect()]
    }

    fn warnings(&self) -> Vec<String> {
        let name = match &self.health {
            Some(drive) => {
                let DriveHealth {
                    path,
                    model,
                    serial,
                    ..
                } = drive;
                format!("the drive {path} ({model}, serial number {serial})")
            }
            None => "the drive".to_owned(),
        };
        let named = |text: &String| format!("{name} {text}");
        let health = self.health.iter().flat_map(|drive| &drive.warnings);
        let mut warnings: Vec<String> = health.map(named).collect();
        if self.is_silent {
            warnings.push(format!(
                "{name} does not answer a question about its health"
            ));
        }
        warnings
    }
}

fn shown(path: String, health: health::DriveHealth, read_unix_ms: u64) -> DriveHealth {
    let warnings = CRITICAL_WARNINGS.iter();
    let warnings = warnings.filter(|(bit, _)| health.critical_warning & bit != 0);
    DriveHealth {
        path,
        source: match health.source {
            health::DriveSource::Nvme => DriveSource::Nvme,
            health::DriveSource::Ata => DriveSource::Ata,
        },
        model: health.model,
        serial: health.serial,
        firmware: health.firmware,
        read_unix_ms,
        warnings: warnings.map(|(_, text)| (*text).to_owned()).collect(),
        critical_warning: health.critical_warning,
        temperature_c: health.temperature_c,
        spare_percent: health.spare_percent,
        spare_threshold_percent: health.spare_threshold_percent,
        used_percent: health.used_percent,
        media_errors: health.media_errors,
        power_on_hours: health.power_on_hours,
        unsafe_shutdowns: health.unsafe_shutdowns,
        reallocated_sectors: health.reallocated_sectors,
        pending_sectors: health.pending_sectors,
        uncorrectable_sectors: health.uncorrectable_sectors,
    }
}

/// All drives together: the worst of each.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct DrivesHealth {
    /// Bits of NVMe's Critical Warning.
    pub(crate) critical_warning: u8,
    /// The highest temperature, if any is known.
    pub(crate) temperature_k: Option<u16>,
    /// Life used, at most 255.
    pub(crate) used_percent: u8,
    /// The least spare capacity that is known.
    pub(crate) spare_percent: Option<u8>,
}

impl DeviceStates {
    pub(crate) fn drives(&self) -> DrivesHealth {
        let mut all = DrivesHealth::default();
        for drive in self
            .drives
            .borrow()
            .values()
            .flat_map(|drive| &drive.health)
        {
            all.critical_warning |= drive.critical_warning;
            let kelvins = drive
                .temperature_c
                .map(|celsius| celsius.saturating_add(273).max(1) as u16);
            all.temperature_k = all.temperature_k.max(kelvins);
            let spare = [all.spare_percent, drive.spare_percent];
            all.spare_percent = spare.into_iter().flatten().min();
            all.used_percent = all.used_percent.max(drive.used_percent.unwrap_or(0));
        }
        all
    }

    pub(crate) fn poll_drives(self: &Rc<Self>) {
        let now = Instant::now();
        for device in &*self.base.devices.borrow() {
            let is_due = {
                let mut drives = self.drives.borrow_mut();
                drives.entry(device.index).or_default().is_due(now)
            };
            if is_due {
                let (index, ask) = (device.index, device.store.0.drive_health());
                self.base.spawn(self.clone().ask_drive(index, ask));
            }
        }
    }

    async fn ask_drive(
        self: Rc<Self>,
        device: DeviceIndex,
        ask: impl FnOnce() -> DriveAnswer + Send + 'static,
    ) {
        let silent = || self.note_drive(device, AskedDrive::silent);
        if let Some(answer) = answer_of(ask, ANSWER_LIMIT, silent).await {
            self.note_drive(device, |drive| drive.answered(answer, now_unix_ms()));
        }
    }

    fn note_drive(
        &self,
        device: DeviceIndex,
        note: impl FnOnce(&mut AskedDrive) -> [Vec<String>; 2],
    ) {
        let [begun, ended] = {
            let mut drives = self.drives.borrow_mut();
            note(drives.entry(device).or_default())
        };
        let spec = self.base.spec_of(device);
        let below = |text| format!("device {spec}: {text}");
        let begun = begun.into_iter().map(below);
        let ended = ended
            .into_iter()
            .map(|text| format!("resolved: {}", below(text)));
        for text in begun.chain(ended) {
            self.base.report_device(EventKind::Warning, device, text);
        }
    }

    /// Warnings with the drive as the subject.
    pub(crate) fn drive_warnings(&self, device: DeviceIndex) -> Vec<String> {
        let drives = self.drives.borrow();
        drives
            .get(&device)
            .map_or_else(Vec::new, AskedDrive::warnings)
    }

    /// The drive's last answer, and why there is none, or none newer.
    pub(crate) fn drive_of(&self, device: DeviceIndex) -> (Option<DriveHealth>, Option<String>) {
        let drives = self.drives.borrow();
        let drive = drives.get(&device);
        drive.map_or((None, None), |drive| {
            (drive.health.clone(), drive.note.clone())
        })
    }
}

/// The result of a blocking call, however long it takes; `silent` is called once after `limit`.
async fn answer_of<T: Send + 'static>(
    ask: impl FnOnce() -> T + Send + 'static,
    limit: Duration,
    silent: impl FnOnce(),
) -> Option<T> {
    let mut asking = tokio::task::spawn_blocking(ask);
    let answer = match timeout(limit, &mut asking).await {
        Ok(answer) => answer,
        Err(_) => {
            silent();
            asking.await
        }
    };
    answer.ok()
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::sync::mpsc;

    use super::*;

    fn answer(critical_warning: u8) -> DriveAnswer {
        let health = health::DriveHealth {
            source: health::DriveSource::Nvme,
            model: "M".to_owned(),
            serial: "S".to_owned(),
            firmware: "F".to_owned(),
            critical_warning,
            temperature_c: Some(50),
            spare_percent: Some(100),
            spare_threshold_percent: Some(10),
            used_percent: Some(3),
            media_errors: Some(0),
            power_on_hours: Some(1),
            unsafe_shutdowns: Some(2),
            reallocated_sectors: None,
            pending_sectors: None,
            uncorrectable_sectors: None,
        };
        Ok(("/dev/nvme0n1".to_owned(), health))
    }

    const NAME: &str = "the drive /dev/nvme0n1 (M, serial number S)";

    #[test]
    fn a_warning_begins_once_and_ends_once() {
        let mut drive = AskedDrive::default();
        let none: [Vec<String>; 2] = Default::default();
        assert_eq!(drive.answered(answer(0), 1), none);
        let [begun, ended] = drive.answered(answer(0b1001), 2);
        assert_eq!(
            begun,
            [
                format!("{NAME} has less spare capacity than its threshold"),
                format!("{NAME} only reads: its media has become read-only"),
            ]
        );
        assert!(ended.is_empty());
        assert_eq!(drive.answered(answer(0b1001), 3), none);
        // A bit without a meaning is no warning.
        let [begun, ended] = drive.answered(answer(0b1000_0001), 4);
        assert!(begun.is_empty());
        assert_eq!(ended.len(), 1);
        assert_eq!(drive.warnings().len(), 1);
    }

    #[test]
    fn the_last_answer_stays_while_the_drive_refuses() {
        let mut drive = AskedDrive::default();
        let refused = || {
            let (name, why) = ("nvme0n1".to_owned(), "not now".to_owned());
            Err(NoHealth::Refused { name, why })
        };
        drive.answered(refused(), 1);
        assert_eq!(drive.health, None);
        drive.answered(answer(1), 2);
        assert_eq!((drive.note.as_ref(), drive.warnings().len()), (None, 1));
        let [begun, ended] = drive.answered(refused(), 3);
        assert!(begun.is_empty() && ended.is_empty());
        assert_eq!(
            drive.health.as_ref().map(|health| health.read_unix_ms),
            Some(2)
        );
        assert_eq!(drive.note.as_deref(), Some("/dev/nvme0n1: not now"));
        // The device lies elsewhere now.
        let [_, ended] = drive.answered(Err(NoHealth::NoDrive("none".to_owned())), 4);
        assert_eq!((ended.len(), &drive.health), (1, &None));
    }

    #[test]
    fn a_drive_that_does_not_answer_is_not_asked_again() {
        let mut drive = AskedDrive::default();
        let begin = Instant::now();
        assert!(drive.is_due(begin));
        assert!(!drive.is_due(begin + 2 * ASK_EVERY));
        let [begun, _] = drive.silent();
        assert_eq!(
            begun,
            ["the drive does not answer a question about its health"]
        );
        let [_, ended] = drive.answered(answer(0), 1);
        assert_eq!(ended, begun);
        assert!(drive.warnings().is_empty());
        assert!(!drive.is_due(begin + ASK_EVERY / 2));
        assert!(drive.is_due(begin + ASK_EVERY));
    }

    #[tokio::test]
    async fn a_late_answer_is_still_taken() {
        let (late, wait) = mpsc::channel();
        let reports = Cell::new(0);
        let silent = || {
            reports.set(reports.get() + 1);
            late.send(7).unwrap();
        };
        let ask = move || wait.recv().unwrap();
        let answer = answer_of(ask, Duration::from_millis(1), silent).await;
        assert_eq!((answer, reports.get()), (Some(7), 1));
        let answer = answer_of(|| 8, Duration::from_secs(3600), || reports.set(9)).await;
        assert_eq!((answer, reports.get()), (Some(8), 1));
    }
}
