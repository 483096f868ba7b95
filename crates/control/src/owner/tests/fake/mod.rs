//! A fake engine, which checks that the daemon keeps the protocol.
//!
//! A device extent is granted for one place only until it was zero-filled. Nothing is granted in a
//! range with an unanswered revoke, or during zero-fill. While a device hangs, its granted extents
//! count as being written, and only one settle job may run there.

mod asks;
mod given;

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::os::fd::OwnedFd;
use std::time::Duration;

use forebay_xlate::boundary::message::{
    BOUNDARY_VERSION, DeviceConfig, FaultAsk, FaultFailure, FromEngine, GrantOf, Held, Job,
    ToEngine,
};
use forebay_xlate::boundary::region::Region;
use forebay_xlate::boundary::socket::Channel;
use forebay_xlate::{ExtentRange, Rights, VolumeId, Word};

use self::given::Given;
use super::is_hole;
use std::os::fd::AsFd;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::time::timeout;

const HANG: Duration = Duration::from_secs(120);

pub(super) struct Fake {
    channel: Channel,
    readiness: AsyncFd<OwnedFd>,
    pub(super) region: Region,
    pub(super) generation: u64,
    /// Sent after `Welcome`.
    pub(super) held: Vec<(Held, Vec<OwnedFd>)>,
    pub(super) devices_ready: bool,
    pub(super) answer_revokes: bool,
    pub(super) answer_jobs: bool,
    pub(super) answer_requests: bool,
    /// Whether hosts are disconnected at once when an export changes.
    pub(super) settle_exports: bool,
    hung: BTreeSet<u8>,
    /// Revoked extents on hanging devices, which may still be written.
    undrained: BTreeMap<(u8, u64), (VolumeId, u64)>,
    pub(super) abandoned: u64,
    pub(super) fail_zero_fills: u32,
    pub(super) fail_flushes: bool,
    pub(super) fail_copies: bool,
    /// As granted; see [`Fake::effective`].
    pub(super) grants: HashMap<(VolumeId, u64), Word>,
    pub(super) epochs: HashMap<VolumeId, u16>,
    /// What writes and copies left in device extents.
    pub(super) contents: BTreeMap<(u8, u64), u64>,
    written: u64,
    /// What waiting commands write to whole extents.
    whole: BTreeMap<(VolumeId, u64), u64>,
    known: Vec<DeviceConfig>,
    /// Device extents, and the place that each was granted for.
    places: BTreeMap<(u8, u64), (VolumeId, u64)>,
    pub(super) open_revokes: Vec<(u64, VolumeId, ExtentRange)>,
    pub(super) open_jobs: VecDeque<(u64, Job)>,
    pub(super) jobs: Vec<Job>,
    pub(super) log: Vec<ToEngine>,
    next_release: u64,
    pub(super) given: Given,
}

fn sockets() -> (Channel, AsyncFd<OwnedFd>, OwnedFd) {
    use rustix::net::{AddressFamily, SocketFlags, SocketType};
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let (ours, theirs) =
        rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
    let channel = Channel::new(ours).unwrap();
    let watched = channel.as_fd().try_clone_to_owned().unwrap();
    let readiness = crate::readiness::watch(watched, Interest::READABLE).unwrap();
    (channel, readiness, theirs)
}

impl Fake {
    pub(super) fn new(generation: u64) -> (Self, OwnedFd) {
        let (channel, readiness, theirs) = sockets();
        let fake = Self {
            channel,
            readiness,
            region: Region::anonymous(generation).unwrap(),
            generation,
            held: Vec::new(),
            devices_ready: true,
            answer_revokes: true,
            answer_jobs: true,
            answer_requests: true,
            settle_exports: true,
            hung: BTreeSet::new(),
            undrained: BTreeMap::new(),
            abandoned: 0,
            fail_zero_fills: 0,
            fail_flushes: false,
            fail_copies: false,
            grants: HashMap::new(),
            epochs: HashMap::new(),
            contents: BTreeMap::new(),
            written: 0,
            whole: BTreeMap::new(),
            known: Vec::new(),
            places: BTreeMap::new(),
            open_revokes: Vec::new(),
            open_jobs: VecDeque::new(),
            jobs: Vec::new(),
            log: Vec::new(),
            next_release: 1,
            given: Given::default(),
        };
        (fake, theirs)
    }

