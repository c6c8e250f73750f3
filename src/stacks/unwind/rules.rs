//! Unwind rules of a file's code, from its `.eh_frame`, as rows of eight bytes.
//!
//! `.eh_frame` has a program for each function. The program is run here once, and its rules for the stack pointer, the
//! frame pointer and the return address are stored for each range of addresses. `bpf/include/unwind_row.bpf.h` has the
//! format. A rule that no row can hold becomes a row that says so.

#[cfg_attr(target_arch = "aarch64", path = "aarch64.rs")]
#[cfg_attr(target_arch = "x86_64", path = "x86_64.rs")]
mod arch;
mod builder;

use std::fs::File;
use std::ops::Range;

use anyhow::{Result, ensure};
use builder::{Builder, word};
use gimli::{BaseAddresses, UnwindContext, UnwindExpression};

use crate::bpf::types::{self, unwind_kind as Kind};
use crate::code::eh_frame::{
    CHECK_EVERY, Fde, Functions, MAX_ADDRESS, Slice, code_segments, eh_frame,
};
use crate::code::elf::CodeSegment;
use crate::code::elf_file::{Elf, Source};
use crate::code::frame_at_call::{self, FrameAtCall};
use crate::code::go_functions;
use crate::code::limits::{self, Deadline};

type Expression = UnwindExpression<usize>;

/// Bytes of code that share an entry of the index, as a power of two; `UNWIND_PAGE_SHIFT`.
const PAGE_SHIFT: u32 = types::unwind_layout::UNWIND_PAGE_SHIFT.0;
/// Alignment of functions, in bytes: the padding between two functions is no code of its own.
const ALIGNMENT: u64 = 16;

/// The rows of one file.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Rules {
    /// Rows in the order of their addresses. Each is valid up to the next one.
    pub rows: Vec<u64>,
    /// Segments of code: the bytes of the file, and the address of the first of them.
    pub segments: Vec<(Range<u64>, u64)>,
}

impl Rules {
    /// Reads the rules in an ELF file. A file without unwind information has none.
    ///
    /// # Errors
    /// If the file is no ELF file, or its unwind information is malformed.
    pub fn of_file(file: &File) -> Result<Self> {
        Self::read(file)
    }

    /// Reads the rules in an ELF image that is in memory, such as the vdso. Where the vdso has no unwind information, its
    /// functions without a frame have rules all the same.
    ///
    /// # Errors
    /// If the image is no ELF image, or its unwind information is malformed.
    pub fn of_image(image: &[u8]) -> Result<Self> {
        let mut rules = Self::read(&image)?;
        if rules.rows.is_empty() {
            let file = Elf::read(&image)?.require_64_bit()?;
            for (function, rule) in arch::functions_without_frame(&file)? {
                add_function(&mut rules.rows, function, rule);
            }
        }
        Ok(rules)
    }

    fn read(source: &dyn Source) -> Result<Self> {
        let file = Elf::read(source)?.require_64_bit()?;
        let code = code_segments(&file, source.length()?)?;
        let segments = code
            .iter()
            .map(|segment| {
                let bytes = segment.file_offset..segment.file_offset + segment.size;
                (bytes, segment.address)
            })
            .collect();
        let Some((address, frames)) = eh_frame(&file)? else {
            return Ok(Self {
                segments,
                ..Self::default()
            });
        };
        let text = file.section(".text").map_or(0, |section| section.address);
        let bases = BaseAddresses::default()
            .set_eh_frame(address)
            .set_text(text);
        let addresses: Vec<_> = code.iter().map(CodeSegment::range).collect();
        let mut rows = rows(&frames, &bases, &addresses, file.deadline)?;
        for (function, rule) in between_stacks(&file)? {
            add_function(&mut rows, function, rule);
        }
        Ok(Self { rows, segments })
    }

    /// Replaces addresses by offsets in the file, by which BPF programs look rules up: a mapping says which bytes of
    /// its file it shows.
    ///
    /// # Errors
    /// If segments overlap in the file, or are beyond 4 GiB.
    pub(crate) fn by_file_offset(mut self) -> Result<Self> {
        self.segments.sort_unstable_by_key(|(bytes, _)| bytes.start);
        let overlap = self
            .segments
            .windows(2)
            .any(|pair| pair[0].0.end > pair[1].0.start);
        let end = self.segments.last().map_or(0, |(bytes, _)| bytes.end);
        ensure!(
            !overlap && end < MAX_ADDRESS,
            "its code is said to be where it cannot be"
        );
        if let [(bytes, start)] = &self.segments[..] {
            let shift = bytes.start.wrapping_sub(*start) << 32;
            for row in &mut self.rows {
                *row = row.wrapping_add(shift);
            }
        } else {
            self.rows = self
                .segments
                .iter()
                .flat_map(|segment| self.rows_of(segment))
                .collect();
        }
        for (bytes, start) in &mut self.segments {
            *start = bytes.start;
        }
        Ok(self)
    }

