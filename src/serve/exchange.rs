//! Exchange of requests for reports, from the threads of connections, and of reports, from the tracing thread.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use nix::sys::eventfd::{EfdFlags, EventFd};

use crate::serve::report::ServedReport;

/// Minimum time for which a report is given to all clients that ask.
const FRESH: Duration = Duration::from_secs(1);
/// Time for which a report is given to all clients that ask, as a multiple of the time that making it took: at most a
/// tenth of the tracing thread's time goes into reports for clients.
const FRESH_PART: u32 = 10;
/// Maximum time that a client waits for a report.
const REPORT_TIMEOUT: Duration = Duration::from_secs(10);

/// Reason for which there is no report.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Unavailable {
    /// The trace has not begun, or its thread is busy with something else.
    Busy,
    /// The trace has ended.
    Ended,
}

/// State that the tracing thread and the threads of connections share.
#[derive(Debug)]
pub(super) struct Exchange {
    state: Mutex<Exchanged>,
    changed: Condvar,
    /// Readable while a report is requested.
    asked: EventFd,
}

#[derive(Debug, Default)]
struct Exchanged {
    latest: Option<Latest>,
    asked: bool,
    ended: bool,
}

/// The last report, with the time at which making it began, and the time until which it is fresh.
#[derive(Debug)]
struct Latest {
    report: Arc<ServedReport>,
    begun: Instant,
    fresh_until: Instant,
}

impl Exchange {
    pub(super) fn new() -> Result<Self> {
        let flags = EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK;
        Ok(Self {
            state: Mutex::default(),
            changed: Condvar::new(),
            asked: EventFd::from_flags(flags).context("failed to open an eventfd")?,
        })
    }

    /// Returns a report, which may have been made for other clients a second ago.
    pub(super) fn report(&self) -> Result<Arc<ServedReport>, Unavailable> {
        self.report_from(None).map(|(report, _)| report)
    }

    /// Returns a report and when making it began. With `earliest`, that time is `earliest` or later.
    pub(super) fn report_from(
        &self,
        earliest: Option<Instant>,
    ) -> Result<(Arc<ServedReport>, Instant), Unavailable> {
        let mut deadline = Instant::now() + REPORT_TIMEOUT;
        let mut state = self.lock();
        loop {
            let now = Instant::now();
            if state.ended {
                return Err(Unavailable::Ended);
            }
            match &state.latest {
                Some(latest) if now < latest.fresh_until => {
                    if earliest.is_none_or(|earliest| latest.begun >= earliest) {
                        return Ok((Arc::clone(&latest.report), latest.begun));
                    }
                    // The next report is not requested before the last one is stale, however long that takes.
                    deadline = latest.fresh_until + REPORT_TIMEOUT;
                    let left = latest.fresh_until.saturating_duration_since(now);
                    state = self.wait(state, left);
                    continue;
                }
                _ if !state.asked => {
                    state.asked = true;
                    // The counter cannot be full: it is read before it is written again.
                    let _ = self.asked.write(1);
                }
                _ => {}
            }
            if now >= deadline {
                return Err(Unavailable::Busy);
            }
            state = self.wait(state, deadline.saturating_duration_since(now));
        }
    }

    /// Waits until a time. Fails if the trace ends before.
    pub(super) fn pause(&self, until: Instant) -> Result<(), Unavailable> {
        let mut state = self.lock();
        loop {
            let left = until.saturating_duration_since(Instant::now());
            if state.ended {
                return Err(Unavailable::Ended);
            }
            if left.is_zero() {
                return Ok(());
            }
            state = self.wait(state, left);
        }
    }

    /// Makes a report for the clients that wait for one.
    pub(super) fn answer(&self, make: impl FnOnce() -> Result<ServedReport>) -> Result<()> {
        // A client that asks while the report is made gets this one: `asked` stays true until it is made.
        let _ = self.asked.read();
        let begun = Instant::now();
        let report = Arc::new(make()?);
        let now = Instant::now();
        let mut state = self.lock();
        state.asked = false;
        state.latest = Some(Latest {
            report,
            begun,
            fresh_until: now + FRESH.max((now - begun) * FRESH_PART),
        });
        self.changed.notify_all();
        Ok(())
    }

    /// Ends the wait of all clients, also of later ones.
    pub(super) fn end(&self) {
        self.lock().ended = true;
        self.changed.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, Exchanged> {
        // No panic can leave the state half changed.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(
        &self,
        state: MutexGuard<'a, Exchanged>,
        time: Duration,
    ) -> MutexGuard<'a, Exchanged> {
        let waited = self.changed.wait_timeout(state, time);
        waited.unwrap_or_else(PoisonError::into_inner).0
    }
}

impl AsFd for Exchange {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.asked.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

    use super::*;

    fn is_asked(exchange: &Exchange) -> bool {
        let mut fds = [PollFd::new(exchange.as_fd(), PollFlags::POLLIN)];
        poll(&mut fds, PollTimeout::ZERO).expect("poll") == 1
    }

    #[test]
    fn many_clients_are_one_question_and_one_report() {
        let exchange = Exchange::new().expect("an eventfd");
        let mut made = 0;
        let reports: Vec<_> = thread::scope(|scope| {
            let client = |_| scope.spawn(|| exchange.report());
            let clients: Vec<_> = (0..100).map(client).collect();
            while clients.iter().any(|client| !client.is_finished()) {
                if is_asked(&exchange) {
                    made += 1;
                    let made = exchange.answer(|| Ok(ServedReport::default()));
                    made.expect("a report");
                }
                thread::yield_now();
            }
            let reports = clients.into_iter().map(|client| client.join());
            reports.map(|report| report.expect("no panic")).collect()
        });
        let first = reports[0].clone().expect("a report");
        for report in &reports {
            assert!(Arc::ptr_eq(report.as_ref().expect("a report"), &first));
        }
        assert_eq!(made, 1);
        assert!(!is_asked(&exchange));
    }

    #[test]
    fn one_of_later_is_waited_for() {
        let exchange = Exchange::new().expect("an eventfd");
        exchange
            .answer(|| Ok(ServedReport::default()))
            .expect("a report");
        let earliest = Instant::now();
        thread::scope(|scope| {
            let client = scope.spawn(|| exchange.report_from(Some(earliest)));
            while !client.is_finished() {
                if is_asked(&exchange) {
                    assert!(earliest.elapsed() >= FRESH, "more than one a second");
                    exchange
                        .answer(|| Ok(ServedReport::default()))
                        .expect("a report");
                }
                thread::sleep(Duration::from_millis(5));
            }
            let (_, begun) = client.join().expect("no panic").expect("a report");
            assert!(begun >= earliest);
        });
    }

    #[test]
    fn at_the_end_nobody_waits() {
        let exchange = Exchange::new().expect("an eventfd");
        let later = || Instant::now() + Duration::from_secs(60);
        thread::scope(|scope| {
            let client = scope.spawn(|| exchange.report());
            let other = scope.spawn(|| exchange.pause(later()));
            thread::sleep(Duration::from_millis(20));
            exchange.end();
            assert_eq!(
                client.join().expect("no panic").err(),
                Some(Unavailable::Ended)
            );
            assert_eq!(other.join().expect("no panic"), Err(Unavailable::Ended));
        });
    }
}
