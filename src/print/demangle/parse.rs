//! Parser of names that the Itanium C++ ABI mangles, as GCC and Clang do on Linux.
//!
//! Each function reads what the ABI's grammar calls by the function's name, and returns None if the bytes are something
//! else. Nesting and the number of nodes are bounded.

mod expressions;
mod names;
mod types;

use std::borrow::Cow;

use super::tree::{Id, Node, Qualifiers};

/// Deepest nesting of types, expressions and encodings.
const MAX_DEPTH: u32 = 96;

/// Most nodes of a name. The two forms of a dependent name are tried one after the other, which can double the time
/// with each level of nesting.
const MAX_NODES: usize = 1 << 16;

/// Parser in a mangled name.
pub(super) struct Parser<'a> {
    text: &'a str,
    at: usize,
    nodes: Vec<Node<'a>>,
    substitutions: Vec<Id>,
    /// Whether the type that an operator converts to is read.
    in_conversion: bool,
    /// Name that a constructor repeats.
    last_name: Option<Id>,
    depth: u32,
}

/// Parses a mangled name as a whole. Returns its tree and the tree's root.
pub(super) fn parse(text: &str) -> Option<(Vec<Node<'_>>, Id)> {
    let mut parser = Parser {
        text,
        at: 0,
        nodes: Vec::new(),
        substitutions: Vec::new(),
        in_conversion: false,
        last_name: None,
        depth: 0,
    };
    let root = parser.mangled_name()?;
    Some((parser.nodes, root))
}

impl<'a> Parser<'a> {
    fn mangled_name(&mut self) -> Option<Id> {
        let mut root = if self.eat("_GLOBAL_") {
            self.global_function()?
        } else {
            self.expect("_Z")?;
            self.encoding(true)?
        };
        while let Some(suffix) = self.clone_suffix() {
            root = self.format("#0 [clone %]", suffix, vec![root]);
        }
        (self.at == self.text.len()).then_some(root)
    }

    /// Reads what follows `_GLOBAL_` in the name of a function that constructs or destroys global variables.
    fn global_function(&mut self) -> Option<Id> {
        let _separator = self.next().filter(|byte| b"_.$".contains(byte))?;
        let what = match self.next()? {
            b'I' => "global constructors keyed to ",
            b'D' => "global destructors keyed to ",
            _ => return None,
        };
        self.expect("_")?;
        let key = if self.eat("_Z") {
            self.encoding(true)?
        } else {
            let rest = &self.text[self.at..];
            self.at = self.text.len();
            self.text(rest)
        };
        Some(self.format("%#0", what, vec![key]))
    }

