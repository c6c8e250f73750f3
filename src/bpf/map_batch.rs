//! Reading of all entries of a hash map, in batches.
//!
//! The iterator of libbpf-rs is not used: it takes a batch that is not full for the last one. But the kernel also
//! leaves a batch partly empty where the entries of the next bucket do not all fit.

use std::collections::HashSet;
use std::io;
use std::ops::ControlFlow::{self, Break, Continue};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr;
use std::thread;

use anyhow::{Context, Result, anyhow};
use libbpf_rs::{MapCore, libbpf_sys};

/// Entries that are read at once.
const BATCH: u32 = 4096;

/// Buckets for each reader thread, at least: for fewer, a thread is not worth its start.
const PART: u32 = 1 << 16;
/// Reader threads at most. They take CPU time from the traced processes.
const READERS: u32 = 4;

/// Number of the bucket behind the last one of any map.
const END: u32 = u32::MAX;

/// Calls `each` with every key and its value. Entries that are added or removed meanwhile may be missing. Every other
/// entry comes once.
///
/// # Errors
/// If the map is no hash map, or `each` fails, which ends the reading.
pub fn for_each(
    map: &(impl MapCore + ?Sized),
    each: impl FnMut(&[u8], &[u8]) -> Result<()>,
) -> Result<()> {
    all(map, libbpf_sys::bpf_map_lookup_batch, BATCH, each)
}

/// Calls `each` with every key and its value, and removes the entries.
///
/// # Errors
/// As [`for_each`]. Entries that had been removed by then are lost.
pub fn drain(
    map: &(impl MapCore + ?Sized),
    each: impl FnMut(&[u8], &[u8]) -> Result<()>,
) -> Result<()> {
    let lookup = libbpf_sys::bpf_map_lookup_and_delete_batch;
    all(map, lookup, BATCH, each)
}

/// Parses every key with its value, and returns the results in any order. Several threads read a part each of a large
/// map, as most of the time they wait for memory. Entries that are added or removed meanwhile may be missing. A
/// removed entry can also come twice, if two threads read it at the same time. Every other entry comes once.
///
/// # Errors
/// As [`for_each`].
pub fn collect<T: Send>(
    map: &(impl MapCore + ?Sized),
    parse: impl Fn(&[u8], &[u8]) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    let cpus = thread::available_parallelism().map_or(1, |cpus| cpus.get() as u32);
    let readers = (buckets_of(map) / PART).clamp(1, cpus.min(READERS));
    collect_in(map, readers, parse)
}

fn collect_in<T: Send>(
    map: &(impl MapCore + ?Sized),
    parts: u32,
    parse: impl Fn(&[u8], &[u8]) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    let step = buckets_of(map).div_ceil(parts);
    let begin_of = |part: u32| {
        let begin = part.saturating_mul(step);
        if part < parts { begin } else { END }
    };
    let (map, parse) = (&HashMapReader::of(map), &parse);
    thread::scope(|scope| {
        let threads: Vec<_> = (0..parts)
            .map(|part| scope.spawn(move || map.part(begin_of(part), begin_of(part + 1), parse)))
            .collect();
        let mut found = Vec::new();
        for thread in threads {
            let part = thread.join().map_err(|_| anyhow!("a thread panicked"))?;
            found = join(found, part?);
        }
        Ok(found)
    })
}

/// Joins two lists, in any order. The smaller list is moved to the end of the larger one, as copying millions of
/// elements is slow.
pub fn join<T>(one: Vec<T>, other: Vec<T>) -> Vec<T> {
    let (mut larger, mut smaller) = if one.len() < other.len() {
        (other, one)
    } else {
        (one, other)
    };
    larger.append(&mut smaller);
    larger
}

/// Returns the number of buckets that the kernel gives a hash map.
fn buckets_of(map: &(impl MapCore + ?Sized)) -> u32 {
    map.max_entries().max(1).next_power_of_two()
}

fn all(
    map: &(impl MapCore + ?Sized),
    lookup: Lookup,
    batch: u32,
    mut each: impl FnMut(&[u8], &[u8]) -> Result<()>,
) -> Result<()> {
    HashMapReader::of(map).for_each_batch(lookup, batch, 0, |batch| {
        for (key, value) in batch.entries() {
            each(key, value)?;
        }
        Ok(Continue(()))
    })
}

type Lookup = unsafe extern "C" fn(
    i32,
    *mut libc::c_void,
    *mut libc::c_void,
    *mut libc::c_void,
    *mut libc::c_void,
    *mut u32,
    *const libbpf_sys::bpf_map_batch_opts,
) -> i32;

/// A map that is read.
struct HashMapReader<'a> {
    map: BorrowedFd<'a>,
    key_bytes: usize,
    value_bytes: usize,
}

/// Entries that one system call has read: all entries of some buckets.
struct Batch<'a> {
    source: &'a HashMapReader<'a>,
    /// The number of the bucket after these, or [`END`].
    next: u32,
    count: usize,
    keys: &'a [u8],
    values: &'a [u8],
}

impl Batch<'_> {
    fn keys(&self) -> impl Iterator<Item = &[u8]> {
        self.keys
            .chunks_exact(self.source.key_bytes)
            .take(self.count)
    }

    fn entries(&self) -> impl Iterator<Item = (&[u8], &[u8])> {
        self.keys()
            .zip(self.values.chunks_exact(self.source.value_bytes))
    }
}

impl<'a> HashMapReader<'a> {
    fn of(map: &'a (impl MapCore + ?Sized)) -> Self {
        Self {
            map: map.as_fd(),
            key_bytes: map.key_size() as usize,
            value_bytes: map.value_size() as usize,
        }
    }

