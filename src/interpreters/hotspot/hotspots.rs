//! The processes whose frames of Java the kernel half is to walk.

use std::collections::HashSet;

use anyhow::{Context, Result};
use libbpf_rs::{MapCore, MapFlags, MapHandle};

use super::code_heaps;
use super::names::{JavaNames, Machine};
use super::vm_structs::VmStructs;
use crate::bpf::attach;
use crate::bpf::types;
use crate::code::elf;
use crate::code::elf_file::Elf;
use crate::interpreters::memory::{self, Memory};
use crate::process::mapped_file::MappedFile;
use crate::process::proc::{FileId, Mapping, Process};

/// Files that are no virtual machine and are remembered.
const OTHERS: usize = 4096;
/// Reasons that are said; those of one more process are like one before.
const REASONS: usize = 16;

/// What the kernel half knows of HotSpot, kept up to date.
pub(crate) struct Hotspots {
    /// The skeleton's map `hotspot_processes`.
    processes: MapHandle,
    /// Files that are no virtual machine.
    others: HashSet<FileId>,
    said: HashSet<String>,
    names: JavaNames,
}

impl Hotspots {
    /// After load.
    pub(crate) fn new(processes: MapHandle) -> Self {
        Self {
            processes,
            others: HashSet::new(),
            said: HashSet::new(),
            names: JavaNames::default(),
        }
    }

    /// What names the functions of those that are found.
    pub(crate) fn names(&self) -> JavaNames {
        self.names.clone()
    }

    /// Looks for the HotSpot of a process. `layout` is what the kernel half has asked about. Returns
    /// whether it is found.
    pub(crate) fn look_at(&mut self, pid: u32, layout: Option<u64>) -> bool {
        match self.try_to(pid, layout) {
            Ok(found) => found,
            Err(error) => {
                // Most likely the process is gone; else its stacks are as those of other generated code.
                attach::verbose(format_args!("no Java frames of process {pid}: {error:#}"));
                false
            }
        }
    }

    /// Looks for the HotSpot of a process that is stopped because it has mapped code, unless it was found.
    pub(crate) fn look_at_stopped(&mut self, pid: u32) {
        let found = |layout: u64| {
            let known = self.processes.lookup(&layout.to_ne_bytes(), MapFlags::ANY);
            known.is_ok_and(|known| known.is_some())
        };
        if !memory::layout(pid).is_ok_and(found) {
            self.look_at(pid, None);
        }
    }

    fn try_to(&mut self, pid: u32, asked: Option<u64>) -> Result<bool> {
        let layout = memory::layout(pid)?;
        if asked.is_some_and(|asked| asked != layout) {
            return Ok(false);
        }
        if self.others.len() > OTHERS {
            self.others.clear();
        }
        let machine = match locate(pid, &mut self.others)? {
            Located::Found(machine) => machine,
            Located::None => return Ok(false),
            Located::Unknown(why) => {
                self.say(pid, why);
                return Ok(false);
            }
        };
        // It has called exec meanwhile.
        if memory::layout(pid)? != layout {
            return Ok(false);
        }
        let value = types::bytes_of(&machine.process);
        self.processes
            .update(&layout.to_ne_bytes(), value, MapFlags::ANY)
            .context("failed to tell where a process has its Java code")?;
        self.names.add(pid, *machine);
        Ok(true)
    }

    /// Says once why the frames of such a virtual machine are not walked.
    fn say(&mut self, pid: u32, why: String) {
        if self.said.len() < REASONS && !self.said.contains(&why) {
            eprintln!(
                "process {pid} runs a HotSpot {why}: its stacks end in the first function of Java"
            );
            self.said.insert(why);
        }
    }
}

/// What became of a search.
enum Located {
    Found(Box<Machine>),
    /// The process has none, or none that has begun.
    None,
    /// The process has one whose frames cannot be walked, for this reason.
    Unknown(String),
}

/// Looks for the virtual machine of a process, in files other than `others`, to which those that hold none are
/// added.
fn locate(pid: u32, others: &mut HashSet<FileId>) -> Result<Located> {
    let mappings = Process::open(pid)?.mappings()?;
    let code = mappings
        .iter()
        .filter(|mapping| mapping.executable && mapping.inode != 0);
    for mapping in code {
        if others.contains(&mapping.file_id()) {
            continue;
        }
        let Ok(file) = MappedFile::open(pid, mapping) else {
            continue;
        };
        if !elf::is_hotspot(file.file()) {
            others.insert(mapping.file_id());
        } else if let Some((memory, structs)) = structs(pid, mapping, &file)? {
            return Ok(match code_heaps::find(&memory, &structs) {
                Ok(Some(process)) => Located::Found(Box::new(Machine {
                    memory,
                    structs,
                    process,
                })),
                Ok(None) => Located::None,
                Err(why) => Located::Unknown(format!("{why:#}")),
            });
        }
    }
    Ok(Located::None)
}

/// What the library in this file tells of its classes, if it is linked in.
fn structs(pid: u32, mapping: &Mapping, file: &MappedFile) -> Result<Option<(Memory, VmStructs)>> {
    let elf = Elf::read(file.file())?.expect_64_bit()?;
    let Some(bias) = memory::bias(&elf, mapping) else {
        return Ok(None);
    };
    let memory = Memory::open(pid)?;
    let structs = VmStructs::read(&memory, &elf, bias)?;
    Ok(structs.map(|structs| (memory, structs)))
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::{BufRead, BufReader};
    use std::process::{Child, Command, Stdio};

    use super::*;

    /// A process that is killed with the value, and has printed a line.
    struct Running(Child);

    impl Running {
        fn start(command: &mut Command) -> Self {
            let child = command.stdout(Stdio::piped()).stdin(Stdio::piped()).spawn();
            let mut child = child.expect("a program of the machine");
            let mut line = String::new();
            let stdout = child.stdout.as_mut().expect("piped");
            BufReader::new(stdout).read_line(&mut line).expect("a line");
            Self(child)
        }
    }

    impl Drop for Running {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    #[test]
    fn the_code_of_a_virtual_machine_is_found() {
        let folder = tempfile::tempdir().expect("a folder");
        let source = folder.path().join("Ready.java");
        let program = "class Ready { public static void main(String[] a) throws Exception {\n\
                       System.out.println(\"ready\"); System.in.read(); } }";
        fs::write(&source, program).expect("room");
        for (options, heaps) in [
            (&["-XX:+SegmentedCodeCache"][..], 3),
            (&["-XX:-SegmentedCodeCache", "-Xint"], 1),
        ] {
            let java = Running::start(Command::new("java").args(options).arg(&source));
            let found = locate(java.0.id(), &mut HashSet::new()).expect("a process of ours");
            let Located::Found(found) = found else {
                panic!("no virtual machine");
            };
            let found = found.process;
            let used = found.heaps.iter().filter(|heap| heap.start != 0).count();
            assert_eq!(used, heaps, "{found:?}");
            assert!(found.interpreter < found.interpreter_end, "{found:?}");
        }
    }

    #[test]
    fn a_process_without_a_virtual_machine_has_none() {
        let other = Running::start(Command::new("sh").args(["-c", "echo ready; read _"]));
        let mut others = HashSet::new();
        let found = locate(other.0.id(), &mut others).expect("a process of ours");
        assert!(matches!(found, Located::None));
        assert!(!others.is_empty());
    }
}
