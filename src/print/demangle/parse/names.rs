//! Names of functions, variables and classes.

use super::Parser;
use crate::print::demangle::tree::{Id, Node, Qualifiers};

/// Classes of the standard library by their letter after `S`: their text, and the name of their constructors.
const STANDARD: &[(u8, &str, &str)] = &[
    (b'a', "std::allocator", "allocator"),
    (b'b', "std::basic_string", "basic_string"),
    (
        b's',
        "std::basic_string<char, std::char_traits<char>, std::allocator<char> >",
        "basic_string",
    ),
    (
        b'i',
        "std::basic_istream<char, std::char_traits<char> >",
        "basic_istream",
    ),
    (
        b'o',
        "std::basic_ostream<char, std::char_traits<char> >",
        "basic_ostream",
    ),
    (
        b'd',
        "std::basic_iostream<char, std::char_traits<char> >",
        "basic_iostream",
    ),
];

impl<'a> Parser<'a> {
    /// Reads a name, and the qualifiers of the member function that has the name.
    pub(super) fn name(&mut self) -> Option<(Id, Qualifiers)> {
        match self.peek()? {
            b'N' => return self.nested_name(),
            b'Z' => return self.local_name(),
            _ => {}
        }
        let standard = self.eat("St").then(|| self.text("std"));
        let mut name = match standard {
            None if self.peek() == Some(b'S') => self.substitution()?,
            _ => {
                let name = self.unqualified_name(standard)?;
                if self.peek() == Some(b'I') {
                    self.substitutions.push(name);
                }
                name
            }
        };
        if self.peek() == Some(b'I') {
            let arguments = self.template_arguments()?;
            name = self.add(Node::Template(name, arguments));
        }
        Some((name, Qualifiers::default()))
    }

    /// Reads names after each other, such as `a::b<int>::c`.
    fn nested_name(&mut self) -> Option<(Id, Qualifiers)> {
        self.expect("N")?;
        let mut qualifiers = self.qualifiers();
        qualifiers.reference = self.reference_qualifier();
        let mut name = None;
        while !self.eat("E") {
            let (next, is_new) = self.next_of_nested(name)?;
            if is_new && self.peek() != Some(b'E') {
                self.substitutions.push(next);
            }
            name = Some(next);
        }
        Some((name?, qualifiers))
    }

    /// Reads the next of the names after `name`. Returns the whole up to here, and whether it can be referred back to
    /// by this, if it is not all of the name.
    fn next_of_nested(&mut self, name: Option<Id>) -> Option<(Id, bool)> {
        let following = self.text.as_bytes().get(self.at + 1).copied();
        let new = match (self.peek()?, following) {
            (b'S', Some(b't')) if name.is_none() => {
                self.at += 2;
                return Some((self.text("std"), false));
            }
            (b'S', _) if name.is_none() => return Some((self.substitution()?, false)),
            // The variable whose initializer has a lambda expression.
            (b'M', _) => {
                self.at += 1;
                return Some((name?, false));
            }
            (b'T', _) if name.is_none() => self.parameter()?,
            (b'D', Some(b't' | b'T')) if name.is_none() => self.decltype()?,
            (b'I', _) => {
                let arguments = self.template_arguments()?;
                self.add(Node::Template(name?, arguments))
            }
            _ => self.unqualified_name(name)?,
        };
        Some((new, true))
    }

    /// Reads a name within a function.
    fn local_name(&mut self) -> Option<(Id, Qualifiers)> {
        self.expect("Z")?;
        let function = self.encoding(false)?;
        self.expect("E")?;
        if self.eat("s") {
            self.discriminator();
            let literal = self.text("string literal");
            return Some((
                self.add(Node::Qualified(function, literal)),
                Qualifiers::default(),
            ));
        }
        let mut scope = function;
        if self.eat("d") {
            let number = self.successor()?;
            let argument = self.text(numbered("{default arg#", number));
            scope = self.add(Node::Qualified(function, argument));
        }
        let (name, qualifiers) = self.name()?;
        self.discriminator();
        Some((self.add(Node::Qualified(scope, name)), qualifiers))
    }

    /// Skips the number that distinguishes equal names within one function.
    fn discriminator(&mut self) {
        let start = self.at;
        let read = match self.eat("__") {
            true => self.digits().and_then(|_| self.expect("_")),
            false if self.eat("_") => self.next().filter(u8::is_ascii_digit).map(|_| ()),
            false => None,
        };
        if read.is_none() {
            self.at = start;
        }
    }

    /// Reads one name, with its ABI tags, after what it belongs to.
    pub(super) fn unqualified_name(&mut self, scope: Option<Id>) -> Option<Id> {
        self.eat("L");
        let mut name = match self.peek()? {
            b'0'..=b'9' => {
                let name = self.source_name()?;
                self.last_name = Some(name);
                name
            }
            b'U' => self.unnamed()?,
            b'C' => {
                self.at += 1;
                let inherited = self.eat("I");
                self.next().filter(|kind| (b'1'..=b'5').contains(kind))?;
                if inherited {
                    self.type_()?;
                }
                self.add(Node::Structor("", self.last_name?))
            }
            b'D' if self.eat("DC") => self.binding()?,
            b'D' => {
                self.at += 1;
                self.next().filter(|kind| (b'0'..=b'5').contains(kind))?;
                self.add(Node::Structor("~", self.last_name?))
            }
            b'a'..=b'z' => self.operator_name()?,
            _ => return None,
        };
        while self.eat("B") {
            let tag = self.source_text()?;
            name = self.format("#0[abi:%]", tag, vec![name]);
        }
        Some(match scope {
            Some(scope) => self.add(Node::Qualified(scope, name)),
            None => name,
        })
    }

