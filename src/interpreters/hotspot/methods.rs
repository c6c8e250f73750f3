//! Functions of Java, by their `Method`s in the memory of the process that runs them: what they are called, and which
//! lines of the source their bytecode is from.

use anyhow::{Context, Result, ensure};

use super::line_table;
use super::machine::Machine;
use super::numbers::Numbers;
use crate::code::lines::SourceLine;
use crate::print::text;

/// Bytes of a word: of a slot in a class's table of constants, and of what sizes of objects are counted in.
const WORD: u64 = 8;
/// The bit of a function's flags that says that lines are known; `_has_linenumber_table`.
const HAS_LINES: u16 = 1;
/// Bytes of a function's table of lines that are read, at most.
const MOST_TABLE_BYTES: u64 = 1 << 20;

/// A function of Java.
pub(super) struct Method<'a> {
    machine: &'a Machine,
    /// Where its `ConstMethod` is: what never changes of a function.
    parts: u64,
    /// Where its class's `ConstantPool` is.
    constants: u64,
}

impl Machine {
    /// The function whose `Method` is at this address.
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

    /// A word of an object.
    fn field(&self, object: u64, class: &str, field: &str) -> Result<u64> {
        let at = self.structs.at(class, field)?;
        self.memory.word(object.wrapping_add(at))
    }

    /// A number of two bytes of an object.
    fn short(&self, object: u64, class: &str, field: &str) -> Result<u16> {
        let at = object.wrapping_add(self.structs.at(class, field)?);
        self.memory.bytes(at).map(u16::from_ne_bytes)
    }

    /// The text of a `Symbol`.
    fn symbol(&self, symbol: u64) -> Result<String> {
        ensure!(symbol != 0, "no symbol");
        let length = self.short(symbol, "Symbol", "_length")?;
        let mut bytes = vec![0; length.into()];
        let body = symbol.wrapping_add(self.structs.at("Symbol", "_body")?);
        self.memory.read_exact(&mut bytes, body)?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }
}

impl Method<'_> {
    /// The function's name, as HotSpot's own `external_name()` has it; escaped.
    ///
    /// # Errors
    /// If the memory cannot be read, or does not make sense.
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
        Ok(text::shown(&name))
    }

    /// The place in the source of the bytecode whose address ends in these bits, with the function's name.
    ///
    /// # Errors
    /// If the name cannot be read.
    pub(super) fn line_of(&self, bytecode: Option<u16>) -> Result<SourceLine> {
        let begins = self.bytecode()?;
        self.line_at(bytecode.map(|at| at.wrapping_sub(begins as u16).into()))
    }

    /// The place in the source of the bytecode with this index, with the function's name.
    ///
    /// # Errors
    /// If the name cannot be read.
    pub(super) fn line_at(&self, bytecode: Option<u32>) -> Result<SourceLine> {
        // What was compiled without lines, or without its source file's name, has none.
        let line = bytecode.and_then(|bytecode| self.find_line(bytecode).ok()?);
        let index = self
            .machine
            .short(self.constants, "ConstantPool", "_source_file_name_index");
        let file = index.and_then(|index| self.constant(index));
        Ok(SourceLine {
            function: Some(self.name()?),
            file: file.ok().map(|file| text::shown(&file)),
            line: line.unwrap_or(0),
        })
    }

    /// The line of the bytecode with this index, if it is known.
    fn find_line(&self, bytecode: u32) -> Result<Option<u32>> {
        // A native function has no bytecode, and its frame says nothing of it.
        if bytecode >= self.short("_code_size")?.into() || !self.has_lines()? {
            return Ok(None);
        }
        let numbers = Numbers::of(&self.machine.memory, &self.machine.structs)?;
        Ok(line_table::line_at(&self.line_table()?, numbers, bytecode))
    }

    /// Whether its class file tells lines.
    fn has_lines(&self) -> Result<bool> {
        // Flags became a class of their own in JDK 21.
        let nested = self.machine.structs.field("ConstMethod", "_flags._flags");
        let flags = match nested {
            Some(_) => self.short("_flags._flags")?,
            None => self.short("_flags")?,
        };
        Ok(flags & HAS_LINES != 0)
    }

    /// The table of lines, and what follows it.
    fn line_table(&self) -> Result<Vec<u8>> {
        let (memory, structs) = (&self.machine.memory, &self.machine.structs);
        let words = structs.at("ConstMethod", "_constMethod_size")?;
        let words = memory.bytes(self.parts.wrapping_add(words))?;
        let end = WORD * u64::from(u32::from_ne_bytes(words));
        let end = self.parts.wrapping_add(end);
        let begins = self.bytecode()?;
        let begins = begins.wrapping_add(self.short("_code_size")?.into());
        let bytes = end.checked_sub(begins);
        let bytes = bytes.filter(|&bytes| bytes <= MOST_TABLE_BYTES);
        let mut table = vec![0; bytes.context("a table without an end")? as usize];
        memory.read_exact(&mut table, begins)?;
        Ok(table)
    }

    /// Where its bytecode begins.
    fn bytecode(&self) -> Result<u64> {
        let size = self.machine.structs.size("ConstMethod")?;
        Ok(self.parts.wrapping_add(size))
    }

    fn short(&self, field: &str) -> Result<u16> {
        self.machine.short(self.parts, "ConstMethod", field)
    }

    /// A constant of its class that is a text.
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
