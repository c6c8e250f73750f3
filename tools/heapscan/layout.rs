//! Row of `--layout`: where the memory is.

use std::collections::HashSet;
use std::fmt;
use std::io::{self, Write};

use memtools::heap::blocks::{Coverage, Heap, Sum};
use memtools::heap::glibc::usage::HeapUsage;
use memtools::heap::glibc::{State, Walk, trim};
use memtools::heap::image::Image;
use memtools::heap::runtimes::Runtime;
use memtools::heap::walk::Walked;
use memtools::print::output::Row;
use memtools::print::text;
use memtools::process::container::ProcessName;
use memtools::process::smaps::MappedMemory;
use serde::Serialize;

use crate::glibc::{self, ArenaRow, ClassRow};
use crate::jemalloc::Jemalloc;

/// Bytes of free memory below which a heap does not count as fragmented.
const MIN_FREE_BYTES: u64 = 4 << 20;

/// Memory of a process, by use.
#[derive(Debug, Serialize)]
pub(crate) struct HeapRow {
    r#type: &'static str,
    #[serde(flatten)]
    process: ProcessName,
    paused_us: u64,
    copied_bytes: u64,
    unread_bytes: u64,
    allocators: Vec<AllocatorRow>,
    coverage: &'static str,
    coverage_note: Option<String>,
    resident_bytes: u64,
    heap_bytes: u64,
    heap_resident_bytes: u64,
    blocks: u64,
    block_bytes: u64,
    heap: Option<HeapSums>,
    jemalloc: Option<Jemalloc>,
    stacks: MappedSum,
    /// Private memory of a runtime with a heap of its own.
    runtime_heap: MappedSum,
    other_private: MappedSum,
    shared: MappedSum,
    files: MappedSum,
    trim_bytes: Option<u64>,
    verdict: &'static str,
    arenas: Vec<ArenaRow>,
    size_classes: Vec<ClassRow>,
    #[serde(skip)]
    left_out: (usize, usize),
    #[serde(skip)]
    runtime: Option<Runtime>,
}

#[derive(Debug, Serialize)]
struct AllocatorRow {
    name: String,
    file: String,
}

/// Mappings of one kind.
#[derive(Debug, Default, Serialize)]
struct MappedSum {
    mapped_bytes: u64,
    resident_bytes: u64,
}

/// Chunks of one kind.
#[derive(Debug, Serialize)]
pub(crate) struct ChunkSum {
    pub(crate) count: u64,
    pub(crate) bytes: u64,
    resident_bytes: u64,
}

impl ChunkSum {
    pub(crate) fn text(&self, out: &mut dyn Write, what: &str) -> io::Result<()> {
        let (resident, bytes) = (text::bytes(self.resident_bytes), text::bytes(self.bytes));
        line(out, &resident, &bytes, &text::grouped(self.count), what)
    }
}

impl From<Sum> for ChunkSum {
    fn from(sum: Sum) -> Self {
        Self {
            count: sum.count,
            bytes: sum.bytes,
            resident_bytes: sum.resident,
        }
    }
}

/// Parts of glibc's heap.
#[derive(Debug, Serialize)]
struct HeapSums {
    in_use: ChunkSum,
    mmapped: ChunkSum,
    bins: ChunkSum,
    fastbins: ChunkSum,
    tcaches: ChunkSum,
    tops: ChunkSum,
    overhead_bytes: u64,
    /// Number of blocks of other allocators of the process, and their bytes.
    other_blocks: u64,
    other_block_bytes: u64,
}

