//! The guest's kernel and initramfs, made from Debian packages once ([`xtask::cache`]). Nothing is
//! installed.
//!
//! The `vmlinux` is uncompressed, because an emulated CPU decompresses slowly. The cache name
//! contains a hash of the recipe: the lists below and `init.sh`.

use std::collections::BTreeSet;
use std::fs::File;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::BufWriter;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use xtask::debian::{self, PrivateApt, Sysroot};
use xtask::{cache, process};

use super::cpio::Archive;
use super::modules;

/// Debian's suite with a 6.12 kernel.
const SUITE: &str = "trixie";
const KERNEL_PACKAGE: &str = "linux-image-amd64";
const KERNEL_SERIES: &str = "linux-image-6.12.";
const PACKAGES: [&str; 8] = [
    "busybox-static",
    "dash",
    "e2fsprogs",
    "fio",
    "kmod",
    "mount",
    "nvme-cli",
    "util-linux",
];
/// Of other packages only libraries are unpacked; this one is not needed.
const UNWANTED: &str = "libpython";
const PROGRAMS: [&str; 15] = [
    // The shell. Busybox's would prefer its own applets to these programs.
    "usr/bin/dash",
    "usr/bin/dmesg",
    "usr/bin/fio",
    "usr/bin/flock",
    "usr/bin/kmod",
    "usr/bin/lsblk",
    "usr/bin/mount",
    "usr/bin/umount",
    "usr/sbin/blkdiscard",
    "usr/sbin/blockdev",
    "usr/sbin/e2fsck",
    "usr/sbin/fstrim",
    "usr/sbin/mkfs.ext4",
    "usr/sbin/nvme",
    "usr/sbin/resize2fs",
];
const MODULES: [&str; 15] = [
    "ahci",
    "configfs",
    "crc32c_generic",
    "crc32c_intel",
    "ext4",
    "loop",
    "null_blk",
    "nvme",
    "nvme_tcp",
    "nvmet",
    "nvmet_tcp",
    "sd_mod",
    "virtio_blk",
    "virtio_net",
    "nvme_fabrics",
];
const LINKS: [(&str, &str); 8] = [
    ("bin/sh", "/usr/bin/dash"),
    ("lib", "usr/lib"),
    ("lib64", "usr/lib64"),
    ("sbin/modprobe", "/usr/bin/kmod"),
    ("usr/sbin/modprobe", "/usr/bin/kmod"),
    ("usr/sbin/rmmod", "/usr/bin/kmod"),
    ("usr/sbin/lsmod", "/usr/bin/kmod"),
    ("etc/mtab", "/proc/mounts"),
];
const FOLDERS: [&str; 9] = [
    "bin", "dev", "mnt", "proc", "root", "run", "sys", "tmp", "usr/sbin",
];
const TEXTS: [(&str, &str); 2] = [
    ("etc/passwd", "root:x:0:0:root:/root:/bin/sh\n"),
    ("etc/group", "root:x:0:\n"),
];
const INIT: &str = include_str!("init.sh");
const LOADER: &str = "usr/lib64/ld-linux-x86-64.so.2";
const LIBRARIES: &str = "usr/lib/x86_64-linux-gnu";

const LIMIT: Duration = Duration::from_secs(120);

/// What a guest boots from.
#[derive(Debug, Clone)]
pub struct Image {
    /// An uncompressed kernel.
    pub kernel: PathBuf,
    /// A cpio archive.
    pub initramfs: PathBuf,
    /// The kernel's release, as in `uname -r`.
    pub kernel_release: String,
}

/// The image, made if it is not in the cache.
pub fn prepare() -> Result<Image> {
    let finished = cache::get(&format!("guest-image-{:016x}", recipe()), make)?;
    Ok(Image {
        kernel: finished.join("vmlinux"),
        initramfs: finished.join("initramfs"),
        kernel_release: std::fs::read_to_string(finished.join("release"))?,
    })
}

fn recipe() -> u64 {
    let mut hasher = DefaultHasher::new();
    (SUITE, KERNEL_PACKAGE, KERNEL_SERIES).hash(&mut hasher);
    (PACKAGES, PROGRAMS, MODULES, LINKS, FOLDERS, TEXTS, INIT).hash(&mut hasher);
    hasher.finish()
}

