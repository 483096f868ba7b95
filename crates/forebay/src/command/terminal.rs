//! A terminal for a view that redraws itself; a guard restores settings and content.

use std::io::{Write as _, stdin, stdout};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::termios::{
    LocalModes, OptionalActions, SpecialCodeIndex, Termios, tcgetattr, tcgetwinsize, tcsetattr,
};

use super::top::Size;
use crate::failure::{Outcome, While};

pub(crate) struct Terminal {
    before: Termios,
}

impl Terminal {
    pub(crate) fn open() -> Outcome<Self> {
        let before = tcgetattr(stdin()).while_doing("read the terminal's settings")?;
        let mut raw = before.clone();
        // Ctrl-C is an ordinary key, as the terminal must be restored.
        raw.local_modes -= LocalModes::ICANON | LocalModes::ECHO | LocalModes::ISIG;
        raw.special_codes[SpecialCodeIndex::VMIN] = 0;
        raw.special_codes[SpecialCodeIndex::VTIME] = 0;
        tcsetattr(stdin(), OptionalActions::Now, &raw).while_doing("set up the terminal")?;
        let terminal = Self { before };
        write("\x1b[?1049h\x1b[?25l")?;
        Ok(terminal)
    }

    /// The window's size; 80x24 if unknown.
    pub(crate) fn size(&self) -> Size {
        match tcgetwinsize(stdout()) {
            Ok(size) if size.ws_col > 0 && size.ws_row > 0 => Size {
                columns: size.ws_col.into(),
                lines: size.ws_row.into(),
            },
            _ => Size {
                columns: 80,
                lines: 24,
            },
        }
    }

    pub(crate) fn draw(&mut self, text: &str) -> Outcome {
        // Clearing each line after its end avoids flicker.
        let lines = text.replace('\n', "\x1b[K\r\n");
        write(&format!("\x1b[H{lines}\x1b[K\x1b[J"))
    }

    /// The end of input is a Ctrl-D.
    pub(crate) fn key(&mut self, limit: Duration) -> Outcome<Option<u8>> {
        let limit = Timespec::try_from(limit).while_doing("wait for a key")?;
        let input = stdin();
        let mut wait = [PollFd::new(&input, PollFlags::IN)];
        match poll(&mut wait, Some(&limit)) {
            Ok(0) | Err(rustix::io::Errno::INTR) => return Ok(None),
            ready => ready.while_doing("wait for a key")?,
        };
        let mut key = [0];
        match rustix::io::read(&input, &mut key) {
            Ok(0) => Ok(Some(4)),
            Ok(_) => Ok(Some(key[0])),
            Err(rustix::io::Errno::INTR | rustix::io::Errno::AGAIN) => Ok(None),
            Err(error) => Err(error).while_doing("read a key"),
        }
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        // A closed terminal needs no restoring.
        let _ = write("\x1b[?25h\x1b[?1049l");
        let _ = tcsetattr(stdin(), OptionalActions::Now, &self.before);
    }
}

fn write(text: &str) -> Outcome {
    let mut out = stdout().lock();
    let written = out.write_all(text.as_bytes()).and_then(|()| out.flush());
    written.while_doing("write to the terminal")
}
