//! The two slots, and which of them the next engine starts from.
//!
//! Slot 2's file is verified when it is stored, and again before its first use by this daemon.
//! Later uses only compare the file's identity and times, so a take-over need not wait for that.

use std::cell::{Cell, RefCell};
use std::fs::{DirBuilder, File, Permissions};
use std::io::{self, Read};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::rc::Rc;

use serde::{Deserialize, Serialize};

use super::FirmwareError;
use super::download::Download;
use super::health::Trial;
use super::image::{self, Description, IMAGE_MAX_BYTES, VerifyingKey};
use crate::events::{EventFields, Events};
use crate::files;
use crate::model::events::EventKind;

/// A firmware slot (NVMe Base: FS of Firmware Commit).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "u8", into = "u8")]
pub(crate) enum Slot {
    /// Slot 1, the installed program. It is read-only.
    #[default]
    Installed,
    /// Slot 2.
    Downloaded,
}

impl TryFrom<u8> for Slot {
    type Error = FirmwareError;

    fn try_from(slot: u8) -> Result<Self, FirmwareError> {
        match slot {
            1 => Ok(Self::Installed),
            2 => Ok(Self::Downloaded),
            _ => Err(FirmwareError::InvalidSlot(
                slot,
                "does not exist: there are 1 and 2",
            )),
        }
    }
}

impl From<Slot> for u8 {
    fn from(slot: Slot) -> Self {
        match slot {
            Slot::Installed => 1,
            Slot::Downloaded => 2,
        }
    }
}

/// An image that was left for slot 1.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct FellBack {
    pub(crate) version: String,
    pub(crate) why: String,
}

/// Kept in `slots.json`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct SlotsRecord {
    pub(super) next: Slot,
    #[serde(default)]
    fell_back: Option<FellBack>,
}

/// A file that was verified.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Identity {
    device: u64,
    inode: u64,
    bytes: u64,
    modified: (i64, i64),
    changed: (i64, i64),
}

impl Identity {
    fn of(file: &File) -> io::Result<Self> {
        let there = file.metadata()?;
        Ok(Self {
            device: there.dev(),
            inode: there.ino(),
            bytes: there.len(),
            modified: (there.mtime(), there.mtime_nsec()),
            changed: (there.ctime(), there.ctime_nsec()),
        })
    }
}

/// Where an image comes from.
#[derive(Debug)]
pub(crate) enum ImageSource {
    /// The pieces that were downloaded.
    Download,
    /// A file of this node.
    File(PathBuf),
}

/// The program of the running engine.
#[derive(Debug, Clone, Default)]
pub(crate) struct Running {
    pub(crate) version: String,
    pub(crate) formats: String,
}

#[derive(Debug)]
pub(crate) struct Firmware {
    pub(super) folder: PathBuf,
    installed: PathBuf,
    installed_version: RefCell<Option<String>>,
    keys: Vec<PathBuf>,
    record: RefCell<SlotsRecord>,
    /// Slot 2's.
    image: RefCell<Option<Description>>,
    verified: Cell<Option<Identity>>,
    download: RefCell<Option<Download>>,
    busy: Cell<bool>,
    committing: Cell<bool>,
    pub(super) trial: Cell<Trial>,
    pub(super) events: Rc<Events>,
}

/// Ends with the command.
pub(crate) struct CommandGuard<'a>(&'a Cell<bool>);

impl Drop for CommandGuard<'_> {
    fn drop(&mut self) {
        self.0.set(false);
    }
}

pub(super) fn image_path(folder: &Path) -> PathBuf {
    folder.join("slot2")
}

fn read_keys(paths: &[PathBuf]) -> Result<Vec<VerifyingKey>, FirmwareError> {
    if paths.is_empty() {
        return Err(FirmwareError::NotConfigured);
    }
    let read = |path: &PathBuf| {
        VerifyingKey::read(path).map_err(|why| FirmwareError::Key {
            path: path.clone(),
            why,
        })
    };
    paths.iter().map(read).collect()
}

/// Verifies a file. This takes about a second.
pub(super) fn verify(
    mut file: &File,
    keys: &[PathBuf],
) -> Result<(Description, Identity), FirmwareError> {
    let identity = Identity::of(file)?;
    let description = image::verify(&mut file, &read_keys(keys)?)?;
    Ok((description, identity))
}

fn copy(from: &Path, to: &Path) -> Result<File, FirmwareError> {
    let mut from = File::open(from)?.take(IMAGE_MAX_BYTES + 1);
    let mut to = Download::begin(to)?.into_file();
    io::copy(&mut from, &mut to)?;
    Ok(to)
}

