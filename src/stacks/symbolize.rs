//! Names for the frames of stacks: of the kernel, of a process, of a process that has exited.
//!
//! The images of processes are remembered ([`crate::process::address_space`]): /proc/PID is gone once the
//! process has exited. Names come from `.symtab` and `.dynsym` ([`crate::code::symbols`]), and for generated code
//! from perf maps. An address that no symbol covers gets none: a wrong name is worse than
//! `libfoo.so+0x1234`. The kernel names its own functions ([`crate::stacks::kallsyms`]).

use std::collections::HashSet;
use std::hash::{Hash, Hasher};
use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;

use anyhow::{Context, Result};

use crate::process::address_space::{AddressSpaces, CodeFile, Image, MappedCode, Wanted};
use crate::process::mapping_log::MappingLog;
use crate::process::proc::Process;
use crate::process::translator;
use crate::stacks::debuginfod::Debuginfod;
use crate::stacks::file_names::FileNames;
use crate::stacks::interpreter_names::InterpreterNames;
use crate::stacks::kallsyms::Kallsyms;
use crate::stacks::named::{Frame, FrameKind, Names, Part, Source};
use crate::stacks::perf_map::PerfMaps;
use crate::stacks::python_names::{Found, PythonNames};
use crate::stacks::runtimes::{self, UnnamedPlaces};
use crate::stacks::table::{Place, Side, Stack};

/// Names the frames of stacks.
pub struct Symbolizer {
    log: MappingLog,
    spaces: AddressSpaces,
    names: FileNames,
    perf_maps: PerfMaps,
    /// The processes whose perf maps were read since the last refresh.
    perf_maps_read: HashSet<u32>,
    /// Functions of processes without a perf map.
    unnamed: UnnamedPlaces,
    kernel: KernelNames,
    /// If somebody asks for them.
    translators: Option<translator::Started>,
    wanted_lines: WantedLines,
    /// If functions of Python are shown.
    interpreters: Option<InterpreterNames>,
}

/// Options for what the frames of user stacks are told with beside their functions.
#[derive(Debug, Clone, Copy, Default, clap::Args)]
pub struct SourceArgs {
    /// Show source files, lines and inlined calls, as far as debug information is installed
    #[arg(long)]
    pub lines: bool,

    /// Fetch debug information that is not installed from the servers in DEBUGINFOD_URLS
    #[arg(long)]
    pub debuginfod: bool,
}

/// Names the frames of stacks for a report, which may show no source lines although a profile has them: these
/// are looked for when that is made. To read a file's DWARF takes up to a second, while events come.
pub struct ForReports<'a>(&'a mut Symbolizer);

impl Names for ForReports<'_> {
    fn part(&mut self, pid: u32, stack: &Stack) -> Part {
        let wanted = self.0.wanted_lines;
        if wanted == WantedLines::InProfiles {
            self.0.wanted_lines = WantedLines::None;
        }
        let part = self.0.part(pid, stack);
        self.0.wanted_lines = wanted;
        part
    }

    fn program(&self, pid: u32) -> Option<MappedCode> {
        self.0.program(pid)
    }
}

/// Where source lines are wanted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum WantedLines {
    /// Nowhere.
    #[default]
    None,
    /// Lines are shown in profiles alone.
    InProfiles,
    /// Lines are shown in reports and in profiles.
    InReports,
}

/// Names the frames of the kernel's stacks, which is all that a tool without user stacks needs.
#[derive(Debug, Default)]
pub struct KernelNames {
    /// Read when the first frame is named.
    symbols: Option<Kallsyms>,
}

impl Names for KernelNames {
    fn part(&mut self, _pid: u32, stack: &Stack) -> Part {
        let places = stack.places.iter();
        Part {
            frames: places.filter_map(|&place| self.frame(place)).collect(),
            truncated: stack.end.truncated(None),
        }
    }
}

impl KernelNames {
    fn frame(&mut self, place: Place) -> Option<Frame> {
        let (address, instruction) = (place.address()?, place.instruction()?);
        let symbols = self.symbols.get_or_insert_with(Kallsyms::read_or_tell);
        let found = symbols.find(instruction);
        let beyond = address - instruction;
        let module = found.map_or("kernel", |(_, _, module)| module);
        Some(Frame {
            address,
            instruction,
            symbol: found.map(|(name, offset, _)| (name.to_owned(), offset + beyond)),
            module: Some((module.to_owned(), address)),
            kind: FrameKind::Kernel,
            ..Frame::default()
        })
    }
}

impl Symbolizer {
    /// For processes that are yet to be named, by [`Symbolizer::follow`].
    ///
    /// # Errors
    /// If the kernel's log of mappings cannot be opened, mostly for want of privilege.
    pub fn new() -> Result<Self> {
        Self::with(AddressSpaces::of(Wanted::Chosen))
    }

