//! The rules by which code is unwound, from a file's `.eh_frame`, as rows of eight bytes.
//!
//! `.eh_frame` is a program for each function; it is run here once, and what it says of the stack
//! pointer, the frame pointer and the return address is written down for each range of addresses.
//! `bpf/include/unwind.bpf.h` has the format. What no row can hold becomes a row that says so.

use std::collections::HashMap;
use std::fs::File;
use std::ops::Range;

use anyhow::{Context, Result, bail, ensure};
use gimli::{
    BaseAddresses, CfaRule, CieOrFde, CommonInformationEntry, EhFrame, EhFrameHdr, EhFrameOffset,
    EndianSlice, FrameDescriptionEntry, LittleEndian, Operation, Register, RegisterRule,
    UnwindContext, UnwindExpression, UnwindSection, X86_64,
};
use object::elf;

use crate::bpf::types::{self, unwind_frame_pointer as FramePointer, unwind_kind as Kind};
use crate::code::elf::CodeSegment;
use crate::code::elf_file::{Elf, Source};
use crate::code::limits::{self, Deadline};

type Slice<'a> = EndianSlice<'a, LittleEndian>;
type Fde<'a> = FrameDescriptionEntry<Slice<'a>>;
type Expression = UnwindExpression<usize>;

/// Addresses are 32 bits of a row.
const MAX_ADDRESS: u64 = 1 << 32;
/// Bytes of code that share an entry of the index, as a power of two; `UNWIND_PAGE_SHIFT`.
const PAGE_SHIFT: u32 = types::unwind_layout::UNWIND_PAGE_SHIFT.0;
/// Between two functions there is padding to a multiple of this, which is no code of its own.
const ALIGNMENT: u64 = 16;
/// How often a byte of `.eh_frame` may be run: a CIE, 24 bytes or so, is run for each of its FDEs.
const MAX_RUNS: usize = 64;

/// After how many bytes of `.eh_frame` that were run the time is looked at.
const CHECK_EVERY: usize = 64 << 10;
/// CIEs that are kept parsed; linkers merge equal ones.
const MAX_CIES: usize = 1 << 14;
/// Bytes of the header of `.eh_frame` before its table, at most.
const EH_FRAME_HEADER: u64 = 64;

/// The rows of one file.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Rules {
    /// Ascending by address. Each is valid up to the next one.
    pub rows: Vec<u64>,
    /// The code: bytes of the file, and the address of the first of them.
    pub segments: Vec<(Range<u64>, u64)>,
}

impl Rules {
    /// The rules in an ELF file. Those of a file without any are empty.
    ///
    /// # Errors
    /// If it is no ELF file, or its unwind information makes no sense.
    pub fn of_file(file: &File) -> Result<Self> {
        Self::read(file)
    }

    /// The rules in an ELF image that is in memory, such as the vdso.
    pub fn of_image(image: &[u8]) -> Result<Self> {
        Self::read(&image)
    }

    /// Whether a function begins at this address, by what the file tells of its functions.
    ///
    /// # Errors
    /// If it is no ELF file, or its `.eh_frame` makes no sense.
    pub fn has_function_at(file: &File, address: u64) -> Result<bool> {
        let elf = Elf::read(file)?.expect_64_bit()?;
        let Some((start, frames)) = eh_frame(&elf)? else {
            return Ok(false);
        };
        let bases = BaseAddresses::default().set_eh_frame(start);
        let code = elf.code()?;
        let code: Vec<_> = code
            .iter()
            .map(|segment| segment.address..segment.address + segment.size)
            .collect();
        let functions = Functions::new(&frames, &bases).in_order(&code, elf.deadline)?;
        Ok(functions
            .iter()
            .any(|&(start, ..)| u64::from(start) == address))
    }

    fn read(source: &dyn Source) -> Result<Self> {
        let file = Elf::read(source)?.expect_64_bit()?;
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
        let addresses: Vec<_> = code
            .iter()
            .map(|segment| segment.address..segment.address + segment.size)
            .collect();
        let rows = rows(&frames, &bases, &addresses, file.deadline)?;
        Ok(Self { rows, segments })
    }

    /// Rules by bytes of the file in place of addresses, as the kernel half looks for them: a mapping
    /// says which bytes of its file it shows.
    ///
    /// # Errors
    /// If segments are in one another's place in the file, or beyond 4 GiB.
    pub fn by_file_offset(mut self) -> Result<Self> {
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

    /// The rows of one of several segments, by bytes of the file. No rule is valid after its end.
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

    /// The page of code that [`Rules::pages`] begins with: an address divided by 256.
    pub fn first_page(&self) -> u32 {
        self.rows.first().map_or(0, |&row| page_of(row))
    }

    /// An index to the rows: those that are valid somewhere in each page.
    pub fn pages(&self) -> Pages<'_> {
        let after = self.rows.last().map_or(0, |&row| page_of(row) + 1);
        Pages {
            rows: &self.rows,
            left: self.first_page()..after,
            next: 0,
        }
    }
}