/// Makes the file slot 2's.
fn place(file: &File, from: &Path, folder: &Path) -> io::Result<Identity> {
    file.set_permissions(Permissions::from_mode(0o700))?;
    file.sync_all()?;
    std::fs::rename(from, image_path(folder))?;
    File::open(folder)?.sync_all()?;
    Identity::of(file)
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, FirmwareError> + Send + 'static,
) -> Result<T, FirmwareError> {
    let done = tokio::task::spawn_blocking(work).await;
    done.unwrap_or_else(|error| Err(io::Error::other(error).into()))
}

fn make_folder(folder: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(folder)
}

impl Firmware {
    /// `installed` is slot 1's program, and `keys` are paths of public keys.
    pub(crate) fn new(
        state_dir: &Path,
        installed: PathBuf,
        keys: Vec<PathBuf>,
        events: Rc<Events>,
    ) -> Rc<Self> {
        let folder = state_dir.join("firmware");
        let path = folder.join("slots.json");
        let record = files::read_json(&path).unwrap_or_else(|error| {
            tracing::warn!(%error, "the record of firmware slots is damaged: slot 1 is used");
            _ = files::set_aside(&path);
            None
        });
        // A download ends with its daemon.
        if let Err(error) = files::remove(&folder.join("download")) {
            tracing::warn!(%error, "can't remove the rest of a firmware download");
        }
        let image = File::open(image_path(&folder)).map_err(Into::into);
        let image = image.and_then(|mut file| Description::read(&mut file));
        Rc::new(Self {
            folder,
            installed,
            installed_version: RefCell::new(None),
            keys,
            record: RefCell::new(record.unwrap_or_default()),
            image: RefCell::new(image.ok()),
            verified: Cell::new(None),
            download: RefCell::new(None),
            busy: Cell::new(false),
            committing: Cell::new(false),
            trial: Cell::default(),
            events,
        })
    }

