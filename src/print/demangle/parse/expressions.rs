//! Expressions in types and template arguments, and the names of operators.

use super::Parser;
use crate::print::demangle::tree::{Id, Literal, Node};

/// Operands of an operator, one letter for each, and the pattern by which the expression is written: an expression, a
/// type, a member's name, or a list of expressions.
type Form = (&'static str, &'static str);

const NOTHING: Form = ("", "%");
const UNARY: Form = ("e", "%$0");
/// `++` and `--`, before their operand with an underscore, after it without.
const STEP: Form = ("e", "$0%");
const BINARY: Form = ("ee", "$0%$1");
/// Greater than, which would end template arguments without parentheses.
const GREATER: Form = ("ee", "($0%$1)");
const INDEX: Form = ("ee", "$0[#1]");
const MEMBER: Form = ("em", "$0%$1");
const CONDITIONAL: Form = ("eee", "$0?$1 : $2");
const CALL: Form = ("el", "$0(#1)");
const CAST: Form = ("te", "%<#0>(#1)");
const OF_TYPE: Form = ("t", "%(#0)");
const GLOBAL: Form = ("e", "::#0");
/// Has operands of its own.
const NEW: Form = ("", "");

/// Operators: their codes, how they are written, and what follows them in an expression.
const OPERATORS: &[(&str, &str, Form)] = &[
    ("aN", "&=", BINARY),
    ("aS", "=", BINARY),
    ("aa", "&&", BINARY),
    ("ad", "&", UNARY),
    ("an", "&", BINARY),
    ("at", "alignof ", OF_TYPE),
    ("aw", "co_await ", UNARY),
    ("az", "alignof ", UNARY),
    ("cc", "const_cast", CAST),
    ("cl", "()", CALL),
    ("cm", ",", BINARY),
    ("co", "~", UNARY),
    ("dV", "/=", BINARY),
    ("da", "delete[] ", UNARY),
    ("dc", "dynamic_cast", CAST),
    ("de", "*", UNARY),
    ("dl", "delete ", UNARY),
    ("ds", ".*", BINARY),
    ("dt", ".", MEMBER),
    ("dv", "/", BINARY),
    ("eO", "^=", BINARY),
    ("eo", "^", BINARY),
    ("eq", "==", BINARY),
    ("ge", ">=", BINARY),
    ("gs", "::", GLOBAL),
    ("gt", ">", GREATER),
    ("ix", "[]", INDEX),
    ("lS", "<<=", BINARY),
    ("le", "<=", BINARY),
    ("ls", "<<", BINARY),
    ("lt", "<", BINARY),
    ("mI", "-=", BINARY),
    ("mL", "*=", BINARY),
    ("mi", "-", BINARY),
    ("ml", "*", BINARY),
    ("mm", "--", STEP),
    ("na", "new[]", NEW),
    ("ne", "!=", BINARY),
    ("ng", "-", UNARY),
    ("nt", "!", UNARY),
    ("nw", "new", NEW),
    ("nx", "noexcept", UNARY),
    ("oR", "|=", BINARY),
    ("oo", "||", BINARY),
    ("or", "|", BINARY),
    ("pL", "+=", BINARY),
    ("pl", "+", BINARY),
    ("pm", "->*", BINARY),
    ("pp", "++", STEP),
    ("ps", "+", UNARY),
    ("pt", "->", MEMBER),
    ("qu", "?", CONDITIONAL),
    ("rM", "%=", BINARY),
    ("rS", ">>=", BINARY),
    ("rc", "reinterpret_cast", CAST),
    ("rm", "%", BINARY),
    ("rs", ">>", BINARY),
    ("sc", "static_cast", CAST),
    ("ss", "<=>", BINARY),
    ("st", "sizeof ", OF_TYPE),
    ("sz", "sizeof ", UNARY),
    ("te", "typeid ", UNARY),
    ("ti", "typeid ", OF_TYPE),
    ("tr", "throw", NOTHING),
    ("tw", "throw ", UNARY),
];

impl<'a> Parser<'a> {
    pub(super) fn expression(&mut self) -> Option<Id> {
        self.nested(Self::expression_of_this)
    }

