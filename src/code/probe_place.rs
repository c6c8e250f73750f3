//! Where in a function a uprobe costs least.
//!
//! A uprobe replaces an instruction by a breakpoint. If the kernel can emulate that instruction, a
//! hit costs one trap; else it lets the process execute the instruction elsewhere, in a single
//! step, which costs a second trap. On the machine that this was measured on that is 0.8 µs
//! against 13 µs. glibc's `free` begins with `test %rdi,%rdi; je`, which is of the dear kind, and
//! code built for control-flow protection begins with `endbr64`, which is too.
//!
//! So the probe goes to the first instruction that can be emulated, if until there nothing that a
//! handler reads at a function's entry has been lost: arguments, stack pointer, frame pointer,
//! return address; and if nothing but the entry leads there. Else it stays at the entry. An
//! argument may have been copied to another argument's register before its own is used for
//! something else, as mimalloc's `malloc` does; then that is where the handler has to read it.

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;

use anyhow::{Context, Result};

use crate::code::arch::entry::{self, CHANGES_NOPS};
use crate::code::arch::{held, jumps};
use crate::code::elf::{self, CodeSegment, Function};

/// Bytes at a function's entry that are searched for the end of its nops.
const HEAD: usize = 64;

/// Where in a function a probe is wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wish {
    /// Where it costs least.
    Cheap,
    /// At the entry, or as near behind it as is safe.
    Entry,
}

/// The instruction of a function to probe.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProbePlace {
    /// The instruction's offset from the entry, in bytes.
    pub offset: u64,
    pub(super) held_by: [u8; held::ARGUMENTS],
}

impl ProbePlace {
    /// Where all is as it should be.
    pub const ENTRY: Self = Self {
        offset: 0,
        held_by: held::IN_THEIR_OWN,
    };

    /// The number of the argument whose register holds this argument there. Numbers begin with 1.
    pub fn register_of(&self, argument: u8) -> u8 {
        let index = usize::from(argument).wrapping_sub(1);
        self.held_by.get(index).copied().unwrap_or(argument)
    }
}

/// The places to probe functions of a file at, each given with the numbers of the arguments that
/// its handler reads. None where no place is safe for the target.
///
/// # Errors
/// If the file's segments or code cannot be read.
pub fn places(
    file: &File,
    functions: &[(&Function, Vec<u8>)],
    wish: Wish,
) -> Result<Vec<Option<ProbePlace>>> {
    let segments = elf::code_segments(file)?;
    let entries: Vec<Option<u64>> = functions
        .iter()
        .map(|(function, _)| elf::address(&segments, function.file_offset))
        .collect();
    let (mut nearest_places, mut places) = (Vec::new(), Vec::new());
    for ((function, arguments), entry) in functions.iter().zip(&entries) {
        let mut head = [0; HEAD];
        let length = file
            .read_at(&mut head, function.file_offset)
            .with_context(|| format!("failed to read the code of {}", function.name))?;
        let code = function.code(file)?;
        // Where the jumps to it are is not known: no place but the entry will do.
        let unknown = entry.is_none() || jumps::lead_anywhere(&code);
        let nearest = entry::nearest(&head[..length], *CHANGES_NOPS);
        let nearest = nearest.filter(|place| place.offset == 0 || !unknown);
        let best = match wish {
            Wish::Cheap if !unknown => entry::candidate(&code, arguments),
            _ => None,
        };
        nearest_places.push(nearest);
        places.push(best.or(nearest));
    }
    let mut unchecked = places.clone();
    loop {
        let wrong = led_into(file, &segments, &entries, &unchecked)?;
        if wrong.is_empty() {
            return Ok(places);
        }
        unchecked.fill(None);
        for index in wrong {
            let next = next_place(places[index], nearest_places[index]);
            (places[index], unchecked[index]) = (next, next);
        }
    }
}

/// The place to try when a jump leads behind the entry up to `wrong`: the nearest to the entry, and
/// none after that.
fn next_place(wrong: Option<ProbePlace>, nearest: Option<ProbePlace>) -> Option<ProbePlace> {
    nearest.filter(|nearest| wrong.is_some_and(|wrong| nearest.offset < wrong.offset))
}

/// The functions with a jump that leads behind the entry, up to and including the probe; each once.
fn led_into(
    file: &File,
    segments: &[CodeSegment],
    entries: &[Option<u64>],
    places: &[Option<ProbePlace>],
) -> Result<Vec<usize>> {
    let mut windows: Vec<(Range<u64>, usize)> = places
        .iter()
        .zip(entries)
        .enumerate()
        .filter_map(|(index, (place, entry))| {
            let (entry, offset) = ((*entry)?, (*place)?.offset);
            (offset > 0).then_some((entry + 1..entry + offset + 1, index))
        })
        .collect();
    windows.sort_by_key(|(window, _)| window.start);
    jumps::lead_into(file, segments, &windows)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_place_is_tried_once() {
        let at = |offset| {
            Some(ProbePlace {
                offset,
                ..ProbePlace::ENTRY
            })
        };
        assert_eq!(next_place(at(9), at(5)), at(5));
        assert_eq!(next_place(at(9), at(0)), at(0));
        assert_eq!(next_place(at(5), at(5)), None);
        assert_eq!(next_place(at(9), None), None);
        assert_eq!(next_place(None, at(5)), None);
    }
}
