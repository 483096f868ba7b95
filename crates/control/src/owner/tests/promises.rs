//! Whether what is promised can be had, by the reactors that serve it.

use std::sync::atomic::Ordering::{Relaxed, Release};

use forebay_burst::budget::LEAST;

use super::*;
use crate::api::events::EventKind;
use crate::api::model::Export;
use crate::api::scheduling::{
    Admission, BudgetPut, RatePut, SchedulingUpdate, Spread, TenantBudget,
};

/// A base of so much.
fn put(iops: u64) -> Option<BudgetPut> {
    Some(BudgetPut {
        base: Some(RatePut {
            iops: Some(iops),
            bytes_s: Some(LEAST.bytes),
        }),
        ..BudgetPut::default()
    })
}

impl Life {
    /// With two reactors.
    async fn of_two(place: &Place) -> Self {
        let life = Life::first(place, Begin::default()).await;
        life.owner.set_node(place.folder.path(), 2);
        life
    }

    /// The next life, with a fresh engine (both were killed).
    async fn next_of_two(place: &Place, begin: Begin, before: &Fake) -> Self {
        let owner = owner_of(place, &begin, false);
        owner.set_node(place.folder.path(), 2);
        Self::with_fresh_engine(owner, begin.generation, Some(before)).await
    }

    async fn with_tenant(&mut self, tenant: &str, volumes: &[&str]) {
        let owner = self.owner.clone();
        self.with_engine(async {
            owner.tenant_create(tenant.to_owned()).await.unwrap();
            for name in volumes {
                let body = VolumeCreate {
                    name: (*name).to_owned(),
                    size_bytes: 1 << 20,
                    block_bytes: None,
                    reserved_bytes: 0,
                };
                owner.volume_create(tenant.to_owned(), body).await.unwrap();
            }
        })
        .await;
    }

    /// States a base, in percent of what one reactor can give.
    async fn base(&mut self, tenant: &str, percent: u64) -> TenantBudget {
        let whole = self.whole().await;
        let owner = self.owner.clone();
        let set = owner.tenant_budget(tenant, put(whole * percent / 100));
        self.with_engine(set).await.unwrap()
    }

    /// What one reactor can give, IOPS: of a tenant of its own, what is said to fit.
    async fn whole(&mut self) -> u64 {
        let owner = self.owner.clone();
        if owner.tenant_show("probe").is_err() {
            self.with_tenant("probe", &[]).await;
        }
        let set = owner.tenant_budget("probe", put(1000));
        let set = self.with_engine(set).await.unwrap();
        let none = owner.tenant_budget("probe", None);
        let none = self.with_engine(none).await.unwrap().admission;
        let sum =
            |admission: &Admission| -> f64 { admission.reactors.iter().map(|of| of.percent).sum() };
        (1000.0 * 100.0 / (sum(&set.admission) - sum(&none))) as u64
    }

    /// Which tenants with exports were told to the engine last to come first.
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
        let core = self.owner.core.borrow();
        let exported = |name: &&str| {
            let id = core.pool.tenant(name).map(|tenant| tenant.id);
            let mut volumes = core.pool.volumes().filter(|of| Ok(of.tenant) == id);
            volumes.any(|of| core.pool.exports_of(of.id).next().is_some())
        };
        let names = ["a", "b", "c"].into_iter().filter(exported);
        let said = |name: &str| last[&core.pool.tenant(name).unwrap().id.0];
        names.map(|name| (name, said(name))).collect()
    }

    /// Exports a volume, which this reactor serves.
    async fn serve(&mut self, tenant: &str, volume: &str, reactor: u64) -> Export {
        let owner = self.owner.clone();
        let exports = owner.core.borrow().pool.exports().count();
        let newest = owner.core.borrow().pool.exports().map(|of| of.id.0).max();
        let served = |id: u64| {
            let record = &self.fake.region.lanes()[exports];
            record.reactor.store(reactor, Relaxed);
            record.export.store(id + 1, Release);
        };
        // What is made after another has the next number: it is served when its maker is answered.
        served(newest.unwrap_or(0) + 1);
        let body = ExportCreate {
            tenant: tenant.to_owned(),
            volume: volume.to_owned(),
            any_host: true,
            ..ExportCreate::default()
        };
        let made = self.with_engine(owner.export_create(body)).await.unwrap();
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
        // The node has it.
        let set = life.base("a", 150).await;
        let whole = life.whole().await;
        for _ in 0..2 {
            let now = life.owner.admission();
            assert!(!now.guaranteed && now.at_once == 1, "{now:?}");
            let [base] = &now.lacking[..] else {
                panic!("{now:?}");
            };
            assert_eq!((&*base.tenant, base.reactor), ("a", None));
            let fits = base.fits.unwrap().iops;
            assert!(fits.abs_diff(whole) <= whole / 100, "{fits} of {whole}");
            let warned = life.owner.warnings();
            assert!(
                warned.iter().any(|text| text.contains("bases: a;")),
                "{warned:?}"
            );
            if life.owner.export_list().is_empty() {
                assert_eq!(set.admission, now);
                life.serve("a", "v", 1).await;
                assert_eq!(life.owner.export_list()[0].reactor, Some(1));
            }
        }
        assert_eq!(life.serve("a", "w", 0).await.warnings, Vec::<String>::new());
        let now = life.owner.admission();
        assert!(now.guaranteed && now.lacking.is_empty(), "{now:?}");
        assert_eq!(life.owner.warnings(), Vec::<String>::new());
        // What was said to fit on one does.
        let gone = life.owner.clone();
        let gone = gone.export_delete("a".to_owned(), "w".to_owned());
        life.with_engine(gone).await.unwrap();
        let fits = life.owner.admission().lacking[0].fits.unwrap();
        let owner = life.owner.clone();
        let set = owner.tenant_budget("a", put(fits.iops));
        let set = life.with_engine(set).await.unwrap();
        assert!(set.admission.guaranteed, "{set:?}");
    });
}

