//! Global variables of Python's modules, as holders of blocks.
//!
//! A module refers to its dictionary, and the dictionary to its table of keys and values, a block of its own. In all
//! versions, the value of a variable follows its name in the table.

use std::collections::HashMap;

use crate::heap::blocks::Heap;
use crate::heap::image::Image;
use crate::heap::names::{Kind, Names, PythonObject};

/// Offsets in a module (`PyModuleObject`), in bytes.
const MODULE_DICT: u64 = 16;
/// Offsets in a module of its name: from 3.15 on, and before, where a weak reference is at the first of these offsets.
const MODULE_NAMES: [u64; 2] = [40, 48];
/// Offset in a dictionary (`PyDictObject`) of the address of its table.
const DICT_TABLE: u64 = 32;
/// Offset in a string of its length, and offsets of its text: from 3.12 on, and before.
const LENGTH: u64 = 16;
const TEXTS: [u64; 2] = [40, 48];
/// Maximum length of a name that is shown, in bytes.
const MAX_NAME: u64 = 256;

/// Tables of the modules' variables, each with its module's name, by the table's block.
pub struct ModuleGlobals<'a> {
    image: &'a Image,
    heap: &'a Heap,
    names: &'a Names,
    modules: HashMap<usize, String>,
}

impl<'a> ModuleGlobals<'a> {
    /// Finds the tables of all modules.
    pub fn of(image: &'a Image, heap: &'a Heap, names: &'a Names) -> Self {
        let mut globals = Self {
            image,
            heap,
            names,
            modules: HashMap::new(),
        };
        let is_module = |object: &&PythonObject| globals.is(object.block, "module");
        let modules = names.python.iter().filter(is_module);
        globals.modules = modules
            .filter_map(|module| globals.module(module))
            .collect();
        globals
    }

    /// Returns by which variable of a module a block is held, as `module.variable`, and how many blocks of its chain
    /// are before the table of that module. The chain begins with the nearest block.
    pub fn holder(&self, block: usize, chain: &[usize]) -> Option<(usize, String)> {
        if self.modules.is_empty() {
            return None;
        }
        let at = chain.iter().position(|by| self.modules.contains_key(by))?;
        let (table, module) = self.modules.get_key_value(&chain[at])?;
        let held = at.checked_sub(1).map_or(block, |before| chain[before]);
        let value = self.address(self.object(held)?);
        let mut key = 0;
        for (_, word) in self.image.words(self.heap.blocks()[*table].range()) {
            if word == value
                && let Some(variable) = self.name(key)
            {
                return Some((at, format!("{module}.{variable}")));
            }
            key = word;
        }
        None
    }

    /// Returns the table of a module, with the module's name.
    fn module(&self, module: &PythonObject) -> Option<(usize, String)> {
        let address = self.address(module);
        let mut names = MODULE_NAMES.into_iter();
        let name = names.find_map(|at| self.name(self.image.word(address + at)?))?;
        let dict = self.image.word(address + MODULE_DICT)?;
        let (block, _) = self.heap.block_at(dict)?;
        let table = self.image.word(dict.checked_add(DICT_TABLE)?)?;
        match self.heap.block_at(table)? {
            (table, 0) if self.is(block, "dict") => Some((table, name)),
            _ => None,
        }
    }

    fn is(&self, block: usize, name: &str) -> bool {
        let of = self.names.of_block(block);
        of.is_some_and(|of| of.kind == Kind::Python && of.name == name)
    }

    fn object(&self, block: usize) -> Option<&PythonObject> {
        let python = &self.names.python;
        let at = python.binary_search_by_key(&block, |object| object.block);
        at.ok().map(|at| &python[at])
    }

    fn address(&self, object: &PythonObject) -> u64 {
        self.heap.blocks()[object.block].address + object.head
    }

    /// Returns the text of a string at an address, if it is a name: of letters, digits, `_` and `.`.
    fn name(&self, address: u64) -> Option<String> {
        let length = self.image.word(address.checked_add(LENGTH)?)?;
        let text = |offset: u64| {
            let start = address.checked_add(offset)?;
            let bytes = self.image.bytes(start..start.checked_add(length + 1)?)?;
            let (end, text) = bytes.split_last()?;
            let is_name = |byte: &u8| byte.is_ascii_alphanumeric() || b"_.".contains(byte);
            let found = *end == 0 && text.iter().all(is_name);
            found.then(|| String::from_utf8_lossy(text).into_owned())
        };
        let has_length = (1..=MAX_NAME).contains(&length);
        has_length
            .then(|| TEXTS.into_iter().find_map(text))
            .flatten()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::heap::names::Type;
    use crate::heap::names::memory::sample::{self, FakeProcess};

    const AT: u64 = 0x10_0000;

    fn block(number: u64) -> u64 {
        AT + number * 0x100
    }

    #[test]
    fn a_value_has_the_name_before_it() {
        let mut sample = FakeProcess::default();
        sample.anonymous(AT, 0x1000);
        // 0: the module; 1: its dictionary; 2: the table; 3 and 4: names; 5: a list, which 6 is in; 7: another dict.
        let object = |number: u64| block(number) + 16;
        sample.words(object(0) + MODULE_DICT, &[object(1)]);
        sample.words(object(0) + MODULE_NAMES[1], &[block(3)]);
        sample.words(object(1) + DICT_TABLE, &[block(2)]);
        sample.words(
            block(2),
            &[1, 5, object(5), block(4), object(5), block(3), object(7)],
        );
        for (number, text, offset) in [(3, &b"__main__"[..], 48), (4, b"cache", 40)] {
            sample.words(block(number) + LENGTH, &[text.len() as u64]);
            sample.string(block(number) + offset, text);
        }
        let kinds = ["module", "dict", "", "str", "str", "list", "int", "dict"];
        let mut names = Names::default();
        for (number, kind) in kinds.into_iter().enumerate() {
            names.types.push(Type {
                kind: if kind.is_empty() {
                    Kind::Owned
                } else {
                    Kind::Python
                },
                name: kind.to_owned(),
            });
            names.of_blocks.push(number as u32 + 1);
            names.python.push(PythonObject {
                block: number,
                head: 16,
                references: 1,
                collected: true,
            });
        }
        let blocks: Vec<_> = (0..8).map(|number| (block(number), 0x80)).collect();
        let heap = sample::heap(&blocks);
        sample.with(|memory| {
            let globals = ModuleGlobals::of(memory.image, &heap, &names);
            let cache = Some((0, "__main__.cache".to_owned()));
            assert_eq!(globals.holder(5, &[2, 1, 0]), cache);
            let below = globals.holder(6, &[5, 2, 1, 0]);
            assert_eq!(below, Some((1, "__main__.cache".to_owned())));
            // A chain by another dictionary, and a block that is no value.
            assert_eq!(globals.holder(6, &[5, 7]), None);
            assert_eq!(globals.holder(6, &[2, 1, 0]), None);
        });
    }
}
