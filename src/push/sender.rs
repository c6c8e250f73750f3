//! Thread that sends the profiles of a queue, the oldest first, one at a time.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result};

use crate::push::client::{Client, Outcome};
use crate::push::format::Format;
use crate::push::queue::{Meta, Queue};
use crate::run::privileges;

/// First time to wait after a failure, which is doubled after each further one, ...
const FIRST: Duration = Duration::from_secs(1);
/// ... up to this time.
const LONGEST: Duration = Duration::from_secs(300);
/// Longest time that a store may name.
const LONGEST_NAMED: Duration = Duration::from_secs(3600);

/// Numbers of the push.
#[derive(Debug, Default)]
pub struct Pushed {
    /// Profiles that the store has taken.
    pub sent: AtomicU64,
    /// Profiles that the store has refused for good, or that could not be read.
    pub refused: AtomicU64,
    /// Profiles that were dropped because the queue was full, or could not be written.
    pub full: AtomicU64,
    /// Requests that have failed, and were repeated.
    pub failed: AtomicU64,
}

#[derive(Debug)]
struct Shared {
    queue: Mutex<Queue>,
    added: Condvar,
    pushed: Pushed,
}

impl Shared {
    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Running sender, which profiles are given to. Clones share it.
#[derive(Debug, Clone)]
pub struct Sender {
    shared: Arc<Shared>,
}

impl Sender {
    /// Starts the thread, which has no privileges. It ends with the process: what was not sent is in the queue at the next
    /// start.
    ///
    /// # Errors
    /// If the thread cannot be started.
    pub fn start(queue: Queue, client: Client, format: Format) -> Result<Self> {
        let shared = Arc::new(Shared {
            queue: Mutex::new(queue),
            added: Condvar::new(),
            pushed: Pushed::default(),
        });
        let of_thread = Arc::clone(&shared);
        let send = move || {
            if let Err(error) = privileges::keep_pushing() {
                crate::message!("{error:#}; nothing is pushed");
                return;
            }
            run(&of_thread, &client, format);
        };
        thread::Builder::new()
            .name("push".into())
            .spawn(send)
            .context("failed to start the thread that pushes")?;
        Ok(Self { shared })
    }

    /// Adds a profile to the queue. A profile that cannot be written is dropped, and counted.
    pub fn add(&self, meta: &Meta, profile: &[u8]) {
        let added = self.shared.queue().add(meta, profile);
        let dropped = added.unwrap_or_else(|error| {
            crate::message!("{error:#}");
            1
        });
        self.shared
            .pushed
            .full
            .fetch_add(dropped, Ordering::Relaxed);
        self.shared.added.notify_one();
    }

    /// Returns the numbers.
    pub fn pushed(&self) -> &Pushed {
        &self.shared.pushed
    }

