//! Reads the engine's counters from its state region.
//!
//! Related values may be inconsistent, and every index is bounded. A percentile is its bucket's
//! upper end. Each engine counts from zero; its predecessor's counts are added once, at the
//! greeting. `statistics.json` keeps the exact sums of earlier engines, and all sums at the last save,
//! for when the running engine is lost too.

pub(crate) mod used;
pub(crate) mod visible;

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use forebay_pool::{ExportId, ExportRecord, Exports, TenantId};
use forebay_qos::budget::MOST;
use forebay_xlate::boundary::message::Past;
use forebay_xlate::boundary::region::{
    LaneRecord, MAX_REACTORS, OpKind, OpStats as RegionOpStats, ReactorRecord, Region, Times,
    TimesOf, latency_bucket_end_ns,
};
use serde::{Deserialize, Serialize};
use tokio::time::timeout;
use uuid::Uuid;

use crate::base::Base;
use crate::base::show::{
    export_label, limit, show_tenant_budget, show_volume_budget, tenant_name, total_extents,
};
use crate::clock::now_unix_ms;
use crate::files;
use crate::link::Link;
use crate::link::session::Session;
use crate::model::events::TakeoverStats;
use crate::model::stats::{
    Bucket, EngineStats, Histogram, LaneStats, Latency, OpStats, PoolStats, Stats, TenantStats,
};
use crate::statistics::used::{UsedBefore, tenant_stats};

fn histogram(times: &Times) -> Histogram {
    let buckets = times.buckets.iter().enumerate().map(|(at, count)| Bucket {
        end_ns: latency_bucket_end_ns(at),
        count: count.load(Relaxed),
    });
    let buckets: Vec<Bucket> = buckets.filter(|bucket| bucket.count > 0).collect();
    Histogram {
        count: buckets
            .iter()
            .fold(0, |n: u64, b| n.saturating_add(b.count)),
        sum_ns: times.sum_ns.load(Relaxed),
        buckets,
    }
}

fn op_stats(ops: &RegionOpStats) -> OpStats {
    let of = |what: TimesOf| histogram(&ops.times[what as usize]);
    let latency = Latency {
        total: of(TimesOf::Total),
        waiting: of(TimesOf::Waiting),
        translating: of(TimesOf::Translating),
        device: of(TimesOf::Device),
    };
    OpStats {
        ops: ops.ops.load(Relaxed),
        bytes: ops.bytes.load(Relaxed),
        errors: ops.errors.load(Relaxed),
        latency_p50_ns: latency.total.percentile_ns(50),
        latency_p99_ns: latency.total.percentile_ns(99),
        latency,
    }
}

/// Kinds of commands, in the order of [`LaneStats`].
const KINDS: [OpKind; 4] = [
    OpKind::Read,
    OpKind::Write,
    OpKind::Flush,
    OpKind::Deallocate,
];

#[derive(Debug, Default, Clone, Serialize, Deserialize)]
pub(crate) struct Totals {
    /// By kind.
    ops: [OpStats; 4],
    /// Commands that ended with a device error.
    media_errors: u64,
    #[serde(default)]
    copied_bytes: u64,
    #[serde(default)]
    interrupts: u64,
    #[serde(default)]
    throttled_ops: u64,
    #[serde(default)]
    throttled_times: Histogram,
}

fn plus(a: &Totals, b: &Totals) -> Totals {
    Totals {
        ops: std::array::from_fn(|kind| a.ops[kind].plus(&b.ops[kind])),
        media_errors: a.media_errors.saturating_add(b.media_errors),
        copied_bytes: a.copied_bytes.saturating_add(b.copied_bytes),
        interrupts: a.interrupts.saturating_add(b.interrupts),
        throttled_ops: a.throttled_ops.saturating_add(b.throttled_ops),
        throttled_times: a.throttled_times.plus(&b.throttled_times),
    }
}

