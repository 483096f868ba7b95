//! The crate `rbd` against a cluster.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::sync_channel;
use std::time::{Duration, Instant};

use forebay_rbd::{
    Buffer, ClientConfig, Completions, Ended, Image, ImageOptions, ImageRequest, Library, OpenMode,
    Pool, RadosClient, UpdateWatch, feature,
};
use rustix::io::Errno;
use xtask::ceph::{Cluster, Options, Release};

const LIMIT: Duration = Duration::from_secs(60);
const MIB: u64 = 1 << 20;

const TESTS: &[fn(&Lab)] = &[
    the_cluster_is_described,
    wrong_configurations_say_so,
    an_image_lives,
    missing_places_are_missing,
    data_comes_back,
    the_end_of_an_image_is_respected,
    many_operations_end_once_each_and_before_the_image,
    a_durable_write_passes_the_cache,
    snapshots_and_clones,
    the_lock_names_its_owner,
    a_blocklisted_client_writes_nothing,
    a_watch_sees_a_resize_elsewhere,
];

struct Lab {
    library: Arc<Library>,
    file: PathBuf,
}

#[test]
fn rbd_library_on_a_cluster() {
    if forebay_tests::ceph::must_skip().unwrap() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let options = Options::new(&folder.path().join("ceph"), Release::V16);
    let cluster = Cluster::start(&options).unwrap();
    let lab = Lab {
        library: Library::load(Some(&cluster.programs().client_libraries())).unwrap(),
        file: cluster.config_file(),
    };
    for test in TESTS {
        test(&lab);
    }
}

impl Lab {
    fn config(&self) -> ClientConfig {
        let mut config = ClientConfig::new("admin");
        config.file = Some(self.file.clone());
        config
    }

    fn client(&self) -> Arc<RadosClient> {
        RadosClient::connect(&self.library, &self.config()).unwrap()
    }

    fn pool(&self) -> Arc<Pool> {
        self.client().pool("rbd", None).unwrap()
    }
}

/// A new image's name.
fn name(test: &str) -> String {
    let now = std::time::UNIX_EPOCH.elapsed().unwrap().as_nanos();
    format!("{test}-{now}")
}

fn create(pool: &Arc<Pool>, name: &str, size: u64) -> Image {
    pool.create(name, size, &ImageOptions::default()).unwrap();
    pool.image(name, OpenMode::ReadWrite).unwrap()
}

fn run(image: &Image, request: ImageRequest, buffer: Buffer) -> Ended {
    let completions = Arc::new(Completions::new().unwrap());
    image.submit(request, buffer, 7, &completions).unwrap();
    wait_for(&completions, 1).remove(0)
}

fn wait_for(completions: &Completions, count: usize) -> Vec<Ended> {
    let start = Instant::now();
    let mut all = Vec::new();
    while all.len() < count {
        assert!(start.elapsed() < LIMIT, "{} of {count} ended", all.len());
        all.extend(completions.wait(LIMIT));
    }
    all
}

fn write(image: &Image, offset: u64, byte: u8, length: usize) -> Result<usize, Errno> {
    let mut buffer = Buffer::new(length);
    buffer.bytes_mut().fill(byte);
    let request = ImageRequest::Write {
        offset,
        length,
        force_unit_access: false,
    };
    run(image, request, buffer).result
}

fn read(image: &Image, offset: u64, length: usize) -> Vec<u8> {
    let mut buffer = Buffer::new(length);
    buffer.bytes_mut().fill(0xee);
    let ended = run(image, ImageRequest::Read { offset, length }, buffer);
    ended.buffer.bytes()[..ended.result.unwrap()].to_vec()
}

fn the_cluster_is_described(lab: &Lab) {
    let client = lab.client();
    assert_eq!(client.cluster_id().unwrap().len(), 36);
    assert!(client.instance_id() > 0);
    let usage = client.usage().unwrap();
    assert!(
        0 < usage.used_bytes && usage.used_bytes < usage.total_bytes,
        "{usage:?}"
    );
    let address = client.address().unwrap();
    assert!(address.contains(":0/"), "{address}");
    assert_ne!(address, lab.client().address().unwrap());
    client.wait_for_latest_map().unwrap();
}

