//! Errors whose sentences serve as reasons when a connection closes.

macro_rules! named_errors {
    ($(#[$of:meta])* pub enum $name:ident {
        $($(#[doc = $doc:literal])* #[error($text:literal)] $variant:ident,)*
    }) => {
        $(#[$of])*
        pub enum $name {
            $($(#[doc = $doc])* $variant,)*
        }

        impl $name {
            /// The sentence.
            #[must_use]
            pub const fn text(self) -> &'static str {
                match self {
                    $(Self::$variant => $text,)*
                }
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(self.text())
            }
        }

        impl std::error::Error for $name {}
    };
}
pub(crate) use named_errors;
