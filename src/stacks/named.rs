//! Symbolized stacks, the input of every output format.

use std::borrow::Cow;
use std::fmt;
use std::rc::Rc;

use anyhow::Result;
use serde::Serialize;
use serde::ser::{SerializeStruct, Serializer};

use crate::code::lines::SourceLine;
use crate::process::address_space::MappedCode;
use crate::stacks::table::{Stack, StackSource};

/// Kind of code that a frame executes.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum FrameKind {
    /// A process's machine code.
    #[default]
    Native,
    /// The kernel's machine code.
    Kernel,
    /// A code object of CPython, which the interpreter's loop executes. The symbol is its qualified name, without an
    /// offset; the place in the source is always shown; there is no module.
    Python,
    /// A Java function that HotSpot interprets. The symbol is its name with its types, without an offset; the place
    /// in the source is always shown, as it is of compiled functions; there is no module. Compiled functions are native
    /// code.
    Java,
}

/// A stack frame with its symbol, module and source lines.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Frame {
    /// Absolute address, in the process or in the kernel. For a Python frame, the word that encodes the frame in the
    /// stack; for an interpreted Java frame, the address of the `Method`.
    pub address: u64,
    /// An address within the instruction of the frame: for a caller, the byte before `address`.
    pub instruction: u64,
    /// The function, demangled and escaped, and the address's offset from its start.
    pub symbol: Option<(Rc<str>, u64)>,
    /// Mangled name of the function as its file has it, not escaped; None if the name is not mangled.
    pub mangled: Option<Rc<str>>,
    /// File name without directories, or a name such as `[vdso]`, and the offset in the file; for the
    /// kernel's code `kernel` or the kernel module, and the address.
    pub module: Option<(Rc<str>, u64)>,
    /// The mapping that the instruction is in, with its file; None for the kernel's code.
    pub code: Option<MappedCode>,
    /// Kind of code.
    pub kind: FrameKind,
    /// Source lines of the instruction, if they were requested and are known.
    pub source: Source,
}

/// Source lines of a frame's instruction.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Source {
    /// The innermost inlined call first, and last the place in the frame's own function.
    pub lines: Rc<[SourceLine]>,
    /// Whether reports show the lines. Profiles always have them.
    pub shown: bool,
}

impl Source {
    /// Returns the inlined calls, innermost first.
    pub fn inlined(&self) -> &[SourceLine] {
        self.lines.split_last().map_or(&[], |(_, inlined)| inlined)
    }

    /// Returns the place in the frame's own function, if reports show it.
    pub(crate) fn in_report(&self) -> ShownLine<'_> {
        ShownLine(self.lines.last().filter(|_| self.shown))
    }
}

/// A place in the source as reports show it: ` (demo.c:41)`, or nothing without a file and a line.
#[derive(Debug, Clone, Copy)]
pub struct ShownLine<'a>(Option<&'a SourceLine>);

impl fmt::Display for ShownLine<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(SourceLine {
                file: Some(file),
                line: line @ 1..,
                ..
            }) => {
                write!(f, " ({}:{line})", base_name(file))
            }
            _ => Ok(()),
        }
    }
}

/// Returns a file's name without its directories.
fn base_name(file: &str) -> &str {
    file.rsplit('/').next().unwrap_or(file)
}

impl Frame {
    /// Creates a frame for the unit tests of tools: in a function, at an offset that is also taken for the one in the
    /// module. The module `kernel` is the kernel's code.
    pub fn of_test(name: &str, offset: u64, module: &str) -> Self {
        Self {
            address: 0x1000 + offset,
            symbol: Some((name.into(), offset)),
            module: Some((module.into(), offset)),
            kind: match module {
                "kernel" => FrameKind::Kernel,
                _ => FrameKind::Native,
            },
            ..Self::default()
        }
    }

    /// Creates a frame of Python from its word, the function's name, and the file and line of the place. Name and file
    /// are escaped already.
    pub(crate) fn of_python(word: u64, name: &str, place: Option<(&str, Option<u32>)>) -> Self {
        let line = SourceLine {
            function: Some(name.to_owned()),
            file: place.map(|(file, _)| file.to_owned()),
            line: place.and_then(|(_, line)| line).unwrap_or(0),
        };
        Self {
            address: word,
            instruction: word,
            symbol: Some((name.into(), 0)),
            kind: FrameKind::Python,
            source: Source {
                lines: Rc::new([line]),
                shown: true,
            },
            ..Self::default()
        }
    }