    /// Returns the number of profiles in the queue, and their bytes.
    pub fn queued(&self) -> (u64, u64) {
        let queue = self.shared.queue();
        let names = queue.names().map_or(0, |names| names.len());
        (names as u64, queue.bytes())
    }
}

fn run(shared: &Shared, client: &Client, format: Format) {
    let mut failures = 0;
    loop {
        let Some(name) = oldest(shared) else {
            continue;
        };
        let read = shared.queue().read(&name);
        let request = read.and_then(|(meta, profile)| format.request(&meta, profile));
        let outcome = match request {
            Ok(request) => client.send(&request),
            Err(error) => Outcome::Refused(format!("{error:#}")),
        };
        let pushed = &shared.pushed;
        let count = match &outcome {
            Outcome::Sent => &pushed.sent,
            Outcome::Refused(_) => &pushed.refused,
            Outcome::Again(..) => &pushed.failed,
        };
        count.fetch_add(1, Ordering::Relaxed);
        match outcome {
            Outcome::Again(reason, wait) => {
                // One message for a store that is away.
                if failures == 0 {
                    crate::message!("a profile was not pushed, and will be again: {reason}");
                }
                thread::sleep(pause(failures, wait, jitter(&name)));
                failures += 1;
                continue;
            }
            Outcome::Refused(reason) => crate::message!("a profile was not taken: {reason}"),
            Outcome::Sent => {}
        }
        failures = 0;
        if let Err(error) = shared.queue().remove(&name) {
            // The profile would be sent again and again.
            crate::message!("{error:#}; nothing is pushed any more");
            return;
        }
    }
}

/// Waits for a profile, and returns the oldest one's name.
fn oldest(shared: &Shared) -> Option<String> {
    let queue = shared.queue();
    let name = queue
        .names()
        .ok()
        .and_then(|names| names.into_iter().next());
    if name.is_none() {
        // A profile is announced under the lock, so that none is missed.
        drop(shared.added.wait(queue));
    }
    name
}

/// Returns the time to wait after a number of failures: what the store has named, or else longer each time. `jitter` is from
/// 0 to 1, so that the agents of a fleet do not come back all at once.
fn pause(failures: u32, named: Option<Duration>, jitter: f64) -> Duration {
    let wait = match named {
        Some(named) => named.min(LONGEST_NAMED),
        None => FIRST.saturating_mul(1 << failures.min(16)).min(LONGEST),
    };
    wait.mul_f64(0.8 + 0.4 * jitter).max(FIRST / 2)
}

/// Returns a number from 0 to 1 that differs from agent to agent and from profile to profile.
fn jitter(name: &str) -> f64 {
    use std::hash::{BuildHasher, RandomState};
    RandomState::new().hash_one(name) as f64 / u64::MAX as f64
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;
    use crate::export::spool::{Limits, Spool};
    use crate::push::client::Store;

    #[test]
    fn the_oldest_profiles_give_way_while_the_store_is_away() {
        let folder = tempfile::tempdir().expect("a directory");
        let limits = Limits {
            folders: 100,
            bytes: 1000,
        };
        let path = folder.path().join("queue");
        let queue = Queue::new(Spool::open(&path, limits).expect("a spool"));
        // Nothing listens there any more.
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let url = format!("http://{}", listener.local_addr().expect("bound"));
        drop(listener);
        let store = Store {
            url,
            ..Store::default()
        };
        let client = Client::new(store).expect("an address");
        let sender = Sender::start(queue, client, Format::Pyroscope).expect("a thread");
        let meta = Meta {
            labels: vec![("service_name".into(), "x".into())],
            from_seconds: 1,
            until_seconds: 2,
        };
        for number in 0..7_u8 {
            sender.add(&meta, &[number; 300]);
        }
        let (profiles, bytes) = sender.queued();
        assert!(
            profiles == 2 && (600..=1000).contains(&bytes),
            "{profiles} {bytes}"
        );
        assert_eq!(sender.pushed().full.load(Ordering::Relaxed), 5);
        assert_eq!(sender.pushed().sent.load(Ordering::Relaxed), 0);
        // They are there after a restart, the oldest first.
        let queue = Queue::new(Spool::open(&path, limits).expect("a spool"));
        let names = queue.names().expect("a directory");
        let read = |name: &String| queue.read(name).expect("a profile");
        let numbers: Vec<u8> = names.iter().map(|name| read(name).1[0]).collect();
        assert_eq!(numbers, [5, 6]);
        assert_eq!(read(&names[0]).0, meta);
        queue.remove(&names[0]).expect("it is there");
        queue.remove(&names[0]).expect("it was there");
        assert_eq!(queue.names().expect("a directory").len(), 1);
    }

    #[test]
    fn failures_are_repeated_less_and_less_often() {
        let seconds = |failures, named, jitter| pause(failures, named, jitter).as_secs_f64();
        assert_eq!(
            [0, 1, 2, 3].map(|failures| seconds(failures, None, 0.5)),
            [1.0, 2.0, 4.0, 8.0]
        );
        assert_eq!(seconds(30, None, 0.5), 300.0);
        assert_eq!(
            [seconds(30, None, 0.0), seconds(30, None, 1.0)],
            [240.0, 360.0]
        );
        // What the store says, within an hour, and never at once.
        assert_eq!(seconds(7, Some(Duration::from_secs(3)), 0.5), 3.0);
        assert_eq!(seconds(0, Some(Duration::MAX), 0.5), 3600.0);
        assert_eq!(seconds(0, Some(Duration::ZERO), 0.5), 0.5);
    }
}
