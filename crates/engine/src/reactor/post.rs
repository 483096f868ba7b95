//! Carries out posts of the control thread between turns. **Not here:** the posts
//! ([`super::mailbox::Post`]).

use super::Reactor;
use super::mailbox::Post;
use crate::core::Released;
use crate::frontend::FrontendMessage;
use crate::lane::{Lane, LaneIndex};
use crate::upcall::Upcall;
use crate::volume::Volume;
use forebay_xlate::boundary::message::ExportId;
use forebay_xlate::boundary::message::Spread;
use forebay_xlate::engine_side;
use forebay_xlate::reactor_side::Answer;
use std::sync::Arc;

impl Reactor {
    pub(super) fn handle(&mut self, post: Post) {
        let core = &mut self.core;
        core.blame(None);
        match post {
            Post::Device(served) => core.set_device(served),
            Post::Statistics(volume, statistics) => {
                core.lanes.set_statistics(volume, statistics);
                for frontend in &mut self.frontends {
                    frontend.volume_changed(core, volume);
                }
            }
            Post::Admission(admission) => core.set_admission(admission),
            Post::NewTenant(tenant) => core.qos.begin_tenant(tenant),
            Post::Budget(tenant, budget, guaranteed) => {
                core.qos.set_budget(tenant, &budget, guaranteed);
            }
            Post::Share(volume, share) => {
                core.set_share(volume, share);
                self.shares_changed();
            }
            Post::Fenced(device) => core.fenced(device),
            Post::ImageChanged => core.retry_not_ready(),
            Post::Expect(device, expected) => core.recovered.expect(device, expected),
            Post::Lane(lane, request) => self.set_lane(*lane, request),
            Post::RemoveLane(lane, export, request) => self.remove_lane(lane, export, request),
            Post::Volume(volume) => self.set_volume(&volume),
            Post::Frontend(message) => self.report(message),
            Post::Inherit(messages) => {
                for message in messages {
                    self.report(message);
                }
            }
            Post::Spread(spread) => core.set_spread(spread),
            Post::Stop => {
                core.set_spread(Spread::OneToOne);
                core.offload.be_quiet();
                for frontend in &mut self.frontends {
                    frontend.close_all(core);
                }
            }
            Post::Space(post) => self.handle_space(post),
        }
    }

    fn handle_space(&mut self, post: engine_side::ProtocolPost) {
        let core = &mut self.core;
        match post {
            engine_side::ProtocolPost::Granted(volume, range) => {
                core.fault_answered(volume, range, Answer::Granted)
            }
            engine_side::ProtocolPost::FaultFailed(volume, range, write, reason) => {
                core.fault_answered(volume, range, Answer::Failed { write, reason });
            }
            engine_side::ProtocolPost::Revoke {
                revoke,
                volume,
                range,
                writes_only,
            } => core
                .slices
                .revoke(revoke, volume, range, writes_only, &mut core.upcalls),
            engine_side::ProtocolPost::Abandon(revoke) => core.slices.abandon(revoke),
            engine_side::ProtocolPost::Settle(job, device) => core.settle(job, device),
            engine_side::ProtocolPost::Committed(volume) => core.commit_ended(volume, Ok(())),
            engine_side::ProtocolPost::CommitFailed(volume, sequence) => {
                core.commit_ended(volume, Err(sequence))
            }
            engine_side::ProtocolPost::ReleaseDone(io, generation, extents) => {
                core.release_ended(io, generation, Released::Done(extents));
            }
            engine_side::ProtocolPost::ReleaseFailed(io, generation) => {
                core.release_ended(io, generation, Released::Failed)
            }
            engine_side::ProtocolPost::ReleaseAbandoned(io, generation) => {
                core.release_ended(io, generation, Released::Abandoned)
            }
            engine_side::ProtocolPost::Job(job, work) => core.jobs.start(job, work),
            engine_side::ProtocolPost::HungUp => core.overwrites.hung_up(),
        }
    }

    /// Gives a message to the frontend that knows its type.
    fn report(&mut self, mut message: FrontendMessage) {
        self.core.blame(None);
        for frontend in &mut self.frontends {
            match frontend.accept(&mut self.core, message) {
                Ok(()) => return,
                Err(others) => message = others,
            }
        }
        debug_assert!(false, "a message that no frontend knows");
    }

    fn shares_changed(&mut self) {
        for frontend in &mut self.frontends {
            frontend.shares_changed(&self.core);
        }
    }

    fn set_lane(&mut self, lane: Lane, request: u64) {
        let export = lane.export.export;
        self.core.set_lane(lane);
        self.shares_changed();
        let at_devices = self.export_changed(export);
        self.core.upcalls.push_back(Upcall::ExportSettled {
            request,
            at_devices,
        });
    }

    fn set_volume(&mut self, volume: &Arc<Volume>) {
        self.core.lanes.set_volume(volume);
        for export in self.core.lanes.exports_of(volume.id()) {
            self.export_changed(export);
        }
    }

    fn export_changed(&mut self, export: ExportId) -> u32 {
        let core = &mut self.core;
        let all = self.frontends.iter_mut();
        all.map(|one| one.export_changed(core, export)).sum()
    }

    fn remove_lane(&mut self, lane: LaneIndex, export: ExportId, request: u64) {
        let core = &mut self.core;
        let all = self.frontends.iter_mut();
        let at_devices = all.map(|one| one.export_removed(core, export)).sum();
        core.remove_lane(lane);
        core.upcalls.push_back(Upcall::ExportSettled {
            request,
            at_devices,
        });
    }
}
