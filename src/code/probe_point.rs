//! Where in a function a uprobe costs least.
//!
//! A uprobe replaces an instruction by a breakpoint. If the kernel can emulate that instruction, a hit costs one
//! trap. Otherwise the kernel lets the process execute the instruction elsewhere, in a single step, which costs a
//! second trap. On the machine where this was measured, a hit costs 0.8 µs with emulation, and 13 µs without. Many
//! functions begin with an instruction that is not emulated: the modules `entry` name them.
//!
//! So the probe goes to the first instruction that can be emulated, on two conditions. Nothing that a handler reads
//! at a function's entry may be lost before that instruction: arguments, stack pointer, frame pointer, return
//! address. And nothing but the entry may lead there. Otherwise the probe stays at the entry. A function may copy an
//! argument to another argument's register, and then use the argument's own register for something else, as
//! mimalloc's `malloc` does. Then the handler has to read the argument from the other register.

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;

use anyhow::{Context, Result};

use crate::code::arch::entry::{self, CHANGES_NOPS};
use crate::code::arch::{jumps, register_contents};
use crate::code::elf::{self, CodeSegment, Function};

/// Bytes at a function's entry that are searched for the end of its nops.
const HEAD: usize = 64;

/// Wanted place of a probe in a function.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Preference {
    /// The place where the probe costs least.
    Cheap,
    /// The entry, or the nearest safe place behind it.
    Entry,
}

/// The instruction of a function to probe.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProbePoint {
    /// The instruction's offset from the entry, in bytes.
    pub offset: u64,
    pub(super) held_by: [u8; register_contents::ARGUMENTS],
}

impl ProbePoint {
    /// The entry, where each argument is in its own register.
    pub const ENTRY: Self = Self {
        offset: 0,
        held_by: register_contents::IN_THEIR_OWN,
    };

    /// Returns the number of the argument whose register holds `argument` at this place. Numbers begin with 1.
    pub fn register_of(&self, argument: u8) -> u8 {
        let index = usize::from(argument).wrapping_sub(1);
        self.held_by.get(index).copied().unwrap_or(argument)
    }
}

/// Returns the places to probe functions of a file at. Each function is given with the numbers of the arguments that
/// its handler reads. A place is None where no probe is safe for the target.
///
/// # Errors
/// If the file's segments or code cannot be read.
pub fn places(
    file: &File,
    functions: &[(&Function, Vec<u8>)],
    wish: Preference,
) -> Result<Vec<Option<ProbePoint>>> {
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
        // Not all jumps into the function can be found, so only the entry is safe.
        let unknown = entry.is_none() || jumps::has_indirect_jump(&code);
        let nearest = entry::nearest(&head[..length], *CHANGES_NOPS);
        let nearest = nearest.filter(|place| place.offset == 0 || !unknown);
        let best = match wish {
            Preference::Cheap if !unknown => entry::candidate(&code, arguments),
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

/// Returns the place to try next if a jump leads behind the entry, up to `wrong`: the nearest place to the entry, and
/// no place after that.
fn next_place(wrong: Option<ProbePoint>, nearest: Option<ProbePoint>) -> Option<ProbePoint> {
    nearest.filter(|nearest| wrong.is_some_and(|wrong| nearest.offset < wrong.offset))
}

/// Returns the indexes of the functions that a jump leads into behind the entry, up to and including the probe; each
/// once.
fn led_into(
    file: &File,
    segments: &[CodeSegment],
    entries: &[Option<u64>],
    places: &[Option<ProbePoint>],
) -> Result<Vec<usize>> {
    let windows: Vec<(Range<u64>, usize)> = places
        .iter()
        .zip(entries)
        .enumerate()
        .filter_map(|(index, (place, entry))| {
            let (entry, offset) = ((*entry)?, (*place)?.offset);
            (offset > 0).then_some((entry + 1..entry + offset + 1, index))
        })
        .collect();
    jumps::windows_with_jump_target(file, segments, windows)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_place_is_tried_once() {
        let at = |offset| {
            Some(ProbePoint {
                offset,
                ..ProbePoint::ENTRY
            })
        };
        assert_eq!(next_place(at(9), at(5)), at(5));
        assert_eq!(next_place(at(9), at(0)), at(0));
        assert_eq!(next_place(at(5), at(5)), None);
        assert_eq!(next_place(at(9), None), None);
        assert_eq!(next_place(None, at(5)), None);
    }
}