    /// Inherits which device extents an earlier engine may write.
    pub(super) fn after(mut self, before: &Fake) -> Self {
        self.devices_ready = before.devices_ready;
        self.places = before.places.clone();
        self.contents = before.contents.clone();
        self.written = before.written;
        self
    }

    /// A new session with the next daemon.
    pub(super) fn reconnect(&mut self) -> OwnedFd {
        let (channel, readiness, theirs) = sockets();
        (self.channel, self.readiness) = (channel, readiness);
        let revokes = self.open_revokes.iter().map(|(n, ..)| Held::Revoke(*n));
        let jobs = self.open_jobs.iter().map(|(n, work)| Held::Job(*n, *work));
        let reported = revokes.chain(jobs).map(|held| (held, vec![]));
        self.held
            .retain(|(held, _)| matches!(held, Held::Socket(_) | Held::Memory));
        self.held.extend(reported);
        self.open_jobs
            .retain(|(_, work)| !matches!(work, Job::Settle { .. }));
        self.held.extend(self.known.iter().map(|device| {
            let ready = self.devices_ready;
            (Held::Device(device.clone(), ready), vec![])
        }));
        theirs
    }

    /// Reads the dead daemon's last messages.
    pub(super) fn take_the_rest(&mut self) {
        while let Ok(Some((message, _))) = self.channel.receive::<ToEngine>() {
            self.take(&message);
            self.log.push(message);
        }
    }

    pub(super) fn hang(&mut self, device: u8) {
        self.hung.insert(device);
    }

    pub(super) fn hang_no_more(&mut self, device: u8) {
        self.hung.remove(&device);
        self.undrained.retain(|at, _| at.0 != device);
        self.answer_all_revokes();
        self.answer_all_jobs();
    }

    pub(super) fn settles(&self, device: u8) -> usize {
        let settles =
            |(_, job): &&(u64, Job)| matches!(job, Job::Settle { device: d } if d.0 == device);
        self.open_jobs.iter().filter(settles).count()
    }

    /// Ends a settle job and the writes in flight when it began, but not those of the deleted
    /// volume `later`.
    pub(super) fn end_settle(&mut self, device: u8, later: VolumeId) {
        let settle =
            |(_, job): &(u64, Job)| matches!(job, Job::Settle { device: d } if d.0 == device);
        let at = self.open_jobs.iter().position(settle).unwrap();
        self.undrained
            .retain(|place, (volume, _)| place.0 != device || *volume == later);
        if let Some((job, _)) = self.open_jobs.remove(at) {
            self.say(&FromEngine::JobDone { job, errno: None });
        }
    }

    fn end_revoke(&mut self, revoke: u64) {
        let Some(at) = self.open_revokes.iter().position(|(n, ..)| *n == revoke) else {
            return;
        };
        let (_, volume, range) = self.open_revokes[at];
        let hangs = |(v, extent): &(VolumeId, u64)| *v == volume && range.contains(*extent);
        if !self.undrained.values().any(hangs) {
            self.open_revokes.remove(at);
            self.say(&FromEngine::RevokeDone { revoke });
        }
    }

    pub(super) fn say(&mut self, message: &FromEngine) {
        self.channel.send(message, Vec::new()).unwrap();
    }

    async fn receive(&mut self) -> (ToEngine, Vec<OwnedFd>) {
        loop {
            let mut ready = self.readiness.readable().await.unwrap();
            match self
                .channel
                .receive::<ToEngine>()
                .expect("the daemon hung up")
            {
                Some(message) => return message,
                None => ready.clear_ready(),
            }
        }
    }

    pub(super) async fn welcome(
        &mut self,
        pool: [u8; 16],
        table: Option<OwnedFd>,
    ) -> Option<OwnedFd> {
        let (hello, mut descriptors) = timeout(HANG, self.receive()).await.unwrap();
        assert!(
            matches!(
                hello,
                ToEngine::Hello {
                    version: BOUNDARY_VERSION,
                    ..
                }
            ),
            "{hello:?}"
        );
        let mut given = vec![self.region.memory().fd().try_clone_to_owned().unwrap()];
        given.extend(table);
        let welcome = FromEngine::Welcome {
            version: BOUNDARY_VERSION,
            engine_pid: std::process::id(),
            generation: self.generation,
            pool,
            program: "1.2.3".to_owned(),
        };
        self.channel.send(&welcome, given).unwrap();
        for (held, descriptors) in std::mem::take(&mut self.held) {
            self.channel
                .send(&FromEngine::Held(held), descriptors)
                .unwrap();
        }
        self.say(&FromEngine::HeldEnd);
        descriptors.pop()
    }

