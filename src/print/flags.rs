//! Names of the bits of flag words.

/// Returns the names of the bits that are set, in the table's order, and the set bits that have no name.
pub fn names(bits: u64, table: &[(u64, &'static str)]) -> (Vec<&'static str>, u64) {
    let mut rest = bits;
    let names = table
        .iter()
        .filter(|(bit, _)| bits & bit != 0)
        .map(|(bit, name)| {
            rest &= !bit;
            *name
        })
        .collect();
    (names, rest)
}

/// Position of the size of huge pages in the flags of mmap(2) and shmget(2): a binary logarithm, 6 bits wide. 0 means
/// the default size.
const HUGE_SHIFT: u32 = 26;

/// Mask of the size of huge pages.
pub const HUGE_MASK: u64 = 0x3f << HUGE_SHIFT;

/// Returns the size of huge pages in the flags that ask for it, such as `2MB`, or None for the default size.
pub fn huge_page_size(flags: u64) -> Option<String> {
    let log2 = (flags & HUGE_MASK) >> HUGE_SHIFT;
    const UNITS: [&str; 7] = ["B", "KB", "MB", "GB", "TB", "PB", "EB"];
    (log2 != 0).then(|| format!("{}{}", 1 << (log2 % 10), UNITS[log2 as usize / 10]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_without_a_name_are_left_over() {
        let table = [(1, "A"), (4, "B")];
        assert_eq!(names(0b1101, &table), (vec!["A", "B"], 0b1000));
        assert_eq!(names(0, &table), (vec![], 0));
    }

    #[test]
    fn the_size_of_huge_pages_is_a_number_not_bits() {
        assert_eq!(huge_page_size(0), None);
        assert_eq!(huge_page_size(21 << 26), Some("2MB".into()));
        assert_eq!(huge_page_size(30 << 26), Some("1GB".into()));
        assert_eq!(huge_page_size(16 << 26), Some("64KB".into()));
        assert_eq!(huge_page_size(HUGE_MASK), Some("8EB".into()));
    }
}
