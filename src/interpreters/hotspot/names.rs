//! What functions of Java are called, and which lines they are at, read from the memory of the process that runs them, when
//! a report is made. They are called as HotSpot itself writes them into perf maps: `void Orders.load(int, byte[])`.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::asked_map;
use super::machine::Machine;
use crate::code::lines::SourceLine;
use crate::process::proc::Process;
use crate::stacks::table::Place;

/// Virtual machines that are remembered.
const MACHINES: usize = 256;
/// Bytes that are kept of the names of functions, and again of the lines of frames, and what each takes beside its text.
const MAX_KEPT: usize = 32 << 20;
const OVERHEAD: usize = 96;
/// The time between two perf maps of a process, as a multiple of what the first one took, and at least.
const ASK_SHARE: u32 = 100;
const ASK_AFTER: Duration = Duration::from_secs(1);

/// Names of functions, by process. Clones share them.
#[derive(Clone, Default)]
pub struct JavaNames(Arc<Mutex<Known>>);

#[derive(Default)]
struct Known {
    machines: HashMap<u32, Arc<Machine>>,
    /// Whether they are asked for perf maps.
    ask: bool,
    /// By process, from when on it may be asked again; None: it is not to be.
    ask_again: HashMap<u32, Option<Instant>>,
    /// By process, and an instruction of its generated code; None: that has no name.
    names: Kept<u64, Option<Function>>,
    /// By process, and where in its code; None: it is of no function of Java.
    lines: Kept<Place, Option<Vec<SourceLine>>>,
}

/// What was read of processes, within bounds.
struct Kept<K, V> {
    values: HashMap<(u32, K), V>,
    /// Bytes of memory of these.
    bytes: usize,
}

impl<K, V> Default for Kept<K, V> {
    fn default() -> Self {
        Self {
            values: HashMap::new(),
            bytes: 0,
        }
    }
}

impl<K: Eq + Hash, V> Kept<K, V> {
    /// A value that is known, or is read now, with how many bytes of text it has.
    fn find(&mut self, pid: u32, what: K, read: impl FnOnce() -> Option<(V, usize)>) -> Option<V>
    where
        K: Copy,
        V: Clone,
    {
        if let Some(value) = self.values.get(&(pid, what)) {
            return Some(value.clone());
        }
        let (value, bytes) = read()?;
        self.keep(pid, what, value.clone(), bytes);
        Some(value)
    }

    /// Keeps a value with so many bytes of text; if there are too many, only this one.
    fn keep(&mut self, pid: u32, what: K, value: V, text_bytes: usize) {
        let bytes = OVERHEAD + text_bytes;
        if self.bytes + bytes > MAX_KEPT {
            self.values.clear();
            self.bytes = 0;
        }
        self.bytes += bytes;
        self.values.insert((pid, what), value);
    }

    fn forget(&mut self, pid: u32) {
        self.values.retain(|(of, _), _| *of != pid);
    }
}

/// A function's name, escaped, and where its code begins.
pub(super) type Function = (String, u64);

impl std::fmt::Debug for JavaNames {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("JavaNames")
    }
}

impl JavaNames {
    /// No names yet; `ask` is whether virtual machines are asked for perf maps.
    pub(super) fn new(ask: bool) -> Self {
        Self(Arc::new(Mutex::new(Known {
            ask,
            ..Known::default()
        })))
    }

    /// The processes whose virtual machines were found, if these are to be asked for perf maps.
    pub fn to_be_asked(&self) -> Vec<u32> {
        let known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let pids = known.machines.keys().filter(|_| known.ask);
        pids.copied().collect()
    }

    /// Has the virtual machine of a process write a perf map, if that is wanted, has not just been done, and
    /// can be without harm; if it cannot, says why, once. Returns whether it has written one now.
    pub fn ask_for_map(&self, pid: u32) -> bool {
        let machine = {
            let known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            let machine = known.machines.get(&pid).filter(|_| known.ask);
            let may_be_asked = match known.ask_again.get(&pid) {
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
        // Of one that has exited there is nothing to say.
        let asked = Process::open(pid)
            .ok()
            .map(|process| (asked_map::ask(&process, &machine), process.exited()));
        if let Some((Err(why), false)) = &asked {
            eprintln!(
                "process {pid} is not asked for names of Java: {why:#}; they are read from its memory"
            );
        }
        let written = matches!(asked, Some((Ok(()), _)));
        let again = written.then(|| Instant::now() + (begun.elapsed() * ASK_SHARE).max(ASK_AFTER));
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        known.ask_again.insert(pid, again);
        written
    }

    /// Takes note of a virtual machine that was found; that of an earlier process of the number is forgotten.
    pub(super) fn add(&self, pid: u32, machine: Machine) {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if known.machines.len() >= MACHINES {
            known.machines.clear();
            known.ask_again.clear();
        }
        known.machines.insert(pid, Arc::new(machine));
        known.ask_again.remove(&pid);
        known.names.forget(pid);
        known.lines.forget(pid);
    }

    /// The function or stub of generated code that an instruction is in, and the offset from its start.
    pub fn of_code(&self, pid: u32, instruction: u64) -> Option<(String, u64)> {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let known = &mut *known;
        let function = known.names.find(pid, instruction, || {
            // Of a process that is gone nothing can be read.
            let function = known.machines.get(&pid)?.code(instruction).ok()?;
            let bytes = function.as_ref().map_or(0, |(name, _)| name.len());
            Some((function, bytes))
        });
        let (name, start) = function??;
        Some((name, instruction.wrapping_sub(start)))
    }

    /// The functions of Java that a frame is in, and the lines that they are at, escaped: those that are compiled into
    /// others first, innermost first; last the one that is executed there. None if there is none, or it cannot be read.
    pub fn lines(&self, pid: u32, place: Place) -> Option<Vec<SourceLine>> {
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

/// The bytes of a line's texts, and what they take beside.
fn bytes_of(line: &SourceLine) -> usize {
    let texts = [&line.function, &line.file].into_iter().flatten();
    texts.map(|text| OVERHEAD + text.len()).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_bounded() {
        let mut names: Kept<u64, Option<Function>> = Kept::default();
        let long = "n".repeat(1 << 20);
        for at in 0..200 {
            let name = Some((long.clone(), 0));
            names.keep(7, at, name, long.len());
            assert!(names.bytes <= MAX_KEPT && names.values.contains_key(&(7, at)));
        }
        assert!(names.values.len() < 32);
        names.forget(7);
        assert!(names.values.is_empty());
    }
}
