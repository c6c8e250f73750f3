//! Names of Java functions and their source lines, read from the memory of the process when a report is made. The
//! names have the format that HotSpot itself writes into perf maps: `void Orders.load(int, byte[])`.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::machine::Machine;
use super::perf_map_request;
use crate::code::lines::SourceLine;
use crate::interpreters::raw_frame::RawFrame;
use crate::process::proc::Process;

/// Maximum number of virtual machines that are remembered.
const MACHINES: usize = 256;
/// Maximum size of the cache of names, and again of the cache of lines, in bytes.
const MAX_KEPT: usize = 32 << 20;
/// Size of a cache entry besides its text, in bytes.
const OVERHEAD: usize = 96;
/// Minimum interval between two perf maps of a process, as a multiple of the time that the previous one took.
const ASK_SHARE: u32 = 100;
/// Minimum interval between two perf maps of a process.
const ASK_AFTER: Duration = Duration::from_secs(1);

/// Cache of the names of functions, by process. Clones share the cache.
#[derive(Clone, Default)]
pub struct JavaNames(Arc<Mutex<Known>>);

#[derive(Default)]
struct Known {
    machines: HashMap<u32, Arc<Machine>>,
    /// Whether perf maps are requested from the virtual machines.
    ask: bool,
    /// By process: the time from which on a perf map may be requested again. None: no further perf map is requested.
    next_request: HashMap<u32, Option<Instant>>,
    /// By process, and an instruction of its generated code. None: the instruction has no name.
    names: BoundedCache<u64, Option<Function>>,
    /// By process, and a place in its code. None: the place is in no Java function.
    lines: BoundedCache<RawFrame, Option<Vec<SourceLine>>>,
}

/// Cache of values that were read from processes, with bounded memory.
struct BoundedCache<K, V> {
    /// Values by process and key, each with the memory that it takes, in bytes.
    values: HashMap<(u32, K), (V, usize)>,
    /// Memory of all values, in bytes.
    bytes: usize,
}

impl<K, V> Default for BoundedCache<K, V> {
    fn default() -> Self {
        Self {
            values: HashMap::new(),
            bytes: 0,
        }
    }
}

impl<K: Eq + Hash, V> BoundedCache<K, V> {
    /// Returns a value from the cache, or reads the value and adds it; `read` also returns the number of bytes of
    /// text.
    fn find(&mut self, pid: u32, what: K, read: impl FnOnce() -> Option<(V, usize)>) -> Option<V>
    where
        K: Copy,
        V: Clone,
    {
        if let Some((value, _)) = self.values.get(&(pid, what)) {
            return Some(value.clone());
        }
        let (value, bytes) = read()?;
        self.keep(pid, what, value.clone(), bytes);
        Some(value)
    }

    /// Adds a value with this many bytes of text. If the cache is full, all other values are removed.
    fn keep(&mut self, pid: u32, what: K, value: V, text_bytes: usize) {
        let bytes = OVERHEAD + text_bytes;
        if self.bytes + bytes > MAX_KEPT {
            self.values.clear();
            self.bytes = 0;
        }
        self.bytes += bytes;
        let replaced = self.values.insert((pid, what), (value, bytes));
        self.bytes -= replaced.map_or(0, |(_, bytes)| bytes);
    }

    fn forget(&mut self, pid: u32) {
        self.values.retain(|(of, _), (_, bytes)| {
            let is_kept = *of != pid;
            self.bytes -= if is_kept { 0 } else { *bytes };
            is_kept
        });
    }
}

/// Name of a function, escaped, and the address at which its code begins.
pub(super) type Function = (String, u64);

impl std::fmt::Debug for JavaNames {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("JavaNames")
    }
}

impl JavaNames {
    /// Creates an empty cache; `ask` is whether perf maps are requested from virtual machines.
    pub(super) fn new(ask: bool) -> Self {
        Self(Arc::new(Mutex::new(Known {
            ask,
            ..Known::default()
        })))
    }

