//! The functions of a file that have unwind information in `.eh_frame`.

use std::collections::HashMap;
use std::fs::File;
use std::ops::Range;

use anyhow::{Context, Result, bail, ensure};
use gimli::{
    BaseAddresses, CieOrFde, CommonInformationEntry, EhFrame, EhFrameHdr, EhFrameOffset,
    EndianSlice, FrameDescriptionEntry, LittleEndian, UnwindSection,
};
use object::elf;

use crate::code::elf::CodeSegment;
use crate::code::elf_file::Elf;
use crate::code::limits::{self, Deadline};
use crate::code::registers::VENDOR;

/// Bytes of a section.
pub(crate) type Slice<'a> = EndianSlice<'a, LittleEndian>;
/// A function's entry, with its unwind information.
pub(crate) type Fde<'a> = FrameDescriptionEntry<Slice<'a>>;

/// Limit of addresses, which are stored in 32 bits.
pub(crate) const MAX_ADDRESS: u64 = 1 << 32;

/// Number of bytes of `.eh_frame` that are run between two checks of the deadline.
pub(crate) const CHECK_EVERY: usize = 64 << 10;

/// Maximum number of runs per byte of `.eh_frame`: a CIE of about 24 bytes is run for each of its FDEs.
const MAX_RUNS: usize = 64;

/// Maximum number of CIEs that are kept parsed; linkers merge equal ones.
const MAX_CIES: usize = 1 << 14;

/// Maximum size of `.eh_frame_hdr` before its table, in bytes.
const EH_FRAME_HEADER: u64 = 64;

/// Returns the addresses of the functions in a file's `.eh_frame`, ascending. Each part of a split function is a
/// range of its own.
///
/// # Errors
/// If the file is no ELF file, its `.eh_frame` is malformed, or its code is beyond 4 GiB.
pub fn functions_of(file: &File) -> Result<Vec<Range<u64>>> {
    let elf = Elf::read(file)?.require_64_bit()?;
    let Some((start, frames)) = eh_frame(&elf)? else {
        return Ok(Vec::new());
    };
    let bases = BaseAddresses::default().set_eh_frame(start);
    let code = elf.code()?;
    let code: Vec<_> = code.iter().map(CodeSegment::range).collect();
    let functions = Functions::new(&frames, &bases).in_order(&code, elf.deadline)?;
    let range = |(first, last, _): (u32, u32, u32)| u64::from(first)..u64::from(last) + 1;
    Ok(functions.into_iter().map(range).collect())
}

/// Whether a function begins at this address, by the file's `.eh_frame`.
///
/// # Errors
/// If the file is no ELF file, its `.eh_frame` is malformed, or its code is beyond 4 GiB.
pub(crate) fn has_function_at(file: &File, address: u64) -> Result<bool> {
    let functions = functions_of(file)?;
    Ok(functions.iter().any(|function| function.start == address))
}

/// The functions that `.eh_frame` describes. Keeping all of them as gimli parses them took 8 MB for a compiler, so each
/// is parsed again when it is needed.
pub(crate) struct Functions<'a> {
    pub(crate) section: EhFrame<Slice<'a>>,
    bytes: usize,
    bases: &'a BaseAddresses,
    cies: HashMap<EhFrameOffset, CommonInformationEntry<Slice<'a>>>,
}

impl<'a> Functions<'a> {
    pub(crate) fn new(frames: &'a [u8], bases: &'a BaseAddresses) -> Self {
        let mut section = EhFrame::new(frames, LittleEndian);
        section.set_address_size(8);
        section.set_vendor(VENDOR);
        Self {
            section,
            bytes: frames.len(),
            bases,
            cies: HashMap::new(),
        }
    }

    /// Returns the functions of this code, ascending: the addresses of the first and the last byte, and the offset in
    /// the section.
    pub(crate) fn in_order(
        &mut self,
        code: &[Range<u64>],
        deadline: Deadline,
    ) -> Result<Vec<(u32, u32, u32)>> {
        let to_u32 = |address| u32::try_from(address).context("its code is beyond 4 GiB");
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
            // Functions that the linker has omitted are at address 0, or anywhere.
            let inside = |segment: &Range<u64>| segment.start <= start && end <= segment.end;
            if start < end && code.iter().any(inside) {
                functions.push((to_u32(start)?, to_u32(end - 1)?, offset));
            }
        }
        functions.sort_unstable();
        Ok(functions)
    }

    pub(crate) fn at(&mut self, offset: u32) -> Result<Fde<'a>> {
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

/// Returns the segments of code, if addresses and offsets are possible.
pub(crate) fn code_segments(file: &Elf<'_>, bytes: u64) -> Result<Vec<CodeSegment>> {
    let code = file.code()?;
    for segment in &code {
        ensure!(
            segment.range().end <= MAX_ADDRESS && segment.file_offset + segment.size <= bytes,
            "its code is said to be where it cannot be"
        );
    }
    let start = code.iter().map(|segment| segment.address).min();
    let end = code.iter().map(|segment| segment.range().end).max();
    // The index covers all addresses between the first and the last.
    ensure!(
        end.unwrap_or(0) - start.unwrap_or(0) <= bytes.saturating_mul(2).saturating_add(64 << 20),
        "its code is spread too far"
    );
    Ok(code)
}

/// Returns the address and contents of `.eh_frame`, found by `.eh_frame_hdr` if section headers were stripped.
pub(crate) fn eh_frame(file: &Elf<'_>) -> Result<Option<(u64, Vec<u8>)>> {
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
    // The section ends with an entry of length 0, and other data may follow.
    let frames = file
        .bytes(offset, length.min(limits::MAX_EH_FRAME) as usize)
        .context("failed to read .eh_frame")?;
    Ok(Some((address, frames)))
}

#[cfg(test)]
mod tests {
    use std::slice;

    use super::*;

    /// Returns the functions in an `.eh_frame` with one function.
    fn functions(start: u64, length: u64) -> Result<Vec<(u32, u32, u32)>> {
        const CIE: [u8; 20] = [
            16, 0, 0, 0, // length
            0, 0, 0, 0, // a CIE
            1, b'z', b'R', 0, 1, 0x78, 16,
            1, // version, augmentation, alignments, return address
            0, 0, 0, 0, // absolute addresses
        ];
        let fde = [24u32, 24].map(u32::to_le_bytes).concat();
        let range = [start, length, 0].map(u64::to_le_bytes).concat();
        let frames = [&CIE[..], &fde, &range[..20]].concat();
        let bases = BaseAddresses::default();
        let code = 0..u64::MAX;
        Functions::new(&frames, &bases).in_order(slice::from_ref(&code), Deadline::start())
    }

    #[test]
    fn a_function_ends_at_4_gib_at_most() {
        let last = functions(0xffff_f000, 0x1000).expect("a function");
        assert_eq!(last, [(0xffff_f000, 0xffff_ffff, 20)]);
        for start in [0xffff_f001, 0x1_0000_1000] {
            let error = functions(start, 0x1000).expect_err("an address of more than 32 bits");
            assert_eq!(error.to_string(), "its code is beyond 4 GiB");
        }
    }
}
