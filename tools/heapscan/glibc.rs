//! Rows that `--layout` prints of glibc's arenas, and of the sizes of their chunks.

use memtools::heap::glibc::usage::{HeapUsage, SizeClass};
use memtools::heap::glibc::{State, Walk};
use serde::Serialize;

use crate::layout::ChunkSum;

/// Memory of an arena, by use.
#[derive(Debug, Serialize)]
pub(crate) struct ArenaRow {
    pub(crate) address: String,
    pub(crate) main: bool,
    pub(crate) bytes: u64,
    pub(crate) resident_bytes: u64,
    pub(crate) in_use: ChunkSum,
    pub(crate) free: ChunkSum,
    pub(crate) top: ChunkSum,
}

/// Chunks of one size.
#[derive(Debug, Serialize)]
pub(crate) struct ClassRow {
    pub(crate) chunk_bytes: u64,
    pub(crate) is_limit: bool,
    pub(crate) in_use: ChunkSum,
    pub(crate) free: ChunkSum,
}

/// Returns the rows of the arenas, those with most resident memory first.
pub(crate) fn arenas(walk: &Walk, usage: &HeapUsage) -> Vec<ArenaRow> {
    let arenas = walk.arenas.iter().zip(&usage.arenas);
    let mut rows: Vec<_> = arenas
        .map(|(arena, usage)| ArenaRow {
            address: format!("{:#x}", arena.address),
            main: arena.main,
            bytes: usage.total.bytes,
            resident_bytes: usage.total.resident,
            in_use: usage.of(State::InUse).into(),
            free: usage.free().into(),
            top: usage.of(State::Top).into(),
        })
        .collect();
    rows.sort_by_key(|row| std::cmp::Reverse(row.resident_bytes));
    rows
}

/// Returns the rows of the chunk sizes, those with most bytes first.
pub(crate) fn classes(usage: &HeapUsage) -> Vec<ClassRow> {
    let row = |(&chunk_bytes, class): (&u64, &SizeClass)| ClassRow {
        chunk_bytes,
        is_limit: chunk_bytes > 1024,
        in_use: class.in_use.into(),
        free: class.free.into(),
    };
    let mut rows: Vec<_> = usage.sizes.iter().map(row).collect();
    rows.sort_by_key(|row| std::cmp::Reverse(row.in_use.bytes + row.free.bytes));
    rows
}