/// The engine's data is untrusted: other exports are ignored.
fn totals_of<'a>(
    region: &'a Region,
    exports: &BTreeSet<ExportId>,
) -> BTreeMap<ExportId, (Totals, &'a LaneRecord)> {
    let mut all = BTreeMap::new();
    for lane in region.lanes() {
        // Reading the rest of the table would only allocate its pages.
        if all.len() == exports.len() {
            break;
        }
        let export = lane.export.load(Relaxed).checked_sub(1).map(ExportId);
        if let Some(export) = export.filter(|export| exports.contains(export)) {
            let totals = Totals {
                ops: KINDS.map(|kind| op_stats(&lane.ops[kind as usize])),
                media_errors: lane.media_errors.load(Relaxed),
                copied_bytes: lane.copied_bytes.load(Relaxed),
                interrupts: lane.interrupts.load(Relaxed),
                throttled_ops: lane.throttled_ops.load(Relaxed),
                throttled_times: histogram(&lane.throttled_times),
            };
            all.insert(export, (totals, lane));
        }
    }
    all
}

/// The sums of exports over all engines known to this daemon and earlier ones.
#[derive(Debug, Default)]
pub(crate) struct Added {
    /// The newest engine: its generation and region. It may be dead.
    counting: Option<(u64, Rc<Region>)>,
    /// Sums of earlier engines.
    before: BTreeMap<ExportId, Totals>,
    used: UsedBefore,
    /// Tenants that the engine was told to drop. `used` has their counts, and its region may still
    /// have them.
    let_go: BTreeSet<TenantId>,
    pool: Uuid,
    file: Option<PathBuf>,
    /// The time of the last write; `None` if the file lacks something important.
    saved_at: Option<Instant>,
}

const SAVE_EVERY: Duration = Duration::from_secs(60);
const SAVE_LIMIT: Duration = Duration::from_secs(5);

/// The content of `statistics.json`.
#[derive(Debug, Serialize, Deserialize)]
struct Saved {
    pool: Uuid,
    /// Of the running engine.
    generation: u64,
    /// Sums of engines before it.
    before: Sums,
    /// Those sums, with its own at this save.
    with_it: Sums,
}

#[derive(Debug, Default, Clone, Serialize, Deserialize)]
struct Sums {
    exports: Vec<(u64, Totals)>,
    used: UsedBefore,
}

impl Added {
    /// Another engine counts, or this one in a new session. An earlier daemon recorded its
    /// predecessors.
    pub(crate) fn begin(
        &mut self,
        session: &Session,
        pool: Uuid,
        exports: &BTreeSet<ExportId>,
        tenants: &BTreeSet<TenantId>,
    ) {
        let generation = session.generation;
        let new = Some((generation, session.region.clone()));
        match std::mem::replace(&mut self.counting, new) {
            Some((known, _)) if known == generation => return,
            Some((_, region)) => {
                self.add_region(&region, exports, tenants);
                self.let_go.clear();
            }
            None => {
                let file = self.file.as_deref();
                let saved = file.and_then(|file| files::read_json::<Saved>(file).ok()?);
                let saved = saved.filter(|saved| saved.pool == pool);
                let sums = saved.map(|saved| match saved.generation == generation {
                    true => saved.before,
                    false => saved.with_it,
                });
                let sums = sums.unwrap_or_default();
                self.used = sums.used;
                let before = sums.exports.into_iter();
                self.before = before.map(|(id, totals)| (ExportId(id), totals)).collect();
            }
        }
        self.pool = pool;
        self.saved_at = None;
    }

    fn add_region(
        &mut self,
        region: &Region,
        exports: &BTreeSet<ExportId>,
        tenants: &BTreeSet<TenantId>,
    ) {
        let counted = tenants.difference(&self.let_go).copied().collect();
        self.before.retain(|export, _| exports.contains(export));
        for (export, (totals, _)) in totals_of(region, exports) {
            let before = self.before.entry(export).or_default();
            *before = plus(before, &totals);
        }
        self.used.add_region(region, tenants, &counted);
    }

    fn sums(&self) -> Sums {
        let exports = self.before.iter();
        Sums {
            exports: exports.map(|(id, totals)| (id.0, totals.clone())).collect(),
            used: self.used.clone(),
        }
    }

    /// The counts of an export's earlier engines.
    pub(crate) fn past(&self, export: &ExportRecord) -> Past {
        let none = Totals::default();
        let before = self.before.get(&export.id).unwrap_or(&none);
        let [reads, writes, ..] = &before.ops;
        Past {
            reads: reads.ops,
            bytes_read: reads.bytes,
            writes: writes.ops,
            bytes_written: writes.bytes,
            media_errors: before.media_errors,
            created_s: export.created_s,
        }
    }

