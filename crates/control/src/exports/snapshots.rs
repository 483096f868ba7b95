//! Snapshots, clones and rollback of volumes for the API. `mapping::snapshot` does the work.

use std::rc::Rc;

use forebay_pool::{ErrorKind, ExportRecord, NewClone, NewSnapshot, PoolError, SNAPSHOT_MARK};
use forebay_xlate::VolumeId;

use crate::devices::api_error;
use crate::exports::volumes::{Volumes, reservation_error};
use crate::mapping::snapshot::SnapshotError;
use crate::model::error::{self, ApiError};
use crate::model::{SnapshotSpace, Volume, VolumeClone, VolumeRollback};

const NAMED_MAX: usize = 8;
const SEE_STATUS: &str = "see `forebay status` for the engine and its devices, and try again";

impl Volumes {
    /// `names`: of the snapshots, as `db@monday`. All are taken at one moment.
    pub(crate) async fn snapshots_take(
        &self,
        tenant: String,
        names: Vec<String>,
    ) -> Result<Vec<Volume>, ApiError> {
        let volumes: Vec<_> = names.iter().map(|name| (&*tenant, &**name)).collect();
        let _turns = self.base.turns_for_api(&volumes).await?;
        let new = |name: &String| {
            let (volume, name) = name.split_once(SNAPSHOT_MARK).unwrap_or((name, ""));
            Ok(NewSnapshot {
                volume: self.base.volume_id(&tenant, volume)?,
                name: name.to_owned(),
            })
        };
        let new: Vec<NewSnapshot> = names.iter().map(new).collect::<Result<_, ApiError>>()?;
        let images = new
            .iter()
            .map(|new| Some((new.volume, self.image_of(new.volume)?)));
        if let Some((id, of)) = images.flatten().next() {
            let [name] = &*names else {
                return Err(ApiError::invalid(format!(
                    "{} is in Ceph, which takes no snapshots of several volumes at one moment",
                    self.base.volume_name(&self.base.core.borrow(), id)
                ))
                .hint("take its snapshot with a command of its own"));
            };
            return Ok(vec![self.snapshot_image(&tenant, name, id, of).await?]);
        }
        let check = || self.base.core.borrow_mut().pool.snapshots().check(&new);
        self.with_space_taken_back(check)
            .await
            .map_err(snapshot_pool_error)?;
        self.base.wait_open_for_api().await?;
        let taken = self.mapping.snapshot(new).await;
        taken.map_err(|error| match error {
            SnapshotError::Pool(error) => snapshot_pool_error(error),
            error => ApiError::unavailable(format!("no snapshot was taken: {error}"))
                .hint(format!("nothing was changed; {SEE_STATUS}")),
        })?;
        let shown = names
            .iter()
            .map(|name| self.base.volume_show(&tenant, name));
        shown.collect()
    }

    /// Other work goes on between parts of the search.
    pub(crate) async fn snapshots_list(
        &self,
        tenant: String,
    ) -> Result<Vec<SnapshotSpace>, ApiError> {
        let mut listed = Vec::new();
        for volume in self.base.volume_list(Some(&tenant))? {
            if volume.snapshot.is_none() {
                continue;
            }
            let (mut extents, mut from) = (0, Some(0));
            while let Some(chunk) = from {
                let alone = {
                    let core = self.base.core.borrow();
                    core.pool.volumes().alone(VolumeId(volume.id), chunk)
                };
                // It may have been deleted meanwhile.
                let (some, next) = alone.unwrap_or((0, None));
                (extents, from) = (extents + some, next);
                tokio::task::yield_now().await;
            }
            let extent_bytes = self.base.core.borrow().pool.info().extent_bytes;
            listed.push(SnapshotSpace {
                volume,
                alone_bytes: extents * extent_bytes,
            });
        }
        Ok(listed)
    }

    pub(crate) async fn snapshot_clone(
        self: &Rc<Self>,
        tenant: String,
        snapshot: String,
        body: VolumeClone,
    ) -> Result<Volume, ApiError> {
        let to = body.tenant.clone().unwrap_or_else(|| tenant.clone());
        let volumes = [(&*tenant, &*snapshot), (&*to, &*body.name)];
        let turns = self.base.turns_for_api(&volumes).await?;
        let of = self.base.volume_show(&tenant, &snapshot)?;
        if let Some(image) = self.image_of(VolumeId(of.id)) {
            self.clone_image(&of, image, &to, &body, turns).await?;
            return self.base.volume_show(&to, &body.name);
        }
        if body.rbd.is_some() {
            return Err(ApiError::invalid(format!(
                "{tenant}/{snapshot} is in the pool, and so is its clone"
            ))
            .hint("leave --rbd out (`rbd` in the API)"));
        }
        let new = NewClone {
            snapshot: VolumeId(of.id),
            tenant: to.clone(),
            name: body.name.clone(),
            reserved_bytes: body.reserved_bytes,
        };
        let clone = || self.mapping.clone_snapshot(&new);
        let id = self.with_space_taken_back(clone).await;
        let id = id.map_err(|error| {
            let pool = &self.base.core.borrow().pool;
            let error = reservation_error(pool, error, new.reserved_bytes, of.size_bytes);
            match of.snapshot {
                Some(_) => error,
                None => error.hint(format!(
                    "take a snapshot first: `forebay volume snapshot {tenant}/{snapshot}@NAME`"
                )),
            }
        })?;
        self.commit_and_push(id, turns).await?;
        self.base.volume_show(&to, &body.name)
    }

