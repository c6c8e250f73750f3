//! Rows on stdout or in a file, as text or as JSON, one object per line.

use std::fmt;
use std::fs::File;
use std::io::{self, BufWriter, IsTerminal, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signalfd::SignalFd;
use serde::{Serialize, Serializer};

use crate::print::file_name::FileName;
use crate::print::identity::Identity;
use crate::print::timeline::{Count, Timeline, TimelineEntry};

/// Bytes that can be written to a pipe without blocking whenever it is writable at all (PIPE_BUF).
const PIECE: usize = 4096;
/// Time that a reader that does not read gets after Ctrl-C.
const LAST_CHANCE: Duration = Duration::from_secs(1);

/// Something that a tool prints. Its fields are its JSON. `text` writes the line or lines of the default format, each
/// with its newline.
pub trait Row: Serialize {
    /// Writes the text form.
    ///
    /// # Errors
    /// If `out` cannot be written to.
    fn text(&self, out: &mut dyn Write) -> io::Result<()>;

    /// Returns what the row is on a timeline.
    fn moment(&self) -> TimelineEntry<'_> {
        TimelineEntry::None
    }
}

/// Format in which rows are printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// Columns as in the BCC tools.
    Text,
    /// One JSON object per line.
    Json,
    /// One line for each stack, for flame graphs. Nothing else is printed on stdout.
    Folded,
}

/// Buffered stdout, or a file. Nothing reaches the reader before [`Output::flush`], so that a burst of rows takes one
/// write.
pub struct Output {
    format: Format,
    out: BufWriter<Sink>,
    /// Buffer for the object that is being printed, reused for the next one.
    json: Vec<u8>,
    timeline: Option<Box<dyn Timeline>>,
    /// The file that the output goes to, if it is a regular file.
    log: Option<LogFile>,
}

/// The signals that end a run, which are blocked, for an output that waits for its reader.
#[derive(Debug)]
pub struct StopSignals {
    /// Readable when such a signal has arrived and has not been taken.
    pub arrived: SignalFd,
    /// Whether such a signal was taken. Then the last report of the run waits for its reader and says so, and another
    /// signal ends that wait.
    pub taken: Arc<AtomicBool>,
}

/// A regular file that another program may rename, to have a new one begun.
struct LogFile {
    place: FileName,
    /// Whether the file is to be opened by its name again.
    is_rotated: Arc<AtomicBool>,
}

impl Output {
    /// Creates an output to stdout in this format. If stdout is not read, a signal that ends the run also ends the
    /// wait: the print then fails with [`ReaderStalled`].
    ///
    /// # Errors
    /// If there are no descriptors left.
    pub fn stdout(format: Format, stop: StopSignals) -> Result<Self> {
        let stdout = io::stdout();
        let out = stdout.as_fd().try_clone_to_owned();
        let out = out.context("failed to open stdout again")?;
        let pipe = Pipe::new(out, stdout.is_terminal(), stop);
        Ok(Self::to(format, Sink::Stdout(pipe)))
    }

    /// Creates an output to a file, which is created or emptied. What is not a regular file, such as a FIFO, is written
    /// to as [`Output::stdout`] writes to a pipe.
    ///
    /// # Errors
    /// If the file cannot be written to, or if another user could have had another file opened.
    pub fn file(format: Format, path: &Path, stop: StopSignals) -> Result<Self> {
        let place = FileName::find(path)?;
        let open = || -> Result<Sink> {
            let file = place.open_empty()?;
            if !file.metadata()?.is_file() {
                let is_terminal = file.is_terminal();
                return Ok(Sink::Pipe(Pipe::new(file.into(), is_terminal, stop)));
            }
            Ok(Sink::File(file))
        };
        let sink = open();
        let sink = sink.with_context(|| format!("failed to write {}", place.shown()))?;
        let log = matches!(sink, Sink::File(_)).then(|| LogFile {
            place,
            is_rotated: Arc::default(),
        });
        Ok(Self {
            log,
            ..Self::to(format, sink)
        })
    }

