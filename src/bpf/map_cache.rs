//! Cache of map entries that BPF programs write once and then refer to by key, such as names.
//!
//! Each entry is read once. In long runs, entries that are not referred to any more are removed, so that the map does
//! not fill with old entries. A program can find an entry just before its removal, and refer to it just after that.
//! So a removed entry stays known here for another round.

use std::collections::HashMap;

use anyhow::{Context, Result};
use libbpf_rs::{MapCore, MapFlags};

/// Cache of the entries of one map, as values of type `V`.
pub struct EntryCache<'map, M, V> {
    map: &'map M,
    known: HashMap<Vec<u8>, Known<V>>,
    round: u64,
}

struct Known<V> {
    value: V,
    /// The round of the last lookup.
    asked_for: u64,
    removed: bool,
}

impl<'map, M: MapCore, V: Clone> EntryCache<'map, M, V> {
    /// Creates an empty cache for this map of the skeleton.
    pub fn new(map: &'map M) -> Self {
        Self {
            map,
            known: HashMap::new(),
            round: 0,
        }
    }

    /// Returns the entry with this key, parsed by `understand`; None if there is no such entry. `understand` returns
    /// None for an entry that is just being written.
    ///
    /// # Errors
    /// If the map cannot be read, or `understand` fails.
    pub fn get(
        &mut self,
        key: &[u8],
        understand: impl FnOnce(&[u8]) -> Result<Option<V>>,
    ) -> Result<Option<V>> {
        let round = self.round;
        if let Some(known) = self.known.get_mut(key) {
            known.asked_for = round;
            if !known.removed {
                return Ok(Some(known.value.clone()));
            }
        }
        let bytes = self.map.lookup(key, MapFlags::ANY);
        let bytes = bytes.context("failed to read an entry of a map")?;
        let Some(value) = bytes.map(|bytes| understand(&bytes)).transpose()?.flatten() else {
            return Ok(self.known.get(key).map(|known| known.value.clone()));
        };
        let known = Known {
            value: value.clone(),
            asked_for: round,
            removed: false,
        };
        self.known.insert(key.to_vec(), known);
        Ok(Some(value))
    }

    /// Ends a round: removes the entries that were not looked up in it.
    ///
    /// # Errors
    /// If an entry cannot be removed.
    pub fn end_round(&mut self) -> Result<()> {
        let (map, round) = (self.map, self.round);
        let mut failed = None;
        self.known.retain(|key, known| {
            if known.asked_for == round {
                return true;
            }
            if known.removed {
                return false;
            }
            known.removed = true;
            if let Err(error) = map.delete(key) {
                failed = Some(error);
            }
            true
        });
        self.round += 1;
        failed.map_or(Ok(()), |error| {
            Err(error).context("failed to remove an entry of a map")
        })
    }
}

#[cfg(test)]
mod tests {
    use libbpf_rs::{MapHandle, MapType};

    use super::*;
    use crate::bpf::map_create;

    /// Creates a map with the numbers below `count` as keys and values. Returns None where the test may not create
    /// maps.
    fn numbers(count: u64) -> Option<MapHandle> {
        let sizes = (size_of::<u64>(), size_of::<u64>());
        let map = map_create::create_for_test(MapType::Hash, sizes, 16, 0)?;
        for number in (0..count).map(u64::to_ne_bytes) {
            map.update(&number, &number, MapFlags::ANY).expect("room");
        }
        Some(map)
    }

    #[test]
    fn what_is_not_asked_for_is_removed_and_known_for_another_round() {
        let Some(map) = numbers(2) else { return };
        let mut recorded: EntryCache<'_, _, Vec<u8>> = EntryCache::new(&map);
        let get = |recorded: &mut EntryCache<'_, _, Vec<u8>>, number: u64| {
            let number = number.to_ne_bytes();
            recorded
                .get(&number, |bytes| Ok(Some(bytes.to_vec())))
                .expect("it is read")
        };
        let there = |number: u64| {
            let value = map.lookup(&number.to_ne_bytes(), MapFlags::ANY);
            value.expect("it is looked up").is_some()
        };

        assert!(get(&mut recorded, 0).is_some() && get(&mut recorded, 1).is_some());
        assert_eq!(get(&mut recorded, 2), None);
        recorded.end_round().expect("nothing fails");
        assert!(there(0) && there(1), "both were requested");
        assert!(get(&mut recorded, 1).is_some());
        recorded.end_round().expect("nothing fails");
        assert!(!there(0) && there(1));
        assert!(get(&mut recorded, 0).is_some(), "found just before");
        recorded.end_round().expect("it is not removed again");
        recorded.end_round().expect("nothing fails");
        assert_eq!(get(&mut recorded, 0), None);
        assert!(!there(1));

        // An entry that is added again is an ordinary entry.
        let one = 1u64.to_ne_bytes();
        map.update(&one, &one, MapFlags::ANY).expect("room");
        assert!(get(&mut recorded, 1).is_some());
        recorded.end_round().expect("nothing fails");
        assert!(there(1));
    }
}
