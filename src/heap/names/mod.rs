//! Types of the objects in a heap. A type is never guessed: a block whose type cannot be proved is unnamed.
//!
//! | module | whose objects it names | what proves it |
//! |---|---|---|
//! | `rtti` | C++ classes | the vtable, its `type_info`, and the class of that |
//! | `cpython` | Python objects | the chain of types, which ends in `type` |
//! | [`cycles`] | (unreachable objects of CPython) | reference counts |
//! | [`pymalloc`] | (blocks that are CPython's) | a pool's header and its free list |
//! | `shapes` | buffers of strings, vectors, deques, hash tables | the object that points at them |
//! | `nodes` | nodes of lists, maps and sets | links back, and the container's count |
//! | `globals` | variables of Python's modules, as holders | the table of a module's dictionary |
//! | `text` | C strings | they fill their blocks |
//! | `references` | blocks that only one named block points at | all words of the image |
//!
//! The target process chooses all data that is read here. So names are bounded, and must be escaped where they are
//! printed.

mod cpython;
pub mod cycles;
mod globals;
mod memory;
mod nodes;
pub mod pymalloc;
mod references;
mod rtti;
mod shapes;
mod text;

use std::collections::{BTreeMap, HashMap};

use crate::heap::blocks::Heap;
use crate::heap::image::Image;
use crate::heap::names::cpython::Types;
pub use crate::heap::names::globals::ModuleGlobals;
use crate::heap::names::memory::Memory;
pub use crate::heap::names::memory::{Modules, RunningModules};
use crate::heap::names::references::Holder;
use crate::heap::names::rtti::Classes;
use crate::heap::names::shapes::Shapes;

/// Limit on the bytes of different types' names. Later names are omitted.
const MAX_NAMES: usize = 64 << 20;

/// Largest difference in size between two blocks of one class, in bytes: glibc keeps a remainder that is too small to
/// split.
const SAME_SIZE: u64 = 16;

/// Types of CPython that programs are made of, and that say nothing about this one.
const PLAIN_PYTHON: [&str; 26] = [
    "dict",
    "list",
    "tuple",
    "set",
    "frozenset",
    "str",
    "bytes",
    "bytearray",
    "int",
    "float",
    "complex",
    "function",
    "method",
    "builtin_function_or_method",
    "code",
    "cell",
    "frame",
    "generator",
    "type",
    "module",
    "ModuleSpec",
    "SourceFileLoader",
    "property",
    "classmethod",
    "staticmethod",
    "weakref",
];

/// Evidence by which a type is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    /// A C++ class, by run-time type information.
    Class,
    /// A type of CPython.
    Python,
    /// The text of a `std::string`.
    String,
    /// A part of a container of libstdc++.
    Container,
    /// A C string.
    Text,
    /// Nothing is known of the block but the one block that points at it.
    Owned,
}

impl Kind {
    /// Returns the word for the kind in JSON.
    pub fn name(self) -> &'static str {
        match self {
            Self::Class => "class",
            Self::Python => "python",
            Self::String => "string",
            Self::Container => "container",
            Self::Text => "text",
            Self::Owned => "owned",
        }
    }
}

/// The type of a block.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Type {
    /// Evidence by which the type is known.
    pub kind: Kind,
    /// Name as it is in the source, such as `app::Session`, or a description: `std::string buffer of app::Session`.
    /// Not escaped.
    pub name: String,
}

impl Type {
    /// Whether the type is one of the program's own: a class, and none of the types of CPython that all programs have.
    pub fn is_own(&self) -> bool {
        match self.kind {
            Kind::Class => true,
            Kind::Python => !PLAIN_PYTHON.contains(&self.name.as_str()),
            _ => false,
        }
    }
}

/// Part of a string or a container.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Shape {
    String,
    ListNode,
    TreeNode,
    DequeMap,
    DequeNode,
    HashBuckets,
    HashNode,
    Vector,
}

impl Shape {
    fn describe(self) -> (Kind, &'static str) {
        match self {
            Self::String => (Kind::String, "std::string buffer"),
            Self::ListNode => (Kind::Container, "std::list node"),
            Self::TreeNode => (Kind::Container, "std::map/set node"),
            Self::DequeMap => (Kind::Container, "std::deque map"),
            Self::DequeNode => (Kind::Container, "std::deque node"),
            Self::HashBuckets => (Kind::Container, "std::unordered_map/set buckets"),
            Self::HashNode => (Kind::Container, "std::unordered_map/set node"),
            Self::Vector => (Kind::Container, "std::vector buffer"),
        }
    }

    /// Returns the rank of a shape. Of two shapes for a block, the lower rank is right: strings first, and vectors,
    /// which only three words prove, last.
    fn rank(self) -> u8 {
        match self {
            Self::String => 0,
            Self::Vector => 2,
            _ => 1,
        }
    }
}