    /// The counts of all exports, with those of the present engine.
    pub(crate) fn pasts(&self, exports: &Exports) -> Vec<Past> {
        let mut all: BTreeMap<ExportId, Past> = exports
            .iter()
            .map(|export| (export.id, self.past(export)))
            .collect();
        let lanes = self.counting.iter().flat_map(|(_, region)| region.lanes());
        let count = all.len();
        for lane in lanes
            .filter(|lane| lane.export.load(Relaxed) != 0)
            .take(count)
        {
            let export = lane.export.load(Relaxed).checked_sub(1).map(ExportId);
            let Some(past) = export.and_then(|export| all.get_mut(&export)) else {
                continue;
            };
            let of = |kind: OpKind| &lane.ops[kind as usize];
            let add = |to: &mut u64, more: &AtomicU64| *to = to.saturating_add(more.load(Relaxed));
            add(&mut past.reads, &of(OpKind::Read).ops);
            add(&mut past.bytes_read, &of(OpKind::Read).bytes);
            add(&mut past.writes, &of(OpKind::Write).ops);
            add(&mut past.bytes_written, &of(OpKind::Write).bytes);
            add(&mut past.media_errors, &lane.media_errors);
        }
        all.into_values().collect()
    }

    pub(crate) fn credit(&self, session: &Session, tenant: TenantId) -> [u64; 2] {
        // A successor is told before it counts: until then the predecessor's region has the credit.
        let other = self.counting.as_ref();
        let other = other.filter(|(generation, _)| *generation != session.generation);
        self.used.credit(other.map(|(_, region)| &**region), tenant)
    }

    pub(crate) fn saved(&self, tenant: TenantId) -> [u64; 2] {
        let known = self.counting.as_ref();
        let known = known.filter(|_| !self.let_go.contains(&tenant));
        self.used.credit(known.map(|(_, region)| &**region), tenant)
    }

    pub(crate) fn let_go(&mut self, session: &Session, tenants: &BTreeSet<TenantId>) {
        if self
            .counting
            .as_ref()
            .is_some_and(|(generation, _)| *generation == session.generation)
        {
            let new = tenants.difference(&self.let_go).copied().collect();
            self.used.add_tenants(&session.region, &new);
            self.let_go.extend(new);
            self.saved_at = None;
        }
    }

    /// The engine is told of these tenants again, and has dropped their old records.
    pub(crate) fn counts_again<'a>(&mut self, tenants: impl Iterator<Item = &'a TenantId>) {
        for tenant in tenants {
            self.let_go.remove(tenant);
        }
    }

    /// `at_once`: even soon after the last save.
    fn unsaved(
        &mut self,
        exports: &BTreeSet<ExportId>,
        tenants: &BTreeSet<TenantId>,
        at_once: bool,
    ) -> Option<(PathBuf, Saved)> {
        let (generation, region) = self.counting.clone()?;
        let file = self.file.clone()?;
        let is_new = |at: Instant| !at_once && at.elapsed() < SAVE_EVERY;
        if self.saved_at.is_some_and(is_new) {
            return None;
        }
        self.saved_at = Some(Instant::now());
        let mut with_it = Self {
            before: self.before.clone(),
            used: self.used.clone(),
            let_go: self.let_go.clone(),
            ..Self::default()
        };
        with_it.add_region(&region, exports, tenants);
        let saved = Saved {
            pool: self.pool,
            generation,
            before: self.sums(),
            with_it: with_it.sums(),
        };
        Some((file, saved))
    }
}

fn lane_stats(totals: Totals, lane: Option<&LaneRecord>) -> LaneStats {
    let [read, write, flush, deallocate] = totals.ops;
    let now = |gauge: fn(&LaneRecord) -> &AtomicU64| lane.map_or(0, |l| gauge(l).load(Relaxed));
    LaneStats {
        tenant: String::new(),
        volume: String::new(),
        read,
        write,
        flush,
        deallocate,
        in_flight: now(|lane| &lane.in_flight),
        parked: now(|lane| &lane.parked),
        queues: now(|lane| &lane.connections),
        transport: String::new(),
        copied_bytes: totals.copied_bytes,
        registered_bytes: now(|lane| &lane.registered_bytes),
        interrupts: totals.interrupts,
        budget: None,
        granted_iops: limit(now(|lane| &lane.granted_ops_s), MOST.iops),
        granted_bytes_s: limit(now(|lane| &lane.granted_bytes_s), MOST.bytes),
        throttled_ops: totals.throttled_ops,
        throttled: now(|lane| &lane.throttled),
        throttled_times: totals.throttled_times,
    }
}