    fn to(format: Format, sink: Sink) -> Self {
        Self {
            format,
            out: BufWriter::with_capacity(64 << 10, sink),
            json: Vec::new(),
            timeline: None,
            log: None,
        }
    }

    /// Returns the flag that has the output open its file by name again before the next row, as for logrotate(8). Only
    /// an output to a regular file has this flag.
    pub fn rotation(&self) -> Option<Arc<AtomicBool>> {
        self.log.as_ref().map(|log| Arc::clone(&log.is_rotated))
    }

    /// Opens the file by its name again if that is wanted. All rows so far are in the old file.
    fn follow_rotation(&mut self) -> io::Result<()> {
        let Some(log) = &self.log else {
            return Ok(());
        };
        if !log.is_rotated.swap(false, Ordering::Relaxed) {
            return Ok(());
        }
        self.out.flush()?;
        match log.place.open_append() {
            Ok(file) => *self.out.get_mut() = Sink::File(file),
            Err(error) => crate::message!(
                "failed to open {} again: {error:#}; writing to the old file",
                log.place.shown()
            ),
        }
        Ok(())
    }

    /// Returns the output with a timeline, which also gets the rows.
    #[must_use]
    pub(crate) fn with_timeline(self, timeline: impl Timeline + 'static) -> Self {
        Self {
            timeline: Some(Box::new(timeline)),
            ..self
        }
    }

    /// Whether there is a timeline.
    pub(crate) fn has_timeline(&self) -> bool {
        self.timeline.is_some()
    }

    /// Whether the output is stdout, whose reader can leave.
    pub(crate) fn is_stdout(&self) -> bool {
        matches!(self.out.get_ref(), Sink::Stdout(_))
    }

    /// Prints one row.
    ///
    /// # Errors
    /// If the output cannot be written to, as its reader has left or its disk is full.
    pub fn row(&mut self, row: &impl Row) -> Result<()> {
        if let Some(timeline) = &mut self.timeline {
            match row.moment() {
                TimelineEntry::None => {}
                TimelineEntry::Event(event) => timeline.event(&event, &serde_json::to_value(row)?),
                TimelineEntry::Counts(counts) => {
                    counts.iter().for_each(|count| timeline.count(count))
                }
                TimelineEntry::Remark(name) => timeline.remark(name, &serde_json::to_value(row)?),
            }
        }
        self.follow_rotation().context("failed to print")?;
        match self.format {
            Format::Text => row.text(&mut self.out),
            Format::Json => self.object(row),
            Format::Folded => Ok(()),
        }
        .context("failed to print")
    }

    /// Prints one object per line, with the tool's [`Identity`] at its end.
    fn object(&mut self, row: &impl Row) -> io::Result<()> {
        self.json.clear();
        serde_json::to_writer(&mut self.json, row)?;
        // The two objects are one: the braces where they meet give way to a comma.
        self.json.pop();
        let end = self.json.len();
        serde_json::to_writer(&mut self.json, &Identity::of_this_tool())?;
        self.json[end] = b',';
        self.json.push(b'\n');
        self.out.write_all(&self.json)
    }

    /// Prints the line of column names, which only text has.
    ///
    /// # Errors
    /// If the output cannot be written to, as its reader has left or its disk is full.
    pub fn header(&mut self, line: &str) -> Result<()> {
        self.follow_rotation().context("failed to print")?;
        if self.format == Format::Text {
            writeln!(self.out, "{line}").context("failed to print")?;
        }
        Ok(())
    }

