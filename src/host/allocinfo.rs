//! /proc/allocinfo: outstanding allocations by line of the kernel's code (CONFIG_MEM_ALLOC_PROFILING, from 6.10 on).

use std::fs;

use anyhow::{Context, Result};

use crate::print::text;

/// Line of code with its outstanding allocations.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Site {
    /// `file:line func:function`, with the module in brackets between the two, escaped.
    pub code: String,
    /// Bytes that were allocated there, and not freed.
    pub bytes: u64,
    /// Number of these allocations.
    pub calls: u64,
}

/// Reads all lines of code that have outstanding allocations.
///
/// # Errors
/// If this kernel has no such file, or this user may not read it.
pub fn read() -> Result<Vec<Site>> {
    let text = fs::read_to_string("/proc/allocinfo").context(
        "failed to read /proc/allocinfo, which is of root alone, and of kernels with \
         CONFIG_MEM_ALLOC_PROFILING and vm.mem_profiling=1",
    )?;
    Ok(parse(&text))
}

fn parse(text: &str) -> Vec<Site> {
    let site = |line: &str| {
        let (bytes, rest) = line.trim_start().split_once(' ')?;
        let (calls, code) = rest.trim_start().split_once(' ')?;
        let site = Site {
            code: text::escape(code.trim()).into_owned(),
            bytes: bytes.parse().ok()?,
            calls: calls.parse().ok()?,
        };
        (site.bytes > 0).then_some(site)
    };
    text.lines().filter_map(site).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_that_hold_nothing_and_headings_are_left_out() {
        let text = "allocinfo - version: 1.0\n\
                    #     <size>  <calls> <tag info>\n\
                    \x20          0        0 init/main.c:1314 func:do_initcalls\n\
                    \x20   1785856      218 mm/slub.c:2277 func:alloc_slab_page\n\
                    \x20       512        1 fs/ext4/super.c:1 [ext4] func:x\x1b\n\
                    x 1 y\n99999999999999999999 1 z\n12\n";
        let site = |code: &str, bytes, calls| Site {
            code: code.to_owned(),
            bytes,
            calls,
        };
        assert_eq!(
            parse(text),
            [
                site("mm/slub.c:2277 func:alloc_slab_page", 1_785_856, 218),
                site("fs/ext4/super.c:1 [ext4] func:x\\x1b", 512, 1),
            ]
        );
    }
}
