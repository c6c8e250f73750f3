//! Text of a parsed C++ name, in the words and spaces of c++filt.
//!
//! A type is written in two parts, before and after the name that it is declared with: `int (*` and `)(char)`.

use std::fmt;

use super::tree::{Id, Node, Qualifiers};

/// Most nodes that are visited to write one name: more only if a name is made to write nothing for long.
const MAX_STEPS: u32 = 1 << 17;

/// Deepest nesting of nodes. What is referred back to makes it deeper than that of the mangled name.
const MAX_DEPTH: u32 = 192;

/// Text of a tree as it is written.
pub(super) struct Writer<'a> {
    nodes: &'a [Node<'a>],
    text: String,
    /// Number of bytes from which on the text is long enough.
    enough: usize,
    /// Where a list ended at last without a pack that has no elements.
    end_of_cut: usize,
    steps: u32,
    depth: u32,
    /// Arguments of the function templates whose types are written, the innermost last.
    scopes: Vec<Id>,
    /// Arguments of the template whose name is written.
    arguments: Option<Id>,
    /// Which element of packs is written.
    pack: Option<usize>,
    /// Template parameters that the lambda expression declares whose parameters are written.
    lambda: Option<Id>,
}

/// Writes a tree up to a little after a number of bytes. Returns None if a template parameter stands for nothing.
pub(super) fn write<'a>(nodes: &'a [Node<'a>], root: Id, enough: usize) -> Option<String> {
    let mut writer = Writer {
        nodes,
        text: String::new(),
        enough,
        end_of_cut: 0,
        steps: 0,
        depth: 0,
        scopes: Vec::new(),
        arguments: None,
        pack: None,
        lambda: None,
    };
    let written = writer.whole(root);
    (written.is_ok() || writer.text.len() >= enough).then_some(writer.text)
}

impl<'a> Writer<'a> {
    fn whole(&mut self, id: Id) -> fmt::Result {
        self.left(id)?;
        self.right(id)
    }

    fn node(&self, id: Id) -> &'a Node<'a> {
        &self.nodes[id as usize]
    }

    fn put(&mut self, text: &str) {
        self.text.push_str(text);
    }

    /// Runs `write` one level deeper, unless the text is long enough or has taken too many steps.
    fn step(&mut self, write: impl FnOnce(&mut Self) -> fmt::Result) -> fmt::Result {
        self.steps += 1;
        if self.steps > MAX_STEPS || self.depth == MAX_DEPTH || self.text.len() >= self.enough {
            return Err(fmt::Error);
        }
        self.depth += 1;
        let written = write(self);
        self.depth -= 1;
        written
    }

    /// Writes what comes before the name that a type is declared with; all of what is no type.
    fn left(&mut self, id: Id) -> fmt::Result {
        self.step(|writer| writer.left_of_this(id))
    }

    fn left_of_this(&mut self, id: Id) -> fmt::Result {
        match *self.node(id) {
            Node::Pointer(to) => {
                self.open(to, false)?;
                self.put("*");
            }
            Node::Reference(..) => {
                let (to, kind) = self.collapsed(id)?;
                self.open(to, false)?;
                self.put(kind);
            }
            Node::Member(class, to) => {
                self.open(to, true)?;
                if !self.text.ends_with('(') {
                    self.put(" ");
                }
                self.whole(class)?;
                self.put("::*");
            }
            Node::Qualify(of, qualifiers) => {
                self.left(of)?;
                let inner = self.qualifiers_of(of)?;
                self.qualifiers(Qualifiers {
                    restrict: qualifiers.restrict && !inner.restrict,
                    volatile: qualifiers.volatile && !inner.volatile,
                    constant: qualifiers.constant && !inner.constant,
                    reference: None,
                });
            }
            Node::Array(_, of) => self.left(of)?,
            Node::Function { name, .. } => self.function(id, name)?,
            Node::Parameter(..) => self.parameter(id, Self::left)?,
            Node::Expansion(pattern) => self.expansion(pattern)?,
            _ => self.plain(id)?,
        }
        Ok(())
    }

