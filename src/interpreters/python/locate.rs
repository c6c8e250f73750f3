//! Search for the CPython of a process, and for what the BPF side needs to walk its frames.
//!
//! The search makes no assumptions: it finds the interpreter by the symbols that the file exports. It finds the
//! thread state of each thread by a search whose result has to agree for several threads. All reads are bounded.

use std::collections::BTreeSet;

use anyhow::Result;

use super::arch::{self, FIRST_KEY};
use super::offsets::{self, Offsets};
use crate::bpf::types::python_process;
use crate::code::eh_frame;
use crate::code::elf;
use crate::code::elf_file::Elf;
use crate::code::probe_point::{self, Preference};
use crate::interpreters::memory::{self, Memory};
use crate::interpreters::search::{Files, Inspection, Located};
use crate::process::mapped_file::MappedFile;
use crate::process::proc::Mapping;

/// Maximum number of threads that are searched for their thread states.
const THREADS: usize = 8;
/// Maximum number of interpreters that are read.
const INTERPRETERS: usize = 64;
/// Maximum number of thread states that are read, of all interpreters.
const STATES: usize = 512;
/// Bytes that are searched below a thread pointer, for thread-local variables.
const BELOW_THREAD: u64 = 8 << 10;
/// Bytes that are searched above a thread pointer, for glibc's `struct pthread`.
const ABOVE_THREAD: u64 = 0x910;
/// Size of a page, in bytes.
const PAGE: u64 = 4096;
const KEYS: u64 = 32;
/// Number of pthread keys in musl.
const MUSL_KEYS: u64 = 128;
/// Offset in a type object of `tp_dealloc`, the function that frees the type's objects.
const TYPE_DEALLOC: u64 = 48;

/// CPython interpreter that was found in a process.
#[derive(Debug)]
pub(super) struct Python {
    /// Description for the BPF side. The place of the thread states may be missing.
    pub(super) process: python_process,
    /// The file that holds the interpreter.
    pub(super) file: MappedFile,
    /// The file address of the function that frees code objects, as the process's memory has it.
    dealloc: u64,
}

impl Python {
    /// Returns the file offset for a probe on the function that frees code objects. None if no function begins at the
    /// address: the process's memory is untrusted.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub(super) fn deaths(&self) -> Result<Option<u64>> {
        let (file, address) = (self.file.file(), self.dealloc);
        let elf = Elf::read(file)?.require_64_bit()?;
        let Some(file_offset) = elf.file_offset(address) else {
            return Ok(None);
        };
        if !eh_frame::has_function_at(file, address)? {
            return Ok(None);
        }
        let function = elf::Function {
            name: "code_dealloc".to_owned(),
            file_offset,
            size: 0,
        };
        let places = probe_point::places(file, &[(&function, vec![1])], Preference::Entry)?;
        let place = places.first().copied().flatten();
        Ok(place.map(|place| file_offset + place.offset))
    }
}

/// Looks for the interpreter of a process.
///
/// # Errors
/// If the process cannot be read, or has exited.
pub(super) fn locate(pid: u32, files: &mut Files) -> Result<Located<Python>> {
    files.locate(
        pid,
        |may_hold| may_hold.python,
        |file, mapping, mappings| match Interpreter::open(pid, mapping, &file)? {
            Some(interpreter) => Ok(Inspection::Holds(interpreter.describe(file, mappings)?)),
            None => Ok(Inspection::OnlyUses),
        },
    )
}

/// Describes the interpreter in a recording, for the BPF side: `[version, has_glibc, runtime, code_type]` are the minor
/// version, 1 if the process uses glibc, and the addresses of `_PyRuntime` and `PyCode_Type`.
///
/// # Errors
/// If the memory lacks a part of the interpreter.
pub(crate) fn recorded(
    memory: Memory,
    [version, has_glibc, runtime, code_type]: [u64; 4],
) -> Result<Located<python_process>> {
    let interpreter = Interpreter {
        memory,
        bias: 0,
        runtime,
        code_type,
        version: None,
        this_thread_state: None,
    };
    interpreter.process(version as u8, has_glibc == 1)
}

/// Interpreter in the memory of a process.
struct Interpreter {
    memory: Memory,
    /// Load bias: the value to add to addresses of the file.
    bias: u64,
    runtime: u64,
    code_type: u64,
    version: Option<u64>,
    /// First bytes of a function that loads the address of the current thread state, from 3.15 on.
    this_thread_state: Option<Vec<u8>>,
}

