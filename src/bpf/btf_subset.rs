//! The part of the kernel's BTF that one BPF object needs: the types that tell where the fields are that its programs
//! read.
//!
//! libbpf looks up each type that a program uses among all types of the kernel, of which there are more than a
//! hundred thousand. That was a fifth of memleak's start. This module walks the kernel's types once, for all names
//! together, and passes libbpf only the types with these names and the types that they contain by value. Targets of
//! pointers are omitted, as a program names the type that it expects there. The same walk finds the functions that
//! fentry and fexit programs attach to.

use std::fs::File;
use std::io::Write;
use std::os::fd::{AsRawFd, IntoRawFd};

use anyhow::{Context, Result};
use libbpf_rs::btf::{Btf, BtfKind, BtfType};
use libbpf_rs::{AsRawLibbpf, ObjectBuilder, OpenObject};
use nix::sys::memfd::{MFdFlags, memfd_create};
use rustc_hash::{FxHashMap, FxHashSet};

use crate::bpf::btf::{self, Types, VOID, WORD_BYTES, Word, word, words};
use crate::bpf::fentry_id;
use crate::bpf::kernel_support;

/// File in memory that libbpf reads the kernel's types from. The file is set when an object is opened, and must have
/// the types when the object is loaded.
#[derive(Debug)]
pub struct KernelTypes(File);

impl KernelTypes {
    /// Creates an empty file, and sets it as the source of the kernel's types for an object that is yet to be opened.
    ///
    /// # Errors
    /// If the kernel does not create the file.
    pub fn for_object(builder: &mut ObjectBuilder) -> Result<Self> {
        fentry_id::register();
        let file = memfd_create(c"memtools-types", MFdFlags::MFD_CLOEXEC);
        let file = File::from(file.context("failed to create a file for the kernel's types")?);
        builder.btf_custom_path(format!("/proc/self/fd/{}", file.as_raw_fd()))?;
        Ok(Self(file))
    }

    /// Writes the types that [`types_for`] has found. The file stays open until the process exits, as the object can
    /// be loaded at any time.
    ///
    /// # Errors
    /// If there is no memory for the types.
    pub fn write(mut self, types: &[u8]) -> Result<()> {
        let written = self.0.write_all(types);
        written.context("failed to write down the kernel's types")?;
        let _stays_open = self.0.into_raw_fd();
        Ok(())
    }
}

/// Returns the kernel's types that an opened object names, as BTF. Returns the kernel's whole BTF if it has a format
/// that is not known here.
///
/// # Errors
/// If the kernel's BTF cannot be read.
pub fn types_for(object: &OpenObject) -> Result<Vec<u8>> {
    let functions: FxHashSet<&[u8]> = object
        .progs()
        .filter_map(|program| fentry_id::target(program.section().as_encoded_bytes()))
        .collect();
    // SAFETY: the pointer is valid as long as the object lives, and the object is borrowed.
    let object = unsafe { object.as_libbpf_object().as_ref() };
    let own = Btf::from_bpf_object(object)?.context("the BPF object has no types")?;
    let names = names(&own);
    kernel_support::with_btf(|kernel| {
        part(kernel, &names, &functions).unwrap_or_else(|| kernel.to_vec())
    })
}