    /// Returns the processes whose virtual machines were found, if perf maps are to be requested from them.
    pub(crate) fn to_be_asked(&self) -> Vec<u32> {
        let known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let pids = known.machines.keys().filter(|_| known.ask);
        pids.copied().collect()
    }

    /// Requests a perf map from the virtual machine of a process, if that is wanted, was not just done, and does no
    /// harm. If the request fails, prints the reason once. Returns whether a perf map was written now.
    pub(crate) fn request_perf_map(&self, pid: u32) -> bool {
        let machine = {
            let known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            let machine = known.machines.get(&pid).filter(|_| known.ask);
            let may_be_asked = match known.next_request.get(&pid) {
                Some(Some(from)) => Instant::now() >= *from,
                Some(None) => false,
                None => true,
            };
            match machine {
                Some(machine) if may_be_asked => Arc::clone(machine),
                _ => return false,
            }
        };
        let begun = Instant::now();
        // If the process has exited, no message is printed.
        let asked = Process::open(pid).ok().map(|process| {
            (
                perf_map_request::request(&process, &machine),
                process.exited(),
            )
        });
        if let Some((Err(why), false)) = &asked {
            crate::note!(
                "process {pid} is not queried for Java names: {why:#}; they are read from its memory"
            );
        }
        let written = matches!(asked, Some((Ok(()), _)));
        let again = written.then(|| Instant::now() + (begun.elapsed() * ASK_SHARE).max(ASK_AFTER));
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        known.next_request.insert(pid, again);
        written
    }

    /// Adds a virtual machine that was found. Names of an earlier process with the same PID are removed.
    pub(super) fn add(&self, pid: u32, machine: Machine) {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if known.machines.len() >= MACHINES {
            known.machines.clear();
            known.next_request.clear();
        }
        known.machines.insert(pid, Arc::new(machine));
        known.next_request.remove(&pid);
        known.names.forget(pid);
        known.lines.forget(pid);
    }

    /// Returns the function or stub of generated code that contains an instruction, and the offset from its start.
    pub(crate) fn of_code(&self, pid: u32, instruction: u64) -> Option<(String, u64)> {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let known = &mut *known;
        let function = known.names.find(pid, instruction, || {
            // The memory of a process that has exited cannot be read.
            let function = known.machines.get(&pid)?.code(instruction).ok()?;
            let bytes = function.as_ref().map_or(0, |(name, _)| name.len());
            Some((function, bytes))
        });
        let (name, start) = function??;
        Some((name, instruction.wrapping_sub(start)))
    }

    /// Returns the Java functions of a frame and their source lines, escaped: the inlined functions first, from the
    /// innermost on, and the executed function last. None if the frame is of no Java function, or cannot be read.
    pub fn lines(&self, pid: u32, place: RawFrame) -> Option<Vec<SourceLine>> {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let known = &mut *known;
        let lines = known.lines.find(pid, place, || {
            let lines = known.machines.get(&pid)?.lines(place).ok()?;
            let bytes = lines.iter().flatten().map(bytes_of).sum();
            Some((lines, bytes))
        });
        lines?
    }
}

/// Returns the memory that a line takes, in bytes: its texts and the overhead of each.
fn bytes_of(line: &SourceLine) -> usize {
    let texts = [&line.function, &line.file].into_iter().flatten();
    texts.map(|text| OVERHEAD + text.len()).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_bounded() {
        let mut names: BoundedCache<u64, Option<Function>> = BoundedCache::default();
        let long = "n".repeat(1 << 20);
        for at in 0..200 {
            let name = Some((long.clone(), 0));
            names.keep(7, at, name, long.len());
            assert!(names.bytes <= MAX_KEPT && names.values.contains_key(&(7, at)));
        }
        assert!(names.values.len() < 32);
        names.forget(7);
        assert!(names.values.is_empty());
        assert_eq!(names.bytes, 0);
    }
}
