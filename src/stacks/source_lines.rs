//! Source lines of the code in files that processes have mapped, read by processes made for that.
//!
//! Each file's DWARF is read by a process of its own ([`answer`]), which is started when the first line is asked for: this
//! very program, without privileges, with the file open and a limit to its memory and CPU time. Whatever the
//! file's owner has written there, that process ends alone, and the file has no source lines. It is asked over a pipe:
//! an address on a line, answered by a line of JSON.

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

use crate::code::elf::CodeSegment;
use crate::code::limits;
use crate::code::lines::{FileLines, SourceLine};
use crate::print::demangle::demangle;
use crate::print::text;
use crate::process::address_space::CodeFile;
use crate::stacks::debug_files::DebugInfo;

/// The environment variable that has this program read source lines: the numbers of the file's descriptor, of its
/// package's and of its supplement's, with commas between them; `-` for none.
const VARIABLE: &str = "MEMTOOLS_LINES";
/// Files that are read at a time.
const MAX_READERS: usize = 8;
/// Bytes of memory for one file, beside what is mapped of it: sections that are compressed.
const MAX_MEMORY: u64 = 256 << 20;
/// CPU time for one file, in seconds: debug information of 1 GB takes 2 s.
const MAX_CPU: u64 = 20;
/// How long one answer is waited for, on a machine that is busy.
const MAX_TIME: Duration = Duration::from_secs(60);
/// Bytes of one answer: more than the most and longest functions and paths.
const MAX_ANSWER: u64 = 4 << 20;
/// Files that are told to have no lines: whoever makes many of them would fill the screen.
const MAX_TOLD: usize = 16;
/// Bytes of all lines that are kept.
const MAX_LINES: usize = 16 << 20;
/// Bytes that a line takes beside its text.
const OVERHEAD: usize = 96;

/// The source lines of one place, innermost first.
type Lines = Rc<[SourceLine]>;

/// Source lines by file and address.
#[derive(Debug, Default)]
pub(crate) struct SourceLines {
    /// By the file's number; None of one that has no lines.
    readers: HashMap<u32, Option<Reader>>,
    /// By the file's number and the offset in it.
    lines: HashMap<(u32, u64), Lines>,
    line_bytes: usize,
    uses: u64,
    /// Files that are said to have no lines, or not all.
    told: HashSet<u32>,
}

/// A process that reads a file's DWARF.
#[derive(Debug)]
struct Reader {
    /// The file's code.
    code: Vec<CodeSegment>,
    child: Child,
    questions: ChildStdin,
    answers: BufReader<ChildStdout>,
    used: u64,
}

impl SourceLines {
    /// The source lines of the instruction at an offset in a file, demangled and escaped; none if they are not
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
                eprintln!("no source lines of {}: {reason}", file.module());
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
            self.make_room();
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

    /// Ends the reader that has not been used for longest, if there are as many as may be.
    fn make_room(&mut self) {
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

/// The address in the file's own address space of what is at an offset in it.
fn address_of(code: &[CodeSegment], offset: u64) -> Option<u64> {
    code.iter().find_map(|segment| {
        let within = offset.checked_sub(segment.file_offset)?;
        (within < segment.size).then_some(segment.address + within)
    })
}

/// A line as it is printed: its function demangled, and all that its file's owner has written escaped.
fn shown(line: SourceLine) -> SourceLine {
    let name = |name: String| text::shown(&demangle(&name));
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
        // Copies that exec leaves open, and that are closed here once it has been called.
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
            // Ctrl-C ends the trace, and what this has read is for the report at its end.
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

    /// The lines of what is at an offset in the file, or why the file's DWARF does not tell them.
    ///
    /// # Errors
    /// If there is no answer, nor will there be.
    fn ask(&mut self, offset: u64) -> Result<Result<Vec<SourceLine>, String>> {
        const ENDED: &str =
            "the process that reads them has ended: its debug information is damaged, or too large";
        let Some(address) = address_of(&self.code, offset) else {
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
            limits::expect_no_end()?;
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
        // If it has ended, there is nothing to end.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Reads source lines for the process that started this one, until that has no more questions, if this is what it was
/// started for.
pub(crate) fn answer() -> Option<ExitCode> {
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

/// What is open under this number, which [`Reader::start`] has passed on; None of `-`.
fn inherited(number: &str) -> Result<Option<File>> {
    if number == "-" {
        return Ok(None);
    }
    let number: RawFd = number.parse()?;
    ensure!(number > 2, "a standard stream");
    // SAFETY: nothing else in this process has opened or closed anything yet; a number that is not open is
    // refused by whatever is asked of it.
    Ok(Some(unsafe { File::from_raw_fd(number) }))
}

/// What reads what others have written needs to be allowed nothing.
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
