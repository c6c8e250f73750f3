//! Processes whose Java frames the BPF side walks.

use anyhow::Result;
use libbpf_rs::MapHandle;

use super::arch;
use super::code_heaps;
use super::machine::Machine;
use super::names::JavaNames;
use super::vm_structs::VmStructs;
use crate::bpf::attach;
use crate::bpf::types;
use crate::code::elf_file::Elf;
use crate::interpreters::memory::{self, Memory};
use crate::interpreters::registry::Registry;
use crate::interpreters::search::{Files, Inspection, Located};
use crate::process::mapped_file::MappedFile;
use crate::process::proc::Mapping;

/// Finder of HotSpot, which keeps the BPF side up to date.
pub(crate) struct Hotspots {
    told: Registry,
    names: JavaNames,
}

impl Hotspots {
    /// Creates the finder after load; `processes` is the skeleton's map `hotspot_processes`. If `ask` is true, perf
    /// maps are requested from the virtual machines that are found.
    pub(crate) fn new(processes: MapHandle, ask: bool) -> Self {
        Self {
            told: Registry::new(processes),
            names: JavaNames::new(ask),
        }
    }

    /// Returns the names of functions in the virtual machines that are found.
    pub(crate) fn names(&self) -> JavaNames {
        self.names.clone()
    }

    /// Looks for the HotSpot of a process. `layout` is the layout that the BPF side has asked about. Returns whether
    /// the HotSpot is found.
    pub(crate) fn look_at(&mut self, pid: u32, layout: Option<u64>, files: &mut Files) -> bool {
        match self.try_to(pid, layout, files) {
            Ok(found) => found,
            Err(error) => {
                // Most likely the process has exited. Otherwise its stacks are like those of other generated code.
                attach::log_verbose(format_args!("no Java frames of process {pid}: {error:#}"));
                false
            }
        }
    }

    /// Looks for the HotSpot of a process that is stopped because it has mapped code, unless the HotSpot is already
    /// known.
    pub(crate) fn look_at_stopped(&mut self, pid: u32, files: &mut Files) {
        if !self.told.contains(pid) {
            self.look_at(pid, None, files);
        }
    }

    fn try_to(&mut self, pid: u32, asked: Option<u64>, files: &mut Files) -> Result<bool> {
        let Some(layout) = self.told.layout(pid, asked)? else {
            return Ok(false);
        };
        let machine = match locate(pid, files)? {
            Located::Found(machine) => machine,
            Located::None => return Ok(false),
            Located::Unsupported(why) => {
                self.told.warn_once(why, |why| {
                    format!(
                        "process {pid} runs a HotSpot {why}: its stacks end in the first Java function"
                    )
                });
                return Ok(false);
            }
        };
        let told = self
            .told
            .register(pid, layout, types::bytes_of(&machine.process))?;
        if told {
            self.names.add(pid, *machine);
        }
        Ok(told)
    }
}

/// Looks for the virtual machine of a process.
fn locate(pid: u32, files: &mut Files) -> Result<Located<Machine>> {
    files.locate(
        pid,
        |may_hold| may_hold.hotspot,
        |file, mapping, _| {
            if let Some(why) = arch::UNSUPPORTED {
                return Ok(Inspection::Holds(Located::Unsupported(why.to_owned())));
            }
            let Some((memory, structs)) = structs(pid, mapping, &file)? else {
                return Ok(Inspection::NotRelocated);
            };
            Ok(Inspection::Holds(
                match code_heaps::find(&memory, &structs) {
                    Ok(Some(process)) => Located::Found(Box::new(Machine {
                        memory,
                        structs,
                        process,
                    })),
                    Ok(None) => Located::None,
                    Err(why) => Located::Unsupported(format!("{why:#}")),
                },
            ))
        },
    )
}

/// Reads the layout of the classes of the library in this file. None if the library is not relocated yet.
fn structs(pid: u32, mapping: &Mapping, file: &MappedFile) -> Result<Option<(Memory, VmStructs)>> {
    let elf = Elf::read(file.file())?.require_64_bit()?;
    let Some(bias) = memory::bias(&elf, mapping) else {
        return Ok(None);
    };
    let memory = Memory::open(pid)?;
    let structs = VmStructs::read(&memory, &elf, bias)?;
    Ok(structs.map(|structs| (memory, structs)))
}

#[cfg(test)]
pub(in crate::interpreters) mod tests {
    use std::fs;
    use std::process::Command;

    use super::*;
    use crate::interpreters::search::tests::{Running, is_missing};

    /// Finds the virtual machine of a process, which must have one.
    pub(in crate::interpreters) fn machine(pid: u32, files: &mut Files) -> Machine {
        match locate(pid, files).expect("a process of ours") {
            Located::Found(machine) => *machine,
            _ => panic!("no virtual machine"),
        }
    }

    #[test]
    fn the_code_of_a_virtual_machine_is_found() {
        if is_missing("java") {
            return;
        }
        let folder = tempfile::tempdir().expect("a directory");
        let source = folder.path().join("Ready.java");
        let program = "class Ready { public static void main(String[] a) throws Exception {\n\
                       System.out.println(\"ready\"); System.in.read(); } }";
        fs::write(&source, program).expect("room");
        for (options, heaps) in [
            (&["-XX:+SegmentedCodeCache"][..], 3),
            (&["-XX:-SegmentedCodeCache", "-Xint"], 1),
        ] {
            let java = Running::start(Command::new("java").args(options).arg(&source));
            let found = machine(java.pid(), &mut Files::default()).process;
            let used = found.heaps.iter().filter(|heap| heap.start != 0).count();
            assert_eq!(used, heaps, "{found:?}");
            assert!(found.interpreter < found.interpreter_end, "{found:?}");
        }
    }

    #[test]
    fn a_process_without_a_virtual_machine_has_none() {
        let other = Running::shell();
        let mut files = Files::default();
        let found = locate(other.pid(), &mut files).expect("a process of ours");
        assert!(matches!(found, Located::None));
        assert!(!files.is_empty());
    }
}
