//! Table of all code objects that the BPF side has met, keyed by the words that identify them in stacks.
//!
//! The BPF side sends a code object before it stores the first stack that contains the code object. A thread reads
//! the ring buffer as it fills. Texts that do not fit into a record are read from the process's memory, where they
//! stay until the code object is freed. A lookup of an unknown code object waits until all records that were sent
//! before are read ([`Codes::get`]).

use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::io::Read;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result};
use libbpf_rs::{MapHandle, MapMut};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::unistd;

use crate::bpf::map_create::reopen;
use crate::bpf::ring::Events;
use crate::bpf::types::python_code as Header;
use crate::interpreters::memory::Memory;
use crate::interpreters::python::code::{Characters, Code};
use crate::print::text;

/// Maximum memory for code objects, in bytes. A large program has 50,000, which take 20 MB.
const MAX_BYTES: usize = 64 << 20;
/// Maximum number of bytes that are read of a text: as many characters as are shown, of 4 bytes each.
const MAX_TEXT: usize = 4 * text::MAX_NAME;
/// Maximum number of bytes that are read of a line table. The longest one in the standard library has 37 KB.
const MAX_LINES: usize = 1 << 20;
/// Maximum time that a lookup waits for records to be read.
const PATIENCE: Duration = Duration::from_secs(2);

/// Bits of a word in a stack that identify the code object.
const CODE_BITS: u64 = !((1 << super::lines::Instruction::BITS) - 1);

/// Result of looking up a word.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CodeLookup {
    /// The code object.
    Code(Arc<Code>),
    /// Two different code objects have the same word: a frame with this word may belong to either.
    Ambiguous,
    /// No code object was sent for this word, or its record was dropped.
    Unknown,
}

impl CodeLookup {
    /// Adds another record with the same word.
    fn merge(&mut self, code: Code) {
        match self {
            Self::Code(known) if is_same(known, &code) => {
                if known.lines.is_none() && code.lines.is_some() {
                    *known = Arc::new(code);
                }
            }
            _ => *self = Self::Ambiguous,
        }
    }

    /// Returns the approximate size of an entry of the table with this result, in bytes.
    fn size(&self) -> usize {
        let code = match self {
            Self::Code(code) => code.size(),
            Self::Ambiguous | Self::Unknown => 0,
        };
        size_of::<(u64, Self)>() + code
    }
}

/// Table of code objects, with bounded memory.
#[derive(Debug, Default)]
struct Table {
    by_word: HashMap<u64, CodeLookup>,
    /// Size of all entries.
    bytes: usize,
    /// Number of code objects that were dropped because the table was full.
    dropped: u64,
}

impl Table {
    fn add(&mut self, word: u64, code: Code) {
        match self.by_word.entry(word & CODE_BITS) {
            Entry::Vacant(_) if self.bytes >= MAX_BYTES => self.dropped += 1,
            Entry::Vacant(entry) => {
                let known = entry.insert(CodeLookup::Code(Arc::new(code)));
                self.bytes += known.size();
            }
            Entry::Occupied(mut entry) => {
                let known = entry.get_mut();
                self.bytes -= known.size();
                known.merge(code);
                self.bytes += known.size();
            }
        }
    }

    fn get(&self, word: u64) -> CodeLookup {
        let known = self.by_word.get(&(word & CODE_BITS));
        known.cloned().unwrap_or(CodeLookup::Unknown)
    }
}

/// Returns whether two records can describe the same code object. A code object that the BPF side has forgotten is
/// sent again, and one of the records can lack the line table.
fn is_same(one: &Code, other: &Code) -> bool {
    let head = |code: &Code| (code.first_line, code.minor);
    let lines = match (&one.lines, &other.lines) {
        (Some(one), Some(other)) => one == other,
        _ => true,
    };
    head(one) == head(other) && one.name == other.name && one.file == other.file && lines
}

/// Record of a code object, as the BPF side has sent it.
#[derive(Debug)]
struct Record {
    header: Header,
    file: Vec<u8>,
    name: Vec<u8>,
    lines: Vec<u8>,
}

