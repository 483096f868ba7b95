//! Tests of budgets.

use std::cell::Cell;
use std::sync::atomic::Ordering::Relaxed;

use super::*;
use crate::model::error::ErrorKind;
use crate::model::events::EventKind;
use crate::model::scheduling::{
    Budget, BudgetChange, BudgetParts, CostsPut, NodeCapacity, Rate, RateParts, SchedulingUpdate,
    Spread, TenantBudget,
};
use forebay_qos::budget::MOST;

pub(super) fn put(base_iops: u64, burst_iops: u64) -> BudgetParts {
    let rate = |iops: u64| RateParts {
        iops: Some(Some(iops)),
        bytes_s: Some(Some(1 << 20)),
    };
    BudgetParts {
        base: Some(Some(rate(base_iops))),
        burst: Some(Some(rate(burst_iops))),
        credit_s: Some(Some(60)),
    }
}

impl From<Option<BudgetParts>> for BudgetChange {
    fn from(put: Option<BudgetParts>) -> Self {
        put.map_or(Self::Delete, Self::Put)
    }
}

fn word(message: &ToEngine) -> Option<String> {
    Some(match message {
        ToEngine::SetSpread { spread, .. } => spread.name().to_owned(),
        ToEngine::SetScheduling { scheduling, .. } => match scheduling {
            Some(scheduling) => format!("on {:?}", scheduling.policy),
            None => "off".to_owned(),
        },
        ToEngine::SetTenantBudget { budget, .. } => match budget {
            Some(budget) => format!("tenant {}", budget.base.iops),
            None => "tenant gone".to_owned(),
        },
        ToEngine::SetVolumeBudget { budget, .. } => match budget {
            Some(budget) => format!("volume {}", budget.burst.iops),
            None => "volume".to_owned(),
        },
        ToEngine::SetExport { .. } => "export".to_owned(),
        ToEngine::RemoveExport { .. } => "no export".to_owned(),
        _ => return None,
    })
}

pub(super) fn said(fake: &mut Fake) -> Vec<String> {
    let said = fake.log.iter().filter_map(word).collect();
    fake.log.clear();
    said
}

impl Life {
    pub(super) async fn tenant_budget(
        &mut self,
        put: Option<BudgetParts>,
    ) -> Result<TenantBudget, crate::model::error::ApiError> {
        let owner = self.owner.clone();
        self.with_engine(async { owner.budgets.tenant_budget("t", put).await })
            .await
    }
}

const NO_BASE: Rate = Rate {
    iops: 10,
    bytes_s: 65_536,
};

#[test]
fn an_engine_gets_existing_budgets_before_exports() {
    run(async {
        let place = Place::new();
        let mut life = Life::first(&place, Begin::default()).await;
        life.volume("v", 1 << 20).await;
        life.volume("w", 1 << 20).await;
        life.export("v").await;
        assert_eq!(said(&mut life.fake), ["one-to-n", "export"]);
        let set = life.tenant_budget(Some(put(1000, 5000))).await.unwrap();
        assert!(
            set.admission.guaranteed && !set.admission.calibrated,
            "{set:?}"
        );
        assert_eq!(said(&mut life.fake), ["on Burst", "tenant 1000", "volume"]);
        life.tenant_budget(Some(put(1000, 5000))).await.unwrap();
        assert_eq!(said(&mut life.fake), Vec::<String>::new());
        life.export("w").await;
        assert_eq!(said(&mut life.fake), ["volume", "export"]);
        let owner = life.owner.clone();
        let limit = BudgetParts {
            base: None,
            burst: put(0, 70).burst,
            credit_s: None,
        };
        let shown =
            life.with_engine(async { owner.budgets.volume_budget("t", "w", Some(limit)).await });
        assert_eq!(shown.await.unwrap().budget.unwrap().burst.iops, Some(70));
        assert_eq!(said(&mut life.fake), ["volume 70"]);
        let all = [
            "one-to-n",
            "on Burst",
            "tenant 1000",
            "volume",
            "volume 70",
            "export",
            "export",
        ];
        life.replace_engine(|_| {}).await;
        life.fake.settle().await;
        assert_eq!(said(&mut life.fake), all);
        drop(owner);
        let before = life.kill().await;
        let begin = Begin {
            generation: 3,
            ..Begin::default()
        };
        let mut life = Life::next(&place, begin, &before).await;
        let all = all.map(|word| word.replace("Wild", "Burst"));
        assert_eq!(said(&mut life.fake), all);
        let owner = life.owner.clone();
        for volume in ["v", "w"] {
            let gone = owner
                .exports
                .export_delete("t".to_owned(), volume.to_owned(), true);
            life.with_engine(gone).await.unwrap();
        }
        assert_eq!(
            said(&mut life.fake),
            ["no export", "no export", "tenant gone"]
        );
        life.with_engine(async { owner.budgets.volume_budget("t", "w", None).await })
            .await
            .unwrap();
        life.tenant_budget(None).await.unwrap();
        assert_eq!(said(&mut life.fake), ["off"]);
    });
}