impl HeapRow {
    /// Adds up the walked heap, and the resident memory of each mapping, which the kernel counts. Lists the `top`
    /// largest parts.
    pub(crate) fn of(
        walked: &Walked,
        mappings: &[MappedMemory],
        process: ProcessName,
        top: usize,
    ) -> Self {
        let Walked {
            image,
            heap,
            glibc,
            jemalloc,
            ..
        } = walked;
        let (coverage, coverage_note) = describe_coverage(&heap.coverage);
        let usage = glibc
            .as_ref()
            .map(|walk| (walk, HeapUsage::of(image, walk)));
        let regions = heap.regions.iter();
        let heap_bytes = regions.clone().map(|range| range.end - range.start).sum();
        let heap_resident_bytes = regions
            .map(|range| image.resident_bytes(range.clone()))
            .sum();
        let mut row = Self {
            r#type: "layout",
            process,
            paused_us: image.paused.as_micros() as u64,
            copied_bytes: image.copied_bytes(),
            unread_bytes: image.unread,
            allocators: heap
                .allocators
                .iter()
                .map(|one| AllocatorRow {
                    name: one.name.clone(),
                    file: text::escape_bytes(&one.file),
                })
                .collect(),
            coverage,
            coverage_note,
            resident_bytes: 0,
            heap_bytes,
            heap_resident_bytes,
            blocks: heap.blocks().len() as u64,
            block_bytes: heap.block_bytes(),
            heap: usage
                .as_ref()
                .map(|(walk, usage)| HeapSums::of(walk, usage, heap)),
            jemalloc: jemalloc
                .as_ref()
                .map(|walk| Jemalloc::of(&walk.usage(image), heap_resident_bytes, top)),
            stacks: MappedSum::default(),
            runtime_heap: MappedSum::default(),
            other_private: MappedSum::default(),
            shared: MappedSum::default(),
            files: MappedSum::default(),
            trim_bytes: usage.as_ref().map(|(walk, _)| trim::returned(image, walk)),
            verdict: "",
            arenas: Vec::new(),
            size_classes: Vec::new(),
            left_out: (0, 0),
            runtime: Runtime::find(&image.areas),
        };
        row.add_mappings(image, mappings);
        if let Some(jemalloc) = &row.jemalloc {
            row.verdict = verdict(jemalloc.is_fragmented());
        }
        if let Some((walk, usage)) = &usage {
            if row.verdict != "fragmentation" {
                let all = &usage.all;
                row.verdict = verdict(is_fragmented(all.free().resident, all.total.resident));
            }
            row.list(walk, usage, top);
        }
        row
    }

    /// Lists the `top` largest arenas and sizes.
    fn list(&mut self, walk: &Walk, usage: &HeapUsage, top: usize) {
        self.arenas = glibc::arenas(walk, usage);
        self.size_classes = glibc::classes(usage);
        let (arenas, classes) = (self.arenas.len(), self.size_classes.len());
        self.arenas.truncate(top);
        self.size_classes.truncate(top);
        self.left_out = (
            arenas - self.arenas.len(),
            classes - self.size_classes.len(),
        );
    }

    /// Adds each mapping to the sum of its kind. The heap is subtracted from the other private memory, which includes
    /// it.
    fn add_mappings(&mut self, image: &Image, mappings: &[MappedMemory]) {
        let stacks: HashSet<u64> = image
            .threads
            .iter()
            .filter_map(|thread| Some(image.area(thread.stack_pointer)?.mapping.range.start))
            .collect();
        for one in mappings {
            let (mapping, resident) = (&one.mapping, one.resident + one.hugetlb);
            let area = image.area(mapping.range.start);
            let shared = area.is_some_and(|area| area.shared);
            let place = if stacks.contains(&mapping.range.start) {
                &mut self.stacks
            } else if shared {
                &mut self.shared
            } else if mapping.inode == 0 && self.runtime.is_some() {
                &mut self.runtime_heap
            } else if mapping.inode == 0 {
                &mut self.other_private
            } else {
                &mut self.files
            };
            place.mapped_bytes += mapping.range.end - mapping.range.start;
            place.resident_bytes += resident;
            self.resident_bytes += resident;
        }
        let other = if self.runtime.is_some() {
            &mut self.runtime_heap
        } else {
            &mut self.other_private
        };
        other.mapped_bytes = other.mapped_bytes.saturating_sub(self.heap_bytes);
        other.resident_bytes = other
            .resident_bytes
            .saturating_sub(self.heap_resident_bytes);
    }
}