    fn expression_of_this(&mut self) -> Option<Id> {
        match self.text.as_bytes()[self.at..] {
            [b'L', ..] => self.literal(),
            [b'T', ..] => self.parameter(),
            [b's', b'r', ..] => self.scoped(),
            [b's', b'p', ..] => {
                self.at += 2;
                let pattern = self.expression()?;
                Some(self.add(Node::Expansion(pattern)))
            }
            [b's', b'Z', ..] => {
                self.at += 2;
                let pack = self.expression()?;
                Some(self.add(Node::PackLength(pack)))
            }
            [b'f', b'p', ..] | [b'f', b'L', b'0'..=b'9', ..] => self.function_argument(),
            [b'f', b'l' | b'r' | b'L' | b'R', ..] => self.fold(),
            [b'0'..=b'9', ..] | [b'o', b'n', ..] => self.unresolved_name(),
            [b'i', b'l', ..] => {
                self.at += 2;
                let values = self.list_to(b'E')?;
                Some(self.format("{#0}", "", vec![values]))
            }
            [b't', b'l', ..] => {
                self.at += 2;
                let of = self.type_()?;
                let values = self.list_to(b'E')?;
                Some(self.format("#0{#1}", "", vec![of, values]))
            }
            [b'c', b'v', ..] => {
                self.at += 2;
                let to = self.type_()?;
                let values = match self.eat("_") {
                    true => self.list_to(b'E')?,
                    false => self.expression()?,
                };
                Some(self.format("(#0)$1", "", vec![to, values]))
            }
            [b'n', b'w' | b'a', ..] => self.new_object(),
            _ => self.operation(),
        }
    }

    /// Reads an operator and its operands.
    fn operation(&mut self) -> Option<Id> {
        let (code, text, (operands, mut pattern)) = self.operator()?;
        if matches!(code, "pp" | "mm") && self.eat("_") {
            pattern = UNARY.1;
        }
        let mut nodes = Vec::new();
        for kind in operands.bytes() {
            nodes.push(match kind {
                b't' => self.type_()?,
                b'l' => self.list_to(b'E')?,
                b'm' if !matches!(
                    self.text.as_bytes()[self.at..],
                    [b's', b'r', ..] | [b'T', ..]
                ) =>
                {
                    self.unresolved_name()?
                }
                _ => self.expression()?,
            });
        }
        // A function is called, and the address of a member is taken, by the name without types.
        if let Some(first) = nodes.first_mut()
            && let Node::Function {
                name: Some(name), ..
            } = self.nodes[*first as usize]
            && (code == "cl"
                || code == "ad" && matches!(self.nodes[name as usize], Node::Qualified(..)))
        {
            *first = name;
        }
        Some(self.format(pattern, text, nodes))
    }

    /// Reads the code of an operator.
    pub(super) fn operator(&mut self) -> Option<(&'static str, &'static str, Form)> {
        let code = self.text.get(self.at..self.at + 2)?;
        let operator = OPERATORS.iter().find(|(known, ..)| *known == code)?;
        self.at += 2;
        Some(*operator)
    }

    fn new_object(&mut self) -> Option<Id> {
        self.at += "nw".len();
        let placement = self.list_to(b'_')?;
        let mut nodes = vec![self.type_()?, placement];
        let is_placed =
            matches!(&self.nodes[placement as usize], Node::List(list) if !list.is_empty());
        if !self.eat("pi") {
            self.expect("E")?;
            return Some(self.format(if is_placed { "new (#1) #0" } else { "new #0" }, "", nodes));
        }
        nodes.push(self.list_to(b'E')?);
        Some(self.format(
            if is_placed {
                "new (#1) #0(#2)"
            } else {
                "new #0(#2)"
            },
            "",
            nodes,
        ))
    }

    /// Reads expressions up to an end.
    fn list_to(&mut self, end: u8) -> Option<Id> {
        let mut expressions = Vec::new();
        while self.peek()? != end {
            expressions.push(self.expression()?);
        }
        self.at += 1;
        Some(self.list(expressions))
    }

