//! Source lines of the instructions of a code object, from CPython's line tables.
//!
//! `co_linetable` of 3.10 is a sequence of pairs of bytes: a number of bytes of bytecode, and the difference between
//! the line and the line of the previous pair. A difference of −128 marks code without a line (PEP 626).
//! `co_linetable` of 3.11 and later, the location table, has an entry of one or more bytes for 1 to 8 code units
//! (Objects/locations.md of CPython).

/// An instruction in a code object, counted in code units of two bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Instruction {
    /// The frame has not started: its next instruction is the first.
    NotBegun,
    /// The index of the code unit.
    At(u32),
}

impl Instruction {
    /// Number of low bits of a word that hold the instruction.
    pub const BITS: u32 = 20;
    /// First value that is not a code unit: −2 and −1 of 3.10 to 3.12 mean that the frame has not started.
    const NOT_BEGUN: u32 = (1 << Self::BITS) - 2;

    /// Decodes the instruction in the lowest bits of a word.
    pub(crate) fn of_word(word: u64) -> Self {
        match word as u32 & ((1 << Self::BITS) - 1) {
            Self::NOT_BEGUN.. => Self::NotBegun,
            unit => Self::At(unit),
        }
    }
}

/// Returns the source line of an instruction. None if the instruction belongs to no line, or `table` does not cover
/// it.
///
/// `minor` is the minor version: 10 for 3.10. `first` is the first line of the code object.
pub fn line(minor: u8, table: &[u8], first: u32, instruction: Instruction) -> Option<u32> {
    let Instruction::At(unit) = instruction else {
        return (first > 0).then_some(first);
    };
    let mut end = 0u64;
    let mut found = None;
    for entry in entries(minor, table, first) {
        let begin = end;
        end += u64::from(entry.units);
        if (begin..end).contains(&unit.into()) {
            found = entry.line;
        }
    }
    // In longer code, several instructions have the same bits in a word.
    found.filter(|_| end <= Instruction::NOT_BEGUN.into())
}

/// Run of code units that belong to one line.
struct Entry {
    units: u32,
    line: Option<u32>,
}

fn entries(minor: u8, table: &[u8], first: u32) -> Box<dyn Iterator<Item = Entry> + '_> {
    let line = i64::from(first);
    if minor <= 10 {
        Box::new(Pairs { table, line })
    } else {
        Box::new(Locations { table, line })
    }
}

/// Iterator over the entries of a line table of 3.10.
struct Pairs<'a> {
    table: &'a [u8],
    line: i64,
}

impl Iterator for Pairs<'_> {
    type Item = Entry;

    fn next(&mut self) -> Option<Entry> {
        const NO_LINE: i8 = -128;
        let (&[bytes, delta], rest) = self.table.split_first_chunk()?;
        self.table = rest;
        let delta = delta.cast_signed();
        if delta != NO_LINE {
            self.line += i64::from(delta);
        }
        Some(Entry {
            units: u32::from(bytes / 2),
            line: number(self.line).filter(|_| delta != NO_LINE),
        })
    }
}

/// Iterator over the entries of a location table.
struct Locations<'a> {
    table: &'a [u8],
    line: i64,
}

