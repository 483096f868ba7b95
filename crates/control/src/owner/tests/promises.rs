//! Tests of guaranteed bases on several reactors.

use std::sync::atomic::Ordering::{Relaxed, Release};

use forebay_qos::budget::LEAST;

use super::*;
use crate::model::Export;
use crate::model::events::EventKind;
use crate::model::scheduling::{
    Admission, BudgetParts, CostsPut, RateParts, SchedulingUpdate, Spread, TenantBudget,
};

fn put(iops: u64) -> Option<BudgetParts> {
    Some(BudgetParts {
        base: Some(Some(RateParts {
            iops: Some(Some(iops)),
            bytes_s: Some(Some(LEAST.bytes)),
        })),
        ..BudgetParts::default()
    })
}

impl Life {
    async fn of_two(place: &Place) -> Self {
        let life = Life::first(place, Begin::default()).await;
        life.owner.budgets.set_node(place.folder.path(), 2);
        life
    }

    async fn next_of_two(place: &Place, begin: Begin, before: &Fake) -> Self {
        let owner = owner_of(place, &begin, false);
        owner.budgets.set_node(place.folder.path(), 2);
        Self::with_fresh_engine(owner, begin.generation, Some(before)).await
    }

    async fn with_tenant(&mut self, tenant: &str, volumes: &[&str]) {
        let owner = self.owner.clone();
        self.with_engine(async {
            owner
                .volumes
                .tenant_create(tenant.to_owned())
                .await
                .unwrap();
            for name in volumes {
                let body = VolumeCreate {
                    name: (*name).to_owned(),
                    size_bytes: Some(1 << 20),
                    block_bytes: None,
                    reserved_bytes: 0,
                    rbd: None,
                };
                owner
                    .volumes
                    .volume_create(tenant.to_owned(), body)
                    .await
                    .unwrap();
            }
        })
        .await;
    }

    /// Sets a base, in percent of one reactor's capacity.
    async fn base(&mut self, tenant: &str, percent: u64) -> TenantBudget {
        let whole = self.whole().await;
        let owner = self.owner.clone();
        let set = owner
            .budgets
            .tenant_budget(tenant, put(whole * percent / 100));
        self.with_engine(set).await.unwrap()
    }

    /// One reactor's capacity in IOPS: the part of a probe tenant's base that fits.
    async fn whole(&mut self) -> u64 {
        let owner = self.owner.clone();
        if owner.volumes.tenant_show("probe").is_err() {
            self.with_tenant("probe", &[]).await;
        }
        let set = owner.budgets.tenant_budget("probe", put(1000));
        let set = self.with_engine(set).await.unwrap();
        let none = owner.budgets.tenant_budget("probe", None);
        let none = self.with_engine(none).await.unwrap().admission;
        let sum =
            |admission: &Admission| -> f64 { admission.reactors.iter().map(|of| of.percent).sum() };
        (1000.0 * 100.0 / (sum(&set.admission) - sum(&none))) as u64
    }

    fn last_said(&self) -> Vec<(&'static str, bool)> {
        let mut last = std::collections::BTreeMap::new();
        for said in &self.fake.log {
            if let ToEngine::SetTenantBudget {
                tenant, guaranteed, ..
            } = said
            {
                last.insert(tenant.0, *guaranteed);
            }
        }
        let core = self.owner.base.core.borrow();
        let exported = |name: &&str| {
            let id = core.pool.tenants().named(name).map(|tenant| tenant.id);
            let mut volumes = core
                .pool
                .volumes()
                .records()
                .filter(|of| Ok(of.tenant) == id);
            volumes.any(|of| core.pool.exports().of_volume(of.id).next().is_some())
        };
        let names = ["a", "b", "c"].into_iter().filter(exported);
        let said = |name: &str| last[&core.pool.tenants().named(name).unwrap().id.0];
        names.map(|name| (name, said(name))).collect()
    }

