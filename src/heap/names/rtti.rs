//! Classes of C++ objects by their vtables, also in stripped programs (Itanium C++ ABI, 2.5 and 2.9).
//!
//! The first word of a polymorphic object points into its class's vtable. Two words before that place is the offset
//! to the top of the object. This offset is 0 in the vtable that an object begins with, multiple and virtual bases or
//! not. One word before that place is the address of the class's `std::type_info`, which points at the mangled name.
//! A type_info is an object, too: its own class is one of the three classes of the C++ runtime that describe classes,
//! and is found by the same steps. This is the proof: no other data leads to the name of
//! `__cxxabiv1::__class_type_info` on this path.

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;

use crate::heap::names::memory::Memory;
use crate::print::demangle::demangle;

/// Largest size of a mangled name, in bytes. A longer name is not demangled in part: its class is unnamed.
const MAX_MANGLED: usize = 16 << 10;

/// Largest number of base classes between a class and the one that is requested.
const MAX_BASES: usize = 16;

/// The classes of the C++ runtime that describe other classes: without bases, with one, with several.
const DESCRIBING: [(&[u8], Describes); 3] = [
    (b"N10__cxxabiv117__class_type_infoE", Describes::NoBase),
    (b"N10__cxxabiv120__si_class_type_infoE", Describes::OneBase),
    (b"N10__cxxabiv121__vmi_class_type_infoE", Describes::Bases),
];

/// Kind of bases that a type_info describes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Describes {
    NoBase,
    OneBase,
    Bases,
}

/// Classes of vtables. Each class is looked up once.
pub(super) struct Classes<'a> {
    memory: Memory<'a>,
    /// Name of the class by the first word of its objects; None if that word is no vtable's.
    names: RefCell<HashMap<u64, Option<Rc<str>>>>,
    /// Kind of bases that a type_info describes, by the first word of the type_info.
    describing: RefCell<HashMap<u64, Option<Describes>>>,
}

impl<'a> Classes<'a> {
    pub(super) fn new(memory: Memory<'a>) -> Self {
        Self {
            memory,
            names: RefCell::default(),
            describing: RefCell::default(),
        }
    }

    /// Returns the class of an object that begins with this word, as it is in the source.
    pub(super) fn of(&self, vtable: u64) -> Option<Rc<str>> {
        if !vtable.is_multiple_of(8) || !self.memory.is_module(vtable) {
            return None;
        }
        if let Some(known) = self.names.borrow().get(&vtable) {
            return known.clone();
        }
        let name = self.type_info(vtable).and_then(|info| self.name(info));
        self.names.borrow_mut().insert(vtable, name.clone());
        name
    }

    /// Whether an object that begins with this word is a `std::streambuf` or of a class derived from it.
    pub(super) fn is_stream_buffer(&self, vtable: u64) -> bool {
        const STREAM_BUFFER: &[u8] = b"St15basic_streambufI";
        if self.of(vtable).is_none() {
            return false;
        }
        let mut info = self.type_info(vtable);
        for _ in 0..MAX_BASES {
            let Some(class) = info else { return false };
            if self
                .mangled(class)
                .is_some_and(|name| name.starts_with(STREAM_BUFFER))
            {
                return true;
            }
            info = match self.describes(class) {
                Some(Describes::OneBase) => self.memory.word(class + 16),
                // Flags and the number of bases come before the first one.
                Some(Describes::Bases) => self.memory.word(class + 24),
                Some(Describes::NoBase) | None => None,
            };
        }
        false
    }

    /// Returns the type_info of a vtable's class, if the vtable begins whole objects and the type_info describes a
    /// class.
    fn type_info(&self, vtable: u64) -> Option<u64> {
        let info = self.info_unproved(vtable)?;
        self.describes(info).map(|_| info)
    }

    /// Returns the address at which a vtable has its type_info, without a proof that this is one.
    fn info_unproved(&self, vtable: u64) -> Option<u64> {
        let offset_to_top = self.memory.word(vtable.checked_sub(16)?)?;
        let info = self.memory.word(vtable - 8)?;
        let is_place = info.is_multiple_of(8) && self.memory.is_module(info);
        (offset_to_top == 0 && is_place).then_some(info)
    }

    /// Returns the kind of bases that a type_info describes; None if it is no type_info of a class.
    fn describes(&self, info: u64) -> Option<Describes> {
        let vtable = self.memory.word(info)?;
        if let Some(&known) = self.describing.borrow().get(&vtable) {
            return known;
        }
        // The class of the type_info is recognised by its name alone, and is not described in turn: so this ends.
        let found = self
            .info_unproved(vtable)
            .filter(|_| vtable.is_multiple_of(8))
            .and_then(|class| self.mangled(class))
            .and_then(|name| DESCRIBING.iter().find(|(known, _)| *known == name))
            .map(|(_, describes)| *describes);
        self.describing.borrow_mut().insert(vtable, found);
        found
    }

    fn name(&self, info: u64) -> Option<Rc<str>> {
        let mangled = String::from_utf8(self.mangled(info)?).ok()?;
        let symbol = format!("_ZTS{mangled}");
        demangle(&symbol)
            .strip_prefix("typeinfo name for ")
            .map(Rc::from)
    }