    /// Writes what comes after the name that a type is declared with.
    fn right(&mut self, id: Id) -> fmt::Result {
        self.step(|writer| match *writer.node(id) {
            Node::Pointer(to) | Node::Member(_, to) => writer.close(to),
            Node::Reference(..) => {
                let (to, _) = writer.collapsed(id)?;
                writer.close(to)
            }
            Node::Qualify(of, _) => writer.right(of),
            Node::Array(length, of) => {
                writer.put(if writer.text.ends_with(']') {
                    "["
                } else {
                    " ["
                });
                if let Some(length) = length {
                    writer.whole(length)?;
                }
                writer.put("]");
                writer.right(of)
            }
            Node::Function {
                returns,
                parameters,
                qualifiers,
                noexcept,
                ..
            } => {
                writer.put("(");
                writer.in_scope(id, |writer| writer.list(parameters))?;
                writer.put(")");
                writer.qualifiers(qualifiers);
                writer.put(if noexcept { " noexcept" } else { "" });
                match returns {
                    Some(returns) => writer.in_scope(id, |writer| writer.right(returns)),
                    None => Ok(()),
                }
            }
            Node::Parameter(..) if writer.lambda.is_none() => writer.parameter(id, Self::right),
            _ => Ok(()),
        })
    }

    /// Writes the left part of what a pointer or reference refers to, with an opening parenthesis if that is a function
    /// or an array.
    fn open(&mut self, to: Id, is_member: bool) -> fmt::Result {
        self.left(to)?;
        match self.declares(to)? {
            Some(Declares::Function) => {
                if is_member || !self.text.ends_with(['(', '*']) {
                    self.space();
                }
                self.put("(");
            }
            Some(Declares::Array) => self.put(" ("),
            None => {}
        }
        Ok(())
    }

    fn close(&mut self, to: Id) -> fmt::Result {
        if self.declares(to)?.is_some() {
            self.put(")");
        }
        self.right(to)
    }

    fn space(&mut self) {
        if !self.text.ends_with(' ') {
            self.put(" ");
        }
    }

    /// Returns whether a type is a function or an array.
    fn declares(&mut self, id: Id) -> Result<Option<Declares>, fmt::Error> {
        let id = self.unqualified(id)?;
        Ok(match self.node(id) {
            Node::Function { name: None, .. } => Some(Declares::Function),
            Node::Array(..) => Some(Declares::Array),
            _ => None,
        })
    }

    /// Returns whether a type is written on both sides of the name that it is declared with.
    fn declares_around(&mut self, mut id: Id) -> Result<bool, fmt::Error> {
        loop {
            id = self.unqualified(id)?;
            id = match *self.node(id) {
                Node::Pointer(to) | Node::Member(_, to) | Node::Reference(to, _) => to,
                _ => return Ok(self.declares(id)?.is_some()),
            };
        }
    }

    /// Returns a type without its qualifiers, and what a template parameter stands for.
    fn unqualified(&mut self, mut id: Id) -> Result<Id, fmt::Error> {
        loop {
            self.step(|_| Ok(()))?;
            id = match *self.node(id) {
                Node::Qualify(of, _) => of,
                Node::Parameter(..) if self.lambda.is_none() => {
                    self.stands_for(id).ok_or(fmt::Error)?
                }
                _ => return Ok(id),
            };
        }
    }

    /// Returns the qualifiers of a type that is qualified itself.
    fn qualifiers_of(&mut self, mut id: Id) -> Result<Qualifiers, fmt::Error> {
        loop {
            self.step(|_| Ok(()))?;
            id = match *self.node(id) {
                Node::Qualify(_, qualifiers) => return Ok(qualifiers),
                Node::Parameter(..) if self.lambda.is_none() => {
                    self.stands_for(id).ok_or(fmt::Error)?
                }
                _ => return Ok(Qualifiers::default()),
            };
        }
    }

    /// Returns what a reference refers to and its kind, when references to references are one.
    fn collapsed(&mut self, id: Id) -> Result<(Id, &'static str), fmt::Error> {
        let Node::Reference(mut to, mut kind) = *self.node(id) else {
            return Err(fmt::Error);
        };
        loop {
            self.step(|_| Ok(()))?;
            match *self.node(to) {
                Node::Parameter(..) if self.lambda.is_none() => {
                    to = self.stands_for(to).ok_or(fmt::Error)?
                }
                Node::Reference(inner, inner_kind) => {
                    kind = if inner_kind == "&" { inner_kind } else { kind };
                    to = inner;
                }
                _ => return Ok((to, kind)),
            }
        }
    }

