//! The command, and with --children what it starts: whenever one has mapped code, it is stopped until its
//! unwind tables are made (memtools::stacks::unwind), and until its new allocators are probed.
//!
//! The tables are made on a thread of their own, which asks the main one, where the probes are. A
//! process that becomes another program (`env`, `sh -c 'exec ...'`, a script), or that brings a
//! library by LD_PRELOAD, has so allocated nothing yet when it is probed.

use std::io::{Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use anyhow::{Context, Result};
use memtools::stacks::unwind::WhileStopped;

/// How long a process stays stopped for an answer at most: a report may be in the making.
const PATIENCE: Duration = Duration::from_secs(1);

/// A question: its number, and the process that is stopped. The answer is its number.
const QUESTION_BYTES: usize = 8;
const ANSWER_BYTES: usize = 4;

/// The main thread's end.
pub(crate) struct Questions {
    stream: UnixStream,
    /// The number of the question that is waited for; 0 for none.
    waiting: Arc<AtomicU32>,
    /// The other end, lest its end is waited for once nobody asks any more.
    _other: UnixStream,
}

/// The two ends of the questions: what asks, and what hears it.
pub(crate) fn questions() -> Result<(WhileStopped, Questions)> {
    let pair = || {
        let (asker, stream) = UnixStream::pair()?;
        asker.set_read_timeout(Some(PATIENCE))?;
        asker.set_write_timeout(Some(PATIENCE))?;
        stream.set_nonblocking(true)?;
        let _other = asker.try_clone()?;
        let waiting = Arc::new(AtomicU32::new(0));
        let questions = Questions {
            stream,
            waiting,
            _other,
        };
        Ok::<_, std::io::Error>((asker, questions))
    };
    let (mut asker, questions) = pair().context("failed to open a pair of sockets")?;
    let waiting = Arc::clone(&questions.waiting);
    let mut number = 0u32;
    let ask = move |pid: u32| {
        number = number.wrapping_add(1).max(1);
        waiting.store(number, Ordering::SeqCst);
        let number = number.to_ne_bytes();
        let mut answer = [0; ANSWER_BYTES];
        let mut asked = asker.write_all(&[number, pid.to_ne_bytes()].concat());
        // What comes first may be the answer to an earlier question, too late for that.
        while asked.is_ok() && answer != number {
            asked = asker.read_exact(&mut answer);
        }
        waiting.store(0, Ordering::SeqCst);
    };
    Ok((Box::new(ask), questions))
}

impl Questions {
    /// Does `work` for each process that it was asked for, and says that it is done. The second
    /// argument tells whether the process is stopped still.
    pub(crate) fn answer(&self, mut work: impl FnMut(u32, &dyn Fn() -> bool)) {
        let mut question = [0; QUESTION_BYTES];
        while (&self.stream).read_exact(&mut question).is_ok() {
            let [a, b, c, d, pid @ ..] = question;
            let number = u32::from_ne_bytes([a, b, c, d]);
            let is_waiting = || self.waiting.load(Ordering::SeqCst) == number;
            work(u32::from_ne_bytes(pid), &is_waiting);
            // Whoever asked may have lost patience.
            let _ = (&self.stream).write_all(&[a, b, c, d]);
        }
    }
}

impl AsFd for Questions {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    #[test]
    fn what_asks_goes_on_when_the_work_is_done() {
        let (mut ask, questions) = questions().expect("sockets");
        let mut works = Vec::new();
        thread::scope(|scope| {
            let asks = scope.spawn(move || {
                ask(7);
                ask(11);
            });
            while !asks.is_finished() {
                questions.answer(|pid, is_waiting| works.push((pid, is_waiting())));
            }
        });
        assert_eq!(works, [(7, true), (11, true)]);
        questions.answer(|pid, _| works.push((pid, true)));
        assert_eq!(works.len(), 2, "nobody asked");
    }

    #[test]
    fn an_answer_that_comes_too_late_is_not_the_next_ones() {
        let (mut ask, questions) = questions().expect("sockets");
        // Nobody answers this in time.
        ask(7);
        let mut works = Vec::new();
        thread::scope(|scope| {
            let asks = scope.spawn(move || ask(11));
            while works.len() < 2 {
                questions.answer(|pid, is_waiting| {
                    works.push((pid, is_waiting()));
                    if pid == 11 {
                        thread::sleep(Duration::from_millis(50));
                        assert!(!asks.is_finished(), "the first answer was taken");
                    }
                });
            }
        });
        assert_eq!(works, [(7, false), (11, true)]);
    }

    #[test]
    fn nobody_waits_for_one_that_has_gone() {
        let (mut ask, questions) = questions().expect("sockets");
        drop(questions);
        ask(7);
        ask(11);
    }
}
