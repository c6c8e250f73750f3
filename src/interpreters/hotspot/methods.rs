//! What a function of Java is called, by its `Method` in the memory of the process that runs it.

use anyhow::{Context, Result, ensure};

use super::machine::Machine;
use crate::print::text;

/// Bytes of a slot in a class's table of constants.
const SLOT: u64 = 8;

impl Machine {
    /// The name of a function, as HotSpot's own `external_name()` has it.
    pub(super) fn method(&self, method: u64) -> Result<String> {
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
