//! Connections, each with a thread of its own.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result};

use crate::print::clock;
use crate::serve::address::{Address, Listener, Stream};
use crate::serve::body::BodyMemory;
use crate::serve::exchange::Exchange;
use crate::serve::report::ServedReport;
use crate::serve::{http, pages};

/// Maximum number of connections at once. Others wait to be accepted: one that hangs takes [`http::READING`].
const MAX_CONNECTIONS: usize = 64;
/// Maximum number of clients that wait for a difference over a time at once.
const MAX_DIFFERENCES: usize = 8;
/// Pause after a connection could not be accepted, such as for lack of descriptors.
const AFTER_FAILURE: Duration = Duration::from_millis(100);

/// Server of a run's reports, until it is dropped.
#[derive(Debug)]
pub struct Server {
    shared: Arc<Shared>,
}

/// State that the threads share.
#[derive(Debug)]
pub(super) struct Shared {
    listener: Listener,
    pub(super) exchange: Exchange,
    pub(super) bodies: Arc<BodyMemory>,
    connections: Semaphore,
    /// Connections that wait for a difference, limited so that they do not keep all others out.
    pub(super) differences: Semaphore,
}

impl Server {
    /// Begins to accept clients, to which at most `memory` bytes are sent at once. Clients wait until the trace has
    /// begun. `confine` drops the privileges of the thread that calls it, and is called by the one that accepts: the
    /// threads that read requests inherit its privileges. They also inherit the priority of the calling thread: call
    /// this before that priority is raised.
    ///
    /// # Errors
    /// If a thread cannot be started, or `confine` fails.
    pub fn start(
        listener: Listener,
        memory: usize,
        confine: impl FnOnce() -> Result<()> + Send + 'static,
    ) -> Result<Self> {
        let shared = Arc::new(Shared {
            listener,
            exchange: Exchange::new()?,
            bodies: BodyMemory::new(memory),
            connections: Semaphore::new(MAX_CONNECTIONS),
            differences: Semaphore::new(MAX_DIFFERENCES),
        });
        let accepts = Arc::clone(&shared);
        // The threads can read no file once they have no privileges.
        clock::time_zone();
        let (outcome, is_confined) = mpsc::channel();
        let serve = move || {
            let confined = confine();
            let may_serve = confined.is_ok();
            // The receiver waits for this.
            let _ = outcome.send(confined);
            if may_serve {
                accept(&accepts);
            }
        };
        thread::Builder::new()
            .name("serve".into())
            .spawn(serve)
            .context("failed to start the thread that serves")?;
        is_confined.recv()??;
        Ok(Self { shared })
    }

    /// Returns the address at which the server listens.
    pub fn address(&self) -> &Address {
        self.shared.listener.address()
    }

    /// Makes a report for the clients that wait for one. To be called when the poller says so.
    ///
    /// # Errors
    /// If the report cannot be made.
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

/// Stops accepting clients, and tells those that wait that the trace has ended. No client is waited for: the end of the
/// process cuts off slow readers.
impl Drop for Server {
    fn drop(&mut self) {
        self.shared.exchange.end();
        self.shared.connections.close();
        self.shared.listener.close();
    }
}

fn accept(shared: &Arc<Shared>) {
    while shared.connections.acquire() {
        match shared.listener.accept() {
            Ok(stream) => {
                let slot = Permit::of(shared, |shared| &shared.connections);
                let started = thread::Builder::new()
                    .name("serve-client".into())
                    .spawn(move || handle_connection(stream, &slot));
                if started.is_err() {
                    thread::sleep(AFTER_FAILURE);
                }
            }
            Err(_) => {
                shared.connections.release();
                thread::sleep(AFTER_FAILURE);
            }
        }
    }
}

/// Answers one request. Errors that a client causes are ignored.
fn handle_connection(mut stream: Box<dyn Stream>, Permit { shared, .. }: &Permit) {
    let request = http::read(&mut *stream, shared.listener.wants_local_names());
    let Ok(Some(request)) = request else { return };
    let head_only = request.as_ref().is_ok_and(|request| request.head_only);
    let response =
        request.map_or_else(|refused| refused, |request| pages::answer(&request, shared));
    let _ = response.send(&mut *stream, head_only);
}

/// Counter of free slots, which limits how many of something are in use at once.
#[derive(Debug)]
pub(super) struct Semaphore {
    /// Number of free slots; None once this is closed.
    free: Mutex<Option<usize>>,
    changed: Condvar,
}

impl Semaphore {
    fn new(slots: usize) -> Self {
        Self {
            free: Mutex::new(Some(slots)),
            changed: Condvar::new(),
        }
    }

