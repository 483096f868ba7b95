//! Reservations of a namespace (Base 2.0, 8.19).
//!
//! [`Reservations`] is a namespace's complete state, a plain value that one process decides and
//! stores and another enforces. It knows hosts by identifier, not controllers. Notices (8.19.2)
//! have consecutive numbers, so a reader that remembers the last misses none. The caller makes a
//! preemptor wait for commands in flight.

mod command;
mod report;
#[cfg(test)]
mod tests;

pub use command::{ReservationCommand, action_of, action_of_persistence, key_bytes, keys_of};
pub(crate) use report::is_extended;
pub use report::{MAX_REPORT_BYTES, NO_CONTROLLER};

use crate::Status;
use serde::{Deserialize, Serialize};

/// 128-bit Host Identifier (Base 2.0, 5.27.1.25).
pub type HostId = [u8; 16];
/// A host without identifier, which cannot use reservations.
pub const NO_HOST: HostId = [0; 16];
/// Maximum registrants.
pub const MAX_REGISTRANTS: usize = 128;
/// Notices kept: the most hosts that one command notifies.
pub const MAX_NOTICES: usize = MAX_REGISTRANTS;

/// Reservation types (Base 2.0, 7.2).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[repr(u8)]
pub enum ReservationType {
    /// Only the holder writes.
    WriteExclusive = 1,
    /// Only the holder reads and writes.
    ExclusiveAccess = 2,
    /// Registrants write; one of them is the holder.
    WriteExclusiveRegistrantsOnly = 3,
    /// Registrants read and write; one of them is the holder.
    ExclusiveAccessRegistrantsOnly = 4,
    /// Registrants write; all are holders.
    WriteExclusiveAllRegistrants = 5,
    /// Registrants read and write; all are holders.
    ExclusiveAccessAllRegistrants = 6,
}

impl ReservationType {
    /// Decodes RTYPE.
    pub fn new(rtype: u8) -> Option<Self> {
        Some(match rtype {
            1 => Self::WriteExclusive,
            2 => Self::ExclusiveAccess,
            3 => Self::WriteExclusiveRegistrantsOnly,
            4 => Self::ExclusiveAccessRegistrantsOnly,
            5 => Self::WriteExclusiveAllRegistrants,
            6 => Self::ExclusiveAccessAllRegistrants,
            _ => return None,
        })
    }

    /// Whether each registrant is holder.
    pub fn all_hold(self) -> bool {
        matches!(
            self,
            Self::WriteExclusiveAllRegistrants | Self::ExclusiveAccessAllRegistrants
        )
    }

    fn serves_registrants(self) -> bool {
        !matches!(self, Self::WriteExclusive | Self::ExclusiveAccess)
    }

    fn lets_read(self) -> bool {
        matches!(
            self,
            Self::WriteExclusive
                | Self::WriteExclusiveRegistrantsOnly
                | Self::WriteExclusiveAllRegistrants
        )
    }
}

/// A host and its reservation key.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct Registrant {
    /// Never [`NO_HOST`].
    pub host: HostId,
    /// Never 0.
    pub key: u64,
}

/// Notifications: value in log page 80h, bit in feature 82h.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[repr(u8)]
pub enum NoticeKind {
    /// The host's registration was preempted.
    RegistrationPreempted = 1,
    /// Released, or its type changed; the host is still registered.
    ReservationReleased = 2,
    /// Registrations and reservation were cleared.
    ReservationPreempted = 3,
}

/// A reservation event for one host.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct Notice {
    /// The host to notify.
    pub host: HostId,
    /// The event.
    pub kind: NoticeKind,
}

/// A host's access.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Access {
    /// Read, Compare.
    pub read: bool,
    /// Write, Write Zeroes, Dataset Management, Flush.
    pub write: bool,
}

impl Access {
    /// Everything.
    pub const ALL: Self = Self {
        read: true,
        write: true,
    };
}

/// The effect of a command.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Applied {
    /// Whether the state must be stored again.
    pub changed: bool,
}

/// A namespace's reservation state.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default, Serialize, Deserialize)]
#[serde(try_from = "Unchecked")]
pub struct Reservations {
    generation: u32,
    held: Option<HeldReservation>,
    registrants: Vec<Registrant>,
    ptpl: bool,
    notices_end: u64,
    notices: Vec<Notice>,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
struct HeldReservation {
    rtype: ReservationType,
    /// `None` if all registrants hold it.
    holder: Option<HostId>,
}

/// [`Reservations`] before validation, with fields in the same order.
#[derive(Deserialize)]
struct Unchecked {
    generation: u32,
    held: Option<HeldReservation>,
    registrants: Vec<Registrant>,
    ptpl: bool,
    notices_end: u64,
    notices: Vec<Notice>,
}

impl TryFrom<Unchecked> for Reservations {
    type Error = &'static str;

