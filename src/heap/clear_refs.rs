//! Clearing of the kernel's marks on all pages of a process, by /proc/PID/clear_refs (CONFIG_PROC_PAGE_MONITOR).

use std::fs::{self, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Error, Result};

use super::capture::{self, Crew, Until, WriteText};
use crate::host::capabilities::{self, Capability};
use crate::process::proc;

/// Kind of mark that the kernel has on a page.
#[derive(Debug, Clone, Copy)]
pub(super) enum PageMarks {
    /// A CPU has used the page (the Accessed bit).
    Used,
    /// The page was written (soft-dirty).
    Written,
}

impl PageMarks {
    /// Returns the number to write to clear_refs, and the word for marked pages in messages.
    fn words(self) -> (&'static str, &'static str) {
        match self {
            Self::Used => ("1", "used"),
            Self::Written => ("4", "written"),
        }
    }
}

/// Whether the kernel lacks /proc/PID/clear_refs.
pub(super) fn is_missing() -> bool {
    matches!(fs::exists("/proc/self/clear_refs"), Ok(false))
}

/// Time in which the marks of a process are cleared, unless others hold the lock of its address space. It takes some 16 ms
/// for each GB.
const PATIENCE: Duration = Duration::from_secs(10);

/// Clears the marks of all pages of a process.
///
/// # Errors
/// If the process has exited or does not answer, or if its marks may not be cleared.
pub(super) fn clear(pid: u32, marks: PageMarks) -> Result<()> {
    let (number, pages) = marks.words();
    let path = proc::file(pid, "clear_refs");
    let opened = OpenOptions::new().write(true).open(&path);
    let file = explained(pid, pages, opened)?;
    // The write waits for the lock of the address space.
    let mut crew = Crew::start()?;
    let job = Arc::new(WriteText::new(file.as_raw_fd(), number));
    let until = Until {
        patience: PATIENCE,
        ..Until::PROGRESS
    };
    match crew.run(job.clone(), until) {
        Ok(()) => explained(pid, pages, job.result()),
        Err(_) => Err(capture::no_answer(pid)),
    }
}

/// Explains an error of clearing a process's marks of `pages` pages.
fn explained<T>(pid: u32, pages: &str, cleared: io::Result<T>) -> Result<T> {
    cleared.map_err(|error| {
        let has_exited = matches!(error.raw_os_error(), Some(libc::ESRCH | libc::ENOENT));
        let what = if has_exited {
            format!("process {pid} has exited")
        } else {
            let remedy = capabilities::remedy(Capability::CAP_DAC_OVERRIDE);
            let path = proc::file(pid, "clear_refs");
            let path = path.display();
            format!("failed to clear the marks of {pages} pages in {path}{remedy}")
        };
        Error::from(error).context(what)
    })
}

/// Returns the file descriptor by which a process has its own clear_refs open; None if there is none. Such a process
/// may follow its own writes by the marks: the garbage collector of Boehm, Demers and Weiser does if so configured.
pub(super) fn open_in(pid: u32) -> Option<u32> {
    let mut files = proc::open_files(pid);
    let file = files.find(|(_, path)| path.ends_with("clear_refs"));
    file.map(|(number, _)| number)
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn who_has_the_file_open_is_known() {
        for (program, expected) in [
            ("exec 7>/proc/$$/clear_refs; echo; read _", Some(7)),
            ("exec 7>/dev/null; echo; read _", None),
        ] {
            let mut shell = Command::new("sh");
            let shell = shell.args(["-c", program]).stdin(Stdio::piped());
            let mut shell = shell.stdout(Stdio::piped()).spawn().expect("a shell");
            let mut line = [0];
            let stdout = shell.stdout.as_mut().expect("piped");
            stdout.read_exact(&mut line).expect("a line");
            assert_eq!(open_in(shell.id()), expected, "{program}");
            drop(shell.stdin.take());
            shell.wait().expect("its end");
        }
    }

    #[test]
    fn a_process_that_has_exited_is_told() {
        for marks in [PageMarks::Used, PageMarks::Written] {
            // Above the greatest PID that a process can have.
            let error = clear(8_388_608, marks).expect_err("no such process");
            assert_eq!(error.to_string(), "process 8388608 has exited");
            clear(std::process::id(), marks).expect("our own can be cleared");
        }
    }
}