    /// Creates a frame of an interpreted Java function from the address of its `Method`. `line` is the function's name
    /// and its place in the source, both escaped already, if they are known.
    pub(crate) fn of_java(method: u64, line: Option<SourceLine>) -> Self {
        const UNKNOWN: &str = "[interpreted]";
        let name = line.as_ref().and_then(|line| line.function.clone());
        Self {
            address: method,
            instruction: method,
            symbol: Some((name.as_deref().unwrap_or(UNKNOWN).into(), 0)),
            kind: FrameKind::Java,
            source: Source {
                lines: line.into_iter().collect(),
                shown: true,
            },
            ..Self::default()
        }
    }

    /// Returns the frame as lines of a report: the inlined calls before the function that they are in.
    pub fn rows(&self) -> impl Iterator<Item = String> {
        self.inlined_rows().chain([self.to_string()])
    }

    /// Returns the inlined calls that a report shows, each as a line, such as `grow (demo.h:12) [inlined]`.
    pub(crate) fn inlined_rows(&self) -> impl Iterator<Item = String> {
        let inlined = self.source.inlined().iter();
        inlined.filter(|_| self.source.shown).map(|call| {
            let name = call.function.as_deref().unwrap_or("[unknown]");
            format!("{name}{} [inlined]", ShownLine(Some(call)))
        })
    }

    /// Returns the place in the source as reports show it: ` (demo.c:41)`. For Python also without a line:
    /// ` (demo.py)`.
    pub(crate) fn source_location(&self) -> String {
        match self.source.lines.last() {
            Some(SourceLine {
                file: Some(file),
                line: 0,
                ..
            }) if self.is_python() => format!(" ({})", base_name(file)),
            _ => self.source.in_report().to_string(),
        }
    }

    /// Whether the frame is in kernel code.
    pub(crate) fn is_kernel(&self) -> bool {
        self.kind == FrameKind::Kernel
    }

    /// Returns the name of the module that the code is in.
    pub(crate) fn module_name(&self) -> Option<&str> {
        self.module.as_ref().map(|(name, _)| &**name)
    }

    /// Whether the frame is of a Python function.
    pub fn is_python(&self) -> bool {
        self.kind == FrameKind::Python
    }

    /// Returns the language of an interpreted function, or None for machine code.
    pub(crate) fn language(&self) -> Option<&'static str> {
        match self.kind {
            FrameKind::Native | FrameKind::Kernel => None,
            FrameKind::Python => Some("python"),
            FrameKind::Java => Some("java"),
        }
    }

    /// Whether the frame is of an interpreted function instead of machine code.
    pub(crate) fn is_interpreted(&self) -> bool {
        self.language().is_some()
    }

    /// Returns the function, for Python with its place in the source, or else the module in brackets. A Java
    /// function has the same name whether it is compiled or interpreted.
    pub(crate) fn function_or_module(&self) -> Cow<'_, str> {
        match (&self.symbol, &self.module) {
            (Some((name, _)), _) if self.is_python() => {
                format!("{name}{}", self.source_location()).into()
            }
            (Some((name, _)), _) => (&**name).into(),
            (None, Some((module, _))) => format!("[{module}]").into(),
            (None, None) => "[unknown]".into(),
        }
    }
}

/// Prints `malloc+0x1d [libc.so.6]` as BCC does, `libfoo.so+0x1234 [libfoo.so]` without a symbol, and
/// `main+0x6d (demo.c:41) [demo]` with its source line. A frame of Python is `load_orders (orders.py:41) [python]`, and
/// one of interpreted Java `void Orders.load(int) (Orders.java:41) [java]`.
impl fmt::Display for Frame {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let place = self.source_location();
        if let (Some((name, _)), Some(language)) = (&self.symbol, self.language()) {
            return write!(f, "{name}{place} [{language}]");
        }
        match (&self.symbol, &self.module) {
            (Some((name, offset)), Some((module, _))) => {
                write!(f, "{name}+{offset:#x}{place} [{module}]")
            }
            (Some((name, offset)), None) => write!(f, "{name}+{offset:#x}{place}"),
            (None, Some((module, offset))) => write!(f, "{module}+{offset:#x}{place} [{module}]"),
            (None, None) => f.write_str("[unknown]"),
        }
    }
}

