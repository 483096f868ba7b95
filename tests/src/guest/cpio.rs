//! Writes an initramfs without `cpio` or root: the "newc" format in the kernel's
//! Documentation/driver-api/early-userspace/buffer-format.rst. Folders precede their content.

use std::collections::HashSet;
use std::io::{Result, Write};

const FOLDER: u32 = 0o040_755;
const PROGRAM: u32 = 0o100_755;
const LINK: u32 = 0o120_777;

/// An archive that is written to `out`.
#[derive(Debug)]
pub struct Archive<W> {
    out: W,
    inode: u32,
    folders: HashSet<String>,
}

impl<W: Write> Archive<W> {
    /// An empty archive.
    pub fn new(out: W) -> Self {
        Self {
            out,
            inode: 0,
            folders: HashSet::new(),
        }
    }

    /// Adds a folder and its missing parents.
    pub fn folder(&mut self, path: &str) -> Result<()> {
        if path.is_empty() || !self.folders.insert(path.to_owned()) {
            return Ok(());
        }
        self.parents(path)?;
        self.entry(path, FOLDER, &[])
    }

    /// Adds an executable file.
    pub fn file(&mut self, path: &str, content: &[u8]) -> Result<()> {
        self.parents(path)?;
        self.entry(path, PROGRAM, content)
    }

    /// Adds a symbolic link.
    pub fn link(&mut self, path: &str, target: &str) -> Result<()> {
        self.parents(path)?;
        self.entry(path, LINK, target.as_bytes())
    }

    /// Ends the archive.
    pub fn finish(mut self) -> Result<W> {
        self.entry("TRAILER!!!", 0, &[])?;
        self.out.flush()?;
        Ok(self.out)
    }

    fn parents(&mut self, path: &str) -> Result<()> {
        match path.rsplit_once('/') {
            Some((folder, _)) => self.folder(folder),
            None => Ok(()),
        }
    }

    fn entry(&mut self, path: &str, mode: u32, content: &[u8]) -> Result<()> {
        self.inode += 1;
        let links = if mode == FOLDER { 2 } else { 1 };
        let header = [
            self.inode,
            mode,
            0, // user
            0, // group
            links,
            0, // mtime
            length(content.len())?,
            0, // device, major
            0, // device, minor
            0, // rdev, major
            0, // rdev, minor
            length(path.len() + 1)?,
            0, // no checksum in this format
        ];
        let mut bytes = b"070701".to_vec();
        for field in header {
            write!(bytes, "{field:08x}")?;
        }
        bytes.extend(path.as_bytes());
        bytes.push(0);
        pad(&mut bytes);
        self.out.write_all(&bytes)?;
        self.out.write_all(content)?;
        self.out
            .write_all(&[0; 3][..content.len().next_multiple_of(4) - content.len()])
    }
}

fn length(length: usize) -> Result<u32> {
    u32::try_from(length).map_err(|_| std::io::Error::other("too long for a cpio archive"))
}

fn pad(bytes: &mut Vec<u8>) {
    bytes.resize(bytes.len().next_multiple_of(4), 0);
}

#[cfg(test)]
mod tests {
    use super::Archive;

    #[test]
    fn an_archive_byte_by_byte() {
        let mut archive = Archive::new(Vec::new());
        archive.file("a/b", b"hello").unwrap();
        archive.link("a/c", "b").unwrap();
        let bytes = archive.finish().unwrap();
        let text = String::from_utf8(bytes).unwrap();
        let zeros = "00000000";
        let entry = |inode: &str, mode: &str, links: &str, size: &str, name: &str| {
            format!(
                "070701{inode}{mode}{zeros}{zeros}{links}{zeros}{size}{zeros}{zeros}{zeros}{zeros}{name}{zeros}"
            )
        };
        let expected = [
            entry("00000001", "000041ed", "00000002", zeros, "00000002") + "a\0",
            entry("00000002", "000081ed", "00000001", "00000005", "00000004") + "a/b\0\0\0",
            "hello\0\0\0".to_owned(),
            entry("00000003", "0000a1ff", "00000001", "00000001", "00000004") + "a/c\0\0\0",
            "b\0\0\0".to_owned(),
            entry("00000004", zeros, "00000001", zeros, "0000000b") + "TRAILER!!!\0\0\0\0",
        ];
        assert_eq!(text, expected.concat());
    }
}
