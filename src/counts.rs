//! Counts by key, which `bpf/include/count.bpf.h` adds to, as what has come since the last look.

use std::marker::PhantomData;
use std::os::fd::AsRawFd;

use anyhow::{Context, Result};
use libbpf_rs::{MapCore, MapFlags};
use plain::Plain;

use crate::{entries, shared};

/// The counts of one kind: values `V` by keys `K`.
pub struct Counts<'map, M, K, V> {
    /// Empty until the first call of [`Counts::take`], which stands for the first of `maps`.
    holder: &'map M,
    /// The first is counted in, the second is empty.
    maps: [&'map M; 2],
    types: PhantomData<(K, V)>,
}

impl<'map, M: MapCore, K: Plain + Copy, V: Plain + Copy> Counts<'map, M, K, V> {
    /// The counts of these maps of the skeleton, `name`, `name_a` and `name_b`.
    pub fn new(holder: &'map M, a: &'map M, b: &'map M) -> Self {
        Self {
            holder,
            maps: [a, b],
            types: PhantomData,
        }
    }

    /// What was counted since the last call, and from now on is forgotten.
    pub fn take(&mut self) -> Result<Vec<(K, V)>> {
        self.maps.swap(0, 1);
        let [counted_in, full] = self.maps;
        // It takes a grace period: then nobody counts in the other any more.
        self.holder
            .update(
                &0u32.to_ne_bytes(),
                &counted_in.as_fd().as_raw_fd().to_ne_bytes(),
                MapFlags::ANY,
            )
            .context("failed to exchange the maps of counts")?;
        let mut counts = Vec::new();
        entries::take(full, |key, value| {
            counts.push((*shared::view(key)?, *shared::view(value)?));
            Ok(())
        })?;
        Ok(counts)
    }
}