/// See [`Rules::pages`].
#[derive(Debug, Clone)]
pub struct Pages<'a> {
    rows: &'a [u64],
    left: Range<u32>,
    /// The first row that begins in the first page that is left, or later.
    next: usize,
}

impl Iterator for Pages<'_> {
    type Item = Range<u32>;

    fn next(&mut self) -> Option<Range<u32>> {
        let page = self.left.next()?;
        // The row before is still valid where the page begins, unless a row begins there.
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

/// The address from which a row is valid.
pub fn address_of(row: u64) -> u64 {
    row >> 32
}

/// The code, if it is where code can be.
fn code_segments(file: &Elf<'_>, bytes: u64) -> Result<Vec<CodeSegment>> {
    let code = file.code()?;
    for segment in &code {
        ensure!(
            segment.address + segment.size <= MAX_ADDRESS
                && segment.file_offset + segment.size <= bytes,
            "its code is said to be where it cannot be"
        );
    }
    let start = code.iter().map(|segment| segment.address).min();
    let end = code
        .iter()
        .map(|segment| segment.address + segment.size)
        .max();
    // The index is of all that lies between.
    ensure!(
        end.unwrap_or(0) - start.unwrap_or(0) <= bytes.saturating_mul(2).saturating_add(64 << 20),
        "its code is spread too far"
    );
    Ok(code)
}

/// The section's address and contents; through its header where the sections were stripped.
fn eh_frame(file: &Elf<'_>) -> Result<Option<(u64, Vec<u8>)>> {
    if let Some(section) = file.section(".eh_frame") {
        let frames = file.contents(section, limits::MAX_EH_FRAME)?;
        return Ok(Some((section.address, frames)));
    }
    let mut segments = file.segments.iter();
    let Some(header) = segments.find(|segment| segment.kind == elf::PT_GNU_EH_FRAME) else {
        return Ok(None);
    };
    let bytes = file
        .bytes(
            header.file_offset,
            header.size.min(EH_FRAME_HEADER) as usize,
        )
        .context("failed to read the header of .eh_frame")?;
    let bases = BaseAddresses::default().set_eh_frame_hdr(header.address);
    let header = EhFrameHdr::new(&bytes, LittleEndian)
        .parse(&bases, 8)
        .context("failed to understand the header of .eh_frame")?;
    let gimli::Pointer::Direct(address) = header.eh_frame_ptr() else {
        bail!("its .eh_frame is somewhere else");
    };
    let mut loaded = file.segments.iter().filter(|segment| segment.is_loaded());
    let found = loaded.find_map(|segment| {
        let within = address.checked_sub(segment.address)?;
        let length = segment
            .size
            .checked_sub(within)
            .filter(|&length| length > 0)?;
        Some((segment.file_offset + within, length))
    });
    let (offset, length) = found.context("its .eh_frame is nowhere in the file")?;
    // It ends by an entry of no length, and other things may follow.
    let frames = file
        .bytes(offset, length.min(limits::MAX_EH_FRAME) as usize)
        .context("failed to read .eh_frame")?;
    Ok(Some((address, frames)))
}

/// All rows, ascending.
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
        // What is left of the memory.
        most: limits::MAX_MEMORY.saturating_sub(used) / size_of::<u64>(),
        section: functions.section,
    };
    let mut context = UnwindContext::new();
    let mut end = 0;
    let mut runs = 0;
    for (.., offset) in in_order {
        ensure!(
            builder.rows.len() <= builder.most,
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

/// The functions that `.eh_frame` describes. To keep all that gimli makes of them took 8 MB for a
/// compiler, so each is parsed again when it is needed.
struct Functions<'a> {
    section: EhFrame<Slice<'a>>,
    bytes: usize,
    bases: &'a BaseAddresses,
    cies: HashMap<EhFrameOffset, CommonInformationEntry<Slice<'a>>>,
}

impl<'a> Functions<'a> {
    fn new(frames: &'a [u8], bases: &'a BaseAddresses) -> Self {
        let mut section = EhFrame::new(frames, LittleEndian);
        section.set_address_size(8);
        Self {
            section,
            bytes: frames.len(),
            bases,
            cies: HashMap::new(),
        }
    }

    /// The functions of this code, ascending: start, end, and where in the section they are.
    fn in_order(
        &mut self,
        code: &[Range<u64>],
        deadline: Deadline,
    ) -> Result<Vec<(u32, u32, u32)>> {
        let mut functions = Vec::with_capacity(self.bytes / 64);
        let mut runs = 0;
        let mut entries = self.section.entries(self.bases);
        while let Some(entry) = entries.next().context("failed to understand .eh_frame")? {
            let CieOrFde::Fde(function) = entry else {
                continue;
            };
            let offset = u32::try_from(function.offset())?;
            let function = self.at(offset)?;
            let run = function.entry_len() + function.cie().entry_len();
            if (runs + run) / CHECK_EVERY > runs / CHECK_EVERY {
                deadline.check()?;
            }
            runs += run;
            ensure!(
                runs <= self.bytes.saturating_mul(MAX_RUNS),
                "its .eh_frame repeats itself"
            );
            let (start, end) = (function.initial_address(), function.end_address());
            // What the linker has left out stands at 0, or wherever.
            let inside = |segment: &Range<u64>| segment.start <= start && end <= segment.end;
            if start < end && code.iter().any(inside) {
                functions.push((start as u32, end as u32, offset));
            }
        }
        functions.sort_unstable();
        Ok(functions)
    }

    fn at(&mut self, offset: u32) -> Result<Fde<'a>> {
        let (offset, cies) = (EhFrameOffset(offset as usize), &mut self.cies);
        let function =
            self.section
                .fde_from_offset(self.bases, offset, |section, bases, offset| {
                    if let Some(cie) = cies.get(&offset) {
                        return Ok(CommonInformationEntry::clone(cie));
                    }
                    let cie = section.cie_from_offset(bases, offset)?;
                    if cies.len() < MAX_CIES {
                        cies.insert(offset, cie.clone());
                    }
                    Ok(cie)
                });
        function.context("failed to understand a function's unwind information")
    }
}

