//! The search for the interpreter of a process, among the files that it executes. A file is read once
//! for all interpreters.

use std::collections::HashMap;

use anyhow::Result;

use crate::code::elf::{self, MayHold};
use crate::process::mapped_file::MappedFile;
use crate::process::proc::{FileId, Mapping, Process};

/// Files of which it is remembered what they may hold.
const FILES: usize = 4096;

/// What became of a search.
#[derive(Debug)]
pub(super) enum Located<T> {
    Found(Box<T>),
    /// The process has none, or none that has begun.
    None,
    /// The process has one whose frames cannot be walked, for this reason.
    Unknown(String),
}

/// What a file turned out to be.
pub(super) enum Seen<T> {
    /// The one that is looked for.
    It(Located<T>),
    /// One that is to be looked at again: the dynamic linker has not been there yet.
    NotYet,
    /// Another one, which only uses what it was taken for.
    No,
}

/// The files of all processes that were looked at.
#[derive(Debug, Default)]
pub(crate) struct Files(HashMap<FileId, MayHold>);

impl Files {
    /// Looks, in the order of their addresses, at the files of a process that may hold what is wanted, until
    /// one does.
    ///
    /// # Errors
    /// If the process cannot be read, or has exited, or `look` fails.
    pub(super) fn locate<T>(
        &mut self,
        pid: u32,
        wanted: impl Fn(MayHold) -> bool,
        mut look: impl FnMut(MappedFile, &Mapping, &[Mapping]) -> Result<Seen<T>>,
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
                Seen::It(located) => return Ok(located),
                Seen::NotYet => {}
                Seen::No => {
                    self.0.insert(id, MayHold::default());
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

/// Programs for the tests of searches.
#[cfg(test)]
pub(super) mod tests {
    use std::io::{BufRead, BufReader};
    use std::process::{Child, Command, Stdio};

    /// A process that is killed with the value, and has printed a line.
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

        /// A shell, which has no interpreter that is looked for.
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
