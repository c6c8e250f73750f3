//! What functions of Java are called, read from the memory of the process that runs them, when a report
//! is made. They are called as HotSpot itself writes them into perf maps: `void Orders.load(int, byte[])`.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context, Result, ensure};

use super::code_heaps;
use super::vm_structs::VmStructs;
use crate::bpf::types::hotspot_process;
use crate::interpreters::memory::Memory;
use crate::print::text;

/// Virtual machines that are remembered.
const MACHINES: usize = 256;
/// Bytes of names that are kept of all together, and what each takes beside its text.
const MAX_KEPT: usize = 64 << 20;
const OVERHEAD: usize = 96;
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
    machines: HashMap<u32, Machine>,
    /// By process, and what is named there; None: it has no name.
    names: HashMap<(u32, Named), Option<Function>>,
    /// Bytes of memory of these.
    kept: usize,
}

impl Known {
    /// Keeps a name; if there are too many, only this one.
    fn keep(&mut self, pid: u32, what: Named, name: Option<Function>) {
        let bytes = OVERHEAD + name.as_ref().map_or(0, |(name, _)| name.len());
        if self.kept + bytes > MAX_KEPT {
            self.names.clear();
            self.kept = 0;
        }
        self.kept += bytes;
        self.names.insert((pid, what), name);
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

impl std::fmt::Debug for JavaNames {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("JavaNames")
    }
}

impl JavaNames {
    /// Takes note of a virtual machine that was found; that of an earlier process of the number is forgotten.
    pub(super) fn add(&self, pid: u32, machine: Machine) {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if known.machines.len() >= MACHINES {
            known.machines.clear();
        }
        known.machines.insert(pid, machine);
        known.names.retain(|(of, _), _| *of != pid);
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

    /// A name that is known, or is read now.
    fn find(
        &self,
        pid: u32,
        what: Named,
        read: impl FnOnce(&Machine) -> Result<Option<Function>>,
    ) -> Option<Function> {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(name) = known.names.get(&(pid, what)) {
            return name.clone();
        }
        // Of a process that is gone nothing can be read.
        let name = read(known.machines.get(&pid)?).ok()?;
        known.keep(pid, what, name.clone());
        name
    }
}

impl Machine {
    /// The name of what an address of generated code is in, and where its code begins.
    fn code(&self, address: u64) -> Result<Option<Function>> {
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
        if !COMPILED.contains(&&*kind) {
            return Ok((!kind.is_empty()).then(|| (text::shown(&kind), start)));
        }
        let method = structs
            .at("CompiledMethod", "_method")
            .or_else(|_| structs.at("nmethod", "_method"))?;
        let method = memory.word(blob.wrapping_add(method))?;
        Ok(Some((self.method(method)?, start)))
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
        let mut known = Known::default();
        let long = "n".repeat(1 << 20);
        for at in 0..200 {
            known.keep(7, Named::Code(at), Some((long.clone(), 0)));
            assert!(known.kept <= MAX_KEPT && known.names.contains_key(&(7, Named::Code(at))));
        }
        assert!(known.names.len() < 64);
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