/// Serializes to
/// `{"kind":"native","address":"0x401136","symbol":"main","offset":109,"module":"allocs","module_offset":4406}`, and
/// with source lines also
/// `"file":"/src/allocs.c","line":41,"inlined":[{"symbol":"grow","file":"/src/grow.h","line":12}]`. Python:
/// `{"kind":"python","address":"0x8…","symbol":"load_orders","offset":null,"module":null,"module_offset":null,"file":"/srv/orders.py","line":41}`.
impl Serialize for Frame {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let symbol = self.symbol.as_ref();
        let module = self.module.as_ref();
        let offset = symbol.map(|(_, offset)| offset);
        let offset = offset.filter(|_| !self.is_interpreted());
        // The kernel's module offset would be the address once more.
        let module_offset = module.filter(|_| !self.is_kernel());
        let mut frame = serializer.serialize_struct("Frame", 9)?;
        frame.serialize_field("kind", &self.kind)?;
        frame.serialize_field("address", &format_args!("{:#x}", self.address))?;
        frame.serialize_field("symbol", &symbol.map(|(name, _)| name))?;
        frame.serialize_field("offset", &offset)?;
        frame.serialize_field("module", &module.map(|(name, _)| name))?;
        frame.serialize_field("module_offset", &module_offset.map(|(_, offset)| offset))?;
        if self.source.shown {
            let own = self.source.lines.last();
            frame.serialize_field("file", &own.and_then(|own| own.file.as_ref()))?;
            frame.serialize_field("line", &own.and_then(line))?;
        }
        if self.source.shown && !self.is_interpreted() {
            let inlined = self.source.inlined().iter().map(InlinedCall::of);
            frame.serialize_field("inlined", &inlined.collect::<Vec<_>>())?;
        }
        frame.end()
    }
}

/// An inlined call, which has no frame of its own.
#[derive(Serialize)]
struct InlinedCall<'a> {
    symbol: Option<&'a str>,
    file: Option<&'a str>,
    line: Option<u32>,
}

impl<'a> InlinedCall<'a> {
    fn of(call: &'a SourceLine) -> Self {
        Self {
            symbol: call.function.as_deref(),
            file: call.file.as_deref(),
            line: line(call),
        }
    }
}

/// Returns the number of a line, or None if it is 0 (unknown).
fn line(place: &SourceLine) -> Option<u32> {
    (place.line > 0).then_some(place.line)
}

/// The user or the kernel part of a stack, symbolized.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Part {
    /// Frames, innermost first; empty if the stack was lost.
    pub frames: Vec<Frame>,
    /// Why frames are missing at the root, if they are.
    pub truncated: Option<String>,
}

/// Symbolized stack of an event or of a count, with its process.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct NamedStack {
    /// The process.
    pub pid: u32,
    /// The name of the process or thread, escaped.
    pub comm: String,
    /// The user stack, unless it was not requested or there is none.
    pub user: Option<Part>,
    /// The kernel stack, unless it was not requested or there is none.
    pub kernel: Option<Part>,
    /// The program that the process runs, if there is a user stack.
    pub program: Option<MappedCode>,
}

/// Serializes to `{"kernel_frames":[...],"user_frames":[...],"truncated":null}`, to be flattened into a row. The
/// innermost frame comes first. A lost stack has no frames. A part that was not requested or does not exist is
/// omitted. `truncated` says why outer frames are missing, if they are.
impl Serialize for NamedStack {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut stack = serializer.serialize_struct("NamedStack", 3)?;
        for (name, part) in [("kernel_frames", &self.kernel), ("user_frames", &self.user)] {
            match part {
                Some(part) => stack.serialize_field(name, &part.frames)?,
                None => stack.skip_field(name)?,
            }
        }
        stack.serialize_field("truncated", &self.truncated())?;
        stack.end()
    }
}