    /// Reads a suffix such as `.isra.0` or `.cold`.
    fn clone_suffix(&mut self) -> Option<&'a str> {
        let rest = &self.text[self.at..];
        let after = rest.strip_prefix('.')?;
        let is_word = |byte: u8| byte.is_ascii_alphabetic() || byte == b'_';
        let digits = |text: &str| text.bytes().take_while(u8::is_ascii_digit).count();
        let mut length = 1 + match after.bytes().next()? {
            byte if is_word(byte) => after.bytes().take_while(|&byte| is_word(byte)).count(),
            _ => digits(after),
        };
        if length == 1 {
            return None;
        }
        while let Some(number) = rest[length..].strip_prefix('.').map(digits)
            && number > 0
        {
            length += 1 + number;
        }
        self.at += length;
        Some(&rest[..length])
    }

    /// Reads a function with its types, or a variable. The types of an outer function lack what it returns if it is not
    /// `whole`.
    fn encoding(&mut self, whole: bool) -> Option<Id> {
        self.nested(|parser| parser.encoding_of_this(whole))
    }

    fn encoding_of_this(&mut self, whole: bool) -> Option<Id> {
        if matches!(self.peek(), Some(b'T' | b'G')) {
            return self.special_name();
        }
        let (name, qualifiers) = self.name()?;
        if self.is_end() {
            return Some(name);
        }
        let returns = match self.has_return_type(name) {
            true => Some(self.type_()?),
            false => None,
        };
        let parameters = self.parameters()?;
        Some(self.add(Node::Function {
            returns: returns.filter(|_| whole),
            name: Some(name),
            parameters,
            qualifiers,
            noexcept: false,
        }))
    }

    /// Returns whether the types of a function begin with its return type, as in templates other than constructors,
    /// destructors and conversions.
    fn has_return_type(&self, name: Id) -> bool {
        match self.nodes[name as usize] {
            Node::Qualified(_, last) => self.has_return_type(last),
            Node::Template(mut name, _) => loop {
                match self.nodes[name as usize] {
                    Node::Qualified(_, last) => name = last,
                    Node::Structor(..) | Node::Conversion(_) => return false,
                    _ => return true,
                }
            },
            _ => false,
        }
    }

    /// Reads types up to an end; a single `void` stands for none.
    fn parameters(&mut self) -> Option<Id> {
        let mut types = Vec::new();
        if !self.eat("v") {
            while !self.is_end() && !self.is_reference_qualifier() {
                types.push(self.type_()?);
            }
            if types.is_empty() {
                return None;
            }
        }
        Some(self.list(types))
    }

    /// Returns whether what has been read may end here.
    fn is_end(&self) -> bool {
        matches!(self.peek(), None | Some(b'E' | b'.'))
    }

    /// Returns whether the ref-qualifier of a function's type is next, at the type's end.
    fn is_reference_qualifier(&self) -> bool {
        matches!(self.text.as_bytes()[self.at..], [b'R' | b'O', b'E', ..])
    }

    fn special_name(&mut self) -> Option<Id> {
        const OF_TYPES: &[(&str, &str)] = &[
            ("TV", "vtable for "),
            ("TT", "VTT for "),
            ("TI", "typeinfo for "),
            ("TS", "typeinfo name for "),
        ];
        const OF_NAMES: &[(&str, &str)] = &[
            ("TH", "TLS init function for "),
            ("TW", "TLS wrapper function for "),
            ("GV", "guard variable for "),
        ];
        const OF_ENCODINGS: &[(&str, &str)] = &[
            ("GTt", "transaction clone for "),
            ("GTn", "non-transaction clone for "),
            ("GA", "hidden alias for "),
        ];
        let begins = |list: &'static [(&str, &'static str)], text: &str| {
            list.iter()
                .copied()
                .find(|(code, _)| text.starts_with(code))
        };
        let rest = &self.text[self.at..];
        if let Some((code, words)) = begins(OF_TYPES, rest) {
            self.at += code.len();
            let of = self.type_()?;
            return Some(self.format("%#0", words, vec![of]));
        }
        if let Some((code, words)) = begins(OF_NAMES, rest) {
            self.at += code.len();
            let (of, _) = self.name()?;
            return Some(self.format("%#0", words, vec![of]));
        }
        if let Some((code, words)) = begins(OF_ENCODINGS, rest) {
            self.at += code.len();
            let of = self.encoding(true)?;
            return Some(self.format("%#0", words, vec![of]));
        }
        self.thunk_or_rare()
    }

    fn thunk_or_rare(&mut self) -> Option<Id> {
        if self.eat("TA") {
            let of = self.template_argument()?;
            return Some(self.format("template parameter object for #0", "", vec![of]));
        }
        if self.eat("TC") {
            let derived = self.type_()?;
            self.number()?;
            self.expect("_")?;
            let base = self.type_()?;
            return Some(self.format("construction vtable for #0-in-#1", "", vec![base, derived]));
        }
        if self.eat("GI") {
            let module = self.module()?;
            return Some(self.text(format!("initializer for module {module}")));
        }
        if self.eat("GR") {
            let (of, _) = self.name()?;
            let number = match self.eat("_") {
                true => 0,
                false => self.sequence_number()? + 1,
            };
            return Some(self.format(
                "%#0",
                format!("reference temporary #{number} for "),
                vec![of],
            ));
        }
        self.expect("T")?;
        let words = match self.peek()? {
            b'h' => "non-virtual thunk to ",
            b'v' => "virtual thunk to ",
            b'c' => {
                self.at += 1;
                self.call_offset()?;
                "covariant return thunk to "
            }
            _ => return None,
        };
        self.call_offset()?;
        let of = self.encoding(true)?;
        Some(self.format("%#0", words, vec![of]))
    }

    /// Reads how a thunk changes `this`.
    fn call_offset(&mut self) -> Option<()> {
        let is_virtual = match self.next()? {
            b'h' => false,
            b'v' => true,
            _ => return None,
        };
        self.signed_number()?;
        self.expect("_")?;
        if is_virtual {
            self.signed_number()?;
            self.expect("_")?;
        }
        Some(())
    }

    /// Reads the qualifiers before a type or the name of a member function.
    fn qualifiers(&mut self) -> Qualifiers {
        Qualifiers {
            restrict: self.eat("r"),
            volatile: self.eat("V"),
            constant: self.eat("K"),
            reference: None,
        }
    }

    /// Reads what is nested in what is read now, unless the nesting is too deep or has made too many nodes.
    fn nested(&mut self, read: impl FnOnce(&mut Self) -> Option<Id>) -> Option<Id> {
        if self.depth == MAX_DEPTH || self.nodes.len() > MAX_NODES {
            return None;
        }
        self.depth += 1;
        let read = read(self);
        self.depth -= 1;
        read
    }

    fn add(&mut self, node: Node<'a>) -> Id {
        self.nodes.push(node);
        // Texts longer than 4 GB are not read.
        (self.nodes.len() - 1) as Id
    }

    fn text(&mut self, text: impl Into<Cow<'a, str>>) -> Id {
        self.add(Node::Text(text.into()))
    }

    fn format(
        &mut self,
        pattern: &'static str,
        text: impl Into<Cow<'a, str>>,
        nodes: Vec<Id>,
    ) -> Id {
        self.add(Node::Format(pattern, text.into(), nodes.into_boxed_slice()))
    }

    fn list(&mut self, nodes: Vec<Id>) -> Id {
        self.add(Node::List(nodes.into_boxed_slice()))
    }

    /// Adds a node that can be referred back to.
    fn substitute(&mut self, node: Node<'a>) -> Id {
        let id = self.add(node);
        self.substitutions.push(id);
        id
    }

    fn peek(&self) -> Option<u8> {
        self.text.as_bytes().get(self.at).copied()
    }

    /// Reads a byte, but no part of a character of several.
    fn next(&mut self) -> Option<u8> {
        let byte = self.peek().filter(u8::is_ascii)?;
        self.at += 1;
        Some(byte)
    }

    fn eat(&mut self, text: &str) -> bool {
        let is_next = self.text.as_bytes()[self.at..].starts_with(text.as_bytes());
        self.at += if is_next { text.len() } else { 0 };
        is_next
    }

    fn expect(&mut self, text: &str) -> Option<()> {
        self.eat(text).then_some(())
    }

    fn number(&mut self) -> Option<u64> {
        self.digits()?.parse().ok()
    }

    fn digits(&mut self) -> Option<&'a str> {
        let rest = &self.text[self.at..];
        let length = rest.bytes().take_while(u8::is_ascii_digit).count();
        self.at += length;
        (length > 0).then_some(&rest[..length])
    }

    /// Reads a number that may begin with `n`, for minus.
    fn signed_number(&mut self) -> Option<u64> {
        self.eat("n");
        self.number()
    }

    /// Reads a number of base 36 and an underscore.
    fn sequence_number(&mut self) -> Option<u64> {
        let rest = &self.text[self.at..];
        let length = rest.find('_')?;
        let digits = rest[..length].bytes();
        if length == 0
            || !digits
                .clone()
                .all(|byte| byte.is_ascii_digit() || byte.is_ascii_uppercase())
        {
            return None;
        }
        self.at += length + 1;
        u64::from_str_radix(&rest[..length], 36).ok()
    }

    /// Reads an underscore for 0, or a number and an underscore for the number's successor.
    fn successor(&mut self) -> Option<u64> {
        if self.eat("_") {
            return Some(0);
        }
        let number = self.number()?;
        self.expect("_")?;
        number.checked_add(1)
    }
}