/// Amounts of a process's resident memory, in bytes.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Resident {
    pub(crate) all: u64,
    /// Heap, and its free part.
    pub(crate) heap: u64,
    pub(crate) heap_free: u64,
    /// Private memory of a runtime with a heap of its own.
    pub(crate) runtime: u64,
    pub(crate) other_private: u64,
    pub(crate) stacks: u64,
    pub(crate) shared: u64,
    pub(crate) files: u64,
}

impl HeapRow {
    /// Returns the amounts of resident memory.
    pub(crate) fn resident(&self) -> Resident {
        let parts = self.heap.iter().flat_map(HeapSums::free);
        let free: u64 = parts.map(|part| part.resident_bytes).sum();
        let of_jemalloc = self.jemalloc.as_ref().map_or(0, Jemalloc::free_resident);
        Resident {
            all: self.resident_bytes,
            heap: self.heap_resident_bytes,
            heap_free: (free + of_jemalloc).min(self.heap_resident_bytes),
            runtime: self.runtime_heap.resident_bytes,
            other_private: self.other_private.resident_bytes,
            stacks: self.stacks.resident_bytes,
            shared: self.shared.resident_bytes,
            files: self.files.resident_bytes,
        }
    }

    /// Returns the bytes that malloc_trim(0) would return. None without glibc's heap.
    pub(crate) fn trim_bytes(&self) -> Option<u64> {
        self.trim_bytes
    }

    /// Returns the runtime with a heap of its own.
    pub(crate) fn runtime(&self) -> Option<Runtime> {
        self.runtime
    }

    /// Returns the name of the process.
    pub(crate) fn process(&self) -> &ProcessName {
        &self.process
    }

    /// Returns the bytes of the blocks, without the blocks of CPython's own allocator.
    pub(crate) fn block_bytes(&self) -> u64 {
        self.block_bytes
    }

    /// Whether the memory was copied. Otherwise the row has what the kernel counts.
    pub(crate) fn is_copied(&self) -> bool {
        self.copied_bytes > 0
    }

    /// Returns how long the process was stopped, in microseconds.
    pub(crate) fn paused_us(&self) -> u64 {
        self.paused_us
    }
}

/// Returns how much of the heap was walked, and why not all of it.
pub(crate) fn describe_coverage(coverage: &Coverage) -> (&'static str, Option<String>) {
    match coverage {
        Coverage::Complete => ("complete", None),
        Coverage::Incomplete { why, .. } => ("incomplete", Some(why.clone())),
        Coverage::Unknown { why } => ("unknown", Some(why.clone())),
    }
}

impl HeapSums {
    fn of(walk: &Walk, usage: &HeapUsage, heap: &Heap) -> Self {
        let all = |state| ChunkSum::from(usage.all.of(state));
        let in_use = walk
            .chunks
            .iter()
            .filter(|chunk| chunk.state == State::InUse);
        let block_bytes = in_use.map(|chunk| walk.usable(chunk)).sum();
        Self {
            in_use: all(State::InUse),
            mmapped: usage.mmapped.total.into(),
            bins: all(State::Bin),
            fastbins: all(State::Fastbin),
            tcaches: all(State::Tcache),
            tops: all(State::Top),
            overhead_bytes: usage.overhead(block_bytes),
            other_blocks: (heap.blocks().len() as u64)
                .saturating_sub(usage.all.of(State::InUse).count),
            other_block_bytes: heap.block_bytes().saturating_sub(block_bytes),
        }
    }
}

/// Whether at least half of a heap's resident memory, and not little, is free.
pub(crate) fn is_fragmented(free: u64, resident: u64) -> bool {
    free >= MIN_FREE_BYTES && free * 2 >= resident
}

/// Returns the cause of the heap's size, as a word for programs.
pub(crate) fn verdict(is_fragmented: bool) -> &'static str {
    if is_fragmented {
        "fragmentation"
    } else {
        "in_use"
    }
}

