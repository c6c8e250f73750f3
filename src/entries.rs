//! All entries of a hash map, many at a time.
//!
//! Not by libbpf-rs: its iterator takes a batch that is not full for the last one, but the kernel
//! also leaves places empty where all entries of the next bucket do not fit.

use std::io;
use std::os::fd::AsRawFd;
use std::ptr;

use anyhow::{Context, Result};
use libbpf_rs::{MapCore, libbpf_sys};

/// Entries read at once.
const BATCH: u32 = 4096;

/// Calls `each` with every key and its value. What is added or removed meanwhile may be missing;
/// all else comes once.
///
/// # Errors
/// If the map is no hash, or an error of `each`, which ends it.
pub fn read(
    map: &(impl MapCore + ?Sized),
    each: impl FnMut(&[u8], &[u8]) -> Result<()>,
) -> Result<()> {
    walk(map, libbpf_sys::bpf_map_lookup_batch, BATCH, each)
}

/// Calls `each` with every key and its value, and removes them.
///
/// # Errors
/// As [`read`]; what had been removed by then is lost.
pub fn take(
    map: &(impl MapCore + ?Sized),
    each: impl FnMut(&[u8], &[u8]) -> Result<()>,
) -> Result<()> {
    walk(
        map,
        libbpf_sys::bpf_map_lookup_and_delete_batch,
        BATCH,
        each,
    )
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

fn walk(
    map: &(impl MapCore + ?Sized),
    lookup: Lookup,
    mut batch: u32,
    mut each: impl FnMut(&[u8], &[u8]) -> Result<()>,
) -> Result<()> {
    let (key_bytes, value_bytes) = (map.key_size() as usize, map.value_size() as usize);
    let options = libbpf_sys::bpf_map_batch_opts {
        sz: size_of::<libbpf_sys::bpf_map_batch_opts>() as _,
        ..Default::default()
    };
    // Where the kernel was: of a hash map the number of a bucket.
    let mut place: Option<u32> = None;
    let mut keys = vec![0; batch as usize * key_bytes];
    let mut values = vec![0; batch as usize * value_bytes];
    loop {
        let mut count = batch;
        let mut next = 0u32;
        let from = place.as_mut().map_or(ptr::null_mut(), ptr::from_mut);
        // SAFETY: the buffers have room for `count` entries of the map's sizes, and a place in a
        // hash map takes four bytes.
        let result = unsafe {
            lookup(
                map.as_fd().as_raw_fd(),
                from.cast(),
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
            // A bucket has more entries than that.
            libc::ENOSPC => {
                batch *= 2;
                keys.resize(batch as usize * key_bytes, 0);
                values.resize(batch as usize * value_bytes, 0);
                continue;
            }
            error => {
                return Err(io::Error::from_raw_os_error(error))
                    .context("failed to read the entries of a map");
            }
        }
        let entries = keys
            .chunks_exact(key_bytes)
            .zip(values.chunks_exact(value_bytes));
        for (key, value) in entries.take(count as usize) {
            each(key, value)?;
        }
        if -result == libc::ENOENT {
            return Ok(());
        }
        place = Some(next);
    }
}

#[cfg(test)]
mod tests {
    use libbpf_rs::{MapFlags, MapHandle, MapType};

    use super::*;
    use crate::maps;

    /// A hash map of numbers to their squares; None where we may make none.
    fn squares(count: u64) -> Option<MapHandle> {
        let map = maps::create(MapType::Hash, "squares", (8, 8), count.max(1) as u32, 0);
        let map = match map {
            Ok(map) => map,
            Err(_) if !nix::unistd::geteuid().is_root() => return None,
            Err(error) => panic!("{error:#}"),
        };
        for number in 0..count {
            let square = (number * number).to_ne_bytes();
            map.update(&number.to_ne_bytes(), &square, MapFlags::ANY)
                .expect("there is room");
        }
        Some(map)
    }

    fn sums(map: &MapHandle, lookup: Lookup, batch: u32) -> (u64, u64) {
        let (mut count, mut sum) = (0, 0);
        walk(map, lookup, batch, |key, value| {
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
}
