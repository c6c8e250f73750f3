//! Symbolizer for the frames of stacks: of the kernel, of a process, of a process that has exited.
//!
//! The images of processes are remembered ([`crate::process::address_space`]), since /proc/PID vanishes when the
//! process exits. Names come from `.symtab` and `.dynsym` ([`crate::code::symbols`]), and for generated code from perf
//! maps. An address that no symbol covers gets no name: a wrong name is worse than `libfoo.so+0x1234`. The kernel names
//! its own functions ([`crate::stacks::kallsyms`]).

use std::collections::HashSet;
use std::hash::{Hash, Hasher};
use std::mem::discriminant;
use std::os::fd::OwnedFd;
use std::rc::Rc;

use anyhow::Result;

use crate::interpreters::raw_frame::RawFrame;
use crate::process::address_space::{CodeFile, Image, MappedCode};
use crate::process::traced_code::TracedCode;
use crate::stacks::debuginfod::Debuginfod;
use crate::stacks::file_names::FileNames;
use crate::stacks::interpreter_names::InterpreterNames;
use crate::stacks::kallsyms::Kallsyms;
use crate::stacks::named::{Frame, FrameKind, Part, Source, Symbolize};
use crate::stacks::perf_map::PerfMaps;
use crate::stacks::python_names::{Found, PythonNames};
use crate::stacks::runtimes::{self, UnnamedPlaces};
use crate::stacks::table::{Side, Stack};

/// Symbolizer for the frames of stacks.
pub struct Symbolizer {
    /// The code that the processes have mapped.
    pub code: TracedCode,
    names: FileNames,
    perf_maps: PerfMaps,
    /// The processes whose perf maps were read since the last refresh.
    perf_maps_read: HashSet<u32>,
    /// Places without a name, in processes that have no perf map.
    unnamed: UnnamedPlaces,
    kernel: KernelNames,
    wanted_lines: WantedLines,
    /// Names for the frames of interpreters; None if these frames are not shown.
    interpreters: Option<InterpreterNames>,
}

/// Options for what the frames of user stacks are shown with, in addition to their functions.
#[derive(Debug, Clone, Copy, Default, clap::Args)]
pub struct SourceArgs {
    /// Show source lines and inlined functions
    ///
    /// This requires debug information, which is read if it is installed.
    #[arg(help_heading = "Output", long)]
    pub lines: bool,

    /// Download debug information that is not installed
    ///
    /// The servers are those in the environment variable DEBUGINFOD_URLS.
    #[arg(help_heading = "Output", hide_short_help = true, long)]
    pub debuginfod: bool,
}

/// Symbolizer for reports. A report may show no source lines although a profile has them: the lines are then looked up
/// when the profile is made, since reading a file's DWARF takes up to a second, while events come.
pub struct ForReports<'a>(&'a mut Symbolizer);

impl Symbolize for ForReports<'_> {
    fn symbolize(&mut self, pid: u32, stack: &Stack) -> Part {
        let wanted = self.0.wanted_lines;
        if wanted == WantedLines::InProfiles {
            self.0.wanted_lines = WantedLines::None;
        }
        let part = self.0.symbolize(pid, stack);
        self.0.wanted_lines = wanted;
        part
    }

    fn program(&self, pid: u32) -> Option<MappedCode> {
        self.0.program(pid)
    }
}

/// Outputs in which source lines are wanted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum WantedLines {
    /// No source lines are wanted.
    #[default]
    None,
    /// Lines are shown in profiles alone.
    InProfiles,
    /// Lines are shown in reports and in profiles.
    InReports,
}

/// Symbolizer for kernel stacks alone, which is all that a tool without user stacks needs.
#[derive(Debug, Default)]
pub struct KernelNames {
    /// Kernel symbols, read when the first frame is symbolized.
    symbols: Option<Kallsyms>,
}

impl Symbolize for KernelNames {
    fn symbolize(&mut self, _pid: u32, stack: &Stack) -> Part {
        let places = stack.frames.iter();
        Part {
            frames: places.filter_map(|&place| self.frame(place)).collect(),
            truncated: stack.end.truncated(None),
        }
    }
}

impl KernelNames {
    fn frame(&mut self, place: RawFrame) -> Option<Frame> {
        let (address, instruction) = (place.address()?, place.instruction()?);
        let symbols = self.symbols.get_or_insert_with(Kallsyms::read_or_warn);
        let found = symbols.find(instruction);
        let beyond = address - instruction;
        let module = found.map_or("kernel", |(_, _, module)| module);
        Some(Frame {
            address,
            instruction,
            symbol: found.map(|(name, offset, _)| (name.into(), offset + beyond)),
            module: Some((module.into(), address)),
            kind: FrameKind::Kernel,
            ..Frame::default()
        })
    }
}

