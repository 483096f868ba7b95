//! The calls into librados and librbd, and the ownership that makes them safe.
//!
//! Both libraries may be called from any thread. A handle lives as long as the object that owns
//! it. An image holds its pool by `Arc`, a pool its client, a client the library.
#![allow(unsafe_code)]

mod client;
mod completions;
mod image;
mod io;
mod pool;
mod snapshots;
mod watch;

use std::ffi::{CStr, CString, c_char, c_int};

use rustix::io::Errno;

pub use self::client::RadosClient;
pub use self::completions::{Batch, Completions, Ended};
pub use self::image::Image;
pub use self::io::{Buffer, ImageRequest, RefusedRequest};
pub use self::pool::Pool;
pub use self::watch::UpdateWatch;
use crate::error::errno;

/// Lists beyond this length are refused.
const MAX_ENTRIES: usize = 1 << 20;

/// The result of a call that returns zero or a negative error.
fn check(returned: c_int) -> Result<(), Errno> {
    if returned < 0 {
        return Err(errno(returned.into()));
    }
    Ok(())
}

fn c_string(text: &str) -> Result<CString, Errno> {
    CString::new(text).map_err(|_| Errno::INVAL)
}

/// A copy of a library's text.
///
/// # Safety
/// `text` is null, or a C string that stays unchanged during the call.
unsafe fn text_of(text: *const c_char) -> String {
    if text.is_null() {
        return String::new();
    }
    // SAFETY: the caller answers for it.
    unsafe { CStr::from_ptr(text) }
        .to_string_lossy()
        .into_owned()
}

/// The text that `call` writes into a buffer of 4 KiB, which ends with NUL.
fn written_text(call: impl FnOnce(*mut c_char, usize) -> c_int) -> Result<String, Errno> {
    let mut bytes = [0u8; 4096];
    check(call(bytes.as_mut_ptr().cast(), bytes.len()))?;
    let text = CStr::from_bytes_until_nul(&bytes).map_err(|_| Errno::RANGE)?;
    Ok(text.to_string_lossy().into_owned())
}

/// The entries that `call` writes to an array of the given capacity.
///
/// # Safety
/// `call` must initialize as many entries as it sets the count to when it succeeds. With `ERANGE`,
/// it sets the count to the capacity it needs.
unsafe fn written_list<T>(
    mut call: impl FnMut(*mut T, &mut usize) -> c_int,
) -> Result<Vec<T>, Errno> {
    let mut capacity = 64;
    // The list may grow between two calls.
    for _ in 0..8 {
        let mut entries = Vec::with_capacity(capacity);
        let mut count = capacity;
        let result = check(call(entries.as_mut_ptr(), &mut count));
        if result != Err(Errno::RANGE) {
            result?;
            // SAFETY: the call initialized these; the minimum keeps to the allocation.
            unsafe { entries.set_len(count.min(capacity)) };
            return Ok(entries);
        }
        capacity = count.max(capacity * 2);
        if capacity > MAX_ENTRIES {
            break;
        }
    }
    Err(Errno::RANGE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_grows_until_it_fits() {
        let mut calls = 0;
        let call = |entries: *mut u32, count: &mut usize| {
            calls += 1;
            let wanted = 100 + 10 * calls;
            if *count < wanted {
                *count = wanted;
                return -libc::ERANGE;
            }
            // SAFETY: the array has room for `wanted` entries.
            (0..wanted).for_each(|i| unsafe { entries.add(i).write(7) });
            *count = wanted;
            0
        };
        // SAFETY: the call keeps to the rule.
        let list = unsafe { written_list(call) }.unwrap();
        assert_eq!(list, vec![7; 120]);
        assert_eq!(calls, 2);
    }

    #[test]
    fn a_list_that_always_grows_is_refused() {
        let call = |_: *mut u32, count: &mut usize| {
            *count *= 3;
            -libc::ERANGE
        };
        // SAFETY: the call never succeeds.
        assert_eq!(unsafe { written_list(call) }, Err(Errno::RANGE));
    }

    #[test]
    fn an_unterminated_text_is_refused() {
        let text = written_text(|bytes, length| {
            // SAFETY: the buffer has this length.
            unsafe { bytes.write_bytes(b'x', length) };
            0
        });
        assert_eq!(text, Err(Errno::RANGE));
        assert_eq!(written_text(|_, _| -libc::ENOENT), Err(Errno::NOENT));
        assert_eq!(c_string("a\0b"), Err(Errno::INVAL));
    }
}