/// Rows as they are made.
struct Builder<'a> {
    rows: Vec<u64>,
    /// How many there may be.
    most: usize,
    section: EhFrame<Slice<'a>>,
}

impl<'a> Builder<'a> {
    /// From here on the rule is this. A row that says what the one before it says is none.
    fn push(&mut self, address: u64, rule: u32) {
        match self.rows.last().copied() {
            Some(last) if last as u32 == rule => {}
            // A rule for no instruction.
            Some(last) if address_of(last) == address => {
                self.rows.pop();
                self.push(address, rule);
            }
            _ => self.rows.push(address << 32 | u64::from(rule)),
        }
    }

    fn run(
        &mut self,
        function: &Fde<'a>,
        bases: &BaseAddresses,
        context: &mut UnwindContext<usize>,
    ) {
        let start = function.initial_address();
        let strange = word(Kind::UNWIND_STRANGE, 0, None);
        if function.is_signal_trampoline() {
            return self.push(start, word(Kind::UNWIND_SIGNAL, 0, None));
        }
        let section = self.section;
        let Ok(mut table) = function.rows(&section, bases, context) else {
            return self.push(start, strange);
        };
        let mut reached = start;
        loop {
            match table.next_row() {
                Ok(Some(_)) if self.rows.len() > self.most => return,
                Ok(Some(row)) => {
                    let (from, to) = (row.start_address(), row.end_address());
                    if from < reached || to > function.end_address() {
                        return self.push(reached, strange);
                    }
                    let cfa = row.cfa().clone();
                    let registers =
                        [X86_64::RBP, X86_64::RA].map(|register| row.register(register));
                    let rule = self.rule(function, &cfa, &registers);
                    self.push(from, rule);
                    reached = to;
                }
                Ok(None) => return,
                // What it said up to there holds.
                Err(_) => return self.push(reached.min(function.end_address() - 1), strange),
            }
        }
    }

    fn rule(
        &self,
        function: &Fde<'a>,
        cfa: &CfaRule<usize>,
        [fp, return_address]: &[Option<RegisterRule<usize>>; 2],
    ) -> u32 {
        let strange = word(Kind::UNWIND_STRANGE, 0, None);
        match return_address {
            Some(RegisterRule::Offset(-8)) => {}
            Some(RegisterRule::Undefined) => return word(Kind::UNWIND_ROOT, 0, None),
            _ => return strange,
        }
        let Some(fp) = self.frame_pointer(function, fp.as_ref()) else {
            return strange;
        };
        let (kind, offset) = match *cfa {
            CfaRule::RegisterAndOffset {
                register: register @ (X86_64::RSP | X86_64::RBP),
                offset,
            } => {
                let kind = if register == X86_64::RSP {
                    Kind::UNWIND_BY_SP
                } else {
                    Kind::UNWIND_BY_FP
                };
                (
                    kind,
                    words(offset).and_then(|words| i16::try_from(words).ok()),
                )
            }
            CfaRule::Expression(ref expression) => {
                match self.cfa_expression(function, expression) {
                    Some((kind, offset)) => (kind, Some(offset)),
                    None => return strange,
                }
            }
            CfaRule::RegisterAndOffset { .. } => return strange,
        };
        offset.map_or(strange, |offset| word(kind, offset, Some(fp)))
    }

