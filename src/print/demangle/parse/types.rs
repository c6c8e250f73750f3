//! Types.

use super::Parser;
use crate::print::demangle::tree::{Id, Literal, Node, Qualifiers};

/// Builtin types by their codes.
const BUILTIN: &[(&str, &str, Literal)] = &[
    ("a", "signed char", Literal::Plain),
    ("b", "bool", Literal::Boolean),
    ("c", "char", Literal::Plain),
    ("d", "double", Literal::Float),
    ("e", "long double", Literal::Float),
    ("f", "float", Literal::Float),
    ("g", "__float128", Literal::Float),
    ("h", "unsigned char", Literal::Plain),
    ("i", "int", Literal::Suffix("")),
    ("j", "unsigned int", Literal::Suffix("u")),
    ("l", "long", Literal::Suffix("l")),
    ("m", "unsigned long", Literal::Suffix("ul")),
    ("n", "__int128", Literal::Plain),
    ("o", "unsigned __int128", Literal::Plain),
    ("s", "short", Literal::Plain),
    ("t", "unsigned short", Literal::Plain),
    ("v", "void", Literal::Plain),
    ("w", "wchar_t", Literal::Plain),
    ("x", "long long", Literal::Suffix("ll")),
    ("y", "unsigned long long", Literal::Suffix("ull")),
    ("z", "...", Literal::Plain),
    ("DF16b", "std::bfloat16_t", Literal::Float),
    ("DF16_", "_Float16", Literal::Float),
    ("DF32_", "_Float32", Literal::Float),
    ("DF64_", "_Float64", Literal::Float),
    ("DF128_", "_Float128", Literal::Float),
    ("DF32x", "_Float32x", Literal::Float),
    ("DF64x", "_Float64x", Literal::Float),
    ("Da", "auto", Literal::Plain),
    ("Dc", "decltype(auto)", Literal::Plain),
    ("Dd", "decimal64", Literal::Plain),
    ("De", "decimal128", Literal::Plain),
    ("Df", "decimal32", Literal::Plain),
    ("Dh", "half", Literal::Float),
    ("Di", "char32_t", Literal::Plain),
    ("Dn", "decltype(nullptr)", Literal::Plain),
    ("Ds", "char16_t", Literal::Plain),
    ("Du", "char8_t", Literal::Plain),
];

impl<'a> Parser<'a> {
    /// Reads a type.
    pub(super) fn type_(&mut self) -> Option<Id> {
        self.nested(Self::type_of_this)
    }

    fn type_of_this(&mut self) -> Option<Id> {
        let builtin = |(code, ..): &&(&str, _, _)| self.text[self.at..].starts_with(code);
        if let Some((code, text, literal)) = BUILTIN.iter().find(builtin) {
            self.at += code.len();
            return Some(self.add(Node::Builtin(text, *literal)));
        }
        let start = self.at;
        let node = match self.next()? {
            b'r' | b'V' | b'K' => {
                self.at = start;
                return self.qualified_type();
            }
            b'P' => Node::Pointer(self.type_()?),
            b'R' => Node::Reference(self.type_()?, "&"),
            b'O' => Node::Reference(self.type_()?, "&&"),
            b'C' => self.after_type("#0 _Complex", None)?,
            b'G' => self.after_type("#0 _Imaginary", None)?,
            b'A' => self.array()?,
            b'M' => {
                let class = self.type_()?;
                Node::Member(class, self.type_()?)
            }
            b'u' => {
                let name = self.source_name()?;
                let arguments = self.optional_arguments()?;
                self.substitutions.push(name);
                return Some(self.with_arguments(name, arguments));
            }
            b'U' if matches!(self.peek(), Some(b'0'..=b'9')) => self.vendor_qualified()?,
            b'F' => {
                self.at = start;
                self.function_type(Qualifiers::default())?
            }
            b'D' => match self.peek()? {
                b'p' => {
                    self.at += 1;
                    Node::Expansion(self.type_()?)
                }
                b'v' => self.vector()?,
                b't' | b'T' => {
                    self.at = start;
                    let decltype = self.decltype()?;
                    self.substitutions.push(decltype);
                    return Some(decltype);
                }
                _ => {
                    self.at = start;
                    self.function_type(Qualifiers::default())?
                }
            },
            b'T' if !matches!(self.peek(), Some(b's' | b'u' | b'e')) => {
                self.at = start;
                return self.parameter_type();
            }
            b'T' => {
                // struct, union or enum
                self.at += 1;
                return self.class_type();
            }
            b'S' if self.peek() != Some(b't') => {
                self.at = start;
                return self.substituted_type();
            }
            _ => {
                self.at = start;
                return self.class_type();
            }
        };
        Some(self.substitute(node))
    }

