//! An image that arrives in pieces, in any order. The pieces go to a file; memory has only their
//! places.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

use super::FirmwareError;
use super::image::{GRANULE_BYTES, IMAGE_MAX_BYTES};

#[derive(Debug)]
pub(super) struct Download {
    file: File,
    /// Runs of downloaded bytes: begin and end. Runs that touch are one.
    runs: BTreeMap<u64, u64>,
}

impl Download {
    pub(super) fn begin(path: &Path) -> io::Result<Self> {
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(true);
        Ok(Self {
            file: options.mode(0o600).open(path)?,
            runs: BTreeMap::new(),
        })
    }

    pub(super) fn write(&mut self, offset: u64, data: &[u8]) -> Result<(), FirmwareError> {
        let bytes = data.len() as u64;
        let end = offset.saturating_add(bytes);
        let is_aligned =
            offset.is_multiple_of(GRANULE_BYTES) && bytes.is_multiple_of(GRANULE_BYTES);
        if bytes == 0 || !is_aligned || end > IMAGE_MAX_BYTES {
            return Err(FirmwareError::InvalidPiece);
        }
        let before = self.runs.range(..end).next_back();
        let before = before.map(|(begin, end)| (*begin, *end));
        if let Some((_, before)) = before
            && before > offset
        {
            // A client that lost an answer repeats a piece.
            let mut known = vec![0; data.len()];
            let is_known = before >= end && self.file.read_exact_at(&mut known, offset).is_ok();
            return match is_known && known == data {
                true => Ok(()),
                false => Err(FirmwareError::OverlappingRange { offset, bytes }),
            };
        }
        self.file.write_all_at(data, offset)?;
        let begin = match before {
            Some((begin, before)) if before == offset => begin,
            _ => offset,
        };
        let end = self.runs.remove(&end).unwrap_or(end);
        self.runs.insert(begin, end);
        Ok(())
    }

    pub(super) fn has_begin(&self) -> bool {
        self.runs.contains_key(&0)
    }

    pub(super) fn into_file(self) -> File {
        self.file
    }

    /// Returns the file if there is no gap.
    pub(super) fn complete(self) -> Result<File, FirmwareError> {
        let mut runs = self.runs.into_iter();
        match (runs.next(), runs.next()) {
            (None, _) => Err(FirmwareError::NoDownload),
            (Some((0, _)), None) => Ok(self.file),
            (Some((0, end)), Some(_)) => Err(FirmwareError::Incomplete(end)),
            (Some(_), _) => Err(FirmwareError::Incomplete(0)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const G: u64 = GRANULE_BYTES;

    fn begin() -> (tempfile::TempDir, Download) {
        let folder = tempfile::tempdir().unwrap();
        let download = Download::begin(&folder.path().join("part")).unwrap();
        (folder, download)
    }

    #[test]
    fn malformed_pieces_are_refused() {
        let (_folder, mut download) = begin();
        let piece = [7; 2 * G as usize];
        for (offset, bytes) in [
            (0, 0),
            (0, 4095),
            (1, 4096),
            (!4095, 4096),
            (IMAGE_MAX_BYTES, 4096),
            (IMAGE_MAX_BYTES - G, 8192),
        ] {
            let refused = download.write(offset, &piece[..bytes]);
            assert!(
                matches!(refused, Err(FirmwareError::InvalidPiece)),
                "{offset} {bytes}"
            );
        }
        download.write(IMAGE_MAX_BYTES - G, &piece[..4096]).unwrap();
        assert!(matches!(
            download.complete(),
            Err(FirmwareError::Incomplete(0))
        ));
        assert!(matches!(
            begin().1.complete(),
            Err(FirmwareError::NoDownload)
        ));
    }

    proptest! {
        #[test]
        fn only_new_or_equal_bytes_are_accepted(
            pieces in proptest::collection::vec((0..24u64, 1..6u64, 1..4u8), 1..40),
        ) {
            let (_folder, mut download) = begin();
            // The bytes of each granule; 0 if it is not there.
            let mut there = [0u8; 32];
            for (at, granules, byte) in pieces {
                let range = at as usize..(at + granules) as usize;
                let data = vec![byte; (granules * G) as usize];
                let is_free = there[range.clone()].iter().all(|there| *there == 0);
                let is_known = there[range.clone()].iter().all(|there| *there == byte);
                match download.write(at * G, &data) {
                    Ok(()) => prop_assert!(is_free || is_known),
                    Err(FirmwareError::OverlappingRange { offset, .. }) => {
                        prop_assert!(!is_free && !is_known && offset == at * G);
                    }
                    Err(error) => prop_assert!(false, "{error}"),
                }
                if is_free {
                    there[range].fill(byte);
                }
                let runs = there.chunk_by(|a, b| (*a == 0) == (*b == 0));
                prop_assert_eq!(download.runs.len(), runs.filter(|run| run[0] != 0).count());
            }
            let there = there.map(|there| there != 0);
            let first = there.iter().position(|there| !there).unwrap_or(32);
            let is_whole = !there[first..].contains(&true);
            match download.complete() {
                Ok(file) => prop_assert!(is_whole && file.metadata().unwrap().len() == first as u64 * G),
                Err(FirmwareError::Incomplete(at)) => prop_assert!(!is_whole && at == first as u64 * G),
                Err(error) => prop_assert!(false, "{error}"),
            }
        }
    }
}
