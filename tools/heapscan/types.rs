//! Rows that `--types` prints: the types of objects that the blocks of a process are.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::io::{self, Write};

use anyhow::{Context, Result, bail};
use memtools::heap::blocks::{Coverage, Heap};
use memtools::heap::image::Image;
use memtools::heap::names::pymalloc::{self, Pools};
use memtools::heap::names::{Names, RunningModules};
use memtools::heap::walk::Walked;
use memtools::print::output::{Output, Row};
use memtools::print::text;
use memtools::process::container::ProcessName;
use memtools::verdict::HeapAnalysis;
use serde::Serialize;

use crate::layout;

/// Upper limit of the smallest size class of unnamed blocks, in bytes.
const SMALLEST: u64 = 32;

/// Sums over all blocks of a process.
#[derive(Debug, Serialize)]
struct TypesRow {
    r#type: &'static str,
    #[serde(flatten)]
    process: ProcessName,
    paused_us: u64,
    coverage: &'static str,
    coverage_note: Option<String>,
    blocks: u64,
    size_bytes: u64,
    named_blocks: u64,
    named_bytes: u64,
    python_pools: u64,
    python_blocks: u64,
    python_pools_unread: u64,
    types: usize,
    types_shown: usize,
    names_cut: bool,
}

/// Blocks of one type, or unnamed ones of about one size.
#[derive(Debug, Clone, PartialEq, Serialize)]
struct TypeRow {
    r#type: &'static str,
    kind: &'static str,
    name: String,
    blocks: u64,
    size_bytes: u64,
    share_percent: f64,
    #[serde(skip)]
    first: bool,
}

/// Prints the sums over all blocks, including those of CPython's own allocator, and the `top` types with most bytes.
///
/// # Errors
/// If no blocks are known, or the process has exited: the names of its classes are in its memory.
pub(crate) fn print(
    walked: Walked,
    process: ProcessName,
    top: usize,
    output: &mut Output,
) -> Result<()> {
    let Walked { image, heap, .. } = walked;
    let modules = RunningModules::open(image.pid)
        .with_context(|| format!("failed to open the memory of process {}", image.pid))?;
    let (heap, pools) = pymalloc::with_pools(&image, heap);
    if let (Coverage::Unknown { why }, true) = (&heap.coverage, heap.blocks().is_empty()) {
        bail!("no blocks of process {} are known: {why}", image.pid);
    }
    let names = Names::of(&image, &heap, &modules);
    let rows = rows(&image, process, &heap, &pools, &names, top);
    print_rows(rows, output)
}

/// [`print`], of a heap that is judged, whose types are known.
///
/// # Errors
/// If the output cannot be written.
pub(crate) fn print_named(
    case: &HeapAnalysis<'_>,
    process: ProcessName,
    top: usize,
    output: &mut Output,
) -> Result<()> {
    let (image, heap) = (case.image(), case.heap());
    let rows = rows(image, process, heap, case.pools(), case.types(), top);
    print_rows(rows, output)
}

fn print_rows((all, types): (TypesRow, Vec<TypeRow>), output: &mut Output) -> Result<()> {
    output.row(&all)?;
    types.iter().try_for_each(|row| output.row(row))
}

/// Returns the sums over all blocks, and the `top` types with most bytes.
fn rows(
    image: &Image,
    process: ProcessName,
    heap: &Heap,
    pools: &Pools,
    names: &Names,
    top: usize,
) -> (TypesRow, Vec<TypeRow>) {
    let mut types = by_type(heap, names);
    let (coverage, coverage_note) = layout::describe_coverage(&heap.coverage);
    let named = |sum: fn(&TypeRow) -> u64| {
        let named = types.iter().filter(|row| row.kind != "unnamed");
        named.map(sum).sum()
    };
    let all = TypesRow {
        r#type: "types",
        process,
        paused_us: image.paused.as_micros() as u64,
        coverage,
        coverage_note,
        blocks: heap.blocks().len() as u64,
        size_bytes: heap.block_bytes(),
        named_blocks: named(|row| row.blocks),
        named_bytes: named(|row| row.size_bytes),
        python_pools: pools.pools,
        python_blocks: pools.blocks,
        python_pools_unread: pools.inconsistent,
        types: types.len(),
        types_shown: types.len().min(top),
        names_cut: names.cut,
    };
    types.truncate(top);
    types.iter_mut().take(1).for_each(|row| row.first = true);
    (all, types)
}

/// Returns the blocks of each type, those with most bytes first.
fn by_type(heap: &Heap, names: &Names) -> Vec<TypeRow> {
    let mut sums: BTreeMap<(Option<usize>, u64), (u64, u64)> = BTreeMap::new();
    for (number, block) in heap.blocks().iter().enumerate() {
        let key = match names.type_index(number) {
            Some(number) => (Some(number), 0),
            None => (None, size_class(block.size)),
        };
        let (blocks, bytes) = sums.entry(key).or_default();
        *blocks += 1;
        *bytes += block.size;
    }
    let all = heap.block_bytes().max(1) as f64;
    let row = |((number, limit), (blocks, size_bytes)): ((Option<usize>, u64), (u64, u64))| {
        let of = number.map(|number| &names.types()[number]);
        TypeRow {
            r#type: "block_type",
            kind: of.map_or("unnamed", |of| of.kind.name()),
            name: of.map_or_else(|| size_range(limit), |of| text::display_name(&of.name)),
            blocks,
            size_bytes,
            share_percent: (size_bytes as f64 / all * 1000.0).round() / 10.0,
            first: false,
        }
    };
    let mut rows: Vec<_> = sums.into_iter().map(row).collect();
    rows.sort_by_key(|row| (Reverse(row.size_bytes), Reverse(row.blocks)));
    rows
}