    /// Prints something other than a row, such as a folded stack.
    ///
    /// # Errors
    /// If the output cannot be written to, as its reader has left or its disk is full.
    pub fn raw(&mut self, write: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> Result<()> {
        self.follow_rotation().context("failed to print")?;
        write(&mut self.out).context("failed to print")
    }

    /// Adds to a count of the timeline, if there is one. For counts that are in no row.
    pub fn count(&mut self, count: &Count<'_>) {
        if let Some(timeline) = &mut self.timeline {
            timeline.count(count);
        }
    }

    /// Writes the buffered output for the reader; to be called once per wake-up.
    ///
    /// # Errors
    /// If the output cannot be written to, as its reader has left or its disk is full.
    pub fn flush(&mut self) -> Result<()> {
        if let Some(timeline) = &mut self.timeline {
            timeline.flush();
        }
        self.out.flush().context("failed to print")?;
        self.follow_rotation().context("failed to print")
    }

    /// Writes the buffered output, and ends the timeline, if there is one.
    ///
    /// # Errors
    /// If not all of the output or of the timeline could be written.
    pub fn finish(mut self) -> Result<()> {
        let printed = self.flush();
        let timeline = self.timeline.as_mut();
        let ended = timeline.map_or(Ok(()), |timeline| timeline.finish());
        // A reader that has left is no failure, and must not hide one.
        ended.and(printed)
    }
}

/// Destination of an output.
enum Sink {
    Stdout(Pipe),
    /// FIFO or device that an option names.
    Pipe(Pipe),
    File(File),
}

impl Write for Sink {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Self::Stdout(pipe) | Self::Pipe(pipe) => pipe.write(bytes),
            Self::File(file) => file.write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match self {
            Self::Stdout(_) | Self::Pipe(_) => Ok(()),
            Self::File(file) => file.flush(),
        }
    }
}

/// Output that can be a full pipe.
struct Pipe {
    out: OwnedFd,
    is_terminal: bool,
    stop: StopSignals,
    /// Whether the message that the last report waits was printed.
    has_warned: bool,
    given_up: bool,
}

impl Pipe {
    fn new(out: OwnedFd, is_terminal: bool, stop: StopSignals) -> Self {
        Self {
            out,
            is_terminal,
            stop,
            has_warned: false,
            given_up: false,
        }
    }

    /// Writes at most [`PIECE`] bytes, and only once they can be written without blocking.
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let piece = &bytes[..bytes.len().min(PIECE)];
        if self.given_up || !self.wait_for_room()? {
            self.given_up = true;
            return Err(io::Error::other(ReaderStalled));
        }
        nix::unistd::write(&self.out, piece).map_err(|errno| write_error(errno, self.is_terminal))
    }

    /// Waits until stdout is writable, or has an error that the write will meet. Returns false if a signal comes that
    /// ends the run, and stdout is still full a second later.
    fn wait_for_room(&mut self) -> io::Result<bool> {
        let (out, stop) = (self.out.as_fd(), self.stop.arrived.as_fd());
        let is_last = self.stop.taken.load(Ordering::Relaxed);
        let patience = (is_last && !self.has_warned).then_some(LAST_CHANCE);
        let mut room = wait_for_room(out, stop, patience)?;
        if room == WaitOutcome::TimedOut {
            say_that_it_waits();
            self.has_warned = true;
            room = wait_for_room(out, stop, None)?;
        }
        Ok(room == WaitOutcome::Writable)
    }
}

/// Returns the error of a write. A closed terminal, where writes fail with EIO, has lost its reader like a closed pipe.
/// EIO of a file is an error of its disk.
fn write_error(errno: Errno, is_terminal: bool) -> io::Error {
    if errno == Errno::EIO && is_terminal {
        io::ErrorKind::BrokenPipe.into()
    } else {
        errno.into()
    }
}

/// Outcome of waiting for a reader.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum WaitOutcome {
    /// The output is writable, or has an error that the write will meet.
    Writable,
    /// The output is still full, and the time is up.
    TimedOut,
    /// A signal came that ends the run, and the output was still full a second later.
    Abandoned,
}

