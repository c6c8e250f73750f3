//! The command while it starts: whenever it has mapped code, it is stopped until its unwind tables are
//! made (memtools::stacks::unwind), and until its new allocators are probed.
//!
//! The tables are made on a thread of their own, which asks the main one, where the probes are. A
//! command that becomes another program (`env`, `sh -c 'exec ...'`, a script), or that brings a
//! library by LD_PRELOAD, has so allocated nothing yet when it is probed.

use std::io::{Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use anyhow::{Context, Result};
use memtools::stacks::unwind::WhileStopped;

/// How long the command stays stopped for an answer at most: a report may be in the making.
const PATIENCE: Duration = Duration::from_secs(1);

/// The main thread's end.
pub(crate) struct Questions {
    stream: UnixStream,
    /// The other end, lest its end is waited for once nobody asks any more.
    _other: UnixStream,
}

/// Both ends: what asks, and what hears it.
pub(crate) fn questions() -> Result<(WhileStopped, Questions)> {
    let pair = || {
        let (asker, stream) = UnixStream::pair()?;
        asker.set_read_timeout(Some(PATIENCE))?;
        asker.set_write_timeout(Some(PATIENCE))?;
        stream.set_nonblocking(true)?;
        let _other = asker.try_clone()?;
        Ok::<_, std::io::Error>((asker, Questions { stream, _other }))
    };
    let (asker, questions) = pair().context("failed to open a pair of sockets")?;
    let mut asker = Some(asker);
    let ask = move || {
        // Without an answer in time no more is asked: it would be taken for that to the next.
        asker = asker.take().filter(|mut asker| {
            let asked = asker.write_all(b"?");
            asked.and_then(|()| asker.read_exact(&mut [0])).is_ok()
        });
    };
    Ok((Box::new(ask), questions))
}

impl Questions {
    /// Does `work` if it was asked for, and says that it is done.
    pub(crate) fn answer(&self, work: impl FnOnce()) {
        if (&self.stream).read_exact(&mut [0]).is_ok() {
            work();
            // Whoever asked may have lost patience.
            let _ = (&self.stream).write_all(b"!");
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
        let mut works = 0;
        thread::scope(|scope| {
            let asks = scope.spawn(move || {
                ask();
                ask();
            });
            while !asks.is_finished() {
                questions.answer(|| works += 1);
            }
        });
        assert_eq!(works, 2);
        questions.answer(|| works += 1);
        assert_eq!(works, 2, "nobody asked");
    }

    #[test]
    fn nobody_waits_for_one_that_has_gone() {
        let (mut ask, questions) = questions().expect("sockets");
        drop(questions);
        ask();
        ask();
    }
}
