//! Rows that `--heap` prints of glibc's arenas, and of the sizes of their chunks.

use memtools::heap::glibc::usage::{HeapUsage, SizeClass};
use memtools::heap::glibc::{State, Walk};
use serde::Serialize;

use super::report::ChunkSum;

/// Memory of an arena, by use.
#[derive(Debug, Serialize)]
pub(super) struct ArenaRow {
    pub(super) address: String,
    pub(super) main: bool,
    pub(super) bytes: u64,
    pub(super) resident_bytes: u64,
    pub(super) in_use: ChunkSum,
    pub(super) free: ChunkSum,
    pub(super) top: ChunkSum,
}

/// Chunks of one size.
#[derive(Debug, Serialize)]
pub(super) struct ClassRow {
    pub(super) chunk_bytes: u64,
    pub(super) is_limit: bool,
    pub(super) in_use: ChunkSum,
    pub(super) free: ChunkSum,
}

/// Returns the rows of the arenas, those with most resident memory first.
pub(super) fn arenas(walk: &Walk, usage: &HeapUsage) -> Vec<ArenaRow> {
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
pub(super) fn classes(usage: &HeapUsage) -> Vec<ClassRow> {
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
