//! Bases of tenants whose data lies in Ceph clusters.
//!
//! This node does not know what a cluster can give, nor what other nodes take. So a base is
//! guaranteed there only against a capacity that the operator states for this node.

use std::collections::BTreeSet;

use forebay_pool::{Pool, TenantId};
use forebay_qos::budget::Rate;

use crate::model::scheduling::{self as api, ClusterPromise};
use crate::qos::placement::ReactorPlacement;

/// The clusters of a tenant's volumes.
fn clusters_of(pool: &Pool, tenant: TenantId) -> BTreeSet<&str> {
    let volumes = pool.volumes().of_tenant(tenant);
    let images = volumes.filter_map(|volume| pool.images().of(volume.id));
    images.map(|image| image.cluster.as_str()).collect()
}

fn shown(rate: Rate) -> api::Rate {
    api::Rate {
        iops: rate.iops,
        bytes_s: rate.bytes,
    }
}

impl ReactorPlacement {
    /// What the clusters of a tenant's volumes must give to all tenants there.
    pub(crate) fn cluster_promises(&self, tenant: TenantId) -> Vec<ClusterPromise> {
        let core = self.base.core.borrow();
        let pool = &core.pool;
        let promise = |cluster: &str| {
            let mut promised = Rate { iops: 0, bytes: 0 };
            for (tenant, budget) in pool.budgets().tenants() {
                if clusters_of(pool, tenant).contains(cluster) {
                    promised.iops = promised.iops.saturating_add(budget.base.iops);
                    promised.bytes = promised.bytes.saturating_add(budget.base.bytes);
                }
            }
            let config = self.base.clusters.config(cluster).ok();
            let stated = config.and_then(|config| config.capacity);
            let fits =
                |stated: Rate| promised.iops <= stated.iops && promised.bytes <= stated.bytes;
            ClusterPromise {
                cluster: cluster.to_owned(),
                stated: stated.map(shown),
                promised: shown(promised),
                guaranteed: stated.is_some_and(fits),
            }
        };
        clusters_of(pool, tenant).into_iter().map(promise).collect()
    }
}
