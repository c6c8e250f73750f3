//! Parts of a C++ name, as a tree whose nodes refer to each other by number.
//!
//! Parsing adds at most a few nodes for each byte of the mangled name, and shares those that the name refers back to.

use std::borrow::Cow;

/// Number of a node in its tree.
pub(super) type Id = u32;

/// cv-qualifiers of a type or of a member function, and the function's ref-qualifier.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub(super) struct Qualifiers {
    pub(super) restrict: bool,
    pub(super) volatile: bool,
    pub(super) constant: bool,
    /// ` &` or ` &&`, after a member function.
    pub(super) reference: Option<&'static str>,
}

/// Part of a C++ name.
#[derive(Clone, Debug)]
pub(super) enum Node<'a> {
    /// Name, or another text that needs no parentheses as an operand.
    Text(Cow<'a, str>),
    /// Builtin type, and how its literals are written.
    Builtin(&'static str, Literal),
    /// Pattern with a text and other nodes: `%` stands for the text, `#1` for the second node, `$1` for that node in
    /// parentheses unless it is a name.
    Format(&'static str, Cow<'a, str>, Box<[Id]>),
    /// Name after another: `a::b`.
    Qualified(Id, Id),
    /// Name with template arguments, which are a [`Node::List`].
    Template(Id, Id),
    /// Constructor of the class with this name, or, after `~`, the destructor.
    Structor(&'static str, Id),
    /// Operator that converts to a type.
    Conversion(Id),
    /// Class of a lambda expression: the template parameters that it declares, its parameters and its number.
    Lambda(Id, Id, u64),
    /// Template parameter that a lambda expression declares: the type of a value, whether it is a pack, and its number.
    Declaration(Option<Id>, bool, u64),
    /// Function: return type, name, parameters and qualifiers. Without a name, the type of a function.
    Function {
        returns: Option<Id>,
        name: Option<Id>,
        parameters: Id,
        qualifiers: Qualifiers,
        noexcept: bool,
    },
    Pointer(Id),
    /// `&` or `&&` to a type.
    Reference(Id, &'static str),
    /// Pointer to a member of a class: the class and the member's type.
    Member(Id, Id),
    Qualify(Id, Qualifiers),
    /// Array: its length, and its elements.
    Array(Option<Id>, Id),
    /// Types, expressions or template arguments in a row.
    List(Box<[Id]>),
    /// Template parameter by its number.
    Parameter(u64),
    /// Pattern that is written once for each element of the pack in it.
    Expansion(Id),
    /// Number of elements of the pack in a pattern.
    PackLength(Id),
}

/// How literals of a type are written.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Literal {
    /// As a number with this suffix.
    Suffix(&'static str),
    Boolean,
    /// In brackets, after the type.
    Float,
    /// After the type.
    Plain,
}

impl Node<'_> {
    /// Returns the nodes in which a pack of a pattern can be.
    pub(super) fn children(&self) -> Vec<Id> {
        match *self {
            Node::Qualified(first, second)
            | Node::Template(first, second)
            | Node::Member(first, second) => {
                vec![first, second]
            }
            Node::Conversion(of)
            | Node::Pointer(of)
            | Node::Reference(of, _)
            | Node::Qualify(of, _) => vec![of],
            Node::Array(length, of) => length.into_iter().chain([of]).collect(),
            Node::Function {
                returns,
                name,
                parameters,
                ..
            } => name
                .into_iter()
                .chain(returns)
                .chain([parameters])
                .collect(),
            Node::List(ref nodes) | Node::Format(_, _, ref nodes) => nodes.to_vec(),
            _ => Vec::new(),
        }
    }
}
