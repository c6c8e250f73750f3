//! One image of a process, and what is found in it.

use std::collections::{HashMap, HashSet};

use anyhow::Result;
use memtools::heap::blocks::Heap;
use memtools::heap::capture::Request;
use memtools::heap::growth::follow::Followed;
use memtools::heap::growth::judge::Point;
use memtools::heap::image::Image;
use memtools::heap::kernel;
use memtools::heap::names::{Names, pymalloc};
use memtools::heap::reach::{Class, Reach};
use memtools::heap::walk::Walked;

use crate::verdict;

/// Process at one moment: its image, heap and types of blocks.
pub(super) struct HeapSnapshot {
    pub(super) image: Image,
    pub(super) heap: Heap,
    pub(super) names: Names,
    /// Bytes of the process that were in memory.
    resident: u64,
}

/// A block's address and size.
pub(super) type BlockId = (u64, u64);

impl HeapSnapshot {
    /// Takes an image. Returns None if its heap makes no sense, such as that of a process whose threads are in the
    /// middle of malloc most of the time.
    ///
    /// # Errors
    /// If no image can be taken, or the heap cannot be walked as a whole.
    pub(super) fn take(request: &Request) -> Result<Option<Self>> {
        let mut kept = kernel::words(request.process.pid());
        let walked = Walked::take(request)?;
        let resident = request.process.resident_bytes().unwrap_or(0);
        kept.extend(kernel::words(request.process.pid()));
        if walked.inconsistency().is_some() {
            return Ok(None);
        }
        verdict::expect_whole(&walked)?;
        let Walked {
            mut image, heap, ..
        } = walked;
        image.kernel_words = kept;
        let (heap, _) = pymalloc::with_pools(&image, heap);
        let names = verdict::types_of(request.process, &image, &heap);
        Ok(Some(Self {
            image,
            heap,
            names,
            resident,
        }))
    }

    /// Returns the sums of the image as a point, which is at `seconds`.
    pub(super) fn point(&self, seconds: f64) -> Point {
        let present = |range| self.image.resident_bytes(range);
        let regions = self.heap.regions.iter().cloned();
        let heap_resident: u64 = regions.map(present).sum();
        let blocks = self.heap.blocks();
        let live_resident: u64 = blocks.iter().map(|block| present(block.range())).sum();
        Point {
            seconds,
            blocks: blocks.len() as u64,
            live: self.heap.block_bytes(),
            heap_resident,
            free_resident: heap_resident.saturating_sub(live_resident),
            resident: self.resident,
        }
    }

    /// Finds what refers to the blocks.
    ///
    /// # Errors
    /// If there are too many blocks.
    pub(super) fn reach(&self) -> Result<Reach> {
        Reach::new(&self.image, &self.heap, &self.names.python)
    }

    /// Finds what holds the newest reachable block of each of these groups, by the groups' numbers: the root at which
    /// the block's chain begins.
    pub(super) fn holders(
        &self,
        reach: &Reach,
        followed: &[Followed],
        groups: &HashSet<u32>,
    ) -> HashMap<u32, String> {
        let mut newest: HashMap<u32, (u32, usize)> = HashMap::new();
        for (number, one) in followed.iter().enumerate() {
            let is_held = groups.contains(&one.group) && reach.class(number) > Class::Cycle;
            let known = newest.get(&one.group).map(|&(since, _)| since);
            if is_held && known.is_none_or(|since| since < one.since) {
                newest.insert(one.group, (one.since, number));
            }
        }
        let root = |number| reach.chain(number).1;
        let roots = newest.values().filter_map(|&(_, number)| root(number));
        let names = verdict::RootNames::of(&self.image, roots);
        let name = |number| names.variable(&self.image, root(number));
        newest
            .into_iter()
            .map(|(group, (_, number))| (group, name(number)))
            .collect()
    }
}

/// Returns the blocks that nothing refers to. Returns None if there are some, and the process has memory that is
/// protected from being read, which may refer to them.
///
/// # Errors
/// If the process's mappings cannot be read.
pub(super) fn lost(look: &HeapSnapshot, reach: &Reach) -> Result<Option<HashSet<BlockId>>> {
    let lost = verdict::lost_blocks(&look.heap, reach);
    let is_known = lost.is_empty() || verdict::protected_bytes(&look.image)? == 0;
    Ok(is_known.then_some(lost))
}