    async fn serve(&mut self, tenant: &str, volume: &str, reactor: u64) -> Export {
        let owner = self.owner.clone();
        let exports = owner.base.core.borrow().pool.exports().iter().count();
        let newest = owner
            .base
            .core
            .borrow()
            .pool
            .exports()
            .iter()
            .map(|of| of.id.0)
            .max();
        let served = |id: u64| {
            let record = &self.fake.region.lanes()[exports];
            record.reactor.store(reactor, Relaxed);
            record.export.store(id + 1, Release);
        };
        // The reactor must be in the region before the request is answered; the new export gets the
        // next number.
        served(newest.unwrap_or(0) + 1);
        let body = ExportCreate {
            tenant: tenant.to_owned(),
            volume: volume.to_owned(),
            any_host: true,
            ..ExportCreate::default()
        };
        let made = self
            .with_engine(owner.exports.export_create(body))
            .await
            .unwrap();
        let record = &self.fake.region.lanes()[exports];
        record.export.store(made.id + 1, Release);
        made
    }
}

#[test]
fn a_base_that_one_reactor_does_not_have_needs_two() {
    run(async {
        let place = Place::new();
        let mut life = Life::of_two(&place).await;
        life.with_tenant("a", &["v", "w"]).await;
        let set = life.base("a", 150).await;
        let whole = life.whole().await;
        for _ in 0..2 {
            let now = life.owner.placement.admission();
            assert!(!now.guaranteed && now.at_once == 1, "{now:?}");
            let [base] = &now.lacking[..] else {
                panic!("{now:?}");
            };
            assert_eq!((&*base.tenant, base.reactor), ("a", None));
            let fits = base.fits.unwrap().iops;
            assert!(fits.abs_diff(whole) <= whole / 100, "{fits} of {whole}");
            let warned = life.owner.reports.warnings();
            assert!(
                warned.iter().any(|text| text.contains("bases: a;")),
                "{warned:?}"
            );
            if life.owner.exports.export_list().is_empty() {
                assert_eq!(set.admission, now);
                life.serve("a", "v", 1).await;
                assert_eq!(life.owner.exports.export_list()[0].reactor, Some(1));
            }
        }
        assert_eq!(life.serve("a", "w", 0).await.warnings, Vec::<String>::new());
        let now = life.owner.placement.admission();
        assert!(now.guaranteed && now.lacking.is_empty(), "{now:?}");
        assert_eq!(life.owner.reports.warnings(), Vec::<String>::new());
        let gone = life.owner.exports.clone();
        let gone = gone.export_delete("a".to_owned(), "w".to_owned(), true);
        life.with_engine(gone).await.unwrap();
        let fits = life.owner.placement.admission().lacking[0].fits.unwrap();
        let owner = life.owner.clone();
        let set = owner.budgets.tenant_budget("a", put(fits.iops));
        let set = life.with_engine(set).await.unwrap();
        assert!(set.admission.guaranteed, "{set:?}");
    });
}