fn wrong_configurations_say_so(lab: &Lab) {
    let connect = |config: &ClientConfig| RadosClient::connect(&lab.library, config).unwrap_err();
    let folder = tempfile::tempdir().unwrap();

    let mut config = lab.config();
    config.file = Some(folder.path().join("missing.conf"));
    let error = connect(&config);
    assert_eq!(error.errno, Errno::NOENT);
    assert!(error.to_string().contains("missing.conf"), "{error}");

    let mut config = lab.config();
    config.options.insert("key".to_owned(), "SECRET".to_owned());
    let error = connect(&config);
    assert_eq!(error.errno, Errno::PERM);
    assert!(!error.to_string().contains("SECRET"), "{error}");

    let mut config = lab.config();
    config
        .options
        .insert("no_such_option".to_owned(), "1".to_owned());
    assert!(connect(&config).to_string().contains("no_such_option"));

    // Nothing listens there.
    let silent = folder.path().join("silent.conf");
    let text = "[global]\nmon host = v1:127.0.0.1:1\nauth client required = none\n";
    std::fs::write(&silent, text).unwrap();
    config = lab.config();
    config.file = Some(silent);
    config.monitor_limit = Duration::from_secs(1);
    let error = connect(&config);
    assert_eq!(error.errno, Errno::TIMEDOUT, "{error}");
    assert!(error.to_string().contains("no monitor answers"), "{error}");
}

fn an_image_lives(lab: &Lab) {
    let pool = lab.pool();
    let name = name("life");
    let options = ImageOptions {
        features: Some(feature::LAYERING | feature::EXCLUSIVE_LOCK),
        order: Some(20),
        stripe: None,
        data_pool: None,
    };
    pool.create(&name, 8 * MIB, &options).unwrap();
    let again = pool.create(&name, 8 * MIB, &options).unwrap_err();
    assert_eq!(again.errno, Errno::EXIST);
    assert!(pool.images().unwrap().contains(&name));

    let image = pool.image(&name, OpenMode::ReadWrite).unwrap();
    assert!(!image.has_write_cache());
    let info = image.info().unwrap();
    assert_eq!((info.size_bytes, info.object_bytes), (8 * MIB, MIB));
    assert_eq!(Some(info.features), options.features);
    assert_eq!(info.parent, None);
    assert!(!info.id.is_empty());

    image.resize(12 * MIB).unwrap();
    assert_eq!(image.info().unwrap().size_bytes, 12 * MIB);
    image.resize(4 * MIB).unwrap();
    assert_eq!(image.info().unwrap().size_bytes, 4 * MIB);

    image.close(LIMIT).unwrap();
    pool.remove(&name).unwrap();
    assert!(!pool.images().unwrap().contains(&name));
    let error = pool.image(&name, OpenMode::ReadWrite).unwrap_err();
    assert_eq!(error.errno, Errno::NOENT);
    assert!(
        error
            .to_string()
            .contains(&format!("image ceph/rbd/{name}")),
        "{error}"
    );
}

fn missing_places_are_missing(lab: &Lab) {
    let client = lab.client();
    let error = client.pool("no-such-pool", None).unwrap_err();
    assert_eq!(error.errno, Errno::NOENT);
    assert!(error.to_string().contains("ceph/no-such-pool"), "{error}");
    let pool = client.pool("rbd", Some("no-such-namespace")).unwrap();
    let error = pool.create("x", MIB, &ImageOptions::default()).unwrap_err();
    assert_eq!(error.errno, Errno::NOENT, "{error}");
    assert!(
        error.to_string().contains("ceph/rbd/no-such-namespace/x"),
        "{error}"
    );
    assert_eq!(
        lab.pool()
            .create("a\0b", MIB, &ImageOptions::default())
            .unwrap_err()
            .errno,
        Errno::INVAL
    );
}

