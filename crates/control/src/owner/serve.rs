//! Serves one engine's session: gives each message to its module, and tells a new engine everything
//! in order.
//!
//! An engine acts only when it has the state of a dead predecessor; then it gets listeners, and
//! grants last.

use std::cell::RefCell;
use std::os::fd::OwnedFd;
use std::rc::Rc;

use forebay_xlate::boundary::message::{FaultAsk, FromEngine};
use forebay_xlate::kill_point;

use crate::base::count_by;
use crate::events::EventFields;
use crate::link::EngineProgress;
use crate::link::session::{Estate, Greeting, Session};
use crate::model::events::EventKind;
use crate::owner::Owner;

impl Owner {
    /// First hands over a dead engine's state, and empties `estate` once the engine has it.
    pub(crate) async fn serve(
        self: &Rc<Self>,
        greeting: Greeting,
        estate: &RefCell<Option<Estate>>,
        progress: impl Fn(EngineProgress),
    ) {
        let Greeting {
            session,
            held,
            early,
            table: _,
        } = greeting;
        if !held.is_empty() {
            self.hosts.found.set(true);
        }
        // Messages are read from here on, because the ends of inherited jobs are among them.
        let reader = self.clone().converse(session.clone(), early);
        let published = async {
            self.mapping.finish_adoption(Some(&session)).await;
            let (mut asked, addresses) = self.send_configuration(&session, held);
            // At once, because this daemon may die next.
            let statistics = self.statistics.clone();
            self.base
                .spawn(async move { statistics.save_statistics(false).await });
            kill_point!("daemon.told");
            if !self.link.hand_over(&session, estate, &progress).await {
                // The receiver of `progress` ends this future.
                return std::future::pending().await;
            }
            self.link.acts(&session);
            asked.extend(self.say_listeners(&session, &addresses));
            self.states.carried_out(&session, asked).await;
            progress(EngineProgress::Running);
            tokio::join!(
                self.mapping.publish_all_grants(&session),
                self.mapping.open_after_adoption()
            );
            // Only the reader ends the session.
            std::future::pending::<()>().await;
        };
        tokio::select! {
            () = reader => {}
            () = published => {}
        }
        self.link.hang_up(&session);
    }

    pub(crate) fn use_session(&self, session: &Rc<Session>) {
        let before = self.base.newest_generation.get();
        if before != 0 && session.generation > before {
            let mark = self.base.core.borrow().pool.allocator().quarantine_mark();
            session.quarantined_before.set(Some(mark));
        }
        self.statistics.count_on(session);
        self.mapping.forget_preallocated();
        self.link.begin(session);
    }

    async fn converse(
        self: Rc<Self>,
        session: Rc<Session>,
        early: Vec<(FromEngine, Vec<OwnedFd>)>,
    ) {
        let early = early
            .into_iter()
            .filter_map(|(message, fds)| session.absorb(message, fds));
        self.act_on(&session, &mut early.collect());
        let receive = async {
            let mut messages = Vec::new();
            loop {
                if let Err(error) = session.next_some(&mut messages).await {
                    return error;
                }
                self.act_on(&session, &mut messages);
                // Otherwise a busy engine would starve the other tasks.
                tokio::task::yield_now().await;
            }
        };
        let error = tokio::select! {
            error = receive => error,
            Err(error) = session.run_writer() => error,
        };
        tracing::info!(generation = session.generation, %error, "the connection to the engine ended");
    }

    /// Answers consecutive faults together.
    fn act_on(self: &Rc<Self>, session: &Rc<Session>, messages: &mut Vec<FromEngine>) {
        let mut together: Vec<FaultAsk> = Vec::new();
        for message in messages.drain(..) {
            if let FromEngine::Faults { mut faults } = message {
                count_by(&self.base.counters.faults, faults.len() as u64);
                if together.is_empty() {
                    together = faults;
                } else {
                    together.append(&mut faults);
                }
            } else {
                self.mapping.answer_faults(&std::mem::take(&mut together));
                self.act(session, message);
            }
        }
        self.mapping.answer_faults(&together);
    }

    fn act(self: &Rc<Self>, session: &Rc<Session>, message: FromEngine) {
        match message {
            FromEngine::CommitWanted { volume, sequence } => {
                self.mapping.commit_wanted(session, volume, sequence);
            }
            FromEngine::Release {
                release,
                volume,
                range,
            } => {
                self.mapping
                    .release(session.generation, release, volume, range);
            }
            FromEngine::Reserve(ask) => self.reservations.on_reserve(session, ask),
            FromEngine::HostRefused {
                host,
                subsystem,
                why,
                count,
            } => self
                .hosts
                .host_refused(session, &host, &subsystem, &why, count),
            FromEngine::Vm { .. } | FromEngine::VmDetached { .. } => {
                self.vms.report_vm(session, &message);
            }
            FromEngine::DeviceReady { device } => {
                self.states.device_ready(device);
                self.clients.fenced(device);
            }
            FromEngine::DeviceFailed { device, error } => {
                self.states.device_failed(session, device, error);
            }
            FromEngine::Client { device, address } => {
                self.clients.connected(session, device, address);
            }
            FromEngine::ImageOpened { volume, size_bytes } => {
                self.images.opened(volume, size_bytes);
            }
            FromEngine::ImageFailed { volume, error } => {
                self.images.failed(session, volume, &error);
            }
            FromEngine::Notice { text } => {
                let text = format!("the engine reports: {text}");
                self.base
                    .report(EventKind::Warning, text, EventFields::default());
            }
            other => tracing::warn!(?other, "the engine sent an unexpected message"),
        }
    }
}