impl Interpreter {
    /// Opens the interpreter in this file. None if the file holds no interpreter.
    fn open(pid: u32, mapping: &Mapping, file: &MappedFile) -> Result<Option<Self>> {
        let elf = Elf::read(file.file())?.require_64_bit()?;
        let names = [
            "_PyRuntime",
            "PyCode_Type",
            "Py_Version",
            "PyGILState_GetThisThreadState",
        ];
        let [Some(runtime), Some(code_type), version, this] = elf.exports(names)? else {
            return Ok(None);
        };
        let Some(bias) = memory::bias(&elf, mapping) else {
            return Ok(None);
        };
        let head = this.and_then(|this| elf.bytes(elf.file_offset(this)?, 32).ok());
        Ok(Some(Self {
            memory: Memory::open(pid)?,
            bias,
            runtime: runtime.wrapping_add(bias),
            code_type: code_type.wrapping_add(bias),
            version: version.map(|version| version.wrapping_add(bias)),
            this_thread_state: head,
        }))
    }

    fn describe(&self, file: MappedFile, mappings: &[Mapping]) -> Result<Located<Python>> {
        let Some(minor) = self.minor(&file) else {
            return Ok(Located::Unsupported("of an unknown version".to_owned()));
        };
        let process = match self.process(minor, has_glibc(mappings))? {
            Located::Found(process) => *process,
            Located::None => return Ok(Located::None),
            Located::Unsupported(why) => return Ok(Located::Unsupported(why)),
        };
        let at = self.code_type.wrapping_add(TYPE_DEALLOC);
        let mut dealloc = self.memory.word(at)?.wrapping_sub(self.bias);
        // Null: the dynamic linker has not relocated the type yet.
        if dealloc.wrapping_add(self.bias) == 0 {
            let elf = Elf::read(file.file())?;
            let Some(address) = elf.relocated(at.wrapping_sub(self.bias))? else {
                return Ok(Located::None);
            };
            dealloc = address;
        }
        Ok(Located::Found(Box::new(Python {
            process,
            file,
            dealloc,
        })))
    }

    /// Describes an interpreter of version 3.`minor` for the BPF side.
    fn process(&self, minor: u8, has_glibc: bool) -> Result<Located<python_process>> {
        let unknown = |why: String| Ok(Located::Unsupported(why));
        let Some(offsets) = offsets::of(minor) else {
            return unknown(format!("of version 3.{minor}, and 3.10 to 3.15 are known"));
        };
        if let Some(why) = arch::unsupported(minor) {
            return unknown(format!("of version 3.{minor}, {why}"));
        }
        if minor >= 13 {
            if self.memory.word(self.runtime.wrapping_add(16))? != 0 {
                return unknown("of a free-threaded build".to_owned());
            }
            let told = [
                (40, offsets.interpreters),
                (64, offsets.next_interpreter),
                (72, offsets.threads),
            ];
            for (at, expected) in told {
                if self.memory.word(self.runtime.wrapping_add(at))? != expected {
                    return unknown("of an unusual build".to_owned());
                }
            }
        }
        let mut process = python_process {
            code_type: self.code_type,
            ..offsets.process
        };
        match self.state_at(&offsets)? {
            State::At(at) => process.state_at = at,
            State::Among { values, key } => {
                if let Some(why) = arch::MUSL_UNSUPPORTED {
                    return unknown(why.to_owned());
                }
                process.state_at = values;
                process.value = key as u8 + 1;
            }
            State::Nowhere => {
                return unknown(
                    "of a C library in which its threads' states are not found".to_owned(),
                );
            }
            State::NotYet => match offsets.key.filter(|_| has_glibc) {
                Some(key) => process.key_at = self.runtime.wrapping_add(key),
                None => return Ok(Located::None),
            },
        }
        Ok(Located::Found(Box::new(process)))
    }

    /// Returns the minor version: `x` of 3.`x`.
    fn minor(&self, file: &MappedFile) -> Option<u8> {
        if let Some(at) = self.version {
            let version = self.memory.word(at).ok()? as u32;
            return (version >> 24 == 3).then_some((version >> 16) as u8);
        }
        let name = file.module();
        let (_, minor) = name.split_once("python3.")?;
        let digits = minor.split(|byte: char| !byte.is_ascii_digit()).next()?;
        digits.parse().ok()
    }

