//! Tests of devices that hang, fail, and recover.

use forebay_xlate::boundary::message::{FaultFailure, FromEngine, Job, ToEngine};
use forebay_xlate::{DeviceIndex, ExtentRange};

use super::*;

const HUNG: u8 = 1;

fn impatient() -> Begin {
    let mut begin = Begin::default();
    begin.limits.revoke = Duration::from_millis(600);
    begin.limits.settle = Duration::from_millis(600);
    begin.limits.job = Duration::from_millis(900);
    begin
}

/// Returns the extents on the hanging device, and the others.
async fn write_some(life: &mut Life, volume: VolumeId, count: u64) -> (Vec<u64>, Vec<u64>) {
    let mut on = (Vec::new(), Vec::new());
    for extent in 0..count {
        match life.fake.write(volume, extent).await.device().0 {
            HUNG => on.0.push(extent),
            _ => on.1.push(extent),
        }
    }
    assert!(!on.0.is_empty() && !on.1.is_empty(), "it lies on both");
    on
}

impl Life {
    fn quarantined(&self, device: u8) -> u64 {
        let core = self.owner.base.core.borrow();
        core.pool.allocator().quarantined_on(DeviceIndex(device))
    }

    async fn wait(&mut self, mut what: impl FnMut(&Owner) -> bool) {
        let owner = self.owner.clone();
        let wait = async {
            while !what(&owner) {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        self.with_engine(wait).await;
    }

    async fn delete(&mut self, name: &str) {
        let owner = self.owner.clone();
        let delete = owner.volumes.volume_delete("t".to_owned(), name.to_owned());
        self.with_engine(delete).await.unwrap();
    }
}

#[test]
fn hung_device_quarantines() {
    run(async {
        let place = Place::with_devices(2);
        let mut life = Life::first(&place, impatient()).await;
        let clean = life.space().clean;
        let [a, b, c] = [
            life.volume("a", 16 << 20).await,
            life.volume("b", 16 << 20).await,
            life.volume("c", 16 << 20).await,
        ];
        let (hung, well) = write_some(&mut life, a, 64).await;
        let (b_hung, b_well) = write_some(&mut life, b, 64).await;
        assert!(life.fake.flush(b, life.fake.highest_sequence(b)).await);
        life.fake.hang(HUNG);

        life.delete("a").await;
        assert_eq!(life.quarantined(HUNG), hung.len() as u64);
        assert_eq!(life.quarantined(0), 0);
        let troubles = life.owner.reports.troubles().join("\n");
        assert!(troubles.contains("pool1.img hangs"), "{troubles}");
        assert_eq!(life.fake.open_revokes, [], "nothing takes up a drain");
        // The fake checks that only the other device's extents are zero-filled.
        life.wait(|owner| owner.base.core.borrow().pool.space().dirty == 0)
            .await;
        let zero_filled = life.fake.jobs.iter().filter_map(|job| match job {
            Job::ZeroFill { device, extents } => Some((device.0, extents.count)),
            _ => None,
        });
        let zero_filled: u64 = zero_filled
            .inspect(|(device, _)| assert_eq!(*device, 0))
            .map(|(_, count)| count)
            .sum();
        assert_eq!(zero_filled, well.len() as u64);
        let word = life.fake.fault(c, 0, true).await.unwrap();
        let sequence = life.fake.highest_sequence(c);
        assert!(word.device().0 == HUNG || life.fake.flush(c, sequence).await);
        let release = life.fake.release(b, ExtentRange::new(b_well[0], 1));
        life.fake.released(release).await;
        assert_eq!(life.mapped(b), 63);
        let release = life.fake.release(b, ExtentRange::new(b_hung[0], 1));
        life.fake.released(release).await;
        assert_eq!(life.mapped(b), 62);
        assert_eq!(life.quarantined(HUNG), hung.len() as u64 + 1);
        assert!(is_hole(life.fake.fault(b, b_hung[0], false).await.unwrap()));

        let mut before = life.kill().await;
        before.take_the_rest();
        let mut life = Life::take_over(&place, impatient(), before).await;
        assert_eq!(life.quarantined(HUNG), hung.len() as u64 + 1);
        assert_eq!(life.mapped(b), 62);
        while life.fake.settles(HUNG) == 0 {
            let settle = |m: &ToEngine| matches!(m, ToEngine::Job { .. }).then_some(());
            life.fake.until(settle).await;
        }
        // Extents quarantined during a settle job need another one.
        life.delete("b").await;
        assert_eq!(life.fake.settles(HUNG), 1);
        let later = life.quarantined(HUNG) - hung.len() as u64 - 1;
        assert!(later > 0);
        life.fake.end_settle(HUNG, b);
        life.wait(|owner| {
            let core = owner.base.core.borrow();
            core.pool.allocator().quarantined_on(DeviceIndex(HUNG)) == later
        })
        .await;
        life.fake.hang_no_more(HUNG);
        life.wait(|owner| owner.base.core.borrow().pool.space().quarantined == 0)
            .await;
        life.wait(|owner| owner.base.core.borrow().pool.space().dirty == 0)
            .await;
        life.delete("c").await;
        life.wait(|owner| owner.base.core.borrow().pool.space().clean == clean)
            .await;
        assert_eq!(life.owner.reports.troubles(), [] as [&str; 0]);
    });
}

#[test]
fn a_quarantine_ends_with_a_later_engines_fence_or_another_boot() {
    run(async {
        let place = Place::with_devices(2);
        let mut life = Life::first(&place, impatient()).await;
        let a = life.volume("a", 16 << 20).await;
        let (hung, _) = write_some(&mut life, a, 64).await;
        life.fake.hang(HUNG);
        life.delete("a").await;
        assert_eq!(life.quarantined(HUNG), hung.len() as u64);
        // The dead engine's requests are still at the device, so the next engine has no fence yet.
        life.replace_engine(|fake| fake.devices_ready = false).await;
        life.fake.settle().await;
        assert_eq!(life.quarantined(HUNG), hung.len() as u64);
        for device in 0..2 {
            let device = DeviceIndex(device);
            life.fake.say(&FromEngine::DeviceReady { device });
        }
        life.wait(|owner| owner.base.core.borrow().pool.space().quarantined == 0)
            .await;
        let settles = |job: &&Job| matches!(job, Job::Settle { .. });
        assert_eq!(life.fake.jobs.iter().filter(settles).count(), 0);

        let b = life.volume("b", 16 << 20).await;
        write_some(&mut life, b, 64).await;
        life.fake.hang(HUNG);
        life.delete("b").await;
        assert!(life.quarantined(HUNG) > 0);
        let before = life.kill().await;
        let begin = Begin {
            boot: [9; 16],
            generation: 9,
            ..impatient()
        };
        let life = Life::next(&place, begin, &before).await;
        assert_eq!(life.space().quarantined, 0);
    });
}

#[test]
fn a_hung_device_delays_only_its_own_commits() {
    run(async {
        let place = Place::with_devices(2);
        let mut begin = impatient();
        begin.limits.sync_every = Duration::from_millis(30);
        let mut life = Life::first(&place, begin).await;
        life.fake.hang(HUNG);
        let a = life.volume("a", 16 << 20).await;
        let (hung, well) = write_some(&mut life, a, 64).await;
        let committed = well.len();
        life.wait(move |owner| {
            let space = owner.base.core.borrow().pool.volumes().space_of(a).unwrap();
            space.mapped - space.uncommitted == committed as u64
        })
        .await;
        let flushes = |job: &&Job| matches!(job, Job::Flush { device } if device.0 == HUNG);
        assert_eq!(life.fake.jobs.iter().filter(flushes).count(), 1);
        life.fake.hang_no_more(HUNG);
        life.wait(|owner| {
            owner
                .base
                .core
                .borrow()
                .pool
                .volumes()
                .uncommitted_extents()
                == 0
        })
        .await;
        assert!(!hung.is_empty());
    });
}

#[test]
fn a_failed_device_affects_only_its_own_extents() {
    run(async {
        let place = Place::with_devices(2);
        let mut begin = impatient();
        begin.limits.device_retry = Duration::from_millis(400);
        let mut life = Life::first(&place, begin).await;
        let a = life.volume("a", 16 << 20).await;
        let b = life.volume("b", 16 << 20).await;
        let (failed, well) = write_some(&mut life, a, 64).await;
        let word = life.fake.grants[&(a, failed[0])];
        life.fake.devices_ready = false;
        life.fake.say(&FromEngine::DeviceFailed {
            device: DeviceIndex(HUNG),
            error: "it burns".to_owned(),
        });
        let answer = life.fake.fault(a, failed[0], false).await;
        assert_eq!(answer, Err(FaultFailure::Device));
        life.fake.fault(a, well[0], true).await.unwrap();
        let sequence = life.fake.highest_sequence(a);
        assert!(
            !life.fake.flush(a, sequence).await,
            "a part can't be durable"
        );
        for extent in 0..64 {
            assert_eq!(life.fake.write(b, extent).await.device().0, 0);
        }
        assert!(life.fake.flush(b, life.fake.highest_sequence(b)).await);
        let asked = |m: &ToEngine| matches!(m, ToEngine::SetDevice { .. }).then_some(());
        life.fake.until(asked).await;
        life.fake.say(&FromEngine::DeviceReady {
            device: DeviceIndex(HUNG),
        });
        life.wait(|owner| owner.base.is_online(DeviceIndex(HUNG)))
            .await;
        assert_eq!(life.fake.fault(a, failed[0], true).await, Ok(word));
        assert!(life.fake.flush(a, sequence).await);
    });
}
