//! Names for the frames of stacks: of the kernel, of a process, of a process that has exited.
//!
//! The mappings of each process of interest are remembered, with their files held open, from the
//! moment that it is followed: its /proc is gone once it has exited. Names come from `.symtab` and
//! `.dynsym` (blazesym), and for generated code from perf maps. An address that no symbol covers
//! gets none: a wrong name is worse than `libfoo.so+0x1234`. The kernel names its own functions
//! ([`crate::kallsyms`]).

use std::collections::HashMap;
use std::fmt;
use std::fs::{self, File};
use std::os::fd::AsRawFd;
use std::rc::Rc;

use anyhow::Result;
use blazesym::symbolize::source::{Elf, Source};
use blazesym::symbolize::{Input, Symbolized, Symbolizer as Blazesym};

use crate::kallsyms::Kallsyms;
use crate::mappings::{Change, MappingLog};
use crate::perf_map::PerfMap;
use crate::process::{FileId, MappedFile, Mapping, Process};
use crate::stack::{Place, Side, Stack};
use crate::text;

/// A code address, with what is known of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Frame {
    /// Absolute address, in the process or in the kernel.
    pub address: u64,
    /// The function, demangled and escaped, and the address's offset from its start.
    pub symbol: Option<(String, u64)>,
    /// File name without folders, or a name such as `[vdso]`, and the offset in the file; for the
    /// kernel's code `kernel` or the kernel module, and the address.
    pub module: Option<(String, u64)>,
    /// Whether it is the kernel's.
    pub kernel: bool,
}

/// `malloc+0x1d [libc.so.6]`, as BCC prints it; `libfoo.so+0x1234 [libfoo.so]` without a symbol.
impl fmt::Display for Frame {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.symbol, &self.module) {
            (Some((name, offset)), Some((module, _))) => write!(f, "{name}+{offset:#x} [{module}]"),
            (Some((name, offset)), None) => write!(f, "{name}+{offset:#x}"),
            (None, Some((module, offset))) => write!(f, "{module}+{offset:#x} [{module}]"),
            (None, None) => f.write_str("[unknown]"),
        }
    }
}

/// What a process can execute.
#[derive(Debug, Default)]
struct AddressSpace {
    /// In the order in which they were made; a later one covers an earlier one.
    mappings: Vec<(Mapping, Option<Rc<MappedFile>>)>,
    perf_map: Option<PerfMap>,
}

/// Names addresses of the processes that it follows.
pub struct Symbolizer {
    log: MappingLog,
    blazesym: Blazesym,
    processes: HashMap<u32, AddressSpace>,
    files: HashMap<FileId, Rc<MappedFile>>,
    /// By file and offset in it: what blazesym answered.
    names: HashMap<(FileId, u64), Option<(String, u64)>>,
    /// Read when the first kernel frame is named.
    kernel: Option<Kallsyms>,
}

impl Symbolizer {
    /// Starts listening for new mappings, of all processes.
    pub fn new() -> Result<Self> {
        let blazesym = Blazesym::builder()
            .enable_auto_reload(false)
            .enable_code_info(false)
            .enable_inlined_fns(false)
            .build();
        Ok(Self {
            log: MappingLog::start()?,
            blazesym,
            processes: HashMap::new(),
            files: HashMap::new(),
            names: HashMap::new(),
            kernel: None,
        })
    }

    /// Remembers what a running process has mapped, and from now on what it maps.
    pub fn follow(&mut self, process: &Process) -> Result<()> {
        self.follow_new(process.pid());
        for mapping in process
            .mappings()?
            .into_iter()
            .filter(|mapping| mapping.executable)
        {
            self.map(process.pid(), mapping);
        }
        Ok(())
    }

    /// The same for a process that is about to call exec.
    pub fn follow_new(&mut self, pid: u32) {
        self.processes.entry(pid).or_default();
    }

    /// Takes note of new mappings and of newly generated code. Call it before a report, and as
    /// soon as a process has exited.
    pub fn refresh(&mut self) {
        for change in self.log.drain() {
            match change {
                Change::Mapped(pid, mapping) if self.processes.contains_key(&pid) => {
                    self.map(pid, mapping);
                }
                Change::Exec(pid) => {
                    if let Some(space) = self.processes.get_mut(&pid) {
                        *space = AddressSpace::default();
                    }
                }
                Change::Mapped(..) => {}
            }
        }
        for (&pid, space) in &mut self.processes {
            let generates_code = space.mappings.iter().any(|(mapping, _)| mapping.inode == 0);
            if generates_code && let Some(map) = read_perf_map(pid) {
                space.perf_map = Some(map);
            }
        }
    }

