//! Requests about images and their snapshots.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use forebay_rbd::{ImageOptions, OpenMode, ParentImage, Pool, RadosClient, RbdError, feature};
use rustix::io::Errno;

use super::{Clusters, LIMIT, LONG_LIMIT};
use crate::model::error::ApiError;
use crate::model::rbd::{ImagePath, ImageState};

/// A client that ended without a word counts as a user of its images for so long.
const BUSY_LIMIT: Duration = Duration::from_secs(35);
const BUSY_RETRY: Duration = Duration::from_secs(1);

const FEATURES: [(u64, &str); 7] = [
    (feature::LAYERING, "layering"),
    (feature::STRIPING, "striping"),
    (feature::EXCLUSIVE_LOCK, "exclusive-lock"),
    (feature::OBJECT_MAP, "object-map"),
    (feature::FAST_DIFF, "fast-diff"),
    (feature::DEEP_FLATTEN, "deep-flatten"),
    (feature::DATA_POOL, "data-pool"),
];

impl Clusters {
    pub(crate) async fn inspect(&self, of: &ImagePath) -> Result<ImageState, ApiError> {
        let path = of.clone();
        let work = move |client: &_| inspect(&open_pool(client, &path)?, &path.image);
        self.ask(&of.cluster, LIMIT, work).await
    }

    /// Inspects the image. If there is none and `size_bytes` is given, creates it. Returns whether it
    /// did.
    pub(crate) async fn inspect_or_create(
        &self,
        of: &ImagePath,
        size_bytes: Option<u64>,
    ) -> Result<(ImageState, bool), ApiError> {
        let path = of.clone();
        let work = move |client: &_| {
            let pool = open_pool(client, &path)?;
            match (inspect(&pool, &path.image), size_bytes) {
                (Err(error), Some(size_bytes)) if error.errno == Errno::NOENT => {
                    pool.create(&path.image, size_bytes, &ImageOptions::default())?;
                    Ok((inspect(&pool, &path.image)?, true))
                }
                (state, _) => Ok((state?, false)),
            }
        };
        self.ask(&of.cluster, LIMIT, work).await
    }

    pub(crate) async fn resize(&self, of: &ImagePath, size_bytes: u64) -> Result<(), ApiError> {
        let path = of.clone();
        let work = move |client: &_| {
            let pool = open_pool(client, &path)?;
            pool.image(&path.image, OpenMode::ReadWrite)?
                .resize(size_bytes)
        };
        // Shrinking removes objects.
        self.ask(&of.cluster, LONG_LIMIT, work).await
    }

    pub(crate) async fn remove(&self, of: &ImagePath) -> Result<(), ApiError> {
        let path = of.clone();
        let work = move |client: &_| {
            let pool = open_pool(client, &path)?;
            while_busy(|| pool.remove(&path.image))
        };
        self.ask(&of.cluster, LONG_LIMIT, work).await
    }

    /// Returns the image's size at the snapshot.
    pub(crate) async fn take_snapshot(&self, of: &ImagePath, name: &str) -> Result<u64, ApiError> {
        let (path, name) = (of.clone(), name.to_owned());
        let work = move |client: &_| {
            let pool = open_pool(client, &path)?;
            let image = pool.image(&path.image, OpenMode::ReadWrite)?;
            image.take_snapshot(&name)?;
            let taken = image
                .snapshots()?
                .into_iter()
                .find(|taken| taken.name == name);
            taken.map(|taken| taken.size_bytes).ok_or_else(|| RbdError {
                doing: "find a snapshot of",
                what: format!("image {path}"),
                errno: Errno::NOENT,
            })
        };
        self.ask(&of.cluster, LIMIT, work).await
    }