/// Reports on stderr that the run's last report waits for its reader, unless stderr has no reader either.
fn say_that_it_waits() {
    let stderr = io::stderr();
    let mut sources = [PollFd::new(stderr.as_fd(), PollFlags::POLLOUT)];
    if poll(&mut sources, PollTimeout::ZERO).is_ok_and(|ready| ready > 0) {
        crate::message!("the last report waits for its reader; another Ctrl-C gives it up");
    }
}

/// Waits until `out` is writable, for a signal of `stop`, or for the duration `patience`.
fn wait_for_room(
    out: BorrowedFd<'_>,
    stop: BorrowedFd<'_>,
    patience: Option<Duration>,
) -> io::Result<WaitOutcome> {
    let until = patience.map(|patience| Instant::now() + patience);
    let mut give_up_at: Option<Instant> = None;
    loop {
        let mut sources = [
            PollFd::new(out, PollFlags::POLLOUT),
            PollFd::new(stop, PollFlags::POLLIN),
        ];
        let awaited = if give_up_at.is_none() { 2 } else { 1 };
        let timeout = give_up_at.or(until).map_or(PollTimeout::NONE, |at| {
            let left = at.saturating_duration_since(Instant::now());
            PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX)
        });
        match poll(&mut sources[..awaited], timeout) {
            Ok(0) if give_up_at.is_some() => return Ok(WaitOutcome::Abandoned),
            Ok(0) => return Ok(WaitOutcome::TimedOut),
            Ok(_) if sources[0].any() != Some(false) => return Ok(WaitOutcome::Writable),
            Ok(_) => give_up_at = Some(Instant::now() + LAST_CHANCE),
            Err(Errno::EINTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

/// Error: the output was not read, and the run was to end.
#[derive(Debug)]
pub struct ReaderStalled;

impl fmt::Display for ReaderStalled {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the output has no reader: the rest is lost")
    }
}

impl std::error::Error for ReaderStalled {}

/// A number that is printed in hexadecimal, such as an address: `0x7f12`, in JSON as a string.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Hex(pub u64);

impl fmt::Display for Hex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&format!("{:#x}", self.0))
    }
}

impl Serialize for Hex {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// A 64-bit number that a program chose. In JSON it is a string from 2^53 on, since a reader that keeps numbers as
/// doubles would round it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Exact(pub u64);

impl Serialize for Exact {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if self.0 < 1 << f64::MANTISSA_DIGITS {
            serializer.serialize_u64(self.0)
        } else {
            serializer.collect_str(&self.0)
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::OpenOptionsExt;

    use nix::fcntl::OFlag;
    use nix::sys::signal::{SigSet, Signal, raise};
    use nix::unistd::pipe2;

    use super::*;

    #[test]
    fn numbers_that_a_double_would_round_are_strings() {
        let texts = [0, (1 << 53) - 1, 1 << 53, u64::MAX].map(|number| {
            let json = serde_json::to_string(&Exact(number));
            json.expect("JSON")
        });
        assert_eq!(
            texts,
            [
                "0",
                "9007199254740991",
                "\"9007199254740992\"",
                "\"18446744073709551615\""
            ]
        );
    }

    /// Row that is longer or shorter than the buffer.
    #[derive(Serialize)]
    struct Line(usize);

    impl Row for Line {
        fn text(&self, out: &mut dyn Write) -> io::Result<()> {
            writeln!(out, "{:width$}", "", width = self.0)
        }
    }

    fn file(path: &Path) -> Result<Output> {
        let stop = StopSignals {
            arrived: SignalFd::new(&SigSet::empty()).expect("a signalfd"),
            taken: Arc::default(),
        };
        Output::file(Format::Text, path, stop)
    }

    #[test]
    fn a_file_that_was_renamed_or_emptied_is_followed() {
        let folder = tempfile::tempdir().expect("a directory");
        let (path, old) = (folder.path().join("log"), folder.path().join("log.1"));
        fs::write(&path, "of an earlier run").expect("room");
        let mut output = file(&path).expect("writable");
        let mut print = |width| {
            output.row(&Line(width)).expect("room");
            output.flush().expect("room");
        };
        print(1);
        // As logrotate does with copytruncate.
        fs::write(&path, "").expect("room");
        print(2);
        assert_eq!(fs::read(&path).expect("a file"), b"  \n");
        fs::rename(&path, &old).expect("it is ours");
        print(3);
        assert!(!path.exists(), "nothing has said that it was renamed");
        let is_rotated = output.rotation().expect("a regular file");
        is_rotated.store(true, Ordering::Relaxed);
        output.row(&Line(4)).expect("room");
        output.finish().expect("room");
        assert_eq!(fs::read(&old).expect("a file"), b"  \n   \n");
        assert_eq!(fs::read(&path).expect("a file"), b"    \n");
    }

    #[test]
    fn a_fifo_is_refused_at_once_unless_a_program_reads_it() {
        let folder = tempfile::tempdir().expect("a directory");
        let path = folder.path().join("fifo");
        nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).expect("a FIFO");
        let error = file(&path).err().expect("no reader");
        let error = format!("{error:#}");
        assert!(error.contains("no program reads this FIFO"), "{error}");
        let reader = File::options();
        let reader = reader
            .clone()
            .read(true)
            .custom_flags(libc::O_NONBLOCK)
            .open(&path);
        let mut reader = reader.expect("it opens");
        let mut output = file(&path).expect("it is read");
        assert!(output.rotation().is_none(), "it is no regular file");
        output.row(&Line(3)).expect("room");
        output.finish().expect("room");
        let mut text = String::new();
        io::Read::read_to_string(&mut reader, &mut text).expect("it was written");
        assert_eq!(text, "   \n");
    }