impl Record {
    /// Decodes a record. None if there are too few bytes.
    fn decode(bytes: &[u8]) -> Option<Self> {
        let header: Header = *plain::from_bytes(bytes).ok()?;
        let mut rest = bytes.get(size_of::<Header>()..)?;
        let mut piece = |length: u16| -> Option<Vec<u8>> {
            let (piece, others) = rest.split_at_checked(length.into())?;
            rest = others;
            Some(piece.to_vec())
        };
        Some(Self {
            file: piece(header.file_bytes)?,
            name: piece(header.name_bytes)?,
            lines: piece(header.lines_bytes)?,
            header,
        })
    }

    /// Builds the code object. None if it has no name. What the record does not contain is read by `memory`, which
    /// takes an address in the process and a length.
    fn code(self, memory: &mut impl FnMut(u64, usize) -> Option<Vec<u8>>) -> Option<Code> {
        let header = &self.header;
        let mut whole = |sent: Vec<u8>, at: u64, length: u32, most: usize| {
            let length = usize::try_from(length).unwrap_or(usize::MAX).min(most);
            if at == 0 || sent.len() >= length {
                return sent;
            }
            // Another text may be at this address by now: then it does not begin with the bytes that were sent.
            let read = memory(at, length).filter(|read| read.starts_with(&sent));
            read.unwrap_or(sent)
        };
        let file = whole(self.file, header.file_at, header.file_length, MAX_TEXT);
        let name = whole(self.name, header.name_at, header.name_length, MAX_TEXT);
        if name.is_empty() {
            return None;
        }
        // An incomplete line table is of no use.
        let length = header.lines_length as usize;
        let is_wanted = header.lines_at != 0 && length <= MAX_LINES;
        let lines = is_wanted
            .then(|| whole(self.lines, header.lines_at, header.lines_length, MAX_LINES))
            .filter(|lines| lines.len() == length);
        Some(Code {
            file: Characters::of_kind(header.file_kind)?.text(&file),
            name: Characters::of_kind(header.name_kind)?.text(&name),
            first_line: header.first_line,
            minor: header.minor,
            lines: lines.map(Vec::into_boxed_slice),
        })
    }
}

/// Reads bytes of a process's memory. None if they cannot be read.
fn read_memory(pid: u32, address: u64, length: usize) -> Option<Vec<u8>> {
    Memory::open(pid).ok()?.read(address, length).ok()
}

/// Shared handle to the table of code objects. The thread that fills the table ends when the last clone is dropped.
#[derive(Debug, Clone)]
pub struct Codes(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    table: Arc<Mutex<Table>>,
    reader: Mutex<Reader>,
}

/// The requesting side of the thread that reads records.
#[derive(Debug)]
struct Reader {
    /// Pipe for requests: each byte asks the thread to answer when all records that were sent before are read. The
    /// thread ends when the pipe is closed.
    ask: OwnedFd,
    answers: mpsc::Receiver<()>,
    /// Words for which a lookup has found nothing.
    in_vain: HashSet<u64>,
}

impl Codes {
    /// Starts a thread that reads the skeleton's map `python_codes`.
    ///
    /// # Errors
    /// If the map cannot be opened a second time, or the pipe or the thread cannot be created.
    pub fn start(ring: &MapMut<'_>) -> Result<Self> {
        let ring = reopen(ring)?;
        let (questions, ask) = unistd::pipe().context("failed to open a pipe")?;
        let (answer, answers) = mpsc::channel();
        let table: Arc<Mutex<Table>> = Arc::default();
        let shared = Arc::clone(&table);
        thread::Builder::new()
            .name("python".into())
            .spawn(move || {
                if let Err(error) = read(&ring, File::from(questions), &answer, &shared) {
                    crate::note!("names of Python functions are no longer read: {error:#}");
                }
            })
            .context("failed to start a thread")?;
        let reader = Reader {
            ask,
            answers,
            in_vain: HashSet::new(),
        };
        Ok(Self(Arc::new(Shared {
            table,
            reader: Mutex::new(reader),
        })))
    }