    /// Reads a name that depends on template parameters.
    fn unresolved_name(&mut self) -> Option<Id> {
        self.eat("on");
        if self.eat("dn") {
            return match self.peek()? {
                b'0'..=b'9' => self.unqualified_name(None),
                _ => self.type_(),
            };
        }
        let name = self.unqualified_name(None)?;
        let arguments = self.optional_arguments()?;
        Some(self.with_arguments(name, arguments))
    }

    /// Reads a member of a type that depends on template parameters.
    fn scoped(&mut self) -> Option<Id> {
        self.expect("sr")?;
        let start = self.at;
        if matches!(self.peek(), Some(b'0'..=b'9')) {
            let known = self.substitutions.len();
            if let Some(name) = self.names_to_end() {
                return Some(name);
            }
            self.at = start;
            self.substitutions.truncate(known);
        }
        let class = self.type_()?;
        self.member_of(class)
    }

    /// Reads what Clang has after `sr`: names up to an end, none of which can be referred back to, and a name.
    fn names_to_end(&mut self) -> Option<Id> {
        let mut class = None;
        while !self.eat("E") {
            // GCC, which has a type, needs no end after a template.
            if matches!(
                class.map(|class: Id| &self.nodes[class as usize]),
                Some(Node::Template(..))
            ) {
                return None;
            }
            let mut name = self.source_name()?;
            if let Some(class) = class {
                name = self.add(Node::Qualified(class, name));
            }
            let arguments = self.optional_arguments()?;
            class = Some(self.with_arguments(name, arguments));
        }
        self.member_of(class?)
    }

    /// Reads the last of the names after `sr`.
    fn member_of(&mut self, class: Id) -> Option<Id> {
        let name = self.unresolved_name()?;
        // The arguments belong to the whole.
        Some(match self.nodes[name as usize] {
            Node::Template(last, arguments) => {
                let whole = self.add(Node::Qualified(class, last));
                self.add(Node::Template(whole, arguments))
            }
            _ => self.add(Node::Qualified(class, name)),
        })
    }

    /// Reads a parameter of the function in an expression.
    fn function_argument(&mut self) -> Option<Id> {
        if self.eat("fL") {
            self.number()?;
            self.expect("p")?;
        } else {
            self.expect("fp")?;
        }
        if self.eat("T") {
            return Some(self.text("this"));
        }
        self.qualifiers();
        let number = self.successor()?.saturating_add(1);
        Some(self.text(format!("{{parm#{number}}}")))
    }

    /// Reads a fold expression.
    fn fold(&mut self) -> Option<Id> {
        self.expect("f")?;
        let kind = self.next()?;
        let (_, text, _) = self.operator()?;
        let mut nodes = vec![self.expression()?];
        let pattern = match kind {
            b'l' => "(...%$0)",
            b'r' => "($0%...)",
            _ => {
                nodes.push(self.expression()?);
                "($0%...%$1)"
            }
        };
        Some(self.format(pattern, text, nodes))
    }

    /// Reads a literal, or the name of a function or variable as a value.
    pub(super) fn literal(&mut self) -> Option<Id> {
        self.expect("L")?;
        if self.eat("_Z") || self.eat("Z") {
            let of = self.encoding(true)?;
            self.expect("E")?;
            return Some(of);
        }
        let of = self.type_()?;
        let (name, how) = match self.nodes[of as usize] {
            Node::Builtin(name, how) => (name, how),
            _ => ("", Literal::Plain),
        };
        if name == "decltype(nullptr)" && self.eat("E") {
            return Some(of);
        }
        let minus = if self.eat("n") { "-" } else { "" };
        let rest = &self.text[self.at..];
        let value = &rest[..rest.find('E')?];
        self.at += value.len() + 1;
        Some(match (how, value) {
            (Literal::Suffix(suffix), _) => {
                self.format("%", format!("{minus}{value}{suffix}"), Vec::new())
            }
            (Literal::Boolean, "0") => self.format("%", "false", Vec::new()),
            (Literal::Boolean, "1") => self.format("%", "true", Vec::new()),
            (Literal::Float, _) => self.format("(#0)%", format!("{minus}[{value}]"), vec![of]),
            _ => self.format("(#0)%", format!("{minus}{value}"), vec![of]),
        })
    }
}
