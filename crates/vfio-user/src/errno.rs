//! The errno of a refusal.
//!
//! Purpose: a number that is never 0, because QEMU takes an error reply whose errno is 0 for success. Does
//! NOT list every errno: only those that are sent here.

use std::fmt;
use std::num::NonZeroU32;

/// A Linux errno, never 0.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Errno(NonZeroU32);

macro_rules! errnos {
    ($( $(#[$doc:meta])* $name:ident = $number:literal; )*) => {
        impl Errno {
            $( $(#[$doc])* pub const $name: Errno = Errno(NonZeroU32::new($number).unwrap()); )*

            fn name(self) -> Option<&'static str> {
                match self.0.get() {
                    $( $number => Some(stringify!($name)), )*
                    _ => None,
                }
            }
        }
    };
}

errnos! {
    /// There is no such mapping.
    ENOENT = 2;
    /// It failed.
    EIO = 5;
    /// There is no memory for it.
    ENOMEM = 12;
    /// Not allowed.
    EACCES = 13;
    /// Something uses it.
    EBUSY = 16;
    /// It is mapped already.
    EEXIST = 17;
    /// It makes no sense.
    EINVAL = 22;
    /// There is no room for it.
    ENOSPC = 28;
    /// There is no such thing here.
    ENOTSUP = 95;
    /// It took too long.
    ETIMEDOUT = 110;
}

impl Errno {
    /// The number of an error of the operating system; what is not a sensible one becomes EIO.
    pub fn of_os(number: i32) -> Self {
        let number = u32::try_from(number).ok().filter(|n| *n < 4096);
        number.and_then(NonZeroU32::new).map_or(Self::EIO, Self)
    }

    /// The number.
    pub const fn get(self) -> u32 {
        self.0.get()
    }
}

impl fmt::Debug for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name() {
            Some(name) => f.write_str(name),
            None => write!(f, "errno {}", self.0),
        }
    }
}
