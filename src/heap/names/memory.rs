//! Memory in which names are found: the image of a process, and its modules' memory that is not copied.

use anyhow::Result;

use crate::heap::image::Image;
use crate::process::reader::RemoteMemory;

/// Memory of the program and its libraries that is read-only, and so was not copied: vtables, and the names of
/// classes. This memory is the same later as when the image was taken.
pub trait Modules {
    /// Fills the buffer from an address on. Returns false if any byte cannot be read.
    fn read(&self, address: u64, buffer: &mut [u8]) -> bool;
}

/// Memory of a running process. Nothing can be read once the process has exited or runs another program.
#[derive(Debug)]
pub struct RunningModules(RemoteMemory);

impl RunningModules {
    /// Opens the memory that a process has now. The caller must hold the process, so that its PID means no other.
    ///
    /// # Errors
    /// If the process has exited, or may not be looked at.
    pub fn open(pid: u32) -> Result<Self> {
        RemoteMemory::open(pid).map(Self)
    }
}

impl Modules for RunningModules {
    fn read(&self, address: u64, buffer: &mut [u8]) -> bool {
        match self.0.read(address, buffer.len()) {
            Ok(bytes) if bytes.len() == buffer.len() => {
                buffer.copy_from_slice(&bytes);
                true
            }
            _ => false,
        }
    }
}

/// Image with the memory of modules that it lacks.
#[derive(Clone, Copy)]
pub(super) struct Memory<'a> {
    pub(super) image: &'a Image,
    pub(super) modules: &'a dyn Modules,
}

impl Memory<'_> {
    /// Fills the buffer from an address on. Returns false if any byte is neither in the image nor in a module.
    pub(super) fn read(&self, address: u64, buffer: &mut [u8]) -> bool {
        let Some(end) = address.checked_add(buffer.len() as u64) else {
            return false;
        };
        if let Some(bytes) = self.image.bytes(address..end) {
            buffer.copy_from_slice(bytes);
            return true;
        }
        self.is_module(address) && self.modules.read(address, buffer)
    }

    /// Returns the word at an address.
    pub(super) fn word(&self, address: u64) -> Option<u64> {
        let mut word = [0; 8];
        let known = self.image.word(address);
        known.or_else(|| {
            self.read(address, &mut word)
                .then(|| u64::from_le_bytes(word))
        })
    }

    /// Returns `N` words from an address on.
    pub(super) fn words<const N: usize>(&self, address: u64) -> Option<[u64; N]> {
        let mut bytes = [[0; 8]; N];
        let read = self.read(address, bytes.as_flattened_mut());
        read.then(|| bytes.map(u64::from_le_bytes))
    }

    /// Whether an address is in a mapped file, such as the program or a library, or in the zeros after it (`.bss`).
    pub(super) fn is_module(&self, address: u64) -> bool {
        let areas = &self.image.areas;
        let at = areas.partition_point(|area| area.mapping.range.end <= address);
        let Some(area) = areas
            .get(at)
            .filter(|area| area.mapping.range.contains(&address))
        else {
            return false;
        };
        let follows = |file: usize| {
            let end = areas[file].mapping.range.end;
            areas[file].has_file() && end == area.mapping.range.start
        };
        area.has_file() || area.name().is_empty() && at.checked_sub(1).is_some_and(follows)
    }

    /// Returns the bytes before the first NUL; None if there is no NUL within the limit.
    pub(super) fn c_string(&self, address: u64, limit: usize) -> Option<Vec<u8>> {
        /// Alignment of the ends of pieces, where memory that is not known can begin.
        const PIECE: u64 = 64;
        let mut string = Vec::new();
        while string.len() <= limit {
            let at = address.checked_add(string.len() as u64)?;
            let mut piece = [0; PIECE as usize];
            let piece = &mut piece[..(PIECE - at % PIECE) as usize];
            if !self.read(at, piece) {
                return None;
            }
            if let Some(end) = piece.iter().position(|&byte| byte == 0) {
                string.extend_from_slice(&piece[..end]);
                return (string.len() <= limit).then_some(string);
            }
            string.extend_from_slice(piece);
        }
        None
    }
}

/// Processes made up for tests.
#[cfg(test)]
pub(super) mod sample {
    use std::collections::BTreeMap;

