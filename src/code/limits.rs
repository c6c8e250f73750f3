//! Limits of memory and time for reading one file of another user.
//!
//! The owner of a file can make each size, count and depth in it as large as he likes: a section of 64 GiB is a hole
//! on his disk. So each has a limit. A file that exceeds one is omitted, and the reason is reported. The limits are
//! above what the largest programs of distributions have.

use std::mem::MaybeUninit;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use nix::time::{ClockId, clock_gettime};

/// Bytes of memory for one file at a time.
pub const MAX_MEMORY: usize = 64 << 20;
/// CPU time for one file. A compiler of 109 MB takes 0.05 s; but a Python of 7 MB took a second where the CPU was
/// emulated, and had two other guests on it.
const MAX_TIME: Duration = Duration::from_secs(10);
/// Time for which files are still read while a signal that ends the run is pending: a process may have thousands of
/// files, each of which takes all the time that one file may take.
const LAST_READING: Duration = Duration::from_secs(2);

/// Bytes of executable code: Chromium has 200 MB of it.
pub(crate) const MAX_CODE: u64 = 512 << 20;
/// Program headers: the kernel executes no program with more of them (64 KiB).
pub(crate) const MAX_SEGMENTS: usize = 1170;
/// Section headers: what a 16-bit index reaches.
pub(crate) const MAX_SECTIONS: usize = 0xff00;
/// Bytes of all names of sections.
pub(crate) const MAX_SECTION_NAMES: u64 = 4 << 20;
/// Bytes of a table of symbols, or of their names: a debug build of Chromium has 300 MB of these.
pub(crate) const MAX_SYMBOLS: u64 = 512 << 20;
/// Bytes of a symbol's name. C++ makes them of 10 KB.
pub(crate) const MAX_NAME: usize = 16 << 10;
/// Functions of a file that have one of the names looked for: more than all that libstdc++ exports.
pub(crate) const MAX_FOUND: usize = 1 << 14;
/// Bytes of `.eh_frame`: a web browser has 20 MB of it.
pub(crate) const MAX_EH_FRAME: u64 = 40 << 20;
/// Functions that a file imports.
pub(crate) const MAX_IMPORTS: usize = 1 << 18;
/// Bytes of a table of relocations.
pub(crate) const MAX_RELOCATIONS: u64 = 64 << 20;

/// Deadline for reading one file, in CPU time of the thread that reads it. Other load of the machine does not matter,
/// except CPU time that a hypervisor gives to other guests.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Deadline(Duration);

impl Deadline {
    /// Starts the time for one file.
    pub(crate) fn start() -> Self {
        Self(cpu_time() + MAX_TIME)
    }

    /// Checks that there is time left for the file.
    ///
    /// # Errors
    /// If the time for the file is over, or a signal has requested the end and the time for all files since then is
    /// over.
    pub(crate) fn check(self) -> Result<()> {
        check_interrupted()?;
        ensure!(
            cpu_time() <= self.0,
            "it takes more than {} s to read",
            MAX_TIME.as_secs()
        );
        Ok(())
    }
}

/// Checks that files may still be read.
///
/// # Errors
/// If a signal has requested the end, and the time for all files since then is over.
pub(crate) fn check_interrupted() -> Result<()> {
    static ASKED: OnceLock<Instant> = OnceLock::new();
    if end_is_asked_for() {
        let asked = ASKED.get_or_init(Instant::now);
        ensure!(asked.elapsed() <= LAST_READING, "the end was requested");
    }
    Ok(())
}

/// Whether a signal that ends a run is pending. The tools block these signals.
fn end_is_asked_for() -> bool {
    let mut waiting = MaybeUninit::zeroed();
    // SAFETY: the call writes a set of signals there, and any bytes are one.
    let waiting = unsafe {
        libc::sigpending(waiting.as_mut_ptr());
        waiting.assume_init()
    };
    let ends = [libc::SIGINT, libc::SIGTERM, libc::SIGHUP, libc::SIGQUIT];
    // SAFETY: the set is read, and these are signals.
    ends.into_iter()
        .any(|signal| unsafe { libc::sigismember(&waiting, signal) } == 1)
}

/// CPU time of this thread. Without a clock there is no deadline.
fn cpu_time() -> Duration {
    clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).map_or(Duration::ZERO, Duration::from)
}
