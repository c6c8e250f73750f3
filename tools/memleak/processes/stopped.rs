//! Stops of the command, and with --children of what it starts: a process that has mapped code is stopped until its
//! unwind tables are built (memtools::stacks::unwind), and until its new allocators are probed.
//!
//! The tables are built on a thread of their own. This thread asks the main thread, which attaches the probes. So a
//! process has allocated nothing yet when it is probed, even if it becomes another program (`env`, `sh -c 'exec ...'`,
//! a script), or loads a library by LD_PRELOAD.

use std::io::{Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use anyhow::{Context, Result};
use memtools::stacks::unwind::WhileStopped;

/// Maximum time for which a process stays stopped for an answer: the main thread may be making a report.
const PATIENCE: Duration = Duration::from_secs(1);

/// Size of a question: its number, and the pid of the stopped process. The answer is the question's number.
const QUESTION_BYTES: usize = 8;
const ANSWER_BYTES: usize = 4;

/// Main thread's end of the questions.
pub(crate) struct StopRequests {
    stream: UnixStream,
    /// Number of the question whose answer is waited for. 0 if there is none.
    waiting: Arc<AtomicU32>,
    /// Copy of the other end, so that the stream does not end after the last question.
    _other: UnixStream,
}

/// Makes the two ends of the questions: the function that asks, and the main thread's end.
pub(crate) fn questions() -> Result<(WhileStopped, StopRequests)> {
    let pair = || {
        let (asker, stream) = UnixStream::pair()?;
        asker.set_read_timeout(Some(PATIENCE))?;
        asker.set_write_timeout(Some(PATIENCE))?;
        stream.set_nonblocking(true)?;
        let _other = asker.try_clone()?;
        let waiting = Arc::new(AtomicU32::new(0));
        let questions = StopRequests {
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
        // The first answer to arrive may be a late one, to an earlier question.
        while asked.is_ok() && answer != number {
            asked = asker.read_exact(&mut answer);
        }
        waiting.store(0, Ordering::SeqCst);
    };
    Ok((Box::new(ask), questions))
}

impl StopRequests {
    /// Calls `work` for each process that was asked about, and answers that it is done. The second argument of `work`
    /// tells whether the process is still stopped.
    pub(crate) fn answer(&self, mut work: impl FnMut(u32, &dyn Fn() -> bool)) {
        let mut question = [0; QUESTION_BYTES];
        while (&self.stream).read_exact(&mut question).is_ok() {
            let [a, b, c, d, pid @ ..] = question;
            let number = u32::from_ne_bytes([a, b, c, d]);
            let is_waiting = || self.waiting.load(Ordering::SeqCst) == number;
            work(u32::from_ne_bytes(pid), &is_waiting);
            // The thread that asked may have timed out.
            let _ = (&self.stream).write_all(&[a, b, c, d]);
        }
    }
}

impl AsFd for StopRequests {
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
