//! What panics inside the database becomes an error.
//!
//! **Design.** Checksums stand before redb, so what it reads is what it wrote. But a database whose
//! pages contradict each other under right checksums (another program's, put there on purpose) meets
//! assertions in it. Such a panic is caught here, and only here; a thread-local says so, for a panic
//! hook that ends the process at any other panic. **Not here:** undoing what the panic left behind:
//! the caller drops the database.

use crate::error::{PoolError, Result};
use std::{
    any::Any,
    cell::Cell,
    panic::{AssertUnwindSafe, catch_unwind},
};

thread_local! {
    static CATCHING: Cell<bool> = const { Cell::new(false) };
}

/// Whether a panic of this thread would be caught and become an error: a hook that aborts must not.
pub fn panic_is_caught() -> bool {
    CATCHING.get()
}

fn text(panic: &(dyn Any + Send)) -> &str {
    panic
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| panic.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("a panic")
}

/// Runs `work`; its panic is damage.
pub(crate) fn guarded<T>(work: impl FnOnce() -> Result<T>) -> Result<T> {
    let before = CATCHING.replace(true);
    let result = catch_unwind(AssertUnwindSafe(work));
    CATCHING.set(before);
    result.unwrap_or_else(|panic| {
        Err(PoolError::damaged(format!(
            "the pool's catalog is no database of Forebay's, or is damaged: {}",
            text(panic.as_ref())
        )))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;

    #[test]
    fn a_panic_is_damage() {
        let error = guarded(|| -> Result<()> {
            assert!(panic_is_caught());
            panic!("page {}", 7)
        })
        .unwrap_err();
        assert_eq!(error.kind, ErrorKind::Damaged);
        assert!(error.message.ends_with("page 7"), "{error}");
        assert!(!panic_is_caught());
        assert_eq!(guarded(|| Ok(3)).unwrap(), 3);
    }
}
