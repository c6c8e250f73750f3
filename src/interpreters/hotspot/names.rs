//! What functions of Java are called, read from the memory of the process that runs them, when a report
//! is made. They are called as HotSpot itself writes them into perf maps: `void Orders.load(int, byte[])`.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use super::asked_map;
use super::code_heaps;
use super::inlined::Scopes;
use super::vm_structs::VmStructs;
use crate::bpf::types::hotspot_process;
use crate::interpreters::memory::Memory;
use crate::print::text;
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
/// What a compiled function's block is called, and that of the code around a native one.
const COMPILED: [&str; 2] = ["nmethod", "native nmethod"];
/// Bytes of a slot in a class's table of constants.
const SLOT: u64 = 8;

/// A virtual machine whose memory can be read while its process lives.
pub(super) struct Machine {
    pub(super) memory: Memory,
    pub(super) structs: VmStructs,
    pub(super) process: hotspot_process,
}

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
type Function = (String, u64);

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

/// A block of generated code.
struct Block {
    /// Where its description (`CodeBlob`) is.
    blob: u64,
    /// What it is called.
    kind: String,
    /// Where its code begins.
    start: u64,
}

impl Machine {
    /// The block of generated code that an address is in.
    fn block(&self, address: u64) -> Result<Option<Block>> {
        let (memory, structs) = (&self.memory, &self.structs);
        let Some(block) = code_heaps::block(memory, &self.process, address)? else {
            return Ok(None);
        };
        let blob = block.wrapping_add(self.process.blob.into());
        let kind = code_heaps::name_of_blob(memory, structs, blob)?;
        let code = blob.wrapping_add(self.process.code.into());
        let start = match self.process.code_bytes {
            4 => blob.wrapping_add(u32::from_ne_bytes(memory.bytes(code)?).into()),
            _ => memory.word(code)?,
        };
        Ok(Some(Block { blob, kind, start }))
    }

    /// The `Method` whose code a block has.
    fn method_of(&self, block: &Block) -> Result<u64> {
        let method = (self.structs.at("CompiledMethod", "_method"))
            .or_else(|_| self.structs.at("nmethod", "_method"))?;
        self.memory.word(block.blob.wrapping_add(method))
    }

    /// The name of what an address of generated code is in, and where its code begins.
    fn code(&self, address: u64) -> Result<Option<Function>> {
        let Some(block) = self.block(address)? else {
            return Ok(None);
        };
        if !COMPILED.contains(&&*block.kind) {
            return Ok((!block.kind.is_empty()).then(|| (text::shown(&block.kind), block.start)));
        }
        Ok(Some((self.method(self.method_of(&block)?)?, block.start)))
    }

    /// What is compiled into the function whose code a frame is in; None if that is no such function.
    fn inlined(&self, place: Place) -> Result<Option<Inlined>> {
        let instruction = place.instruction().context("no machine code")?;
        let Some(block) = self
            .block(instruction)?
            .filter(|block| block.kind == COMPILED[0])
        else {
            return Ok(None);
        };
        let own = self.method_of(&block)?;
        let scopes = Scopes::of(&self.memory, &self.structs, block.blob, own)?;
        // What is kept for an address is of the call that returns to it, not of the instruction there.
        if let Place::Return(address) = place
            && let Some(methods) = scopes.at_call(address.wrapping_sub(block.start))?
        {
            let names = methods.into_iter().map(|method| self.method(method));
            return Ok(Some(Inlined::Calls(names.collect::<Result<_>>()?)));
        }
        Ok(Some(match scopes.any()? {
            true => Inlined::Unknown,
            false => Inlined::Calls(Vec::new()),
        }))
    }