impl Locations<'_> {
    fn byte(&mut self) -> Option<u8> {
        let (&byte, rest) = self.table.split_first()?;
        self.table = rest;
        Some(byte)
    }

    /// Reads an unsigned number: six bits per byte, the lowest first; bit 6 is set if another byte follows. None if
    /// the number has more than 32 bits, or the table ends.
    fn unsigned(&mut self) -> Option<u32> {
        let mut number = 0u64;
        for shift in (0..u32::BITS).step_by(6) {
            let byte = self.byte()?;
            number |= u64::from(byte & 63) << shift;
            if byte & 64 == 0 {
                return u32::try_from(number).ok();
            }
        }
        None
    }

    /// Reads a number like [`Self::unsigned`], and takes its bit 0 as the sign.
    fn signed(&mut self) -> Option<i64> {
        let number = self.unsigned()?;
        let size = i64::from(number >> 1);
        Some(if number & 1 == 0 { size } else { -size })
    }

    /// Consumes the rest of an entry. Returns the difference between its line and the previous line; the inner None
    /// is an entry without a line.
    fn delta(&mut self, kind: u8) -> Option<Option<i64>> {
        let delta = match kind {
            // One byte of columns.
            0..=9 => {
                self.byte()?;
                0
            }
            // Two bytes of columns.
            10..=12 => {
                self.byte()?;
                self.byte()?;
                i64::from(kind - 10)
            }
            // No columns.
            13 => self.signed()?,
            // Line, last line, and columns.
            14 => {
                let delta = self.signed()?;
                for _ in 0..3 {
                    self.unsigned()?;
                }
                delta
            }
            _ => return Some(None),
        };
        Some(Some(delta))
    }
}

impl Iterator for Locations<'_> {
    type Item = Entry;

    fn next(&mut self) -> Option<Entry> {
        let head = self.byte()?;
        let delta = self.delta(head >> 3 & 15)?;
        self.line += delta.unwrap_or(0);
        Some(Entry {
            units: u32::from(head & 7) + 1,
            line: delta.and_then(|_| number(self.line)),
        })
    }
}

