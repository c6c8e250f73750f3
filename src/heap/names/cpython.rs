//! Objects of CPython, 3.9 to 3.15, by the chain of their types.
//!
//! An object begins with a reference count and its type. A type is an object, too, and its type is a metatype. The
//! chain of types ends in `type`, the only object that is its own type. The flags of an object's type tell which
//! words are before the object in its block: those of the garbage collector's list, and those of a managed dictionary
//! and weak references.

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;

use crate::heap::blocks::Block;
use crate::heap::names::memory::Memory;

/// Largest number of metatypes between a type and `type`.
const MAX_METATYPES: usize = 4;
/// Largest size of a type's name, in bytes.
const MAX_NAME: usize = 400;

/// Offsets in a type object (`PyTypeObject`), in bytes.
const NAME: u64 = 24;
const BASIC_SIZE: u64 = 32;
const FLAGS: u64 = 168;

/// `Py_TPFLAGS_MANAGED_WEAKREF` (3.12) and `Py_TPFLAGS_MANAGED_DICT` (3.11): two words are before the collector's.
const MANAGED: u64 = 1 << 3 | 1 << 4;
const READY: u64 = 1 << 12;
const COLLECTED: u64 = 1 << 14;
const IS_STRING: u64 = 1 << 28;
const IS_TYPE: u64 = 1 << 31;

/// Bytes of a string of ASCII without its text (`PyASCIIObject`, 3.12). The type's own size is larger: it is that of
/// the largest form that a string can have.
const SMALLEST_STRING: u64 = 40;

/// Offsets at which an object can be in its block.
const HEADS: [u64; 3] = [0, 16, 32];

/// Object of CPython.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Object {
    /// `tp_name`, not escaped.
    pub(super) name: Rc<str>,
    /// Bytes of the block before the object, which are none of its references.
    pub(super) head: u64,
    /// Reference count; from 3.12 on, its lower half.
    pub(super) references: u32,
    /// Whether the garbage collector tracks the object.
    pub(super) collected: bool,
}

/// Type of CPython's objects.
#[derive(Debug, Clone)]
struct Type {
    name: Rc<str>,
    head: u64,
    basic_size: u64,
    collected: bool,
}

/// Types of a process's objects. Each type is looked up once.
pub(super) struct Types<'a> {
    memory: Memory<'a>,
    types: RefCell<HashMap<u64, Option<Type>>>,
}

impl<'a> Types<'a> {
    /// Makes a reader of types; None if no module of CPython is mapped.
    pub(super) fn new(memory: Memory<'a>) -> Option<Self> {
        let mut areas = memory.image.areas.iter().filter(|area| area.has_file());
        areas
            .any(|area| area.mapping.module().contains("python"))
            .then(|| Self {
                memory,
                types: RefCell::default(),
            })
    }

    /// Returns the object that a block holds.
    ///
    /// The first offset that fits is taken. The words before an object are pointers, and no reference count. The
    /// content of an object can look like another object, as a tuple's length and its first element do if that
    /// element is a class.
    pub(super) fn object(&self, block: Block) -> Option<Object> {
        let mut heads = HEADS.into_iter();
        heads.find_map(|head| self.object_at(block, head))
    }

    fn object_at(&self, block: Block, head: u64) -> Option<Object> {
        let room = block.size.checked_sub(head + 16)? + 16;
        let [references, address] = self.memory.words(block.address + head)?;
        // A block that begins with a pointer is an array, even if its second pointer is to a type.
        if references as u32 == 0 || self.memory.image.area(references).is_some() {
            return None;
        }
        let object_type = self.of(address)?;
        (object_type.head == head && object_type.basic_size <= room).then_some(Object {
            name: object_type.name,
            head,
            references: references as u32,
            collected: object_type.collected,
        })
    }

    /// Returns the type at an address.
    fn of(&self, address: u64) -> Option<Type> {
        if !address.is_multiple_of(8) || self.memory.image.word(address).is_none() {
            return None;
        }
        if let Some(known) = self.types.borrow().get(&address) {
            return known.clone();
        }
        let found = self.read(address);
        self.types.borrow_mut().insert(address, found.clone());
        found
    }

    fn read(&self, address: u64) -> Option<Type> {
        let mut metatype = self.memory.image.word(address + 8)?;
        for steps in 0.. {
            let above = self.memory.image.word(metatype.checked_add(8)?)?;
            let flags = self.memory.image.word(metatype.checked_add(FLAGS)?)?;
            if flags & IS_TYPE == 0 || steps == MAX_METATYPES {
                return None;
            }
            if above == metatype {
                break;
            }
            metatype = above;
        }
        if &*self.name(metatype)? != "type" {
            return None;
        }
        let flags = self.memory.image.word(address + FLAGS)?;
        let basic_size = self.memory.image.word(address + BASIC_SIZE)?;
        if flags & READY == 0 || !(16..=1 << 20).contains(&basic_size) {
            return None;
        }
        let collected = flags & COLLECTED != 0;
        let is_string = flags & IS_STRING != 0;
        Some(Type {
            name: self.name(address)?,
            head: 16 * u64::from(collected) + 16 * u64::from(flags & MANAGED != 0),
            basic_size: if is_string {
                SMALLEST_STRING
            } else {
                basic_size
            },
            collected,
        })
    }