    /// The name of a function, as HotSpot's own `external_name()` has it.
    fn method(&self, method: u64) -> Result<String> {
        let word = |at: u64, class: &str, field: &str| -> Result<u64> {
            self.memory
                .word(at.wrapping_add(self.structs.at(class, field)?))
        };
        let short = |at: u64, class: &str, field: &str| -> Result<u64> {
            let at = at.wrapping_add(self.structs.at(class, field)?);
            Ok(u16::from_ne_bytes(self.memory.bytes(at)?).into())
        };
        let parts = word(method, "Method", "_constMethod")?;
        let constants = word(parts, "ConstMethod", "_constants")?;
        let slots = constants.wrapping_add(self.structs.size("ConstantPool")?);
        let constant = |index: u64| self.memory.word(slots.wrapping_add(SLOT * index));
        let class = word(constants, "ConstantPool", "_pool_holder")?;
        let class = self.symbol(word(class, "Klass", "_name")?)?;
        let name = self.symbol(constant(short(parts, "ConstMethod", "_name_index")?)?)?;
        let signature = constant(short(parts, "ConstMethod", "_signature_index")?)?;
        let signature = self.symbol(signature)?;
        let (returned, arguments) = types(&signature).context("no signature")?;
        let name = format!("{returned} {}.{name}({arguments})", class_name(&class));
        Ok(text::shown(&name))
    }

    /// The text of a `Symbol`.
    fn symbol(&self, symbol: u64) -> Result<String> {
        ensure!(symbol != 0, "no symbol");
        let length = symbol.wrapping_add(self.structs.at("Symbol", "_length")?);
        let length = u16::from_ne_bytes(self.memory.bytes(length)?);
        let mut bytes = vec![0; length.into()];
        let body = symbol.wrapping_add(self.structs.at("Symbol", "_body")?);
        self.memory.read_exact(&mut bytes, body)?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }
}

/// A class's name as Java has it. That of a hidden class ends in a plus sign and its address, in which no
/// name of a source file's has one.
fn class_name(symbol: &str) -> String {
    symbol.replace('/', ".").replace('+', "/")
}

/// What a function with this signature returns, and its arguments.
fn types(signature: &str) -> Option<(String, String)> {
    let mut rest = signature.strip_prefix('(')?;
    let mut arguments = Vec::new();
    loop {
        if let Some(returned) = rest.strip_prefix(')') {
            let (returned, after) = one_type(returned)?;
            return after.is_empty().then(|| (returned, arguments.join(", ")));
        }
        let (argument, after) = one_type(rest)?;
        arguments.push(argument);
        rest = after;
    }
}

/// The type that a signature begins with, and what is behind it.
fn one_type(signature: &str) -> Option<(String, &str)> {
    let element = signature.trim_start_matches('[');
    let dimensions = signature.len() - element.len();
    let (name, rest) = match element.split_at_checked(1)? {
        ("L", rest) => {
            let (class, rest) = rest.split_once(';')?;
            (class_name(class), rest)
        }
        (letter, rest) => {
            let name = match letter {
                "B" => "byte",
                "C" => "char",
                "D" => "double",
                "F" => "float",
                "I" => "int",
                "J" => "long",
                "S" => "short",
                "V" => "void",
                "Z" => "boolean",
                _ => return None,
            };
            (name.to_owned(), rest)
        }
    };
    Some((name + &"[]".repeat(dimensions), rest))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn signatures_are_as_in_a_source_file() {
        let of = |signature| types(signature).expect("a signature");
        let text = |(returned, arguments)| format!("{returned}({arguments})");
        assert_eq!(text(of("()V")), "void()");
        assert_eq!(
            text(of("(IJ[B[[Ljava/util/Map$Entry;Z)Ljava/lang/String;")),
            "java.lang.String(int, long, byte[], java.util.Map$Entry[][], boolean)"
        );
        for broken in ["", "()", "(", "(I", "(Q)V", "()VV", "(Ljava)V", "V", "([)V"] {
            assert_eq!(types(broken), None, "{broken}");
        }
    }

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

    #[test]
    fn a_hidden_class_is_called_as_java_does() {
        assert_eq!(
            class_name("a/Map$Lambda$14+0x0800c03000"),
            "a.Map$Lambda$14/0x0800c03000"
        );
    }

    proptest! {
        #[test]
        fn any_text_is_a_signature_or_none(signature in "[(\\[LIV;)a-z/é]{0,40}") {
            let _ = types(&signature);
        }
    }
}
