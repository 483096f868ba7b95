//! Handles the daemon's messages. Every request may be repeated.

use super::Control;
use super::devices::Devices;
use super::lanes::{KnownExport, clear};
use crate::exports::{Port, Served};
use crate::frontend::nvme_tcp::TcpMessage;
use crate::lane::{Lane, LaneIndex, VolumeStatistics};
use crate::reactor::mailbox::Post;
use crate::volume::Volume;
use forebay_device::heartbeat::Holder;
use forebay_nvme::controller;
use forebay_xlate::VolumeId;
use forebay_xlate::boundary::message::{
    BOUNDARY_VERSION, ExportConfig, ExportId, FromEngine, PathState, PortConfig, ToEngine,
    VolumeConfig,
};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

impl Control {
    pub(super) fn hear(&mut self, message: ToEngine, mut descriptors: Vec<OwnedFd>) {
        match message {
            ToEngine::Hello { version, pool, .. } => {
                if version != BOUNDARY_VERSION || self.pool.id != [0; 16] && self.pool.id != pool {
                    // Identify the engine, so that the daemon can report the mismatch.
                    self.link.greeted = true;
                    let welcome = FromEngine::Welcome {
                        version: BOUNDARY_VERSION,
                        engine_pid: std::process::id(),
                        generation: self.generation,
                        pool: self.pool.id,
                        program: forebay_xlate::boundary::version().to_owned(),
                    };
                    self.say(&welcome);
                    self.drop_channel();
                    return;
                }
                self.link.greeted = true;
                self.welcome();
                self.pool.id = pool;
                if let Some(fd) = descriptors.pop() {
                    self.pool.grant_table = Some(fd);
                }
            }
            // Messages before the greeting are ignored.
            _ if !self.link.greeted => {}
            message => self.hear_configuration(message, descriptors),
        }
    }

    fn hear_configuration(&mut self, message: ToEngine, mut descriptors: Vec<OwnedFd>) {
        match message {
            ToEngine::SetDevice { request, device } => self.set_device(request, device),
            ToEngine::Hold {
                owner,
                boot,
                host,
                devices,
            } => {
                let holder = Holder { owner, boot, host };
                if let Some(heart) = &mut self.heart {
                    heart.hold(holder, devices.into_iter().collect());
                }
            }
            ToEngine::SetVolume { request, volume } => {
                let result = self.set_volume(volume);
                self.done(request, result);
            }
            ToEngine::RemoveVolume { request, volume } => {
                let result = self.remove_volume(volume);
                self.done(request, result);
            }
            ToEngine::SetExport {
                request,
                export,
                reactor,
            } => {
                let result = self.set_export(request, export, reactor);
                self.done(request, result);
            }
            ToEngine::RemoveExport { request, export } => self.remove_export(request, export),
            ToEngine::SetListener { request, address } => {
                let result = self.set_listener(address, descriptors.pop());
                self.done(request, result);
            }
            ToEngine::SetVmListener { request, export } => {
                let result = self.set_vm_listener(export, descriptors.pop());
                self.done(request, result);
            }
            ToEngine::Deposited { socket, last, kept } => {
                self.vm_deposited(socket, last, kept);
            }
            ToEngine::SetPort { request, port } => {
                let result = self.set_port(&port);
                self.done(request, result);
            }
            message => self.hear_settings(message, descriptors),
        }
    }

