//! Progress of a long operation, on a terminal's last line.

use std::io::{self, IsTerminal, Write};
use std::time::{Duration, Instant};

/// Duration up to which an operation shows no line.
const SHORT: Duration = Duration::from_secs(1);
/// Time between two updates of the line.
const PAUSE: Duration = Duration::from_millis(100);

/// A line on stderr with the progress of an operation: `naming stacks: 1204 of 75389`. The line is shown if stderr is a
/// terminal, from the second second on. It is removed when this is dropped.
#[derive(Debug)]
pub struct Progress {
    what: &'static str,
    all: usize,
    done: usize,
    /// Time of the next update of the line; None if stderr is no terminal.
    next: Option<Instant>,
    shown: bool,
}

impl Progress {
    /// Begins an operation of `all` steps.
    pub fn new(what: &'static str, all: usize) -> Self {
        Self {
            what,
            all,
            done: 0,
            next: io::stderr().is_terminal().then(|| Instant::now() + SHORT),
            shown: false,
        }
    }

    /// Counts one more step as done.
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
        // If this fails, only the line is missing.
        let _ = write!(io::stderr(), "\r\x1b[K{what}: {done} of {all}");
    }

    /// Clears the line to make way for another message.
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
