//! Rows that `--layout` prints of jemalloc's heap.

use std::io::{self, Write};

use memtools::heap::jemalloc::usage::{HeapUsage, Usage};
use memtools::print::text;
use serde::Serialize;

use crate::layout::{ChunkSum, is_fragmented, more, size_line};

/// Memory of jemalloc, by use.
#[derive(Debug, Serialize)]
pub(crate) struct Jemalloc {
    /// Allocated bytes, as jemalloc's own statistics count: blocks in threads' caches are included.
    allocated_bytes: u64,
    active_bytes: u64,
    parts: JemallocSums,
    arenas: Vec<ArenaRow>,
    size_classes: Vec<ClassRow>,
    #[serde(skip)]
    left_out: (usize, usize),
    #[serde(skip)]
    is_fragmented: bool,
    #[serde(skip)]
    free_resident: u64,
}

#[derive(Debug, Serialize)]
struct JemallocSums {
    in_use: ChunkSum,
    caches: ChunkSum,
    in_doubt: ChunkSum,
    slabs: ChunkSum,
    dirty: ChunkSum,
    muzzy: ChunkSum,
    retained: ChunkSum,
}

impl From<&Usage> for JemallocSums {
    fn from(usage: &Usage) -> Self {
        Self {
            in_use: usage.in_use.into(),
            caches: usage.cached.into(),
            in_doubt: usage.in_doubt.into(),
            slabs: usage.slabs.into(),
            dirty: usage.dirty.into(),
            muzzy: usage.muzzy.into(),
            retained: usage.retained.into(),
        }
    }
}

#[derive(Debug, Serialize)]
struct ArenaRow {
    number: u32,
    address: String,
    active_bytes: u64,
    parts: JemallocSums,
}

#[derive(Debug, Serialize)]
struct ClassRow {
    block_bytes: u64,
    in_use: ChunkSum,
    free: ChunkSum,
}

impl Jemalloc {
    /// Makes the sums of heaps with `heap_resident` resident bytes, and their `top` largest arenas and sizes.
    pub(crate) fn of(usage: &HeapUsage, heap_resident: u64, top: usize) -> Self {
        let arena = |(&(_, number), usage): (&(usize, u32), &Usage)| ArenaRow {
            number,
            address: format!("{:#x}", usage.address),
            active_bytes: usage.active.bytes,
            parts: usage.into(),
        };
        let mut arenas: Vec<_> = usage.arenas.iter().map(arena).collect();
        arenas.sort_by_key(|row| std::cmp::Reverse(row.active_bytes));
        let mut size_classes: Vec<_> = usage
            .classes
            .iter()
            .map(|(&block_bytes, class)| ClassRow {
                block_bytes,
                in_use: class.in_use.into(),
                free: class.free.into(),
            })
            .collect();
        size_classes.sort_by_key(|row| std::cmp::Reverse(row.in_use.bytes + row.free.bytes));
        let left_out = (
            arenas.len().saturating_sub(top),
            size_classes.len().saturating_sub(top),
        );
        arenas.truncate(top);
        size_classes.truncate(top);
        let free = usage.all.free_resident();
        Self {
            allocated_bytes: usage.all.allocated(),
            active_bytes: usage.all.active.bytes,
            parts: (&usage.all).into(),
            arenas,
            size_classes,
            left_out,
            is_fragmented: is_fragmented(free, heap_resident),
            free_resident: free,
        }
    }

    /// Returns the free bytes that are resident.
    pub(crate) fn free_resident(&self) -> u64 {
        self.free_resident
    }

    /// Whether at least half of the heap's resident memory, and not little, is free.
    pub(crate) fn is_fragmented(&self) -> bool {
        self.is_fragmented
    }

    pub(crate) fn text(&self, out: &mut dyn Write) -> io::Result<()> {
        let parts = &self.parts;
        parts.in_use.text(out, "  in use")?;
        parts.caches.text(out, "  free in threads' caches")?;
        if parts.in_doubt.count > 0 {
            parts.in_doubt.text(out, "  in use or in these")?;
        }
        for (what, part) in [
            ("  free in slabs", &parts.slabs),
            ("  free pages, dirty", &parts.dirty),
            ("  free pages, muzzy", &parts.muzzy),
            ("  free addresses, retained", &parts.retained),
        ] {
            part.text(out, what)?;
        }
        Ok(())
    }

    pub(crate) fn tables(&self, out: &mut dyn Write) -> io::Result<()> {
        let bytes = text::bytes;
        writeln!(
            out,
            "\n{:>12} {:>12} {:>12} {:>12}  ARENA OF JEMALLOC",
            "ACTIVE", "IN USE", "FREE IN IT", "DIRTY"
        )?;
        for arena in &self.arenas {
            writeln!(
                out,
                "{:>12} {:>12} {:>12} {:>12}  {} at {}",
                bytes(arena.active_bytes),
                bytes(arena.parts.in_use.bytes),
                bytes(arena.parts.slabs.bytes + arena.parts.caches.bytes),
                bytes(arena.parts.dirty.bytes),
                arena.number,
                arena.address
            )?;
        }
        more(out, self.left_out.0, "arena")?;
        writeln!(
            out,
            "\n{:>12} {:>12} {:>12} {:>12}  BLOCK SIZE",
            "IN USE", "BLOCKS", "FREE", "BLOCKS"
        )?;
        for class in &self.size_classes {
            size_line(out, &class.in_use, &class.free, class.block_bytes)?;
        }
        more(out, self.left_out.1, "size")?;
        if self.is_fragmented {
            let free = bytes(self.free_resident);
            writeln!(
                out,
                "\nfragmentation, not a leak: {free} of the heap are free"
            )?;
        }
        Ok(())
    }
}
