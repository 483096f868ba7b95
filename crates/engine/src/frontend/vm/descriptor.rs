//! What kind of descriptor a client sent. Asks the kernel, never the client, and avoids calls that
//! may wait: a file's file system may be the client's own. **Not here:** the length of memory files
//! (the crate guest checks it).

use std::io;
use std::os::fd::{AsFd, AsRawFd};

/// Whether a client may send it at all: memory, an eventfd or a Unix socket. Closing anything else
/// may hang.
pub(crate) fn is_taken(fd: impl AsFd) -> bool {
    let fd = fd.as_fd();
    is_file(fd) || is_eventfd(fd) || is_unix_stream(fd)
}

pub(crate) fn is_eventfd(fd: impl AsFd) -> bool {
    link_of(fd).is_ok_and(|link| link == b"anon_inode:[eventfd]")
}

/// Vhost's backend channel is one.
pub(crate) fn is_unix_stream(fd: impl AsFd) -> bool {
    use rustix::net::{AddressFamily, SocketType, sockopt};
    let fd = fd.as_fd();
    sockopt::socket_domain(fd).is_ok_and(|domain| domain == AddressFamily::UNIX)
        && sockopt::socket_type(fd).is_ok_and(|kind| kind == SocketType::STREAM)
}

/// Whether it is mappable memory: a memfd, or a file of tmpfs or huge pages. Only these have seals.
pub(crate) fn is_file(fd: impl AsFd) -> bool {
    let fd = fd.as_fd();
    let opened = rustix::fs::fcntl_getfl(fd);
    let path_only = opened.is_ok_and(|flags| flags.contains(rustix::fs::OFlags::PATH));
    !path_only && rustix::fs::fcntl_get_seals(fd).is_ok()
}

fn link_of(fd: impl AsFd) -> io::Result<Vec<u8>> {
    let path = format!("/proc/self/fd/{}", fd.as_fd().as_raw_fd());
    Ok(rustix::fs::readlink(path, Vec::new())?.into_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{EventfdFlags, eventfd};
    use rustix::fs::{Mode, OFlags};
    use rustix::net::{AddressFamily, SocketFlags, SocketType};
    use std::os::fd::OwnedFd;

    fn kinds(fd: &OwnedFd) -> (bool, bool, bool) {
        (is_eventfd(fd), is_unix_stream(fd), is_file(fd))
    }

    #[test]
    fn each_descriptor_kind_is_recognized() {
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        // A file with an eventfd's name is no eventfd.
        let path = folder.path().join("anon_inode:[eventfd]");
        let file: OwnedFd = std::fs::File::create(&path).unwrap().into();
        assert_eq!(kinds(&file), (false, false, true));
        let only_a_path = rustix::fs::open(&path, OFlags::PATH, Mode::empty()).unwrap();
        assert_eq!(kinds(&only_a_path), (false, false, false));
        let on_disk = std::fs::File::open("/proc/self/status").unwrap().into();
        assert_eq!(kinds(&on_disk), (false, false, false));
        assert!(is_taken(&file) && !is_taken(&on_disk) && !is_taken(&only_a_path));
        let directory = rustix::fs::open(folder.path(), OFlags::RDONLY, Mode::empty()).unwrap();
        assert_eq!(kinds(&directory), (false, false, false));
        let memory = rustix::fs::memfd_create("[eventfd]", rustix::fs::MemfdFlags::CLOEXEC);
        assert_eq!(kinds(&memory.unwrap()), (false, false, true));
        let (pipe, _other) = rustix::pipe::pipe().unwrap();
        assert_eq!(kinds(&pipe), (false, false, false));
        for flags in [EventfdFlags::empty(), EventfdFlags::NONBLOCK] {
            assert_eq!(kinds(&eventfd(0, flags).unwrap()), (true, false, false));
        }
        let epoll = rustix::event::epoll::create(rustix::event::epoll::CreateFlags::CLOEXEC);
        assert_eq!(kinds(&epoll.unwrap()), (false, false, false));
        let socket = |family, kind| {
            rustix::net::socket_with(family, kind, SocketFlags::CLOEXEC, None).unwrap()
        };
        let stream = socket(AddressFamily::UNIX, SocketType::STREAM);
        assert_eq!(kinds(&stream), (false, true, false));
        let others = [
            socket(AddressFamily::UNIX, SocketType::DGRAM),
            socket(AddressFamily::INET, SocketType::STREAM),
        ];
        for other in &others {
            assert_eq!(kinds(other), (false, false, false));
        }
        let null: OwnedFd = std::fs::File::open("/dev/null").unwrap().into();
        assert_eq!(kinds(&null), (false, false, false));
    }
}
