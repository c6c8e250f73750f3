//! Names for the frames of stacks: of the kernel, of a process, of a process that has exited.
//!
//! The images of processes are remembered ([`crate::address_space`]): /proc/PID is gone once the
//! process has exited. Names come from `.symtab` and `.dynsym` (blazesym), and for generated code
//! from perf maps. An address that no symbol covers gets none: a wrong name is worse than
//! `libfoo.so+0x1234`. The kernel names its own functions ([`crate::kallsyms`]).

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::fs::{self, File};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::rc::Rc;

use anyhow::{Context, Result};
use blazesym::symbolize::source::{Elf, Source};
use blazesym::symbolize::{Input, Symbolized, Symbolizer as Blazesym};
use serde::ser::{Serialize, SerializeStruct, Serializer};

use crate::address_space::{AddressSpaces, CodeFile, Image, Wanted};
use crate::folded::Part;
use crate::kallsyms::Kallsyms;
use crate::mappings::MappingLog;
use crate::perf_map::PerfMap;
use crate::process::Process;
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

/// `{"address":"0x401136","symbol":"main","offset":109,"module":"allocs","module_offset":4406}`.
impl Serialize for Frame {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let symbol = self.symbol.as_ref();
        let module = self.module.as_ref();
        let mut frame = serializer.serialize_struct("Frame", 5)?;
        frame.serialize_field("address", &format_args!("{:#x}", self.address))?;
        frame.serialize_field("symbol", &symbol.map(|(name, _)| name))?;
        frame.serialize_field("offset", &symbol.map(|(_, offset)| offset))?;
        frame.serialize_field("module", &module.map(|(name, _)| name))?;
        frame.serialize_field("module_offset", &module.map(|(_, offset)| offset))?;
        frame.end()
    }
}

/// The frames without the innermost ones that are our own tracing: the BPF program, and what calls
/// it at a tracepoint or at a function's entry.
pub fn without_tracer(frames: &[Frame]) -> &[Frame] {
    const TRACER: [&str; 5] = [
        "bpf_prog_",
        "bpf_trace_run",
        "__bpf_trace_",
        "__traceiter_",
        "bpf_trampoline_",
    ];
    let ours = |frame: &Frame| {
        let name = frame.symbol.as_ref().map_or("", |(name, _)| name);
        frame.kernel && TRACER.iter().any(|prefix| name.starts_with(prefix))
    };
    let first = frames.iter().position(|frame| !ours(frame));
    &frames[first.unwrap_or(frames.len())..]
}

/// Names the frames of stacks.
pub struct Symbolizer {
    log: MappingLog,
    spaces: AddressSpaces,
    blazesym: Blazesym,
    /// By number of the file and offset in it: what blazesym answered.
    names: HashMap<(u32, u64), Option<(String, u64)>>,
    /// By process.
    perf_maps: HashMap<u32, PerfMap>,
    /// The processes whose perf maps were read since the last refresh.
    perf_maps_read: HashSet<u32>,
    kernel: KernelNames,
}

/// Names the frames of the kernel's stacks, which is all that a tool without user stacks needs.
#[derive(Debug, Default)]
pub struct KernelNames {
    /// Read when the first frame is named.
    symbols: Option<Kallsyms>,
}

impl KernelNames {
    /// The stack's frames with their names, innermost first.
    pub fn name(&mut self, stack: &Stack) -> Vec<Frame> {
        let places = stack.places.iter();
        places.map(|&place| self.frame(place)).collect()
    }

    fn frame(&mut self, place: Place) -> Frame {
        let (address, instruction) = (place.address(), place.instruction());
        let symbols = self.symbols.get_or_insert_with(read_kallsyms);
        let found = symbols.find(instruction);
        let beyond = address - instruction;
        let module = found.map_or("kernel", |(_, _, module)| module);
        Frame {
            address,
            symbol: found.map(|(name, offset, _)| (name.to_owned(), offset + beyond)),
            module: Some((module.to_owned(), address)),
            kernel: true,
        }
    }
}

impl Symbolizer {
    /// For processes that are yet to be named, by [`Symbolizer::follow`].
    pub fn new() -> Result<Self> {
        Self::with(AddressSpaces::of(Wanted::Chosen))
    }

    /// For processes that are yet to be named, and what these start.
    pub fn of_descendants() -> Result<Self> {
        Self::with(AddressSpaces::of(Wanted::Descendants))
    }

    /// For all processes: those that will start, and those that run when
    /// [`Symbolizer::look_around`] is called.
    pub fn of_all_processes() -> Result<Self> {
        Self::with(AddressSpaces::of(Wanted::All))
    }

    fn with(spaces: AddressSpaces) -> Result<Self> {
        let blazesym = Blazesym::builder()
            .enable_auto_reload(false)
            .enable_code_info(false)
            .enable_inlined_fns(false)
            .build();
        Ok(Self {
            log: MappingLog::start()?,
            spaces,
            blazesym,
            names: HashMap::new(),
            perf_maps: HashMap::new(),
            perf_maps_read: HashSet::new(),
            kernel: KernelNames::default(),
        })
    }