    /// Returns what a template parameter stands for: of a pack, the element that is written.
    fn stands_for(&self, parameter: Id) -> Option<Id> {
        let (&Node::Parameter(number), Some(&scope)) = (self.node(parameter), self.scopes.last())
        else {
            return None;
        };
        let Node::List(arguments) = self.node(scope) else {
            return None;
        };
        let argument = *arguments.get(usize::try_from(number).ok()?)?;
        match (self.node(argument), self.pack) {
            (Node::List(pack), Some(index)) => pack.get(index).copied(),
            _ => Some(argument),
        }
    }

    fn parameter(
        &mut self,
        id: Id,
        write: impl FnOnce(&mut Self, Id) -> fmt::Result,
    ) -> fmt::Result {
        if let (Some(lambda), &Node::Parameter(number)) = (self.lambda, self.node(id)) {
            let Node::List(declared) = self.node(lambda) else {
                return Err(fmt::Error);
            };
            match usize::try_from(number)
                .ok()
                .and_then(|number| declared.get(number))
            {
                Some(&declaration) => self.declared_name(declaration),
                None => self.put(&format!("auto:{}", number.saturating_add(1))),
            }
            return Ok(());
        }
        let argument = self.stands_for(id).ok_or(fmt::Error)?;
        // The argument is not of the template that it is given to.
        let scope = self.scopes.pop();
        let written = write(self, argument);
        self.scopes.extend(scope);
        written
    }

    /// Writes a pattern once for each element of the pack in it.
    fn expansion(&mut self, pattern: Id) -> fmt::Result {
        let outer = self.pack;
        let length = match self.lambda {
            Some(_) => None,
            None => self.pack_length(pattern)?,
        };
        let Some(length) = length else {
            self.operand(pattern)?;
            self.put("...");
            return Ok(());
        };
        for index in 0..length {
            if index > 0 {
                self.put(", ");
            }
            self.pack = Some(index);
            self.whole(pattern)?;
        }
        self.pack = outer;
        Ok(())
    }

    /// Returns how many elements the first pack in a pattern has, if there is one.
    fn pack_length(&mut self, id: Id) -> Result<Option<usize>, fmt::Error> {
        let mut length = None;
        self.step(|writer| {
            if let Node::Parameter(..) = writer.node(id) {
                let outer = writer.pack.take();
                let to = writer.stands_for(id);
                writer.pack = outer;
                if let Some(Node::List(pack)) = to.map(|to| writer.node(to)) {
                    length = Some(pack.len());
                }
                return Ok(());
            }
            for child in writer.node(id).children() {
                length = writer.pack_length(child)?;
                if length.is_some() {
                    break;
                }
            }
            Ok(())
        })?;
        Ok(length)
    }

    /// Writes nodes with commas between those that are not empty.
    fn list(&mut self, list: Id) -> fmt::Result {
        let Node::List(list) = self.node(list) else {
            return Err(fmt::Error);
        };
        let start = self.text.len();
        for &each in list {
            let before = self.text.len();
            self.put(if before > start { ", " } else { "" });
            let filled = self.text.len();
            self.step(|writer| writer.whole(each))?;
            if self.text.len() == filled {
                self.text.truncate(before);
                self.end_of_cut = before;
            }
        }
        Ok(())
    }

    fn qualifiers(&mut self, qualifiers: Qualifiers) {
        let words = [
            (qualifiers.constant, " const"),
            (qualifiers.volatile, " volatile"),
            (qualifiers.restrict, " restrict"),
        ];
        for (_, word) in words.iter().filter(|(is_set, _)| *is_set) {
            self.put(word);
        }
        self.put(qualifiers.reference.unwrap_or_default());
    }

    /// Writes types of a function, whose template parameters stand for the arguments of the function's template.
    fn in_scope<T>(
        &mut self,
        function: Id,
        write: impl FnOnce(&mut Self) -> Result<T, fmt::Error>,
    ) -> Result<T, fmt::Error> {
        let mut last = function;
        while let Node::Qualified(_, name)
        | Node::Function {
            name: Some(name), ..
        } = *self.node(last)
        {
            last = name;
        }
        let &Node::Template(_, arguments) = self.node(last) else {
            return write(self);
        };
        self.scopes.push(arguments);
        let written = write(self);
        self.scopes.pop();
        written
    }

    /// Writes what a function returns, and its name.
    fn function(&mut self, id: Id, name: Option<Id>) -> fmt::Result {
        let Node::Function { returns, .. } = *self.node(id) else {
            return Err(fmt::Error);
        };
        if let Some(returns) = returns {
            let is_around = self.in_scope(id, |writer| {
                writer.left(returns)?;
                writer.declares_around(returns)
            })?;
            self.put(if is_around { "" } else { " " });
        }
        match name {
            Some(name) => self.whole(name),
            None => Ok(()),
        }
    }

