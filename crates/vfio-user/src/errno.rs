//! The errno of a refusal, never 0: QEMU takes an error reply with errno 0 for success.

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
    /// No such mapping.
    ENOENT = 2;
    /// I/O error.
    EIO = 5;
    /// Out of memory.
    ENOMEM = 12;
    /// Not allowed.
    EACCES = 13;
    /// Busy.
    EBUSY = 16;
    /// Already mapped.
    EEXIST = 17;
    /// Invalid argument.
    EINVAL = 22;
    /// No space.
    ENOSPC = 28;
    /// Not supported.
    ENOTSUP = 95;
    /// Timed out.
    ETIMEDOUT = 110;
}

impl Errno {
    /// From an operating system error; numbers out of range become EIO.
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