    fn hear_settings(&mut self, message: ToEngine, descriptors: Vec<OwnedFd>) {
        match message {
            ToEngine::VolumeStatistics {
                volume,
                used_bytes,
                spare_percent,
                spare_threshold_percent,
                warnings,
                past,
            } => {
                let statistics = VolumeStatistics {
                    used_bytes: Some(used_bytes),
                    spare_percent,
                    spare_threshold_percent,
                    warnings,
                    past,
                };
                self.statistics.insert(volume, statistics);
                self.post_all(|| Post::Statistics(volume, statistics));
            }
            ToEngine::SetSpread { request, spread } => {
                self.post_all(|| Post::Spread(spread));
                self.done(request, Ok(()));
            }
            ToEngine::SetScheduling {
                request,
                scheduling,
            } => {
                let result = self.set_scheduling(scheduling);
                self.done(request, result);
            }
            ToEngine::SetTenantBudget {
                request,
                tenant,
                budget,
                credit,
                guaranteed,
            } => {
                let result = self.set_tenant_budget(tenant, budget, credit, guaranteed);
                self.done(request, result);
            }
            ToEngine::SetVolumeBudget {
                request,
                volume,
                tenant,
                budget,
            } => {
                let result = self.set_volume_budget(volume, tenant, budget);
                self.done(request, result);
            }
            ToEngine::SetReservations {
                request,
                volume,
                state,
            } => {
                self.set_reservations(volume, state);
                self.done(request, Ok(()));
            }
            ToEngine::Reserved {
                token,
                volume,
                status,
                state,
            } => self.reserved(token, volume, status, state),
            message => self.hear_protocol(message, descriptors),
        }
    }

    fn hear_protocol(&mut self, message: ToEngine, descriptors: Vec<OwnedFd>) {
        match message {
            ToEngine::TakeOver {
                request,
                generation,
                blamed,
            } => self.take_over(request, generation, blamed, descriptors),
            ToEngine::Sockets { sockets } => self.gather(sockets, descriptors),
            ToEngine::Vm { socket, export } => {
                self.gather_vm(socket, export, descriptors);
            }
            ToEngine::Deposits { numbers } => self.gather_deposits(&numbers, descriptors),
            ToEngine::SocketsEnd => self.convert(),
            ToEngine::Resume { request } => {
                let result = self.resume();
                self.done(request, result);
            }
            ToEngine::Stop => self.stop(),
            other => {
                self.protocol
                    .hear(other, &mut self.volumes, &mut self.effects);
                self.carry_out();
            }
        }
    }

    fn remove_volume(&mut self, volume: VolumeId) -> Result<(), String> {
        let mut exports = self.lanes.exports.values();
        if exports.any(|e| e.config.volume == volume) {
            return Err(format!("{volume} is still exported"));
        }
        self.volumes.0.remove(&volume);
        let Devices { images, known, .. } = &mut self.devices;
        images.forget(known, volume);
        self.reserves.forget(volume);
        self.statistics.remove(&volume);
        self.budgets.forget(volume);
        self.protocol.forget(volume);
        Ok(())
    }

    fn set_listener(&mut self, address: String, fd: Option<OwnedFd>) -> Result<(), String> {
        let result = match fd {
            _ if self.listener.listeners().any(|(a, _)| a == address) => Ok(()),
            Some(fd) => self
                .listener
                .add_listener(address, fd)
                .map_err(|e| format!("listening: {e}")),
            None => Err("the message came without its socket".to_string()),
        };
        let addresses = self.listener.listeners().map(|(a, _)| a.to_string());
        self.exports.set_addresses(addresses.collect());
        result
    }

    fn set_port(&mut self, port: &PortConfig) -> Result<(), String> {
        let address = (port.address.parse()).map_err(|e| format!("port {}: {e}", port.address))?;
        let state = match port.ana {
            PathState::Optimized => controller::AnaState::Optimized,
            PathState::NonOptimized => controller::AnaState::NonOptimized,
            PathState::Inaccessible => controller::AnaState::Inaccessible,
        };
        let ports = self.exports.set_port(Port {
            address,
            id: port.port_id,
            ana: controller::Ana {
                state,
                changes: port.changes,
            },
        });
        self.post_all(|| Post::Frontend(Box::new(TcpMessage::Ports(ports.clone()))));
        self.post_all(|| Post::Frontend(Box::new(TcpMessage::DiscoveryChanged)));
        Ok(())
    }