impl Symbolizer {
    /// Creates a symbolizer for the processes whose code this is.
    pub fn new(code: TracedCode) -> Self {
        Self {
            code,
            names: FileNames::default(),
            perf_maps: PerfMaps::default(),
            perf_maps_read: HashSet::new(),
            unnamed: UnnamedPlaces::default(),
            kernel: KernelNames::default(),
            wanted_lines: WantedLines::None,
            interpreters: None,
        }
    }

    /// Enables the source lines that the options ask for, and those of a profile if `profile` says that one is made.
    ///
    /// # Errors
    /// If debuginfod servers are to be asked, and cannot be.
    pub fn with_source(mut self, args: SourceArgs, profile: bool) -> Result<Self> {
        self.wanted_lines = match (args.lines, profile) {
            (true, _) => WantedLines::InReports,
            (false, true) => WantedLines::InProfiles,
            (false, false) => WantedLines::None,
        };
        if args.debuginfod {
            self.names.debug_files.debuginfod = Some(Debuginfod::new()?);
        }
        Ok(self)
    }

    /// Symbolizes frames of interpreters by `names` from now on; None turns that off.
    pub fn name_interpreters(&mut self, names: Option<InterpreterNames>) {
        if let Some(names) = &names {
            names.request_perf_maps(&mut self.perf_maps);
        }
        self.interpreters = names;
    }

    /// Returns the symbolizer to use for a report.
    pub(crate) fn for_reports(&mut self) -> ForReports<'_> {
        ForReports(self)
    }

    /// Whether reports show source lines.
    pub(crate) fn shows_lines(&self) -> bool {
        self.wanted_lines == WantedLines::InReports
    }

    /// Prepares to symbolize; call it once the probes are live. Takes the names for the frames of interpreters, if
    /// these are walked, and records the mappings of all running processes. Returns the file descriptor that
    /// [`crate::run::poll::Poller::watch_mappings`] waits for.
    ///
    /// # Errors
    /// If there are no file descriptors left.
    pub fn begin(&mut self, names: Option<InterpreterNames>) -> Result<OwnedFd> {
        self.name_interpreters(names);
        self.code.read_running_processes();
        self.code.descriptor()
    }

    /// Reads the kernel's symbols now instead of at the first lookup.
    pub fn read_kernel_names(&mut self) {
        self.kernel
            .symbols
            .get_or_insert_with(Kallsyms::read_or_warn);
    }

    /// Reads new mappings and newly generated code. Call it when the poller reports mappings, before a report, and as
    /// soon as a process has exited.
    pub fn refresh(&mut self) {
        self.code.refresh();
        if let Some(interpreters) = &self.interpreters {
            interpreters.python.refresh();
        }
        self.perf_maps_read.clear();
        for (pid, image) in self.code.spaces.chosen_images() {
            if image.generates_code() {
                self.perf_maps.refresh(pid);
                self.perf_maps_read.insert(pid);
            }
        }
    }

    /// Reports on stderr what was lost or has no symbols, so that frames may lack names. Call it at the end.
    pub fn report_losses(&self) {
        let mut missed = self.code.losses();
        let python = self.interpreters.as_ref().map(|names| &names.python);
        match python.map_or(0, PythonNames::dropped) {
            0 => {}
            dropped => missed.push(format!(
                "dropped the names of {dropped} Python functions: their table was full"
            )),
        }
        let missed = missed.join(", ");
        if !missed.is_empty() {
            crate::message!("{missed}: some frames may lack names");
        }
        self.names.report_stripped();
        self.unnamed.tell();
    }

    fn user_frames(&mut self, pid: u32, stack: &Stack) -> Vec<Frame> {
        let image = self.code.spaces.image_with(pid, stack.instructions());
        let image = image.unwrap_or_default();
        // A frame pointer can be any number: an address outside all code is no frame.
        let is_real = |(at, place): &(usize, &RawFrame)| {
            let found = |code| image.find(code).is_some();
            *at == 0 || place.instruction().is_none_or(found)
        };
        let all = stack.checked || image.is_empty();
        let places = stack.frames.iter().enumerate();
        let real = places.take_while(|place| all || is_real(place));
        let mut frames = Vec::with_capacity(stack.frames.len());
        for (at, &place) in real {
            let names = self.interpreters.as_ref();
            match names.map(|names| names.python.find(place)) {
                Some(Found::Frame(frame)) => frames.push(frame),
                Some(Found::Hidden) => {}
                Some(Found::Native) | None => {
                    let next = stack.frames.get(at + 1);
                    if !names.is_some_and(|names| names.python.hides_before(next)) {
                        frames.extend(self.user_frame(pid, &image, place));
                    }
                }
            }
        }
        if let Some(names) = &self.interpreters {
            names.python.mark_loops(&mut frames);
        }
        frames
    }

    /// Hashes all that the names of a user stack depend on: the file and offset of each native frame and whether it was
    /// interrupted there, the word of each Python frame, and the reason for the stack's end. The hash is the same in
    /// each process that runs these files. Returns false if the names depend on more: for generated code, interpreted
    /// Java functions, and addresses in no mapping.
    pub(crate) fn hash_places(
        &mut self,
        pid: u32,
        stack: &Stack,
        hasher: &mut impl Hasher,
    ) -> bool {
        let image = self.code.spaces.image_with(pid, stack.instructions());
        let image = image.unwrap_or_default();
        hash_places_in(&image, stack, hasher)
    }

    /// Symbolizes a frame of native code or of interpreted Java. Returns None for other places.
    fn user_frame(&mut self, pid: u32, image: &Image, place: RawFrame) -> Option<Frame> {
        if let RawFrame::Java { method, .. } = place {
            let names = self.interpreters.as_ref();
            let line = names.and_then(|names| names.java_line(pid, place));
            return Some(Frame::of_java(method, line));
        }
        let (address, instruction) = (place.address()?, place.instruction()?);
        let unknown = Frame {
            address,
            instruction,
            ..Frame::default()
        };
        let Some(code) = image.find(instruction) else {
            return Some(unknown);
        };
        let offset = code.offset_of(instruction);
        let (symbol, mangled, source) = if code.file.is_generated() {
            let symbol = self.find_generated(pid, instruction);
            let names = self.interpreters.as_ref();
            let source = names.map(|names| names.java_source(pid, place, symbol.as_ref()));
            let symbol = symbol.map(|(name, offset)| (name.into(), offset));
            (symbol, None, source.unwrap_or_default())
        } else {
            let source = self.source(&code.file, offset);
            match self.names.find(&code.file, offset) {
                Some(name) => (Some((name.shown, name.offset)), name.mangled, source),
                None => (None, None, source),
            }
        };
        let in_perf_map = match &symbol {
            Some((function, _)) => runtimes::interprets(function),
            None => code.file.is_generated(),
        };
        if in_perf_map && !self.perf_maps.has(pid) {
            self.unnamed.note(pid, image, instruction);
        }
        let module = code.file.module();
        // Offsets are those of the return address, as all comparable tools print them.
        let beyond = address - instruction;
        Some(Frame {
            symbol: symbol.map(|(name, offset)| (name, offset + beyond)),
            mangled,
            module: (!module.is_empty()).then(|| (Rc::clone(module), offset + beyond)),
            code: Some(code.clone()),
            source,
            ..unknown
        })
    }

    fn source(&mut self, file: &CodeFile, offset: u64) -> Source {
        if self.wanted_lines == WantedLines::None || file.is_generated() {
            return Source::default();
        }
        Source {
            lines: self.names.lines(file, offset),
            shown: self.wanted_lines == WantedLines::InReports,
        }
    }

    fn find_generated(&mut self, pid: u32, address: u64) -> Option<(String, u64)> {
        let (names, maps) = (self.interpreters.as_ref(), &mut self.perf_maps);
        let asked = names.is_some_and(|names| names.request_perf_map(pid, maps));
        if !asked && self.perf_maps_read.insert(pid) {
            maps.refresh(pid);
        }
        maps.find(pid, address)
            .or_else(|| names?.java.of_code(pid, address))
    }
}

