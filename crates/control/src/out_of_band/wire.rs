//! The bytes of a line: a connection to a Unix socket, a terminal device, or a pseudoterminal.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::path::{Path, PathBuf};

use forebay_mctp::{BASELINE_UNIT_BYTES, MAX_UNIT_BYTES};
use rustix::fs::{Mode, OFlags};
use rustix::pty::OpenptFlags;
use rustix::termios::{ControlModes, OptionalActions};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::net::{UnixListener, UnixStream};

use crate::files::lock_file;
use crate::readiness::watch;

/// The longest path of a Unix socket with its NUL (sockaddr_un).
const SOCKET_PATH_BYTES: usize = 108;

/// A line.
#[derive(Debug)]
pub(super) enum SerialWire {
    Socket(UnixStream),
    Terminal {
        fd: AsyncFd<OwnedFd>,
        /// What lives as long as the line.
        _kept: OtherEnd,
    },
}

/// A pseudoterminal's other end stays open, so that a client may close and open it.
#[derive(Debug)]
pub(super) enum OtherEnd {
    Nothing,
    Pseudoterminal { _device: OwnedFd, link: PathBuf },
}

impl Drop for OtherEnd {
    fn drop(&mut self) {
        if let Self::Pseudoterminal { link, .. } = self {
            let _ = std::fs::remove_file(link);
        }
    }
}

fn named(what: &str, path: &Path, error: impl Into<io::Error>) -> io::Error {
    let error = error.into();
    io::Error::new(error.kind(), format!("{what} {}: {error}", path.display()))
}

impl SerialWire {
    /// Opens a terminal device for raw bytes.
    pub(super) fn terminal(path: &Path, baud: u32) -> io::Result<Self> {
        let open = || -> rustix::io::Result<OwnedFd> {
            let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::NONBLOCK | OFlags::CLOEXEC;
            let fd = rustix::fs::open(path, flags, Mode::empty())?;
            make_raw(&fd, Some(baud))?;
            rustix::termios::ioctl_tiocexcl(&fd)?;
            Ok(fd)
        };
        let fd = open().map_err(|error| named("can't use the terminal", path, error))?;
        Ok(Self::Terminal {
            fd: watch(fd, Interest::READABLE | Interest::WRITABLE)?,
            _kept: OtherEnd::Nothing,
        })
    }

    /// Makes a pseudoterminal, and a symbolic link to its device.
    pub(super) fn pseudoterminal(link: &Path) -> io::Result<Self> {
        let open = || -> io::Result<(OwnedFd, OwnedFd)> {
            let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY;
            let fd = rustix::pty::openpt(flags)?;
            rustix::pty::grantpt(&fd)?;
            rustix::pty::unlockpt(&fd)?;
            let name = rustix::pty::ptsname(&fd, Vec::new())?;
            let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC;
            let device = rustix::fs::open(&*name, flags, Mode::empty())?;
            make_raw(&device, None)?;
            rustix::fs::fchmod(&device, Mode::RUSR | Mode::WUSR)?;
            rustix::io::fcntl_setfd(&fd, rustix::io::FdFlags::CLOEXEC)?;
            rustix::io::ioctl_fionbio(&fd, true)?;
            if std::fs::symlink_metadata(link).is_ok_and(|old| old.is_symlink()) {
                std::fs::remove_file(link)?;
            }
            let target = name.to_string_lossy().into_owned();
            std::os::unix::fs::symlink(target, link)?;
            Ok((fd, device))
        };
        let (fd, device) =
            open().map_err(|error| named("can't make the pseudoterminal", link, error))?;
        let kept = OtherEnd::Pseudoterminal {
            _device: device,
            link: link.to_owned(),
        };
        Ok(Self::Terminal {
            fd: watch(fd, Interest::READABLE | Interest::WRITABLE)?,
            _kept: kept,
        })
    }

    /// The largest transmission unit. Linux' line discipline for MCTP takes packets of 68 bytes.
    pub(super) fn max_unit_bytes(&self) -> u16 {
        match self {
            Self::Socket(_) => MAX_UNIT_BYTES as u16,
            Self::Terminal { .. } => BASELINE_UNIT_BYTES as u16,
        }
    }

    /// Reads some bytes; 0 at the end of a connection.
    pub(super) async fn read(&self, bytes: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Socket(stream) => {
                let read = || stream.try_read(bytes);
                stream.async_io(Interest::READABLE, read).await
            }
            Self::Terminal { fd, .. } => {
                let read = |fd: &OwnedFd| Ok(rustix::io::read(fd, &mut *bytes)?);
                fd.async_io(Interest::READABLE, read).await
            }
        }
    }

    /// Writes some of the bytes.
    pub(super) async fn write(&self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Self::Socket(stream) => {
                let write = || stream.try_write(bytes);
                stream.async_io(Interest::WRITABLE, write).await
            }
            Self::Terminal { fd, .. } => {
                let write = |fd: &OwnedFd| Ok(rustix::io::write(fd, bytes)?);
                fd.async_io(Interest::WRITABLE, write).await
            }
        }
    }
}

fn make_raw(fd: impl AsFd, baud: Option<u32>) -> rustix::io::Result<()> {
    let mut settings = rustix::termios::tcgetattr(&fd)?;
    settings.make_raw();
    // The modem's control lines say nothing about a management controller.
    settings.control_modes |= ControlModes::CLOCAL | ControlModes::CREAD;
    settings.control_modes &= !ControlModes::CRTSCTS;
    if let Some(baud) = baud {
        settings.set_speed(baud)?;
    }
    rustix::termios::tcsetattr(&fd, OptionalActions::Now, &settings)
}

/// A Unix socket whose connections are lines.
#[derive(Debug)]
pub(super) struct WireListener {
    listener: UnixListener,
    path: PathBuf,
    _lock: File,
}

impl Drop for WireListener {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

impl WireListener {
    /// Binds the socket, for root and the daemon's user only.
    pub(super) async fn bind(path: &Path) -> io::Result<Self> {
        if path.as_os_str().len() >= SOCKET_PATH_BYTES {
            let why = format!(
                "the socket's path is too long (at most {} bytes): {}",
                SOCKET_PATH_BYTES - 1,
                path.display()
            );
            return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
        }
        // It waits for another holder's end.
        let locked = path.to_owned();
        let lock = move || lock_file(&locked, &format!("listens at {}", locked.display()));
        let lock = tokio::task::spawn_blocking(lock).await;
        let lock = lock.map_err(io::Error::other)??;
        match std::fs::symlink_metadata(path) {
            Ok(old) if old.file_type().is_socket() => std::fs::remove_file(path)?,
            Ok(_) => {
                let why = format!("{} exists, and is no socket", path.display());
                return Err(io::Error::new(io::ErrorKind::AlreadyExists, why));
            }
            Err(_) => {}
        }
        let listener =
            UnixListener::bind(path).map_err(|error| named("can't bind", path, error))?;
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))
            .map_err(|error| named("can't set the mode of", path, error))?;
        Ok(Self {
            listener,
            path: path.to_owned(),
            _lock: lock,
        })
    }

    pub(super) async fn accept(&self) -> io::Result<UnixStream> {
        self.listener.accept().await.map(|(stream, _)| stream)
    }
}
