//! Source lines of the code in files that processes have mapped, read by separate processes.
//!
//! Each file's DWARF is read by a reader process of its own ([`run_reader`]), which is started at the first lookup. The
//! reader is this same program, without privileges, with the file open, and with limits on its memory and CPU time.
//! Whatever the file's owner has written into the file, at worst the reader ends, and the file has no source lines.
//! Requests go over a pipe: each is a line with an address, and its answer is a line of JSON.

use std::collections::{HashMap, HashSet};
use std::env;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitCode, Stdio};
use std::rc::Rc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use caps::CapSet;
use nix::poll::{PollFd, PollFlags, poll};
use nix::sys::prctl;
use nix::sys::resource::{Resource, setrlimit};
use nix::unistd::dup;

use crate::code::elf::{self, CodeSegment};
use crate::code::limits;
use crate::code::lines::{FileLines, SourceLine};
use crate::print::demangle::demangle;
use crate::print::text;
use crate::process::address_space::CodeFile;
use crate::stacks::debug_files::DebugInfo;

/// Environment variable that makes this program a reader of source lines. Its value lists the descriptors of the file,
/// of its package and of its supplement, separated by commas; `-` if there is none.
const VARIABLE: &str = "MEMTOOLS_LINES";
/// Maximum number of readers at a time.
const MAX_READERS: usize = 8;
/// Limit of a reader's memory in bytes, beside the mapped file: compressed sections need memory.
const MAX_MEMORY: u64 = 256 << 20;
/// Limit of a reader's CPU time in seconds: debug information of 1 GB takes 2 s.
const MAX_CPU: u64 = 20;
/// Timeout for one answer, on a busy machine.
const MAX_TIME: Duration = Duration::from_secs(60);
/// Maximum size of an answer in bytes: more than the most and longest functions and paths.
const MAX_ANSWER: u64 = 4 << 20;
/// Maximum number of files that are reported to have no lines: a process with many of them would fill the screen.
const MAX_TOLD: usize = 16;
/// Maximum size of all cached lines, in bytes.
const MAX_LINES: usize = 16 << 20;
/// Overhead of a cached line beside its text, in bytes.
const OVERHEAD: usize = 96;

/// The source lines of one place, innermost first.
type Lines = Rc<[SourceLine]>;

/// Source lines by file and offset, with the readers that find them.
#[derive(Debug, Default)]
pub(crate) struct SourceLines {
    /// Readers by the file's number; None for a file that has no lines.
    readers: HashMap<u32, Option<Reader>>,
    /// Cached lines by the file's number and the offset in the file.
    lines: HashMap<(u32, u64), Lines>,
    line_bytes: usize,
    uses: u64,
    /// Files that were reported to have no lines, or not all.
    told: HashSet<u32>,
}

/// A process that reads a file's DWARF.
#[derive(Debug)]
struct Reader {
    /// Code segments of the file.
    code: Vec<CodeSegment>,
    child: Child,
    questions: ChildStdin,
    answers: BufReader<ChildStdout>,
    used: u64,
}

impl SourceLines {
    /// Returns the source lines of the instruction at an offset in a file, demangled and escaped; none if they are not
    /// known. `open` finds the file's DWARF.
    pub(crate) fn find(
        &mut self,
        file: &CodeFile,
        offset: u64,
        open: impl FnOnce() -> Option<DebugInfo>,
    ) -> Lines {
        let number = file.number;
        if let Some(known) = self.lines.get(&(number, offset)) {
            return Rc::clone(known);
        }
        let lines = self.ask(number, offset, open).unwrap_or_else(|error| {
            self.readers.insert(number, None);
            Err(format!("{error:#}"))
        });
        let lines = lines.unwrap_or_else(|reason| {
            if self.told.len() < MAX_TOLD && self.told.insert(number) {
                crate::note!("no source lines of {}: {reason}", file.module());
            }
            Vec::new()
        });
        let lines: Lines = lines.into_iter().map(shown).collect();
        let bytes = |line: &SourceLine| {
            let texts = [&line.function, &line.file];
            OVERHEAD + texts.into_iter().flatten().map(String::len).sum::<usize>()
        };
        let bytes = OVERHEAD + lines.iter().map(bytes).sum::<usize>();
        if self.line_bytes + bytes > MAX_LINES {
            self.lines.clear();
            self.line_bytes = 0;
        }
        self.line_bytes += bytes;
        self.lines.insert((number, offset), Rc::clone(&lines));
        lines
    }

    fn ask(
        &mut self,
        number: u32,
        offset: u64,
        open: impl FnOnce() -> Option<DebugInfo>,
    ) -> Result<Result<Vec<SourceLine>, String>> {
        if !self.readers.contains_key(&number) {
            self.end_oldest_reader();
            let reader = open().map(Reader::start).transpose()?;
            self.readers.insert(number, reader);
        }
        self.uses += 1;
        match self.readers.get_mut(&number) {
            Some(Some(reader)) => {
                reader.used = self.uses;
                reader.ask(offset)
            }
            _ => Ok(Ok(Vec::new())),
        }
    }

    /// Ends the least recently used reader if the maximum number of readers is running.
    fn end_oldest_reader(&mut self) {
        let running = self
            .readers
            .iter()
            .filter_map(|(number, reader)| Some((reader.as_ref()?.used, *number)));
        let running: Vec<_> = running.collect();
        if running.len() == MAX_READERS
            && let Some((_, oldest)) = running.into_iter().min()
        {
            self.readers.remove(&oldest);
        }
    }
}