    /// Reads the length of a text and the text.
    pub(super) fn source_text(&mut self) -> Option<&'a str> {
        let length = usize::try_from(self.number()?)
            .ok()
            .filter(|&length| length > 0)?;
        let text = self.text.get(self.at..self.at.checked_add(length)?)?;
        self.at += length;
        Some(text)
    }

    pub(super) fn source_name(&mut self) -> Option<Id> {
        let text = self.source_text()?;
        let is_anonymous = text
            .strip_prefix("_GLOBAL_")
            .and_then(|rest| rest.strip_prefix(['_', '.', '$']))
            .is_some_and(|rest| rest.starts_with('N'));
        Some(self.text(match is_anonymous {
            true => "(anonymous namespace)",
            false => text,
        }))
    }

    /// Reads the name of a module, such as `a.b:partition`.
    pub(super) fn module(&mut self) -> Option<String> {
        let mut name = String::new();
        while self.eat("W") {
            if self.eat("P") {
                name.push(':');
            } else if !name.is_empty() {
                name.push('.');
            }
            name.push_str(self.source_text()?);
        }
        Some(name).filter(|name| !name.is_empty())
    }

    fn binding(&mut self) -> Option<Id> {
        let mut names = Vec::new();
        while !self.eat("E") {
            names.push(self.source_name()?);
        }
        let names = self.list(names);
        Some(self.format("[#0]", "", vec![names]))
    }

    pub(super) fn operator_name(&mut self) -> Option<Id> {
        if self.eat("cv") {
            let outer = std::mem::replace(&mut self.in_conversion, true);
            let to = self.type_();
            self.in_conversion = outer;
            let to = to?;
            return Some(self.add(Node::Conversion(to)));
        }
        if self.eat("li") {
            let suffix = self.source_name()?;
            return Some(self.format("operator\"\" #0", "", vec![suffix]));
        }
        let (_, name, _) = self.operator()?;
        let space = if name.starts_with(char::is_alphabetic) {
            " "
        } else {
            ""
        };
        Some(self.text(format!("operator{space}{}", name.trim_end())))
    }

    /// Reads the class of a lambda expression, or a type without a name.
    fn unnamed(&mut self) -> Option<Id> {
        if self.eat("Ut") {
            let number = self.successor()?;
            return Some(self.text(numbered("{unnamed type#", number)));
        }
        self.expect("Ul")?;
        let (declared, parameters) = self.signature()?;
        self.expect("E")?;
        let number = self.successor()?;
        Some(self.add(Node::Lambda(declared, parameters, number)))
    }

    /// Reads the template parameters that a lambda expression declares, and its parameters.
    fn signature(&mut self) -> Option<(Id, Id)> {
        let mut declared = Vec::new();
        while matches!(
            self.text.as_bytes()[self.at..],
            [b'T', b'y' | b'n' | b'p', ..]
        ) {
            let is_pack = self.eat("Tp");
            let of = match self.eat("Ty") {
                true => None,
                false => {
                    self.expect("Tn")?;
                    Some(self.type_()?)
                }
            };
            let number = declared.len() as u64;
            declared.push(self.add(Node::Declaration(of, is_pack, number)));
        }
        Some((self.list(declared), self.parameters()?))
    }

    /// Reads a reference back to a part of the name, or the code of a class of the standard library.
    pub(super) fn substitution(&mut self) -> Option<Id> {
        self.expect("S")?;
        let byte = self.peek()?;
        if let Some((_, text, constructor)) = STANDARD.iter().find(|(letter, ..)| *letter == byte) {
            self.at += 1;
            self.last_name = Some(self.text(*constructor));
            let mut name = self.text(*text);
            while self.eat("B") {
                let tag = self.source_text()?;
                name = self.format("#0[abi:%]", tag, vec![name]);
                self.substitutions.push(name);
            }
            return Some(name);
        }
        let number = match self.eat("_") {
            true => 0,
            false => self.sequence_number()?.checked_add(1)?,
        };
        self.substitutions
            .get(usize::try_from(number).ok()?)
            .copied()
    }

    pub(super) fn template_arguments(&mut self) -> Option<Id> {
        let last_name = self.last_name;
        self.expect("I")?;
        let mut arguments = Vec::new();
        while !self.eat("E") {
            arguments.push(self.template_argument()?);
        }
        self.last_name = last_name;
        Some(self.list(arguments))
    }

    pub(super) fn template_argument(&mut self) -> Option<Id> {
        match self.peek()? {
            b'L' => self.literal(),
            b'X' => {
                self.at += 1;
                let expression = self.expression()?;
                self.expect("E")?;
                Some(expression)
            }
            b'I' | b'J' => {
                self.at += 1;
                let mut pack = Vec::new();
                while !self.eat("E") {
                    let argument = self.nested(Self::template_argument)?;
                    pack.push(argument);
                }
                Some(self.list(pack))
            }
            _ => self.type_(),
        }
    }

    /// Reads a template parameter.
    pub(super) fn parameter(&mut self) -> Option<Id> {
        self.expect("T")?;
        let number = self.successor()?;
        Some(self.add(Node::Parameter(number)))
    }

    pub(super) fn reference_qualifier(&mut self) -> Option<&'static str> {
        match self.peek()? {
            b'R' => {
                self.at += 1;
                Some(" &")
            }
            b'O' => {
                self.at += 1;
                Some(" &&")
            }
            _ => None,
        }
    }
}

/// Returns the name of a part that has only a number.
fn numbered(before: &str, number: u64) -> String {
    format!("{before}{}}}", number.saturating_add(1))
}