/// Writes a line of a table of sizes, for the blocks or chunks of one size.
pub(crate) fn size_line(
    out: &mut dyn Write,
    in_use: &ChunkSum,
    free: &ChunkSum,
    size: impl fmt::Display,
) -> io::Result<()> {
    writeln!(
        out,
        "{:>12} {:>12} {:>12} {:>12}  {size}",
        text::bytes(in_use.bytes),
        text::grouped(in_use.count),
        text::bytes(free.bytes),
        text::grouped(free.count),
    )
}

impl Row for HeapRow {
    fn text(&self, out: &mut dyn Write) -> io::Result<()> {
        self.head(out)?;
        let bytes = text::bytes;
        writeln!(
            out,
            "\n{:>12} {:>12} {:>12}  WHAT",
            "RESIDENT", "BYTES", "COUNT"
        )?;
        let (resident, all) = (bytes(self.heap_resident_bytes), bytes(self.heap_bytes));
        // Nothing is known of a heap that was not walked.
        let is_unknown = self.coverage == "unknown" && self.blocks == 0;
        if is_unknown {
            line(out, "?", "?", "?", "heap")?;
        } else {
            line(out, &resident, &all, "", "heap")?;
        }
        match &self.heap {
            Some(heap) => heap.text(out)?,
            None if self.jemalloc.is_some() || is_unknown => {}
            None => {
                let count = text::grouped(self.blocks);
                line(out, "", &bytes(self.block_bytes), &count, "  in use")?;
            }
        }
        if let Some(jemalloc) = &self.jemalloc {
            if self.heap.is_some() {
                writeln!(out, "{:>40}of them by jemalloc", "")?;
            }
            jemalloc.text(out)?;
        }
        for (what, place) in [
            ("stacks", &self.stacks),
            (self.runtime.map_or("", Runtime::heap), &self.runtime_heap),
            ("other private memory", &self.other_private),
            ("shared memory", &self.shared),
            ("files", &self.files),
        ] {
            if what.is_empty() {
                continue;
            }
            line(
                out,
                &bytes(place.resident_bytes),
                &bytes(place.mapped_bytes),
                "",
                what,
            )?;
        }
        line(
            out,
            &bytes(self.resident_bytes),
            "",
            "",
            "total resident (RSS)",
        )?;
        self.parts(out)?;
        if let Some(runtime) = self.runtime {
            let tool = runtime.tool(self.process.pid);
            writeln!(
                out,
                "\nthe objects of {} are shown by another tool: {tool}",
                runtime.heap()
            )?;
        }
        self.conclusion(out)
    }
}

impl HeapRow {
    fn head(&self, out: &mut dyn Write) -> io::Result<()> {
        let bytes = text::bytes;
        let ProcessName { pid, comm, .. } = &self.process;
        let inside = self.process.inside();
        let pause = self.paused_us as f64 / 1000.0;
        writeln!(
            out,
            "heap of {comm} (pid {pid}){inside}, paused for {pause:.1} ms; {} copied",
            bytes(self.copied_bytes)
        )?;
        for one in &self.allocators {
            writeln!(out, "{} in {}", one.name, one.file)?;
        }
        match (&self.coverage_note, &self.heap) {
            (Some(note), _) => writeln!(out, "coverage: {}: {note}", self.coverage)?,
            (None, Some(heap)) => writeln!(
                out,
                "coverage: complete: {}, {}, {}",
                text::count_with_noun(self.blocks, "block"),
                text::count_with_noun((self.arenas.len() + self.left_out.0) as u64, "arena"),
                text::count_with_noun(heap.mmapped.count, "mmapped chunk"),
            )?,
            (None, None) => {
                let blocks = text::count_with_noun(self.blocks, "block");
                writeln!(out, "coverage: {}: {blocks}", self.coverage)?
            }
        }
        if self.unread_bytes > 0 {
            writeln!(out, "{} could not be read", bytes(self.unread_bytes))?;
        }
        Ok(())
    }