    /// Writes what is on one side only of the name that a type is declared with, or is no type.
    fn plain(&mut self, id: Id) -> fmt::Result {
        match *self.node(id) {
            Node::Text(ref text) => self.put(text),
            Node::Builtin(text, _) => self.put(text),
            Node::Format(pattern, ref text, ref nodes) => self.format(pattern, text, nodes)?,
            Node::Qualified(scope, name) => {
                self.whole(scope)?;
                self.put("::");
                self.whole(name)?;
            }
            Node::Template(name, arguments) => {
                let outer = self.arguments.replace(arguments);
                self.whole(name)?;
                self.arguments = outer;
                self.put(if self.text.ends_with('<') { " <" } else { "<" });
                self.list(arguments)?;
                // c++filt has no space after a pack without elements.
                let is_apart = self.text.ends_with('>') && self.end_of_cut != self.text.len();
                self.put(if is_apart { " >" } else { ">" });
            }
            Node::Structor(tilde, name) => {
                self.put(tilde);
                self.whole(name)?;
            }
            Node::Conversion(to) => {
                self.put("operator ");
                let depth = self.scopes.len();
                self.scopes.extend(self.arguments);
                self.whole(to)?;
                self.scopes.truncate(depth);
            }
            Node::Lambda(declared, parameters, number) => {
                self.lambda(declared, parameters, number)?
            }
            Node::Declaration(of, is_pack, _) => {
                match of {
                    Some(of) => self.whole(of)?,
                    None => self.put("typename"),
                }
                self.put(if is_pack { "... " } else { " " });
                self.declared_name(id);
            }
            Node::List(_) => self.list(id)?,
            Node::PackLength(pattern) => {
                let length = self.pack_length(pattern)?.unwrap_or_default();
                self.put(&length.to_string());
            }
            // Types with two sides have been written.
            _ => return Err(fmt::Error),
        }
        Ok(())
    }

    fn format(&mut self, pattern: &str, text: &str, nodes: &[Id]) -> fmt::Result {
        let outer = self.pack;
        if pattern.contains("...") {
            // A fold expression has all elements of a pack.
            self.pack = None;
        }
        let mut rest = pattern;
        while let Some(at) = rest.find(['%', '#', '$']) {
            self.put(&rest[..at]);
            let kind = rest.as_bytes()[at];
            rest = &rest[at + 1..];
            if kind == b'%' {
                self.put(text);
                continue;
            }
            let number = rest.chars().next().and_then(|digit| digit.to_digit(10));
            let node = number.and_then(|number| nodes.get(number as usize));
            let &node = node.ok_or(fmt::Error)?;
            rest = &rest[1..];
            match kind {
                b'$' => self.operand(node)?,
                _ => self.whole(node)?,
            }
        }
        self.put(rest);
        self.pack = outer;
        Ok(())
    }

    /// Writes an operand, in parentheses unless it is a name or in braces.
    fn operand(&mut self, id: Id) -> fmt::Result {
        match self.node(id) {
            Node::Text(_) | Node::Qualified(..) => return self.whole(id),
            Node::Format(pattern, ..) if pattern.ends_with('}') => return self.whole(id),
            _ => {}
        }
        self.put("(");
        self.whole(id)?;
        self.put(")");
        Ok(())
    }

    fn lambda(&mut self, declared: Id, parameters: Id, number: u64) -> fmt::Result {
        self.put("{lambda");
        let outer = self.lambda.replace(declared);
        if matches!(self.node(declared), Node::List(list) if !list.is_empty()) {
            self.put("<");
            self.list(declared)?;
            self.put(">");
        }
        self.put("(");
        self.list(parameters)?;
        self.lambda = outer;
        self.put(&format!(")#{}}}", number.saturating_add(1)));
        Ok(())
    }

    /// Writes the name of a template parameter that a lambda expression declares.
    fn declared_name(&mut self, id: Id) {
        if let Node::Declaration(of, _, number) = *self.node(id) {
            let kind = if of.is_some() { "$N" } else { "$T" };
            self.put(&format!("{kind}{number}"));
        }
    }
}

/// What needs parentheses around the name that it declares.
enum Declares {
    Function,
    Array,
}
