//! Decodes reservation commands (Base 2.0, 7.2 to 7.4), as far as possible without state.
//!
//! An *action* is a command without keys in one number, so three numbers carry a whole command.
//! [`super::Reservations`] applies commands.

use super::ReservationType;
use crate::opcode::{admin, nvm};
use crate::{Sqe, Status};

/// A decoded reservation command.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ReservationCommand {
    /// Reservation Register, RREGA 000b.
    Register {
        /// NRKEY.
        new_key: u64,
        /// CPTPL: new Persist Through Power Loss.
        ptpl: Option<bool>,
    },
    /// Reservation Register, RREGA 001b.
    Unregister {
        /// CRKEY; `None` with IEKEY.
        key: Option<u64>,
        /// CPTPL.
        ptpl: Option<bool>,
    },
    /// Reservation Register, RREGA 010b.
    Replace {
        /// CRKEY; `None` with IEKEY, which also accepts unregistered hosts.
        key: Option<u64>,
        /// NRKEY.
        new_key: u64,
        /// CPTPL.
        ptpl: Option<bool>,
    },
    /// Reservation Acquire, RACQA 000b.
    Acquire {
        /// CRKEY.
        key: u64,
        /// RTYPE.
        rtype: ReservationType,
    },
    /// Reservation Acquire, RACQA 001b or 010b.
    Preempt {
        /// CRKEY.
        key: u64,
        /// PRKEY.
        preempted: u64,
        /// RTYPE.
        rtype: ReservationType,
        /// RACQA 010b: abort the preempted hosts' commands.
        abort: bool,
    },
    /// Reservation Release, RRELA 000b.
    Release {
        /// CRKEY.
        key: u64,
        /// RTYPE, undecoded.
        rtype: u8,
    },
    /// Reservation Release, RRELA 001b.
    Clear {
        /// CRKEY.
        key: u64,
    },
    /// Set Features, Reservation Persistence (Base 2.0, 5.27.1.27).
    SetPersistence {
        /// PTPL.
        ptpl: bool,
    },
}

/// CPTPL, RTYPE, IEKEY and the action code.
const ACTION_CDW10: u32 = 0xC000_FF0F;

/// A command without keys: CDW10, with the opcode in the reserved bits 23:16.
pub fn action_of(sqe: &Sqe) -> u32 {
    sqe.cdw(10) & ACTION_CDW10 | u32::from(sqe.opcode()) << 16
}

/// Action of Set Features, Reservation Persistence.
pub fn action_of_persistence(ptpl: bool) -> u32 {
    u32::from(ptpl) | u32::from(admin::SET_FEATURES) << 16
}

/// Data length: CRKEY, and except for Release NRKEY or PRKEY.
pub fn key_bytes(action: u32) -> u32 {
    match (action >> 16) as u8 {
        nvm::RESERVATION_RELEASE => 8,
        _ => 16,
    }
}

/// Keys in a command's data; 0 if absent.
pub fn keys_of(data: &[u8]) -> [u64; 2] {
    let key = |at: usize| {
        let bytes = data.get(at..at + 8).and_then(|b| b.try_into().ok());
        bytes.map_or(0, u64::from_le_bytes)
    };
    [key(0), key(8)]
}

impl ReservationCommand {
    /// Decodes [`action_of`] and [`keys_of`]. The error has Do Not Retry.
    pub fn new(action: u32, keys: [u64; 2]) -> Result<Self, Status> {
        let [key, second] = keys;
        let opcode = (action >> 16) as u8;
        let (what, ignore) = (action & 7, action & 1 << 3 != 0);
        let rtype = (action >> 8) as u8;
        let invalid = Status::INVALID_FIELD.with_dnr();
        Ok(match opcode {
            nvm::RESERVATION_REGISTER => {
                let ptpl = match action >> 30 {
                    0 => None,
                    2 => Some(false),
                    3 => Some(true),
                    _ => return Err(invalid),
                };
                let (key, new_key) = ((!ignore).then_some(key), second);
                match what {
                    0 => Self::Register { new_key, ptpl },
                    1 => Self::Unregister { key, ptpl },
                    2 => Self::Replace { key, new_key, ptpl },
                    _ => return Err(invalid),
                }
            }
            // Both forbid IEKEY (Base 2.0, 7.2, 7.4).
            nvm::RESERVATION_ACQUIRE | nvm::RESERVATION_RELEASE if ignore => return Err(invalid),
            nvm::RESERVATION_ACQUIRE => {
                let rtype = ReservationType::new(rtype).ok_or(invalid)?;
                match what {
                    0 => Self::Acquire { key, rtype },
                    1 | 2 => Self::Preempt {
                        key,
                        preempted: second,
                        rtype,
                        abort: what == 2,
                    },
                    _ => return Err(invalid),
                }
            }
            nvm::RESERVATION_RELEASE => match what {
                0 => Self::Release { key, rtype },
                1 => Self::Clear { key },
                _ => return Err(invalid),
            },
            admin::SET_FEATURES => Self::SetPersistence {
                ptpl: action & 1 != 0,
            },
            _ => return Err(Status::INVALID_OPCODE.with_dnr()),
        })
    }
}