    /// Remembers what a running process has mapped, and from now on what it maps.
    pub fn follow(&mut self, process: &Process) -> Result<()> {
        self.follow_new(process.pid());
        self.spaces.look_at(process)
    }

    /// The same for a process that is about to call exec.
    pub fn follow_new(&mut self, pid: u32) {
        self.spaces.choose(pid);
    }

    /// Remembers what all running processes have mapped. It takes some milliseconds, so call it
    /// when the probes are live.
    pub fn look_around(&mut self) {
        self.spaces.look_at_all();
    }

    /// What [`crate::poll::Poller::watch_mappings`] waits for.
    pub fn descriptor(&self) -> Result<OwnedFd> {
        let log = self.log.as_fd().try_clone_to_owned();
        log.context("failed to watch the log of mappings")
    }

    /// Takes note of new mappings and of newly generated code. Call it when the poller says that
    /// there are mappings, before a report, and as soon as a process has exited.
    pub fn refresh(&mut self) {
        for change in self.log.drain() {
            self.spaces.apply(change);
        }
        self.perf_maps_read.clear();
        for (pid, image) in self.spaces.chosen_images() {
            if image.generates_code()
                && let Some(map) = read_perf_map(pid)
            {
                self.perf_maps.insert(pid, map);
                self.perf_maps_read.insert(pid);
            }
        }
    }

    /// Forgets the processes that had exited at the last refresh: all that they did is named.
    pub fn forget_exited(&mut self) {
        self.spaces.forget_exited();
    }

    /// The files that the processes that are followed execute code from, as of the last refresh;
    /// each as often as it is mapped.
    pub fn code_files(&self) -> Vec<(u32, Rc<CodeFile>)> {
        let of = |(pid, image): (u32, &Image)| {
            let files: Vec<_> = image.files().map(|file| (pid, file)).collect();
            files
        };
        self.spaces.wanted_images().flat_map(of).collect()
    }

    /// What has been missed, and may lack names therefore.
    pub fn losses(&self) -> Option<String> {
        match (self.log.lost(), self.spaces.forgotten()) {
            (0, 0) => None,
            (0, processes) => Some(format!(
                "forgot {processes} processes that had exited: their frames may lack names"
            )),
            (records, _) => Some(format!(
                "missed {records} mappings, made too fast: some frames may lack names"
            )),
        }
    }

    /// The stack's frames with their names, and why there are no more of them.
    pub fn part(&mut self, pid: u32, stack: &Stack) -> Part {
        let frames = self.name(pid, stack);
        let last = frames.last().and_then(|frame| frame.module.as_ref());
        let truncated = stack.end.truncated(last.map(|(module, _)| module.as_str()));
        Part { frames, truncated }
    }

    /// The stack's frames with their names, innermost first. `pid` is the process that a user
    /// stack is of.
    pub fn name(&mut self, pid: u32, stack: &Stack) -> Vec<Frame> {
        let places = stack.places.iter();
        match stack.side {
            Side::User => {
                let code: Vec<u64> = places.clone().map(|place| place.instruction()).collect();
                let image = self.spaces.image_with(pid, &code).unwrap_or_default();
                // A frame pointer can be any number: what leads out of all code is no frame.
                let real = if stack.checked || image.is_empty() {
                    code.len()
                } else {
                    1 + code
                        .iter()
                        .skip(1)
                        .take_while(|&&code| image.find(code).is_some())
                        .count()
                };
                places
                    .take(real)
                    .map(|&place| self.user_frame(pid, &image, place))
                    .collect()
            }
            Side::Kernel => self.kernel.name(stack),
        }
    }

    fn user_frame(&mut self, pid: u32, image: &Image, place: Place) -> Frame {
        let (address, instruction) = (place.address(), place.instruction());
        let unknown = Frame {
            address,
            symbol: None,
            module: None,
            kernel: false,
        };
        let Some(code) = image.find(instruction) else {
            return unknown;
        };
        let offset = instruction - code.range.start + code.file_offset;
        let symbol = if code.file.is_generated() {
            self.find_generated(pid, instruction)
        } else {
            let blazesym = &self.blazesym;
            self.names
                .entry((code.file.number, offset))
                .or_insert_with(|| name_in_file(blazesym, &code.file.open()?.file, offset))
                .clone()
        };
        let module = code.file.module();
        // Offsets are the return address's own, as all peers print them.
        let beyond = address - instruction;
        Frame {
            symbol: symbol.map(|(name, offset)| (name, offset + beyond)),
            module: (!module.is_empty()).then_some((module, offset + beyond)),
            ..unknown
        }
    }

    fn find_generated(&mut self, pid: u32, address: u64) -> Option<(String, u64)> {
        if self.perf_maps_read.insert(pid)
            && let Some(map) = read_perf_map(pid)
        {
            self.perf_maps.insert(pid, map);
        }
        let (name, offset) = self.perf_maps.get(&pid)?.find(address)?;
        Some((text::escape(name).into_owned(), offset))
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