    fn try_from(from: Unchecked) -> Result<Self, Self::Error> {
        let state = Self {
            generation: from.generation,
            held: from.held,
            registrants: from.registrants,
            ptpl: from.ptpl,
            notices_end: from.notices_end,
            notices: from.notices,
        };
        match state.is_sound() {
            true => Ok(state),
            false => Err("an impossible reservation state"),
        }
    }
}

impl Reservations {
    fn is_sound(&self) -> bool {
        let list = &self.registrants;
        let distinct = |(i, r): (usize, &Registrant)| list[..i].iter().all(|o| o.host != r.host);
        let held = self.held.is_none_or(|held| match held.holder {
            Some(host) => !held.rtype.all_hold() && self.key_of(&host).is_some(),
            None => held.rtype.all_hold() && !list.is_empty(),
        });
        list.len() <= MAX_REGISTRANTS
            && list.iter().all(|r| r.host != NO_HOST && r.key != 0)
            && list.iter().enumerate().all(distinct)
            && held
            && self.notices.len() <= MAX_NOTICES
            && self.notices.len() as u64 <= self.notices_end
    }

    /// GEN of Reservation Report: counts changes of registrations; wraps.
    pub fn generation(&self) -> u32 {
        self.generation
    }

    /// The current type.
    pub fn reservation_type(&self) -> Option<ReservationType> {
        self.held.map(|held| held.rtype)
    }

    /// Registrants in order of registration.
    pub fn registrants(&self) -> &[Registrant] {
        &self.registrants
    }

    /// Whether the state survives a power loss.
    pub fn ptpl(&self) -> bool {
        self.ptpl
    }

    /// Whether the host is a holder.
    pub fn holds(&self, host: &HostId) -> bool {
        self.held.is_some_and(|held| match held.holder {
            Some(holder) => holder == *host,
            None => self.key_of(host).is_some(),
        })
    }

    /// Whether there are neither registrants nor notices.
    pub fn is_idle(&self) -> bool {
        self.registrants.is_empty() && self.notices.is_empty()
    }

    /// The number after the last notice, for [`Self::notices_from`].
    pub fn notices_end(&self) -> u64 {
        self.notices_end
    }

    /// Kept notices from number `seen`, oldest first.
    pub fn notices_from(&self, seen: u64) -> &[Notice] {
        let first = self.notices_end - self.notices.len() as u64;
        let skip = seen.saturating_sub(first).min(self.notices.len() as u64);
        &self.notices[skip as usize..]
    }

    /// A host's access (Base 2.0, 8.19.1).
    pub fn access(&self, host: &HostId) -> Access {
        let Some(held) = self.held else {
            return Access::ALL;
        };
        let registered = self.key_of(host).is_some();
        if held.holder == Some(*host) || registered && held.rtype.serves_registrants() {
            return Access::ALL;
        }
        self.access_of_strangers()
    }

    /// Access without an identifier: such hosts cannot register.
    pub fn access_of_strangers(&self) -> Access {
        self.held.map_or(Access::ALL, |held| Access {
            read: held.rtype.lets_read(),
            write: false,
        })
    }

    fn key_of(&self, host: &HostId) -> Option<u64> {
        self.registrants
            .iter()
            .find(|r| r.host == *host)
            .map(|r| r.key)
    }

    /// Applies a command. Errors have Do Not Retry and change nothing.
    pub fn apply(&mut self, host: HostId, command: &ReservationCommand) -> Result<Applied, Status> {
        use ReservationCommand as C;
        if host == NO_HOST {
            return Err(Status::HOST_IDENTIFIER_NOT_INITIALIZED.with_dnr());
        }
        let changed = match *command {
            C::Register { new_key, ptpl } => {
                match self.key_of(&host) {
                    Some(key) if key != new_key => Err(conflict()),
                    Some(_) => Ok(()),
                    None => self.add(host, new_key),
                }?;
                self.registered(ptpl)
            }
            C::Unregister { key, ptpl } => {
                let own = self.key_of(&host).ok_or(conflict())?;
                if key.is_some_and(|key| key != own) {
                    return Err(conflict());
                }
                self.unregister(host);
                self.registered(ptpl)
            }
            C::Replace { key, new_key, ptpl } => {
                match (self.key_of(&host), key) {
                    (None, Some(_)) => return Err(conflict()),
                    (Some(own), Some(key)) if own != key => return Err(conflict()),
                    (None, None) => self.add(host, new_key)?,
                    (Some(_), _) if new_key == 0 => return Err(Status::INVALID_FIELD.with_dnr()),
                    (Some(_), _) => {
                        let mine = self.registrants.iter_mut().filter(|r| r.host == host);
                        mine.for_each(|r| r.key = new_key);
                    }
                }
                self.registered(ptpl)
            }
            C::Acquire { key, rtype } => {
                self.check_key(&host, key)?;
                match self.held {
                    None => {
                        self.hold(rtype, host);
                        true
                    }
                    Some(held) if self.holds(&host) && held.rtype == rtype => false,
                    Some(_) => return Err(conflict()),
                }
            }
            C::Preempt {
                key,
                preempted,
                rtype,
                ..
            } => {
                self.check_key(&host, key)?;
                self.preempt(host, preempted, rtype)?;
                self.generation = self.generation.wrapping_add(1);
                true
            }
            C::Release { key, rtype } => {
                self.check_key(&host, key)?;
                self.release(host, rtype)?
            }
            C::Clear { key } => {
                self.check_key(&host, key)?;
                self.held = None;
                for gone in std::mem::take(&mut self.registrants) {
                    self.tell(gone.host, &host, NoticeKind::ReservationPreempted);
                }
                self.generation = self.generation.wrapping_add(1);
                true
            }
            C::SetPersistence { ptpl } => std::mem::replace(&mut self.ptpl, ptpl) != ptpl,
        };
        debug_assert!(self.is_sound(), "{command:?} left {self:?}");
        Ok(Applied { changed })
    }

