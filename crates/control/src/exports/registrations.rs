//! Hosts' NVMe registrations and reservations: decided here, enforced by the engine.
//!
//! A command is applied in memory, committed, and then answered. The engine repeats a command
//! without an answer, with its token; the catalog keeps the tokens of effective commands, so none
//! counts twice. Each answer carries the current state, so a later answer is never older. An engine
//! learns a volume's state before its export.

use std::rc::Rc;

use forebay_nvme::Status;
use forebay_nvme::reservation::{HostId, ReservationCommand, Reservations};
use forebay_pool::{ErrorKind, HostReservations};
use forebay_xlate::boundary::message::{ReserveAsk, ToEngine};
use forebay_xlate::{VolumeId, kill_point};

use crate::base::Base;
use crate::base::show::host_text;
use crate::events::EventFields;
use crate::exports::hosts::Hosts;
use crate::link::session::{PendingAnswer, Session};
use crate::model::events::EventKind;

#[derive(Debug)]
pub(crate) struct Registrations {
    pub(super) base: Rc<Base>,
    pub(super) hosts: Rc<Hosts>,
}

impl Registrations {
    pub(crate) fn new(base: &Rc<Base>, hosts: &Rc<Hosts>) -> Rc<Self> {
        Rc::new(Self {
            base: base.clone(),
            hosts: hosts.clone(),
        })
    }

    pub(crate) fn on_reserve(self: &Rc<Self>, session: &Rc<Session>, ask: ReserveAsk) {
        let applied = self.reserve(&ask);
        let (owner, session) = (self.clone(), session.clone());
        self.base.spawn(async move {
            if applied.is_ok() {
                // However long that takes; meanwhile the host gets no answer, or may retry. A
                // command without effect waits too, because the state that it found may not be
                // durable.
                kill_point!("reserve.applied");
                owner.base.commit_through().await;
                kill_point!("reserve.durable");
            }
            let status = applied.map_or_else(|status| status.0, |_| 0);
            session.say(&ToEngine::Reserved {
                token: ask.token,
                volume: ask.volume,
                status,
                state: owner.reservations(ask.volume),
            });
        });
    }

    /// True if the command changes the state, now or in an earlier attempt.
    pub(crate) fn reserve(&self, ask: &ReserveAsk) -> Result<bool, Status> {
        let command = ReservationCommand::new(ask.action, ask.keys)?;
        let before = {
            let mut core = self.base.core.borrow_mut();
            let known = core.pool.hosts().reservations_of(ask.volume);
            if known.is_some_and(|known| known.recent.contains(&ask.token)) {
                return Ok(true);
            }
            let before = known.map_or_else(Reservations::default, |known| known.state.clone());
            let mut state = before.clone();
            if !state.apply(ask.host, &command)?.changed {
                return Ok(false);
            }
            let set = core
                .pool
                .set_host_reservations(ask.volume, state, ask.token);
            set.map_err(|error| {
                tracing::error!(volume = %ask.volume, %error, "can't record a reservation");
                match error.kind {
                    ErrorKind::NotFound => Status::INVALID_NAMESPACE_OR_FORMAT.with_dnr(),
                    _ => Status::INTERNAL_ERROR,
                }
            })?;
            before
        };
        self.report_preempted(ask, &command, &before);
        Ok(true)
    }

    fn report_preempted(
        &self,
        ask: &ReserveAsk,
        command: &ReservationCommand,
        before: &Reservations,
    ) {
        let takes = matches!(
            command,
            ReservationCommand::Preempt { .. } | ReservationCommand::Clear { .. }
        );
        let now = self.reservations(ask.volume);
        let others = before.registrants().iter().filter(|r| r.host != ask.host);
        let is_left = |host: &HostId| now.registrants().iter().any(|r| r.host == *host);
        let gone: Vec<String> = others
            .filter(|r| !is_left(&r.host) || before.holds(&r.host) && !now.holds(&r.host))
            .map(|r| host_text(&r.host))
            .collect();
        if !takes || gone.is_empty() {
            return;
        }
        let (name, export) = {
            let core = self.base.core.borrow();
            let export = core
                .pool
                .exports()
                .first_of(ask.volume)
                .map(|export| export.id);
            (self.base.volume_name(&core, ask.volume), export)
        };
        let host = host_text(&ask.host);
        let text = format!(
            "host {host} took registrations or the reservation of volume {name} from {}",
            match &gone[..] {
                [one] => format!("host {one}"),
                [one, others @ ..] => format!("host {one} and {} others", others.len()),
                [] => String::new(),
            }
        );
        let fields = EventFields {
            export: export.map(|export| self.hosts.export_name(export)),
            host: Some(host),
            count: Some(gone.len() as u64),
            ..EventFields::default()
        };
        let generation = self.base.newest_generation.get();
        self.base
            .events
            .report(EventKind::ReservationPreempted, generation, text, fields);
    }

    fn reservations(&self, volume: VolumeId) -> Reservations {
        let core = self.base.core.borrow();
        let known = core.pool.hosts().reservations_of(volume);
        known.map_or_else(Reservations::default, |known| known.state.clone())
    }

    pub(crate) fn say_reservations(&self, session: &Session) -> Vec<(String, PendingAnswer)> {
        let core = self.base.core.borrow();
        let all = core.pool.hosts().all_reservations();
        let say = |(volume, known): (VolumeId, &HostReservations)| {
            let state = known.state.clone();
            let pending = session.request("reservations", |request| ToEngine::SetReservations {
                request,
                volume,
                state,
            });
            (format!("the reservations of {volume}"), pending)
        };
        all.map(say).collect()
    }
}