    /// Reads messages until one fits.
    pub(super) async fn until<T>(&mut self, mut fits: impl FnMut(&ToEngine) -> Option<T>) -> T {
        let taken = async {
            loop {
                let (message, descriptors) = self.receive().await;
                let found = fits(&message);
                self.take(&message);
                self.given.take(&message, descriptors);
                self.log.push(message);
                if let Some(found) = found {
                    return found;
                }
            }
        };
        match timeout(HANG, taken).await {
            Ok(found) => found,
            Err(_) => panic!(
                "nothing fits; the last: {:#?}",
                self.log.iter().rev().take(8).collect::<Vec<_>>()
            ),
        }
    }

    pub(super) async fn settle(&mut self) {
        while let Ok((message, _)) = timeout(Duration::from_millis(150), self.receive()).await {
            self.take(&message);
            self.log.push(message);
        }
    }

    fn done(&mut self, request: u64) {
        self.say(&FromEngine::Done {
            request,
            error: None,
        });
    }

    fn take(&mut self, message: &ToEngine) {
        match message {
            ToEngine::SetDevice { request, device } => {
                self.done(*request);
                self.known.retain(|known| known.device != device.device);
                self.known.push(device.clone());
                if self.devices_ready {
                    self.say(&FromEngine::DeviceReady {
                        device: device.device,
                    });
                }
            }
            ToEngine::SetVolume { request, volume } if self.answer_requests => {
                self.epochs.insert(volume.volume, volume.epoch);
                self.done(*request);
            }
            ToEngine::RemoveVolume { request, volume } if self.answer_requests => {
                let held = self.grants.keys().find(|(v, _)| v == volume);
                assert_eq!(held, None, "{volume} is removed with a grant");
                self.epochs.remove(volume);
                self.done(*request);
            }
            ToEngine::SetExport { request, .. }
            | ToEngine::RemoveExport { request, .. }
            | ToEngine::SetListener { request, .. }
            | ToEngine::SetPort { request, .. }
            | ToEngine::SetReservations { request, .. }
            | ToEngine::SetSpread { request, .. }
            | ToEngine::SetScheduling { request, .. }
            | ToEngine::SetTenantBudget { request, .. }
            | ToEngine::SetVolumeBudget { request, .. }
            | ToEngine::Resume { request }
                if self.answer_requests =>
            {
                self.done(*request);
                if let ToEngine::SetExport { .. } | ToEngine::RemoveExport { .. } = message
                    && self.settle_exports
                {
                    let (request, at_devices) = (*request, 0);
                    self.say(&FromEngine::ExportSettled {
                        request,
                        at_devices,
                    });
                }
            }
            ToEngine::Grants { grants } => {
                for grant in grants {
                    self.take_grant(grant.volume, grant.range, Word::from_bits(grant.word));
                }
            }
            ToEngine::Revoke {
                revoke,
                volume,
                range,
                freeze,
                ..
            } => {
                if let Some(epoch) = freeze {
                    self.freeze(*revoke, *volume, *epoch);
                    return;
                }
                let (hung, undrained) = (&self.hung, &mut self.undrained);
                self.grants.retain(|(v, extent), word| {
                    let revoked = v == volume && range.contains(*extent);
                    if revoked && !is_hole(*word) && hung.contains(&word.device().0) {
                        undrained.insert((word.device().0, word.extent().0), (*v, *extent));
                    }
                    !revoked
                });
                self.open_revokes.push((*revoke, *volume, *range));
                if self.answer_revokes {
                    self.end_revoke(*revoke);
                }
            }
            ToEngine::TakeBack {
                revoke,
                volume,
                range,
            } => {
                let mut taken = Vec::new();
                for extent in range.first..range.end() {
                    let key = (*volume, extent);
                    if self
                        .grants
                        .get(&key)
                        .is_some_and(|word| word.is_preallocated())
                    {
                        self.grants.remove(&key);
                        taken.push(ExtentRange::new(extent, 1));
                    }
                }
                let revoke = *revoke;
                self.say(&FromEngine::TookBack { revoke, taken });
            }
            ToEngine::CountPreallocated {
                count,
                volume,
                range,
            } => {
                let is_preallocated = |((v, extent), word): (&(VolumeId, u64), &Word)| {
                    v == volume && range.contains(*extent) && word.is_preallocated()
                };
                let preallocated = self
                    .grants
                    .iter()
                    .filter(|one| is_preallocated(*one))
                    .count() as u64;
                let count = *count;
                self.say(&FromEngine::PreallocatedCounted {
                    count,
                    preallocated,
                });
            }
            ToEngine::Abandon { revoke } => {
                self.open_revokes.retain(|(number, ..)| number != revoke);
                self.abandoned += 1;
            }
            ToEngine::Job { job, work } => {
                self.jobs.push(*work);
                self.open_jobs.push_back((*job, *work));
                if let Job::ZeroFill { device, extents } = work {
                    let range = (device.0, extents.first)..(device.0, extents.end());
                    let undrained = self.undrained.range(range).next();
                    assert_eq!(undrained, None, "laundered while it may be written to");
                }
                if let Job::Settle { device } = work {
                    // One for hanging devices, one for a merge.
                    assert!(self.settles(device.0) <= 2, "too many settles at a time");
                }
                if self.answer_jobs {
                    self.end_job(*job);
                }
            }
            _ => {}
        }
    }

