//! Implements [`Frontend`]. **Not here:** one connection's turn ([`super::visit`]), how connections
//! begin and end ([`super::attach`], [`super::lifecycle`]).

use super::conn::{Conn, Life};
use super::controllers::{self, Attached, Quiesce};
use super::{BLOCKED_LIMIT_NS, DATA_LIMIT_NS, NvmeTcp, RETRY_NS, TcpMessage, TurnEvent, command};
use crate::core::Core;
use crate::frontend::{Beside, Frontend};
use crate::lane::LaneIndex;
use forebay_nvme::Status;
use forebay_xlate::VolumeId;
use forebay_xlate::boundary::message::ExportId;

impl Frontend for NvmeTcp {
    fn poll(&mut self, core: &mut Core, beside: Beside<'_>) -> bool {
        let mut any = self.collect_ended(core);
        let active = self.active.len();
        if active > 0 {
            // Round robin.
            self.first = (self.first + 1) % active;
            for i in 0..active {
                let index = self.active[(self.first + i) % active];
                let came = self.visit(core, index);
                any |= came;
                if came {
                    beside(core);
                }
            }
            any |= self.collect_ended(core);
            let conns = &mut self.conns;
            self.active.retain(|i| match conns.get_mut(*i as usize) {
                Some(Some(conn)) => {
                    // A blocked one may have been unblocked by its visit.
                    conn.visits.active |= conn.must_retry();
                    conn.visits.listed = conn.visits.active;
                    conn.visits.active
                }
                _ => false,
            });
        }
        if self.waits_for_control() {
            any |= self.reserve(core);
        }
        if self.lists_left > 0 {
            self.poll_lists(core);
            any = true;
        }
        any |= self.send_all(core, beside);
        if !self.events.is_empty() {
            self.settle(core);
            self.send_all(core, beside);
            any = true;
        }
        any
    }

    fn sockets_ready(&mut self, _core: &mut Core, keys: &[u64]) {
        for key in keys {
            let index = *key as u32;
            if let Some(Some(conn)) = self.conns.get_mut(index as usize)
                && conn.socket.key == *key
            {
                conn.visits.quiet_turns = 0;
                conn.socket.hung_up |= conn.socket.is_watched_for_its_end();
                conn.visits.active = conn.life != Life::Draining;
                if conn.visits.active && !conn.visits.listed {
                    conn.visits.listed = true;
                    self.active.push(index);
                }
            }
        }
    }

    fn is_idle(&self) -> bool {
        self.dirty.is_empty() && self.events.is_empty() && self.lists_left == 0
    }

    fn arm(&mut self, core: &mut Core) -> bool {
        for at in 0..self.active.len() {
            let index = self.active[at];
            let Some(Some(conn)) = self.conns.get_mut(index as usize) else {
                continue;
            };
            let takes = !conn.is_open() || !conn.rx.stalled() && !conn.is_held_back(core);
            if conn
                .socket
                .listen(&conn.shared.epoll, conn.tx.blocked(), takes)
                .is_err()
            {
                self.close(core, index);
            }
        }
        self.is_idle()
    }

    fn retry_within_ns(&self) -> Option<u64> {
        let must_retry = |i: &u32| {
            self.conns
                .get(*i as usize)
                .is_some_and(|c| c.as_ref().is_some_and(|c| c.must_retry()))
        };
        // Freed memory or room wakes the reactor; this is a safety net.
        (self.active.iter().any(must_retry) || self.is_draining()).then_some(RETRY_NS)
    }

    fn next_deadline_ns(&self) -> Option<u64> {
        let of_conn = |c: &Conn| {
            let leaving = match c.life {
                Life::Leaving { until_ns } => Some(until_ns),
                _ => None,
            };
            let data = (c.charge.receiving > 0)
                .then(|| c.slots.oldest_asked_ns())
                .flatten()
                .map(|t| t.saturating_add(DATA_LIMIT_NS));
            let blocked = (c.socket.blocked_since_ns > 0)
                .then(|| c.socket.blocked_since_ns.saturating_add(BLOCKED_LIMIT_NS));
            [leaving, data, blocked].into_iter().flatten().min()
        };
        let conns = self.conns.iter().flatten().filter_map(|c| of_conn(c)).min();
        let of_controller = |(_, a): (u32, &controllers::Attached)| match a.quiesce {
            // The core had no room for its flush: retry soon.
            Quiesce::Draining { .. } => Some(0),
            _ => a.admin.and(a.controller.deadline_ns()),
        };
        let controllers = self.controllers.iter().filter_map(of_controller).min();
        let reserving = self.reserving_deadline_ns();
        (conns.into_iter().chain(controllers))
            .chain(reserving)
            .min()
    }

