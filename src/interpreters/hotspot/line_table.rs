//! Source lines of a function's bytecode, from the table that HotSpot keeps after the bytecode.
//!
//! Each entry of the table is a pair: an index of the bytecode, and the line that begins there. Both are stored as
//! differences from the previous pair. An entry is either one byte, with 5 bits for the index and 3 for the line, or
//! a byte of all ones and two signed numbers. A zero byte ends the table.

use super::numbers::Numbers;

/// Byte that precedes an entry of two signed numbers.
const NUMBERS: u8 = 0xff;

/// Returns the line of the bytecode with this index. None if no line begins there or before.
pub(super) fn line_at(table: &[u8], numbers: Numbers, bytecode: u32) -> Option<u32> {
    let mut best: Option<(u32, u32)> = None;
    for (index, line) in pairs(table, numbers) {
        // Neither the lines nor the indices need to ascend.
        if index == bytecode {
            return Some(line);
        }
        if index < bytecode && best.is_none_or(|(before, _)| index >= before) {
            best = Some((index, line));
        }
    }
    best.map(|(_, line)| line)
}

/// Decodes the pairs of a table: the index of the bytecode at which a line begins, and the line.
fn pairs(table: &[u8], numbers: Numbers) -> impl Iterator<Item = (u32, u32)> {
    let (mut rest, mut index, mut line) = (table, 0u32, 0u32);
    std::iter::from_fn(move || {
        let (&first, behind) = rest.split_first()?;
        if first == 0 {
            return None;
        }
        let (indices, lines);
        (indices, lines, rest) = if first == NUMBERS {
            let (indices, behind) = numbers.read_signed(behind)?;
            let (lines, behind) = numbers.read_signed(behind)?;
            (indices, lines, behind)
        } else {
            (i32::from(first >> 3), i32::from(first & 7), behind)
        };
        index = index.wrapping_add_signed(indices);
        line = line.wrapping_add_signed(lines);
        Some((index, line))
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Index 0: line 41, index 3: line 43, index 40: line 12, index 44: line 13.
    const TABLE: [u8; 9] = [NUMBERS, 0, 82, 3 << 3 | 2, NUMBERS, 74, 61, 4 << 3 | 1, 0];

    #[test]
    fn a_bytecode_has_the_line_that_began_last_before_it() {
        let numbers = Numbers { excluded: 0 };
        let line = |bytecode| line_at(&TABLE, numbers, bytecode);
        let found = [0, 2, 3, 39, 40, 43, 44, 70].map(line);
        assert_eq!(found, [41, 41, 43, 43, 12, 12, 13, 13].map(Some));
    }

    #[test]
    fn what_is_before_the_first_line_has_none() {
        let numbers = Numbers { excluded: 0 };
        assert_eq!(line_at(&TABLE[3..], numbers, 2), None);
        assert_eq!(line_at(&[], numbers, 0), None);
        assert_eq!(line_at(&[0, 8 | 7], numbers, 5), None);
    }

    #[test]
    fn of_two_lines_at_one_bytecode_the_first_counts_there_and_the_last_behind() {
        let numbers = Numbers { excluded: 0 };
        let table = [2 << 3 | 1, 4, 0];
        let found = [2, 3].map(|bytecode| line_at(&table, numbers, bytecode));
        assert_eq!(found, [1, 5].map(Some));
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_table(table: Vec<u8>, bytecode: u32, excluded in 0..2u8) {
            let _ = line_at(&table, Numbers { excluded }, bytecode);
        }
    }
}