    fn take_grant(&mut self, volume: VolumeId, range: ExtentRange, word: Word) {
        for (_, v, revoked) in &self.open_revokes {
            assert!(
                *v != volume || !revoked.overlaps(&range),
                "a grant in a range that is being revoked: {range:?}"
            );
        }
        for extent in range.first..range.end() {
            let word = word.advance(extent - range.first);
            if word.rights() != Some(Rights::Hole) || word.is_preallocated() {
                let at = (word.device().0, word.extent().0);
                let being_zero_filled = self.open_jobs.iter().any(|(_, job)| {
                    matches!(job, Job::ZeroFill { device, extents } if device.0 == at.0 && extents.contains(at.1))
                });
                assert!(
                    !being_zero_filled,
                    "{at:?} is granted while it is laundered"
                );
                let (_, owner) = *self.places.entry(at).or_insert((volume, extent));
                assert_eq!(owner, extent, "{at:?} is granted twice");
                // A successor is told of old grants, too.
                if word.as_of(self.epoch(volume)).claimed().writable() {
                    let same = |v: &VolumeId, w: &Word| *v != volume && w.same_place(word);
                    let other = self.grants.iter().find(|((v, _), w)| same(v, w));
                    assert_eq!(other, None, "{at:?} may be written and is read by another");
                }
                let writer = self.undrained.get(&at);
                assert!(
                    writer.is_none_or(|writer| *writer == (volume, extent)),
                    "{at:?} is granted while it may be written to for another"
                );
            }
            self.grants.insert((volume, extent), word);
        }
    }

    /// A copy that fails leaves garbage.
    fn copy(&mut self, from: (u8, u64), to: (u8, u64), count: u64, succeeds: bool) {
        for at in 0..count {
            let (from, to) = ((from.0, from.1 + at), (to.0, to.1 + at));
            let there = |word: &&Word| (word.device().0, word.extent().0) == to && !is_hole(**word);
            assert_eq!(self.grants.values().find(there), None, "{to:?} is in use");
            match self.contents.get(&from).copied().filter(|_| succeeds) {
                Some(content) => self.contents.insert(to, content),
                None if succeeds => self.contents.remove(&to),
                None => self.contents.insert(to, u64::MAX),
            };
        }
    }

    pub(super) fn epoch(&self, volume: VolumeId) -> u16 {
        self.epochs.get(&volume).copied().unwrap_or(0)
    }

    /// A grant as the engine's tables show it.
    pub(super) fn effective(&self, volume: VolumeId, extent: u64) -> Option<Word> {
        let word = self.grants.get(&(volume, extent))?;
        Some(word.as_of(self.epoch(volume)))
    }

    /// Writes go on at hanging devices.
    fn freeze(&mut self, revoke: u64, volume: VolumeId, epoch: u16) {
        let before = self.epoch(volume);
        for ((v, extent), word) in &self.grants {
            let writes = *v == volume && word.as_of(before).writable();
            if writes && self.hung.contains(&word.device().0) {
                let at = (word.device().0, word.extent().0);
                self.undrained.insert(at, (*v, *extent));
            }
        }
        self.epochs.insert(volume, epoch);
        let all = ExtentRange::new(0, u64::MAX);
        self.open_revokes.push((revoke, volume, all));
        if self.answer_revokes {
            self.end_revoke(revoke);
        }
    }