/// Returns the names by which libbpf looks up an object's types in the kernel's BTF.
fn names(own: &Btf<'_>) -> FxHashSet<Vec<u8>> {
    let types = (1..own.len() as u32).filter_map(|id| own.type_by_id::<BtfType<'_>>(id.into()));
    types
        .filter(|of| looked_for(of.kind()))
        .filter_map(|of| Some(strip_flavor(of.name()?.as_encoded_bytes()).to_vec()))
        .collect()
}

/// Whether libbpf looks up types of this kind in the kernel's BTF.
fn looked_for(kind: BtfKind) -> bool {
    use BtfKind::{Enum, Enum64, Struct, Typedef, Union};
    matches!(kind, Struct | Union | Enum | Enum64 | Typedef)
}

/// Strips the flavor from the name of a type (CO-RE): `folio` for `folio___old`. Flavors distinguish several shapes of
/// one kernel type in a program.
fn strip_flavor(name: &[u8]) -> &[u8] {
    let flavor = name.windows(3).rposition(|part| part == b"___");
    &name[..flavor.unwrap_or(name.len())]
}

/// Returns the types with these names, and the types that they contain by value, as BTF of its own. Stores the BTF
/// ids of `functions` with `fentry_id::set_btf_id`. Returns None if the kernel's BTF has a format that is not known
/// here.
fn part(
    kernel: &[u8],
    names: &FxHashSet<Vec<u8>>,
    functions: &FxHashSet<&[u8]>,
) -> Option<Vec<u8>> {
    let kernel = Types::parse(kernel)?;
    let mut subset = Subset::new(&kernel);
    for (id, of) in kernel.all() {
        if looked_for(of.kind) && names.contains(kernel.name(of.name)?) {
            subset.number(id)?;
        } else if of.kind == BtfKind::Func && functions.contains(kernel.name(of.name)?) {
            fentry_id::set_btf_id(kernel.name(of.name)?, id);
        }
    }
    // Adding a type can give ids to further types, which are added in their turn.
    let mut added = 0;
    while let Some(&id) = subset.ids.get(added) {
        subset.add(id)?;
        added += 1;
    }
    Some(subset.into_bytes())
}

/// BTF under construction: types taken over from the kernel, with new ids. The first type is the pointer to void,
/// which replaces all pointers.
struct Subset<'kernel> {
    kernel: &'kernel Types<'kernel>,
    /// The kernel's ids of the types after the pointer, in the order of their new ids.
    ids: Vec<u32>,
    /// New ids of the types, by their ids in the kernel.
    numbers: FxHashMap<u32, u32>,
    /// Offsets in `names`, by the offsets of the same names in the kernel's BTF.
    offsets: FxHashMap<u32, u32>,
    types: Vec<u8>,
    names: Vec<u8>,
}

const POINTER: u32 = 1;

impl<'kernel> Subset<'kernel> {
    fn new(kernel: &'kernel Types<'kernel>) -> Self {
        let pointer = [0, (BtfKind::Ptr as u32) << 24, VOID];
        Self {
            kernel,
            ids: Vec::new(),
            numbers: FxHashMap::default(),
            // A type without a name has the offset 0.
            offsets: FxHashMap::from_iter([(0, 0)]),
            types: pointer.into_iter().flat_map(u32::to_ne_bytes).collect(),
            names: vec![0],
        }
    }

    /// Returns the new id of a type of the kernel. A type without a new id gets one, and is to be added later.
    fn number(&mut self, id: u32) -> Option<u32> {
        if id == VOID {
            return Some(VOID);
        }
        match self.kernel.get(id)?.kind {
            BtfKind::Ptr => return Some(POINTER),
            // A prototype is only ever the target of a pointer.
            BtfKind::FuncProto => return Some(VOID),
            _ => {}
        }
        let next = POINTER + 1 + self.ids.len() as u32;
        Some(*self.numbers.entry(id).or_insert_with(|| {
            self.ids.push(id);
            next
        }))
    }

    /// Returns the offset in `names` of a name of the kernel, which is copied there if it is new.
    fn name(&mut self, at: u32) -> Option<u32> {
        if let Some(&known) = self.offsets.get(&at) {
            return Some(known);
        }
        let here = self.names.len() as u32;
        self.names.extend(self.kernel.name(at)?);
        self.names.push(0);
        self.offsets.insert(at, here);
        Some(here)
    }

    /// Adds a type of the kernel, with the new ids and name offsets that it refers to.
    fn add(&mut self, id: u32) -> Option<()> {
        let of = self.kernel.get(id)?;
        let (third, each) = words(of.kind);
        self.add_word(of.name, Word::Name)?;
        self.add_word(of.info, Word::Number)?;
        self.add_word(of.size_or_type, third)?;
        for (index, &what) in (0..of.rest.len() / WORD_BYTES).zip(each.iter().cycle()) {
            self.add_word(word(of.rest, index * WORD_BYTES)?, what)?;
        }
        Some(())
    }