    /// Drops nonpersistent state. Returns whether there was any.
    pub fn power_loss(&mut self) -> bool {
        if self.ptpl || self.registrants.is_empty() {
            return false;
        }
        self.registrants.clear();
        self.held = None;
        true
    }

    fn registered(&mut self, ptpl: Option<bool>) -> bool {
        self.ptpl = ptpl.unwrap_or(self.ptpl);
        self.generation = self.generation.wrapping_add(1);
        true
    }

    fn check_key(&self, host: &HostId, key: u64) -> Result<(), Status> {
        match self.key_of(host) {
            Some(own) if own == key => Ok(()),
            _ => Err(conflict()),
        }
    }

    fn add(&mut self, host: HostId, key: u64) -> Result<(), Status> {
        // 0 means "no key", and preempting 0 means all hosts.
        if key == 0 {
            return Err(Status::INVALID_FIELD.with_dnr());
        }
        if self.registrants.len() == MAX_REGISTRANTS {
            return Err(Status::INTERNAL_ERROR.with_dnr());
        }
        self.registrants.push(Registrant { host, key });
        Ok(())
    }

    fn hold(&mut self, rtype: ReservationType, host: HostId) {
        self.held = Some(HeldReservation {
            rtype,
            holder: (!rtype.all_hold()).then_some(host),
        });
    }

    /// By its own request (Base 2.0, 8.19.4).
    fn unregister(&mut self, host: HostId) {
        let released = self.remove(&host);
        if matches!(
            released,
            Some(
                ReservationType::WriteExclusiveRegistrantsOnly
                    | ReservationType::ExclusiveAccessRegistrantsOnly
            )
        ) {
            self.notify_registrants(&host);
        }
    }

    /// Removes a registrant, and the reservation if no holder remains.
    fn remove(&mut self, host: &HostId) -> Option<ReservationType> {
        let held_by_it = self.holds(host);
        self.registrants.retain(|r| r.host != *host);
        let held = self.held?;
        let gone = held_by_it && (!held.rtype.all_hold() || self.registrants.is_empty());
        gone.then(|| {
            self.held = None;
            held.rtype
        })
    }

    /// Base 2.0, 8.19.7.
    fn preempt(
        &mut self,
        host: HostId,
        preempted: u64,
        rtype: ReservationType,
    ) -> Result<(), Status> {
        // Whether the reservation is preempted: its holders have this key, or all others are meant.
        let takes = match self.held {
            None => false,
            Some(HeldReservation { holder: None, .. }) => {
                if preempted != 0 && self.registrants.iter().all(|r| r.key != preempted) {
                    return Err(conflict());
                }
                preempted == 0
            }
            Some(HeldReservation {
                holder: Some(holder),
                ..
            }) => {
                if preempted == 0 {
                    return Err(Status::INVALID_FIELD.with_dnr());
                }
                self.key_of(&holder) == Some(preempted)
            }
        };
        let before = self.reservation_type();
        let mut gone = self.registrants.clone();
        gone.retain(|r| match takes {
            true => r.host != host && (preempted == 0 || r.key == preempted),
            false => r.key == preempted,
        });
        for registrant in gone {
            self.remove(&registrant.host);
            self.tell(registrant.host, &host, NoticeKind::RegistrationPreempted);
        }
        if takes {
            self.hold(rtype, host);
        }
        if before.is_some() && self.reservation_type() != before {
            self.notify_registrants(&host);
        }
        Ok(())
    }

    /// Base 2.0, 8.19.6.
    fn release(&mut self, host: HostId, rtype: u8) -> Result<bool, Status> {
        let Some(held) = self.held else {
            return Ok(false);
        };
        if held.rtype as u8 != rtype {
            return Err(Status::INVALID_FIELD.with_dnr());
        }
        if !self.holds(&host) {
            return Ok(false);
        }
        self.held = None;
        if held.rtype.serves_registrants() {
            self.notify_registrants(&host);
        }
        Ok(true)
    }

    /// Notifies other registrants of a release.
    fn notify_registrants(&mut self, but: &HostId) {
        for at in 0..self.registrants.len() {
            let host = self.registrants[at].host;
            self.tell(host, but, NoticeKind::ReservationReleased);
        }
    }

    fn tell(&mut self, host: HostId, but: &HostId, kind: NoticeKind) {
        if host == *but {
            return;
        }
        if self.notices.len() == MAX_NOTICES {
            self.notices.remove(0);
        }
        self.notices.push(Notice { host, kind });
        self.notices_end += 1;
    }
}

fn conflict() -> Status {
    Status::RESERVATION_CONFLICT.with_dnr()
}
