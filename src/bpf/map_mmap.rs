//! BPF array maps that are mapped into this process, so that reading them takes no system calls.

use std::num::NonZeroUsize;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::{Context, Result, ensure};
use libbpf_rs::MapCore;
use nix::sys::mman::{MapFlags, ProtFlags, mmap, munmap};
use plain::Plain;

/// Memory mapping of an array map that was created with BPF_F_MMAPABLE. BPF programs write to the map at any time, so
/// a value that is read can mix two states. Values have fields by which a reader notices that.
#[derive(Debug)]
pub struct MappedArray {
    memory: NonNull<u8>,
    bytes: NonZeroUsize,
    stride: usize,
}

// SAFETY: the mapping belongs to the process, not to a thread.
unsafe impl Send for MappedArray {}
// SAFETY: user space writes single words only, atomically. A value that is read can mix several states anyway.
unsafe impl Sync for MappedArray {}

impl MappedArray {
    /// Maps the whole array.
    ///
    /// # Errors
    /// If the map is no array that can be mapped, or has no entries.
    pub fn new(map: &impl MapCore) -> Result<Self> {
        // The kernel aligns values to 8 bytes.
        let stride = (map.value_size() as usize).next_multiple_of(8);
        let bytes = NonZeroUsize::new(stride * map.max_entries() as usize)
            .context("the array has no entries")?;
        let protection = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let memory = unsafe {
            mmap(
                None,
                bytes,
                protection,
                MapFlags::MAP_SHARED,
                map.as_fd(),
                0,
            )
        }
        .with_context(|| format!("failed to map {}", map.name().display()))?;
        Ok(Self {
            memory: memory.cast(),
            bytes,
            stride,
        })
    }

    /// Returns the number of values.
    pub fn len(&self) -> usize {
        self.bytes.get() / self.stride
    }

    /// Whether the array has no values, which is never true.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Copies the value with this index.
    ///
    /// # Errors
    /// If there is no such value, or it is smaller than a `T`.
    pub fn get<T: Plain + Copy>(&self, index: usize) -> Result<T> {
        self.get_at(index, 0)
    }

    /// Copies what is `offset` bytes into the value with this index.
    ///
    /// # Errors
    /// If there is no such value, or a `T` does not fit into the rest of it.
    pub fn get_at<T: Plain + Copy>(&self, index: usize, offset: usize) -> Result<T> {
        let fits = offset.is_multiple_of(8) && offset + size_of::<T>() <= self.stride;
        ensure!(
            index < self.len() && fits && align_of::<T>() <= 8,
            "no such value in the array"
        );
        // SAFETY: inside the mapping and aligned, as just tested; any bytes are a T. The read is
        // volatile, for the kernel may be writing there.
        Ok(unsafe {
            self.memory
                .add(index * self.stride + offset)
                .cast::<T>()
                .read_volatile()
        })
    }

    /// The 64-bit word `offset` bytes into the value with this index.
    ///
    /// # Errors
    /// If the value has no such word.
    pub fn word(&self, index: usize, offset: usize) -> Result<&AtomicU64> {
        ensure!(
            index < self.len() && offset.is_multiple_of(8) && offset + 8 <= self.stride,
            "no such word in the array"
        );
        let word = self
            .memory
            .as_ptr()
            .wrapping_add(index * self.stride + offset);
        // SAFETY: inside the mapping and aligned, as just tested, and it lives as long as `self`.
        Ok(unsafe { AtomicU64::from_ptr(word.cast()) })
    }

    /// Replaces the 64-bit word `offset` bytes into a value if the word still is `current`. Returns whether it was
    /// replaced.
    ///
    /// # Errors
    /// If the array has no such word.
    pub fn compare_exchange(
        &self,
        index: usize,
        offset: usize,
        current: u64,
        new: u64,
    ) -> Result<bool> {
        let word = self.word(index, offset)?;
        Ok(word
            .compare_exchange(current, new, Ordering::AcqRel, Ordering::Relaxed)
            .is_ok())
    }
}

impl Drop for MappedArray {
    fn drop(&mut self) {
        // SAFETY: our own mapping, which nothing refers to any more. munmap can only fail for a wrong address, and
        // nothing could be done then.
        let _ = unsafe { munmap(self.memory.cast(), self.bytes.get()) };
    }
}

#[cfg(test)]
mod tests {
    use libbpf_rs::libbpf_sys::BPF_F_MMAPABLE;
    use libbpf_rs::{MapHandle, MapType};

    use super::*;
    use crate::bpf::map_create;

    #[repr(C)]
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    struct Words<const COUNT: usize>([u32; COUNT]);

    // SAFETY: integers; every bit pattern is valid.
    unsafe impl<const COUNT: usize> Plain for Words<COUNT> {}

    /// Creates an array of values of 20 bytes, 24 bytes apart. Each word is ten times the value's index plus the
    /// word's number.
    fn array(flags: u32) -> Option<MapHandle> {
        let map = map_create::create_for_test(MapType::Array, (4, 20), 3, flags)?;
        for index in 0..3u32 {
            let words = [0, 1, 2, 3, 4].map(|word| (10 * index + word).to_ne_bytes());
            map.update(
                &index.to_ne_bytes(),
                words.as_flattened(),
                libbpf_rs::MapFlags::ANY,
            )
            .expect("an entry");
        }
        Some(map)
    }

    #[test]
    fn values_are_those_of_the_map() {
        let Some(map) = array(BPF_F_MMAPABLE) else {
            return;
        };
        let mapped = MappedArray::new(&map).expect("it can be mapped");
        assert_eq!((mapped.len(), mapped.is_empty()), (3, false));
        let value: Words<5> = mapped.get(2).expect("a value");
        assert_eq!(value, Words([20, 21, 22, 23, 24]));
        assert!(mapped.get::<Words<5>>(3).is_err(), "beyond the last value");
        assert!(mapped.get::<Words<7>>(0).is_err(), "more than a value");
        let part: Words<2> = mapped.get_at(2, 8).expect("a part of a value");
        assert_eq!(part, Words([22, 23]));
        assert!(mapped.get_at::<Words<4>>(2, 16).is_err(), "beyond a value");
        assert!(mapped.get_at::<Words<1>>(2, 4).is_err(), "not aligned");
    }

    #[test]
    fn a_word_is_replaced_if_it_is_as_it_was() {
        let Some(map) = array(BPF_F_MMAPABLE) else {
            return;
        };
        let mapped = MappedArray::new(&map).expect("it can be mapped");
        let old = mapped.word(1, 8).expect("a word").load(Ordering::Relaxed);
        assert_eq!(old, 12 | 13 << 32);
        assert!(!mapped.compare_exchange(1, 8, old + 1, 7).expect("a word"));
        assert!(mapped.compare_exchange(1, 8, old, 7).expect("a word"));
        let kernels = map.lookup(&1u32.to_ne_bytes(), libbpf_rs::MapFlags::ANY);
        let kernels = kernels.expect("a lookup").expect("a value");
        assert_eq!(kernels[4..16], [11, 0, 0, 0, 7, 0, 0, 0, 0, 0, 0, 0]);
        for (index, offset) in [(3, 0), (1, 4), (1, 24)] {
            assert!(mapped.word(index, offset).is_err(), "{index}, {offset}");
        }
    }

    #[test]
    fn what_cannot_be_mapped_is_refused() {
        let Some(map) = array(0) else { return };
        let error = MappedArray::new(&map).expect_err("a map in the kernel's memory alone");
        assert!(error.to_string().contains("for_test"), "{error}");
    }
}