    fn command(&self) -> Result<CommandGuard<'_>, FirmwareError> {
        match self.busy.replace(true) {
            true => Err(FirmwareError::Busy),
            false => Ok(CommandGuard(&self.busy)),
        }
    }

    /// One commit at a time, with the replacement of the engine.
    pub(crate) fn begin_commit(&self) -> Result<CommandGuard<'_>, FirmwareError> {
        match self.committing.replace(true) {
            true => Err(FirmwareError::Busy),
            false => Ok(CommandGuard(&self.committing)),
        }
    }

    fn part_path(&self) -> PathBuf {
        self.folder.join("download")
    }

    /// Takes a piece of an image. One with byte 0 begins a new download if that byte was there.
    pub(crate) async fn download(&self, offset: u64, data: Vec<u8>) -> Result<(), FirmwareError> {
        let _command = self.command()?;
        let begun = self.download.take();
        let begun = begun.filter(|begun| offset != 0 || !begun.has_begin());
        let (folder, part) = (self.folder.clone(), self.part_path());
        let (download, written) = blocking(move || {
            let mut download = match begun {
                Some(begun) => begun,
                None => {
                    make_folder(&folder)?;
                    Download::begin(&part)?
                }
            };
            let written = download.write(offset, &data);
            Ok((download, written))
        })
        .await?;
        self.download.replace(Some(download));
        written
    }

    /// Whether a download has begun.
    pub(crate) fn has_download(&self) -> bool {
        self.download.borrow().is_some()
    }

    /// Verifies an image and keeps it in slot 2; `next`: the next engine starts from it. A download
    /// ends, whether it is valid or not.
    pub(crate) async fn store(
        &self,
        from: ImageSource,
        next: bool,
        running: &Running,
    ) -> Result<Description, FirmwareError> {
        let _command = self.command()?;
        if !next && self.next() == Slot::Downloaded {
            let why = "is active: activate slot 1 first, or store the image with activation";
            return Err(FirmwareError::InvalidSlot(Slot::Downloaded.into(), why));
        }
        let part = self.part_path();
        let downloaded = match &from {
            ImageSource::Download => {
                let download = self.download.take().ok_or(FirmwareError::NoDownload)?;
                Some(download.complete()?)
            }
            ImageSource::File(_) => {
                self.download.take();
                make_folder(&self.folder)?;
                None
            }
        };
        let (keys, folder, running) = (self.keys.clone(), self.folder.clone(), running.clone());
        let (description, identity) = blocking(move || {
            let stored = match (downloaded, &from) {
                (Some(file), _) => Ok(file),
                (None, ImageSource::File(path)) => copy(path, &part),
                (None, ImageSource::Download) => Err(FirmwareError::NoDownload),
            };
            let stored = stored.and_then(|file| {
                let (description, _) = verify(&file, &keys)?;
                if description.formats != running.formats {
                    return Err(FirmwareError::OtherFormats {
                        version: description.version,
                        theirs: description.formats,
                        running: running.version,
                        ours: running.formats,
                    });
                }
                let identity = place(&file, &part, &folder)?;
                Ok((description, identity))
            });
            stored.inspect_err(|_| _ = files::remove(&part))
        })
        .await?;
        self.verified.set(Some(identity));
        self.image.replace(Some(description.clone()));
        self.trial.take();
        self.change(|record| {
            record.fell_back = None;
            if next {
                record.next = Slot::Downloaded;
            }
        })
        .await?;
        tracing::info!(
            version = description.version,
            "firmware slot 2 has an image"
        );
        Ok(description)
    }

    /// The slot that the next engine starts from.
    pub(crate) fn next(&self) -> Slot {
        self.record.borrow().next
    }

    pub(crate) async fn set_next(&self, slot: Slot) -> Result<(), FirmwareError> {
        if slot == Slot::Downloaded && self.image.borrow().is_none() {
            return Err(FirmwareError::no_image());
        }
        if self.next() == slot {
            return Ok(());
        }
        self.trial.take();
        self.change(|record| record.next = slot).await
    }

    async fn change(&self, change: impl Fn(&mut SlotsRecord)) -> Result<(), FirmwareError> {
        loop {
            let before = self.record.borrow().clone();
            let mut record = before.clone();
            change(&mut record);
            let (folder, written) = (self.folder.clone(), record.clone());
            blocking(move || {
                make_folder(&folder)?;
                Ok(files::write_json(
                    &folder.join("slots.json"),
                    &written,
                    true,
                )?)
            })
            .await?;
            // An engine may have failed meanwhile.
            if *self.record.borrow() == before {
                self.record.replace(record);
                return Ok(());
            }
        }
    }

    /// Slot 1's program reported its version.
    pub(crate) fn note_installed(&self, version: &str) {
        self.installed_version.replace(Some(version.to_owned()));
    }

    /// The version of slot 1's program, if known.
    pub(crate) fn installed_version(&self) -> Option<String> {
        self.installed_version.borrow().clone()
    }

    /// Slot 2's image. It may not be verified yet.
    pub(crate) fn image(&self) -> Option<Description> {
        self.image.borrow().clone()
    }

    pub(crate) fn fell_back(&self) -> Option<FellBack> {
        self.record.borrow().fell_back.clone()
    }

    /// The slot and program of the next engine. An image that can't be used is left for slot 1.
    pub(crate) async fn next_program(&self, generation: u64) -> (Slot, PathBuf) {
        if self.next() == Slot::Downloaded {
            match self.program(Slot::Downloaded).await {
                Ok(program) => return (Slot::Downloaded, program),
                Err(error) => self.fall_back(generation, &error.to_string()),
            }
        }
        (Slot::Installed, self.installed.clone())
    }

    /// Verifies the next engine's program, so that its start need not.
    pub(crate) async fn verify_next(&self) {
        if let Err(error) = self.program(self.next()).await {
            tracing::warn!(%error, "the program in firmware slot 2 can't be used");
        }
    }

    /// The program in a slot, verified.
    pub(crate) async fn program(&self, slot: Slot) -> Result<PathBuf, FirmwareError> {
        if slot == Slot::Installed {
            return Ok(self.installed.clone());
        }
        let path = image_path(&self.folder);
        let image = self.image().ok_or_else(FirmwareError::no_image)?;
        let ours = forebay_xlate::boundary::formats();
        if image.formats != ours {
            return Err(FirmwareError::OtherFormats {
                version: image.version,
                theirs: image.formats,
                running: "of this daemon".to_owned(),
                ours,
            });
        }
        let file = File::open(&path)?;
        if self.verified.get() != Some(Identity::of(&file)?) {
            let keys = self.keys.clone();
            let (image, identity) = blocking(move || verify(&file, &keys)).await?;
            self.image.replace(Some(image));
            self.verified.set(Some(identity));
        }
        Ok(path)
    }

    /// Slot 1 is the next one, because slot 2's program failed.
    pub(crate) fn fall_back(&self, generation: u64, why: &str) {
        let version = self
            .image()
            .map_or_else(|| "unknown".to_owned(), |image| image.version);
        let text = format!(
            "the program in firmware slot 2 (version {version}) is replaced by slot 1's: {why}"
        );
        self.events.report(
            EventKind::FirmwareFellBack,
            generation,
            text,
            EventFields::default(),
        );
        let fell_back = FellBack {
            version,
            why: why.to_owned(),
        };
        let record = SlotsRecord {
            next: Slot::Installed,
            fell_back: Some(fell_back),
        };
        if let Err(error) = files::write_json(&self.folder.join("slots.json"), &record, true) {
            tracing::warn!(%error, "can't record that firmware slot 1 is used again");
        }
        self.record.replace(record);
    }
}