    /// Looks up the code object of a word in a stack. If the word is unknown, the lookup first waits until all
    /// records that were sent before are read.
    pub fn get(&self, word: u64) -> CodeLookup {
        let known = lock(&self.0.table).get(word);
        if known != CodeLookup::Unknown {
            return known;
        }
        let mut reader = lock(&self.0.reader);
        if reader.in_vain.contains(&(word & CODE_BITS)) {
            return CodeLookup::Unknown;
        }
        reader.wait();
        let known = lock(&self.0.table).get(word);
        if known == CodeLookup::Unknown {
            reader.in_vain.insert(word & CODE_BITS);
        }
        known
    }

    /// Forgets which words were looked up in vain, so that the next lookups wait for records again.
    pub fn refresh(&self) {
        lock(&self.0.reader).in_vain.clear();
    }

    /// Returns how many code objects were dropped because the table was full.
    pub fn dropped(&self) -> u64 {
        lock(&self.0.table).dropped
    }
}

impl Reader {
    /// Waits until all records that were sent before are read.
    fn wait(&mut self) {
        // A late answer to the previous request may still be in the channel.
        while self.answers.try_recv().is_ok() {}
        if unistd::write(&self.ask, &[0]) == Ok(1) {
            // A missing answer means that the thread has ended and printed why, or that it is late.
            let _ = self.answers.recv_timeout(PATIENCE);
        }
    }
}

/// Reads records and answers requests until the pipe for requests is closed.
fn read(
    ring: &MapHandle,
    mut questions: File,
    answer: &mpsc::Sender<()>,
    table: &Mutex<Table>,
) -> Result<()> {
    let records = Events::decoding(ring, Record::decode)?;
    loop {
        let mut sources = [
            PollFd::new(questions.as_fd(), PollFlags::POLLIN),
            PollFd::new(records.as_fd(), PollFlags::POLLIN),
        ];
        match poll(&mut sources, PollTimeout::NONE) {
            Ok(_) | Err(Errno::EINTR) => {}
            Err(error) => return Err(error).context("failed to wait for them"),
        }
        let asked = sources[0].any() == Some(true);
        let asked = match asked.then(|| questions.read(&mut [0])).transpose() {
            Ok(Some(0)) => return Ok(()),
            Ok(asked) => asked.is_some(),
            Err(error) => return Err(error).context("failed to read a pipe"),
        };
        for record in records.drain()? {
            let (word, pid) = (record.header.word, record.header.pid);
            let mut memory = |address, length| read_memory(pid, address, length);
            if let Some(code) = record.code(&mut memory) {
                lock(table).add(word, code);
            }
        }
        if asked && answer.send(()).is_err() {
            return Ok(());
        }
    }
}