/// Object of CPython, with what [`cycles::judge`] needs to tell lost objects from those in a cycle.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PythonObject {
    /// Number of the block that contains the object.
    pub block: usize,
    /// Bytes of the block before the object, such as words of the garbage collector's list, which keep nothing alive.
    pub head: u64,
    /// Reference count; from 3.12 on, its lower half.
    pub references: u32,
    /// Whether the garbage collector tracks the object, and so will free it in an unreachable cycle.
    pub collected: bool,
}

/// The types of all blocks of a heap.
#[derive(Debug, Default)]
pub struct Names {
    types: Vec<Type>,
    /// Number of each block's type, plus 1; 0 if the block is unnamed.
    of_blocks: Vec<u32>,
    /// Python's objects, in order of their blocks.
    pub python: Vec<PythonObject>,
    /// Whether names were omitted because there were too many.
    pub cut: bool,
}

impl Names {
    /// Names the blocks of a heap, [with the pools of CPython](pymalloc::with_pools) if there are any.
    pub fn of(image: &Image, heap: &Heap, modules: &dyn Modules) -> Self {
        let memory = Memory { image, modules };
        let mut naming = Naming {
            memory,
            heap,
            numbers: HashMap::new(),
            bytes: 0,
            names: Self {
                of_blocks: vec![0; heap.blocks().len()],
                ..Self::default()
            },
        };
        let classes = Classes::new(memory);
        naming.classes(&classes);
        naming.python();
        let holders = naming.shapes(&classes);
        naming.texts();
        naming.held(&holders);
        naming.names
    }

    /// Returns the type of a block, by the block's index in [`Heap::blocks`]; None if the block is unnamed.
    pub fn of_block(&self, block: usize) -> Option<&Type> {
        self.types.get(self.type_index(block)?)
    }

    /// Returns the number of a block's type, which is the same for all blocks of that type.
    pub fn type_index(&self, block: usize) -> Option<usize> {
        (*self.of_blocks.get(block)? as usize).checked_sub(1)
    }

    /// Returns all types, by their numbers.
    pub fn types(&self) -> &[Type] {
        &self.types
    }
}

/// Naming of the blocks of a heap, in progress.
struct Naming<'a> {
    memory: Memory<'a>,
    heap: &'a Heap,
    numbers: HashMap<Type, u32>,
    bytes: usize,
    names: Names,
}