/// Returns the number of a line if it is valid.
fn number(line: i64) -> Option<u32> {
    u32::try_from(line).ok().filter(|&line| line > 0)
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use proptest::prelude::*;

    use super::*;
    use crate::interpreters::search::tests::is_missing;

    /// Compiled function with a `try` in a loop, 80 empty lines before its `finally`, and a comprehension. It was
    /// compiled by `compile(source, 'orders.py', 'exec')` of the Pythons that pyenv builds. The fields are the
    /// version, `co_linetable`, the number of code units, and the units at which the line changes, as `co_lines()`
    /// returns them; 0 is no line.
    struct Compiled {
        minor: u8,
        table: &'static [u8],
        units: u32,
        runs: &'static [(u32, u32)],
    }

    const COMPILED: [Compiled; 3] = [
        // 3.10.13
        Compiled {
            minor: 10,
            table: &[
                4, 3, 8, 1, 4, 1, 4, 1, 4, 1, 10, 255, 12, 3, 4, 1, 10, 85, 2, 170, 2, 253, 20, 89,
                8, 1, 2, 1, 8, 255,
            ],
            units: 51,
            runs: &[
                (0, 4),
                (2, 5),
                (6, 6),
                (8, 7),
                (10, 8),
                (12, 7),
                (17, 10),
                (23, 11),
                (25, 96),
                (30, 10),
                (31, 7),
                (32, 96),
                (42, 97),
                (46, 98),
                (47, 97),
            ],
        },
        // 3.11.7
        Compiled {
            minor: 11,
            table: &[
                128, 0, 240, 6, 0, 13, 14, 128, 69, 216, 15, 19, 240, 0, 91, 1, 5, 23, 240, 0, 91,
                1, 5, 23, 136, 3, 240, 2, 90, 1, 9, 23, 216, 12, 17, 149, 83, 216, 16, 19, 148, 8,
                241, 3, 2, 22, 14, 244, 0, 2, 22, 14, 241, 0, 2, 13, 14, 136, 69, 136, 69, 248,
                245, 6, 0, 16, 24, 240, 0, 1, 9, 21, 240, 0, 1, 9, 21, 240, 0, 1, 9, 21, 216, 12,
                20, 240, 106, 2, 0, 13, 18, 144, 81, 137, 74, 136, 69, 136, 69, 240, 109, 2, 1, 9,
                21, 248, 248, 248, 240, 7, 0, 13, 18, 240, 114, 2, 0, 13, 18, 144, 81, 137, 74,
                136, 69, 136, 69, 248, 136, 69, 144, 81, 137, 74, 136, 69, 136, 69, 136, 69, 136,
                69, 136, 69, 240, 2, 1, 12, 31, 240, 0, 1, 12, 31, 152, 5, 216, 24, 28, 240, 3, 1,
                24, 30, 240, 0, 1, 12, 31, 241, 0, 1, 12, 31, 244, 0, 1, 12, 31, 240, 0, 1, 5, 31,
            ],
            units: 84,
            runs: &[
                (0, 1),
                (1, 4),
                (3, 5),
                (7, 6),
                (8, 7),
                (15, 8),
                (21, 7),
                (32, 0),
                (33, 10),
                (42, 11),
                (43, 96),
                (49, 10),
                (50, 0),
                (53, 7),
                (54, 96),
                (60, 0),
                (61, 96),
                (70, 97),
                (73, 98),
                (74, 97),
            ],
        },
        // 3.13.0
        Compiled {
            minor: 13,
            table: &[
                128, 0, 240, 6, 0, 13, 14, 128, 69, 219, 15, 19, 136, 3, 240, 2, 90, 1, 9, 23, 216,
                12, 17, 148, 83, 216, 16, 19, 151, 8, 145, 8, 243, 3, 2, 22, 14, 241, 0, 2, 13, 14,
                137, 69, 240, 114, 2, 0, 13, 18, 144, 81, 137, 74, 138, 69, 241, 119, 2, 0, 16, 20,
                240, 120, 2, 0, 25, 30, 216, 24, 28, 241, 3, 1, 24, 30, 243, 0, 1, 12, 31, 241, 0,
                1, 24, 30, 144, 33, 138, 65, 241, 0, 1, 24, 30, 241, 0, 1, 12, 31, 240, 0, 1, 5,
                31, 248, 244, 111, 2, 0, 16, 24, 243, 0, 1, 9, 21, 216, 12, 20, 240, 106, 2, 0, 13,
                18, 144, 81, 137, 74, 138, 69, 240, 109, 2, 1, 9, 21, 251, 240, 108, 2, 0, 13, 18,
                144, 81, 137, 74, 137, 69, 252, 242, 2, 1, 12, 31,
            ],
            units: 99,
            runs: &[
                (0, 1),
                (1, 4),
                (3, 5),
                (8, 6),
                (9, 7),
                (15, 8),
                (26, 7),
                (34, 96),
                (41, 5),
                (43, 97),
                (44, 98),
                (45, 97),
                (62, 0),
                (63, 10),
                (72, 11),
                (73, 96),
                (80, 10),
                (81, 0),
                (85, 96),
                (91, 0),
                (96, 97),
            ],
        },
    ];

    /// Returns the lines of the first `units` code units, each with the unit at which it begins; 0 is no line.
    fn runs(minor: u8, table: &[u8], first: u32, units: u32) -> Vec<(u32, u32)> {
        let mut runs: Vec<(u32, u32)> = Vec::new();
        for unit in 0..units {
            let line = line(minor, table, first, Instruction::At(unit)).unwrap_or(0);
            if runs.last().is_none_or(|&(_, last)| last != line) {
                runs.push((unit, line));
            }
        }
        runs
    }

    #[test]
    fn lines_are_those_that_python_tells() {
        for of in COMPILED {
            assert_eq!(
                runs(of.minor, of.table, 1, of.units),
                of.runs,
                "3.{}",
                of.minor
            );
            let behind = Instruction::At(of.units);
            assert_eq!(line(of.minor, of.table, 1, behind), None);
        }
    }

    #[test]
    fn a_frame_that_has_not_begun_is_in_its_first_line() {
        for minus in [1u64, 2] {
            let word = (1 << 63 | 5 << 20) | minus.wrapping_neg() & 0xfffff;
            assert_eq!(Instruction::of_word(word), Instruction::NotBegun);
        }
        assert_eq!(line(11, &[], 41, Instruction::NotBegun), Some(41));
        assert_eq!(line(11, &[], 0, Instruction::NotBegun), None);
        let word = 1 << 63 | 5 << 20 | 0xffffd;
        assert_eq!(Instruction::of_word(word), Instruction::At(0xffffd));
    }

    #[test]
    fn code_without_a_line_has_none_and_the_next_goes_on_from_the_line_before() {
        // Two units of line 8, one without a line, one of line 9.
        let pairs = [4, 1, 2, 128, 2, 1];
        assert_eq!(runs(10, &pairs, 7, 4), [(0, 8), (2, 0), (3, 9)]);
        let locations = [0x80 | 11 << 3 | 1, 0, 0, 0x80 | 15 << 3, 0x80 | 13 << 3, 2];
        assert_eq!(runs(11, &locations, 7, 4), [(0, 8), (2, 0), (3, 9)]);
    }

    #[test]
    fn numbers_have_at_most_32_bits() {
        let line_of = |sixth: u8| {
            let table = [0x80 | 13 << 3, 64, 64, 64, 64, 64, sixth];
            line(11, &table, 7, Instruction::At(0))
        };
        assert_eq!(line_of(2), Some(7 + (1 << 30)));
        assert_eq!(line_of(4), None);
    }

    /// Code of two megabytes would get wrong lines, because a word has 20 bits for the instruction.
    #[test]
    fn code_too_long_for_a_word_has_no_lines() {
        let of = |units: usize| [0x87, 0].repeat(units / 8);
        let longest = of(0xffff8);
        assert_eq!(line(12, &longest, 7, Instruction::At(3)), Some(7));
        assert_eq!(line(12, &of(0x100_000), 7, Instruction::At(3)), None);
    }

    /// Compares all lines of all code objects of a module with the lines that this machine's Python returns.
    #[test]
    fn the_python_of_this_machine_agrees() {
        const TELL: &str = "
import sys, argparse, inspect
def each(code):
    yield code
    for const in code.co_consts:
        if inspect.iscode(const): yield from each(const)
print(sys.version_info[1])
for code in each(compile(open(argparse.__file__).read(), 'argparse.py', 'exec')):
    lines = [0] * (len(code.co_code) // 2)
    for start, end, line in code.co_lines():
        for unit in range(start // 2, end // 2): lines[unit] = line or 0
    print(code.co_firstlineno, code.co_linetable.hex(), ','.join(map(str, lines)))
";
        if is_missing("python3") {
            return;
        }
        let python = Command::new("python3").args(["-c", TELL]).output();
        let python = python.expect("a Python");
        let told = String::from_utf8(python.stdout).expect("ASCII");
        let mut rows = told.lines();
        let minor: u8 = rows
            .next()
            .and_then(|minor| minor.parse().ok())
            .expect("a version");
        if !(10..=15).contains(&minor) {
            eprintln!("Python 3.{minor} has another line table: not compared");
            return;
        }
        let mut units = 0;
        for row in rows {
            let words: Vec<&str> = row.split(' ').collect();
            let first = words[0].parse().expect("a line");
            let table = words[1].as_bytes().chunks(2);
            let table = table
                .map(|hex| std::str::from_utf8(hex).expect("ASCII"))
                .map(|hex| u8::from_str_radix(hex, 16).expect("a byte"));
            let table: Vec<u8> = table.collect();
            for (unit, told) in words[2].split(',').enumerate() {
                let found = line(minor, &table, first, Instruction::At(unit as u32));
                assert_eq!(found.unwrap_or(0).to_string(), told, "unit {unit} of {row}");
                units += 1;
            }
        }
        assert!(units > 5_000, "{units}");
    }

    proptest! {
        #[test]
        fn any_bytes_have_a_line_or_none(
            minor in 0..20u8,
            table in prop::collection::vec(any::<u8>(), 0..400),
            first: u32,
            word: u64,
        ) {
            let _ = line(minor, &table, first, Instruction::of_word(word));
        }
    }
}
