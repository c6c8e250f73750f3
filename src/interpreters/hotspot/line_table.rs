//! Which lines of the source a function's bytecode is from, as HotSpot keeps that behind the bytecode.
//!
//! The table has pairs, each an index of the bytecode and the line that begins there, as differences from the pair before:
//! in one byte, 5 bits of the index's and 3 of the line's, or behind a byte of all ones in two signed numbers.
//! A byte of zero ends it.

use super::numbers::Numbers;

/// The byte that two numbers follow.
const NUMBERS: u8 = 0xff;

/// The line of the bytecode with this index. None if the table has none that begins there or before.
pub(super) fn line_at(table: &[u8], numbers: Numbers, bytecode: u32) -> Option<u32> {
    let mut best: Option<(u32, u32)> = None;
    for (index, line) in pairs(table, numbers) {
        // Lines need not ascend, nor the indices.
        if index == bytecode {
            return Some(line);
        }
        if index < bytecode && best.is_none_or(|(before, _)| index >= before) {
            best = Some((index, line));
        }
    }
    best.map(|(_, line)| line)
}

/// The pairs of a table: where in the bytecode a line begins, and its number.
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

    /// 0: line 41, 3: line 43, 40: line 12, 44: line 13.
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