    /// Parses the entries of the buckets from `from` up to, but not including, `to`.
    fn part<T>(
        &self,
        from: u32,
        to: u32,
        parse: &impl Fn(&[u8], &[u8]) -> Result<T>,
    ) -> Result<Vec<T>> {
        let lookup = libbpf_sys::bpf_map_lookup_batch;
        let mut found = Vec::new();
        self.for_each_batch(lookup, BATCH, from, |batch| {
            // The kernel does not tell in which bucket an entry is. Entries that a read from `to` on finds are of
            // another part.
            let mut beyond = HashSet::new();
            if batch.next > to {
                self.for_each_batch(lookup, BATCH, to, |other| {
                    beyond.extend(other.keys().map(<[u8]>::to_vec));
                    let more = other.next < batch.next;
                    Ok(if more { Continue(()) } else { Break(()) })
                })?;
            }
            for (key, value) in batch.entries() {
                if beyond.is_empty() || !beyond.contains(key) {
                    found.push(parse(key, value)?);
                }
            }
            Ok(if batch.next < to {
                Continue(())
            } else {
                Break(())
            })
        })?;
        Ok(found)
    }

    /// Calls `each` with all entries from the bucket `from` on, in batches of at least `batch` entries, until `each`
    /// breaks.
    fn for_each_batch(
        &self,
        lookup: Lookup,
        mut batch: u32,
        from: u32,
        mut each: impl FnMut(Batch<'_>) -> Result<ControlFlow<()>>,
    ) -> Result<()> {
        let options = libbpf_sys::bpf_map_batch_opts {
            sz: size_of::<libbpf_sys::bpf_map_batch_opts>() as _,
            ..Default::default()
        };
        // Where the kernel begins to read: for a hash map, the number of a bucket.
        let mut bucket = from;
        let mut keys = vec![0; batch as usize * self.key_bytes];
        let mut values = vec![0; batch as usize * self.value_bytes];
        loop {
            let mut count = batch;
            let mut next = 0u32;
            // SAFETY: the buffers have space for `count` entries of the map's sizes, and a place in a
            // hash map takes four bytes.
            let result = unsafe {
                lookup(
                    self.map.as_raw_fd(),
                    ptr::from_mut(&mut bucket).cast(),
                    ptr::from_mut(&mut next).cast(),
                    keys.as_mut_ptr().cast(),
                    values.as_mut_ptr().cast(),
                    &raw mut count,
                    &raw const options,
                )
            };
            match -result {
                0 | libc::ENOENT => {}
                libc::EINTR => continue,
                // A bucket has more entries than the buffers.
                libc::ENOSPC => {
                    batch *= 2;
                    keys.resize(batch as usize * self.key_bytes, 0);
                    values.resize(batch as usize * self.value_bytes, 0);
                    continue;
                }
                error => {
                    return Err(io::Error::from_raw_os_error(error))
                        .context("failed to read the entries of a map");
                }
            }
            bucket = if result == 0 { next } else { END };
            let read = Batch {
                source: self,
                next: bucket,
                count: count as usize,
                keys: &keys,
                values: &values,
            };
            if each(read)?.is_break() || bucket == END {
                return Ok(());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use libbpf_rs::{MapFlags, MapHandle, MapType};

    use super::*;
    use crate::bpf::map_create;

    /// Creates a hash map of numbers to their squares. Returns None where the test may not create maps.
    fn squares(count: u64) -> Option<MapHandle> {
        let entries = count.max(1) as u32;
        let map = map_create::create_for_test(MapType::Hash, (8, 8), entries, 0)?;
        for number in 0..count {
            let square = (number * number).to_ne_bytes();
            map.update(&number.to_ne_bytes(), &square, MapFlags::ANY)
                .expect("there is room");
        }
        Some(map)
    }

    fn sums(map: &MapHandle, lookup: Lookup, batch: u32) -> (u64, u64) {
        let (mut count, mut sum) = (0, 0);
        all(map, lookup, batch, |key, value| {
            let number = |bytes: &[u8]| u64::from_ne_bytes(bytes.try_into().expect("8 bytes"));
            assert_eq!(number(key) * number(key), number(value));
            count += 1;
            sum += number(key);
            Ok(())
        })
        .expect("it is read");
        (count, sum)
    }

    #[test]
    fn every_entry_comes_once_whatever_the_batch() {
        for count in [0, 1, 4096, 20011] {
            let Some(map) = squares(count) else { return };
            let expected = (count, (0..count).sum());
            for batch in [1, 64, 1024, 4096, 32768] {
                let found = sums(&map, libbpf_sys::bpf_map_lookup_batch, batch);
                assert_eq!(found, expected, "{count} in batches of {batch}");
            }
            let taken = sums(&map, libbpf_sys::bpf_map_lookup_and_delete_batch, 1024);
            assert_eq!(taken, expected, "{count}");
            assert_eq!(map.keys().count(), 0, "{count}");
        }
    }

    #[test]
    fn every_entry_comes_once_whatever_the_parts() {
        for count in [0, 1, 4096, 20011, 100_003] {
            let Some(map) = squares(count) else { return };
            for parts in [1, 2, 3, 7, 61] {
                let number =
                    |key: &[u8], _: &[u8]| Ok(u64::from_ne_bytes(key.try_into().expect("8 bytes")));
                let mut found = collect_in(&map, parts, number).expect("it is read");
                found.sort_unstable();
                assert!(found.into_iter().eq(0..count), "{count} in {parts} parts");
            }
        }
    }
}