    fn name(&self, address: u64) -> Option<Rc<str>> {
        let name = self.memory.image.word(address.checked_add(NAME)?)?;
        let name = String::from_utf8(self.memory.c_string(name, MAX_NAME)?).ok()?;
        let is_name = !name.is_empty() && !name.contains(char::is_control);
        is_name.then(|| name.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::heap::names::memory::sample::FakeProcess;

    const TYPE: u64 = 0x40_1000;
    const BLOCK: u64 = 0x10_0000;

    fn define(
        sample: &mut FakeProcess,
        at: u64,
        metatype: u64,
        name: &[u8],
        size: u64,
        flags: u64,
    ) {
        sample.words(at, &[1, metatype, 0, at + 0x200, size]);
        sample.words(at + FLAGS, &[flags | READY]);
        sample.string(at + 0x200, name);
    }

    /// Makes a process of CPython with `type`, a metatype made of it, and a class of each kind.
    fn python() -> FakeProcess {
        let mut sample = FakeProcess::default();
        sample.module(0x30_0000, 0x1000, "libpython3.11.so.1.0");
        sample.anonymous(0x40_0000, 0x10000);
        sample.anonymous(BLOCK, 0x1000);
        define(&mut sample, TYPE, TYPE, b"type", 880, COLLECTED | IS_TYPE);
        define(
            &mut sample,
            TYPE + 0x400,
            TYPE,
            b"ABCMeta",
            880,
            COLLECTED | IS_TYPE,
        );
        define(&mut sample, TYPE + 0x800, TYPE, b"float", 24, 0);
        define(&mut sample, TYPE + 0xc00, TYPE, b"list", 40, COLLECTED);
        define(
            &mut sample,
            TYPE + 0x1000,
            TYPE + 0x400,
            "Größe".as_bytes(),
            16,
            COLLECTED | 1 << 4,
        );
        define(&mut sample, TYPE + 0x1400, TYPE, b"str", 80, IS_STRING);
        sample
    }

    fn object(sample: &FakeProcess, size: u64) -> Option<(String, u64)> {
        sample.with(|memory| {
            let types = Types::new(memory).expect("CPython");
            let object = types.object(Block {
                address: BLOCK,
                size,
            });
            object.map(|object| (object.name.to_string(), object.head))
        })
    }

    #[test]
    fn objects_are_where_their_types_say() {
        for (kind, name, head, size) in [
            (2, "float", 0, 32),
            (3, "list", 16, 64),
            (4, "Größe", 32, 56),
            (5, "str", 0, 48),
        ] {
            let mut sample = python();
            let address = TYPE + kind * 0x400;
            sample.words(BLOCK + head, &[1, address]);
            assert_eq!(object(&sample, size), Some((name.into(), head)));
            // The block is too small, the object is elsewhere, freed, an array of pointers, or of an invalid type.
            assert_eq!(object(&sample, head + 8), None);
            for (place, words) in [
                (BLOCK + (head + 16) % 48, [1, address]),
                (BLOCK + head, [0, address]),
                (BLOCK + head, [address, address]),
                (BLOCK + head, [1, address + 8]),
                (BLOCK + head, [1, u64::MAX]),
            ] {
                let mut wrong = python();
                wrong.words(place, &words);
                assert_eq!(object(&wrong, size), None, "{name} {place:x} {words:x?}");
            }
        }
    }

    #[test]
    fn a_tuple_of_a_class_is_no_object_of_it() {
        let mut sample = python();
        let words = [BLOCK, BLOCK, 1, TYPE + 0xc00, 1, TYPE + 0x1000];
        sample.words(BLOCK, &words);
        assert_eq!(object(&sample, 64), Some(("list".into(), 16)));
    }

    #[test]
    fn chains_that_do_not_end_in_type_name_nothing() {
        let float = TYPE + 0x800;
        for (place, word) in [
            // A loop of metatypes, one that is itself, another name, and a name without an end.
            (TYPE + 8, TYPE + 0x400),
            (float + 8, float),
            (TYPE + NAME, float + 0x200),
            (float + NAME, 0x40_8000),
            (float + NAME, u64::MAX),
            (float + BASIC_SIZE, u64::MAX),
        ] {
            let mut sample = python();
            sample.bytes(0x40_8000, &[b'x'; 0x1000]);
            sample.words(BLOCK, &[1, float]);
            assert!(object(&sample, 32).is_some());
            sample.words(place, &[word]);
            assert_eq!(object(&sample, 32), None, "{place:x} {word:x}");
        }
    }

    #[test]
    fn a_process_without_cpython_has_no_objects() {
        let sample = FakeProcess::default();
        assert!(sample.with(|memory| Types::new(memory).is_none()));
    }
}