    /// For processes that are yet to be named, and what these start.
    ///
    /// # Errors
    /// If the kernel's log of mappings cannot be opened, mostly for want of privilege.
    pub fn of_descendants() -> Result<Self> {
        Self::with(AddressSpaces::of(Wanted::Descendants))
    }

    /// For all processes: those that will start, and those that run when
    /// [`Symbolizer::look_around`] is called.
    ///
    /// # Errors
    /// If the kernel's log of mappings cannot be opened, mostly for want of privilege.
    pub fn of_all_processes() -> Result<Self> {
        Self::with(AddressSpaces::of(Wanted::All))
    }

    fn with(spaces: AddressSpaces) -> Result<Self> {
        Ok(Self {
            log: MappingLog::start()?,
            spaces,
            names: FileNames::default(),
            perf_maps: PerfMaps::default(),
            perf_maps_read: HashSet::new(),
            unnamed: UnnamedPlaces::default(),
            kernel: KernelNames::default(),
            translators: None,
            wanted_lines: WantedLines::None,
            interpreters: None,
        })
    }

    /// Adds the source lines that the options ask for, and those that a profile has, if one is made.
    ///
    /// # Errors
    /// If servers are to be asked for debug information, and cannot be.
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

    /// Shows functions of interpreters from now on.
    pub fn name_interpreters(&mut self, names: Option<InterpreterNames>) {
        if let Some(names) = &names {
            names.ask_for_maps(&mut self.perf_maps);
        }
        self.interpreters = names;
    }

