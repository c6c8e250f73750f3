//! Processes that are about to replace their own code by a copy, which the BPF programs have stopped
//! (`bpf/memleak/copies.bpf.h`).

use std::collections::HashSet;
use std::fs;
use std::os::unix::fs::MetadataExt;

use anyhow::Result;
use libbpf_rs::MapHandle;
use memtools::code::instruction::Code;
use memtools::process::code_copies;
use memtools::process::mapped_file::MappedFile;
use memtools::process::proc::{self, Mapping, Process};
use memtools::process::stopped::StoppedProcesses;

use super::object::Object;
use super::objects;
use super::probes::Attached;

/// What turns the copying of code off, by program.
const SWITCHES: &str = "PHP: opcache.huge_code_pages=0; node: without --use-largepages; ClickHouse: \
                        remap_executable: false; HHVM: hhvm.hot_text_huge_pages=0; iodlr: without liblppreload.so";

/// The stopped processes, and the code that is probed.
pub(super) struct CodeStops {
    stopped: StoppedProcesses,
}

impl CodeStops {
    pub(super) fn new(attached: &Attached) -> Result<Self> {
        let map = MapHandle::try_from(&attached.skel.maps.code_stops)?;
        Ok(Self {
            stopped: StoppedProcesses::listed_in(map)?,
        })
    }

    /// Resumes the processes that replace code without probes. Returns a message on another one, if there is one: all
    /// probes have to be removed then, and [`Self::restore`] has to be called.
    pub(super) fn look<'o>(&self, probed: impl Iterator<Item = &'o Object>) -> Option<String> {
        let listed = self.stopped.listed();
        if listed.is_empty() {
            return None;
        }
        let files = probed.filter_map(|object| object.file.identity().ok());
        let files: HashSet<(u64, u64)> = files.collect();
        let mut found = None;
        for (pid, code) in listed {
            match Process::open(pid) {
                Ok(process) if is_of(&process, code, &files) => {
                    found = Some(format!(
                        "process {pid} ({}) replaces its code by a copy, in which breakpoints would end it \
                         (SIGTRAP); to trace it, have it run its code where it is ({SWITCHES})",
                        process.comm()
                    ));
                }
                // A signal that arrived later would stop it for ever.
                Ok(process) => {
                    StoppedProcesses::wait_for_stop(&process);
                    self.stopped.resume(pid);
                }
                Err(_) => self.stopped.resume(pid),
            }
        }
        found
    }

    /// Restores the code that stopped processes have copied, and resumes them. The probes have been removed.
    pub(super) fn restore<'o>(&self, probed: impl Iterator<Item = &'o Object>) {
        let code: Vec<Code> = probed.flat_map(Object::code).collect();
        for (pid, _) in self.stopped.listed() {
            if let Ok(process) = Process::open(pid) {
                StoppedProcesses::wait_for_stop(&process);
                if let Err(error) = code_copies::restore(&process, &code) {
                    memtools::message!(
                        "failed to remove breakpoints from a copy of the code of process {pid}, which will \
                         end by SIGTRAP: {error:#}"
                    );
                }
            }
            self.stopped.resume(pid);
        }
    }
}

/// Prints that a process runs a copy of its program's code. The copy was made before there were probes, and has none.
pub(super) fn warn_if_copied(process: &Process) {
    let pid = process.pid();
    let Ok(program) = fs::metadata(proc::file(pid, "exe")) else {
        return;
    };
    if runs_copy(&process.mappings().unwrap_or_default(), program.ino()) {
        objects::warn_once(&format!(
            "process {pid} ({}) runs a copy of its code, in which nothing is traced; to trace it, have it run its code \
             where it is ({SWITCHES})",
            process.comm()
        ));
    }
}

/// Whether memory of no file on a disk, in these mappings, has code next to those of the program, of this inode.
fn runs_copy(mappings: &[Mapping], program: u64) -> bool {
    let is_copy = |mapping: &Mapping| mapping.executable && mapping.is_of_no_file();
    mappings.windows(2).any(|two| {
        let [below, above] = two else { return false };
        below.range.end == above.range.start
            && (below.inode == program && is_copy(above)
                || above.inode == program && is_copy(below))
    })
}

/// Whether the code at an address belongs to one of these files, by device and inode. If that cannot be known, it is
/// assumed.
fn is_of(process: &Process, code: u64, files: &HashSet<(u64, u64)>) -> bool {
    let mappings = process.mappings().unwrap_or_default();
    let Some(mapping) = mappings
        .iter()
        .find(|mapping| mapping.range.contains(&code))
    else {
        return true;
    };
    let identity = MappedFile::open(process.pid(), mapping).and_then(|file| file.identity());
    identity.map_or(true, |identity| files.contains(&identity))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_is_next_to_the_program() {
        let mapping = |range, executable, inode| Mapping {
            range,
            executable,
            file_offset: 0,
            device: (0, 0),
            inode,
            path: "".into(),
        };
        let header = mapping(0x1000..0x2000, false, 7);
        let code = mapping(0x2000..0x3000, true, 7);
        let copy = mapping(0x2000..0x3000, true, 0);
        let data = mapping(0x3000..0x4000, false, 7);
        let bss = mapping(0x4000..0x5000, false, 0);
        let generated = mapping(0x8000..0x9000, true, 0);
        let rest = [data, bss, generated];
        let with = |code: &Mapping| [&[header.clone(), code.clone()][..], &rest].concat();
        assert!(runs_copy(&with(&copy), 7));
        assert!(!runs_copy(&with(&code), 7));
    }
}
