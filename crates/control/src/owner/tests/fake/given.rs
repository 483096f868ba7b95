//! The fake engine's deposits, and its estate from a dead engine.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

use forebay_xlate::boundary::message::{Blamed, FromEngine, Held, ToEngine};

use super::Fake;

#[derive(Default)]
pub(in super::super) struct Given {
    pub(in super::super) request: u64,
    pub(in super::super) generation: u64,
    pub(in super::super) blamed: Option<Blamed>,
    /// Region and memory.
    pub(in super::super) files: Vec<OwnedFd>,
    pub(in super::super) sockets: Vec<(u64, OwnedFd)>,
}

impl Given {
    pub(super) fn take(&mut self, message: &ToEngine, descriptors: Vec<OwnedFd>) {
        match message {
            ToEngine::TakeOver {
                request,
                generation,
                blamed,
            } => {
                *self = Self {
                    request: *request,
                    generation: *generation,
                    blamed: *blamed,
                    files: descriptors,
                    sockets: Vec::new(),
                };
            }
            ToEngine::Sockets { sockets } => {
                assert_eq!(sockets.len(), descriptors.len());
                self.sockets
                    .extend(sockets.iter().copied().zip(descriptors));
            }
            _ => {}
        }
    }
}

impl Fake {
    /// Deposits a connection; returns the host's end.
    pub(in super::super) fn deposit(&mut self, socket: u64) -> UnixStream {
        let (ours, host) = UnixStream::pair().unwrap();
        let message = FromEngine::Socket { socket };
        self.channel.send(&message, vec![ours.into()]).unwrap();
        host
    }

    pub(in super::super) fn send_queued(&mut self) {
        self.channel.flush().unwrap();
    }

    pub(in super::super) fn with_memory(mut self) -> Self {
        let memory = tempfile::tempfile().unwrap().into();
        self.held.push((Held::Memory, vec![memory]));
        self
    }
}