    /// Returns the rows of one of several segments, by offset in the file. No rule is valid after the segment's end.
    fn rows_of(&self, (bytes, start): &(Range<u64>, u64)) -> impl Iterator<Item = u64> {
        let end = start + (bytes.end - bytes.start);
        let first = self.rows.partition_point(|&row| address_of(row) < *start);
        let after = self.rows.partition_point(|&row| address_of(row) < end);
        let shift = bytes.start.wrapping_sub(*start) << 32;
        let none = bytes.end << 32 | u64::from(word(Kind::UNWIND_NO_RULE, 0, None));
        let here = self.rows[first..after].iter();
        here.map(move |row| row.wrapping_add(shift))
            .chain((first < after).then_some(none))
    }

    /// Returns the first page of code in [`Rules::pages`]: an address divided by 256.
    pub fn first_page(&self) -> u32 {
        self.rows.first().map_or(0, |&row| page_of(row))
    }

    /// Returns an index to the rows: for each page of code, the rows that are valid somewhere in the page.
    pub fn pages(&self) -> Pages<'_> {
        let after = self.rows.last().map_or(0, |&row| page_of(row) + 1);
        Pages {
            rows: &self.rows,
            left: self.first_page()..after,
            next: 0,
        }
    }
}

/// Iterator over the ranges of rows of consecutive pages of code; see [`Rules::pages`].
#[derive(Debug, Clone)]
pub struct Pages<'a> {
    rows: &'a [u64],
    left: Range<u32>,
    /// The first row that begins in the first remaining page, or later.
    next: usize,
}

impl Iterator for Pages<'_> {
    type Item = Range<u32>;

    fn next(&mut self) -> Option<Range<u32>> {
        let page = self.left.next()?;
        // The previous row is still valid where the page begins, unless a row begins there.
        let first = self.rows.get(self.next).map(|&row| address_of(row));
        let begins = first == Some(u64::from(page) << PAGE_SHIFT);
        let start = self.next - usize::from(!begins && self.next > 0);
        let here = self.rows[self.next..].iter();
        self.next += here.take_while(|&&row| page_of(row) == page).count();
        Some(start as u32..self.next as u32)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        self.left.size_hint()
    }
}

impl ExactSizeIterator for Pages<'_> {}

fn page_of(row: u64) -> u32 {
    (address_of(row) >> PAGE_SHIFT) as u32
}

/// Returns the address from which a row is valid.
pub fn address_of(row: u64) -> u64 {
    row >> 32
}

/// Functions of Go's runtime that go on on another stack and leave the frame pointer, which leads to the caller's
/// stack: from a goroutine's stack to the thread's to call C, and back when C calls Go.
const SWITCHES: [&str; 4] = [
    "runtime.asmcgocall.abi0",
    "runtime.asmcgocall",
    "runtime.cgocallback.abi0",
    "runtime.cgocallback",
];

/// The function by which Go's runtime goes on on the thread's stack. Its frame pointer leads to the caller only if it
/// has set it.
const TO_THREAD: [&str; 2] = ["runtime.systemstack.abi0", "runtime.systemstack"];

/// The function of Go's runtime that C calls to call Go. It saves the registers of C.
const FROM_C: &str = "crosscall2";

/// Bytes of a function's code that are read: more than [`FROM_C`] has before its call of Go.
const CODE_BYTES: u64 = 256;

