//! Tests of the slots, and what other rooms' tests need of them.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use super::image::{self, Description, ImageError, tests::key};
use super::slots::FellBack;
use super::{Firmware, FirmwareError, ImageSource, Running, Slot};
use crate::model::events::EventKind;

fn ours() -> Running {
    Running {
        version: "0".to_owned(),
        formats: forebay_xlate::boundary::formats(),
    }
}

fn image(version: &str, formats: &str, signer: u8) -> Vec<u8> {
    image::seal(vec![7; 5000], version, formats, &key(signer)).unwrap()
}

pub(crate) fn firmware(at: &Path) -> Rc<Firmware> {
    firmware_of(at, at.join("installed"))
}

/// The configured key is number 1.
pub(crate) fn firmware_of(at: &Path, installed: PathBuf) -> Rc<Firmware> {
    let path = at.join("key.pem");
    std::fs::write(&path, key(1).public().to_pem()).unwrap();
    Firmware::new(at, installed, vec![path], Rc::default())
}

/// Slot 2 has this program, and is active.
pub(crate) async fn install(to: &Firmware, program: Vec<u8>) {
    let image = image::seal(program, "2.0", &ours().formats, &key(1)).unwrap();
    commit(to, &image, true).await.unwrap();
}

pub(crate) fn with_folder<F: Future<Output = ()>>(test: impl FnOnce(PathBuf) -> F) {
    let folder = tempfile::tempdir().unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .build()
        .unwrap();
    runtime.block_on(test(folder.path().to_owned()));
}

async fn send(to: &Firmware, image: &[u8]) {
    for (number, piece) in image.chunks(4096).enumerate().rev() {
        let offset = number as u64 * 4096;
        to.download(offset, piece.to_vec()).await.unwrap();
    }
}

async fn commit(to: &Firmware, image: &[u8], next: bool) -> Result<Description, FirmwareError> {
    send(to, image).await;
    to.store(ImageSource::Download, next, &ours()).await
}

/// Stores a good image.
pub(crate) async fn stored(to: &Firmware, version: &str, next: bool) {
    let image = image(version, &ours().formats, 1);
    commit(to, &image, next).await.unwrap();
}

#[test]
fn a_stored_image_is_the_next_program_until_it_falls_back() {
    with_folder(|at| async move {
        let one = firmware(&at);
        let installed = (Slot::Installed, at.join("installed"));
        assert_eq!(one.next_program(1).await, installed);
        assert!(matches!(
            one.set_next(Slot::Downloaded).await,
            Err(FirmwareError::InvalidSlot(2, _))
        ));
        let formats = ours().formats;
        commit(&one, &image("2.0", &formats, 1), false)
            .await
            .unwrap();
        assert_eq!(one.next_program(1).await, installed, "it is not activated");
        one.set_next(Slot::Downloaded).await.unwrap();
        let (slot, program) = one.next_program(1).await;
        assert_eq!(
            (slot, std::fs::read(&program).unwrap().len()),
            (Slot::Downloaded, 12288)
        );
        assert_eq!(program.metadata().unwrap().mode() & 0o777, 0o700);

        let next = commit(&one, &image("3.0", &formats, 1), false).await;
        assert!(
            matches!(next, Err(FirmwareError::InvalidSlot(2, _))),
            "it is active"
        );
        one.store(ImageSource::Download, true, &ours())
            .await
            .unwrap();
        assert_eq!(one.next_program(1).await.0, Slot::Downloaded);

        // The next daemon.
        let two = firmware(&at);
        assert_eq!(two.image().unwrap().version, "3.0");
        assert_eq!(two.next_program(1).await.0, Slot::Downloaded);
        two.fall_back(1, "a test");
        assert_eq!(two.next_program(1).await, installed);
        let three = firmware(&at);
        let fell_back = FellBack {
            version: "3.0".to_owned(),
            why: "a test".to_owned(),
        };
        assert_eq!(
            (three.next(), three.fell_back()),
            (Slot::Installed, Some(fell_back))
        );
        let events = two.events.all();
        assert_eq!(events[0].kind, EventKind::FirmwareFellBack);
    });
}

#[test]
fn refused_images_leave_the_slot_as_it_was() {
    with_folder(|at| async move {
        let one = firmware(&at);
        let formats = ours().formats;
        commit(&one, &image("2.0", &formats, 1), true)
            .await
            .unwrap();
        let other = commit(&one, &image("3.0", &formats, 2), true).await;
        assert!(matches!(
            other,
            Err(FirmwareError::InvalidImage(ImageError::Signature))
        ));
        let other = commit(&one, &image("3.0", "0.0", 1), true)
            .await
            .unwrap_err()
            .to_string();
        assert!(
            other.contains("3.0") && other.contains("0.0") && other.contains(&formats),
            "{other}"
        );
        let none = one.store(ImageSource::Download, true, &ours()).await;
        assert!(
            matches!(none, Err(FirmwareError::NoDownload)),
            "a download ends with its commit"
        );
        one.download(4096, vec![0; 4096]).await.unwrap();
        let gap = one.store(ImageSource::Download, true, &ours()).await;
        assert!(matches!(gap, Err(FirmwareError::Incomplete(0))));
        let unkeyed = Firmware::new(&at, at.join("installed"), Vec::new(), Rc::default());
        let refused = commit(&unkeyed, &image("3.0", &formats, 1), true).await;
        assert!(matches!(refused, Err(FirmwareError::NotConfigured)));
        assert_eq!(one.image().unwrap().version, "2.0");
        assert_eq!(one.next_program(1).await.0, Slot::Downloaded);
        assert!(!at.join("firmware/download").exists());
    });
}

#[test]
fn a_program_that_was_changed_is_not_used() {
    with_folder(|at| async move {
        let one = firmware(&at);
        commit(&one, &image("2.0", &ours().formats, 1), true)
            .await
            .unwrap();
        let path = at.join("firmware/slot2");
        let mut bytes = std::fs::read(&path).unwrap();
        bytes[100] ^= 1;
        std::fs::write(&path, bytes).unwrap();
        assert_eq!(one.next_program(1).await.0, Slot::Installed);
        assert!(one.fell_back().unwrap().why.contains("changed"));
    });
}

#[test]
fn a_new_download_begins_with_its_first_piece() {
    with_folder(|at| async move {
        let one = firmware(&at);
        let (old, new) = (image("2.0", "0", 1), image("3.0", &ours().formats, 1));
        send(&one, &old).await;
        assert!(matches!(
            one.download(4096, old[..4096].to_vec()).await,
            Err(FirmwareError::OverlappingRange { .. })
        ));
        one.download(0, new[..4096].to_vec()).await.unwrap();
        one.download(4096, new[4096..].to_vec()).await.unwrap();
        let stored = one
            .store(ImageSource::Download, false, &ours())
            .await
            .unwrap();
        assert_eq!(stored.version, "3.0");
        // From a file of the node.
        let path = at.join("image");
        std::fs::write(&path, image("4.0", &ours().formats, 1)).unwrap();
        let stored = one
            .store(ImageSource::File(path), false, &ours())
            .await
            .unwrap();
        assert_eq!(
            (stored.version, one.has_download()),
            ("4.0".to_owned(), false)
        );
    });
}
