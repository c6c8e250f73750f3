//! A BPF array map as memory of ours, so that reading it takes no system calls.

use std::num::NonZeroUsize;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::{Context, Result, ensure};
use libbpf_rs::MapCore;
use nix::sys::mman::{MapFlags, ProtFlags, mmap, munmap};
use plain::Plain;

/// An array made with BPF_F_MMAPABLE. The kernel half writes it at any time, so what is read of a
/// value can be half of one and half of another; values carry what it takes to notice.
#[derive(Debug)]
pub struct MappedArray {
    memory: NonNull<u8>,
    bytes: NonZeroUsize,
    stride: usize,
}

impl MappedArray {
    /// Maps the whole array.
    ///
    /// # Errors
    /// If the map is no array that can be mapped, or has no entries.
    pub fn new(map: &impl MapCore) -> Result<Self> {
        // The kernel places values on 8 bytes.
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

    /// How many values it has.
    pub fn len(&self) -> usize {
        self.bytes.get() / self.stride
    }

    /// Whether it has none, which no array can.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// A copy of the value with this index.
    ///
    /// # Errors
    /// If there is none, or it is smaller than a `T`.
    pub fn get<T: Plain + Copy>(&self, index: usize) -> Result<T> {
        ensure!(
            index < self.len() && size_of::<T>() <= self.stride && align_of::<T>() <= 8,
            "no such value in the array"
        );
        // SAFETY: inside the mapping and aligned, as just tested; any bytes are a T. The read is
        // volatile, for the kernel may be writing there.
        Ok(unsafe {
            self.memory
                .add(index * self.stride)
                .cast::<T>()
                .read_volatile()
        })
    }

    /// The 64-bit word `offset` bytes into the value with this index.
    ///
    /// # Errors
    /// If there is none there.
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

    /// Replaces such a word if it still is `current`.
    ///
    /// # Errors
    /// If the array has no such word.
    pub fn replace(&self, index: usize, offset: usize, current: u64, new: u64) -> Result<bool> {
        let word = self.word(index, offset)?;
        Ok(word
            .compare_exchange(current, new, Ordering::AcqRel, Ordering::Relaxed)
            .is_ok())
    }
}

impl Drop for MappedArray {
    fn drop(&mut self) {
        // SAFETY: our own mapping, which nothing refers to any more. It can only fail for a wrong
        // address, and there is nothing to do then.
        let _ = unsafe { munmap(self.memory.cast(), self.bytes.get()) };
    }
}
