//! Parser and encoder for BTF, the format in which the kernel describes its own types (`linux/btf.h`): a header, the
//! types, and their names. Header and types are 32-bit words in the machine's byte order, except the first word of
//! the header.

use std::iter;

use libbpf_rs::btf::BtfKind;
use memchr::memchr;

/// Magic number at the start of BTF.
const MAGIC: u16 = 0xeb9f;
const VERSION: u8 = 1;
const HEADER_BYTES: u32 = 24;

/// Id of the type void.
pub(crate) const VOID: u32 = 0;

pub(crate) const WORD_BYTES: usize = 4;

/// Size of the fixed part of each type, in bytes: its name, its kind with the number of its members, and its size or
/// the type that it is made of.
const TYPE_BYTES: usize = 3 * WORD_BYTES;

/// Distance between types whose offsets the index keeps. Types between them are found by walking on from there.
const STRIDE: usize = 16;

/// Meaning of a word in the encoding of a type.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Word {
    Number,
    /// The offset of a name.
    Name,
    /// The id of a type; 0 for void.
    Type,
}

/// Returns the meanings of a type's words by its kind: of the third word, and of the words that follow. If the kind
/// has members, the latter repeat for each member.
pub(crate) fn words(kind: BtfKind) -> (Word, &'static [Word]) {
    use BtfKind as Kind;
    use Word::{Name, Number, Type};
    match kind {
        Kind::Void | Kind::Float | Kind::Fwd => (Number, &[]),
        Kind::Int => (Number, &[Number]),
        Kind::Array => (Number, &[Type, Type, Number]),
        Kind::Struct | Kind::Union => (Number, &[Name, Type, Number]),
        Kind::Enum => (Number, &[Name, Number]),
        Kind::Enum64 => (Number, &[Name, Number, Number]),
        Kind::DataSec => (Number, &[Type, Number, Number]),
        Kind::FuncProto => (Type, &[Name, Type]),
        Kind::Var | Kind::DeclTag => (Type, &[Number]),
        Kind::Ptr
        | Kind::Typedef
        | Kind::Volatile
        | Kind::Const
        | Kind::Restrict
        | Kind::Func
        | Kind::TypeTag => (Type, &[]),
    }
}

fn has_members(kind: BtfKind) -> bool {
    use BtfKind::{DataSec, Enum, Enum64, FuncProto, Struct, Union};
    matches!(kind, Struct | Union | Enum | Enum64 | DataSec | FuncProto)
}

pub(crate) fn word(bytes: &[u8], at: usize) -> Option<u32> {
    let word = bytes.get(at..)?.first_chunk()?;
    Some(u32::from_ne_bytes(*word))
}

/// Parsed BTF. Ids of types begin with 1.
pub(crate) struct Types<'btf> {
    types: &'btf [u8],
    names: &'btf [u8],
    /// Offsets of every sixteenth type, from the first on. Offsets of all types would take half a megabyte.
    offsets: Vec<u32>,
}

pub(crate) struct Type<'btf> {
    /// The offset of the type's name among the names.
    pub(crate) name: u32,
    pub(crate) kind: BtfKind,
    /// The type's kind and the number of its members.
    pub(crate) info: u32,
    pub(crate) size_or_type: u32,
    /// The words after the fixed part.
    pub(crate) rest: &'btf [u8],
}

impl Type<'_> {
    fn bytes(&self) -> usize {
        TYPE_BYTES + self.rest.len()
    }

    /// Returns the id of the type that this type is made of.
    fn base(&self) -> Option<u32> {
        let (third, _) = words(self.kind);
        matches!(third, Word::Type).then_some(self.size_or_type)
    }
}

impl<'btf> Types<'btf> {
    /// Parses BTF. Returns None if the bytes have a format that is not known here.
    pub(crate) fn parse(btf: &'btf [u8]) -> Option<Self> {
        if !btf.starts_with(&MAGIC.to_ne_bytes()) {
            return None;
        }
        let header_bytes = word(btf, 4)?;
        let section = |header_at| {
            let start = header_bytes.checked_add(word(btf, header_at)?)? as usize;
            btf.get(start..)?.get(..word(btf, header_at + 4)? as usize)
        };
        let mut all = Self {
            types: section(8)?,
            names: section(16)?,
            offsets: Vec::new(),
        };
        let (mut at, mut count) = (0, 0);
        while at < all.types.len() {
            if count % STRIDE == 0 {
                all.offsets.push(u32::try_from(at).ok()?);
            }
            at += all.at(at)?.bytes();
            count += 1;
        }
        Some(all)
    }