    /// Takes a slot, and waits until one is free. Returns false once this is closed.
    fn acquire(&self) -> bool {
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

    /// Takes a slot if one is free.
    pub(super) fn try_acquire(&self) -> bool {
        let mut free = self.lock();
        let count = free.as_mut().filter(|count| **count > 0);
        count.map(|count| *count -= 1).is_some()
    }

    pub(super) fn release(&self) {
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

/// A slot that was taken, which is given back when this is dropped, even by a panic.
pub(super) struct Permit {
    shared: Arc<Shared>,
    slots: fn(&Shared) -> &Semaphore,
}

impl Permit {
    pub(super) fn of(shared: &Arc<Shared>, slots: fn(&Shared) -> &Semaphore) -> Self {
        Self {
            shared: Arc::clone(shared),
            slots,
        }
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        (self.slots)(&self.shared).release();
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;
    use std::path::Path;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::time::Instant;

    use nix::poll::{PollFd, PollFlags, poll};

    use super::*;
    use crate::export::profile::{Profile, Sample, ValueType};
    use crate::print::clock;
    use crate::serve::trend::Trends;
    use crate::stacks::named::{Frame, NamedStack, Part};

    /// Limit on the memory for bodies. The text of the report is more than half as large.
    const LIMIT: usize = 4 << 20;

    /// Report of 200 stacks with 60 frames each.
    fn report() -> ServedReport {
        let frame = |at: u64| Frame {
            address: at,
            instruction: at,
            symbol: Some((format!("function_{at}_{}", "x".repeat(200)).into(), at)),
            ..Frame::default()
        };
        let sample = |stack: u64| Sample {
            stack: NamedStack {
                pid: 7,
                comm: "demo".into(),
                user: Some(Part {
                    frames: (0..60).map(|at| frame(stack * 100 + at)).collect(),
                    truncated: None,
                }),
                ..NamedStack::default()
            },
            values: vec![1, 37],
        };
        let profile = Profile {
            tool: "memleak",
            target: "pid 7".into(),
            subject: "outstanding allocations".into(),
            since: clock::now(),
            until: clock::now(),
            values: vec![
                ValueType::count("inuse_objects", "allocations"),
                ValueType::bytes("inuse_space"),
            ],
            main_value: 1,
            by_thread: false,
            samples: (0..200).map(sample).collect(),
            remarks: Vec::new(),
        };
        ServedReport::new(&profile, &[], &Trends::default(), Vec::new(), None)
    }

    fn request(path: &Path) -> UnixStream {
        let mut client = UnixStream::connect(path).expect("it listens");
        let request = b"GET /debug/pprof/heap?debug=1 HTTP/1.1\r\nHost: localhost\r\n\r\n";
        client.write_all(request).expect("room");
        client
    }

    fn answer(mut client: UnixStream) -> String {
        let mut answer = String::new();
        client.read_to_string(&mut answer).expect("an answer");
        answer
    }

    /// Answers the requests for reports until `done` is set.
    fn trace(server: &Server, done: &AtomicBool) {
        while !done.load(Ordering::Relaxed) {
            let mut fds = [PollFd::new(server.as_fd(), PollFlags::POLLIN)];
            if poll(&mut fds, 10u8).expect("poll") == 1 {
                server.answer(|| Ok(report())).expect("a report");
            }
        }
    }

    #[test]
    fn slow_readers_share_one_copy_and_take_no_more_than_the_limit() {
        let folder = tempfile::tempdir().expect("a directory");
        let path = folder.path().join("socket");
        let listener = Listener::bind(&Address::Unix(path.clone())).expect("a socket");
        let server = Server::start(listener, LIMIT, || Ok(())).expect("a thread");
        let (done, bodies) = (AtomicBool::new(false), &server.shared.bodies);
        let (first, refused, used) = thread::scope(|scope| {
            scope.spawn(|| trace(&server, &done));
            let first = answer(request(&path));
            // All connections but one are of clients that do not read.
            let slow: Vec<_> = (1..MAX_CONNECTIONS).map(|_| request(&path)).collect();
            let mut refused = 0;
            let begun = Instant::now();
            while refused < 3 && begun.elapsed() < Duration::from_secs(8) {
                refused += usize::from(answer(request(&path)).starts_with("HTTP/1.1 503 "));
                assert!(bodies.used() <= LIMIT, "{}", bodies.used());
            }
            let used = bodies.used();
            drop(slow);
            done.store(true, Ordering::Relaxed);
            (first, refused, used)
        });
        assert!(first.starts_with("HTTP/1.1 200 "), "{}", &first[..100]);
        assert!(first.len() > LIMIT / 2, "{}", first.len());
        // The next report's text does not fit beside the copy that all of the slow clients share.
        assert_eq!(refused, 3, "more than one copy fits");
        assert!(used <= first.len(), "{used} for {}", first.len());
    }
}