    fn set_volume(&mut self, config: VolumeConfig) -> Result<(), String> {
        let id = config.volume;
        let known = self.volumes.0.get(&id);
        if let Some(known) = known {
            known.table.set_epoch(config.epoch);
            // A new value would cost time that grows with the volume.
            let same = VolumeConfig {
                epoch: known.config.epoch,
                ..config.clone()
            };
            if known.config == same {
                if let Some(image) = config.image {
                    let Devices { images, known, .. } = &mut self.devices;
                    images.want(known, id, image);
                }
                return Ok(());
            }
        }
        let impossible = format!("{id}: invalid geometry: {config:?}");
        let image = config.image.clone();
        let volume = match known {
            Some(known) => known.resized(config),
            None => Volume::new(config),
        };
        let volume = Arc::new(volume.ok_or(impossible)?);
        self.volumes.0.insert(id, volume.clone());
        self.post_all(|| Post::Volume(volume.clone()));
        if let Some(image) = image {
            let Devices { images, known, .. } = &mut self.devices;
            images.want(known, id, image);
        }
        Ok(())
    }

    fn set_export(
        &mut self,
        request: u64,
        config: ExportConfig,
        reported: Option<u32>,
    ) -> Result<(), String> {
        let Some(volume) = self.volumes.0.get(&config.volume).cloned() else {
            return Err(format!("export {}: its volume is not served", config.nqn));
        };
        let config = Arc::new(config);
        let (reactor, lane) = match self.lanes.exports.get(&config.export) {
            Some(known)
                if known.config.volume != config.volume
                    || known.config.frontend != config.frontend =>
            {
                return Err(format!(
                    "export {}: an export's volume and frontend can't change",
                    config.nqn
                ));
            }
            Some(known) => (known.reactor, known.lane),
            None => {
                let Some(slot) = self.lanes.used.iter().position(|used| !used) else {
                    return Err(format!(
                        "this engine serves at most {} exports",
                        self.lanes.used.len()
                    ));
                };
                self.lanes.used[slot] = true;
                // The volume's reactor knows an earlier export's operations.
                let lanes = self.region.lanes().iter().zip(&self.lanes.used);
                let left = lanes
                    .filter(|(record, used)| {
                        **used
                            && record.export.load(Relaxed) != 0
                            && record.volume.load(Relaxed) == config.volume.0
                    })
                    .map(|(record, _)| record.reactor.load(Relaxed) as usize)
                    .next();
                let reported = reported.map(|reactor| reactor as usize);
                let reported = reported.filter(|reactor| *reactor < self.mailboxes.len());
                let reactor = left
                    .or(reported)
                    .unwrap_or_else(|| self.lanes.idlest_reactor(self.mailboxes.len()));
                let lane = LaneIndex(slot as u32);
                clear(&self.region.lanes()[slot]);
                let record = &self.region.lanes()[slot];
                record.volume.store(config.volume.0, Relaxed);
                record.reactor.store(reactor as u64, Relaxed);
                record
                    .export
                    .store(config.export.0 + 1, std::sync::atomic::Ordering::Release);
                (reactor, lane)
            }
        };
        let known = KnownExport {
            config: config.clone(),
            reactor,
            lane,
        };
        self.lanes.exports.insert(config.export, known);
        let mut new = Lane::new(lane, volume, config.clone(), self.region.clone());
        new.set_reservations(&self.reserves.state(config.volume));
        new.statistics = self
            .statistics
            .get(&config.volume)
            .copied()
            .unwrap_or_default();
        new.share = self.budgets.share(config.volume);
        self.mailboxes[reactor].post(Post::Lane(Box::new(new), request));
        // The lane comes first, so that hosts can be served.
        self.exports.set(Served { config, reactor });
        self.post_all(|| Post::Frontend(Box::new(TcpMessage::DiscoveryChanged)));
        Ok(())
    }

    fn remove_export(&mut self, request: u64, export: ExportId) {
        let Some(known) = self.lanes.exports.remove(&export) else {
            self.done(request, Ok(()));
            let at_devices = 0;
            self.say(&FromEngine::ExportSettled {
                request,
                at_devices,
            });
            return;
        };
        self.exports.remove(export);
        self.remove_vm_listener(export);
        let mailbox = &mut self.mailboxes[known.reactor];
        mailbox.post(Post::RemoveLane(known.lane, export, request));
        self.post_all(|| Post::Frontend(Box::new(TcpMessage::DiscoveryChanged)));
        // New hosts cannot reach it. Others are shut out before `ExportSettled`; their operations
        // at devices may hang, and revokes wait for them.
        self.done(request, Ok(()));
    }
}
