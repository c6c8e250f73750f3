//! Layout of HotSpot's own classes, as it publishes them for debuggers (`gHotSpotVMStructs` and `gHotSpotVMTypes`).

use std::collections::HashMap;

use anyhow::{Context, Result};

use crate::code::elf_file::Elf;
use crate::interpreters::memory::Memory;

/// Maximum number of entries that are read of each table: JDK 17 has 2,200.
const MAX_ENTRIES: u64 = 16_384;
/// Maximum size of an entry, in bytes.
const ENTRY_BYTES: u64 = 128;
/// Maximum length of a name that is read, in bytes.
const NAME_BYTES: usize = 96;

/// Values of the variables that describe the two tables: for the fields of classes, the address of the table, the size
/// of an entry, and the offsets in an entry of the class, the field, its type, whether it is static, its offset and its
/// address; for the sizes of classes, the address of the table, the size of an entry, and the offsets in an entry of the
/// class and its size.
pub(in crate::interpreters) type Tables = [u64; 12];

/// Field of a class.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Field {
    /// The offset in an object, or the address of a static field.
    pub(super) at: u64,
    /// The type, such as `int`.
    pub(super) kind: String,
}

/// Layout of the classes of one virtual machine.
#[derive(Debug, Default)]
pub(in crate::interpreters) struct VmStructs {
    fields: HashMap<(String, String), Field>,
    sizes: HashMap<String, u64>,
    /// Classes that were looked up.
    #[cfg(test)]
    pub(in crate::interpreters) asked: std::sync::Mutex<std::collections::BTreeSet<String>>,
}

impl VmStructs {
    /// Reads the tables that a library exports which is mapped with this load bias. None if the library exports no
    /// tables, or is not relocated yet.
    ///
    /// # Errors
    /// If the memory of the process cannot be read.
    pub(super) fn read(memory: &Memory, elf: &Elf<'_>, bias: u64) -> Result<Option<Self>> {
        let symbols = elf.exports([
            "gHotSpotVMStructs",
            "gHotSpotVMStructEntryArrayStride",
            "gHotSpotVMStructEntryTypeNameOffset",
            "gHotSpotVMStructEntryFieldNameOffset",
            "gHotSpotVMStructEntryTypeStringOffset",
            "gHotSpotVMStructEntryIsStaticOffset",
            "gHotSpotVMStructEntryOffsetOffset",
            "gHotSpotVMStructEntryAddressOffset",
            "gHotSpotVMTypes",
            "gHotSpotVMTypeEntryArrayStride",
            "gHotSpotVMTypeEntryTypeNameOffset",
            "gHotSpotVMTypeEntrySizeOffset",
        ])?;
        let mut tables = Tables::default();
        for (value, at) in tables.iter_mut().zip(symbols) {
            let Some(at) = at else { return Ok(None) };
            *value = memory.word(at.wrapping_add(bias))?;
        }
        Self::read_tables(memory, tables)
    }

    /// Reads tables. None if there are none.
    ///
    /// # Errors
    /// If the memory cannot be read, or a table has no end.
    pub(super) fn read_tables(memory: &Memory, tables: Tables) -> Result<Option<Self>> {
        let [
            structs,
            stride,
            fields @ ..,
            types,
            type_stride,
            type_name,
            size,
        ] = tables;
        if structs == 0 || types == 0 {
            return Ok(None);
        }
        let mut names = Names::of(memory);
        let mut read = Self::default();
        each(structs, stride, |entry| {
            read.add_field(&mut names, entry, fields)
        })?;
        each(types, type_stride, |entry| {
            let Some(name) = names.at(entry.wrapping_add(type_name))? else {
                return Ok(false);
            };
            let size = memory.word(entry.wrapping_add(size))?;
            read.sizes.insert(name, size);
            Ok(true)
        })?;
        Ok(Some(read))
    }

    /// Adds the field of an entry. Returns false at the end of the table.
    fn add_field(
        &mut self,
        names: &mut Names<'_>,
        entry: u64,
        [class, name, kind, is_static, offset, address]: [u64; 6],
    ) -> Result<bool> {
        let Some(class) = names.at(entry.wrapping_add(class))? else {
            return Ok(false);
        };
        let name = names.at(entry.wrapping_add(name))?.unwrap_or_default();
        let kind = names.at(entry.wrapping_add(kind))?.unwrap_or_default();
        let is_static = names.memory.word(entry.wrapping_add(is_static))? as u32 != 0;
        let at = if is_static { address } else { offset };
        let at = names.memory.word(entry.wrapping_add(at))?;
        self.fields.insert((class, name), Field { at, kind });
        Ok(true)
    }

    /// Returns a field of a class, if the class has this field.
    pub(super) fn field(&self, class: &str, name: &str) -> Option<&Field> {
        #[cfg(test)]
        self.ask(class);
        self.fields.get(&(class.to_owned(), name.to_owned()))
    }

    /// Returns the offset of a field, or the address of a static field.
    ///
    /// # Errors
    /// If the class or the field does not exist.
    pub(super) fn at(&self, class: &str, name: &str) -> Result<u64> {
        let field = self.field(class, name);
        let field = field.with_context(|| format!("without {class}::{name}"))?;
        Ok(field.at)
    }

    /// Returns the offset of a field in an object.
    ///
    /// # Errors
    /// If the class or the field does not exist, or the offset has more than 16 bits.
    pub(super) fn offset(&self, class: &str, name: &str) -> Result<u16> {
        let at = self.at(class, name)?;
        u16::try_from(at).with_context(|| format!("with {class}::{name} at {at:#x}"))
    }