    fn add_word(&mut self, word: u32, what: Word) -> Option<()> {
        let word = match what {
            Word::Number => word,
            Word::Name => self.name(word)?,
            Word::Type => self.number(word)?,
        };
        self.types.extend(word.to_ne_bytes());
        Some(())
    }

    fn into_bytes(self) -> Vec<u8> {
        btf::from_parts(&self.types, &self.names)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Encodes a type: its first three words, and the words that follow.
    fn record(name: u32, kind: u32, members: u32, third: u32, rest: &[u32]) -> Vec<u8> {
        let words = [name, kind << 24 | members, third];
        let words = words.iter().chain(rest);
        words.flat_map(|word| word.to_ne_bytes()).collect()
    }

    const NAMES: &[u8] = b"\0int\0inner\0outer\0a\0b\0other\0";
    const INT: u32 = 1;
    const INNER: u32 = 5;
    const OUTER: u32 = 11;
    const A: u32 = 17;
    const B: u32 = 19;
    const OTHER: u32 = 21;

    /// `struct other { int a; }`, `int`, `struct inner { int a; }`,
    /// `struct outer { struct inner a; struct other *b; }`, and the pointer.
    fn kernel() -> Vec<u8> {
        let types = [
            record(OTHER, 4, 1, 4, &[A, 2, 0]),
            record(INT, 1, 0, 4, &[0x0100_0020]),
            record(INNER, 4, 1, 4, &[A, 2, 0]),
            record(OUTER, 4, 2, 16, &[A, 3, 0, B, 5, 64]),
            record(0, 2, 0, 1, &[]),
        ];
        btf::from_parts(&types.concat(), NAMES)
    }

    fn only(name: &str) -> FxHashSet<Vec<u8>> {
        FxHashSet::from_iter([name.into()])
    }

    #[test]
    fn a_type_comes_with_what_it_holds_but_not_with_what_it_points_to() {
        let part = part(&kernel(), &only("outer"), &FxHashSet::default()).expect("BTF");
        let types = [
            record(0, 2, 0, VOID, &[]),
            record(1, 4, 2, 16, &[7, 3, 0, 9, 1, 64]),
            record(11, 4, 1, 4, &[7, 4, 0]),
            record(17, 1, 0, 4, &[0x0100_0020]),
        ];
        let names = b"\0outer\0a\0b\0inner\0int\0";
        assert_eq!(part, btf::from_parts(&types.concat(), names));
    }

    #[test]
    fn functions_are_found_with_their_numbers() {
        let types = [
            record(INNER, 12, 0, 2, &[]),
            record(0, 13, 0, 0, &[]),
            record(A, 12, 0, 2, &[]),
            record(B, 1, 0, 4, &[0x0100_0020]),
        ];
        let kernel = btf::from_parts(&types.concat(), NAMES);
        let functions: FxHashSet<&[u8]> = FxHashSet::from_iter([&b"a"[..], b"b"]);
        part(&kernel, &FxHashSet::default(), &functions).expect("BTF");
        let numbers = ["inner", "a", "b"].map(|name| fentry_id::number(name.as_bytes()));
        assert_eq!(numbers, [None, Some(3), None]);
    }

    #[test]
    fn btf_with_something_unknown_is_left_alone() {
        let unknown = record(OTHER, 31, 0, 0, &[]);
        assert_eq!(
            part(
                &btf::from_parts(&unknown, NAMES),
                &only("outer"),
                &FxHashSet::default()
            ),
            None
        );
        let mut cut = kernel();
        cut.pop();
        assert_eq!(part(&cut, &only("outer"), &FxHashSet::default()), None);
    }

    #[test]
    fn shapes_of_a_type_have_one_name() {
        assert_eq!(strip_flavor(b"folio___nr_pages"), b"folio");
        assert_eq!(strip_flavor(b"mem_cgroup"), b"mem_cgroup");
    }
}