    fn tick(&mut self, core: &mut Core) {
        core.blame(None);
        let now = core.now_ns();
        for index in 0..self.conns.len() {
            if self.is_late(index, now) {
                self.poll_socket(core, index as u32);
                if self.is_late(index, now) {
                    self.close(core, index as u32);
                }
            }
        }
        let silent = |a: &Attached| a.controller.deadline_ns().is_some_and(|at| now >= at);
        let mut late = Vec::new();
        for (index, attached) in self.controllers.iter() {
            late.extend(attached.admin.filter(|_| silent(attached)));
            if let Quiesce::Draining { .. } = attached.quiesce {
                self.events.push(TurnEvent::Quiesce(index));
            }
        }
        for admin in late {
            self.poll_socket(core, admin);
            let Some(Some(conn)) = self.conns.get(admin as usize) else {
                continue;
            };
            let heard = !conn.rx.stalled() && !conn.tx.blocked();
            let Some(attached) = self.controllers.get_mut(conn.controller) else {
                continue;
            };
            if !heard {
                attached.controller.is_not_heard(now);
            } else if attached.controller.expire(now) {
                self.close(core, admin);
            }
        }
        self.settle(core);
        self.send_all(core, &mut |_| false);
    }

    fn waits_for_control(&self) -> bool {
        !self.reserving.is_empty() || !self.shared.reserve.borrow().is_empty()
    }

    fn accept(
        &mut self,
        core: &mut Core,
        message: crate::frontend::FrontendMessage,
    ) -> Result<(), crate::frontend::FrontendMessage> {
        match *message.downcast::<TcpMessage>()? {
            TcpMessage::Connection(new) => self.attach(core, *new),
            TcpMessage::Inherit(part) => self.inherit(core, *part),
            TcpMessage::Ports(ports) => self.set_ports(core, ports),
            TcpMessage::DiscoveryChanged => self.discovery_changed(),
            TcpMessage::Reservations(volume, state) => {
                let status = Status::RESERVATION_CONFLICT.with_dnr();
                self.set_reservations(core, volume, &state, status);
            }
            TcpMessage::Reserved(token, volume, status, state) => {
                self.reserved(core, token, volume, status, &state);
            }
        }
        Ok(())
    }

    fn export_changed(&mut self, core: &mut Core, export: ExportId) -> u32 {
        let mut unwelcome = Vec::new();
        let mut conns = Vec::new();
        let mut reported = Vec::new();
        for (_, attached) in self
            .controllers
            .iter_mut()
            .filter(|(_, a)| a.export == Some(export))
        {
            let Some(lane) = attached.lane.and_then(|l| core.lane(l)) else {
                continue;
            };
            let host = attached.controller.hostnqn();
            if !lane.export.any_host && !lane.export.hosts.contains(host.as_str()) {
                unwelcome.extend(attached.admin);
                conns.extend_from_slice(&attached.conns);
                continue;
            }
            let Some(admin) = attached.admin else {
                continue;
            };
            let blocks = lane.volume.blocks();
            if blocks != attached.blocks {
                attached.blocks = blocks;
                attached.controller.namespace_changed(command::NSID);
                if let Some(Some(conn)) = self.conns.get_mut(admin as usize) {
                    conn.deliver_events(core, attached);
                    reported.push(admin);
                }
            }
        }
        self.finish(core, &unwelcome, &reported);
        self.end_commands_of(core, &conns)
    }

    fn export_removed(&mut self, core: &mut Core, export: ExportId) -> u32 {
        let mut unwelcome = Vec::new();
        let mut conns = Vec::new();
        let of = (self.controllers.iter()).filter(|(_, a)| a.export == Some(export));
        for (_, attached) in of {
            unwelcome.extend(attached.admin);
            conns.extend_from_slice(&attached.conns);
        }
        self.finish(core, &unwelcome, &[]);
        self.end_commands_of(core, &conns)
    }

    fn volume_changed(&mut self, core: &mut Core, volume: VolumeId) {
        let of = core.lanes.exports_of(volume);
        self.refresh(core, |attached| {
            attached.export.is_some_and(|export| of.contains(&export))
        });
    }

    fn shares_changed(&mut self, core: &Core) {
        for (lane, of) in self.shared.lanes.borrow().iter() {
            let lane = core.lane(LaneIndex(*lane));
            (self.shared).give_to(of, lane.and_then(|lane| Some(lane.share?.tenant)));
        }
    }

    fn close_all(&mut self, core: &mut Core) {
        self.stopping = true;
        for index in 0..self.conns.len() {
            self.close(core, index as u32);
        }
        self.settle(core);
    }

    fn count(&self) -> usize {
        self.conns.iter().flatten().count()
    }
}