    use super::*;
    use crate::heap::blocks::{Block, Coverage, Heap};
    use crate::heap::image::made::ImageBuilder;

    /// Memory that is copied, and modules by their first address.
    #[derive(Default)]
    pub(crate) struct FakeProcess {
        pub(crate) made: ImageBuilder,
        modules: BTreeMap<u64, Vec<u8>>,
    }

    impl Modules for BTreeMap<u64, Vec<u8>> {
        fn read(&self, address: u64, buffer: &mut [u8]) -> bool {
            let module = self.range(..=address).next_back();
            let bytes = module.and_then(|(start, bytes)| {
                bytes.get((address - start) as usize..)?.get(..buffer.len())
            });
            bytes.map(|bytes| buffer.copy_from_slice(bytes)).is_some()
        }
    }

    impl FakeProcess {
        pub(crate) fn module(&mut self, address: u64, size: u64, name: &str) {
            let rest = format!("r--p 00000000 fe:00 7 /usr/lib/{name}");
            self.made.map(address..address + size, &rest);
            self.modules.insert(address, vec![0; size as usize]);
        }

        pub(crate) fn anonymous(&mut self, address: u64, size: u64) {
            self.made
                .map(address..address + size, "rw-p 00000000 00:00 0 ");
            self.made.put_bytes(address, &vec![0; size as usize]);
        }

        pub(crate) fn words(&mut self, address: u64, words: &[u64]) {
            let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
            self.bytes(address, &bytes);
        }

        pub(crate) fn string(&mut self, address: u64, string: &[u8]) {
            self.bytes(address, &[string, &[0]].concat());
        }

        pub(crate) fn bytes(&mut self, address: u64, bytes: &[u8]) {
            let module = self.modules.range_mut(..=address).next_back();
            let place = module.and_then(|(start, module)| {
                module
                    .get_mut((address - start) as usize..)?
                    .get_mut(..bytes.len())
            });
            match place {
                Some(place) => place.copy_from_slice(bytes),
                None => self.made.put_bytes(address, bytes),
            }
        }

        /// Calls `found` with this memory.
        pub(crate) fn with<T>(&self, found: impl FnOnce(Memory<'_>) -> T) -> T {
            let image = self.made.image();
            found(Memory {
                image: &image,
                modules: &self.modules,
            })
        }

        pub(crate) fn modules(&self) -> &dyn Modules {
            &self.modules
        }
    }

    /// Makes a heap of these blocks, each given as address and size.
    pub(crate) fn heap(blocks: &[(u64, u64)]) -> Heap {
        let blocks = blocks
            .iter()
            .map(|&(address, size)| Block { address, size });
        let mut heap = Heap::new(blocks.collect(), Coverage::Complete);
        heap.regions = heap.blocks().iter().map(Block::range).collect();
        heap
    }

    #[test]
    fn strings_end_where_they_can() {
        let mut sample = FakeProcess::default();
        sample.anonymous(0x1000, 0x1000);
        sample.string(0x1005, b"hello");
        sample.bytes(0x1ff0, &[b'x'; 16]);
        sample.with(|memory| {
            assert_eq!(memory.c_string(0x1005, 5).as_deref(), Some(&b"hello"[..]));
            assert_eq!(memory.c_string(0x1005, 4), None);
            assert_eq!(memory.c_string(0x1ff0, 400), None);
            assert_eq!(memory.c_string(u64::MAX, 400), None);
            assert_eq!(memory.words(0x1ff0), Some([0x7878_7878_7878_7878; 2]));
            assert_eq!(memory.words::<3>(0x1ff0), None);
        });
    }

    #[test]
    fn a_module_is_its_files_and_the_zeros_after_them() {
        let mut sample = FakeProcess::default();
        sample.module(0x10000, 0x1000, "libx.so");
        sample.anonymous(0x11000, 0x1000);
        sample.anonymous(0x12000, 0x1000);
        sample.words(0x10008, &[7]);
        sample.with(|memory| {
            let is_module = [0xffff, 0x10000, 0x11fff, 0x12000].map(|at| memory.is_module(at));
            assert_eq!(is_module, [false, true, true, false]);
            assert_eq!(
                (memory.word(0x10008), memory.word(0x10ffc)),
                (Some(7), None)
            );
        });
    }
}