    /// Refuses while hosts or VMs are connected, unless the body says otherwise.
    pub(crate) async fn volume_roll_back(
        self: &Rc<Self>,
        tenant: String,
        volume: String,
        body: VolumeRollback,
    ) -> Result<Volume, ApiError> {
        let turn = self.base.turn_for_api(&tenant, &volume).await?;
        let id = self.base.volume_id(&tenant, &volume)?;
        if let Some(of) = self.image_of(id) {
            let rolled = (&*tenant, &*volume, id);
            self.roll_back_image(rolled, of, &body, turn).await?;
            return self.base.volume_show(&tenant, &volume);
        }
        let snapshot = self.base.volume_id(&tenant, &body.snapshot)?;
        let name = format!("{tenant}/{volume}");
        let hint = |error: ApiError| {
            error.hint(
                "disconnect them first, or use --while-connected (`while_connected` in the API): the content then \
                changes while they use it, which a mounted file system does not survive",
            )
        };
        self.change_content(id, &name, Some(snapshot), body.while_connected)
            .await
            .map_err(|error| match error.kind {
                error::ErrorKind::InUse if error.hint.is_none() => hint(error),
                _ => error,
            })?;
        self.base.volume_show(&tenant, &volume)
    }

    /// Erases a volume to zeros, unless hosts are connected. `id`: the one that must still have the
    /// name.
    pub(crate) async fn volume_erase(
        &self,
        tenant: &str,
        volume: &str,
        id: u64,
    ) -> Result<(), ApiError> {
        let _turn = self.base.turn_for_api(tenant, volume).await?;
        let id = VolumeId(id);
        self.base.refuse_other(tenant, volume, id)?;
        self.refuse_image(id, "erased at once")?;
        let name = format!("{tenant}/{volume}");
        self.change_content(id, &name, None, false).await
    }

    /// To a snapshot's content, or to zeros.
    async fn change_content(
        &self,
        id: VolumeId,
        name: &str,
        to: Option<VolumeId>,
        while_connected: bool,
    ) -> Result<(), ApiError> {
        let pool_check = || {
            let pool = &mut self.base.core.borrow_mut().pool;
            pool.snapshots().check_roll_back(id, to)
        };
        pool_check().map_err(api_error)?;
        let transfers = &self.transfers;
        transfers
            .transfers
            .refuse_while_importing(id, name, &[], false)?;
        let what = format!("volume {name}");
        let is_used = |export: &ExportRecord, _: Option<&str>| export.volume == id;
        if !while_connected {
            transfers.hosts.refuse_in_use(&what, is_used).await?;
        }
        self.base.wait_open_for_api().await?;
        // Others may connect meanwhile.
        let check = || match while_connected {
            true => Ok(()),
            false => transfers.hosts.refuse_in_use_now(&what, is_used),
        };
        let changed = self.mapping.roll_back(id, to, &check).await;
        changed.map_err(|error| match error {
            SnapshotError::Pool(error) => api_error(error),
            SnapshotError::InUse(error) => error,
            error => ApiError::unavailable(format!("volume {name} is still in use: {error}")).hint(
                format!("`forebay volume show {name}` shows the volume; {SEE_STATUS}"),
            ),
        })
    }

    /// Says what stays of a deleted volume or snapshot.
    pub(super) fn what_stays(&self, id: VolumeId, tenant: &str, was_snapshot: bool) -> String {
        if was_snapshot {
            return "; space that its volume, other snapshots or clones need stays in use"
                .to_owned();
        }
        let core = self.base.core.borrow();
        let of = core.pool.volumes().records();
        let of = of.filter(|record| record.layering.snapshot_of == Some(id));
        stay(
            &of.map(|record| format!("{tenant}/{}", record.name))
                .collect::<Vec<_>>(),
        )
    }
}

fn stay(snapshots: &[String]) -> String {
    let named = &snapshots[..snapshots.len().min(NAMED_MAX)];
    let named = named.join(", ");
    match snapshots.len() {
        0 => String::new(),
        1 => format!("; its snapshot {named} stays"),
        all @ ..=NAMED_MAX => format!("; its {all} snapshots stay: {named}"),
        all => format!(
            "; its {all} snapshots stay: {named}, and {} more",
            all - NAMED_MAX
        ),
    }
}

fn snapshot_pool_error(error: PoolError) -> ApiError {
    let kind = error.kind;
    let reported = api_error(error);
    match kind {
        ErrorKind::NoSpace => reported.hint(
            "a snapshot of a reserved volume reserves the space of its next writes again: reserve less (`forebay \
            volume set --reserve`), delete other snapshots, or add a device (`forebay device add`)",
        ),
        ErrorKind::Exists => reported.hint("`forebay volume snapshots` lists the snapshots"),
        _ => reported,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn snapshots_that_stay_are_named_up_to_a_limit() {
        let names =
            |count: usize| -> Vec<String> { (0..count).map(|n| format!("a/d@{n}")).collect() };
        assert_eq!(stay(&names(0)), "");
        assert_eq!(stay(&names(1)), "; its snapshot a/d@0 stays");
        assert_eq!(stay(&names(2)), "; its 2 snapshots stay: a/d@0, a/d@1");
        assert!(
            stay(&names(8)).ends_with(": a/d@0, a/d@1, a/d@2, a/d@3, a/d@4, a/d@5, a/d@6, a/d@7")
        );
        assert!(stay(&names(10)).ends_with(", a/d@7, and 2 more"));
    }
}
