//! Counts by key, which `bpf/include/count.bpf.h` adds to, as what has come since the last look.

use std::collections::HashMap;
use std::marker::PhantomData;

use anyhow::{Context, Result};
use libbpf_rs::{MapCore, MapFlags};
use plain::Plain;

use crate::shared;

/// Entries read from a map at once.
const BATCH: u32 = 4096;

/// The counts of one map, whose keys are `K`.
pub struct Counts<'map, M, K> {
    map: &'map M,
    before: HashMap<Vec<u8>, u64>,
    key: PhantomData<K>,
}

impl<'map, M: MapCore, K: Plain + Copy> Counts<'map, M, K> {
    /// The counts of this map of the skeleton.
    pub fn new(map: &'map M) -> Self {
        Self {
            map,
            before: HashMap::new(),
            key: PhantomData,
        }
    }

    /// What was counted since the last call, the largest count last.
    pub fn since_last(&mut self) -> Result<Vec<(K, u64)>> {
        let batches = self
            .map
            .lookup_batch(BATCH, MapFlags::ANY, MapFlags::ANY)
            .context("failed to read the counts")?;
        let mut counts = Vec::new();
        for (key, value) in batches {
            let now = u64::from_ne_bytes(value[..].try_into().context("a value is not a count")?);
            let new = grown(&mut self.before, &key, now);
            if new > 0 {
                counts.push((*shared::view::<K>(&key)?, new));
            }
        }
        counts.sort_by_key(|(_, count)| *count);
        Ok(counts)
    }
}

/// By how much the key's count is larger than when it was last seen. One that is smaller was moved
/// to another key since; what comes next makes up for it.
fn grown(before: &mut HashMap<Vec<u8>, u64>, key: &[u8], now: u64) -> u64 {
    match before.get_mut(key) {
        Some(before) => {
            let new = now.saturating_sub(*before);
            *before += new;
            new
        }
        None => {
            before.insert(key.to_vec(), now);
            now
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_has_come_since_is_counted() {
        let mut before = HashMap::new();
        assert_eq!(grown(&mut before, b"a", 5), 5);
        assert_eq!(grown(&mut before, b"b", 1), 1);
        assert_eq!(grown(&mut before, b"a", 5), 0);
        assert_eq!(grown(&mut before, b"a", 12), 7);
        assert_eq!(grown(&mut before, b"a", 11), 0);
        assert_eq!(grown(&mut before, b"a", 13), 1);
    }
}