/// Returns a line as it is printed: its function demangled, and all that the file's owner has written escaped.
fn shown(line: SourceLine) -> SourceLine {
    let name = |name: String| text::display_name(&demangle(&name));
    SourceLine {
        function: line.function.map(name),
        file: line.file.map(|file| text::escape(&file).into_owned()),
        line: line.line,
    }
}

impl Reader {
    fn start(info: DebugInfo) -> Result<Self> {
        let files = [
            Some(&info.file),
            info.package.as_ref(),
            info.supplement.as_ref(),
        ];
        // Duplicated descriptors stay open across exec in the child. They are closed here when this function returns.
        let copies = files.map(|file| file.map(dup).transpose());
        let copies: Result<Vec<Option<OwnedFd>>, _> = copies.into_iter().collect();
        let copies = copies.context("failed to pass it on")?;
        let number = |copy: &Option<OwnedFd>| match copy {
            Some(file) => file.as_raw_fd().to_string(),
            None => "-".to_owned(),
        };
        let numbers: Vec<String> = copies.iter().map(number).collect();
        let mut child = Command::new("/proc/self/exe")
            .env_clear()
            .env(VARIABLE, numbers.join(","))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            // Ctrl-C ends the trace, but not the reader, which is needed for the report at the end.
            .process_group(0)
            .spawn()
            .context("failed to start a process that reads them")?;
        let pipes = (child.stdin.take(), child.stdout.take());
        let (Some(questions), Some(answers)) = pipes else {
            bail!("a process without pipes");
        };
        Ok(Self {
            code: info.code,
            child,
            questions,
            answers: BufReader::new(answers),
            used: 0,
        })
    }

    /// Asks for the source lines at an offset in the file. The inner error says why the file's DWARF does not have
    /// them.
    ///
    /// # Errors
    /// If no answer comes, and none will come.
    fn ask(&mut self, offset: u64) -> Result<Result<Vec<SourceLine>, String>> {
        const ENDED: &str =
            "the process that reads them has ended: its debug information is damaged, or too large";
        let Some(address) = elf::address(&self.code, offset) else {
            return Ok(Ok(Vec::new()));
        };
        writeln!(self.questions, "{address:x}").context(ENDED)?;
        self.wait()?;
        let mut answer = Vec::new();
        let mut from = (&mut self.answers).take(MAX_ANSWER);
        from.read_until(b'\n', &mut answer)?;
        ensure!(answer.ends_with(b"\n"), ENDED);
        Ok(serde_json::from_slice(&answer)?)
    }

    /// Waits for an answer to begin.
    fn wait(&self) -> Result<()> {
        const PAUSE: u16 = 50;
        let started = Instant::now();
        let pipe = self.answers.get_ref().as_fd();
        while poll(&mut [PollFd::new(pipe, PollFlags::POLLIN)], PAUSE)? == 0 {
            limits::check_interrupted()?;
            ensure!(
                started.elapsed() < MAX_TIME,
                "they take more than {} s to find",
                MAX_TIME.as_secs()
            );
        }
        Ok(())
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        // The reader may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Runs as a reader of source lines if this process was started as one, until the process that started it has no more
/// requests. Returns None if it was not.
pub(crate) fn run_reader() -> Option<ExitCode> {
    let files = env::var(VARIABLE).ok()?;
    let answered = read_for(&files);
    Some(if answered.is_ok() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

fn read_for(files: &str) -> Result<()> {
    give_up_privileges()?;
    let mut files = files.split(',').map(inherited);
    let mut next = || files.next().transpose().map(Option::flatten);
    let (file, package, supplement) = (next()?, next()?, next()?);
    let file = file.context("no file")?;
    let lines = FileLines::read(&file, package.as_ref(), supplement.as_ref());
    for question in io::stdin().lines() {
        let address = u64::from_str_radix(&question?, 16)?;
        let answer = match &lines {
            Ok(lines) => lines.find(address).map_err(|error| format!("{error:#}")),
            Err(error) => Err(format!("{error:#}")),
        };
        let mut answer = serde_json::to_vec(&answer)?;
        answer.push(b'\n');
        io::stdout().write_all(&answer)?;
        io::stdout().flush()?;
    }
    Ok(())
}

/// Opens the file descriptor that [`Reader::start`] passed on by its number. Returns None for `-`.
fn inherited(number: &str) -> Result<Option<File>> {
    if number == "-" {
        return Ok(None);
    }
    let number: RawFd = number.parse()?;
    ensure!(number > 2, "a standard stream");
    // SAFETY: nothing else in this process has opened or closed a file yet. If the descriptor is not open, every
    // operation on it fails.
    Ok(Some(unsafe { File::from_raw_fd(number) }))
}

/// Drops all privileges and sets resource limits: a program that parses foreign data needs no rights.
fn give_up_privileges() -> Result<()> {
    for set in [CapSet::Effective, CapSet::Permitted] {
        caps::clear(None, set)?;
    }
    prctl::set_no_new_privs()?;
    let limits = [
        (Resource::RLIMIT_DATA, MAX_MEMORY),
        (Resource::RLIMIT_CPU, MAX_CPU),
        (Resource::RLIMIT_CORE, 0),
        (Resource::RLIMIT_FSIZE, 0),
    ];
    for (resource, limit) in limits {
        setrlimit(resource, limit, limit)?;
    }
    prctl::set_name(c"memtools-lines")?;
    Ok(())
}
