//! Tests of budgets during a calibration, and of the default spread of queues.

use super::budgets::{put, said};
use super::*;
use crate::model::error::ErrorKind;
use crate::model::scheduling::{CALIBRATION_TENANT as TENANT, Spread};
use forebay_device::volatile;

impl Life {
    async fn calibrating(&mut self, seconds: Option<u64>) {
        let owner = self.owner.clone();
        let reported = self.with_engine(async { owner.budgets.calibrating(seconds).await });
        reported.await.unwrap();
    }

    async fn measured(&mut self) {
        let owner = self.owner.clone();
        self.with_engine(async {
            owner
                .volumes
                .tenant_create(TENANT.to_owned())
                .await
                .unwrap();
            let body = VolumeCreate {
                name: "p1".to_owned(),
                size_bytes: Some(1 << 20),
                block_bytes: None,
                reserved_bytes: 0,
                rbd: None,
            };
            owner
                .volumes
                .volume_create(TENANT.to_owned(), body)
                .await
                .unwrap();
            let body = ExportCreate {
                tenant: TENANT.to_owned(),
                volume: "p1".to_owned(),
                any_host: true,
                ..ExportCreate::default()
            };
            owner.exports.export_create(body).await.unwrap();
        })
        .await;
    }
}

#[test]
fn a_calibrated_volume_has_no_share_during_calibration() {
    run(async {
        let place = Place::new();
        let mut life = Life::first(&place, Begin::default()).await;
        life.volume("v", 1 << 20).await;
        life.export("v").await;
        life.tenant_budget(Some(put(1000, 5000))).await.unwrap();
        life.calibrating(Some(60)).await;
        life.measured().await;
        let all = [
            "one-to-n",
            "export",
            "on Burst",
            "tenant 1000",
            "volume",
            "export",
        ];
        assert_eq!(said(&mut life.fake), all);
        life.replace_engine(|_| {}).await;
        life.fake.settle().await;
        let all = [
            "one-to-n",
            "on Burst",
            "tenant 1000",
            "volume",
            "export",
            "export",
        ];
        assert_eq!(said(&mut life.fake), all);
        life.calibrating(None).await;
        assert_eq!(said(&mut life.fake), ["tenant 10", "volume"]);
        life.calibrating(Some(60)).await;
        assert_eq!(said(&mut life.fake), ["tenant gone"]);
        life.calibrating(Some(1)).await;
        life.fake.listen(Duration::from_millis(500)).await;
        assert!(said(&mut life.fake).is_empty());
        life.calibrating(Some(1)).await;
        life.fake.listen(Duration::from_millis(700)).await;
        assert!(said(&mut life.fake).is_empty(), "it said so again");
        life.fake.listen(Duration::from_millis(1500)).await;
        assert_eq!(said(&mut life.fake), ["tenant 10", "volume"]);
    });
}

#[test]
fn its_name_is_a_calibrations() {
    run(async {
        let place = Place::new();
        let mut life = Life::first(&place, Begin::default()).await;
        let owner = life.owner.clone();
        let refused = owner
            .volumes
            .tenant_create(TENANT.to_owned())
            .await
            .unwrap_err();
        assert!(refused.message.contains("is reserved for"), "{refused}");
        for seconds in [0, 601] {
            let refused = owner.budgets.calibrating(Some(seconds)).await.unwrap_err();
            assert!(refused.message.contains("1 to 600 s"), "{refused}");
        }
        life.calibrating(Some(60)).await;
        life.measured().await;
    });
}

#[test]
fn an_engine_gets_a_budget_only_after_it_is_written() {
    run(async {
        let place = Place::with_volatile_devices(1);
        let mut life = Life::first(&place, Begin::default()).await;
        life.volume("v", 1 << 20).await;
        life.export("v").await;
        said(&mut life.fake);
        let fail = volatile::fail_path(&place.path(0));
        std::fs::write(&fail, "").unwrap();
        let refused = life.tenant_budget(Some(put(1000, 5000))).await.unwrap_err();
        assert_eq!(refused.kind, ErrorKind::Unavailable, "{refused}");
        assert!(said(&mut life.fake).is_empty());
        std::fs::remove_file(&fail).unwrap();
        let owner = life.owner.clone();
        let written = async {
            while owner.base.committer.trouble().is_some() {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        life.with_engine(written).await;
        life.fake.listen(Duration::from_millis(300)).await;
        assert_eq!(said(&mut life.fake), ["on Burst", "tenant 1000", "volume"]);
    });
}

#[test]
fn queues_are_spread_unless_configured_otherwise() {
    run(async {
        let place = Place::new();
        let mut life = Life::first(&place, Begin::default()).await;
        life.volume("v", 1 << 20).await;
        let owner = life.owner.clone();
        let folder = place.folder.path();
        assert_eq!(owner.budgets.scheduling_show().spread, Spread::OneToN);
        // As older daemons wrote it, for which it was the default.
        let old = "{\"policy\":\"burst\",\"spread\":\"one_to_one\",\"oversubscription\":2.0}";
        std::fs::write(folder.join("scheduling.json"), old).unwrap();
        owner.budgets.set_node(folder, 2);
        assert_eq!(owner.budgets.scheduling_show().oversubscription, 2.0);
        assert_eq!(owner.budgets.scheduling_show().spread, Spread::OneToOne);
    });
}
