//! How far something is that takes long, on a terminal's last line.

use std::io::{self, IsTerminal, Write};
use std::time::{Duration, Instant};

/// What is done in less has no line.
const SHORT: Duration = Duration::from_secs(1);
/// How often the line is written.
const PAUSE: Duration = Duration::from_millis(100);

/// A line on stderr, if that is a terminal, from the second second on: `naming stacks: 1204 of 75389`. It is
/// taken away when this is dropped.
#[derive(Debug)]
pub struct Progress {
    what: &'static str,
    all: usize,
    done: usize,
    /// When the line is written next; None where nobody looks.
    next: Option<Instant>,
    shown: bool,
}

impl Progress {
    /// Begins something of so many steps.
    pub fn new(what: &'static str, all: usize) -> Self {
        Self {
            what,
            all,
            done: 0,
            next: io::stderr().is_terminal().then(|| Instant::now() + SHORT),
            shown: false,
        }
    }

    /// One step more is done.
    pub fn step(&mut self) {
        self.done += 1;
        let now = match self.next {
            None => return,
            Some(next) => match Instant::now() {
                now if now < next => return,
                now => now,
            },
        };
        self.next = Some(now + PAUSE);
        self.shown = true;
        let Self {
            what, all, done, ..
        } = self;
        // Without it, nothing is missing but the line.
        let _ = write!(io::stderr(), "\r\x1b[K{what}: {done} of {all}");
    }

    /// Makes way for another message.
    pub fn clear(&mut self) {
        if self.next.is_some() {
            let _ = write!(io::stderr(), "\r\x1b[K");
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if self.shown {
            self.clear();
        }
    }
}
