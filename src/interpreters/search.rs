//! Search for the interpreter of a process in the files that it maps as code. Each file is read once for all kinds of
//! interpreters.

use std::collections::HashMap;

use anyhow::Result;

use crate::code::elf::{self, InterpreterHints};
use crate::process::mapped_file::MappedFile;
use crate::process::proc::{FileId, Mapping, Process};

/// Number of files for which the cache keeps which interpreters they may hold.
const FILES: usize = 4096;

/// Result of a search for an interpreter.
#[derive(Debug)]
pub(super) enum Located<T> {
    Found(Box<T>),
    /// The process has no interpreter, or none that is initialized yet.
    None,
    /// The process has an interpreter whose frames cannot be walked, for this reason.
    Unsupported(String),
}

/// Result of looking at one file.
pub(super) enum Inspection<T> {
    /// The file holds the wanted interpreter.
    Holds(Located<T>),
    /// The file has to be looked at again later: the dynamic linker has not relocated it yet.
    NotRelocated,
    /// The file only uses the interpreter and does not hold it.
    OnlyUses,
}

/// Cache of which interpreters the files of all processes may hold.
#[derive(Debug, Default)]
pub(crate) struct Files(HashMap<FileId, InterpreterHints>);

impl Files {
    /// Calls `look` for each file of a process that may hold what is wanted, in the order of addresses, until one
    /// file does.
    ///
    /// # Errors
    /// If the process cannot be read, or has exited, or `look` fails.
    pub(super) fn locate<T>(
        &mut self,
        pid: u32,
        wanted: impl Fn(InterpreterHints) -> bool,
        mut look: impl FnMut(MappedFile, &Mapping, &[Mapping]) -> Result<Inspection<T>>,
    ) -> Result<Located<T>> {
        let mappings = Process::open(pid)?.mappings()?;
        if self.0.len() > FILES {
            self.0.clear();
        }
        let code = mappings
            .iter()
            .filter(|mapping| mapping.executable && mapping.inode != 0);
        for mapping in code {
            let id = mapping.file_id();
            let known = self.0.get(&id).copied();
            if known.is_some_and(|known| !wanted(known)) {
                continue;
            }
            let Ok(file) = MappedFile::open(pid, mapping) else {
                continue;
            };
            let may_hold = known.unwrap_or_else(|| elf::may_hold(file.file()));
            self.0.insert(id, may_hold);
            if !wanted(may_hold) {
                continue;
            }
            match look(file, mapping, &mappings)? {
                Inspection::Holds(located) => return Ok(located),
                Inspection::NotRelocated => {}
                Inspection::OnlyUses => {
                    self.0.insert(id, InterpreterHints::default());
                }
            }
        }
        Ok(Located::None)
    }
}

#[cfg(test)]
impl Files {
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// Programs that the tests of searches run.
#[cfg(test)]
pub(super) mod tests {
    use std::io::{BufRead, BufReader};
    use std::process::{Child, Command, Stdio};

    /// Returns whether a program that not every machine has is missing, and prints the name of the test that cannot run
    /// without it. In CI, nothing may be missing.
    #[expect(clippy::print_stderr, reason = "a test that does not run says so")]
    pub(in crate::interpreters) fn is_missing(program: &str) -> bool {
        let mut version = Command::new(program);
        let version = version.arg("--version").stdout(Stdio::null());
        let runs = version.stderr(Stdio::null()).status();
        if runs.is_ok_and(|status| status.success()) || std::env::var_os("CI").is_some() {
            return false;
        }
        let test = std::thread::current().name().unwrap_or("a test").to_owned();
        eprintln!("not run: {test}: {program} is not installed");
        true
    }

    /// A child process that has printed a line, and that is killed when the value is dropped.
    pub(in crate::interpreters) struct Running(Child);

    impl Running {
        pub(in crate::interpreters) fn start(command: &mut Command) -> Self {
            let child = command.stdout(Stdio::piped()).stdin(Stdio::piped()).spawn();
            let mut child = child.expect("a program of the machine");
            let mut line = String::new();
            let stdout = child.stdout.as_mut().expect("piped");
            BufReader::new(stdout).read_line(&mut line).expect("a line");
            Self(child)
        }

        /// Starts a shell, which has none of the interpreters.
        pub(in crate::interpreters) fn shell() -> Self {
            Self::start(Command::new("sh").args(["-c", "echo ready; read _"]))
        }

        pub(in crate::interpreters) fn pid(&self) -> u32 {
            self.0.id()
        }
    }

    impl Drop for Running {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }
}