    fn class_type(&mut self) -> Option<Id> {
        let (name, _) = self.name()?;
        self.substitutions.push(name);
        Some(name)
    }

    fn qualified_type(&mut self) -> Option<Id> {
        let qualifiers = self.qualifiers();
        // Qualifiers of a function's type belong to the function.
        let is_function = matches!(
            self.text.as_bytes()[self.at..],
            [b'F', ..] | [b'D', b'o' | b'O' | b'w' | b'x', ..]
        );
        let node = match is_function {
            true => self.function_type(qualifiers)?,
            false => Node::Qualify(self.type_()?, qualifiers),
        };
        Some(self.substitute(node))
    }

    fn function_type(&mut self, mut qualifiers: Qualifiers) -> Option<Node<'a>> {
        let noexcept = self.eat("Do");
        self.eat("Dx");
        self.expect("F")?;
        self.eat("Y");
        let returns = self.type_()?;
        let parameters = self.parameters()?;
        qualifiers.reference = self.reference_qualifier();
        self.expect("E")?;
        Some(Node::Function {
            returns: Some(returns),
            name: None,
            parameters,
            qualifiers,
            noexcept,
        })
    }

    /// Reads the length of an array and its elements.
    fn array(&mut self) -> Option<Node<'a>> {
        let length = match self.peek()? {
            b'_' => None,
            b'0'..=b'9' => Some(self.digits_node()?),
            _ => Some(self.expression()?),
        };
        self.expect("_")?;
        Some(Node::Array(length, self.type_()?))
    }

    fn vector(&mut self) -> Option<Node<'a>> {
        self.expect("v")?;
        let length = match self.eat("_") {
            true => self.expression()?,
            false => self.digits_node()?,
        };
        self.expect("_")?;
        self.after_type("#0 __vector(#1)", Some(length))
    }

    fn digits_node(&mut self) -> Option<Id> {
        let digits = self.digits()?;
        Some(self.text(digits))
    }

    fn vendor_qualified(&mut self) -> Option<Node<'a>> {
        let name = self.source_name()?;
        let arguments = self.optional_arguments()?;
        let word = self.with_arguments(name, arguments);
        self.after_type("#0 #1", Some(word))
    }

    /// Reads a type that is written before another node.
    fn after_type(&mut self, pattern: &'static str, after: Option<Id>) -> Option<Node<'a>> {
        let nodes = [self.type_()?].into_iter().chain(after).collect();
        Some(Node::Format(pattern, "".into(), nodes))
    }

    /// Reads template arguments, if any are next.
    pub(super) fn optional_arguments(&mut self) -> Option<Option<Id>> {
        Some(match self.peek() {
            Some(b'I') => Some(self.template_arguments()?),
            _ => None,
        })
    }

    pub(super) fn with_arguments(&mut self, name: Id, arguments: Option<Id>) -> Id {
        match arguments {
            Some(arguments) => self.add(Node::Template(name, arguments)),
            None => name,
        }
    }

    pub(super) fn decltype(&mut self) -> Option<Id> {
        self.at += "Dt".len();
        let expression = self.expression()?;
        self.expect("E")?;
        Some(self.format("decltype (#0)", "", vec![expression]))
    }

    /// Reads a template parameter, with arguments if it is a template.
    fn parameter_type(&mut self) -> Option<Id> {
        let parameter = self.parameter()?;
        self.substitutions.push(parameter);
        // The arguments after the type of a conversion belong to the conversion.
        match self.in_conversion {
            true => Some(parameter),
            false => self.applied(parameter),
        }
    }

    /// Reads a reference back to a type, or to a template with its arguments.
    fn substituted_type(&mut self) -> Option<Id> {
        let name = self.substitution()?;
        self.applied(name)
    }

    /// Reads the arguments of a template, if any are next.
    fn applied(&mut self, name: Id) -> Option<Id> {
        if self.peek() != Some(b'I') {
            return Some(name);
        }
        let arguments = self.template_arguments()?;
        Some(self.substitute(Node::Template(name, arguments)))
    }
}