#[test]
fn an_impossible_budget_is_refused_with_one_that_fits() {
    run(async {
        let place = Place::new();
        let mut life = Life::first(&place, Begin::default()).await;
        life.volume("v", 1 << 20).await;
        let refused = life.tenant_budget(Some(put(20, 15))).await.unwrap_err();
        assert!(refused.message.contains("at most"), "{refused}");
        let refused = life.tenant_budget(Some(put(0, 9000))).await.unwrap_err();
        assert!(refused.message.contains("10 to"), "{refused}");
        let much = put(10_000_000, 10_000_000);
        let refused = life.tenant_budget(Some(much)).await.unwrap_err();
        assert_eq!(refused.kind, ErrorKind::NoSpace);
        let fits = refused.message.split(": a base of ").nth(1).unwrap();
        let fits: u64 = fits.split(' ').next().unwrap().parse().unwrap();
        let fits = BudgetParts {
            base: Some(Some(RateParts {
                iops: Some(Some(fits)),
                bytes_s: Some(Some(65_536)),
            })),
            ..much
        };
        life.tenant_budget(Some(fits)).await.unwrap();
        life.tenant_budget(None).await.unwrap();
        assert!(
            refused.hint.unwrap().contains("defaults"),
            "it says from what"
        );
        life.tenant_budget(Some(put(1000, 5000))).await.unwrap();
        let owner = life.owner.clone();
        let refused = owner
            .budgets
            .volume_budget("t", "v", Some(put(1001, 5000)))
            .await;
        assert!(refused.unwrap_err().message.contains("at most 1000 fits"));
        let kept = life.with_engine(async {
            owner
                .budgets
                .volume_budget("t", "v", Some(put(900, 5000)))
                .await
        });
        kept.await.unwrap();
        let refused = life.tenant_budget(Some(put(800, 5000))).await.unwrap_err();
        assert!(refused.message.contains("give at least 900"), "{refused}");
        assert!(
            life.tenant_budget(None).await.is_err(),
            "its volumes have bases"
        );
        let is_said = || {
            let warnings = owner.reports.warnings();
            let of_bases =
                |warning: &String| warning.contains("0 of 1 tenants can have their bases");
            warnings.iter().any(of_bases)
        };
        assert!(!is_said(), "{:?}", owner.reports.warnings());
        let mut profiles = owner.node.costs_show().profiles;
        profiles.iter_mut().for_each(|of| of.cpu_ns = [1e7; 6]);
        let costs = CostsPut {
            profiles,
            note: None,
        };
        let put = life.with_engine(async { owner.budgets.costs_put(Some(costs)).await });
        put.await.unwrap();
        assert!(is_said(), "{:?}", owner.reports.warnings());
    });
}

