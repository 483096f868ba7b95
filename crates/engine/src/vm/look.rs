//! Who is within its base is served between the commands of those that burst.
//!
//! **Design.** A burst's part of a turn is many commands long, and whoever rings meanwhile would wait for all of it. To see whether a machine
//! has rung costs a load of its doorbell, or of its ring's index. So after each of its commands a frontend has some that are within their base
//! looked at ([`Look::somebody_rang`]); if one has rung, it stops, that one is served, and then it goes on with what is left of its part.
//! Many are looked at by turns, [`AT_ONCE`] after a command, so that a look never is much beside the command.
//!
//! **Not here:** what a lane may begin of a turn ([`crate::core`]); hosts over TCP, of which to look at one is a system call
//! ([`crate::tcp`]).

use super::frontend::Turn;
use super::{Life, Machine, Machines, blame};
use crate::core::Core;

/// So many are looked at after a command, and of so many it is known that they are within their base: others are next time.
const AT_ONCE: usize = 4;
pub(super) const MOST: usize = 64;
/// A machine's turn is interrupted so many times at most: not all that is answered is charged.
const INTERRUPTIONS: u32 = 32;

/// Those that are looked at while another is served.
pub(crate) struct Look<'a> {
    /// Machines up to the one that is served, and those behind it.
    before: &'a [Option<Box<Machine>>],
    behind: &'a [Option<Box<Machine>>],
    /// Of them, those within their base.
    calm: &'a [u32],
    next: usize,
    rang: Option<u32>,
}

impl<'a> Look<'a> {
    /// At nobody.
    pub(crate) fn none() -> Self {
        Self {
            before: &[],
            behind: &[],
            calm: &[],
            next: 0,
            rang: None,
        }
    }

    /// Whether somebody has rung: then whoever is served is to stop.
    #[inline]
    pub(crate) fn somebody_rang(&mut self) -> bool {
        !self.calm.is_empty() && (self.rang.is_some() || self.look())
    }

    /// Whether somebody had, when there was a look.
    #[inline]
    pub(crate) fn has_rung(&self) -> bool {
        self.rang.is_some()
    }

    fn look(&mut self) -> bool {
        for _ in 0..AT_ONCE.min(self.calm.len()) {
            self.next = match self.next + 1 {
                next if next < self.calm.len() => next,
                _ => 0,
            };
            let index = self.calm[self.next];
            let at = index as usize;
            // The one that is served is in neither.
            let machine = match at.checked_sub(self.before.len()) {
                None => self.before.get(at),
                Some(at) => self.behind.get(at.wrapping_sub(1)),
            };
            if machine.is_some_and(|m| m.as_ref().is_some_and(|m| m.has_rung())) {
                self.rang = Some(index);
                return true;
            }
        }
        false
    }
}

impl Machine {
    fn has_rung(&self) -> bool {
        !matches!(self.life, Life::Draining(_)) && self.frontend.has_rung()
    }
}

impl Machines {
    /// Notes who is within its base, if somebody bursts.
    pub(super) fn note_calm(&mut self, core: &Core) {
        self.calm.clear();
        if !core.somebody_bursts() {
            return;
        }
        let all = self.all.len();
        for _ in 0..all.min(MOST) {
            self.calm_at = match self.calm_at + 1 {
                at if at < all => at,
                _ => 0,
            };
            let Some(machine) = &self.all[self.calm_at] else {
                continue;
            };
            let lane = machine.client.lane;
            if machine.frontend.is_active() && lane.is_some_and(|lane| core.is_calm(lane)) {
                self.calm.push(self.calm_at as u32);
            }
        }
    }

    /// A machine's turn, in which those that ring and are within their base come between. True if anything was done.
    pub(super) fn poll_machine(&mut self, core: &mut Core, at: usize) -> bool {
        let mut any = false;
        let mut left = INTERRUPTIONS;
        loop {
            let (before, rest) = self.all.split_at_mut(at);
            let Some((Some(machine), behind)) = rest.split_first_mut() else {
                return any;
            };
            let mut look = Look {
                before,
                behind,
                calm: if left > 0 { &self.calm } else { &[] },
                next: self.calm_next,
                rang: None,
            };
            let Machine {
                client, frontend, ..
            } = &mut **machine;
            blame(core, client);
            any |= frontend.poll(&mut Turn { core, client }, &mut look);
            core.blame_nobody();
            let (next, rang) = (look.next, look.rang);
            self.calm_next = next;
            let Some(rang) = rang else {
                return any;
            };
            left = left.saturating_sub(1);
            self.serve_calm(core, rang);
        }
    }

    /// Serves those within their base that have rung. True if there were any.
    pub(crate) fn look(&mut self, core: &mut Core) -> bool {
        if self.calm.is_empty() {
            return false;
        }
        let mut look = Look {
            before: &self.all,
            behind: &[],
            calm: &self.calm,
            next: self.calm_next,
            rang: None,
        };
        look.look();
        let (next, rang) = (look.next, look.rang);
        self.calm_next = next;
        let Some(rang) = rang else {
            return false;
        };
        self.serve_calm(core, rang);
        true
    }

    /// Serves one that has rung.
    fn serve_calm(&mut self, core: &mut Core, index: u32) {
        let Some(Some(machine)) = self.all.get_mut(index as usize) else {
            return;
        };
        let Machine {
            client, frontend, ..
        } = &mut **machine;
        blame(core, client);
        let any = frontend.poll(&mut Turn { core, client }, &mut Look::none());
        core.blame_nobody();
        if client.any_raised
            && let Some(signals) = &mut self.signals
        {
            client.flush(core, signals);
            signals.flush();
        }
        let is_calm = client.lane.is_some_and(|lane| core.is_calm(lane));
        if !any || !is_calm {
            // What it has can't begin in this turn: there is no use in looking.
            self.calm.retain(|calm| *calm != index);
        }
    }
}