    #[test]
    fn rows_that_cannot_be_written_are_an_error_at_the_end() {
        let mut output = file(Path::new("/dev/full")).expect("it opens");
        output.row(&Line(1)).expect("the buffer takes it");
        let error = output.finish().expect_err("the device is full");
        let cause = error.downcast_ref::<io::Error>().expect("the system's");
        assert_eq!(cause.raw_os_error(), Some(libc::ENOSPC));
    }

    #[test]
    fn only_a_terminal_s_reader_leaves_by_an_error_of_input_or_output() {
        let kind = |errno, is_terminal| write_error(errno, is_terminal).kind();
        assert_eq!(kind(Errno::EIO, true), io::ErrorKind::BrokenPipe);
        assert_ne!(kind(Errno::EIO, false), io::ErrorKind::BrokenPipe);
        assert_eq!(kind(Errno::EPIPE, false), io::ErrorKind::BrokenPipe);
        assert_eq!(kind(Errno::ENOSPC, true), io::ErrorKind::StorageFull);
    }

    #[test]
    fn a_full_pipe_is_given_up_after_a_signal_and_not_before() {
        let (_reader, writer) = pipe2(OFlag::O_CLOEXEC | OFlag::O_NONBLOCK).expect("a pipe");
        let mut set = SigSet::empty();
        set.add(Signal::SIGWINCH);
        set.thread_block().expect("it is blocked");
        let stop = SignalFd::new(&set).expect("a signalfd");
        let room =
            |patience| wait_for_room(writer.as_fd(), stop.as_fd(), patience).expect("a wait");
        assert_eq!(room(None), WaitOutcome::Writable);
        raise(Signal::SIGWINCH).expect("a signal");
        assert_eq!(
            room(None),
            WaitOutcome::Writable,
            "there is room all the same"
        );
        while nix::unistd::write(&writer, &[0; PIECE]).is_ok() {}
        assert_eq!(room(None), WaitOutcome::Abandoned);
        stop.read_signal().expect("a signal");
        assert_eq!(room(Some(Duration::from_millis(1))), WaitOutcome::TimedOut);
    }
}
