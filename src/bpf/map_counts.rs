//! Counts by key, which BPF programs add to (`bpf/include/count.bpf.h`), read as the counts since the last read.

use std::marker::PhantomData;
use std::os::fd::AsRawFd;

use anyhow::{Context, Result};
use libbpf_rs::{MapCore, MapFlags, MapHandle, MapType};
use plain::Plain;

use crate::bpf::map_batch;
use crate::bpf::map_create;
use crate::bpf::types;

/// The counts of one kind: values `V` by keys `K`.
pub struct Counts<'map, M, K, V> {
    /// Array of maps that holds the map in use. It is empty until the first call of [`Counts::take`]: until then the
    /// first of `maps` is in use.
    holder: &'map M,
    /// BPF programs count in the first map. The second map is empty.
    maps: [Counted<'map, M>; 2],
    types: PhantomData<(K, V)>,
}

/// A map of the skeleton, or a larger map that replaces it.
enum Counted<'map, M> {
    Skeleton(&'map M),
    Made(MapHandle),
}

impl<M: MapCore> Counted<'_, M> {
    fn map(&self) -> &dyn MapCore {
        match self {
            Self::Skeleton(map) => *map,
            Self::Made(map) => map,
        }
    }
}

impl<'map, M: MapCore, K: Plain + Copy, V: Plain + Copy> Counts<'map, M, K, V> {
    /// Creates a reader of the skeleton's maps `name`, `name_a` and `name_b`.
    pub fn new(holder: &'map M, a: &'map M, b: &'map M) -> Self {
        Self {
            holder,
            maps: [Counted::Skeleton(a), Counted::Skeleton(b)],
            types: PhantomData,
        }
    }

    /// Returns the counts since the last call, and removes them from the kernel's map.
    ///
    /// # Errors
    /// If a map cannot be read, emptied or exchanged.
    pub fn take(&mut self) -> Result<Vec<(K, V)>> {
        self.maps.swap(0, 1);
        let [counted_in, full] = self.maps.each_ref().map(Counted::map);
        // The kernel waits for a grace period in this update. After that no program counts in the other map any more.
        self.holder
            .update(
                &0u32.to_ne_bytes(),
                &counted_in.as_fd().as_raw_fd().to_ne_bytes(),
                MapFlags::ANY,
            )
            .context("failed to exchange the maps of counts")?;
        let mut counts = Vec::new();
        map_batch::drain(full, |key, value| {
            counts.push((*types::view(key)?, *types::view(value)?));
            Ok(())
        })?;
        Ok(counts)
    }

    /// Returns the capacity of the map in use, in keys.
    pub fn entries(&self) -> u32 {
        self.maps[0].map().max_entries()
    }

    /// Returns the capacity, in keys, of the map that the next call of [`Counts::take`] puts into use.
    pub(crate) fn next_entries(&self) -> u32 {
        self.maps[1].map().max_entries()
    }

    /// Makes the next call of [`Counts::take`] put a map of at least `entries` keys into use. Works only for maps
    /// that the BPF side declares by the sizes of keys and values alone (`COUNTS_OF_SIZES`).
    ///
    /// # Errors
    /// If there is no memory for a larger map.
    pub(crate) fn enlarge(&mut self, entries: u32) -> Result<()> {
        let [_, empty] = &mut self.maps;
        if empty.map().max_entries() < entries {
            let sizes = (size_of::<K>(), size_of::<V>());
            let map = map_create::create(MapType::Hash, "counts", sizes, entries, 0)
                .context("not enough memory for more counts")?;
            *empty = Counted::Made(map);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    /// Counts as a BPF program does: in the map that `holder` holds.
    fn count(holder: &MapHandle, key: u32, value: u64) {
        let id = holder.lookup(&0u32.to_ne_bytes(), MapFlags::ANY);
        let id = id.expect("a lookup").expect("a map");
        let map = MapHandle::from_map_id(u32::from_ne_bytes(id.try_into().expect("4 bytes")));
        map.expect("it lives")
            .update(&key.to_ne_bytes(), &value.to_ne_bytes(), MapFlags::ANY)
            .expect("there is room");
    }

    /// Creates the holder and its two maps, of two entries each.
    fn maps() -> Option<[MapHandle; 3]> {
        let side = || map_create::create_for_test(MapType::Hash, (4, 8), 2, 0);
        let (a, b) = (side()?, side()?);
        let holder = map_create::create_array_of(&a, "counts", 1).expect("a map of maps");
        let first = a.as_fd().as_raw_fd().to_ne_bytes();
        holder
            .update(&0u32.to_ne_bytes(), &first, MapFlags::ANY)
            .expect("an entry");
        Some([holder, a, b])
    }

    #[test]
    fn each_round_has_its_own_counts() {
        let Some([holder, a, b]) = maps() else { return };
        let mut counts: Counts<'_, _, u32, u64> = Counts::new(&holder, &a, &b);
        for round in 1..7u64 {
            count(&holder, 3, round);
            count(&holder, 5, 1000 * round);
            let mut taken = counts.take().expect("counts");
            taken.sort_unstable();
            assert_eq!(taken, [(3, round), (5, 1000 * round)]);
        }
        assert_eq!(counts.take().expect("counts"), []);
    }

    #[test]
    fn a_larger_map_is_counted_in_from_the_next_round_on() {
        let Some([holder, a, b]) = maps() else { return };
        let mut counts: Counts<'_, _, u32, u64> = Counts::new(&holder, &a, &b);
        counts.enlarge(7).expect("memory");
        assert_eq!((counts.entries(), counts.next_entries()), (2, 7));
        count(&holder, 1, 1);
        assert_eq!(counts.take().expect("counts"), [(1, 1)]);
        assert_eq!((counts.entries(), counts.next_entries()), (7, 2));
        (0..7).for_each(|key| count(&holder, key, 11));
        assert_eq!(counts.take().expect("counts").len(), 7);
        counts.enlarge(2).expect("no memory is needed");
        assert_eq!(counts.next_entries(), 7);
    }
}
