//! Connections, each with a thread of its own.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result};

use crate::serve::address::{Address, Listener, Stream};
use crate::serve::exchange::Exchange;
use crate::serve::report::ServedReport;
use crate::serve::{http, pages};

/// Connections at once. Others wait to be accepted: one that hangs takes [`http::READING`].
const MOST_CONNECTIONS: usize = 64;
/// Differences over a time that are waited for at once.
const MOST_DIFFERENCES: usize = 8;
/// How long to wait after a connection could not be accepted, such as for lack of descriptors.
const AFTER_FAILURE: Duration = Duration::from_millis(100);

/// What serves the reports of a run, until it is dropped.
#[derive(Debug)]
pub struct Server {
    shared: Arc<Shared>,
}

/// What the threads share.
#[derive(Debug)]
pub(super) struct Shared {
    listener: Listener,
    pub(super) exchange: Exchange,
    connections: Slots,
    /// Connections that wait for a difference, which are not to keep all others out.
    pub(super) differences: Slots,
}

impl Server {
    /// Begins to accept clients, who wait until the trace has begun. Threads keep the priority that
    /// this one has: call it before that is raised.
    ///
    /// # Errors
    /// If a thread cannot be started.
    pub fn start(listener: Listener) -> Result<Self> {
        let shared = Arc::new(Shared {
            listener,
            exchange: Exchange::new()?,
            connections: Slots::new(MOST_CONNECTIONS),
            differences: Slots::new(MOST_DIFFERENCES),
        });
        let accepts = Arc::clone(&shared);
        thread::Builder::new()
            .name("serve".into())
            .spawn(move || accept(&accepts))
            .context("failed to start the thread that serves")?;
        Ok(Self { shared })
    }

    /// Where it serves.
    pub fn address(&self) -> &Address {
        self.shared.listener.address()
    }

    /// Makes a report for the clients who wait for one. To be called when the poller says so.
    ///
    /// # Errors
    /// If it cannot be made.
    pub fn answer(&self, make: impl FnOnce() -> Result<ServedReport>) -> Result<()> {
        self.shared.exchange.answer(make)
    }
}

/// Readable while a client waits for a report.
impl AsFd for Server {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.shared.exchange.as_fd()
    }
}

/// Takes no more clients, and tells those who wait that the trace has ended. Nobody is waited for: who
/// reads slowly is cut off by the end of the process.
impl Drop for Server {
    fn drop(&mut self) {
        self.shared.exchange.end();
        self.shared.connections.close();
        self.shared.listener.close();
    }
}

fn accept(shared: &Arc<Shared>) {
    while shared.connections.take_or_wait() {
        match shared.listener.accept() {
            Ok(stream) => {
                let slot = Slot::of(shared, |shared| &shared.connections);
                let started = thread::Builder::new()
                    .name("serve-client".into())
                    .spawn(move || talk(stream, &slot));
                if started.is_err() {
                    thread::sleep(AFTER_FAILURE);
                }
            }
            Err(_) => {
                shared.connections.give_back();
                thread::sleep(AFTER_FAILURE);
            }
        }
    }
}

/// Answers one request. Whatever a client does to fail this is its own affair.
fn talk(mut stream: Box<dyn Stream>, Slot { shared, .. }: &Slot) {
    let request = http::read(&mut *stream, shared.listener.wants_local_names());
    let Ok(Some(request)) = request else { return };
    let head_only = request.as_ref().is_ok_and(|request| request.head_only);
    let response =
        request.map_or_else(|refused| refused, |request| pages::answer(&request, shared));
    let _ = response.send(&mut *stream, head_only);
}

/// A limited number of something that is in use at once.
#[derive(Debug)]
pub(super) struct Slots {
    /// None once it is closed.
    free: Mutex<Option<usize>>,
    changed: Condvar,
}

impl Slots {
    fn new(slots: usize) -> Self {
        Self {
            free: Mutex::new(Some(slots)),
            changed: Condvar::new(),
        }
    }

    /// Takes a slot, when there is one; false once it is closed.
    fn take_or_wait(&self) -> bool {
        let mut free = self.lock();
        loop {
            match &mut *free {
                None => return false,
                Some(0) => {
                    let waited = self.changed.wait(free);
                    free = waited.unwrap_or_else(PoisonError::into_inner);
                }
                Some(count) => {
                    *count -= 1;
                    return true;
                }
            }
        }
    }

    /// Takes a slot if there is one.
    pub(super) fn take(&self) -> bool {
        let mut free = self.lock();
        let count = free.as_mut().filter(|count| **count > 0);
        count.map(|count| *count -= 1).is_some()
    }

    pub(super) fn give_back(&self) {
        if let Some(count) = &mut *self.lock() {
            *count += 1;
        }
        self.changed.notify_one();
    }

    fn close(&self) {
        *self.lock() = None;
        self.changed.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, Option<usize>> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A slot that was taken, until it is dropped, even by a panic.
pub(super) struct Slot {
    shared: Arc<Shared>,
    slots: fn(&Shared) -> &Slots,
}

impl Slot {
    pub(super) fn of(shared: &Arc<Shared>, slots: fn(&Shared) -> &Slots) -> Self {
        Self {
            shared: Arc::clone(shared),
            slots,
        }
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        (self.slots)(&self.shared).give_back();
    }
}