    fn map(&mut self, pid: u32, mapping: Mapping) {
        let Some(space) = self.processes.get_mut(&pid) else {
            return;
        };
        let file = (mapping.inode != 0).then(|| {
            let known = self.files.get(&mapping.file_id()).cloned();
            known.or_else(|| MappedFile::open(pid, &mapping).ok().map(Rc::new))
        });
        let file = file.flatten();
        if let Some(file) = &file {
            self.files
                .entry(mapping.file_id())
                .or_insert_with(|| Rc::clone(file));
        }
        space.mappings.push((mapping, file));
    }

    /// The stack's frames with their names, innermost first. `pid` is the process that a user
    /// stack is of.
    pub fn name(&mut self, pid: u32, stack: &Stack) -> Vec<Frame> {
        let places = stack.places.iter();
        match stack.side {
            Side::User => places.map(|&place| self.user_frame(pid, place)).collect(),
            Side::Kernel => places.map(|&place| self.kernel_frame(place)).collect(),
        }
    }

    fn user_frame(&mut self, pid: u32, place: Place) -> Frame {
        let (address, instruction) = (place.address(), place.instruction());
        let unknown = Frame {
            address,
            symbol: None,
            module: None,
            kernel: false,
        };
        let Some(space) = self.processes.get(&pid) else {
            return unknown;
        };
        let Some((mapping, file)) = space
            .mappings
            .iter()
            .rev()
            .find(|(mapping, _)| mapping.range.contains(&instruction))
        else {
            return unknown;
        };
        let symbol = match (file, &space.perf_map) {
            (Some(file), _) => {
                let offset = instruction - mapping.range.start + mapping.file_offset;
                let blazesym = &self.blazesym;
                self.names
                    .entry((mapping.file_id(), offset))
                    .or_insert_with(|| name_in_file(blazesym, &file.file, offset))
                    .clone()
            }
            (None, Some(map)) if mapping.inode == 0 => map
                .find(instruction)
                .map(|(name, offset)| (text::escape(name).into_owned(), offset)),
            _ => None,
        };
        let module = mapping.module();
        let offset = address - mapping.range.start + mapping.file_offset;
        Frame {
            // Offsets are the return address's own, as all peers print them.
            symbol: symbol.map(|(name, offset)| (name, offset + (address - instruction))),
            module: (!module.is_empty()).then_some((module, offset)),
            ..unknown
        }
    }

    fn kernel_frame(&mut self, place: Place) -> Frame {
        let (address, instruction) = (place.address(), place.instruction());
        let found = self
            .kernel
            .get_or_insert_with(read_kallsyms)
            .find(instruction);
        let module = found.map_or("kernel", |(_, _, module)| module);
        Frame {
            address,
            symbol: found
                .map(|(name, offset, _)| (name.to_owned(), offset + (address - instruction))),
            module: Some((module.to_owned(), address)),
            kernel: true,
        }
    }
}

/// The kernel's names, or none, after saying so once.
fn read_kallsyms() -> Kallsyms {
    let symbols = Kallsyms::read().unwrap_or_else(|error| {
        eprintln!("no names for kernel frames: failed to read /proc/kallsyms: {error}");
        Kallsyms::default()
    });
    if symbols.hidden() {
        eprintln!(
            "no names for kernel frames: the kernel hides its addresses; to see them: \
             sysctl kernel.kptr_restrict=1"
        );
    }
    symbols
}

fn name_in_file(blazesym: &Blazesym, file: &File, offset: u64) -> Option<(String, u64)> {
    // The file is held open, so its descriptor names it for as long as we run.
    let mut elf = Elf::new(format!("/proc/self/fd/{}", file.as_raw_fd()));
    elf.debug_syms = false;
    match blazesym.symbolize_single(&Source::Elf(elf), Input::FileOffset(offset)) {
        Ok(Symbolized::Sym(symbol)) if symbol.offset < symbol.size.unwrap_or(0) => Some((
            text::escape(&symbol.name).into_owned(),
            symbol.offset as u64,
        )),
        _ => None,
    }
}

/// The process's own perf map, by the number that it knows itself by.
fn read_perf_map(pid: u32) -> Option<PerfMap> {
    let own_pid = Process::open(pid).ok()?.pid_in_its_namespace();
    let text = fs::read(format!("/proc/{pid}/root/tmp/perf-{own_pid}.map")).ok()?;
    Some(PerfMap::parse(&String::from_utf8_lossy(&text)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(symbol: Option<&str>, module: Option<&str>) -> String {
        Frame {
            address: 0x1234,
            symbol: symbol.map(|name| (name.to_owned(), 0x1d)),
            module: module.map(|name| (name.to_owned(), 0x34)),
            kernel: false,
        }
        .to_string()
    }

    #[test]
    fn frames_print_as_bcc_prints_them() {
        assert_eq!(frame(Some("f"), Some("libf.so")), "f+0x1d [libf.so]");
        assert_eq!(frame(Some("jit"), None), "jit+0x1d");
        assert_eq!(frame(None, Some("libf.so")), "libf.so+0x34 [libf.so]");
        assert_eq!(frame(None, None), "[unknown]");
    }
}
