//! What functions of Java are called, read from the memory of the process that runs them, when a report
//! is made. They are called as HotSpot itself writes them into perf maps: `void Orders.load(int, byte[])`.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::Result;

use super::asked_map;
use super::machine::Machine;
use crate::process::proc::Process;
use crate::stacks::table::Place;

/// Virtual machines that are remembered.
const MACHINES: usize = 256;
/// Bytes that are kept of the names of functions, and again of those that are compiled into others, and what each takes
/// beside its text.
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
    /// By process, and what is named there; None: it has no name.
    names: Kept<Named, Option<Function>>,
    /// By process, and where in its code.
    inlined: Kept<Place, Inlined>,
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

/// What has a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Named {
    /// The interpreted function whose `Method` is at this address.
    Method(u64),
    /// The generated code that an instruction is in.
    Code(u64),
}

/// A function's name, escaped, and where its code begins; 0 if it is interpreted.
pub(super) type Function = (String, u64);

/// What is compiled into a function at some place of its code.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Inlined {
    /// The functions' names, innermost first; most often none.
    Calls(Vec<String>),
    /// Functions are compiled in, and the virtual machine has not kept which are so here.
    Unknown,
}

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
        known.inlined.forget(pid);
    }

    /// The function whose `Method` is at this address of a process.
    pub fn of_method(&self, pid: u32, method: u64) -> Option<String> {
        let name = self.find(pid, Named::Method(method), |machine| {
            Ok(Some((machine.method(method)?, 0)))
        });
        name.map(|(name, _)| name)
    }

    /// The function or stub of generated code that an instruction is in, and the offset from its start.
    pub fn of_code(&self, pid: u32, instruction: u64) -> Option<(String, u64)> {
        let (name, start) = self.find(pid, Named::Code(instruction), |machine| {
            machine.code(instruction)
        })?;
        Some((name, instruction.wrapping_sub(start)))
    }

    /// What is compiled into the function whose code a frame is in. None if that is no function of Java, or cannot be
    /// read.
    pub fn inlined(&self, pid: u32, place: Place) -> Option<Inlined> {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(inlined) = known.inlined.values.get(&(pid, place)) {
            return Some(inlined.clone());
        }
        let machine = known.machines.get(&pid)?;
        let inlined = machine.inlined(place).ok()??;
        let bytes = match &inlined {
            Inlined::Calls(names) => names.iter().map(|name| OVERHEAD + name.len()).sum(),
            Inlined::Unknown => 0,
        };
        known.inlined.keep(pid, place, inlined.clone(), bytes);
        Some(inlined)
    }

    /// A name that is known, or is read now.
    fn find(
        &self,
        pid: u32,
        what: Named,
        read: impl FnOnce(&Machine) -> Result<Option<Function>>,
    ) -> Option<Function> {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(name) = known.names.values.get(&(pid, what)) {
            return name.clone();
        }
        // Of a process that is gone nothing can be read.
        let name = read(known.machines.get(&pid)?).ok()?;
        let bytes = name.as_ref().map_or(0, |(name, _)| name.len());
        known.names.keep(pid, what, name.clone(), bytes);
        name
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_bounded() {
        let mut names: Kept<Named, Option<Function>> = Kept::default();
        let long = "n".repeat(1 << 20);
        for at in 0..200 {
            let name = Some((long.clone(), 0));
            names.keep(7, Named::Code(at), name, long.len());
            assert!(names.bytes <= MAX_KEPT && names.values.contains_key(&(7, Named::Code(at))));
        }
        assert!(names.values.len() < 32);
        names.forget(7);
        assert!(names.values.is_empty());
    }
}
