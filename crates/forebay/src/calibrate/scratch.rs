//! The volumes of a calibration, in a tenant of its own.
//!
//! A guard removes them in any case; the next calibration removes those of a killed one. A volume's
//! name contains the process's id; while that lives, another calibration is refused. The daemon is
//! kept informed, so that budgets do not limit it.

use std::time::{Duration, Instant};

use forebay_control::api::client::{Client, ClientError};
use forebay_control::model::error::ErrorKind;
use forebay_control::model::scheduling::{
    CALIBRATION_TENANT, CalibrationPut, MOST_CALIBRATION_SECONDS,
};
use forebay_control::model::{
    Done, Export, ExportCreate, ExportFrontend, PoolInfo, Tenant, TenantCreate, Volume,
    VolumeCreate,
};
use forebay_qos::cost::Transport;
use rustix::process::{Pid, test_kill_process};

use super::drive::HOST;
use crate::failure::{Failure, Outcome};

pub(super) const TENANT: &str = CALIBRATION_TENANT;
const LEAST_BYTES: u64 = 4 << 20;
/// All volumes use at most one part in this number of the free space.
const PART: u64 = 4;
/// The limit for zero-filling before the start.
const ZERO_FILL_LIMIT: Duration = Duration::from_secs(10);
/// The limit for an export to release its volume.
const REMOVE_LIMIT: Duration = Duration::from_secs(10);
const POLL: Duration = Duration::from_millis(50);
/// The announced time's margin.
const MARGIN: Duration = Duration::from_secs(30);

pub(super) struct Scratch {
    client: Client,
    /// Per volume.
    pub(super) bytes: u64,
}

impl Scratch {
    /// Removes leftovers and waits for freed space.
    pub(super) fn make(client: &Client, bytes: u64, volumes: u64) -> Outcome<Self> {
        refuse_another(client)?;
        begun(client, ZERO_FILL_LIMIT + 2 * REMOVE_LIMIT)?;
        let mut scratch = Self {
            client: client.clone(),
            bytes: 0,
        };
        remove(client)?;
        let until = Instant::now() + ZERO_FILL_LIMIT;
        let pool = loop {
            let pool: PoolInfo = client.get("/v1/pool")?;
            if pool.dirty_bytes == 0 || Instant::now() > until {
                break pool;
            }
            std::thread::sleep(POLL);
        };
        let least = LEAST_BYTES.max(8 * pool.extent_bytes);
        let bytes = bytes.min(pool.free_bytes / PART / volumes);
        if bytes < least {
            return Err(Failure::new(format!(
                "the pool has only {} bytes free, which is too little for the calibration",
                pool.free_bytes
            ))
            .hint(format!(
                "it needs at least {} bytes; delete a volume, or add a device",
                least * PART * volumes
            )));
        }
        let name = TENANT.to_owned();
        let _: Tenant = client.post("/v1/tenants", &TenantCreate { name })?;
        scratch.bytes = bytes / pool.extent_bytes * pool.extent_bytes;
        Ok(scratch)
    }

    pub(super) fn export(&self, frontend: Transport) -> Outcome<Export> {
        let name = format!("p{}-{}", std::process::id(), short(frontend));
        let volume = VolumeCreate {
            name: name.clone(),
            size_bytes: Some(self.bytes),
            block_bytes: None,
            reserved_bytes: 0,
            rbd: None,
        };
        let path = format!("/v1/tenants/{TENANT}/volumes");
        let _: Volume = self.client.post(&path, &volume)?;
        let frontend = kind(frontend);
        let hosts = match frontend {
            ExportFrontend::NvmeTcp => vec![HOST.to_owned()],
            _ => Vec::new(),
        };
        let export = ExportCreate {
            tenant: TENANT.to_owned(),
            volume: name,
            hosts,
            frontend,
            ..ExportCreate::default()
        };
        Ok(self.client.post("/v1/exports", &export)?)
    }

    /// Announces at least this much more time.
    pub(super) fn goes_on(&self, time: Duration) -> Outcome {
        begun(&self.client, time)
    }

    pub(super) fn remove(self) -> Outcome {
        let removed = remove(&self.client).and_then(|()| ended(&self.client));
        std::mem::forget(self);
        removed
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // Another error is being reported.
        let _ = remove(&self.client);
        let _ = ended(&self.client);
    }
}

/// Announces a calibration for this time and a margin.
fn begun(client: &Client, time: Duration) -> Outcome {
    let seconds = (time + MARGIN).as_secs().min(MOST_CALIBRATION_SECONDS);
    let _: Done = client.put("/v1/scheduling/calibration", &CalibrationPut { seconds })?;
    Ok(())
}

fn ended(client: &Client) -> Outcome {
    let _: Done = client.delete("/v1/scheduling/calibration")?;
    Ok(())
}

pub(super) fn kind(frontend: Transport) -> ExportFrontend {
    match frontend {
        Transport::Tcp => ExportFrontend::NvmeTcp,
        Transport::Pcie => ExportFrontend::NvmePcie,
        Transport::Vhost => ExportFrontend::VhostUser,
    }
}

pub(super) fn short(frontend: Transport) -> &'static str {
    match frontend {
        Transport::Tcp => "nvme-tcp",
        Transport::Pcie => "nvme-pcie",
        Transport::Vhost => "vhost-user",
    }
}

fn volumes(client: &Client) -> Outcome<Vec<Volume>> {
    match client.get(&format!("/v1/tenants/{TENANT}/volumes")) {
        Ok(volumes) => Ok(volumes),
        Err(ClientError::Refused(error)) if error.kind == ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(error.into()),
    }
}

fn refuse_another(client: &Client) -> Outcome {
    for volume in volumes(client)? {
        let Some(pid) = maker(&volume.name).filter(|pid| *pid != std::process::id()) else {
            continue;
        };
        let Some(process) = i32::try_from(pid).ok().and_then(Pid::from_raw) else {
            continue;
        };
        // EPERM means that it is alive too.
        if !matches!(test_kill_process(process), Err(rustix::io::Errno::SRCH)) {
            let wrong = format!("another calibration (pid {pid}) is running");
            let hint = format!(
                "if that process is not a calibration, delete the volume {TENANT}/{}",
                volume.name
            );
            return Err(Failure::new(wrong).hint(hint));
        }
    }
    Ok(())
}

/// The process id in a volume's name.
fn maker(name: &str) -> Option<u32> {
    name.strip_prefix('p')?.split_once('-')?.0.parse().ok()
}

fn remove(client: &Client) -> Outcome {
    for volume in volumes(client)? {
        gone(client, &format!("/v1/exports/{TENANT}/{}", volume.name))?;
        gone(
            client,
            &format!("/v1/tenants/{TENANT}/volumes/{}", volume.name),
        )?;
    }
    gone(client, &format!("/v1/tenants/{TENANT}"))
}

/// Deletes an object that may be missing, or still in use.
fn gone(client: &Client, path: &str) -> Outcome {
    let until = Instant::now() + REMOVE_LIMIT;
    loop {
        match client.delete::<Done>(path) {
            Ok(_) => return Ok(()),
            Err(ClientError::Refused(error)) if error.kind == ErrorKind::NotFound => return Ok(()),
            Err(ClientError::Refused(_)) if Instant::now() < until => std::thread::sleep(POLL),
            Err(error) => return Err(error.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_volume_says_whose_it_is() {
        assert_eq!(maker("p123-nvme-tcp"), Some(123));
        assert_eq!(maker("p-nvme-tcp"), None);
        assert_eq!(maker("db"), None);
        assert_eq!(maker("p99999999999-x"), None);
    }
}
