//! Targets of the jumps in a file of x86-64 code.

use std::fs::File;
use std::ops::Range;

use anyhow::Result;
use iced_x86::{Decoder, DecoderOptions, FlowControl, OpKind, Register};
use memchr::memchr3_iter;

use super::entry::MAX_OFFSET;
use super::instruction::LONGEST;
use crate::code::elf::CodeSegment;
use crate::code::elf_file::read_at;

/// Distance that a jump of two bytes reaches, before and behind it.
const SHORT_REACH: u64 = 128 + 2;
/// Bytes of code that are searched for jumps at once, and how many of them overlap with the next piece.
const PIECE: (usize, usize) = (256 << 10, FAR_JUMP - 1);
/// Bytes of the longest jump with four bytes of distance: its opcode has two.
const FAR_JUMP: usize = 6;

/// Whether a function has a jump through a table or a register, whose targets are not in the code. A jump through a
/// variable of the file's own does not count, as it goes to another function.
pub(crate) fn has_indirect_jump(code: &[u8]) -> bool {
    let decoder = Decoder::with_ip(64, code, 0, DecoderOptions::NONE);
    decoder.into_iter().any(|instruction| {
        instruction.flow_control() == FlowControl::IndirectBranch
            && !(instruction.op0_kind() == OpKind::Memory
                && instruction.memory_base() == Register::RIP)
    })
}

/// Returns the indexes of the `windows` that a direct jump leads into, from anywhere in the file: a function's cold
/// part is elsewhere and jumps back, and functions written by hand share their ends. Each index is returned once,
/// however many jumps lead into its window. No window is longer than [`MAX_OFFSET`] bytes.
pub(crate) fn windows_with_jump_target(
    file: &File,
    segments: &[CodeSegment],
    mut windows: Vec<(Range<u64>, usize)>,
) -> Result<Vec<usize>> {
    windows.sort_by_key(|(window, _)| window.start);
    let Some((first, _)) = windows.first() else {
        return Ok(Vec::new());
    };
    let end = windows.iter().map(|(window, _)| window.end).max();
    let all = first.start..end.unwrap_or_default();
    let mut hit = Vec::new();
    let mut mark = |target: u64| {
        if all.contains(&target) {
            let before = windows.partition_point(|(window, _)| window.start <= target);
            let near = windows[..before].iter().rev();
            let near = near.take_while(|(window, _)| window.start + MAX_OFFSET >= target);
            hit.extend(
                near.filter(|(window, _)| window.contains(&target))
                    .map(|(_, index)| *index),
            );
        }
    };
    for segment in segments {
        segment.read(file, PIECE, |address, bytes| {
            far_targets(address, bytes, &mut mark);
        })?;
        for (window, _) in &windows {
            let from = window
                .start
                .saturating_sub(SHORT_REACH)
                .max(segment.address);
            let to = (window.end + SHORT_REACH).min(segment.range().end);
            if from < to {
                let bytes = read_at(file, segment.file_offset_of(from), (to - from) as usize)?;
                short_targets(from, &bytes, &mut mark);
            }
        }
    }
    hit.sort_unstable();
    hit.dedup();
    Ok(hit)
}

/// Calls `mark` with the targets of the jumps and calls with four bytes of distance. Whatever looks like one is taken
/// for one, even in the middle of another instruction: the chance that such a distance leads into a window by
/// accident is one in a hundred million.
fn far_targets(address: u64, bytes: &[u8], mark: &mut impl FnMut(u64)) {
    for at in memchr3_iter(0xe8, 0xe9, 0x0f, bytes) {
        let opcode = match bytes[at..] {
            [0x0f, 0x80..=0x8f, ..] => 2,
            [0x0f, ..] => continue,
            _ => 1,
        };
        if let Some(distance) = bytes[at + opcode..].first_chunk() {
            let next = address + (at + opcode + distance.len()) as u64;
            mark(next.wrapping_add_signed(i32::from_le_bytes(*distance).into()));
        }
    }
}

/// Calls `mark` with the targets of the jumps with one byte of distance. Outside of a function it is not known where
/// instructions begin, so all beginnings are tried: after a few instructions they agree.
fn short_targets(address: u64, bytes: &[u8], mark: &mut impl FnMut(u64)) {
    for start in 0..LONGEST.min(bytes.len()) {
        let from = address + start as u64;
        let decoder = Decoder::with_ip(64, &bytes[start..], from, DecoderOptions::NONE);
        for instruction in decoder {
            if instruction.op0_kind() == OpKind::NearBranch64 && instruction.len() <= 3 {
                mark(instruction.near_branch_target());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    const TEST_RDI: &[u8] = &[0x48, 0x85, 0xff];
    const JE_2: &[u8] = &[0x74, 0x02];

    /// Returns a file with this code, and its segment.
    fn file_of(code: &[u8]) -> (File, CodeSegment) {
        let mut file = tempfile::tempfile().expect("a file");
        file.write_all(code).expect("room");
        let segment = CodeSegment {
            address: 0x1000,
            file_offset: 0,
            size: code.len() as u64,
        };
        (file, segment)
    }

    #[test]
    fn jumps_without_a_target_could_lead_anywhere() {
        // jmp *%rax
        assert!(has_indirect_jump(&[TEST_RDI, JE_2, &[0xff, 0xe0]].concat()));
        // jmp *0x1000(%rip)
        assert!(!has_indirect_jump(
            &[TEST_RDI, JE_2, &[0xff, 0x25, 0, 0x10, 0, 0]].concat()
        ));
    }

    #[test]
    fn jumps_are_found_wherever_they_are() {
        let targets = |code: &[u8]| {
            let mut targets = Vec::new();
            far_targets(0x1000, code, &mut |target| targets.push(target));
            short_targets(0x1000, code, &mut |target| targets.push(target));
            targets.sort_unstable();
            targets.dedup();
            targets
        };
        // test %rdi,%rdi; je +2; jmp back to the je
        assert_eq!(
            targets(&[TEST_RDI, JE_2, &[0xeb, 0xfc]].concat()),
            [0x1003, 0x1007]
        );
        // nop; jne -6; nop; jmp +0x100; nop; call -6
        let far = [
            &[
                0x90, 0x0f, 0x85, 0xfa, 0xff, 0xff, 0xff, 0x90, 0xe9, 0, 1, 0, 0,
            ][..],
            &[0x90, 0xe8, 0xfa, 0xff, 0xff, 0xff],
        ];
        assert_eq!(targets(&far.concat()), [0x1001, 0x100d, 0x110d]);
    }

    #[test]
    fn many_jumps_into_a_function_lead_into_it_once() {
        // jmp to the second byte, three times.
        let (file, segment) = file_of(&[0xeb, 0xff, 0xeb, 0xfd, 0xeb, 0xfb]);
        let hit = windows_with_jump_target(&file, &[segment], vec![(0x1001..0x1003, 7)]);
        assert_eq!(hit.expect("a read"), [7]);
    }

    #[test]
    fn windows_are_in_any_order() {
        // jmp to the second byte, to the last one, and to the next instruction.
        let (file, segment) = file_of(&[0xeb, 0xff, 0xeb, 0x03, 0xeb, 0x00, 0x90, 0x90]);
        let windows = [
            (0x1007..0x1008, 3),
            (0x1001..0x1002, 8),
            (0x1003..0x1005, 5),
        ];
        let hit = windows_with_jump_target(&file, &[segment], windows.to_vec());
        assert_eq!(hit.expect("a read"), [3, 8]);
    }
}