#[test]
fn a_later_export_is_warned_that_its_base_is_not_guaranteed() {
    run(async {
        let place = Place::new();
        let mut life = Life::of_two(&place).await;
        life.with_tenant("a", &["v", "w"]).await;
        life.with_tenant("b", &["v"]).await;
        life.base("a", 60).await;
        let set = life.base("b", 60).await;
        assert!(set.admission.guaranteed, "one on each: {set:?}");
        life.serve("a", "v", 0).await;
        assert_eq!(life.serve("b", "v", 1).await.warnings, Vec::<String>::new());
        let made = life.serve("a", "w", 1).await;
        assert_eq!(made.reactor, Some(1));
        let [warning] = &made.warnings[..] else {
            panic!("{made:?}");
        };
        assert!(warning.contains("tenant a"), "{made:?}");
        assert_eq!(life.last_said(), [("a", false), ("b", true)]);
        let now = life.owner.placement.admission();
        assert!(!now.guaranteed && now.at_once == 2);
        let percents: Vec<i64> = now
            .reactors
            .iter()
            .map(|of| of.percent.round() as i64)
            .collect();
        assert_eq!(percents, [60, 120]);
        let lacking: Vec<_> = now
            .lacking
            .iter()
            .map(|of| (&*of.tenant, of.reactor))
            .collect();
        assert_eq!(lacking, [("a", Some(1))]);
        let reported = life.owner.base.events.all();
        let reported = reported
            .iter()
            .filter(|event| event.kind == EventKind::Warning);
        assert_eq!(reported.count(), 1);
        // That reactors help each other is no promise.
        let warned = |life: &Life| life.owner.reports.warnings().len();
        assert_eq!(warned(&life), 1);
        let set = |update: SchedulingUpdate| {
            let owner = life.owner.clone();
            async move {
                owner
                    .budgets
                    .scheduling_update(update)
                    .await
                    .unwrap()
                    .admission
            }
        };
        let twice = SchedulingUpdate {
            oversubscription: Some(2.0),
            ..SchedulingUpdate::default()
        };
        let twice = set(twice);
        let apart = SchedulingUpdate {
            oversubscription: Some(1.0),
            spread: Some(Spread::OneToOne),
            ..SchedulingUpdate::default()
        };
        let apart = set(apart);
        let now = life.with_engine(twice).await;
        assert_eq!((now.guaranteed, warned(&life)), (false, 0));
        assert_eq!(now.lacking.len(), 2);
        assert_eq!(life.last_said(), [("a", true), ("b", true)]);
        let now = life.with_engine(apart).await;
        assert_eq!((now.guaranteed, warned(&life)), (false, 1));
        assert_eq!(life.last_said(), [("a", false), ("b", true)]);
        let gone = life.owner.exports.clone();
        let gone = gone.export_delete("a".to_owned(), "w".to_owned(), true);
        life.with_engine(gone).await.unwrap();
        assert!(life.owner.placement.admission().guaranteed);
        assert_eq!(life.last_said(), [("a", true), ("b", true)]);
    });
}

#[test]
fn a_guarantee_stays_over_a_restart_and_another_engine() {
    run(async {
        let place = Place::new();
        let mut life = Life::of_two(&place).await;
        // The smaller base is set first.
        life.with_tenant("a", &["v"]).await;
        life.with_tenant("b", &["v", "w"]).await;
        life.with_tenant("c", &[]).await;
        life.base("a", 30).await;
        life.serve("a", "v", 0).await;
        life.base("b", 60).await;
        life.serve("b", "v", 0).await;
        life.serve("b", "w", 0).await;
        let lacking = |life: &Life| -> Vec<String> {
            let all = life.owner.placement.admission().lacking.into_iter();
            all.map(|base| base.tenant).collect()
        };
        assert_eq!(lacking(&life), [""; 0]);
        let set = life.base("c", 85).await;
        assert!(set.admission.guaranteed, "{set:?}");
        // An oldest tenant that raises its base becomes the last.
        let set = life.base("a", 50).await;
        let first = |set: &TenantBudget| set.admission.lacking[0].clone();
        assert_eq!((&*first(&set).tenant, first(&set).reactor), ("a", Some(0)));
        let whole = life.whole().await;
        let fits = first(&set).fits.unwrap().iops * 100 / whole;
        assert!((39..41).contains(&fits), "{fits}");
        assert_eq!(lacking(&life), ["a"]);
        assert_eq!(life.last_said(), [("a", false), ("b", true)]);
        let before = life.kill().await;
        let next = Begin {
            boot: [8; 16],
            generation: 2,
            ..Begin::default()
        };
        let mut life = Life::next_of_two(&place, next, &before).await;
        assert_eq!(lacking(&life), ["a"]);
        assert_eq!(life.last_said(), [("a", false), ("b", true)]);
        let reported: Vec<Option<u32>> = (life.fake.log.iter())
            .filter_map(|said| match said {
                ToEngine::SetExport { reactor, .. } => Some(*reactor),
                _ => None,
            })
            .collect();
        assert_eq!(reported[1..], [Some(0); 2], "{reported:?}");
        let set = life.base("a", 10).await;
        assert!(set.admission.guaranteed, "{set:?}");
        assert_eq!(life.last_said(), [("a", true), ("b", true)]);
    });
}