    /// Returns where threads keep pointers to their thread states, relative to the thread pointer.
    fn state_at(&self, offsets: &Offsets) -> Result<State> {
        let threads: Vec<Thread> = self
            .threads(offsets)?
            .into_iter()
            .filter_map(|(at, states)| Thread::read(&self.memory, at, states))
            .collect();
        if threads.is_empty() {
            return Ok(State::NotYet);
        }
        let common = |holds: &dyn Fn(&Thread, u64) -> bool| {
            let places = threads.iter().map(|thread| {
                let held = thread.words().filter(|(_, word)| holds(thread, *word));
                held.map(|(place, _)| place).collect::<BTreeSet<i64>>()
            });
            places
                .reduce(|common, places| &common & &places)
                .unwrap_or_default()
        };
        let direct = common(&|thread, word| thread.states.contains(&word));
        let expected = self.expected_at(offsets)?;
        if let Some(expected) = expected.filter(|expected| direct.contains(expected)) {
            return Ok(State::At(expected));
        }
        if let Some(key) = self.key(offsets)?.filter(|key| *key < MUSL_KEYS) {
            let values = common(&|thread, word| {
                let value = self.memory.word(word.wrapping_add(8 * key));
                value.is_ok_and(|value| thread.states.contains(&value))
            });
            if let Some(values) = only(&values) {
                return Ok(State::Among { values, key });
            }
        }
        Ok(only(&direct).map_or(State::Nowhere, State::At))
    }

    /// Returns the expected place if the process uses glibc, or if the interpreter is not in a library.
    fn expected_at(&self, offsets: &Offsets) -> Result<Option<i64>> {
        if offsets.key.is_none() {
            let code = self.this_thread_state.as_deref().unwrap_or_default();
            return Ok(arch::first_thread_local(code));
        }
        let key = self.key(offsets)?.filter(|key| *key < KEYS);
        Ok(key.map(|key| (FIRST_KEY + 16 * key) as i64))
    }

    /// Returns the pthread key of the thread states. None if the key is not created yet.
    fn key(&self, offsets: &Offsets) -> Result<Option<u64>> {
        let Some(key) = offsets.key else {
            return Ok(None);
        };
        let key = self.memory.word(self.runtime.wrapping_add(key))?;
        let (created, key) = (key as u32, key >> 32);
        Ok((created == 1).then_some(key))
    }

    /// Returns the thread pointers, and for each thread the addresses of its thread states: a thread that uses
    /// several interpreters has one state in each.
    fn threads(&self, offsets: &Offsets) -> Result<Vec<(u64, Vec<u64>)>> {
        let mut threads: Vec<(u64, Vec<u64>)> = Vec::new();
        for state in self.states(offsets)? {
            let at = state.wrapping_add(offsets.process.thread.into());
            let thread = self.memory.word(at)?;
            let is_full = threads.len() >= THREADS;
            match threads.iter_mut().find(|(known, _)| *known == thread) {
                Some((_, states)) => states.push(state),
                None if thread == 0 || is_full => {}
                None => threads.push((thread, vec![state])),
            }
        }
        Ok(threads)
    }

    /// Returns the thread states of all interpreters.
    fn states(&self, offsets: &Offsets) -> Result<Vec<u64>> {
        let mut states = Vec::new();
        let first = self.runtime.wrapping_add(offsets.interpreters);
        let mut interpreter = self.memory.word(first)?;
        for _ in 0..INTERPRETERS {
            if interpreter == 0 {
                break;
            }
            let mut at = interpreter.wrapping_add(offsets.threads);
            while states.len() < STATES {
                let state = self.memory.word(at)?;
                if state == 0 {
                    break;
                }
                states.push(state);
                at = state.wrapping_add(offsets.next_thread);
            }
            let next = interpreter.wrapping_add(offsets.next_interpreter);
            interpreter = self.memory.word(next)?;
        }
        Ok(states)
    }
}

/// Thread, and the memory around its thread pointer.
struct Thread {
    at: u64,
    states: Vec<u64>,
    /// The address of the first byte of `bytes`.
    from: u64,
    bytes: Vec<u8>,
}

impl Thread {
    /// Reads as much memory around the thread pointer as is mapped. None if nothing is mapped: the thread may have
    /// exited without telling the interpreter.
    fn read(memory: &Memory, at: u64, states: Vec<u64>) -> Option<Self> {
        let below = at.wrapping_sub(BELOW_THREAD);
        let above = at.wrapping_add(ABOVE_THREAD);
        // musl keeps less data for a thread than glibc.
        let end_of_page = (at | (PAGE - 1)).wrapping_add(1);
        let ranges = [
            (below, above),
            (at, above),
            (below, end_of_page),
            (at, end_of_page),
        ];
        let mut read = ranges.into_iter().filter_map(|(from, to)| {
            let bytes = memory.read(from, to.wrapping_sub(from) as usize);
            Some((from, bytes.ok()?))
        });
        let (from, bytes) = read.next()?;
        Some(Self {
            at,
            states,
            from,
            bytes,
        })
    }

