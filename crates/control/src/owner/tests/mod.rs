//! Tests the owner against a fake engine, on a real pool in a sparse file.
//!
//! A [`Life`] is one daemon, from taking the pool to its sudden end. The next one uses the old file
//! and grant table, as after a kill.

mod budgets;
mod calibration;
mod contents;
mod fake;
mod handing_over;
mod hang;
mod images;
mod kills;
mod lives;
mod ports;
mod preallocated;
mod promises;
mod protocol;
mod reserve;
mod seen;
mod snapshots;
mod snapshots_in_use;
mod space;
mod taking_over;

use std::cell::RefCell;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use forebay_xlate::boundary::message::ToEngine;
use forebay_xlate::{Rights, VolumeId};
use tokio::task::LocalSet;

use self::fake::Fake;
use super::{Grants, Limits, Owner};
use crate::devices::{self, OpenPool};
use crate::link::session::Session;
use crate::model::{ExportCreate, PoolCreate, VolumeCreate};

const BOOT: [u8; 16] = [7; 16];
const EXTENT: u64 = 64 << 10;

struct Place {
    folder: tempfile::TempDir,
    devices: usize,
    /// Devices have write caches, which a power cut loses.
    volatile: bool,
}

impl Place {
    fn new() -> Self {
        Self::with_devices(1)
    }

    fn with_devices(devices: usize) -> Self {
        Self {
            folder: tempfile::tempdir().unwrap(),
            devices,
            volatile: false,
        }
    }

    fn with_volatile_devices(devices: usize) -> Self {
        Self {
            volatile: true,
            ..Self::with_devices(devices)
        }
    }

    fn path(&self, device: usize) -> PathBuf {
        let name = match device {
            0 => "pool.img".to_owned(),
            n => format!("pool{n}.img"),
        };
        self.folder.path().join(name)
    }

    fn specs(&self) -> Vec<String> {
        let spec = |device| match self.volatile {
            false => format!("file:{}", self.path(device).display()),
            true => format!("volatile:{}?size=64M", self.path(device).display()),
        };
        (0..self.devices).map(spec).collect()
    }

    fn grants(&self) -> PathBuf {
        self.folder.path().join("grants")
    }

    fn file(&self) -> PathBuf {
        self.path(0)
    }
}

struct Life {
    owner: Rc<Owner>,
    fake: Fake,
}

struct Begin {
    size_bytes: u64,
    extent_bytes: u64,
    capacity: usize,
    boot: [u8; 16],
    limits: Limits,
    generation: u64,
}

impl Default for Begin {
    fn default() -> Self {
        Self {
            size_bytes: 64 << 20,
            extent_bytes: EXTENT,
            capacity: 4096,
            boot: BOOT,
            limits: Limits {
                request: Duration::from_secs(5),
                revoke: Duration::from_secs(5),
                freeze: Duration::from_secs(5),
                settle: Duration::from_millis(300),
                job: Duration::from_secs(5),
                zero_fill: Duration::from_secs(2),
                inherited: Duration::from_millis(100),
                convert: Duration::from_secs(5),
                adoption: Duration::from_secs(5),
                // Syncs only when a test asks.
                sync_every: Duration::from_secs(3600),
                device_retry: Duration::from_millis(50),
            },
            generation: 1,
        }
    }
}

fn run<F: Future<Output = ()>>(test: F) {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let all = LocalSet::new();
    runtime.block_on(all.run_until(async {
        tokio::time::timeout(Duration::from_secs(300), test)
            .await
            .expect("the test hangs");
    }));
}

/// A flush of the dead daemon may hold a device for a moment.
fn reopen(place: &Place) -> OpenPool {
    let end = std::time::Instant::now() + Duration::from_secs(60);
    loop {
        match devices::open(&place.specs()) {
            Err(error)
                if error.kind == crate::model::error::ErrorKind::InUse
                    && std::time::Instant::now() < end =>
            {
                std::thread::sleep(Duration::from_millis(5));
            }
            opened => return opened.unwrap(),
        }
    }
}