/// Returns the upper limit of a size's class. Limits are powers of two.
fn size_class(size: u64) -> u64 {
    size.max(SMALLEST)
        .checked_next_power_of_two()
        .unwrap_or(u64::MAX)
}

fn size_range(limit: u64) -> String {
    match limit {
        SMALLEST => format!("blocks of up to {SMALLEST} bytes"),
        _ => format!("blocks of {} to {limit} bytes", limit / 2 + 1),
    }
}

impl Row for TypesRow {
    fn text(&self, out: &mut dyn Write) -> io::Result<()> {
        let pause = self.paused_us as f64 / 1000.0;
        let ProcessName { pid, comm, .. } = &self.process;
        let inside = self.process.inside();
        writeln!(
            out,
            "types of blocks in {comm} (pid {pid}){inside}, paused for {pause:.1} ms"
        )?;
        let blocks = text::count_with_noun(self.blocks, "block");
        write!(
            out,
            "coverage: {}: {blocks}, {}",
            self.coverage,
            text::bytes(self.size_bytes)
        )?;
        match &self.coverage_note {
            Some(note) => writeln!(out, ": {note}")?,
            None => writeln!(out)?,
        }
        if self.python_pools > 0 {
            let (pools, blocks) = (self.python_pools, self.python_blocks);
            let (pools, blocks) = (
                text::count_with_noun(pools, "pool"),
                text::count_with_noun(blocks, "block"),
            );
            write!(out, "of these {blocks} in {pools} of CPython")?;
            match self.python_pools_unread {
                0 => writeln!(out)?,
                unread => writeln!(
                    out,
                    "; {} are inconsistent",
                    text::count_with_noun(unread, "pool")
                )?,
            }
        }
        let percent = |part: u64, all: u64| part as f64 / all.max(1) as f64 * 100.0;
        writeln!(
            out,
            "named: {:.1} % of the blocks, {:.1} % of the bytes; shown {} of {}",
            percent(self.named_blocks, self.blocks),
            percent(self.named_bytes, self.size_bytes),
            text::grouped(self.types_shown as u64),
            text::count_with_noun(self.types as u64, "type"),
        )?;
        if self.names_cut {
            writeln!(out, "names were too many: some blocks are unnamed for that")?;
        }
        Ok(())
    }
}

impl Row for TypeRow {
    fn text(&self, out: &mut dyn Write) -> io::Result<()> {
        if self.first {
            writeln!(
                out,
                "\n{:>12} {:>12} {:>7}  {:<9}  TYPE",
                "BYTES", "BLOCKS", "SHARE", "KIND"
            )?;
        }
        writeln!(
            out,
            "{:>12} {:>12} {:>6.1}%  {:<9}  {}",
            text::bytes(self.size_bytes),
            text::grouped(self.blocks),
            self.share_percent,
            self.kind,
            self.name
        )
    }
}

#[cfg(test)]
mod tests {
    use memtools::heap::blocks::Block;
    use memtools::heap::names::Modules;

    use super::*;

    struct NoModules;

    impl Modules for NoModules {
        fn read(&self, _: u64, _: &mut [u8]) -> bool {
            false
        }
    }

    #[test]
    fn unnamed_blocks_are_told_apart_by_size() {
        let sizes = [8, 24, 32, 33, 64, 65, u64::MAX >> 1];
        let blocks = (0x1000..).step_by(0x100).zip(sizes);
        let blocks = blocks.map(|(address, size)| Block { address, size });
        let heap = Heap::new(blocks.take(6).collect(), Coverage::Complete);
        let image = Image::default();
        let names = Names::of(&image, &heap, &NoModules);
        let process = ProcessName::default();
        let (all, types) = rows(&image, process, &heap, &Pools::default(), &names, 2);
        assert_eq!((all.blocks, all.size_bytes, all.named_blocks), (6, 226, 0));
        assert_eq!((all.types, all.types_shown), (3, 2));
        let rows = types
            .iter()
            .map(|row| (&row.name[..], row.blocks, row.size_bytes));
        let expected = [
            ("blocks of 33 to 64 bytes", 2, 97),
            ("blocks of 65 to 128 bytes", 1, 65),
        ];
        assert!(rows.eq(expected), "{types:?}");
        let shares: Vec<_> = types.iter().map(|row| row.share_percent).collect();
        assert_eq!(shares, [42.9, 28.8]);
        assert_eq!(size_class(u64::MAX), u64::MAX);
    }
}
