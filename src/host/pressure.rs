//! Pressure stall information: how long tasks were stalled because memory was short.
//!
//! Available from 4.20 on, if the kernel is built with CONFIG_PSI and not booted with psi=0.

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};

/// One line of the file: the share of time in which tasks waited for memory.
#[derive(Debug, Default, Clone, Copy, PartialEq)]
pub struct Stalled {
    /// Percent of the last ten seconds.
    pub avg10: f64,
    /// Percent of the last minute.
    pub avg60: f64,
    /// Microseconds since boot.
    pub total_us: u64,
}

/// Memory pressure of the host or of a cgroup.
#[derive(Debug, Default, Clone, Copy, PartialEq)]
pub struct Pressure {
    /// The share of time in which at least one task waited.
    pub some: Stalled,
    /// The share of time in which all tasks that were not idle waited.
    pub full: Stalled,
}

impl Pressure {
    /// Reads the pressure from a file such as `/proc/pressure/memory`. None if the kernel does not report pressure.
    pub fn read(path: impl AsRef<Path>) -> Option<Self> {
        Self::parse(&fs::read_to_string(path).ok()?)
    }

    fn parse(text: &str) -> Option<Self> {
        let line = |kind: &str| {
            let fields = text.lines().find_map(|line| line.strip_prefix(kind))?;
            let field = |name: &str| {
                let mut fields = fields.split_ascii_whitespace();
                fields.find_map(|field| field.strip_prefix(name)?.strip_prefix('='))
            };
            Some(Stalled {
                avg10: field("avg10")?.parse().ok()?,
                avg60: field("avg60")?.parse().ok()?,
                total_us: field("total")?.parse().ok()?,
            })
        };
        Some(Self {
            some: line("some")?,
            full: line("full")?,
        })
    }
}

/// Notification by the kernel when tasks have waited for memory for a given time. Until then it costs nothing.
pub struct Trigger {
    file: File,
}

impl Trigger {
    /// Registers for a notification when at least one task has waited for memory for `stalled` in total within a
    /// `window` of 0.5 to 10 seconds. `path` is `/proc/pressure/memory`, or a cgroup's `memory.pressure`.
    ///
    /// # Errors
    /// If this kernel does not report pressure, or privileges are missing.
    pub fn some(path: impl AsRef<Path>, stalled: Duration, window: Duration) -> Result<Self> {
        let path = path.as_ref();
        let open = || {
            let mut file = OpenOptions::new().read(true).write(true).open(path)?;
            // The kernel expects a terminating NUL.
            let wanted = format!("some {} {}\0", stalled.as_micros(), window.as_micros());
            file.write_all(wanted.as_bytes())?;
            std::io::Result::Ok(file)
        };
        let file = open().with_context(|| format!("failed to monitor {}", path.display()))?;
        Ok(Self { file })
    }
}

impl AsFd for Trigger {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_lines_are_read() {
        let text = "some avg10=12.50 avg60=3.25 avg300=0.10 total=123456\n\
                    full avg10=1.00 avg60=0.50 avg300=0.00 total=99\n";
        let pressure = Pressure::parse(text).expect("it is one");
        assert_eq!((pressure.some.avg10, pressure.some.avg60), (12.5, 3.25));
        assert_eq!((pressure.full.avg10, pressure.full.total_us), (1.0, 99));
        assert_eq!(Pressure::parse("some avg10=1 avg60=1 total=1\n"), None);
        assert_eq!(Pressure::parse(""), None);
    }
}