fn owner_of(place: &Place, begin: &Begin, new: bool) -> Rc<Owner> {
    let (mut open, grants);
    if new {
        open = devices::create(&PoolCreate {
            create: true,
            name: "pool".to_owned(),
            devices: place.specs(),
            size_bytes: Some(begin.size_bytes),
            extent_bytes: Some(begin.extent_bytes),
            ..PoolCreate::default()
        })
        .unwrap();
        grants = Grants::fresh(&place.grants(), &open.pool, &begin.boot, begin.capacity);
    } else {
        open = reopen(place);
        grants = Grants::adopt(
            &place.grants(),
            &mut open.pool,
            None,
            &begin.boot,
            begin.capacity,
        );
    }
    let OpenPool {
        pool,
        catalog,
        devices,
        ..
    } = open;
    let owner = Owner::new(
        pool,
        Arc::new(catalog),
        devices,
        grants.unwrap(),
        begin.limits.clone(),
        Rc::default(),
        Rc::default(),
    );
    owner.statistics.keep_statistics(place.folder.path());
    owner
}

impl Life {
    /// The first daemon of a new pool, with a new engine.
    async fn first(place: &Place, begin: Begin) -> Self {
        let owner = owner_of(place, &begin, true);
        Self::with_fresh_engine(owner, begin.generation, None).await
    }

    /// The next daemon with a new engine; both predecessors were killed.
    async fn next(place: &Place, begin: Begin, before: &Fake) -> Self {
        let owner = owner_of(place, &begin, false);
        Self::with_fresh_engine(owner, begin.generation, Some(before)).await
    }

    async fn with_fresh_engine(owner: Rc<Owner>, generation: u64, before: Option<&Fake>) -> Self {
        owner.pool_owner.adopter.finish_adoption(None).await;
        let (fake, fd) = Fake::new(generation);
        let fake = match before {
            Some(before) => fake.after(before),
            None => fake,
        };
        let mut life = Self { owner, fake };
        life.converse(fd).await;
        life.opened().await;
        life
    }

    /// The next daemon, with the previous engine.
    async fn take_over(place: &Place, begin: Begin, mut fake: Fake) -> Self {
        let mut open = reopen(place);
        let pool = open.pool.info().uuid.into_bytes();
        let fd = fake.reconnect();
        let table = Some(std::fs::File::open(place.grants()).unwrap().into());
        let greet = Session::greet(fd, pool, None, Duration::from_secs(60));
        let (greeting, _) = tokio::join!(greet, fake.welcome(pool, table));
        let mut greeting = greeting.unwrap();
        let table = std::fs::File::options()
            .read(true)
            .write(true)
            .open(place.grants())
            .unwrap();
        greeting.table = None;
        let grants = Grants::adopt(
            &place.grants(),
            &mut open.pool,
            Some(table.into()),
            &begin.boot,
            begin.capacity,
        )
        .unwrap();
        assert!(grants.same_boot());
        let OpenPool {
            pool,
            catalog,
            devices,
            ..
        } = open;
        let owner = Owner::new(
            pool,
            Arc::new(catalog),
            devices,
            grants,
            begin.limits,
            Rc::default(),
            Rc::default(),
        );
        owner.statistics.keep_statistics(place.folder.path());
        let mut life = Self {
            owner: owner.clone(),
            fake,
        };
        life.owner
            .base
            .spawn(async move { owner.serve(greeting, &RefCell::default(), |_| {}).await });
        life.opened().await;
        life
    }

    async fn converse(&mut self, fd: std::os::fd::OwnedFd) {
        let pool = self.owner.base.core.borrow().pool.info().uuid.into_bytes();
        let table = self
            .owner
            .base
            .core
            .borrow()
            .grants
            .memory()
            .fd()
            .try_clone_to_owned()
            .unwrap();
        let greet = Session::greet(fd, pool, Some(table), Duration::from_secs(60));
        let (greeting, table) = tokio::join!(greet, self.fake.welcome(pool, None));
        assert!(table.is_some(), "a fresh engine gets the grant table");
        let owner = self.owner.clone();
        self.owner.base.spawn(async move {
            owner
                .serve(greeting.unwrap(), &RefCell::default(), |_| {})
                .await
        });
    }