fn data_comes_back(lab: &Lab) {
    let pool = lab.pool();
    let name = name("data");
    let image = create(&pool, &name, 16 * MIB);

    // Across the border of two objects.
    let border = 4 * MIB - 2048;
    assert_eq!(write(&image, border, 1, 4096), Ok(4096));
    assert_eq!(read(&image, border, 4096), [1; 4096]);
    assert_eq!(read(&image, border - 512, 512), [0; 512]);

    let zeroes = ImageRequest::WriteZeroes {
        offset: border + 512,
        length: 1024,
        force_unit_access: true,
    };
    let ended = run(&image, zeroes, Buffer::new(0));
    assert_eq!((ended.token, ended.result), (7, Ok(1024)));
    let expected = [[1; 512], [0; 512], [0; 512], [1; 512]].concat();
    assert_eq!(read(&image, border, 2048), expected);

    let durable = ImageRequest::Write {
        offset: 8 * MIB,
        length: 512,
        force_unit_access: true,
    };
    let mut buffer = Buffer::new(4096);
    buffer.bytes_mut()[..512].fill(2);
    assert_eq!(run(&image, durable, buffer).result, Ok(512));
    assert_eq!(read(&image, 8 * MIB, 1024), [[2; 512], [0; 512]].concat());

    let discard = ImageRequest::Discard {
        offset: 4 * MIB,
        length: 8 << 20,
    };
    assert_eq!(run(&image, discard, Buffer::new(0)).result, Ok(8 << 20));
    assert_eq!(read(&image, 8 * MIB, 1024), [0; 1024]);
    assert_eq!(read(&image, border, 512), [1; 512]);
    assert_eq!(
        run(&image, ImageRequest::Flush, Buffer::new(0)).result,
        Ok(0)
    );
    drop(image);

    let image = pool.image(&name, OpenMode::ReadOnly).unwrap();
    assert_eq!(write(&image, 0, 9, 512), Err(Errno::ROFS));
    assert_eq!(read(&image, border, 512), [1; 512]);
    drop(image);
    pool.remove(&name).unwrap();
}

fn the_end_of_an_image_is_respected(lab: &Lab) {
    let pool = lab.pool();
    let name = name("end");
    let image = create(&pool, &name, MIB);
    assert_eq!(write(&image, MIB - 512, 3, 512), Ok(512));
    assert_eq!(read(&image, MIB - 512, 4096), [3; 512]);
    let beyond = ImageRequest::Read {
        offset: MIB + 512,
        length: 512,
    };
    assert_eq!(
        run(&image, beyond, Buffer::new(512)).result,
        Err(Errno::INVAL)
    );
    assert_eq!(write(&image, MIB + 512, 3, 512), Err(Errno::INVAL));

    let completions = Arc::new(Completions::new().unwrap());
    let longer = ImageRequest::Read {
        offset: 0,
        length: 513,
    };
    let refused = image
        .submit(longer, Buffer::new(512), 0, &completions)
        .unwrap_err();
    assert_eq!(refused.errno, Errno::INVAL);
    assert_eq!(refused.buffer.bytes().len(), 512);
    image.close(LIMIT).unwrap();
    pool.remove(&name).unwrap();
}

fn many_operations_end_once_each_and_before_the_image(lab: &Lab) {
    let pool = lab.pool();
    let name = name("many");
    let image = create(&pool, &name, 8 * MIB);
    let completions = Arc::new(Completions::new().unwrap());
    for token in 0..256 {
        let mut buffer = Buffer::new(4096);
        buffer.bytes_mut().fill(token as u8);
        let request = ImageRequest::Write {
            offset: token * 4096,
            length: 4096,
            force_unit_access: false,
        };
        image.submit(request, buffer, token, &completions).unwrap();
    }
    image.close(LIMIT).unwrap();
    let mut tokens: Vec<u64> = completions
        .take()
        .inspect(|ended| assert_eq!(ended.result, Ok(4096)))
        .map(|ended| ended.token)
        .collect();
    tokens.sort_unstable();
    assert_eq!(tokens, (0..256).collect::<Vec<_>>());

    let image = pool.image(&name, OpenMode::ReadOnly).unwrap();
    for token in 0..256 {
        assert_eq!(read(&image, token * 4096, 4096), [token as u8; 4096]);
    }
    drop(image);
    pool.remove(&name).unwrap();
}

