//! Files with a named number on each line: `/proc/meminfo`, `/proc/vmstat`, `/proc/PID/status`, `memory.stat`,
//! `memory.events`.

use std::collections::HashMap;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

/// Numbers of one file by their names, including names that newer kernels have added.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Values(HashMap<String, u64>);

impl Values {
    /// Reads the numbers of a file of /proc, /sys or a cgroup.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub fn read(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let text = fs::read(path).with_context(|| format!("failed to read {}", path.display()))?;
        Ok(Self::parse(&String::from_utf8_lossy(&text)))
    }

    /// Parses lines such as `MemTotal:  24684084 kB` and `pgfault 1317`. Numbers in kB are converted to bytes. Other
    /// lines are ignored.
    pub fn parse(text: &str) -> Self {
        let value = |line: &str| -> Option<(String, u64)> {
            let mut words = line.split_ascii_whitespace();
            let name = words.next()?.trim_end_matches(':');
            let number = words.next()?.parse::<u64>().ok()?;
            let number = match words.next() {
                Some("kB") => number.checked_mul(1024)?,
                Some(_) => return None,
                None => number,
            };
            Some((name.to_owned(), number))
        };
        Self(text.lines().filter_map(value).collect())
    }

    /// Returns the number with this name, in bytes if the file has it in kB. None if this kernel does not report it.
    pub fn get(&self, name: &str) -> Option<u64> {
        self.0.get(name).copied()
    }

    /// Returns the number with this name, or 0 if this kernel does not report it.
    pub fn get_or_zero(&self, name: &str) -> u64 {
        self.get(name).unwrap_or_default()
    }

    /// Returns the sum of all numbers whose names begin with `prefix`: `allocstall_` has one for each zone.
    pub fn sum_of(&self, prefix: &str) -> u64 {
        let with_prefix = self.0.iter().filter(|(name, _)| name.starts_with(prefix));
        with_prefix.map(|(_, number)| number).sum()
    }
}

/// Returns the numbers with these names of a file such as `memory.stat`, without conversion, and None for each that the
/// file does not have. Does not allocate.
pub(crate) fn pick<const N: usize>(file: &[u8], names: [&str; N]) -> [Option<u64>; N] {
    let mut found = [None; N];
    for line in file.split(|&byte| byte == b'\n') {
        let end = line.iter().position(|byte| b" :".contains(byte));
        let Some((name, rest)) = end.and_then(|end| line.split_at_checked(end)) else {
            continue;
        };
        let Some(at) = names.iter().position(|wanted| wanted.as_bytes() == name) else {
            continue;
        };
        let digits = rest.iter().skip_while(|byte| !byte.is_ascii_digit());
        let digits = digits.map_while(|byte| byte.is_ascii_digit().then(|| u64::from(byte - b'0')));
        found[at] = digits
            .map(Some)
            .reduce(|number, digit| number?.checked_mul(10)?.checked_add(digit?))
            .flatten();
    }
    found
}

/// Returns the number of free pages in per-CPU lists, from `/proc/zoneinfo`. `MemFree` does not count these pages.
pub fn pages_in_cpu_lists(zoneinfo: &str) -> u64 {
    let count = |line: &str| {
        let count = line.trim_start().strip_prefix("count:")?;
        count.trim().parse::<u64>().ok()
    };
    zoneinfo.lines().filter_map(count).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_known_by_name_and_kilobytes_are_bytes() {
        let values = Values::parse(
            "MemTotal:       24684084 kB\nHugePages_Total:       3\npgfault 1317\n\
             Name:\tsh\nallocstall_dma 1\nallocstall_normal 4\nodd 1 MB\n\n:\n",
        );
        assert_eq!(values.get("MemTotal"), Some(24_684_084 << 10));
        assert_eq!(values.get("HugePages_Total"), Some(3));
        assert_eq!(values.get("pgfault"), Some(1317));
        assert_eq!(values.sum_of("allocstall_"), 5);
        assert_eq!(
            (
                values.get("Name"),
                values.get("odd"),
                values.get_or_zero("none")
            ),
            (None, None, 0)
        );
    }

    #[test]
    fn only_the_wanted_numbers_are_picked() {
        let file =
            b"file 37\nfile_mapped 5\nMemTotal:   24 kB\nx 99999999999999999999\n\ny\nz max\n";
        assert_eq!(
            pick(file, ["MemTotal", "file", "none", "x", "z", ""]),
            [Some(24), Some(37), None, None, None, None]
        );
    }

    #[test]
    fn a_number_that_overflows_is_left_out() {
        let values = Values::parse("VmSize: 18446744073709551615 kB\nx 99999999999999999999\n");
        assert_eq!(values, Values::default());
    }

    #[test]
    fn free_pages_of_all_cpus_and_zones_are_added() {
        let zoneinfo = "Node 0, zone      DMA\n  pagesets\n    cpu: 0\n              count:    12\n\
                        \x20             high:  0\n    cpu: 1\n              count: 345\n";
        assert_eq!(pages_in_cpu_lists(zoneinfo), 357);
    }
}