    /// What becomes of the frame pointer, and the offset in words. None: it fits no row.
    fn frame_pointer(
        &self,
        function: &Fde<'a>,
        rule: Option<&RegisterRule<usize>>,
    ) -> Option<(FramePointer, i8)> {
        let within = |offset| i8::try_from(words(offset)?).ok();
        Some(match rule {
            // It is a register that functions preserve.
            None | Some(RegisterRule::SameValue) => (FramePointer::UNWIND_FP_KEPT, 0),
            Some(&RegisterRule::Offset(offset)) => {
                (FramePointer::UNWIND_FP_AT_CFA, within(offset)?)
            }
            Some(RegisterRule::Expression(expression)) => {
                let (base, offset, steps) = self.base_and_steps(function, expression)?;
                if base != X86_64::RBP || steps != Steps::None {
                    return None;
                }
                (FramePointer::UNWIND_FP_AT_FP, within(offset)?)
            }
            _ => (FramePointer::UNWIND_FP_FORGOTTEN, 0),
        })
    }

    /// The kinds of expression that compilers and linkers make for the CFA.
    fn cfa_expression(&self, function: &Fde<'a>, expression: &Expression) -> Option<(Kind, i16)> {
        // Of a PLT: rsp + 8 + ((rip & 15) >= byte) * 8; the byte is that after the push.
        if let [
            0x77,
            8,
            0x80,
            0,
            0x3f,
            0x1a,
            literal @ 0x30..=0x3f,
            0x2a,
            0x33,
            0x24,
            0x22,
        ] = *expression.get(&self.section).ok()?.0.slice()
        {
            return Some((Kind::UNWIND_PLT, i16::from(literal - 0x30)));
        }
        let (base, offset, steps) = self.base_and_steps(function, expression)?;
        let Steps::Through(beyond) = steps else {
            return None;
        };
        let within = |offset| i8::try_from(words(offset)?).ok();
        let kind = match base {
            X86_64::RBP => Kind::UNWIND_THROUGH_FP,
            X86_64::RSP => Kind::UNWIND_THROUGH_SP,
            _ => return None,
        };
        Some((
            kind,
            i16::from_be_bytes([
                within(offset)?.cast_unsigned(),
                within(beyond)?.cast_unsigned(),
            ]),
        ))
    }

    /// An expression that is a register and an offset, or goes through the word that is there.
    fn base_and_steps(
        &self,
        function: &Fde<'a>,
        expression: &Expression,
    ) -> Option<(Register, i64, Steps)> {
        let expression = expression.get(&self.section).ok()?;
        let mut operations = expression.operations(function.cie().encoding());
        let Operation::RegisterOffset {
            register, offset, ..
        } = operations.next().ok()??
        else {
            return None;
        };
        let steps = match operations.next().ok()? {
            None => Steps::None,
            Some(Operation::Deref {
                size: 8,
                space: false,
                ..
            }) => match operations.next().ok()? {
                None => Steps::Through(0),
                Some(Operation::PlusConstant { value }) => {
                    Steps::Through(i64::try_from(value).ok()?)
                }
                _ => return None,
            },
            _ => return None,
        };
        operations
            .next()
            .ok()?
            .is_none()
            .then_some((register, offset, steps))
    }
}

/// What an expression does with the sum of its register and offset.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Steps {
    None,
    /// The word there is taken, and so many bytes are added.
    Through(i64),
}

/// An offset in words, if it is a whole number of them.
fn words(bytes: i64) -> Option<i64> {
    (bytes % 8 == 0).then_some(bytes / 8)
}

/// A row without its address.
fn word(kind: Kind, offset: i16, fp: Option<(FramePointer, i8)>) -> u32 {
    let (fp, fp_offset) = fp.unwrap_or((FramePointer::UNWIND_FP_KEPT, 0));
    u32::from(offset.cast_unsigned()) << 16
        | u32::from(fp_offset.cast_unsigned()) << 8
        | fp.0 << 4
        | kind.0
}