    /// Returns the mangled name that a type_info points at.
    fn mangled(&self, info: u64) -> Option<Vec<u8>> {
        // A name that is compared by address is marked: on some architectures in the highest bit, on all with an
        // asterisk.
        let address = self.memory.word(info.checked_add(8)?)? & !(1 << 63);
        let mut name = self.memory.c_string(address, MAX_MANGLED)?;
        if name.first() == Some(&b'*') {
            name.remove(0);
        }
        (!name.is_empty()).then_some(name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::heap::names::memory::sample::FakeProcess;

    const MODULE: u64 = 0x40_0000;

    /// Makes a module with the runtime's three describing classes, at MODULE, +0x100 and +0x200. The address points
    /// of their vtables are 16 bytes on.
    fn runtime() -> FakeProcess {
        let mut sample = FakeProcess::default();
        sample.module(MODULE, 0x10000, "program");
        for (at, (name, _)) in (MODULE..).step_by(0x100).zip(DESCRIBING) {
            sample.words(at, &[0, at + 0x40]);
            sample.words(at + 0x40, &[MODULE + 16, at + 0x60]);
            sample.string(at + 0x60, name);
        }
        sample
    }

    /// Makes a class of no bases, one or more. Returns the word that its objects begin with.
    fn class(sample: &mut FakeProcess, at: u64, name: &[u8], bases: &[u64]) -> u64 {
        let kind = bases.len().min(2) as u64;
        sample.words(at, &[0, at + 0x20]);
        sample.words(at + 0x20, &[MODULE + kind * 0x100 + 16, at + 0x80]);
        match bases {
            [base] => sample.words(at + 0x30, &[*base]),
            [first, ..] => sample.words(at + 0x30, &[(bases.len() as u64) << 32, *first]),
            [] => {}
        }
        sample.string(at + 0x80, name);
        at + 16
    }

    fn name_of(sample: &FakeProcess, vtable: u64) -> Option<Rc<str>> {
        sample.with(|memory| Classes::new(memory).of(vtable))
    }

    #[test]
    fn classes_are_named_by_what_describes_them() {
        let mut sample = runtime();
        let at = MODULE + 0x1000;
        let plain = class(&mut sample, at, b"N3app7SessionE", &[]);
        let one = class(&mut sample, at + 0x200, b"*3BoxIiE", &[at + 0x20]);
        let more = class(&mut sample, at + 0x400, b"4Both", &[at + 0x20, at + 0x220]);
        for (vtable, name) in [(plain, "app::Session"), (one, "Box<int>"), (more, "Both")] {
            assert_eq!(name_of(&sample, vtable).as_deref(), Some(name));
        }
        for wrong in [
            0,
            plain + 1,
            plain + 8,
            at + 0x20,
            MODULE + 0x9000,
            u64::MAX - 7,
        ] {
            assert_eq!(name_of(&sample, wrong), None, "{wrong:x}");
        }
    }

    #[test]
    fn a_vtable_that_does_not_begin_objects_names_none() {
        let mut sample = runtime();
        let vtable = class(&mut sample, MODULE + 0x1000, b"3Mix", &[]);
        // The vtable of a second base, 16 bytes into the object.
        sample.words(MODULE + 0x1000, &[(-16_i64).cast_unsigned()]);
        assert_eq!(name_of(&sample, vtable), None);
    }

    #[test]
    fn what_no_class_of_the_runtime_describes_is_none() {
        let mut sample = runtime();
        let at = MODULE + 0x1000;
        let vtable = class(&mut sample, at, b"5Fraud", &[]);
        let fraud = class(&mut sample, at + 0x200, b"5Other", &[]);
        // The type_info's class is an ordinary one; then the class itself: a loop.
        sample.words(at + 0x20, &[fraud]);
        assert_eq!(name_of(&sample, vtable), None);
        sample.words(at + 0x20, &[vtable]);
        assert_eq!(name_of(&sample, vtable), None);
        // A type_info without an end, in a name and in its bases.
        sample.words(
            at + 0x20,
            &[MODULE + 0x100 + 16, MODULE + 0x2000, at + 0x20],
        );
        sample.string(MODULE + 0x2000, &[b'9'; 0x4000]);
        assert_eq!(name_of(&sample, vtable), None);
        sample.string(MODULE + 0x2000, b"4Loop");
        assert_eq!(name_of(&sample, vtable).as_deref(), Some("Loop"));
        assert!(!sample.with(|memory| Classes::new(memory).is_stream_buffer(vtable)));
    }

    #[test]
    fn stream_buffers_are_known_by_their_bases() {
        let mut sample = runtime();
        let at = MODULE + 0x1000;
        let name = b"St15basic_streambufIcSt11char_traitsIcEE";
        let base = class(&mut sample, at, name, &[]);
        let file = class(&mut sample, at + 0x200, b"7FileBuf", &[at + 0x20]);
        let both = class(&mut sample, at + 0x400, b"4Both", &[at + 0x220, at]);
        let other = class(&mut sample, at + 0x600, b"5Other", &[]);
        let is = |vtable| sample.with(|memory| Classes::new(memory).is_stream_buffer(vtable));
        assert_eq!(
            [base, file, both, other, 8].map(is),
            [true, true, true, false, false]
        );
    }
}
