//! Targets of the jumps in a file of arm64 code.

use std::fs::File;
use std::ops::Range;

use anyhow::Result;

use crate::code::elf::CodeSegment;

/// Whether a function has a jump through a register, whose targets are not in the code: br.
pub(crate) fn has_indirect_jump(code: &[u8]) -> bool {
    let (instructions, _) = code.as_chunks::<4>();
    instructions
        .iter()
        .any(|bytes| u32::from_le_bytes(*bytes) & 0xffff_fc1f == 0xd61f_0000)
}

/// Returns the indexes of the `windows` that a direct jump leads into. There are no windows: functions are probed at
/// their entries alone.
pub(crate) fn windows_with_jump_target(
    _file: &File,
    _segments: &[CodeSegment],
    windows: Vec<(Range<u64>, usize)>,
) -> Result<Vec<usize>> {
    Ok(windows.into_iter().map(|(_, index)| index).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jumps_without_a_target_could_lead_anywhere() {
        let code = |instructions: [u32; 2]| instructions.map(u32::to_le_bytes).concat();
        // cbz x0; br x16
        assert!(has_indirect_jump(&code([0xb400_0040, 0xd61f_0200])));
        // cbz x0; ret
        assert!(!has_indirect_jump(&code([0xb400_0040, 0xd65f_03c0])));
    }
}
