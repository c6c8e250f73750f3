//! The end of tests that hang: in a guest, one of them would keep all later ones from running, and nothing would say
//! which one it was.

use std::fs;
use std::process;
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// Time after which a test counts as one that hangs: three waits that fail ([`super::TIMEOUT`]), and more.
const LIMIT: Duration = Duration::from_secs(600);

/// Exit status of the tests when one has hung.
const STATUS: i32 = 3;

/// Tests that are running, with their beginnings.
static RUNNING: Mutex<Vec<(Instant, String)>> = Mutex::new(Vec::new());

/// A test that runs until this is dropped.
pub(super) struct Running {
    started: Instant,
}

impl Running {
    pub(super) fn new(name: &str) -> Self {
        let started = Instant::now();
        let mut running = RUNNING.lock().unwrap_or_else(PoisonError::into_inner);
        running.push((started, name.to_owned()));
        Self { started }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let mut running = RUNNING.lock().unwrap_or_else(PoisonError::into_inner);
        running.retain(|(started, _)| *started != self.started);
    }
}

/// Starts a thread that ends this process when a test hangs, and first prints the test's name and what each
/// process waits for.
pub(crate) fn end_tests_that_hang() {
    thread::spawn(|| {
        loop {
            thread::sleep(Duration::from_secs(1));
            let running = RUNNING.lock().unwrap_or_else(PoisonError::into_inner);
            let hung = running
                .iter()
                .find(|(started, _)| started.elapsed() > LIMIT);
            if let Some((_, name)) = hung {
                eprintln!("e2e: {name} hangs: not done after {} s", LIMIT.as_secs());
                print_processes();
                process::exit(STATUS);
            }
        }
    });
}

/// Prints each process with memory of its own: its name, its state, and the kernel's stack of its main thread. Nothing
/// of this waits for the lock of an address space, which the test may be waiting for.
fn print_processes() {
    for entry in fs::read_dir("/proc").into_iter().flatten().flatten() {
        let read = |file| fs::read_to_string(entry.path().join(file)).unwrap_or_default();
        let status = read("status");
        let field = |name| status.lines().find(|line| line.starts_with(name));
        let (Some(name), Some(state), Some(_)) =
            (field("Name:"), field("State:"), field("VmSize:"))
        else {
            continue;
        };
        eprintln!("{} {name} {state}", entry.file_name().display());
        eprintln!("{}", read("stack"));
    }
}
