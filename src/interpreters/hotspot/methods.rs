//! Java functions, read by their `Method`s from the memory of the process that runs them: their names, and the source
//! lines of their bytecode.

use anyhow::{Context, Result, ensure};

use super::line_table;
use super::machine::Machine;
use super::numbers::Numbers;
use crate::code::lines::SourceLine;
use crate::print::text;

/// Size of a word, in bytes: a slot in a class's constant pool is a word, and sizes of objects are counted in words.
const WORD: u64 = 8;
/// Flag of a function that has a line table; `_has_linenumber_table`.
const HAS_LINES: u16 = 1;
/// Maximum size of a function's line table, in bytes.
const MAX_TABLE_BYTES: u64 = 1 << 20;

/// Java function.
pub(super) struct Method<'a> {
    machine: &'a Machine,
    /// The address of its `ConstMethod`: the data of a function that never changes.
    parts: u64,
    /// The address of its class's `ConstantPool`.
    constants: u64,
}

impl Machine {
    /// Returns the function whose `Method` is at this address.
    ///
    /// # Errors
    /// If the memory cannot be read.
    pub(super) fn method(&self, method: u64) -> Result<Method<'_>> {
        let parts = self.field(method, "Method", "_constMethod")?;
        Ok(Method {
            machine: self,
            parts,
            constants: self.field(parts, "ConstMethod", "_constants")?,
        })
    }

    /// Reads a field of an object that is a word.
    fn field(&self, object: u64, class: &str, field: &str) -> Result<u64> {
        let at = self.structs.at(class, field)?;
        self.memory.word(object.wrapping_add(at))
    }

    /// Reads a field of an object that is a number of two bytes.
    fn short(&self, object: u64, class: &str, field: &str) -> Result<u16> {
        let at = object.wrapping_add(self.structs.at(class, field)?);
        self.memory.bytes(at).map(u16::from_ne_bytes)
    }

    /// Reads the text of a `Symbol`.
    fn symbol(&self, symbol: u64) -> Result<String> {
        ensure!(symbol != 0, "no symbol");
        let length = self.short(symbol, "Symbol", "_length")?;
        let body = symbol.wrapping_add(self.structs.at("Symbol", "_body")?);
        let bytes = self.memory.read(body, length.into())?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }
}

impl Method<'_> {
    /// Returns the function's name in the format of HotSpot's own `external_name()`, escaped.
    ///
    /// # Errors
    /// If the memory cannot be read, or is inconsistent.
    pub(super) fn name(&self) -> Result<String> {
        let class = self
            .machine
            .field(self.constants, "ConstantPool", "_pool_holder")?;
        let class = self.machine.field(class, "Klass", "_name")?;
        let class = self.machine.symbol(class)?;
        let name = self.constant(self.short("_name_index")?)?;
        let signature = self.constant(self.short("_signature_index")?)?;
        let (returned, arguments) = types(&signature).context("no signature")?;
        let name = format!("{returned} {}.{name}({arguments})", class_name(&class));
        Ok(text::display_name(&name))
    }

    /// Returns the function's name and the source line of the bytecode whose address ends in these 16 bits.
    ///
    /// # Errors
    /// If the name cannot be read.
    pub(super) fn line_of(&self, bytecode: Option<u16>) -> Result<SourceLine> {
        let begins = self.bytecode()?;
        self.line_at(bytecode.map(|at| at.wrapping_sub(begins as u16).into()))
    }

    /// Returns the function's name and the source line of the bytecode with this index.
    ///
    /// # Errors
    /// If the name cannot be read.
    pub(super) fn line_at(&self, bytecode: Option<u32>) -> Result<SourceLine> {
        // Classes can be compiled without lines, or without the name of the source file.
        let line = bytecode.and_then(|bytecode| self.find_line(bytecode).ok()?);
        let index = self
            .machine
            .short(self.constants, "ConstantPool", "_source_file_name_index");
        let file = index.and_then(|index| self.constant(index));
        Ok(SourceLine {
            function: Some(self.name()?),
            file: file.ok().map(|file| text::display_name(&file)),
            line: line.unwrap_or(0),
        })
    }

    /// Returns the line of the bytecode with this index. None if the line is unknown.
    fn find_line(&self, bytecode: u32) -> Result<Option<u32>> {
        // A native function has no bytecode, so the index in its frame has no meaning.
        if bytecode >= self.short("_code_size")?.into() || !self.has_lines()? {
            return Ok(None);
        }
        let numbers = Numbers::of(&self.machine.memory, &self.machine.structs)?;
        Ok(line_table::line_at(&self.line_table()?, numbers, bytecode))
    }

    /// Returns whether the function's class file contains lines.
    fn has_lines(&self) -> Result<bool> {
        // Since JDK 21 the flags are a class of their own.
        let nested = self.machine.structs.field("ConstMethod", "_flags._flags");
        let flags = match nested {
            Some(_) => self.short("_flags._flags")?,
            None => self.short("_flags")?,
        };
        Ok(flags & HAS_LINES != 0)
    }

    /// Reads the line table and the bytes after it, up to the end of the `ConstMethod`.
    fn line_table(&self) -> Result<Vec<u8>> {
        let (memory, structs) = (&self.machine.memory, &self.machine.structs);
        let words = structs.at("ConstMethod", "_constMethod_size")?;
        let words = memory.bytes(self.parts.wrapping_add(words))?;
        let end = WORD * u64::from(u32::from_ne_bytes(words));
        let end = self.parts.wrapping_add(end);
        let begins = self.bytecode()?;
        let begins = begins.wrapping_add(self.short("_code_size")?.into());
        let bytes = end.checked_sub(begins);
        let bytes = bytes.filter(|&bytes| bytes <= MAX_TABLE_BYTES);
        let bytes = bytes.context("a table without an end")?;
        Ok(memory.read(begins, bytes as usize)?)
    }

    /// Returns the address of the function's bytecode.
    fn bytecode(&self) -> Result<u64> {
        let size = self.machine.structs.size("ConstMethod")?;
        Ok(self.parts.wrapping_add(size))
    }

    fn short(&self, field: &str) -> Result<u16> {
        self.machine.short(self.parts, "ConstMethod", field)
    }

    /// Reads a constant of the function's class that is a text.
    fn constant(&self, index: u16) -> Result<String> {
        ensure!(index != 0, "no constant");
        let size = self.machine.structs.size("ConstantPool")?;
        let slot = size + WORD * u64::from(index);
        let symbol = self
            .machine
            .memory
            .word(self.constants.wrapping_add(slot))?;
        self.machine.symbol(symbol)
    }
}

/// Returns a class's name in Java's notation. The name of a hidden class ends in a plus sign and its address; the
/// name of a class from a source file contains no plus sign.
fn class_name(symbol: &str) -> String {
    symbol.replace('/', ".").replace('+', "/")
}

/// Parses a signature into the returned type and the types of the arguments.
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

/// Parses the type at the beginning of a signature. Returns the type and the rest of the signature.
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