    /// What a read finds; `None` for zeros.
    pub(super) async fn read(&mut self, volume: VolumeId, extent: u64) -> Option<u64> {
        let word = match self.effective(volume, extent) {
            Some(word) => word,
            None => self.fault(volume, extent, false).await.unwrap(),
        };
        if word.rights() == Some(Rights::Hole) {
            return None;
        }
        let at = (word.device().0, word.extent().0);
        self.contents.get(&at).copied()
    }

    /// Writes something new, and returns it.
    pub(super) async fn put(&mut self, volume: VolumeId, extent: u64) -> u64 {
        let word = self.write(volume, extent).await;
        self.put_at(word)
    }

    pub(super) fn put_at(&mut self, word: Word) -> u64 {
        self.written += 1;
        let at = (word.device().0, word.extent().0);
        self.contents.insert(at, self.written);
        self.written
    }

    /// The next message, which the test must answer.
    pub(super) async fn next_unanswered(&mut self) -> ToEngine {
        let (message, _) = timeout(HANG, self.receive()).await.expect("nothing comes");
        self.log.push(message.clone());
        message
    }

    pub(super) fn hang_up(&mut self) {
        (self.channel, self.readiness, _) = sockets();
    }

    pub(super) fn send_garbage(&mut self) {
        let flags = rustix::net::SendFlags::NOSIGNAL;
        rustix::net::send(&self.channel, &[0xff; 40], flags).unwrap();
    }

    pub(super) fn answer_revoke(&mut self) {
        let (revoke, ..) = self.open_revokes.remove(0);
        self.say(&FromEngine::RevokeDone { revoke });
    }

    pub(super) fn answer_all_revokes(&mut self) {
        for revoke in self.revoke_numbers() {
            self.end_revoke(revoke);
        }
    }

    fn revoke_numbers(&self) -> Vec<u64> {
        self.open_revokes.iter().map(|(n, ..)| *n).collect()
    }

    /// Drops revokes that ended while no daemon ran.
    pub(super) fn answer_all_revokes_silently(&mut self) {
        self.open_revokes.clear();
    }

    pub(super) fn answer_all_jobs(&mut self) {
        let jobs: Vec<u64> = self.open_jobs.iter().map(|(n, _)| *n).collect();
        for job in jobs {
            self.end_job(job);
        }
    }

    pub(super) async fn listen(&mut self, time: Duration) {
        let until = tokio::time::Instant::now() + time;
        while let Ok((message, _)) = tokio::time::timeout_at(until, self.receive()).await {
            self.take(&message);
            self.log.push(message);
        }
    }

    pub(super) fn answer_job(&mut self) {
        let (job, _) = self.open_jobs[0];
        self.end_job(job);
    }

    pub(super) fn end_job(&mut self, job: u64) {
        let at = self.open_jobs.iter().position(|(n, _)| *n == job).unwrap();
        let (_, work) = self.open_jobs[at];
        let hangs = match work {
            Job::Flush { device } | Job::ZeroFill { device, .. } | Job::Settle { device } => {
                self.hung.contains(&device.0)
            }
            Job::Overwrite { to, .. } => self.hung.contains(&to.0),
            Job::Copy { from, to, .. } => [from, to].iter().any(|d| self.hung.contains(&d.0)),
        };
        if hangs {
            return;
        }
        self.open_jobs.remove(at);
        let mut errno = (self.fail_flushes && matches!(work, Job::Flush { .. })).then_some(5);
        if let Job::ZeroFill { device, extents } = work {
            if self.fail_zero_fills > 0 {
                self.fail_zero_fills -= 1;
                errno = Some(5);
            } else {
                let other = |at: &(u8, u64)| at.0 != device.0 || !extents.contains(at.1);
                self.places.retain(|at, _| other(at));
                self.contents.retain(|at, _| other(at));
            }
        }
        if let Job::Overwrite {
            volume,
            extent,
            to,
            target,
        } = work
        {
            let content = self.whole.remove(&(volume, extent));
            let content = content.filter(|_| !self.fail_copies);
            errno = content.is_none().then_some(2);
            let content = content.unwrap_or(u64::MAX);
            self.contents.insert((to.0, target.0), content);
        }
        if let Job::Copy {
            from,
            source,
            to,
            target,
            count,
        } = work
        {
            errno = errno.or((self.fail_copies).then_some(5));
            self.copy((from.0, source.0), (to.0, target.0), count, errno.is_none());
        }
        self.say(&FromEngine::JobDone { job, errno });
    }
}