/// Locks a mutex even if it is poisoned: a table is consistent between two calls, even if a thread has panicked.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn header() -> Header {
        Header {
            word: 1 << 63 | 5 << 20,
            file_at: 0x1000,
            name_at: 0x2000,
            lines_at: 0x3000,
            file_length: 9,
            name_length: 4,
            lines_length: 2,
            pid: 7,
            first_line: 41,
            file_bytes: 9,
            name_bytes: 4,
            lines_bytes: 2,
            file_kind: 1,
            name_kind: 1,
            minor: 12,
            ..Header::default()
        }
    }

    fn bytes(header: &Header, rest: &[u8]) -> Vec<u8> {
        // SAFETY: the header is plain data.
        let head = unsafe { plain::as_bytes(header) };
        [head, rest].concat()
    }

    fn code(header: &Header, rest: &[u8], memory: &[(u64, &[u8])]) -> Option<Code> {
        let mut read = |at, length| {
            let found = memory.iter().find(|&&(address, _)| address == at)?.1;
            found.get(..length).map(<[u8]>::to_vec)
        };
        Record::decode(&bytes(header, rest))?.code(&mut read)
    }

    #[test]
    fn a_record_is_read_as_it_was_sent() {
        let code = code(&header(), b"orders.pyload\xe8\x04", &[]).expect("a code object");
        assert_eq!((&*code.file, &*code.name), ("orders.py", "load"));
        assert_eq!((code.first_line, code.minor), (41, 12));
        assert_eq!(code.lines.as_deref(), Some(&[0xe8, 4][..]));
        assert!(Record::decode(&bytes(&header(), b"orders.pyload\xe8")).is_none());
    }

    #[test]
    fn what_had_no_room_is_read_from_the_process_if_it_is_still_that() {
        let long = vec![b'n'; 3000];
        let lines = vec![0u8; 5000];
        let of = Header {
            name_length: 3000,
            lines_length: 5000,
            lines_bytes: 0,
            ..header()
        };
        let memory: [(u64, &[u8]); 2] = [(0x2000, &long), (0x3000, &lines)];
        let whole = code(&of, b"orders.pynnnn", &memory).expect("a code object");
        assert_eq!(whole.name.len(), 3000);
        assert_eq!(whole.lines.as_deref(), Some(&*lines));
        // Another text is at the address by now.
        let memory: [(u64, &[u8]); 1] = [(0x2000, &long)];
        let cut = code(&of, b"orders.pymmmm", &memory).expect("a code object");
        assert_eq!((&*cut.name, cut.lines), ("mmmm", None));
    }

    #[test]
    fn what_has_no_name_or_lengths_of_gigabytes_is_no_code_object() {
        let nothing = Header {
            name_at: 0,
            name_length: 0,
            name_bytes: 0,
            ..header()
        };
        assert_eq!(code(&nothing, b"orders.py\xe8\x04", &[]), None);
        let vast = Header {
            lines_length: u32::MAX,
            name_length: u32::MAX,
            ..header()
        };
        let mut longest = 0;
        let read = Record::decode(&bytes(&vast, b"orders.pyload\xe8\x04")).expect("a record");
        let code = read.code(&mut |_, length| {
            longest = longest.max(length);
            None
        });
        assert!(code.is_some_and(|code| code.lines.is_none()));
        assert_eq!(longest, MAX_TEXT);
    }

    #[test]
    fn one_word_for_two_code_objects_is_neither() {
        let mut table = Table::default();
        let one = || code(&header(), b"orders.pyload\xe8\x04", &[]).expect("a code object");
        table.add(header().word, one());
        table.add(header().word, one());
        let word = header().word | 77;
        assert_eq!(table.get(word), CodeLookup::Code(Arc::new(one())));
        table.add(
            header().word,
            Code {
                name: "other".into(),
                ..one()
            },
        );
        assert_eq!(table.get(word), CodeLookup::Ambiguous);
        table.add(header().word, one());
        assert_eq!(table.get(word), CodeLookup::Ambiguous);
        assert_eq!(table.get(1 << 63 | 6 << 20), CodeLookup::Unknown);
    }

    #[test]
    fn a_line_table_that_was_missing_is_added() {
        let mut table = Table::default();
        let of = |lines: &[u8]| Code {
            lines: (!lines.is_empty()).then(|| lines.into()),
            ..code(&header(), b"orders.pyload\xe8\x04", &[]).expect("a code object")
        };
        table.add(header().word, of(&[]));
        table.add(header().word, of(&[1]));
        table.add(header().word, of(&[]));
        assert_eq!(
            table.get(header().word),
            CodeLookup::Code(Arc::new(of(&[1])))
        );
    }

    #[test]
    fn the_size_of_the_table_is_that_of_its_entries() {
        let mut table = Table::default();
        let bare = Code {
            lines: None,
            ..code(&header(), b"orders.pyload\xe8\x04", &[]).expect("a code object")
        };
        let whole = Code {
            lines: Some([0; 100].into()),
            ..bare.clone()
        };
        let other = Code {
            first_line: 7,
            ..bare.clone()
        };
        let entries = |table: &Table| table.by_word.values().map(CodeLookup::size).sum::<usize>();
        for code in [bare, whole, other.clone(), other] {
            table.add(header().word, code);
            assert_eq!(table.bytes, entries(&table), "{table:?}");
        }
        assert_eq!(table.get(header().word), CodeLookup::Ambiguous);
        assert!(table.bytes < 100, "{table:?}");
    }

    proptest! {
        #[test]
        fn any_record_is_a_code_object_or_none(record: Vec<u8>, memory: Option<u8>) {
            let mut memory = |_, length| {
                assert!(length <= MAX_LINES);
                memory.map(|byte| vec![byte; length])
            };
            if let Some(record) = Record::decode(&record) {
                let _ = record.code(&mut memory);
            }
        }
    }
}