/// Ids of the user and the kernel part of a stack, as assigned by a BPF program.
#[derive(Debug, Default, Clone, Copy)]
pub struct StackIds<'a> {
    /// The process.
    pub pid: u32,
    /// The name of the process or thread, escaped.
    pub comm: &'a str,
    /// The user stack, if it was requested.
    pub user: Option<u64>,
    /// The kernel stack, if it was requested.
    pub kernel: Option<u64>,
}

/// Source of names for the frames of stacks.
pub trait Symbolize {
    /// Symbolizes a stack: returns its frames, innermost first, and why outer frames are missing. `pid` is the process
    /// of a user stack.
    fn symbolize(&mut self, pid: u32, stack: &Stack) -> Part;

    /// Returns the code of the program that a process runs, if it is known.
    fn program(&self, _pid: u32) -> Option<MappedCode> {
        None
    }
}

impl NamedStack {
    /// Reads the stacks with these ids, and symbolizes their frames.
    ///
    /// # Errors
    /// If the table of stacks cannot be read.
    pub fn read(
        ids: &StackIds<'_>,
        stacks: &mut impl StackSource,
        names: &mut impl Symbolize,
    ) -> Result<Self> {
        let mut part = |id: Option<u64>| -> Result<Option<Part>> {
            let Some(id) = id else { return Ok(None) };
            let Some(stack) = stacks.get(id)? else {
                return Ok(Some(Part::default()));
            };
            let named = (!stack.frames.is_empty()).then(|| names.symbolize(ids.pid, &stack));
            Ok(named.map(Part::without_tracer))
        };
        Ok(Self {
            pid: ids.pid,
            comm: ids.comm.to_owned(),
            user: part(ids.user)?,
            kernel: part(ids.kernel)?,
            program: ids.user.and_then(|_| names.program(ids.pid)),
        })
    }

    /// Returns the part of a stack that has only one: the user part, or else the kernel part.
    pub fn part(&self) -> Option<&Part> {
        self.user.as_ref().or(self.kernel.as_ref())
    }

    /// Returns why frames are missing at the root of either part, if they are.
    pub fn truncated(&self) -> Option<&str> {
        let parts = [&self.user, &self.kernel].into_iter().flatten();
        parts.filter_map(|part| part.truncated.as_deref()).next()
    }
}

impl Part {
    /// Whether the stack could not be stored.
    pub(crate) fn is_lost(&self) -> bool {
        self.frames.is_empty()
    }

    /// Removes the innermost frames that belong to our own tracing: the BPF program, and its callers at a tracepoint or
    /// at a function's entry.
    fn without_tracer(mut self) -> Self {
        const TRACER: [&str; 5] = [
            "bpf_prog_",
            "bpf_trace_run",
            "__bpf_trace_",
            "__traceiter_",
            "bpf_trampoline_",
        ];
        let ours = |frame: &Frame| {
            let name = frame.symbol.as_ref().map_or("", |(name, _)| name);
            frame.is_kernel() && TRACER.iter().any(|prefix| name.starts_with(prefix))
        };
        let others = self.frames.iter().position(|frame| !ours(frame));
        self.frames.drain(..others.unwrap_or(self.frames.len()));
        self
    }
}

/// Frames of a stack as lines, or why they are missing or incomplete.
pub struct StackText<'a> {
    /// The stack, of which one part is shown.
    pub stack: &'a NamedStack,
    /// Whether each frame begins with its address.
    pub addresses: bool,
}

impl<'a> StackText<'a> {
    /// Shows a stack with addresses.
    pub fn with_addresses(stack: &'a NamedStack) -> Self {
        let addresses = true;
        Self { stack, addresses }
    }
}

impl fmt::Display for StackText<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let frames = self.stack.part().map_or(&[][..], |part| &part.frames);
        for frame in frames {
            for row in frame.rows() {
                if self.addresses {
                    writeln!(f, "\t\t0x{:016x}\t{row}", frame.address)?;
                } else {
                    writeln!(f, "\t\t{row}")?;
                }
            }
        }
        if frames.is_empty() {
            writeln!(f, "\t\tstack information lost")?;
        } else if let Some(reason) = self.stack.truncated() {
            writeln!(f, "\t\t[truncated: {reason}]")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