/// CPU seconds in user and kernel mode, and resident bytes, from /proc.
fn process_usage(pid: u32) -> Option<(f64, f64, u64)> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // Fields 3 and later follow the name, which may contain anything.
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    let ticks = rustix::param::clock_ticks_per_second() as f64;
    let number = |field: usize| fields.get(field - 3)?.parse::<f64>().ok();
    let resident = number(24)? as u64 * rustix::param::page_size() as u64;
    Some((number(14)? / ticks, number(15)? / ticks, resident))
}

fn engine_stats(session: &Session) -> Option<EngineStats> {
    let (cpu_user_s, cpu_system_s, resident_bytes) = process_usage(session.pid)?;
    let header = session.region.header();
    let reactors = header.reactors.load(Relaxed).min(MAX_REACTORS as u64);
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    let now_ns =
        now.tv_sec.unsigned_abs().saturating_mul(1_000_000_000) + now.tv_nsec.unsigned_abs();
    let life_ns = now_ns.saturating_sub(header.started_ns.load(Relaxed));
    // A reactor uses its CPU while it is awake; the rest of the time it slept.
    let busy_ns = ((cpu_user_s + cpu_system_s) * 1e9) as u64;
    let sum = |cell: fn(&ReactorRecord) -> &AtomicU64| {
        let all = session.region.reactors().iter().take(reactors as usize);
        all.fold(0u64, |sum, one| sum.saturating_add(cell(one).load(Relaxed)))
    };
    Some(EngineStats {
        pid: session.pid,
        // At most MAX_REACTORS.
        reactors: reactors as u32,
        cpu_user_s,
        cpu_system_s,
        resident_bytes,
        asleep_ns: life_ns.saturating_mul(reactors).saturating_sub(busy_ns),
        busy_ns,
        working_ns: sum(|reactor| &reactor.busy_ns),
        staging_own_bytes: sum(|reactor| &reactor.staging_own_bytes),
        staging_borrowed_bytes: sum(|reactor| &reactor.staging_borrowed_bytes),
    })
}

#[derive(Debug)]
pub(crate) struct Statistics {
    base: Rc<Base>,
    link: Rc<Link>,
    pub(crate) added: RefCell<Added>,
    statistics: RefCell<visible::Published>,
}

impl Statistics {
    pub(crate) fn new(base: &Rc<Base>, link: &Rc<Link>) -> Rc<Self> {
        Rc::new(Self {
            base: base.clone(),
            link: link.clone(),
            added: Default::default(),
            statistics: Default::default(),
        })
    }
}

impl Statistics {
    pub(crate) fn keep_statistics(&self, folder: &Path) {
        self.added.borrow_mut().file = Some(folder.join("figures.json"));
    }

    fn export_ids(&self) -> BTreeSet<ExportId> {
        let core = self.base.core.borrow();
        core.pool.exports().iter().map(|export| export.id).collect()
    }

    fn tenant_ids(&self) -> BTreeSet<TenantId> {
        let core = self.base.core.borrow();
        core.pool.tenants().iter().map(|tenant| tenant.id).collect()
    }

    pub(crate) fn count_on(&self, session: &Session) {
        let (exports, tenants) = (self.export_ids(), self.tenant_ids());
        let pool = self.base.core.borrow().pool.info().uuid;
        let mut added = self.added.borrow_mut();
        added.begin(session, pool, &exports, &tenants);
    }

    /// `at_once`: even if no save is due.
    pub(crate) async fn save_statistics(&self, at_once: bool) {
        let (exports, tenants) = (self.export_ids(), self.tenant_ids());
        let unsaved = (self.added.borrow_mut()).unsaved(&exports, &tenants, at_once);
        let Some((file, saved)) = unsaved else {
            return;
        };
        // With many exports it is some megabytes.
        let written = tokio::task::spawn_blocking(move || files::write_json(&file, &saved, false));
        let error = match timeout(SAVE_LIMIT, written).await {
            Ok(Ok(Err(error))) => error.to_string(),
            Err(_) => "it takes too long".to_owned(),
            _ => return,
        };
        tracing::warn!(
            error,
            "can't save figures.json: the next daemon may lose some statistics"
        );
    }