/// Written by the version of 2026-11-25: promises, costs and settings, some of which are constants
/// now.
#[test]
fn older_promises_are_read() {
    run(async {
        let place = Place::new();
        let mut life = Life::of_two(&place).await;
        for tenant in ["a", "b", "c"] {
            life.with_tenant(tenant, &["v"]).await;
        }
        // Without recorded promises, the larger bases come first.
        for (tenant, percent, reactor) in [("b", 70, 0), ("c", 70, 1), ("a", 40, 0)] {
            life.base(tenant, percent).await;
            life.serve(tenant, "v", reactor).await;
        }
        assert_eq!(life.last_said(), [("a", false), ("b", true), ("c", true)]);
        let (pool, a, base) = {
            let core = life.owner.base.core.borrow();
            let id = core.pool.tenants().named("a").unwrap().id;
            let base = core.pool.budgets().of_tenant(id).unwrap().base;
            (core.pool.info().uuid.to_string(), id.0, base)
        };
        let mut profiles = life.owner.node.costs_show().profiles;
        profiles.truncate(1);
        profiles[0].header_bytes = 77;
        let before = life.kill().await;
        let stored = [
            (
                "promises.json",
                serde_json::json!({"pool": pool, "promises": {a.to_string(): {
                    "base": {"iops": base.iops, "bytes": base.bytes}, "reactors": [0], "held": true,
                }}}),
            ),
            (
                "costs.json",
                serde_json::json!({"at_s": 7, "note": "older", "profiles": profiles}),
            ),
            (
                "scheduling.json",
                serde_json::json!({
                    "policy": "base", "spread": "stealing", "oversubscription": 1.0,
                    "wants_base": 0.25, "params": {"lump_ns": 20000.0, "keep": 0.25},
                }),
            ),
        ];
        for (name, value) in stored {
            std::fs::write(place.folder.path().join(name), value.to_string()).unwrap();
        }
        let next = Begin {
            boot: [8; 16],
            generation: 2,
            ..Begin::default()
        };
        let life = Life::next_of_two(&place, next, &before).await;
        assert_eq!(life.last_said()[0], ("a", true));
        let shown = life.owner.budgets.scheduling_show();
        assert_eq!((shown.spread, shown.wants_base), (Spread::OneToN, 0.25));
        assert_eq!(shown.params["keep"], 0.25);
        let costs = life.owner.node.costs_show();
        assert_eq!(
            (costs.note.as_deref(), costs.profiles[0].header_bytes),
            (Some("older"), 77)
        );
        let reported = life.owner.base.events.all();
        let reported = reported
            .iter()
            .filter(|event| event.kind == EventKind::Warning);
        let reported: Vec<&str> = reported.map(|event| &*event.message).collect();
        for name in ["`lump_ns`", "`policy base`"] {
            assert!(
                reported.iter().any(|text| text.contains(name)),
                "{reported:?}"
            );
        }
    });
}