    fn at(&self, at: usize) -> Option<Type<'btf>> {
        let info = word(self.types, at + 4)?;
        // The number of members has 16 bits, and the kind has five. The unused bits beside them are zero as long as
        // they have no meaning.
        let kind = BtfKind::try_from(info >> 24 & 0x7f).ok()?;
        let members = if has_members(kind) {
            info & 0xff_ffff
        } else {
            1
        };
        let (_, each) = words(kind);
        let rest = self.types.get(at + TYPE_BYTES..)?;
        Some(Type {
            name: word(self.types, at)?,
            kind,
            info,
            size_or_type: word(self.types, at + 8)?,
            rest: rest.get(..members as usize * each.len() * WORD_BYTES)?,
        })
    }

    /// Iterates over all types, with their ids.
    pub(crate) fn all(&self) -> impl Iterator<Item = (u32, Type<'btf>)> {
        (1..).zip(self.from(0))
    }

    /// Iterates over the types from the offset `at` on.
    fn from(&self, mut at: usize) -> impl Iterator<Item = Type<'btf>> {
        iter::from_fn(move || {
            let of = self.at(at)?;
            at += of.bytes();
            Some(of)
        })
    }

    pub(crate) fn get(&self, id: u32) -> Option<Type<'btf>> {
        let index = id.checked_sub(1)? as usize;
        let before = *self.offsets.get(index / STRIDE)?;
        self.from(before as usize).nth(index % STRIDE)
    }

    pub(crate) fn name(&self, at: u32) -> Option<&'btf [u8]> {
        let name = self.names.get(at as usize..)?;
        name.get(..memchr(0, name)?)
    }

    /// The first type of a kind that has this name.
    pub(crate) fn find(&self, kind: BtfKind, name: &str) -> Option<Type<'btf>> {
        let mut types = self.from(0);
        types.find(|of| of.kind == kind && self.name(of.name) == Some(name.as_bytes()))
    }

    /// Returns the type that a type is made of: a pointer's target, or a function's prototype.
    pub(crate) fn base(&self, of: &Type<'btf>) -> Option<Type<'btf>> {
        self.get(of.base()?)
    }

    /// Returns the type names of a prototype's arguments; None if the type is no prototype.
    pub(crate) fn arguments(&self, prototype: &Type<'btf>) -> Option<Vec<String>> {
        if prototype.kind != BtfKind::FuncProto {
            return None;
        }
        let types = prototype.rest.chunks_exact(2 * WORD_BYTES);
        types
            .map(|argument| self.unqualified_name(word(argument, WORD_BYTES)?))
            .collect()
    }

    /// Returns the name of a type. From a type without a name, such as a pointer, it walks on to the first named type
    /// that the type is made of. Returns an empty string for void.
    pub(crate) fn unqualified_name(&self, mut id: u32) -> Option<String> {
        while id != VOID {
            let of = self.get(id)?;
            if of.name != 0 {
                return Some(String::from_utf8_lossy(self.name(of.name)?).into_owned());
            }
            id = of.base()?;
        }
        Some(String::new())
    }
}

/// Encodes BTF from its types and their names.
pub(crate) fn from_parts(types: &[u8], names: &[u8]) -> Vec<u8> {
    let mut bytes = MAGIC.to_ne_bytes().to_vec();
    bytes.extend([VERSION, 0]);
    let types_bytes = types.len() as u32;
    for word in [
        HEADER_BYTES,
        0,
        types_bytes,
        types_bytes,
        names.len() as u32,
    ] {
        bytes.extend(word.to_ne_bytes());
    }
    bytes.extend(types);
    bytes.extend(names);
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_are_named_through_pointers_and_qualifiers() {
        let names = b"\0folio\0gfp_t\0";
        let types = [
            [1, 7 << 24, 0],      // 1: struct folio;
            [0, 10 << 24, 1],     // 2: const of it
            [0, 2 << 24, 2],      // 3: pointer to that
            [7, 8 << 24, 0],      // 4: gfp_t
            [0, 2 << 24, VOID],   // 5: void *
            [0, 13 << 24 | 3, 4], // 6: gfp_t (void *, const struct folio *, gfp_t)
            [0, 5, 0],            // a name and a type each
            [3, 0, 4],
            [1, 12 << 24, 6], // 7: function folio
        ];
        let types: Vec<u8> = types
            .iter()
            .flatten()
            .flat_map(|word: &u32| word.to_ne_bytes())
            .collect();
        let btf = from_parts(&types, names);
        let types = Types::parse(&btf).expect("BTF");
        let function = types.find(BtfKind::Func, "folio").expect("a function");
        let prototype = types.base(&function).expect("its prototype");
        let arguments = types.arguments(&prototype).expect("arguments");
        assert_eq!(arguments, ["", "folio", "gfp_t"]);
        let result = types.unqualified_name(prototype.size_or_type);
        assert_eq!(result.as_deref(), Some("gfp_t"));
        assert!(types.arguments(&function).is_none());
    }
}
