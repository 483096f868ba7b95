//! Turns panics inside the database into errors.
//!
//! Checksums keep damaged pages from redb. But contradictory pages under correct checksums, as of
//! another program, can trigger its assertions. Only such panics are caught. A thread-local tells
//! that to the panic hook, which ends the process at any other panic. The caller drops the
//! database.

use crate::error::{PoolError, Result};
use std::{
    any::Any,
    cell::Cell,
    panic::{AssertUnwindSafe, catch_unwind},
};

thread_local! {
    static CATCHING: Cell<bool> = const { Cell::new(false) };
}

/// Whether this thread's panics are caught; a hook that aborts must then not abort.
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

/// Runs `work`; a panic becomes `Damaged`.
pub(crate) fn guarded<T>(work: impl FnOnce() -> Result<T>) -> Result<T> {
    let before = CATCHING.replace(true);
    let result = catch_unwind(AssertUnwindSafe(work));
    CATCHING.set(before);
    result.unwrap_or_else(|panic| {
        Err(PoolError::damaged(format!(
            "the pool's catalog is not a Forebay database, or is damaged: {}",
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
