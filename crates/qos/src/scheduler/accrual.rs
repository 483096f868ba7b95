//! The accrual of a reactor's share over windows: by demand while it works, else by what no reactor
//! received ([`LedgerEntry::idle`](crate::ledger::LedgerEntry::idle)).

#[derive(Clone, Copy)]
pub(super) enum Accrual {
    /// Windows at work.
    Work(u64),
    /// Idle windows, in windows of base, and whether the reactor wakes.
    Idle(f64, bool),
}

impl Accrual {
    #[inline]
    pub(super) fn of(self, amount: i32, share: f32, fraction: &mut f32) -> (u64, u64) {
        match self {
            Self::Work(windows) => part(amount, share, windows, fraction),
            Self::Idle(windows, _) => {
                let one = f64::from(amount) * f64::from(share);
                let sum = f64::from(amount) * windows + f64::from(*fraction);
                *fraction = sum.fract() as f32;
                (sum as u64, one.ceil() as u64)
            }
        }
    }
}

/// The share of all windows, and of one window, rounded up. `fraction` carries the rest.
#[inline]
pub(super) fn part(amount: i32, share: f32, windows: u64, fraction: &mut f32) -> (u64, u64) {
    if share == 1.0 {
        let amount = amount as u64;
        return (amount.saturating_mul(windows), amount);
    }
    let one = f64::from(amount) * f64::from(share);
    let sum = one * windows as f64 + f64::from(*fraction);
    *fraction = sum.fract() as f32;
    (sum as u64, one.ceil() as u64)
}
