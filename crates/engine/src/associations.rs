//! Controller ids: which controller is whose, and which reactor has it.
//!
//! **Purpose.** An I/O queue's Connect names a controller by its id; the door must send its socket to
//! the reactor that has this controller, and to no other host's.
//!
//! **Design.** One table behind a mutex, touched when associations begin and end and when a queue
//! connects, never by a command. An id is held by an [`Association`], and is free when that is
//! dropped. Ids are given out in rising order, so that one comes back only when the others were used.
//!
//! **Not here:** controllers themselves (the reactors'), and whether a host may connect (the door's).

use forebay_nvme::Nqn;
use forebay_xlate::boundary::region::MAX_CONTROLLERS;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

/// The highest controller id that may be given out (Base 2.0, 6.3: FFF0h to FFFFh are reserved).
const MAX_CNTLID: u16 = 0xFFEF;

#[derive(Debug, Default)]
struct Table {
    last: u16,
    of: BTreeMap<u16, Entry>,
}

#[derive(Debug)]
struct Entry {
    reactor: usize,
    subsystem: Nqn,
    host: Nqn,
    host_id: [u8; 16],
}

/// See the module's text. Clones share one table.
#[derive(Clone, Debug, Default)]
pub(crate) struct Associations {
    table: Arc<Mutex<Table>>,
}

/// A controller id in use; dropping it frees the id.
#[derive(Debug)]
pub(crate) struct Association {
    cntlid: u16,
    table: Associations,
}

impl Association {
    /// The id.
    pub(crate) fn cntlid(&self) -> u16 {
        self.cntlid
    }
}

impl Drop for Association {
    fn drop(&mut self) {
        self.table.with(|t| t.of.remove(&self.cntlid));
    }
}

impl Associations {
    fn with<T>(&self, f: impl FnOnce(&mut Table) -> T) -> T {
        f(&mut self.table.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// A new id for a host's association; `None` when there are as many as a state region holds.
    pub(crate) fn begin(
        &self,
        reactor: usize,
        subsystem: Nqn,
        host: Nqn,
        host_id: [u8; 16],
    ) -> Option<Association> {
        let cntlid = self.with(|t| {
            if t.of.len() >= MAX_CONTROLLERS {
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

    /// An id that a dead engine gave out, for the same host's association; `None` when it is taken, or
    /// was never one that is given out.
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
                    // Ids that its hosts have forgotten are the last to be given out again.
                    t.last = t.last.max(cntlid);
                    t.of.insert(
                        cntlid,
                        Entry {
                            reactor,
                            subsystem,
                            host,
                            host_id,
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

    /// The reactor of a controller, if it is this host's with this subsystem.
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
}