#[test]
fn who_comes_later_is_told_that_its_base_is_not_guaranteed() {
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
        let now = life.owner.admission();
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
        let told = life.owner.events.all();
        let told = told.iter().filter(|event| event.kind == EventKind::Warning);
        assert_eq!(told.count(), 1);
        // Who asked for more than there is is not warned; that reactors help each other is no promise.
        let warned = |life: &Life| life.owner.warnings().len();
        assert_eq!(warned(&life), 1);
        let set = |update: SchedulingUpdate| {
            let owner = life.owner.clone();
            async move { owner.scheduling_update(update).await.unwrap().admission }
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
        // Nobody comes first then.
        assert_eq!(now.lacking.len(), 2);
        assert_eq!(life.last_said(), [("a", true), ("b", true)]);
        let now = life.with_engine(apart).await;
        assert_eq!((now.guaranteed, warned(&life)), (false, 1));
        assert_eq!(life.last_said(), [("a", false), ("b", true)]);
        // With room it is guaranteed again.
        let gone = life.owner.clone();
        let gone = gone.export_delete("a".to_owned(), "w".to_owned());
        life.with_engine(gone).await.unwrap();
        assert!(life.owner.admission().guaranteed);
        assert_eq!(life.last_said(), [("a", true), ("b", true)]);
    });
}

#[test]
fn a_guarantee_stays_over_a_restart_and_another_engine() {
    run(async {
        let place = Place::new();
        let mut life = Life::of_two(&place).await;
        // The smaller is there first.
        life.with_tenant("a", &["v"]).await;
        life.with_tenant("b", &["v", "w"]).await;
        life.with_tenant("c", &[]).await;
        life.base("a", 30).await;
        life.serve("a", "v", 0).await;
        life.base("b", 60).await;
        life.serve("b", "v", 0).await;
        life.serve("b", "w", 0).await;
        let lacking = |life: &Life| -> Vec<String> {
            let all = life.owner.admission().lacking.into_iter();
            all.map(|base| base.tenant).collect()
        };
        assert_eq!(lacking(&life), [""; 0]);
        // What the node has is kept for who has no exports yet: on the other reactor.
        let set = life.base("c", 85).await;
        assert!(set.admission.guaranteed, "{set:?}");
        // Raised, the oldest is the last.
        let set = life.base("a", 50).await;
        let first = |set: &TenantBudget| set.admission.lacking[0].clone();
        assert_eq!((&*first(&set).tenant, first(&set).reactor), ("a", Some(0)));
        let whole = life.whole().await;
        let fits = first(&set).fits.unwrap().iops * 100 / whole;
        assert!((39..41).contains(&fits), "{fits}");
        assert_eq!(lacking(&life), ["a"]);
        assert_eq!(life.last_said(), [("a", false), ("b", true)]);
        let before = life.kill().await;
        // Nothing of the engine is there any more either.
        let next = Begin {
            boot: [8; 16],
            generation: 2,
            ..Begin::default()
        };
        let mut life = Life::next_of_two(&place, next, &before).await;
        assert_eq!(lacking(&life), ["a"]);
        assert_eq!(life.last_said(), [("a", false), ("b", true)]);
        // Where they fitted they are served.
        let told: Vec<Option<u32>> = (life.fake.log.iter())
            .filter_map(|said| match said {
                ToEngine::SetExport { reactor, .. } => Some(*reactor),
                _ => None,
            })
            .collect();
        assert_eq!(told[1..], [Some(0); 2], "{told:?}");
        // Lowered, it is guaranteed.
        let set = life.base("a", 10).await;
        assert!(set.admission.guaranteed, "{set:?}");
        assert_eq!(life.last_said(), [("a", true), ("b", true)]);
    });
}