    /// Returns the words around the thread pointer, each with its distance from the thread pointer.
    fn words(&self) -> impl Iterator<Item = (i64, u64)> {
        let words = self.bytes.as_chunks().0.iter().enumerate();
        words.map(|(number, word)| {
            let at = self.from + 8 * number as u64;
            (at.wrapping_sub(self.at) as i64, u64::from_ne_bytes(*word))
        })
    }
}

/// Returns the only element of a set. None if the set is empty or has several elements.
fn only(places: &BTreeSet<i64>) -> Option<i64> {
    let mut places = places.iter();
    places.next().copied().filter(|_| places.next().is_none())
}

/// Place of a thread's pointer to its thread state.
enum State {
    At(i64),
    /// In an array of the values of the thread's pthread keys. musl keeps the address of the array here.
    Among {
        values: i64,
        key: u64,
    },
    /// No thread has a thread state yet.
    NotYet,
    Nowhere,
}

/// Returns whether the process uses glibc.
fn has_glibc(mappings: &[Mapping]) -> bool {
    mappings.iter().any(|mapping| {
        let module = mapping.module();
        module == "libc.so.6" || module.starts_with("libc-2.")
    })
}

#[cfg(test)]
pub(super) mod tests {
    use std::process::Command;

    use super::*;
    use crate::interpreters::recorded;
    use crate::interpreters::search::tests::{Running, is_missing};

    /// Starts a Python with several threads.
    pub(in crate::interpreters::python) fn python() -> Running {
        let code = "import threading, sys\n\
                    for _ in range(3): threading.Thread(target=sys.stdin.read, daemon=True).start()\n\
                    print('ready', flush=True); threading.Event().wait()";
        Running::start(Command::new("python3").args(["-c", code]))
    }

    #[test]
    fn the_interpreter_of_a_process_is_found_where_its_threads_agree() {
        if is_missing("python3") {
            return;
        }
        let python = python();
        let found = locate(python.pid(), &mut Files::default()).expect("a process of ours");
        let Located::Found(found) = found else {
            panic!("{found:?}");
        };
        // Up to 3.14 threads find their states by pthread keys, and Python has created the first keys.
        let place = found.process.state_at - FIRST_KEY as i64;
        assert!(
            found.process.minor >= 15 || (place >= 0 && place % 16 == 0),
            "{found:?}"
        );
        assert!(found.deaths().expect("its file").is_some(), "{found:?}");
        assert_ne!(memory::layout(python.pid()).expect("its layout"), 0);
    }

    #[test]
    fn a_recorded_interpreter_is_that_of_the_process() {
        if is_missing("python3") {
            return;
        }
        let python = Running::start(
            Command::new("python3").args(["-c", "print('ready', flush=True); input()"]),
        );
        let mut interpreter = None;
        let mut files = Files::default();
        let found = files.locate(
            python.pid(),
            |may_hold| may_hold.python,
            |file, mapping, mappings| {
                let Some(found) = Interpreter::open(python.pid(), mapping, &file)? else {
                    return Ok(Inspection::OnlyUses);
                };
                let minor = found.minor(&file).expect("a known version");
                // What reading the version has left in the record is not part of the interpreter.
                found.memory.log.lock().expect("no panic").clear();
                let process = found.process(minor, has_glibc(mappings))?;
                interpreter = Some((found, u64::from(minor)));
                Ok(Inspection::Holds(process))
            },
        );
        let Located::Found(found) = found.expect("a process of ours") else {
            panic!("no interpreter");
        };
        let (interpreter, minor) = interpreter.expect("found");
        let numbers = [minor, 1, interpreter.runtime, interpreter.code_type];
        let log = interpreter.memory.log.lock().expect("no panic");
        let recording = recorded::tests::encode(&numbers, &log);
        recorded::tests::keep("python_interpreter", &recording);
        let expected = format!("{:?}", *found);
        assert_eq!(recorded::python_interpreter(&recording), Some(expected));
    }

    #[test]
    fn a_process_without_an_interpreter_has_none() {
        let other = Running::shell();
        let found = locate(other.pid(), &mut Files::default()).expect("a process of ours");
        assert!(matches!(found, Located::None), "{found:?}");
    }
}