#[test]
fn unstated_budget_values_follow_from_the_stated_ones() {
    run(async {
        let place = Place::new();
        let mut life = Life::first(&place, Begin::default()).await;
        life.volume("v", 1 << 20).await;
        let rate = |iops, bytes_s| (iops, bytes_s) != (None, None);
        let of = |base: (Option<u64>, Option<u64>), burst: (Option<u64>, Option<u64>)| {
            let put = |(iops, bytes_s): (Option<u64>, Option<u64>)| {
                rate(iops, bytes_s).then_some(Some(RateParts {
                    iops: iops.map(Some),
                    bytes_s: bytes_s.map(Some),
                }))
            };
            BudgetParts {
                base: put(base),
                burst: put(burst),
                credit_s: None,
            }
        };
        let no = (None, None);
        let (any_iops, any_bytes) = (MOST.iops, MOST.bytes);
        for (put, base, burst) in [
            // IOPS only: 4 KiB each, without a limit of bandwidth.
            (
                of((Some(2000), None), no),
                (2000, 8_192_000),
                (2000, any_bytes),
            ),
            // Bandwidth only; one operation per 128 KiB.
            (
                of((None, Some(64 << 20)), no),
                (512, 64 << 20),
                (any_iops, 64 << 20),
            ),
            // A limit only.
            (of(no, (Some(900), None)), (10, 65_536), (900, any_bytes)),
            (
                of(no, (None, Some(1 << 20))),
                (10, 65_536),
                (any_iops, 1 << 20),
            ),
            // Clamped to stated limits and to the minimum.
            (
                of((Some(2000), None), (Some(3000), Some(5_000_000))),
                (2000, 5_000_000),
                (3000, 5_000_000),
            ),
            (of((Some(10), None), no), (10, 65_536), (10, any_bytes)),
            (
                of((None, Some(65_536)), no),
                (10, 65_536),
                (any_iops, 65_536),
            ),
            // With both stated, each is its own limit unless another is stated.
            (
                of((Some(1000), Some(1 << 20)), (Some(5000), None)),
                (1000, 1 << 20),
                (5000, 1 << 20),
            ),
        ] {
            let set = life.tenant_budget(Some(put)).await.unwrap();
            let budget = set.budget.unwrap();
            let (has, limit) = (budget.base.unwrap_or(NO_BASE), budget.burst);
            let limit = (
                limit.iops.unwrap_or(any_iops),
                limit.bytes_s.unwrap_or(any_bytes),
            );
            assert_eq!(((has.iops, has.bytes_s), limit), (base, burst), "{put:?}");
        }
        let small = (Some(5), None);
        for (put, named) in [
            (of((None, Some(1 << 20)), small), "burst IOPS of 5 "),
            (of(no, small), "burst IOPS of 5 "),
            (
                of((Some(100), None), (None, Some(7))),
                "burst bytes/s of 7 ",
            ),
            (of(small, no), "base IOPS of 5 "),
        ] {
            let refused = life.tenant_budget(Some(put)).await.unwrap_err();
            assert!(refused.message.starts_with(named), "{refused}");
        }
        let nothing = of(no, no);
        let refused = life.tenant_budget(Some(nothing)).await.unwrap_err();
        assert!(
            refused.message.contains("a base, a burst limit"),
            "{refused}"
        );
        let empty = BudgetParts {
            base: Some(Some(RateParts::default())),
            ..nothing
        };
        life.tenant_budget(Some(empty)).await.unwrap_err();
        let unearned = BudgetParts {
            credit_s: Some(Some(60)),
            ..of(no, (Some(900), None))
        };
        let refused = life.tenant_budget(Some(unearned)).await.unwrap_err();
        assert!(refused.message.contains("there is no base"), "{refused}");
        let much = of((Some(10_000_000), None), no);
        let refused = life.tenant_budget(Some(much)).await.unwrap_err();
        let hint = refused.hint.unwrap();
        assert!(
            hint.contains("4 KiB") && hint.contains("defaults"),
            "{hint}"
        );
        let owner = life.owner.clone();
        life.tenant_budget(Some(of((Some(600), Some(1 << 20)), no)))
            .await
            .unwrap();
        let base = of((Some(601), None), no);
        let refused = owner
            .budgets
            .volume_budget("t", "v", Some(base))
            .await
            .unwrap_err();
        assert!(refused.message.contains("at most 600 fits"), "{refused}");
        assert_eq!(refused.hint, None, "what was stated is too much");
        let base = of((Some(600), None), no);
        let refused = owner
            .budgets
            .volume_budget("t", "v", Some(base))
            .await
            .unwrap_err();
        assert!(
            refused.message.contains("at most 1048576 fits"),
            "{refused}"
        );
        assert!(refused.hint.unwrap().contains("4 KiB"));
        life.tenant_budget(None).await.unwrap();
        let refused = owner
            .budgets
            .volume_budget("t", "v", Some(base))
            .await
            .unwrap_err();
        assert!(refused.hint.unwrap().contains("its tenant has no base"));
        let none = owner
            .base
            .core
            .borrow()
            .pool
            .budgets()
            .volumes()
            .next()
            .is_none();
        assert!(none, "nothing was changed");
    });
}

