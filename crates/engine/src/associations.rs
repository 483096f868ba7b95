//! Controller ids: the host and the reactor of each controller.
//!
//! **Design.** One table behind a mutex, never used by commands. Dropping an [`Association`] frees
//! its id. Ids rise, so that an id is reused only after all others. A controller is promised an
//! Admin queue and one I/O queue, and more while [`KEPT_FOR`] others can still have two. **Not
//! here:** controllers (the reactors'), and access checks (the listener's).

use forebay_nvme::Nqn;
use forebay_xlate::boundary::region::{MAX_CONTROLLERS, MAX_QUEUES};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

/// FFF0h to FFFFh are reserved (Base 2.0, 6.3).
const MAX_CNTLID: u16 = 0xFFEF;

/// Others for which an Admin and an I/O queue stay free.
const KEPT_FOR: usize = 64;

#[derive(Debug, Default)]
struct AssociationTable {
    last: u16,
    of: BTreeMap<u16, Entry>,
}

#[derive(Debug)]
struct Entry {
    reactor: usize,
    subsystem: Nqn,
    host: Nqn,
    host_id: [u8; 16],
    io_queues: u16,
}

impl AssociationTable {
    /// Queues that no controller was promised.
    fn left(&self) -> usize {
        let of = |entry: &Entry| 1 + usize::from(entry.io_queues);
        MAX_QUEUES.saturating_sub(self.of.values().map(of).sum())
    }
}

/// Clones share one table.
#[derive(Clone, Debug, Default)]
pub(crate) struct Associations {
    table: Arc<Mutex<AssociationTable>>,
}

/// A controller id in use; dropping it frees the id.
#[derive(Debug)]
pub(crate) struct Association {
    cntlid: u16,
    table: Associations,
}

impl Association {
    pub(crate) fn cntlid(&self) -> u16 {
        self.cntlid
    }

    fn with_queues<T>(&self, change: impl FnOnce(&mut u16, usize) -> T) -> Option<T> {
        self.table.with(|t| {
            let left = t.left();
            let queues = &mut t.of.get_mut(&self.cntlid)?.io_queues;
            Some(change(queues, left + usize::from(*queues)))
        })
    }

    pub(crate) fn io_queues(&self) -> u16 {
        self.with_queues(|queues, _| *queues).unwrap_or(0)
    }

    /// Promises the wanted I/O queues, or those left, but at least one.
    pub(crate) fn promise(&self, wanted: u16) -> u16 {
        let promised = self.with_queues(|queues, left| {
            let spare = left.saturating_sub(2 * KEPT_FOR);
            *queues = wanted.min(u16::try_from(spare).unwrap_or(u16::MAX)).max(1);
            *queues
        });
        promised.unwrap_or(1)
    }

    pub(crate) fn keep(&self, io_queues: u16) {
        let _ = self.with_queues(|queues, _| *queues = io_queues);
    }

    pub(crate) fn keep_at_least(&self, io_queues: u16) {
        let _ = self.with_queues(|queues, _| *queues = (*queues).max(io_queues));
    }

    /// Whether the controller can have these I/O queues; if so, promises them. Its host may never
    /// have asked.
    pub(crate) fn has_room_for(&self, io_queues: u16) -> bool {
        let room = self.with_queues(|queues, left| {
            let fits = io_queues <= *queues || usize::from(io_queues) + 2 * KEPT_FOR <= left;
            if fits {
                *queues = (*queues).max(io_queues);
            }
            fits
        });
        room.unwrap_or(false)
    }
}

impl Drop for Association {
    fn drop(&mut self) {
        self.table.with(|t| t.of.remove(&self.cntlid));
    }
}