/// Returns the rules for those functions of Go's runtime that are between stacks: Go's code has no unwind information,
/// and frame pointers alone do not lead through these functions.
fn between_stacks(file: &Elf<'_>) -> Result<Vec<(Range<u64>, u32)>> {
    let Some(switch) = arch::go_switch() else {
        return Ok(Vec::new());
    };
    let wanted = [&SWITCHES[..], &TO_THREAD, &[FROM_C]].concat();
    let mut rules = Vec::new();
    for (name, function) in go_functions::functions_named(file, &wanted)? {
        let Some(offset) = file.file_offset(function.start) else {
            continue;
        };
        let length = function.end.saturating_sub(function.start).min(CODE_BYTES);
        let code = || file.bytes(offset, length as usize);
        let rule = if name == FROM_C {
            FrameAtCall::of(&code()?).map(arch::rule_at_call)
        } else if TO_THREAD.contains(&name) && !frame_at_call::sets_frame_pointer(&code()?) {
            None
        } else {
            Some(switch)
        };
        rules.extend(rule.map(|rule| (function, rule)));
    }
    Ok(rules)
}

/// Adds a rule for a function to rows that have none for it.
fn add_function(rows: &mut Vec<u64>, function: Range<u64>, rule: u32) {
    let none = word(Kind::UNWIND_NO_RULE, 0, None);
    let at = rows.partition_point(|&row| address_of(row) <= function.start);
    let before = at.checked_sub(1).and_then(|before| rows.get(before));
    let is_free = before.is_none_or(|&row| row as u32 == none)
        && rows
            .get(at)
            .is_none_or(|&row| address_of(row) >= function.end);
    if !is_free || function.is_empty() || function.end >= MAX_ADDRESS {
        return;
    }
    let added = [(function.start, rule), (function.end, none)];
    let added = added.map(|(from, rule)| from << 32 | u64::from(rule));
    let replaced = before.is_some_and(|&row| address_of(row) == function.start);
    let ends_there = rows
        .get(at)
        .is_some_and(|&row| address_of(row) == function.end);
    let added = &added[..added.len() - usize::from(ends_there)];
    rows.splice(at - usize::from(replaced)..at, added.iter().copied());
}

/// Builds all rows of a file, ascending by address.
fn rows(
    frames: &[u8],
    bases: &BaseAddresses,
    code: &[Range<u64>],
    deadline: Deadline,
) -> Result<Vec<u64>> {
    let mut functions = Functions::new(frames, bases);
    let in_order = functions.in_order(code, deadline)?;
    let used = frames.len() + size_of_val(&*in_order);
    let mut builder = Builder {
        rows: Vec::with_capacity(frames.len() / 8),
        // Number of rows that fit into the memory that is left.
        max_rows: limits::MAX_MEMORY.saturating_sub(used) / size_of::<u64>(),
        section: functions.section,
    };
    let mut context = UnwindContext::new();
    let mut end = 0;
    let mut runs = 0;
    for (.., offset) in in_order {
        ensure!(
            builder.rows.len() <= builder.max_rows,
            "its .eh_frame has too many rules"
        );
        let function = functions.at(offset)?;
        let run = function.entry_len() + function.cie().entry_len();
        if (runs + run) / CHECK_EVERY > runs / CHECK_EVERY {
            deadline.check()?;
        }
        runs += run;
        if function.initial_address() < end {
            continue;
        }
        if function.initial_address() >= end + ALIGNMENT && end > 0 {
            builder.push(end, word(Kind::UNWIND_NO_RULE, 0, None));
        }
        builder.run(&function, bases, &mut context);
        end = function.end_address();
    }
    if end > 0 && end < MAX_ADDRESS {
        builder.push(end, word(Kind::UNWIND_NO_RULE, 0, None));
    }
    Ok(builder.rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_function_has_a_rule_where_there_is_none() {
        let none = word(Kind::UNWIND_NO_RULE, 0, None);
        let other = word(Kind::UNWIND_BY_SP, 1, None);
        let row = |address: u64, rule: u32| address << 32 | u64::from(rule);
        let switch = word(Kind::UNWIND_BY_SP, 7, None);
        let rows = vec![row(0x100, other), row(0x200, none), row(0x900, other)];
        let with = |function: Range<u64>| {
            let mut rows = rows.clone();
            add_function(&mut rows, function, switch);
            rows
        };
        let inserted = [row(0x300, switch), row(0x340, none)];
        assert_eq!(
            with(0x300..0x340),
            [&rows[..2], &inserted, &rows[2..]].concat()
        );
        assert_eq!(with(0x200..0x900), [rows[0], row(0x200, switch), rows[2]]);
        assert_eq!(with(0x40..0x80)[..2], [row(0x40, switch), row(0x80, none)]);
        // Code that has rules keeps them.
        assert_eq!(with(0x180..0x1c0), rows);
        assert_eq!(with(0x880..0x940), rows);
    }
}
