//! Names that JIT compilers write down: `/tmp/perf-PID.map`, one `START SIZE NAME` a line.

use std::collections::BTreeMap;

/// Functions of generated code by address.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct PerfMap {
    /// By first address: bytes and name. A later line for the same address replaces the earlier.
    functions: BTreeMap<u64, (u64, String)>,
}

impl PerfMap {
    /// Reads the file's text. Lines that do not parse are skipped: the compiler may be writing.
    pub fn parse(text: &str) -> Self {
        let functions = text
            .lines()
            .filter_map(|line| {
                let (start, rest) = line.split_once(' ')?;
                let (size, name) = rest.split_once(' ')?;
                let hex = |digits: &str| {
                    u64::from_str_radix(digits.strip_prefix("0x").unwrap_or(digits), 16).ok()
                };
                Some((hex(start)?, (hex(size)?, name.to_owned())))
            })
            .collect();
        Self { functions }
    }

    /// The function that the address is in, and the offset from its start.
    pub fn find(&self, address: u64) -> Option<(&str, u64)> {
        let (start, (size, name)) = self.functions.range(..=address).next_back()?;
        let offset = address - start;
        (offset < *size).then_some((name.as_str(), offset))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_end_where_the_function_ends() {
        let map =
            PerfMap::parse("1000 20 LazyCompile:~f a.js:1\n0x2000 0x8 g\nbroken\n3000 zz h\n");
        assert_eq!(map.find(0x1000), Some(("LazyCompile:~f a.js:1", 0)));
        assert_eq!(map.find(0x101f), Some(("LazyCompile:~f a.js:1", 0x1f)));
        assert_eq!(map.find(0x1020), None);
        assert_eq!(map.find(0x2007), Some(("g", 7)));
        assert_eq!(map.find(0xfff), None);
        assert_eq!(map.find(0x3000), None);
    }

    #[test]
    fn code_compiled_again_at_the_same_place_has_its_new_name() {
        let map = PerfMap::parse("1000 20 old\n1000 10 new\n");
        assert_eq!(map.find(0x1008), Some(("new", 8)));
        assert_eq!(map.find(0x1018), None);
    }
}