fn a_durable_write_passes_the_cache(lab: &Lab) {
    let pool = lab.pool();
    let name = name("cache");
    // With the exclusive lock, opening the image elsewhere could make the writer flush.
    let options = ImageOptions {
        features: Some(feature::LAYERING),
        ..ImageOptions::default()
    };
    pool.create(&name, 8 * MIB, &options).unwrap();
    let mut config = lab.config();
    for (option, value) in [
        ("rbd_cache", "true"),
        ("rbd_cache_policy", "writeback"),
        ("rbd_cache_writethrough_until_flush", "false"),
    ] {
        config.options.insert(option.to_owned(), value.to_owned());
    }
    let client = RadosClient::connect(&lab.library, &config).unwrap();
    let cached = client.pool("rbd", None).unwrap();
    let cached = cached.image(&name, OpenMode::ReadWrite).unwrap();
    assert!(cached.has_write_cache());
    let reader = pool.image(&name, OpenMode::ReadOnly).unwrap();

    assert_eq!(write(&cached, 0, 4, 4096), Ok(4096));
    assert_eq!(
        read(&reader, 0, 4096),
        Vec::<u8>::from([0; 4096]),
        "the cache is off"
    );
    let durable = ImageRequest::Write {
        offset: 4096,
        length: 4096,
        force_unit_access: true,
    };
    let mut buffer = Buffer::new(4096);
    buffer.bytes_mut().fill(5);
    assert_eq!(run(&cached, durable, buffer).result, Ok(4096));
    assert_eq!(read(&reader, 4096, 4096), [5; 4096]);

    cached.close(LIMIT).unwrap();
    reader.close(LIMIT).unwrap();
    pool.remove(&name).unwrap();
}

fn snapshots_and_clones(lab: &Lab) {
    let pool = lab.pool();
    let (name, child) = (name("parent"), name("child"));
    let image = create(&pool, &name, 8 * MIB);
    assert_eq!(image.snapshots().unwrap(), []);
    write(&image, 0, 1, 4096).unwrap();
    image.take_snapshot("one").unwrap();
    assert_eq!(image.take_snapshot("one").unwrap_err().errno, Errno::EXIST);
    write(&image, 0, 2, 4096).unwrap();
    image.resize(16 * MIB).unwrap();
    image.take_snapshot("two").unwrap();

    image.protect_snapshot("one").unwrap();
    let listed = image.snapshots().unwrap();
    let shown: Vec<_> = listed
        .iter()
        .map(|snapshot| {
            (
                snapshot.name.as_str(),
                snapshot.size_bytes,
                snapshot.protected,
            )
        })
        .collect();
    assert_eq!(shown, [("one", 8 * MIB, true), ("two", 16 * MIB, false)]);
    assert_ne!(listed[0].id, listed[1].id);
    assert_eq!(image.remove_snapshot("one").unwrap_err().errno, Errno::BUSY);

    let snapshot = pool.image(&name, OpenMode::Snapshot("one")).unwrap();
    assert_eq!(snapshot.info().unwrap().size_bytes, 8 * MIB);
    assert_eq!(read(&snapshot, 0, 4096), [1; 4096]);
    assert_eq!(write(&snapshot, 0, 9, 512), Err(Errno::ROFS));
    snapshot.close(LIMIT).unwrap();

    pool.create_clone(&child, &pool, &name, "one", &ImageOptions::default())
        .unwrap();
    let clone = pool.image(&child, OpenMode::ReadWrite).unwrap();
    let parent = clone.info().unwrap().parent.unwrap();
    assert_eq!(
        (parent.pool.as_str(), parent.namespace.as_str()),
        ("rbd", "")
    );
    assert_eq!(
        (parent.image.as_str(), parent.snapshot.as_str()),
        (name.as_str(), "one")
    );
    assert_eq!(read(&clone, 0, 4096), [1; 4096]);
    write(&clone, 512, 3, 512).unwrap();
    assert_eq!(read(&clone, 0, 1024), [[1; 512], [3; 512]].concat());
    clone.flatten().unwrap();
    assert_eq!(clone.info().unwrap().parent, None);
    assert_eq!(read(&clone, 0, 1024), [[1; 512], [3; 512]].concat());
    clone.close(LIMIT).unwrap();
    pool.remove(&child).unwrap();

    image.roll_back("one").unwrap();
    assert_eq!(read(&image, 0, 4096), [1; 4096]);
    assert_eq!(image.info().unwrap().size_bytes, 8 * MIB);
    image.unprotect_snapshot("one").unwrap();
    image.remove_snapshot("one").unwrap();
    image.remove_snapshot("two").unwrap();
    assert_eq!(
        image.remove_snapshot("two").unwrap_err().errno,
        Errno::NOENT
    );
    image.close(LIMIT).unwrap();
    pool.remove(&name).unwrap();
}

