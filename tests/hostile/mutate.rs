//! Damages files where it hurts most: fields of headers and tables get values near limits.

use crate::random::Random;

/// Values that overflow what is computed from them, or nearly do.
const STRANGE: [u64; 16] = [
    0,
    1,
    7,
    0x7f,
    0xff,
    0xfff,
    0xffff,
    0x7fff_ffff,
    0x8000_0000,
    0xffff_ffff,
    1 << 40,
    (1 << 47) - 1,
    1 << 63,
    u64::MAX - 4095,
    u64::MAX - 7,
    u64::MAX,
];

fn number(bytes: &[u8], at: usize, length: usize) -> usize {
    let field = bytes.get(at..at + length).unwrap_or_default();
    field
        .iter()
        .rev()
        .fold(0, |number, &byte| number << 8 | usize::from(byte))
}

/// Returns the offset and size of each section of an ELF file.
fn sections(elf: &[u8]) -> Vec<(usize, usize)> {
    let (table, count) = (number(elf, 40, 8), number(elf, 60, 2));
    let headers = (0..count).map(|index| table + index * 64);
    headers
        .map(|at| (number(elf, at + 24, 8), number(elf, at + 32, 8)))
        .filter(|&(at, size)| size > 0 && at < elf.len() && size <= elf.len() - at)
        .collect()
}

/// Damages bytes somewhere in a part of the file.
fn scratch(bytes: &mut [u8], (start, length): (usize, usize), random: &mut Random) {
    let at = start + random.below(length);
    match random.below(4) {
        0 => bytes[at] = random.below(256) as u8,
        1 => bytes[at] ^= 1 << random.below(8),
        2 => {
            let length = random.below(64).min(bytes.len() - at);
            let value = random.pick(&[0, 0xff, 0x80, 0x7f, 0x1b]);
            bytes[at..at + length].fill(value);
        }
        _ => {
            let length = random.pick(&[2, 4, 8]);
            set(bytes, at, length, random);
        }
    }
}

fn set(bytes: &mut [u8], at: usize, length: usize, random: &mut Random) {
    let value = match random.below(3) {
        0 => bytes.len() as u64,
        1 => (number(bytes, at, length) as u64).wrapping_add(random.pick(&STRANGE)),
        _ => random.pick(&STRANGE),
    };
    if let Some(field) = bytes.get_mut(at..at + length) {
        field.copy_from_slice(&value.to_le_bytes()[..length]);
    }
}

/// Returns an ELF file that is damaged in some places.
pub(crate) fn elf(original: &[u8], random: &mut Random) -> Vec<u8> {
    let mut bytes = original.to_vec();
    let parts = sections(original);
    for _ in 0..1 + random.below(5) {
        match random.below(8) {
            // Damages a field of the file's header.
            0 => {
                let field = random.pick(&[(32, 8), (40, 8), (54, 2), (56, 2), (60, 2), (62, 2)]);
                set(&mut bytes, field.0, field.1, random);
            }
            // Damages a field of a segment's header. The next arm damages a section's.
            1 => {
                let header = number(original, 32, 8) + 56 * random.below(number(original, 56, 2));
                let field = random.pick(&[(0, 4), (4, 4), (8, 8), (16, 8), (32, 8), (40, 8)]);
                set(&mut bytes, header + field.0, field.1, random);
            }
            2 | 3 => {
                let header = number(original, 40, 8) + 64 * random.below(number(original, 60, 2));
                let field =
                    random.pick(&[(0, 4), (4, 4), (16, 8), (24, 8), (32, 8), (40, 4), (56, 8)]);
                set(&mut bytes, header + field.0, field.1, random);
            }
            4 if random.below(8) == 0 => bytes.truncate(random.below(original.len())),
            // Damages the content of a section.
            _ => {
                let part = random.pick(&parts);
                for _ in 0..random.pick(&[1, 3, 10, 100]) {
                    if part.0 + part.1 <= bytes.len() {
                        scratch(&mut bytes, part, random);
                    }
                }
            }
        }
    }
    bytes
}

/// Returns a text that is damaged in some places.
pub(crate) fn text(original: &[u8], random: &mut Random) -> Vec<u8> {
    let mut bytes = original.to_vec();
    for _ in 0..1 + random.below(8) {
        let at = random.below(bytes.len());
        match random.below(4) {
            0 if !bytes.is_empty() => bytes[at] = random.below(256) as u8,
            1 => bytes.truncate(at),
            2 => {
                let tail = bytes.split_off(at);
                bytes.extend_from_slice(&tail);
                bytes.extend_from_slice(&tail);
            }
            _ => {
                let length = random.below(16);
                let value = random.pick(b"\0\n 09afAF-:/\x1b\xff");
                bytes.splice(at..at, vec![value; length]);
            }
        }
    }
    bytes
}
