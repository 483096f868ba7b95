//! `forebay firmware`: its arguments.

use std::path::PathBuf;

use clap::Subcommand;

#[derive(Debug, Subcommand)]
pub(crate) enum FirmwareCommand {
    /// Create a key that signs images; the public key gets the same name with `.pub` added
    NewKey {
        /// The file for the private key
        file: PathBuf,
    },
    /// Make a signed image of a program
    Sign {
        /// The private key: Ed25519, in PEM, without a password
        #[arg(long, value_name = "FILE")]
        key: PathBuf,
        /// The program, which is run for its version [default: this program]
        #[arg(long, value_name = "FILE")]
        program: Option<PathBuf>,
        /// The file for the image
        image: PathBuf,
    },
    /// Show what an image contains; with --key, fail if that key did not sign it
    Show {
        /// The image
        image: PathBuf,
        /// A public key, in PEM
        #[arg(long, value_name = "FILE")]
        key: Option<PathBuf>,
    },
    /// Show the firmware slots: slot 1, the installed program, and slot 2, an image
    Slots,
    /// Store an image in slot 2, and replace the running engine by one of its program; hosts and
    /// VMs keep their connections
    Install {
        /// The image, on the daemon's node
        image: PathBuf,
        /// Leave the running engine; the next one starts from slot 2
        #[arg(long)]
        at_next_start: bool,
    },
    /// Replace the running engine by one of a slot's program; hosts and VMs keep their connections
    Activate {
        /// The slot: 1 or 2
        #[arg(value_parser = clap::value_parser!(u8).range(1..=2))]
        slot: u8,
        /// Leave the running engine; the next one starts from this slot
        #[arg(long)]
        at_next_start: bool,
    },
}