fn make(work: &Path) -> Result<()> {
    let image = work.join("result");
    let apt = PrivateApt::open(&work.join("apt"), SUITE)?;

    let kernel_package = apt
        .dependencies(KERNEL_PACKAGE)?
        .into_iter()
        .find(|name| name.starts_with(KERNEL_SERIES))
        .with_context(|| format!("Debian {SUITE} has no {KERNEL_SERIES}*"))?;
    let package = apt.download_only(&kernel_package, work)?;
    let kernel = work.join("kernel");
    debian::unpack(&package, &kernel)?;
    let release = kernel_package
        .strip_prefix("linux-image-")
        .unwrap_or_default();
    let compressed = std::fs::read(kernel.join(format!("boot/vmlinuz-{release}")))?;
    extract_vmlinux(&compressed, work, &image.join("vmlinux"))?;
    std::fs::write(image.join("release"), release)?;

    let root = work.join("root");
    for package in apt.download_with_dependencies(&PACKAGES)? {
        let name = package.file_name().unwrap_or_default().to_string_lossy();
        let is_wanted = PACKAGES
            .iter()
            .any(|wanted| name.starts_with(&format!("{wanted}_")));
        if is_wanted || (name.starts_with("lib") && !name.starts_with(UNWANTED)) {
            debian::unpack(&package, &root)?;
        }
    }
    let sysroot = Sysroot::new(root);

    let out = BufWriter::new(File::create(image.join("initramfs"))?);
    let mut archive = Archive::new(out);
    for folder in FOLDERS {
        archive.folder(folder)?;
    }
    for (path, target) in LINKS {
        archive.link(path, target)?;
    }
    for (path, text) in TEXTS {
        archive.file(path, text.as_bytes())?;
    }
    archive.file("init", INIT.as_bytes())?;
    add_programs(&mut archive, &sysroot)?;
    add_modules(&mut archive, &sysroot, &kernel, release, work)?;
    archive.finish()?;
    Ok(())
}

fn add_programs(archive: &mut Archive<impl std::io::Write>, sysroot: &Sysroot) -> Result<()> {
    let read = |path: &Path| std::fs::read(path).with_context(|| path.display().to_string());
    archive.file("bin/busybox", &read(&sysroot.path("usr/bin/busybox"))?)?;
    archive.file(LOADER, &read(&sysroot.path(LOADER))?)?;
    let mut libraries = BTreeSet::new();
    for program in PROGRAMS {
        archive.file(program, &read(&sysroot.path(program))?)?;
        libraries.extend(sysroot.libraries(program)?);
    }
    for library in libraries {
        let name = library.file_name().unwrap_or_default().to_string_lossy();
        archive.file(&format!("{LIBRARIES}/{name}"), &read(&library)?)?;
    }
    Ok(())
}

fn add_modules(
    archive: &mut Archive<impl std::io::Write>,
    sysroot: &Sysroot,
    kernel: &Path,
    release: &str,
    work: &Path,
) -> Result<()> {
    let from = kernel.join("usr/lib/modules").join(release);
    let stage = work.join("stage");
    let below = format!("usr/lib/modules/{release}");
    let to = stage.join(&below);
    std::fs::create_dir_all(&to)?;
    std::os::unix::fs::symlink("usr/lib", stage.join("lib"))?;
    let mut files = vec!["modules.builtin".to_owned(), "modules.order".to_owned()];
    for file in &files {
        std::fs::copy(from.join(file), to.join(file)).with_context(|| file.clone())?;
    }
    for (path, content) in modules::closure(&from, &MODULES)? {
        let file = to.join(&path);
        if let Some(folder) = file.parent() {
            std::fs::create_dir_all(folder)?;
        }
        std::fs::write(file, content)?;
        files.push(path);
    }
    let mut depmod = sysroot.command("usr/bin/kmod", "depmod");
    depmod.arg("-b").arg(&stage).arg(release);
    process::output(&mut depmod, LIMIT)?;
    for entry in std::fs::read_dir(&to)? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        if entry.file_type()?.is_file() && !files.contains(&name) {
            files.push(name);
        }
    }
    for file in files {
        archive.file(&format!("{below}/{file}"), &std::fs::read(to.join(&file))?)?;
    }
    Ok(())
}

/// Extracts the kernel from a `bzImage` (Linux' Documentation/arch/x86/boot.rst, "The Real-Mode
/// Kernel Header"): setup_sects (0x1f1), header (0x202), payload_offset (0x248), payload_length
/// (0x24c).
fn extract_vmlinux(bzimage: &[u8], work: &Path, to: &Path) -> Result<()> {
    let payload = payload(bzimage).context("the kernel is not a bzImage")?;
    let program = match payload {
        [0x28, 0xb5, 0x2f, 0xfd, ..] => "zstd",
        [0xfd, b'7', b'z', b'X', ..] => "xz",
        [0x1f, 0x8b, ..] => "gzip",
        _ => bail!("the kernel is compressed in an unknown way"),
    };
    let file = work.join("payload");
    std::fs::write(&file, payload)?;
    let mut command = Command::new(program);
    command.arg("-dcq").stdin(File::open(&file)?);
    command.stdout(File::create(to)?);
    process::run(&mut command, LIMIT)?;
    Ok(())
}

fn payload(bzimage: &[u8]) -> Option<&[u8]> {
    let word = |at: usize| -> Option<usize> {
        let bytes: [u8; 4] = bzimage.get(at..at + 4)?.try_into().ok()?;
        usize::try_from(u32::from_le_bytes(bytes)).ok()
    };
    if bzimage.get(0x202..0x206)? != b"HdrS" {
        return None;
    }
    let setup_sectors = match bzimage.get(0x1f1)? {
        0 => 4,
        sectors => usize::from(*sectors),
    };
    let begin = ((setup_sectors + 1) * 512).checked_add(word(0x248)?)?;
    // The last four bytes are the decompressed size.
    let end = begin.checked_add(word(0x24c)?)?.checked_sub(4)?;
    bzimage.get(begin..end)
}