#[test]
fn a_budget_patch_changes_only_named_fields() {
    run(async {
        let place = Place::new();
        let mut life = Life::first(&place, Begin::default()).await;
        life.volume("v", 1 << 20).await;
        life.export("v").await;
        let owner = life.owner.clone();
        let patch = |text: &str| BudgetChange::Patch(serde_json::from_str(text).unwrap());
        let shown = |budget: &Budget| {
            let base = budget.base.map(|base| (base.iops, base.bytes_s));
            (
                base,
                budget.burst.iops,
                budget.burst.bytes_s,
                budget.credit_s,
            )
        };
        let (kib, mib) = (1 << 10, 1 << 20);
        for (text, is) in [
            (
                r#"{"base":{"iops":1000},"credit_s":60}"#,
                (Some((1000, 4000 * kib)), Some(1000), None, Some(60)),
            ),
            // Derived values follow the base; the credit stays.
            (
                r#"{"base":{"iops":2000}}"#,
                (Some((2000, 8000 * kib)), Some(2000), None, Some(60)),
            ),
            (
                r#"{"burst":{"iops":2000}}"#,
                (Some((2000, 8000 * kib)), Some(2000), None, Some(60)),
            ),
            // A stated limit stays, although it equalled the base.
            (
                r#"{"base":{"iops":500}}"#,
                (Some((500, 2000 * kib)), Some(2000), None, Some(60)),
            ),
            (
                r#"{"base":{"bytes_s":1048576},"burst":{"bytes_s":10485760}}"#,
                (Some((500, mib)), Some(2000), Some(10 * mib), Some(60)),
            ),
            (
                r#"{"credit_s":null}"#,
                (Some((500, mib)), Some(2000), Some(10 * mib), None),
            ),
            (
                r#"{"base":{"iops":null}}"#,
                (Some((10, mib)), Some(2000), Some(10 * mib), None),
            ),
            (
                r#"{"credit_s":5,"burst":{"iops":null}}"#,
                (Some((10, mib)), None, Some(10 * mib), Some(5)),
            ),
            (r#"{"base":null}"#, (None, None, Some(10 * mib), None)),
            ("{}", (None, None, Some(10 * mib), None)),
        ] {
            let set = life.with_engine(owner.budgets.tenant_budget("t", patch(text)));
            let budget = set.await.unwrap().budget.unwrap();
            assert_eq!(shown(&budget), is, "{text}");
        }
        let credit = life.with_engine(owner.budgets.tenant_budget("t", patch(r#"{"credit_s":5}"#)));
        credit.await.unwrap_err();
        let set = life.with_engine(
            owner
                .budgets
                .tenant_budget("t", patch(r#"{"base":{"iops":700}}"#)),
        );
        set.await.unwrap();
        drop(owner);
        let before = life.kill().await;
        let begin = Begin {
            generation: 2,
            ..Begin::default()
        };
        let mut life = Life::next(&place, begin, &before).await;
        let owner = life.owner.clone();
        let set = life.with_engine(
            owner
                .budgets
                .tenant_budget("t", patch(r#"{"base":{"iops":800}}"#)),
        );
        let budget = set.await.unwrap().budget.unwrap();
        let is = (Some((800, 3200 * kib)), Some(800), Some(10 * mib), None);
        assert_eq!(shown(&budget), is);
        let all = life.with_engine(owner.budgets.tenant_budget("t", Some(put(1000, 5000))));
        let budget = all.await.unwrap().budget.unwrap();
        assert_eq!(budget.burst.iops, Some(5000));
        let limit = patch(r#"{"burst":{"iops":90}}"#);
        let volume = life.with_engine(owner.budgets.volume_budget("t", "v", limit));
        let budget = volume.await.unwrap().budget.unwrap();
        assert_eq!(shown(&budget), (None, Some(90), None, None));
        let limit = patch(r#"{"burst":{"bytes_s":100000000000}}"#);
        let volume = life.with_engine(owner.budgets.volume_budget("t", "v", limit));
        let budget = volume.await.unwrap().budget.unwrap();
        assert_eq!(shown(&budget), (None, Some(90), Some(MOST.bytes), None));
        let volume = life.with_engine(owner.budgets.volume_budget(
            "t",
            "v",
            patch(r#"{"burst":null}"#),
        ));
        assert_eq!(volume.await.unwrap().budget, None);
        for (last, drops) in [
            (r#"{"base":{"iops":700},"credit_s":5}"#, r#"{"base":null}"#),
            (r#"{"base":{"iops":700}}"#, r#"{"base":{"iops":null}}"#),
            (r#"{"burst":{"iops":700}}"#, r#"{"burst":null}"#),
        ] {
            let none = life.with_engine(owner.budgets.tenant_budget("t", None));
            none.await.unwrap();
            let set = life.with_engine(owner.budgets.tenant_budget("t", patch(last)));
            set.await.unwrap();
            let set = life.with_engine(owner.budgets.tenant_budget("t", patch(drops)));
            assert_eq!(set.await.unwrap().budget, None, "{last} {drops}");
        }
    });
}

#[test]
fn ten_thousand_changes_are_stored_and_published() {
    run(async {
        const CHANGES: u64 = 10_000;
        let place = Place::new();
        let mut life = Life::first(&place, Begin::default()).await;
        life.volume("v", 1 << 20).await;
        life.export("v").await;
        let done = Rc::new(Cell::new(0));
        for change in 0..CHANGES {
            let (owner, done) = (life.owner.clone(), done.clone());
            tokio::task::spawn_local(async move {
                let budget = (change % 100 != 0 || change == 0).then(|| put(100 + change, 50_000));
                owner.budgets.tenant_budget("t", budget).await.unwrap();
                done.set(done.get() + 1);
            });
        }
        life.with_engine(async {
            while done.get() < CHANGES {
                tokio::task::yield_now().await;
            }
        })
        .await;
        let last = life
            .fake
            .log
            .iter()
            .rev()
            .find_map(|message| match message {
                ToEngine::SetTenantBudget { budget, .. } => *budget,
                _ => None,
            });
        assert_eq!(last.unwrap().base.iops, 100 + CHANGES - 1);
        assert!(
            life.owner.base.committer.commits() < CHANGES / 4,
            "changes share commits"
        );
    });
}

#[test]
fn settings_and_costs_survive_restarts_and_damage_is_reported() {
    run(async {
        let place = Place::new();
        let mut life = Life::first(&place, Begin::default()).await;
        let folder = place.folder.path();
        let owner = life.owner.clone();
        owner.budgets.set_node(folder, 2);
        assert!(!owner.node.costs_show().calibrated);
        let mut measured = owner.node.costs_show().profiles[4];
        measured.cpu_ns = [500.0; 6];
        let costs = CostsPut {
            profiles: vec![measured],
            note: Some("here".to_owned()),
        };
        let bad = |change: fn(&mut CostsPut)| {
            let mut costs = costs.clone();
            change(&mut costs);
            costs
        };
        for bad in [
            bad(|costs| costs.profiles[0].cpu_ns[3] = f64::NAN),
            bad(|costs| costs.profiles[0].device_ns[0] = -1.0),
            bad(|costs| costs.profiles[0].cpu_ns = [0.0; 6]),
            bad(|costs| costs.profiles.clear()),
            bad(|costs| costs.profiles.push(costs.profiles[0])),
        ] {
            let refused = owner.budgets.costs_put(Some(bad)).await.unwrap_err();
            assert_eq!(refused.kind, ErrorKind::Invalid);
        }
        let put = life.with_engine(async { owner.budgets.costs_put(Some(costs)).await });
        assert_eq!(put.await.unwrap().profiles[4].cpu_ns, [500.0; 6]);
        let update = |name: &str, value: f64| SchedulingUpdate {
            params: [(name.to_owned(), Some(value))].into(),
            ..SchedulingUpdate::default()
        };
        for bad in [
            update("keep", 7.0),
            update("speed", 1.0),
            SchedulingUpdate {
                oversubscription: Some(0.5),
                ..SchedulingUpdate::default()
            },
            SchedulingUpdate {
                capacity: Some(NodeCapacity {
                    device_reads: f64::INFINITY,
                    ..owner.budgets.scheduling_show().capacity
                }),
                ..SchedulingUpdate::default()
            },
        ] {
            let refused = owner.budgets.scheduling_update(bad).await.unwrap_err();
            assert_eq!(refused.kind, ErrorKind::Invalid);
        }
        let set = owner
            .budgets
            .scheduling_update(update("window_ns", 500_000.0))
            .await;
        assert_eq!(set.unwrap().params["window_ns"], 500_000.0);
        owner.budgets.set_node(folder, 2);
        assert_eq!(owner.node.costs_show().note.as_deref(), Some("here"));
        assert_eq!(
            owner.budgets.scheduling_show().params["window_ns"],
            500_000.0
        );
        let warnings = || {
            let events = owner.base.events.all();
            let warned = events.iter().filter(|e| e.kind == EventKind::Warning);
            warned.map(|e| e.message.clone()).collect::<Vec<_>>()
        };
        assert_eq!(warnings(), Vec::<String>::new());
        for (name, text) in [
            ("costs.json", "{\"at_s\": 1, \"profiles\": []}"),
            ("costs.json", "{"),
            ("scheduling.json", "{\"oversubscription\": -1}"),
        ] {
            std::fs::write(folder.join(name), text).unwrap();
        }
        owner.budgets.set_node(folder, 2);
        assert_eq!(warnings().len(), 2, "{:?}", warnings());
    });
}

#[test]
fn an_engine_gets_the_queue_spread_with_or_without_budgets() {
    run(async {
        let place = Place::new();
        let mut life = Life::first(&place, Begin::default()).await;
        life.volume("v", 1 << 20).await;
        life.export("v").await;
        let folder = place.folder.path();
        life.owner.budgets.set_node(folder, 2);
        assert_eq!(said(&mut life.fake), ["one-to-n", "export"]);
        let owner = life.owner.clone();
        let spread = async |life: &mut Life, spread| {
            let update = SchedulingUpdate {
                spread: Some(spread),
                ..SchedulingUpdate::default()
            };
            let shown = life.with_engine(async { owner.budgets.scheduling_update(update).await });
            assert!(!shown.await.unwrap().on);
            said(&mut life.fake)
        };
        assert_eq!(spread(&mut life, Spread::OneToOne).await, ["one-to-one"]);
        assert!(spread(&mut life, Spread::OneToOne).await.is_empty());
        life.tenant_budget(Some(put(1000, 5000))).await.unwrap();
        assert_eq!(said(&mut life.fake), ["on Burst", "tenant 1000", "volume"]);
        life.tenant_budget(None).await.unwrap();
        assert_eq!(said(&mut life.fake), ["off"]);
        life.replace_engine(|_| {}).await;
        life.fake.settle().await;
        assert_eq!(said(&mut life.fake), ["one-to-one", "export"]);
        drop(owner);
        let fake = life.kill().await;
        let begin = Begin {
            generation: 2,
            ..Begin::default()
        };
        let mut life = Life::take_over(&place, begin, fake).await;
        life.fake.settle().await;
        let all = said(&mut life.fake);
        assert_eq!(all, ["off", "one-to-n", "export"]);
        life.owner.budgets.set_node(folder, 2);
        life.replace_engine(|_| {}).await;
        life.fake.settle().await;
        assert_eq!(said(&mut life.fake), ["one-to-one", "export"]);
    });
}

#[test]
fn tenant_usage_does_not_fall_when_the_engine_dies() {
    run(async {
        let place = Place::new();
        let mut life = Life::first(&place, Begin::default()).await;
        life.volume("v", 1 << 20).await;
        life.export("v").await;
        life.tenant_budget(Some(put(1000, 5000))).await.unwrap();
        let id = life
            .owner
            .base
            .core
            .borrow()
            .pool
            .tenants()
            .named("t")
            .unwrap()
            .id
            .0;
        let count = |fake: &Fake, used: u64, credit: u64| {
            let record = &fake.region.tenants()[3];
            record.tenant.store(id + 1, Relaxed);
            record.used_ops.store(used, Relaxed);
            record.credit_ops.store(credit, Relaxed);
            record.granted_ops_s.store(900, Relaxed);
            fake.region.header().reactors.store(1, Relaxed);
            fake.region.reactors()[0].windows.store(used, Relaxed);
        };
        let seen = |life: &Life| {
            let stats = life.owner.statistics.stats(Default::default());
            let [tenant] = &stats.tenants[..] else {
                panic!("{:?}", stats.tenants);
            };
            let windows = stats.reactors[0].windows;
            (tenant.used_ops, windows, tenant.credit.unwrap().ops)
        };
        count(&life.fake, 500, 70_000);
        assert_eq!(seen(&life), (500, 500, 60_000));
        let shown = life.owner.volumes.tenant_show("t").unwrap();
        assert_eq!(shown.credit.unwrap().most_ops, 60_000);
        let reported = |life: &mut Life| {
            let reported = life.fake.log.drain(..).filter_map(|message| match message {
                ToEngine::SetTenantBudget { credit, .. } => Some(credit),
                _ => None,
            });
            reported.collect::<Vec<_>>()
        };
        assert_eq!(reported(&mut life), [[0; 2]]);
        life.replace_engine(|fake| count(fake, 20, 30)).await;
        life.fake.settle().await;
        assert_eq!(seen(&life), (520, 520, 30));
        assert_eq!(reported(&mut life), [[70_000, 0]]);
        let owner = life.owner.clone();
        let gone = owner
            .exports
            .export_delete("t".to_owned(), "v".to_owned(), true);
        life.with_engine(gone).await.unwrap();
        reported(&mut life);
        life.fake.region.tenants()[3].tenant.store(0, Relaxed);
        let shown = life.owner.volumes.tenant_show("t").unwrap();
        assert_eq!((seen(&life).2, shown.credit.unwrap().ops), (30, 30));
        life.export("v").await;
        assert_eq!(reported(&mut life), [[30, 0]]);
    });
}

/// The record stays for a while after the tenant's last export is removed.
#[test]
fn tenant_usage_is_counted_once_after_its_record_is_freed() {
    run(async {
        let place = Place::new();
        let mut life = Life::first(&place, Begin::default()).await;
        life.volume("v", 1 << 20).await;
        life.export("v").await;
        life.tenant_budget(Some(put(1000, 5000))).await.unwrap();
        let id = life
            .owner
            .base
            .core
            .borrow()
            .pool
            .tenants()
            .named("t")
            .unwrap()
            .id
            .0;
        let count = |fake: &Fake, used: u64| {
            let record = &fake.region.tenants()[3];
            record.tenant.store(id + 1, Relaxed);
            record.used_ops.store(used, Relaxed);
        };
        let used =
            |life: &Life| life.owner.statistics.stats(Default::default()).tenants[0].used_ops;
        count(&life.fake, 500);
        assert_eq!(used(&life), 500);
        let owner = life.owner.clone();
        let gone = owner
            .exports
            .export_delete("t".to_owned(), "v".to_owned(), true);
        life.with_engine(gone).await.unwrap();
        assert_eq!(used(&life), 500, "its record is there still");
        // The engine has removed the record, and counts from zero.
        count(&life.fake, 0);
        life.export("v").await;
        count(&life.fake, 7);
        assert_eq!(used(&life), 507);
        life.tenant_budget(None).await.unwrap();
        assert_eq!(used(&life), 507);
        count(&life.fake, 0);
        life.tenant_budget(Some(put(1000, 5000))).await.unwrap();
        count(&life.fake, 1);
        assert_eq!(used(&life), 508);
        life.replace_engine(|fake| count(fake, 2)).await;
        life.fake.settle().await;
        assert_eq!(used(&life), 510);
    });
}
