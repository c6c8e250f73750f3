//! /proc/PID/smaps: how much of each mapping is in memory, by kind.

use anyhow::{Context, Result, ensure};

use crate::process::proc::{self, Mapping};
use crate::process::reader;

/// Maximum number of bytes of /proc/PID/smaps: about 350,000 mappings.
const MOST: usize = 256 << 20;

/// Mapping, with the sizes that the kernel finds by walking the page tables.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MappedMemory {
    /// The addresses and the file of the mapping.
    pub mapping: Mapping,
    /// Resident bytes, without hugetlbfs.
    pub resident: u64,
    /// Resident bytes that are anonymous.
    pub anonymous: u64,
    /// Anonymous bytes in transparent huge pages.
    pub huge: u64,
    /// Bytes in pages of hugetlbfs.
    pub hugetlb: u64,
    /// Swapped bytes.
    pub swap: u64,
}

/// Reads the mappings of a process, one after the other. The kernel holds the process's mmap_lock for some mappings
/// at a time, and releases it between two reads.
///
/// # Errors
/// If the process has exited or does not answer, if permission is denied, or if there are too many mappings.
pub fn read(pid: u32) -> Result<Vec<MappedMemory>> {
    let lines = reader::read_file(pid, "smaps", MOST)
        .with_context(|| format!("failed to read {}", proc::file(pid, "smaps").display()))?;
    ensure!(
        lines.len() < MOST,
        "process {pid} has too many mappings to read their sizes"
    );
    let mut all = Vec::new();
    for line in lines.split(|&byte| byte == b'\n') {
        add_line(&mut all, line);
    }
    Ok(all)
}

/// Parses a line: adds a mapping, or sets a size of the last mapping. Sizes with unknown names are ignored.
fn add_line(all: &mut Vec<MappedMemory>, line: &[u8]) {
    let Some((name, bytes)) = number(line) else {
        let mapping = Mapping::parse(line).map(|mapping| MappedMemory {
            mapping,
            resident: 0,
            anonymous: 0,
            huge: 0,
            hugetlb: 0,
            swap: 0,
        });
        all.extend(mapping);
        return;
    };
    let Some(last) = all.last_mut() else {
        return;
    };
    match name {
        b"Rss" => last.resident = bytes,
        b"Anonymous" => last.anonymous = bytes,
        b"AnonHugePages" => last.huge = bytes,
        b"Private_Hugetlb" | b"Shared_Hugetlb" => last.hugetlb += bytes,
        b"Swap" => last.swap = bytes,
        _ => {}
    }
}

/// Parses a line such as `Rss:    12 kB` into its name and the number of bytes.
fn number(line: &[u8]) -> Option<(&[u8], u64)> {
    let colon = line.iter().position(|&byte| byte == b':')?;
    let rest = line[colon + 1..].trim_ascii().strip_suffix(b" kB")?;
    let kilobytes: u64 = str::from_utf8(rest).ok()?.parse().ok()?;
    Some((&line[..colon], kilobytes.checked_mul(1024)?))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn numbers_belong_to_the_mapping_before_them() {
        let text = "Rss: 1 kB\n\
            55d0c8a00000-55d0c8a21000 r-xp 00002000 fe:00 1234    /tmp/Rss: 7 kB\n\
            Size:                132 kB\nRss:                  12 kB\nAnonymous:             4 kB\n\
            AnonHugePages:         0 kB\nPrivate_Hugetlb:       0 kB\nVmFlags: rd ex mr mw me\n\
            7f0000000000-7f0000400000 rw-p 00000000 00:00 0 \n\
            Rss:                2048 kB\nAnonHugePages:      2048 kB\nShared_Hugetlb:        2 kB\n\
            Private_Hugetlb:       1 kB\nSwap:                  8 kB\nNew: x kB\nRss: 99999999999999999999 kB\n";
        let mut all = Vec::new();
        for line in text.lines() {
            add_line(&mut all, line.as_bytes());
        }
        assert_eq!(all.len(), 2, "{all:?}");
        // The path of a file may look like a size.
        assert_eq!(all[0].mapping.path, Path::new("/tmp/Rss: 7 kB"));
        assert_eq!((all[0].resident, all[0].anonymous), (12 << 10, 4 << 10));
        let second = &all[1];
        assert_eq!((second.resident, second.huge), (2 << 20, 2 << 20));
        assert_eq!((second.hugetlb, second.swap), (3 << 10, 8 << 10));
    }

    #[test]
    fn this_process_has_a_stack() {
        let all = read(std::process::id()).expect("it runs");
        let stack = all
            .iter()
            .find(|one| one.mapping.path == Path::new("[stack]"))
            .expect("a stack");
        assert!(stack.resident > 0 && stack.anonymous == stack.resident);
        let beyond = read(u32::MAX).expect_err("no such process");
        assert!(beyond.to_string().contains("smaps"), "{beyond:#}");
    }
}