#[test]
fn a_lost_guarantee_is_restored_before_newer_ones() {
    run(async {
        let place = Place::new();
        let mut life = Life::of_two(&place).await;
        for tenant in ["a", "b"] {
            life.with_tenant(tenant, &["v"]).await;
        }
        for (tenant, percent) in [("a", 40), ("b", 70)] {
            life.base(tenant, percent).await;
            life.serve(tenant, "v", 0).await;
        }
        assert_eq!(life.last_said(), [("a", true), ("b", false)]);
        // All costs rise for a while, including a restart.
        let owner = life.owner.clone();
        let costs = |owner: Rc<Owner>, times: f64| async move {
            let mut profiles = owner.node.costs_show().profiles;
            for of in &mut profiles {
                of.cpu_ns = of.cpu_ns.map(|ns| ns * times);
            }
            let note = None;
            let put = owner.budgets.costs_put(Some(CostsPut { profiles, note }));
            put.await.unwrap();
        };
        life.with_engine(costs(owner, 4.0)).await;
        assert_eq!(life.last_said(), [("a", false), ("b", false)]);
        let before = life.kill().await;
        let next = Begin {
            boot: [8; 16],
            generation: 2,
            ..Begin::default()
        };
        let mut life = Life::next_of_two(&place, next, &before).await;
        // One reactor serves both again.
        for (lane, export) in life.owner.exports.export_list().iter().enumerate() {
            let record = &life.fake.region.lanes()[lane];
            record.reactor.store(0, Relaxed);
            record.export.store(export.id + 1, Release);
        }
        let owner = life.owner.clone();
        life.with_engine(costs(owner, 0.25)).await;
        assert_eq!(life.last_said(), [("a", true), ("b", false)]);
        life.base("a", 110).await;
        assert_eq!(life.last_said(), [("a", false), ("b", false)]);
        let set = life.base("a", 40).await;
        assert_eq!(set.admission.lacking.len(), 1, "{set:?}");
        assert_eq!(life.last_said(), [("a", true), ("b", false)]);
    });
}

#[test]
fn freed_guarantees_are_published_to_the_engine_at_once() {
    run(async {
        let place = Place::new();
        let mut life = Life::of_two(&place).await;
        life.with_tenant("c", &[]).await;
        let is_on = |life: &Life| {
            let said = life.fake.log.iter().rev();
            let mut said = said.filter_map(|said| match said {
                ToEngine::SetScheduling { scheduling, .. } => Some(scheduling.is_some()),
                _ => None,
            });
            said.next().unwrap()
        };
        life.base("c", 60).await;
        assert!(is_on(&life));
        let owner = life.owner.clone();
        let gone = owner.volumes.tenant_delete("c".to_owned());
        life.with_engine(gone).await.unwrap();
        assert!(!is_on(&life), "nobody has a budget");
        life.with_tenant("a", &["v"]).await;
        life.with_tenant("b", &["v"]).await;
        life.with_tenant("c", &[]).await;
        life.base("a", 60).await;
        life.serve("a", "v", 0).await;
        life.base("c", 60).await;
        life.base("b", 60).await;
        life.serve("b", "v", 1).await;
        assert_eq!(life.last_said(), [("a", true), ("b", false)]);
        let gone = owner.volumes.tenant_delete("c".to_owned());
        life.with_engine(gone).await.unwrap();
        assert_eq!(life.last_said(), [("a", true), ("b", true)]);
    });
}

#[test]
fn an_export_whose_end_takes_too_long_leaves_its_room_too() {
    run(async {
        let place = Place::new();
        let limits = Limits {
            request: Duration::from_millis(300),
            ..Begin::default().limits
        };
        let begin = Begin {
            limits,
            ..Begin::default()
        };
        let mut life = Life::first(&place, begin).await;
        life.owner.budgets.set_node(place.folder.path(), 2);
        life.with_tenant("a", &["v", "w"]).await;
        life.with_tenant("b", &["v"]).await;
        life.base("b", 60).await;
        life.serve("b", "v", 0).await;
        life.base("a", 60).await;
        life.serve("a", "v", 1).await;
        life.serve("a", "w", 0).await;
        assert_eq!(life.last_said(), [("a", false), ("b", true)]);
        life.fake.settle_exports = false;
        let owner = life.owner.clone();
        let gone = owner
            .exports
            .export_delete("a".to_owned(), "w".to_owned(), true);
        assert!(life.with_engine(gone).await.is_err());
        assert_eq!(life.last_said(), [("a", true), ("b", true)]);
    });
}