    fn parts(&self, out: &mut dyn Write) -> io::Result<()> {
        let bytes = text::bytes;
        if !self.arenas.is_empty() {
            writeln!(
                out,
                "\n{:>12} {:>12} {:>12} {:>12}  ARENA",
                "RESIDENT", "IN USE", "FREE", "TOP CHUNK"
            )?;
        }
        for arena in &self.arenas {
            let main = if arena.main { " (main)" } else { "" };
            writeln!(
                out,
                "{:>12} {:>12} {:>12} {:>12}  {}{main}",
                bytes(arena.resident_bytes),
                bytes(arena.in_use.bytes),
                bytes(arena.free.bytes),
                bytes(arena.top.bytes),
                arena.address
            )?;
        }
        more(out, self.left_out.0, "arena")?;
        if !self.size_classes.is_empty() {
            writeln!(
                out,
                "\n{:>12} {:>12} {:>12} {:>12}  CHUNK SIZE",
                "IN USE", "CHUNKS", "FREE", "CHUNKS"
            )?;
        }
        for class in &self.size_classes {
            let up_to = if class.is_limit { "up to " } else { "" };
            let size = format_args!("{up_to}{}", class.chunk_bytes);
            size_line(out, &class.in_use, &class.free, size)?;
        }
        more(out, self.left_out.1, "size")?;
        match &self.jemalloc {
            Some(jemalloc) => jemalloc.tables(out),
            None => Ok(()),
        }
    }

    fn conclusion(&self, out: &mut dyn Write) -> io::Result<()> {
        let (Some(heap), Some(trim)) = (&self.heap, self.trim_bytes) else {
            return Ok(());
        };
        writeln!(out)?;
        let by_jemalloc = self.jemalloc.as_ref().is_some_and(Jemalloc::is_fragmented);
        if self.verdict == "fragmentation" && !by_jemalloc {
            let free: u64 = heap.free().map(|part| part.resident_bytes).sum();
            writeln!(
                out,
                "fragmentation, not a leak: {} of the heap's {} are free",
                text::bytes(free),
                text::bytes(self.heap_resident_bytes)
            )?;
        }
        writeln!(out, "malloc_trim(0) would return {}", text::bytes(trim))
    }
}

impl HeapSums {
    /// Returns the free parts.
    fn free(&self) -> impl Iterator<Item = &ChunkSum> {
        [&self.bins, &self.fastbins, &self.tcaches, &self.tops].into_iter()
    }

    fn text(&self, out: &mut dyn Write) -> io::Result<()> {
        let bytes = text::bytes;
        let overhead = bytes(self.overhead_bytes);
        for (what, part) in [
            ("  in use", &self.in_use),
            ("    as own mappings", &self.mmapped),
            ("  free in bins", &self.bins),
            ("  free in fastbins", &self.fastbins),
            ("  free in tcaches", &self.tcaches),
            ("  free at the tops of arenas", &self.tops),
        ] {
            part.text(out, what)?;
        }
        line(out, "", &overhead, "", "  allocator overhead")?;
        if self.other_blocks > 0 {
            let (bytes, count) = (
                bytes(self.other_block_bytes),
                text::grouped(self.other_blocks),
            );
            line(out, "", &bytes, &count, "  in use, of other allocators")?;
        }
        Ok(())
    }
}

pub(crate) fn line(
    out: &mut dyn Write,
    resident: &str,
    bytes: &str,
    count: &str,
    what: &str,
) -> io::Result<()> {
    writeln!(out, "{resident:>12} {bytes:>12} {count:>12}  {what}")
}

pub(crate) fn more(out: &mut dyn Write, left_out: usize, thing: &str) -> io::Result<()> {
    if left_out == 0 {
        return Ok(());
    }
    let things = text::count_with_noun(left_out as u64, thing);
    writeln!(out, "{:>12} {things} more (-T shows more)", "...")
}