    async fn opened(&mut self) {
        let owner = self.owner.clone();
        tokio::select! {
            () = owner.base.wait_open() => {}
            () = self.fake.until(|_| None::<()>) => {}
        }
        self.fake.settle().await;
    }

    async fn replace_engine(&mut self, prepare: impl FnOnce(&mut Fake)) {
        let (fake, fd) = Fake::new(self.fake.generation + 1);
        let mut fake = fake.after(&self.fake);
        prepare(&mut fake);
        self.fake = fake;
        self.owner
            .link
            .session_changed
            .until(|| self.owner.link.session().is_none().then_some(()))
            .await;
        self.converse(fd).await;
    }

    async fn with_engine<T>(&mut self, work: impl Future<Output = T>) -> T {
        tokio::select! {
            done = work => done,
            () = self.fake.until(|_| None::<()>) => unreachable!(),
        }
    }

    async fn volume(&mut self, name: &str, size_bytes: u64) -> VolumeId {
        let owner = self.owner.clone();
        let body = VolumeCreate {
            name: name.to_owned(),
            size_bytes: Some(size_bytes),
            block_bytes: None,
            reserved_bytes: 0,
            rbd: None,
        };
        let created = self.with_engine(async {
            if owner.volumes.tenant_show("t").is_err() {
                owner.volumes.tenant_create("t".to_owned()).await.unwrap();
            }
            owner
                .volumes
                .volume_create("t".to_owned(), body)
                .await
                .unwrap()
        });
        VolumeId(created.await.id)
    }

    async fn export(&mut self, name: &str) {
        let owner = self.owner.clone();
        let body = ExportCreate {
            tenant: "t".to_owned(),
            volume: name.to_owned(),
            hosts: Vec::new(),
            any_host: true,
            ..ExportCreate::default()
        };
        self.with_engine(async { owner.exports.export_create(body).await.unwrap() })
            .await;
    }

    fn mapped(&self, volume: VolumeId) -> u64 {
        self.owner
            .base
            .core
            .borrow()
            .pool
            .volumes()
            .space_of(volume)
            .unwrap()
            .mapped
    }

    fn space(&self) -> forebay_pool::Space {
        self.owner.base.core.borrow().pool.space()
    }

    /// The sudden end: nothing is committed or sent afterwards.
    async fn kill(self) -> Fake {
        self.owner.close();
        let Life { owner, fake } = self;
        // The tasks end at their next turn; then the devices' locks are released.
        while Rc::strong_count(&owner) > 1 {
            tokio::task::yield_now().await;
        }
        drop(owner);
        fake
    }
}

/// Reads from a copy of the pool's file whether an extent is durably mapped.
fn durably_mapped(file: &Path, volume: VolumeId, extent: u64) -> bool {
    let copy = tempfile::tempdir().unwrap();
    let path = copy.path().join("copy.img");
    let status = std::process::Command::new("cp")
        .args(["--sparse=always", "--reflink=auto"])
        .arg(file)
        .arg(&path)
        .status();
    assert!(status.unwrap().success());
    let mut open = devices::open(&[format!("file:{}", path.display())]).unwrap();
    open.pool.finish_adoption(false).unwrap();
    match open
        .pool
        .fault(volume, forebay_xlate::ExtentIndex(extent), false)
        .unwrap()
    {
        forebay_pool::FaultAnswer::Mapped { .. } => true,
        forebay_pool::FaultAnswer::Hole { .. } => false,
        other => panic!("{other:?}"),
    }
}

fn is_hole(word: forebay_xlate::Word) -> bool {
    word.rights() == Some(Rights::Hole)
}

fn is_release_done(message: &ToEngine) -> bool {
    matches!(message, ToEngine::ReleaseDone { .. })
}