impl Naming<'_> {
    fn is_named(&self, block: usize) -> bool {
        self.names.of_blocks[block] != 0
    }

    fn name(&mut self, block: usize, kind: Kind, name: String) {
        let of = Type { kind, name };
        let number = match self.numbers.get(&of) {
            Some(&number) => number,
            None if self.bytes + of.name.len() > MAX_NAMES => {
                self.names.cut = true;
                return;
            }
            None => {
                self.bytes += of.name.len();
                self.names.types.push(of.clone());
                let number = self.names.types.len() as u32;
                self.numbers.insert(of, number);
                number
            }
        };
        self.names.of_blocks[block] = number;
    }

    /// Names objects of C++ classes.
    ///
    /// A block that begins with a vtable can be more than the object: memory that the program hands out in parts, or
    /// a vector's buffer. All objects of a class are equally large, so blocks that differ from the most frequent size
    /// are omitted. A block in which the vtable comes again at equal distances is an array.
    fn classes(&mut self, classes: &Classes<'_>) {
        let mut by_vtable: BTreeMap<u64, Vec<usize>> = BTreeMap::new();
        for (number, block) in self.heap.blocks().iter().enumerate() {
            let first = self.memory.image.word(block.address);
            let vtable = first.filter(|_| block.size >= 8);
            if let Some(vtable) = vtable.filter(|&vtable| classes.of(vtable).is_some()) {
                by_vtable.entry(vtable).or_default().push(number);
            }
        }
        for (vtable, blocks) in by_vtable {
            let Some(class) = classes.of(vtable) else {
                continue;
            };
            let (single, several): (Vec<_>, Vec<_>) = blocks
                .into_iter()
                .partition(|&block| self.repeats(block, vtable).is_none());
            for block in several {
                if self.repeats(block, vtable) == Some(true) {
                    self.name(block, Kind::Class, format!("{class}[]"));
                }
            }
            let size = |block: usize| self.heap.blocks()[block].size;
            let usual = most_frequent(single.iter().map(|&block| size(block)));
            let (usual, size) = (usual.unwrap_or(0), &size);
            let objects: Vec<_> = single
                .into_iter()
                .filter(|&block| size(block).abs_diff(usual) <= SAME_SIZE)
                .collect();
            for block in objects {
                self.name(block, Kind::Class, class.to_string());
            }
        }
    }

    /// Returns whether a block's first word comes again at equal distances only; None if it does not come again.
    fn repeats(&self, block: usize, vtable: u64) -> Option<bool> {
        let block = self.heap.blocks()[block];
        let words = self.memory.image.words(block.range());
        let mut again = words
            .filter(|&(place, word)| word == vtable && place != block.address)
            .map(|(place, _)| place - block.address);
        let distance = again.next()?;
        Some(again.all(|place| place.is_multiple_of(distance)))
    }

    /// Names objects of CPython.
    fn python(&mut self) {
        let Some(types) = Types::new(self.memory) else {
            return;
        };
        for (number, &block) in self.heap.blocks().iter().enumerate() {
            if self.is_named(number) {
                continue;
            }
            if let Some(object) = types.object(block) {
                self.names.python.push(PythonObject {
                    block: number,
                    head: object.head,
                    references: object.references,
                    collected: object.collected,
                });
                self.name(number, Kind::Python, object.name.to_string());
            }
        }
    }

    /// Names parts of strings and containers, if the program is a C++ one. Returns the holder of each block.
    fn shapes(&mut self, classes: &Classes<'_>) -> Vec<Holder> {
        let mut modules = self.memory.image.areas.iter();
        let has_library = modules.any(|area| area.mapping.module().starts_with("libstdc++"));
        let is_cxx = has_library || self.names.types.iter().any(|of| of.kind == Kind::Class);
        let shapes = Shapes::new(self.memory, self.heap, classes);
        let mut parts: HashMap<u32, ContainerPart> = HashMap::new();
        let mut add = |block: u32, shape: Shape, (owner, is_inside): (Option<usize>, bool)| {
            let part = ContainerPart::new(shape, owner, is_inside);
            let known = parts.entry(block).or_insert(part);
            *known = known.and(part);
        };
        let owner_at = |place: u64| {
            let (block, _) = self.heap.block_at(place)?;
            let number = self.names.type_index(block)?;
            let of = self.names.types.get(number)?;
            (of.kind == Kind::Class && !of.name.ends_with("[]")).then_some(number)
        };
        let holders = references::scan(self.memory.image, self.heap, |place, block, source| {
            if is_cxx && !self.is_named(block as usize) {
                let owner = source.and_then(|_| owner_at(place));
                let owner = (owner, source.is_some());
                shapes.at(place, block, |block, shape| add(block, shape, owner));
            }
        });
        if is_cxx {
            nodes::find(self.memory, self.heap, |block, shape, container| {
                let is_inside = self.heap.block_at(container).is_some();
                add(block, shape, (owner_at(container), is_inside));
            });
        }
        let mut parts: Vec<_> = parts.into_iter().collect();
        parts.sort_unstable_by_key(|(block, _)| *block);
        for (block, part) in parts {
            if !self.is_named(block as usize) {
                let (kind, what) = part.shape.describe();
                let owner = part.owner.and_then(|number| self.names.types.get(number));
                let name = match owner {
                    Some(owner) => format!("{what} of {}", owner.name),
                    None => what.to_owned(),
                };
                self.name(block as usize, kind, name);
            }
        }
        holders
    }

    fn texts(&mut self) {
        for (number, &block) in self.heap.blocks().iter().enumerate() {
            if !self.is_named(number) && text::is_text(self.memory.image, block) {
                self.name(number, Kind::Text, "text".into());
            }
        }
    }

    /// Names the remaining blocks by the only block that points at them, if that block has a type of its own.
    fn held(&mut self, holders: &[Holder]) {
        let mut held = Vec::new();
        for (number, holder) in holders.iter().enumerate() {
            if let (Holder::Block(holder), false) = (holder, self.is_named(number))
                && let Some(of) = self.names.of_block(*holder as usize)
                && !matches!(of.kind, Kind::Text | Kind::String)
            {
                held.push((number, format!("owned by {}", of.name)));
            }
        }
        for (number, name) in held {
            self.name(number, Kind::Owned, name);
        }
    }
}

/// Findings about a part of a container so far.
#[derive(Clone, Copy)]
struct ContainerPart {
    shape: Shape,
    /// Number of the class whose object contains the container.
    owner: Option<usize>,
    /// Whether a container is in a block that is no object of that class. One of the two containers is stale, and it
    /// is not known which.
    shared: bool,
}

impl ContainerPart {
    /// Makes a part of a container that is in a block, if `is_inside`, and maybe in an object of a class.
    fn new(shape: Shape, owner: Option<usize>, is_inside: bool) -> Self {
        Self {
            shape,
            owner,
            shared: is_inside && owner.is_none(),
        }
    }

    fn and(self, other: Self) -> Self {
        if other.shape.rank() != self.shape.rank() {
            let first = self.shape.rank() < other.shape.rank();
            return if first { self } else { other };
        }
        let shared = self.shared
            || other.shared
            || other.owner.is_some() && self.owner.is_some() && self.owner != other.owner;
        Self {
            shape: self.shape,
            owner: self.owner.or(other.owner).filter(|_| !shared),
            shared,
        }
    }
}

/// Returns the most frequent number; of several, the smallest.
fn most_frequent(numbers: impl Iterator<Item = u64>) -> Option<u64> {
    let mut counts: HashMap<u64, u64> = HashMap::new();
    numbers.for_each(|number| *counts.entry(number).or_default() += 1);
    let most = counts
        .into_iter()
        .max_by_key(|&(number, count)| (count, u64::MAX - number));
    most.map(|(number, _)| number)
}

#[cfg(test)]
mod tests;