    /// What names stacks for a report.
    pub fn for_reports(&mut self) -> ForReports<'_> {
        ForReports(self)
    }

    /// Whether reports show source lines.
    pub fn shows_lines(&self) -> bool {
        self.wanted_lines == WantedLines::InReports
    }

    /// Remembers what a running process has mapped, and from now on what it maps.
    ///
    /// # Errors
    /// If the mappings of the process cannot be read.
    pub fn follow(&mut self, process: &Process) -> Result<()> {
        self.follow_new(process.pid());
        self.spaces.look_at(process)
    }

    /// Remembers what a process maps from now on that is about to call exec.
    pub fn follow_new(&mut self, pid: u32) {
        self.spaces.choose(pid);
    }

    /// Remembers what all running processes have mapped. It takes some milliseconds, so call it
    /// when the probes are live.
    pub fn look_around(&mut self) {
        self.spaces.look_at_all();
    }

    /// Begins, once the probes are live: names the frames of interpreters by these, if they are walked, and
    /// remembers what all running processes have mapped. Returns what
    /// [`crate::run::poll::Poller::watch_mappings`] waits for.
    ///
    /// # Errors
    /// If there are no file descriptors left.
    pub fn begin(&mut self, names: Option<InterpreterNames>) -> Result<OwnedFd> {
        self.name_interpreters(names);
        self.look_around();
        self.descriptor()
    }

    /// Reads the kernel's symbols now, and not when the first is asked for.
    pub fn read_kernel_names(&mut self) {
        self.kernel
            .symbols
            .get_or_insert_with(Kallsyms::read_or_tell);
    }

    /// What [`crate::run::poll::Poller::watch_mappings`] waits for.
    ///
    /// # Errors
    /// If there are no file descriptors left.
    pub fn descriptor(&self) -> Result<OwnedFd> {
        let log = self.log.as_fd().try_clone_to_owned();
        log.context("failed to watch the log of mappings")
    }

    /// Takes note of new mappings and of newly generated code. Call it when the poller says that
    /// there are mappings, before a report, and as soon as a process has exited.
    pub fn refresh(&mut self) {
        for change in self.log.drain() {
            if let Some(translators) = &mut self.translators {
                translators.note(&change);
            }
            self.spaces.apply(change);
        }
        if let Some(interpreters) = &self.interpreters {
            interpreters.python.refresh();
        }
        self.perf_maps_read.clear();
        for (pid, image) in self.spaces.chosen_images() {
            if image.generates_code() {
                self.perf_maps.refresh(pid);
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

    /// Takes note of translators from now on, whoever starts them.
    pub fn watch_translators(&mut self) {
        self.translators = Some(translator::Started::default());
    }

    /// The processes of the translators that have started since they are watched, as of the last refresh.
    pub fn translators(&self) -> impl Iterator<Item = u32> {
        self.translators.iter().flat_map(translator::Started::pids)
    }

    /// Says on stderr what has been missed, and may lack names therefore. Call it at the end.
    pub fn tell_losses(&self, tool: &str) {
        let mut missed = Vec::new();
        match self.log.lost() {
            0 => {}
            records => missed.push(format!("missed {records} mappings, made too fast")),
        }
        match self.spaces.forgotten_processes() {
            0 => {}
            processes => missed.push(format!("forgot {processes} processes that had exited")),
        }
        match self.spaces.forgotten_mappings() {
            0 => {}
            mappings => missed.push(format!(
                "forgot {mappings} mappings of processes with thousands of them"
            )),
        }
        let python = self.interpreters.as_ref().map(|names| &names.python);
        match python.map_or(0, PythonNames::dropped) {
            0 => {}
            dropped => missed.push(format!("had no room for {dropped} functions of Python")),
        }
        let missed = missed.join(", ");
        if !missed.is_empty() {
            eprintln!("{tool}: {missed}: some frames may lack names");
        }
        self.names.tell_stripped(tool);
        self.unnamed.tell(tool);
    }

    fn user_frames(&mut self, pid: u32, stack: &Stack) -> Vec<Frame> {
        let code: Vec<u64> = stack.instructions().collect();
        let image = self.spaces.image_with(pid, &code).unwrap_or_default();
        // A frame pointer can be any number: what leads out of all code is no frame.
        let is_real = |(at, place): &(usize, &Place)| {
            let found = |code| image.find(code).is_some();
            *at == 0 || place.instruction().is_none_or(found)
        };
        let all = stack.checked || image.is_empty();
        let places = stack.places.iter().enumerate();
        let real = places.take_while(|place| all || is_real(place));
        let mut frames = Vec::new();
        for (at, &place) in real {
            let names = self.interpreters.as_ref();
            match names.map(|names| names.python.find(place)) {
                Some(Found::Frame(frame)) => frames.push(frame),
                Some(Found::Hidden) => {}
                Some(Found::Native) | None => {
                    let next = stack.places.get(at + 1);
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

    /// Hashes the files and offsets that a user stack's frames are at, and why there are no more: all
    /// that its names are made of, and the same in each process that runs these files; of Python its words. Returns false
    /// where more is needed: for generated code, and what is in no mapping.
    pub fn hash_places(&mut self, pid: u32, stack: &Stack, hasher: &mut impl Hasher) -> bool {
        let code: Vec<u64> = stack.instructions().collect();
        let image = self.spaces.image_with(pid, &code).unwrap_or_default();
        for (frame, &place) in stack.places.iter().enumerate() {
            // Another process has another function there.
            if matches!(place, Place::Java { .. }) {
                return false;
            }
            let Some(address) = place.instruction() else {
                place.hash(hasher);
                continue;
            };
            match image.find(address) {
                Some(code) if code.file.is_generated() => return false,
                Some(code) => {
                    let offset = address - code.range.start + code.file_offset;
                    (code.file.number, offset).hash(hasher);
                }
                // As user_frames() has it.
                None if frame > 0 && !stack.checked && !image.is_empty() => break,
                None => return false,
            }
        }
        stack.end.hash(hasher);
        true
    }

    /// The frame of a place of native code or Java; None of another.
    fn user_frame(&mut self, pid: u32, image: &Image, place: Place) -> Option<Frame> {
        if let Place::Java { method, .. } = place {
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
        let offset = instruction - code.range.start + code.file_offset;
        let (symbol, mangled, source) = if code.file.is_generated() {
            let symbol = self.find_generated(pid, instruction);
            let names = self.interpreters.as_ref();
            let source = names.map(|names| names.java_source(pid, place, symbol.as_ref()));
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
        // Offsets are the return address's own, as all peers print them.
        let beyond = address - instruction;
        Some(Frame {
            symbol: symbol.map(|(name, offset)| (name, offset + beyond)),
            mangled,
            module: (!module.is_empty()).then_some((module, offset + beyond)),
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
        let asked = names.is_some_and(|names| names.ask_for_map(pid, maps));
        if !asked && self.perf_maps_read.insert(pid) {
            maps.refresh(pid);
        }
        maps.find(pid, address)
            .or_else(|| names?.java.of_code(pid, address))
    }
}

impl Names for Symbolizer {
    fn part(&mut self, pid: u32, stack: &Stack) -> Part {
        if stack.side == Side::Kernel {
            return self.kernel.part(pid, stack);
        }
        let frames = self.user_frames(pid, stack);
        // Frames of Python that follow are not where the walk has ended.
        let last = frames.iter().rfind(|frame| !frame.is_python());
        let truncated = stack.end.truncated(last.and_then(Frame::module_name));
        Part { frames, truncated }
    }

    fn program(&self, pid: u32) -> Option<MappedCode> {
        self.spaces.newest_image(pid)?.program().cloned()
    }
}