fn the_lock_names_its_owner(lab: &Lab) {
    let (ours, other) = (lab.pool(), lab.client());
    let name = name("lock");
    let image = create(&ours, &name, 8 * MIB);
    let theirs = other.pool("rbd", None).unwrap();
    let theirs = theirs.image(&name, OpenMode::ReadWrite).unwrap();
    assert_eq!(theirs.lock_owners().unwrap(), Vec::<String>::new());
    write(&theirs, 0, 1, 512).unwrap();
    assert!(theirs.is_lock_owner().unwrap());
    assert!(!image.is_lock_owner().unwrap());
    assert_eq!(image.lock_owners().unwrap(), [other.address().unwrap()]);
    theirs.close(LIMIT).unwrap();
    assert_eq!(image.lock_owners().unwrap(), Vec::<String>::new());
    image.close(LIMIT).unwrap();
    ours.remove(&name).unwrap();
}

fn a_blocklisted_client_writes_nothing(lab: &Lab) {
    let (victim, judge) = (lab.client(), lab.client());
    let name = name("fence");
    let image = create(&victim.pool("rbd", None).unwrap(), &name, 8 * MIB);
    write(&image, 0, 1, 4096).unwrap();

    let address = victim.address().unwrap();
    assert!(!judge.is_blocklisted(&address).unwrap());
    assert_eq!(
        judge.blocklist("nowhere", LIMIT).unwrap_err().errno,
        Errno::INVAL
    );
    judge.blocklist(&address, Duration::from_secs(600)).unwrap();
    judge.wait_for_latest_map().unwrap();
    assert!(judge.is_blocklisted(&address).unwrap());
    assert!(!judge.is_blocklisted(&judge.address().unwrap()).unwrap());

    assert_eq!(write(&image, 0, 2, 4096), Err(Errno::SHUTDOWN));
    let pool = judge.pool("rbd", None).unwrap();
    let after = pool.image(&name, OpenMode::ReadWrite).unwrap();
    assert_eq!(read(&after, 0, 4096), [1; 4096]);
    write(&after, 4096, 3, 4096).unwrap();
    assert_eq!(read(&after, 0, 4096), [1; 4096]);
    after.close(LIMIT).unwrap();
    // What happens to the victim's session is Ceph's; it must neither hang nor crash.
    drop(image);
    drop(victim);
    pool.remove(&name).unwrap();
}

fn a_watch_sees_a_resize_elsewhere(lab: &Lab) {
    let (ours, other) = (lab.pool(), lab.pool());
    let name = name("watch");
    let image = Arc::new(create(&ours, &name, 8 * MIB));
    let (sender, changes) = sync_channel(64);
    let changed = move || {
        let _ = sender.try_send(());
    };
    let watch = UpdateWatch::new(&image, Arc::new(changed)).unwrap();
    assert!(changes.try_recv().is_err(), "nothing has changed");

    let theirs = other.image(&name, OpenMode::ReadWrite).unwrap();
    theirs.resize(12 * MIB).unwrap();
    while image.info().unwrap().size_bytes != 12 * MIB {
        changes.recv_timeout(LIMIT).unwrap();
    }
    theirs.close(LIMIT).unwrap();
    drop(watch);
    Arc::into_inner(image).unwrap().close(LIMIT).unwrap();
    ours.remove(&name).unwrap();
}