impl Associations {
    fn with<T>(&self, f: impl FnOnce(&mut AssociationTable) -> T) -> T {
        f(&mut self.table.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// `None` if the table is full or too few queues are left.
    pub(crate) fn begin(
        &self,
        reactor: usize,
        subsystem: Nqn,
        host: Nqn,
        host_id: [u8; 16],
    ) -> Option<Association> {
        let cntlid = self.with(|t| {
            let io_queues = u16::from(!subsystem.is_discovery());
            if t.of.len() >= MAX_CONTROLLERS || t.left() < 1 + usize::from(io_queues) {
                return None;
            }
            loop {
                t.last = if t.last >= MAX_CNTLID { 1 } else { t.last + 1 };
                if !t.of.contains_key(&t.last) {
                    t.of.insert(
                        t.last,
                        Entry {
                            reactor,
                            subsystem,
                            host,
                            host_id,
                            io_queues,
                        },
                    );
                    return Some(t.last);
                }
            }
        })?;
        Some(Association {
            cntlid,
            table: self.clone(),
        })
    }

    /// A dead engine's id, for its host; `None` if taken or invalid.
    pub(crate) fn resume(
        &self,
        cntlid: u16,
        reactor: usize,
        subsystem: Nqn,
        host: Nqn,
        host_id: [u8; 16],
    ) -> Option<Association> {
        let fresh = (1..=MAX_CNTLID).contains(&cntlid)
            && self.with(|t| {
                let fresh = t.of.len() < MAX_CONTROLLERS && !t.of.contains_key(&cntlid);
                if fresh {
                    // Ids forgotten by their hosts are reused last.
                    t.last = t.last.max(cntlid);
                    t.of.insert(
                        cntlid,
                        Entry {
                            reactor,
                            subsystem,
                            host,
                            host_id,
                            io_queues: u16::from(!subsystem.is_discovery()),
                        },
                    );
                }
                fresh
            });
        fresh.then(|| Association {
            cntlid,
            table: self.clone(),
        })
    }

    /// The controller's reactor, if it belongs to this host and subsystem.
    pub(crate) fn find(
        &self,
        cntlid: u16,
        subsystem: &Nqn,
        host: &Nqn,
        host_id: &[u8; 16],
    ) -> Option<usize> {
        self.with(|t| {
            let e = t.of.get(&cntlid)?;
            (e.subsystem == *subsystem && e.host == *host && e.host_id == *host_id)
                .then_some(e.reactor)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_belongs_to_one_host_until_it_ends() {
        let table = Associations::default();
        let disk = Nqn::parse("nqn.2026-01.io.forebay:a.b").unwrap();
        let alice = Nqn::parse("nqn.2014-08.org.example:alice").unwrap();
        let mallory = Nqn::parse("nqn.2014-08.org.example:mallory").unwrap();
        let first = table.begin(3, disk, alice, [1; 16]).unwrap();
        let second = table.begin(4, disk, alice, [1; 16]).unwrap();
        assert_ne!(first.cntlid(), second.cntlid());
        assert_eq!(table.find(first.cntlid(), &disk, &alice, &[1; 16]), Some(3));
        assert_eq!(
            table.find(second.cntlid(), &disk, &alice, &[1; 16]),
            Some(4)
        );
        assert_eq!(table.find(first.cntlid(), &disk, &mallory, &[1; 16]), None);
        assert_eq!(
            table.find(first.cntlid(), &Nqn::discovery(), &alice, &[1; 16]),
            None
        );
        assert_eq!(table.find(first.cntlid(), &disk, &alice, &[2; 16]), None);
        let id = first.cntlid();
        drop(first);
        assert_eq!(table.find(id, &disk, &alice, &[1; 16]), None);
        let third = table.begin(0, disk, alice, [1; 16]).unwrap();
        assert!(third.cntlid() != id, "a freed id is not given out at once");
    }

    #[test]
    fn an_id_is_taken_up_again_once() {
        let table = Associations::default();
        let disk = Nqn::parse("nqn.2026-01.io.forebay:a.b").unwrap();
        let alice = Nqn::parse("nqn.2014-08.org.example:alice").unwrap();
        let id = table.resume(70, 2, disk, alice, [1; 16]).unwrap();
        assert_eq!(table.find(70, &disk, &alice, &[1; 16]), Some(2));
        for other in [0, 70, 0xfff0, 0xffff] {
            assert!(table.resume(other, 2, disk, alice, [1; 16]).is_none());
        }
        assert_eq!(table.begin(0, disk, alice, [1; 16]).unwrap().cntlid(), 71);
        drop(id);
        assert!(table.resume(70, 2, disk, alice, [1; 16]).is_some());
    }

    #[test]
    fn ids_wrap_and_are_bounded() {
        let table = Associations::default();
        table.with(|t| t.last = MAX_CNTLID - 1);
        let disk = Nqn::discovery();
        let all: Vec<_> = std::iter::from_fn(|| table.begin(0, disk, disk, [0; 16])).collect();
        assert_eq!(all.len(), MAX_CONTROLLERS);
        assert!(all.iter().all(|a| (1..=MAX_CNTLID).contains(&a.cntlid())));
    }

    #[test]
    fn queues_are_promised_once() {
        let table = Associations::default();
        let disk = Nqn::parse("nqn.2026-01.io.forebay:a.b").unwrap();
        let host = Nqn::parse("nqn.2014-08.org.example:host").unwrap();
        let begin = || table.begin(0, disk, host, [1; 16]);
        let mut greedy = Vec::new();
        while let Some(one) = begin() {
            let got = one.promise(64);
            greedy.push(one);
            if got < 64 {
                break;
            }
        }
        let left = |t: &Associations| t.with(|t| t.left());
        assert_eq!(left(&table), 2 * KEPT_FOR);
        assert!(!greedy[0].has_room_for(65) && greedy[0].has_room_for(64));
        let later: Vec<_> = (0..KEPT_FOR).map(|_| begin().unwrap()).collect();
        assert!(later.iter().all(|one| one.promise(64) == 1));
        assert!(begin().is_none() && left(&table) == 0);
        drop(greedy.pop());
        greedy[0].keep(8);
        assert!(left(&table) > 56 && begin().is_some());
        drop(greedy);
        assert!(later[0].has_room_for(64) && later[1].promise(32) == 32);
        assert_eq!(later[1].io_queues(), 32);
        let discovery = table.begin(0, Nqn::discovery(), host, [1; 16]);
        assert_eq!(discovery.unwrap().io_queues(), 0);
    }
}