#[test]
fn the_reactors_that_there_are_count() {
    run(async {
        let place = Place::new();
        let mut life = Life::of_two(&place).await;
        let tenants = ["a", "b"];
        for tenant in tenants {
            life.with_tenant(tenant, &["v"]).await;
            life.base(tenant, 60).await;
        }
        life.serve("a", "v", 0).await;
        life.serve("b", "v", 1).await;
        assert!(life.owner.placement.admission().guaranteed);
        life.replace_engine(|fake| fake.region.header().reactors.store(1, Relaxed))
            .await;
        life.opened().await;
        life.fake.settle().await;
        assert_eq!(life.last_said(), [("a", true), ("b", false)]);
        let reported = life.fake.log.iter().filter_map(|said| match said {
            ToEngine::SetExport { reactor, .. } => Some(*reactor),
            _ => None,
        });
        assert_eq!(reported.collect::<Vec<_>>(), [Some(0); 2]);
        let now = life.owner.placement.admission();
        assert_eq!((now.reactors.len(), now.lacking.len()), (1, 1));
        assert_eq!(life.owner.budgets.scheduling_show().reactors, 1);
        life.replace_engine(|fake| fake.region.header().reactors.store(4, Relaxed))
            .await;
        life.opened().await;
        life.fake.settle().await;
        assert_eq!(life.owner.placement.admission().reactors.len(), 4);
    });
}

#[test]
fn an_unwritten_guarantee_is_warned_of_and_retried() {
    run(async {
        let place = Place::new();
        let file = place.folder.path().join("promises.json");
        std::fs::write(&file, "{").unwrap();
        let mut life = Life::of_two(&place).await;
        let reported = life.owner.base.events.all();
        let reported = reported
            .iter()
            .filter(|event| event.kind == EventKind::Warning);
        let reported: Vec<&str> = reported.map(|event| &*event.message).collect();
        assert!(
            matches!(reported[..], [text] if text.contains("largest bases come first")),
            "{reported:?}"
        );
        let written = || std::fs::read_to_string(&file).unwrap().contains("held");
        let blocked = place.folder.path().join("promises.json.new");
        std::fs::create_dir(&blocked).unwrap();
        life.with_tenant("a", &[]).await;
        life.base("a", 60).await;
        let warned = life.owner.reports.warnings();
        assert!(
            matches!(&warned[..], [text] if text.contains("promises.json")),
            "{warned:?}"
        );
        assert!(!written());
        std::fs::remove_dir(&blocked).unwrap();
        while !life.owner.reports.warnings().is_empty() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        assert!(written());
    });
}

#[test]
fn a_tenant_sees_whether_its_own_base_is_guaranteed() {
    run(async {
        let place = Place::new();
        let mut life = Life::of_two(&place).await;
        life.with_tenant("a", &["v"]).await;
        life.with_tenant("b", &["v"]).await;
        assert_eq!(life.base("a", 60).await.guaranteed, Some(true));
        life.serve("a", "v", 0).await;
        life.base("b", 20).await;
        life.serve("b", "v", 0).await;
        let set = life.base("b", 60).await;
        assert_eq!(set.guaranteed, Some(false), "{set:?}");
        let set = life.base("a", 60).await;
        assert!(!set.admission.guaranteed, "another's is not");
        assert_eq!(set.guaranteed, Some(true));
        let owner = life.owner.clone();
        let limit = BudgetParts {
            burst: put(5000).and_then(|put| put.base),
            ..BudgetParts::default()
        };
        let set = life.with_engine(async { owner.budgets.tenant_budget("a", Some(limit)).await });
        assert_eq!(set.await.unwrap().guaranteed, None, "it has none");
    });
}

#[test]
fn partial_calibrations_list_the_measured_frontends() {
    run(async {
        let place = Place::new();
        let mut life = Life::of_two(&place).await;
        let owner = life.owner.clone();
        let all = owner.node.costs_show().profiles;
        for (count, calibrated, measured) in [(1, false, 0), (3, false, 1), (9, true, 3)] {
            let costs = CostsPut {
                profiles: all[..count].to_vec(),
                note: None,
            };
            let put = life.with_engine(async { owner.budgets.costs_put(Some(costs)).await });
            put.await.unwrap();
            let now = owner.placement.admission();
            assert_eq!((now.calibrated, now.measured.len()), (calibrated, measured));
        }
        assert_eq!(owner.placement.admission().measured[0], all[0].frontend);
    });
}