/// Hashes the places of a user stack in an image, as [`Symbolizer::hash_places`] does.
fn hash_places_in(image: &Image, stack: &Stack, hasher: &mut impl Hasher) -> bool {
    for (frame, &place) in stack.frames.iter().enumerate() {
        // The same word is another function in another process.
        if matches!(place, RawFrame::Java { .. }) {
            return false;
        }
        let Some(address) = place.instruction() else {
            place.hash(hasher);
            continue;
        };
        match image.find(address) {
            Some(code) if code.file.is_generated() => return false,
            Some(code) => {
                let offset = code.offset_of(address);
                // A return address and an interrupted instruction before it have different offsets in a symbol.
                (code.file.number, offset, discriminant(&place)).hash(hasher);
            }
            // user_frames() ends the stack here, too.
            None if frame > 0 && !stack.checked && !image.is_empty() => break,
            None => return false,
        }
    }
    stack.end.hash(hasher);
    true
}

impl Symbolize for Symbolizer {
    fn symbolize(&mut self, pid: u32, stack: &Stack) -> Part {
        if stack.side == Side::Kernel {
            return self.kernel.symbolize(pid, stack);
        }
        let frames = self.user_frames(pid, stack);
        // The walk ended in the last frame that is not of Python, though frames of Python can follow it.
        let last = frames.iter().rfind(|frame| !frame.is_python());
        let truncated = stack.end.truncated(last.and_then(Frame::module_name));
        Part { frames, truncated }
    }

    fn program(&self, pid: u32) -> Option<MappedCode> {
        self.code.spaces.newest_image(pid)?.program().cloned()
    }
}

#[cfg(test)]
mod tests;
