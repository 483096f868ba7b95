//! One connection's part of a turn: retry waiting commands, take kept bytes, then receive once.
//! **Not here:** what a PDU means ([`super::rx`]), which connections are visited ([`super::turn`]).

use super::conn::{Conn, Life};
use super::rx::{self, Inbound, Received, Stop};
use super::{
    MUCH_BYTES, NvmeTcp, QUIET_TURNS, SEND_BYTES, SEND_LATE_BYTES, SKIPPED_TURNS, TcpTurn,
};
use crate::core::Core;
use std::ops::Range;

impl NvmeTcp {
    pub(super) fn visit(&mut self, core: &mut Core, index: u32) -> bool {
        let Some(Some(conn)) = self.conns.get_mut(index as usize) else {
            return false;
        };
        let mut any = false;
        match conn.life {
            Life::Draining => {
                conn.visits.active = false;
                return false;
            }
            Life::Leaving { .. } => return self.visit_leaving(core, index),
            Life::Open if conn.socket.hung_up => {
                self.close(core, index);
                return true;
            }
            Life::Open => {}
        }
        if conn.tx.blocked() {
            conn.tx.unblock();
            self.send(core, index);
            let Some(Some(conn)) = self.conns.get_mut(index as usize) else {
                return true;
            };
            if conn.tx.blocked() || !conn.is_open() {
                return true;
            }
            any = true;
        }
        let Some(Some(conn)) = self.conns.get_mut(index as usize) else {
            return any;
        };
        if conn.slots.first_waiting().is_some() && conn.retry_waiting(core) {
            any = true;
            self.mark_to_send(index);
        }
        let Some(Some(conn)) = self.conns.get_mut(index as usize) else {
            return any;
        };
        if conn.rx.stalled()
            && let Some(keep) = conn.rx.lend()
        {
            conn.records.blame_stream();
            let kept = &keep.bytes(conn.rx.kept_in())[..conn.rx.kept()];
            let (taken, _) = self.parse_received(core, index, Some(kept), 0..0);
            any |= taken > 0;
            let Some(Some(conn)) = self.conns.get_mut(index as usize) else {
                return true;
            };
            let taken = if conn.is_open() { taken } else { 0 };
            conn.rx.put_back(&conn.records, keep, taken);
            if conn.rx.stalled() || !conn.is_open() {
                return any;
            }
        }
        self.receive(core, index) || any
    }

    fn receive(&mut self, core: &mut Core, index: u32) -> bool {
        let Some(Some(conn)) = self.conns.get_mut(index as usize) else {
            return false;
        };
        if conn.visits.skipped_turns < SKIPPED_TURNS && conn.is_held_back(core) {
            conn.visits.skipped_turns += 1;
            return false;
        }
        conn.visits.skipped_turns = 0;
        conn.stalled = None;
        conn.records.blame_stream();
        let Conn {
            socket,
            rx,
            slots,
            parts,
            records,
            charge,
            ..
        } = &mut **conn;
        let of = Inbound {
            slots,
            parts,
            records,
        };
        let received = rx.receive(socket.fd.as_deref(), of, charge.receiving, &mut self.buffer);
        let (from, to) = match received {
            Received::Nothing => {
                conn.visits.quiet_turns += 1;
                if conn.visits.quiet_turns > QUIET_TURNS / self.active.len().max(1) as u32
                    && !conn.must_retry()
                {
                    conn.visits.active = false;
                    if conn
                        .socket
                        .listen(&conn.shared.epoll, conn.tx.blocked(), true)
                        .is_err()
                    {
                        self.close(core, index);
                    }
                }
                return false;
            }
            Received::Ended => {
                self.close(core, index);
                return true;
            }
            Received::Bytes { from, to } => (from, to),
        };
        conn.visits.quiet_turns = 0;
        let (taken, _) = self.parse_received(core, index, None, from..to);
        if let Some(Some(conn)) = self.conns.get_mut(index as usize) {
            if conn.is_open() {
                conn.rx.keep(&conn.records, &self.buffer[from + taken..to]);
            }
            conn.records.blame_nobody();
        }
        true
    }

    /// Takes PDUs of `kept` or of a part of the receive buffer; returns how many bytes were taken.
    /// Blame is already set to the stream.
    fn parse_received(
        &mut self,
        core: &mut Core,
        index: u32,
        kept: Option<&[u8]>,
        part: Range<usize>,
    ) -> (usize, Stop) {
        let mut at = 0;
        loop {
            let Some(Some(conn)) = self.conns.get_mut(index as usize) else {
                return (at, Stop::Close);
            };
            if !conn.is_open() {
                return (at, Stop::Close);
            }
            let rest = match kept {
                Some(kept) => &kept[at..],
                None => &self.buffer[part.start + at..part.end],
            };
            let mut turn = TcpTurn {
                core,
                controllers: &mut self.controllers,
                events: &mut self.events,
            };
            if at > 0 {
                conn.records.blame_stream();
            }
            conn.send_at_bytes = if rest.len() > MUCH_BYTES {
                SEND_LATE_BYTES
            } else {
                SEND_BYTES
            };
            let (taken, stop) = rx::parse(conn, &mut turn, rest);
            at += taken;
            if let Stop::Terminate(error) = stop {
                let header = &rest[taken..];
                let header_bytes = header
                    .get(2)
                    .map_or(0, |hlen| usize::from(*hlen))
                    .min(header.len());
                conn.terminate(core, &error, &header[..header_bytes]);
            }
            if !conn.tx.is_empty() {
                self.mark_to_send(index);
            }
            match stop {
                Stop::Batch => {
                    self.collect_ended(core);
                }
                Stop::Close => {
                    self.close(core, index);
                    return (at, stop);
                }
                Stop::Dry | Stop::Stalled | Stop::Terminate(_) => return (at, stop),
            }
        }
    }

    /// A closing connection: sends its answers, and drops its input.
    fn visit_leaving(&mut self, core: &mut Core, index: u32) -> bool {
        let Some(Some(conn)) = self.conns.get_mut(index as usize) else {
            return false;
        };
        if conn.tx.blocked() {
            conn.tx.unblock();
            self.mark_to_send(index);
        }
        let Some(Some(conn)) = self.conns.get_mut(index as usize) else {
            return false;
        };
        conn.records.blame_stream();
        let Some(fd) = &conn.socket.fd else {
            return false;
        };
        match rustix::net::recv(fd, &mut self.buffer[..], rustix::net::RecvFlags::DONTWAIT) {
            Ok((_, n)) if n > 0 => true,
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR)
                if conn
                    .socket
                    .listen(&conn.shared.epoll, conn.tx.blocked(), true)
                    .is_ok() =>
            {
                conn.visits.active = false;
                false
            }
            _ => {
                self.close(core, index);
                true
            }
        }
    }
}