    /// Returns the size of a class's objects, in bytes.
    ///
    /// # Errors
    /// If the class does not exist.
    pub(super) fn size(&self, class: &str) -> Result<u64> {
        #[cfg(test)]
        self.ask(class);
        let size = self.sizes.get(class);
        size.copied().with_context(|| format!("without {class}"))
    }
}

/// Calls `add` with the address of each entry of a table until `add` returns false.
fn each(table: u64, stride: u64, mut add: impl FnMut(u64) -> Result<bool>) -> Result<()> {
    anyhow::ensure!(
        (1..=ENTRY_BYTES).contains(&stride),
        "entries of {stride} bytes"
    );
    for number in 0..MAX_ENTRIES {
        if !add(table.wrapping_add(number * stride))? {
            return Ok(());
        }
    }
    anyhow::bail!("more than {MAX_ENTRIES} entries")
}

/// Cache of names in the memory of a process. Many entries refer to the same name.
struct Names<'a> {
    memory: &'a Memory,
    known: HashMap<u64, String>,
}

impl<'a> Names<'a> {
    fn of(memory: &'a Memory) -> Self {
        Self {
            memory,
            known: HashMap::new(),
        }
    }

    /// Returns the name to which the pointer at an address points. None if the pointer is null.
    fn at(&mut self, address: u64) -> Result<Option<String>> {
        let pointer = self.memory.word(address)?;
        if pointer == 0 {
            return Ok(None);
        }
        if let Some(name) = self.known.get(&pointer) {
            return Ok(Some(name.clone()));
        }
        let name = self.memory.c_string(pointer, NAME_BYTES)?;
        self.known.insert(pointer, name.clone());
        Ok(Some(name))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    /// Memory that tables are encoded into. No process has memory at these addresses.
    #[derive(Default)]
    struct Written(BTreeMap<u64, u8>);

    impl Written {
        const FROM: u64 = 0x1000;

        /// Writes bytes behind the others, and returns their address.
        fn put(&mut self, bytes: &[u8]) -> u64 {
            let at = Self::FROM + self.0.len() as u64;
            self.0.extend((at..).zip(bytes.iter().copied()));
            at
        }

        fn put_name(&mut self, name: &str) -> u64 {
            self.put(format!("{name}\0").as_bytes())
        }

        /// Writes a table, with a null entry at its end.
        fn put_table<const WORDS: usize>(&mut self, mut entries: Vec<[u64; WORDS]>) -> u64 {
            entries.push([0; WORDS]);
            let bytes = entries.into_iter().flatten().flat_map(u64::to_ne_bytes);
            self.put(&bytes.collect::<Vec<_>>())
        }
    }

    impl VmStructs {
        pub(super) fn ask(&self, class: &str) {
            self.asked
                .lock()
                .expect("no panic")
                .insert(class.to_owned());
        }

        /// Encodes tables of the classes that were looked up. Returns the values of their variables, and their memory.
        pub(in crate::interpreters) fn encode(&self) -> (Tables, BTreeMap<u64, u8>) {
            let asked = self.asked.lock().expect("no panic");
            let mut written = Written::default();
            let fields = self
                .fields
                .iter()
                .filter(|((class, _), _)| asked.contains(class));
            let fields: BTreeMap<_, _> = fields.collect();
            let fields = fields.into_iter().map(|((class, name), field)| {
                let [class, name, kind] =
                    [class, name, &field.kind].map(|name| written.put_name(name));
                // As if all were static: an offset stands where an address does.
                [class, name, kind, 1, 0, field.at]
            });
            let fields = fields.collect();
            let fields = written.put_table(fields);
            let sizes = self
                .sizes
                .iter()
                .filter(|(class, _)| asked.contains(*class));
            let sizes: BTreeMap<_, _> = sizes.collect();
            let sizes = sizes
                .into_iter()
                .map(|(class, &size)| [written.put_name(class), size]);
            let sizes = sizes.collect();
            let sizes = written.put_table(sizes);
            let tables = [fields, 48, 0, 8, 16, 24, 32, 40, sizes, 16, 0, 8];
            (tables, written.0)
        }
    }

    #[test]
    fn a_table_without_an_end_or_a_stride_is_none() {
        let mut entries = 0;
        let all = each(0x1000, 48, |_| {
            entries += 1;
            Ok(true)
        });
        assert!(all.is_err());
        assert_eq!(entries, MAX_ENTRIES);
        assert!(each(0x1000, 0, |_| Ok(false)).is_err());
        assert!(each(u64::MAX, ENTRY_BYTES, |_| Ok(false)).is_ok());
    }

    #[test]
    fn what_is_missing_is_named() {
        let mut structs = VmStructs::default();
        let field = Field {
            at: 1 << 20,
            kind: "int".to_owned(),
        };
        let key = ("CodeBlob".to_owned(), "_size".to_owned());
        structs.fields.insert(key, field);
        let said = |found: Result<u16>| found.expect_err("no offset").to_string();
        assert_eq!(
            said(structs.offset("CodeBlob", "_name")),
            "without CodeBlob::_name"
        );
        assert_eq!(
            said(structs.offset("CodeBlob", "_size")),
            "with CodeBlob::_size at 0x100000"
        );
        assert!(structs.size("HeapBlock").is_err());
    }
}