    pub(crate) async fn remove_snapshot(&self, of: &ImagePath, name: &str) -> Result<(), ApiError> {
        let (path, name) = (of.clone(), name.to_owned());
        let work = move |client: &_| {
            let pool = open_pool(client, &path)?;
            let image = pool.image(&path.image, OpenMode::ReadWrite)?;
            let known = image.snapshots()?;
            let is_protected =
                |taken: &forebay_rbd::Snapshot| taken.name == name && taken.protected;
            if known.iter().any(is_protected) {
                image.unprotect_snapshot(&name)?;
            }
            image.remove_snapshot(&name)
        };
        self.ask(&of.cluster, LIMIT, work).await
    }

    pub(crate) async fn roll_back(&self, of: &ImagePath, name: &str) -> Result<(), ApiError> {
        let (path, name) = (of.clone(), name.to_owned());
        let work = move |client: &_| {
            let pool = open_pool(client, &path)?;
            let image = pool.image(&path.image, OpenMode::ReadWrite)?;
            // The engine may still be closing it.
            while_busy(|| image.roll_back(&name))
        };
        self.ask(&of.cluster, LONG_LIMIT, work).await
    }

    /// Makes the image `to`, in the same cluster, a clone of a snapshot.
    pub(crate) async fn clone_snapshot(
        &self,
        of: &ImagePath,
        name: &str,
        to: &ImagePath,
    ) -> Result<(), ApiError> {
        let (path, name, to) = (of.clone(), name.to_owned(), to.clone());
        let work = move |client: &_| {
            let (from, into) = (open_pool(client, &path)?, open_pool(client, &to)?);
            let options = ImageOptions::default();
            let clone = || into.create_clone(&to.image, &from, &path.image, &name, &options);
            match clone() {
                // Clusters for clients older than Mimic want a protected snapshot.
                Err(error) if error.errno == Errno::INVAL => {
                    let image = from.image(&path.image, OpenMode::ReadWrite)?;
                    image.protect_snapshot(&name)?;
                    clone()
                }
                done => done,
            }
        };
        self.ask(&of.cluster, LIMIT, work).await
    }
}

fn open_pool(client: &Arc<RadosClient>, path: &ImagePath) -> Result<Arc<Pool>, RbdError> {
    let namespace = (!path.namespace.is_empty()).then_some(&*path.namespace);
    client.pool(&path.pool, namespace)
}

fn inspect(pool: &Arc<Pool>, name: &str) -> Result<ImageState, RbdError> {
    // Open for reading only, it would not tell its lock's owner.
    let image = pool.image(name, OpenMode::ReadWrite)?;
    let info = image.info()?;
    let lock_owners = match info.features & feature::EXCLUSIVE_LOCK {
        0 => Vec::new(),
        _ => image.lock_owners()?,
    };
    // A dead client watches nothing, and its lock is broken by the next one.
    let watchers = match lock_owners.is_empty() {
        true => Vec::new(),
        false => image.watchers()?,
    };
    let features = FEATURES.iter().filter(|(bit, _)| info.features & bit != 0);
    Ok(ImageState {
        size_bytes: info.size_bytes,
        object_bytes: info.object_bytes,
        features: features.map(|(_, name)| (*name).to_owned()).collect(),
        parent: info.parent.as_ref().map(shown_parent),
        snapshots: image
            .snapshots()?
            .into_iter()
            .map(|taken| taken.name)
            .collect(),
        lock_owners: (lock_owners.into_iter())
            .filter(|owner| watchers.contains(owner))
            .collect(),
    })
}

fn shown_parent(parent: &ParentImage) -> String {
    let namespace = match parent.namespace.is_empty() {
        true => String::new(),
        false => format!("{}/", parent.namespace),
    };
    format!(
        "{}/{namespace}{}@{}",
        parent.pool, parent.image, parent.snapshot
    )
}

/// Repeats what another client's use of an image prevents.
fn while_busy(work: impl Fn() -> Result<(), RbdError>) -> Result<(), RbdError> {
    let begin = Instant::now();
    loop {
        match work() {
            Err(error)
                if matches!(error.errno, Errno::BUSY | Errno::ROFS)
                    && begin.elapsed() < BUSY_LIMIT =>
            {
                thread::sleep(BUSY_RETRY);
            }
            done => return done,
        }
    }
}