    /// The lanes of some exports, by name.
    pub(crate) fn lanes(&self, is_wanted: impl Fn(&ExportRecord) -> bool) -> Vec<LaneStats> {
        let lives = self.link.session().is_some();
        let core = self.base.core.borrow();
        let pool = &core.pool;
        let wanted = || pool.exports().iter().filter(|export| is_wanted(export));
        let added = self.added.borrow();
        let region = added.counting.as_ref().map(|(_, region)| region);
        let ids = wanted().map(|export| export.id).collect();
        let mut now = region.map_or_else(BTreeMap::new, |region| totals_of(region, &ids));
        let mut lanes = Vec::new();
        for export in wanted() {
            let Ok(volume) = pool.volume(export.volume) else {
                continue;
            };
            let (mut totals, lane) = match now.remove(&export.id) {
                Some((totals, lane)) => (totals, Some(lane)),
                None => (Totals::default(), None),
            };
            if let Some(before) = added.before.get(&export.id) {
                totals = plus(before, &totals);
            }
            let lane = lane.filter(|_| lives);
            lanes.push(LaneStats {
                tenant: tenant_name(&core, volume),
                volume: export_label(export, volume),
                transport: export.frontend.name().to_owned(),
                budget: show_volume_budget(pool, volume.id),
                ..lane_stats(totals, lane)
            });
        }
        lanes.sort_by(|a, b| (&a.tenant, &a.volume).cmp(&(&b.tenant, &b.volume)));
        lanes
    }

    pub(crate) fn stats(&self, takeover: TakeoverStats) -> Stats {
        let mut lanes = self.lanes(|_| true);
        let session = self.link.session();
        let core = self.base.core.borrow();
        let pool = &core.pool;
        let added = self.added.borrow();
        let region = added.counting.as_ref().map(|(_, region)| region);
        let lives = session.is_some();
        let tenants = tenant_stats(
            &added.used,
            region.map(|region| &**region),
            &added.let_go,
            lives,
            pool.tenants().iter().map(|tenant| {
                (
                    tenant.id,
                    &*tenant.name,
                    show_tenant_budget(pool, tenant.id),
                )
            }),
        );
        let by_name: BTreeMap<&str, &TenantStats> =
            tenants.iter().map(|of| (&*of.tenant, of)).collect();
        for lane in &mut lanes {
            lane.limit_grants(by_name.get(&*lane.tenant).copied());
        }
        let space = pool.space();
        let bytes = |extents: u64| extents.saturating_mul(pool.info().extent_bytes);
        Stats {
            at_unix_ms: now_unix_ms(),
            generation: session
                .as_ref()
                .map_or(pool.info().engine_generation, |s| s.generation),
            engine: session.as_ref().and_then(|session| engine_stats(session)),
            pool: Some(PoolStats {
                capacity_bytes: bytes(total_extents(&space)),
                clean_bytes: bytes(space.clean),
                reserved_bytes: bytes(space.reserved),
                owned_bytes: bytes(space.owned),
                dirty_bytes: bytes(space.dirty),
                quarantined_bytes: bytes(space.quarantined),
                grants: core.grants.usage().0 as u64,
                faults: self.base.counters.faults.get(),
                revokes: self.base.counters.revokes.get(),
                catalog_commits: self.base.committer.commits(),
            }),
            takeover,
            lanes,
            tenants,
            reactors: added.used.reactors(region.map(|region| &**region)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_xlate::boundary::region::Region;

    #[test]
    fn a_percentile_is_in_its_bucket() {
        let region = Region::anonymous(1).unwrap();
        let ops = &region.lanes()[0].ops[0];
        for n in 0..100 {
            ops.record(0, if n < 98 { 1000 } else { 1_000_000 }, false);
        }
        let stats = op_stats(ops);
        let times = &stats.latency.total;
        assert_eq!((times.count, times.buckets.len()), (100, 2));
        assert_eq!(times.sum_ns, 98 * 1000 + 2_000_000);
        let (p50, p99) = (stats.latency_p50_ns.unwrap(), stats.latency_p99_ns.unwrap());
        assert!((1000..=1280).contains(&p50), "{p50}");
        assert!((1_000_000..=1_400_000).contains(&p99), "{p99}");
    }

    #[test]
    fn this_process_uses_memory() {
        let (_, _, resident) = process_usage(std::process::id()).unwrap();
        assert!(resident > 100_000, "{resident}");
    }
}
