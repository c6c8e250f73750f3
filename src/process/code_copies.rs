//! Copies of a program's code in memory of no file on a disk, as programs make them to run in huge pages.
//!
//! A copy that was made while the code was probed has the probes' breakpoints. The kernel knows no probe there, so the
//! first breakpoint that is executed would end the program (SIGTRAP). [`restore`] puts back the original bytes. The
//! process has to be stopped meanwhile, and the probes removed, so that nothing is copied later.

use std::fs::{File, OpenOptions};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::Result;

use crate::bpf::attach;
use crate::code::instruction::{self, Code};
use crate::process::proc::{self, Mapping, Process};
use crate::process::reader;

/// Maximum time for which copies are looked for: meanwhile the process is stopped.
const PATIENCE: Duration = Duration::from_secs(2);
/// Bytes that are searched at once.
const PIECE: usize = 1 << 20;

/// Restores the instructions that breakpoints have replaced in copies of this code. `code` has the original bytes at
/// each breakpoint.
///
/// # Errors
/// If the memory of the process cannot be listed or written to: the process is going to end by SIGTRAP.
pub fn restore(process: &Process, code: &[Code]) -> Result<()> {
    let until = Instant::now() + PATIENCE;
    let pid = process.pid();
    let mut restored = 0;
    // Large files of memory (memfd) are copied to before they are mapped.
    for path in memory_files(pid) {
        let Ok(file) = OpenOptions::new().read(true).write(true).open(&path) else {
            continue;
        };
        let read = |at: u64, length: usize| read_file(&file, at, length);
        restored += restore_in(0..u64::MAX, code, until, read, &file)?;
    }
    let mut areas = process.mappings()?;
    areas.retain(is_memory);
    // Code first, then small areas: a heap can have gigabytes.
    areas.sort_by_key(|area| (!area.executable, area.range.end - area.range.start));
    let memory = OpenOptions::new()
        .write(true)
        .open(proc::file(pid, "mem"))?;
    for area in areas {
        let read = |at, length| reader::read_memory(pid, at, length).unwrap_or_default();
        restored += restore_in(area.range, code, until, read, &memory)?;
    }
    attach::log_verbose(format_args!(
        "restored {restored} instructions in copies of code of process {pid}"
    ));
    Ok(())
}

/// Restores the copies in a range of addresses, or of offsets in a file, up to the first byte that cannot be read.
fn restore_in(
    range: std::ops::Range<u64>,
    code: &[Code],
    until: Instant,
    read: impl Fn(u64, usize) -> Vec<u8>,
    to: &File,
) -> Result<usize> {
    let (mut at, mut restored) = (range.start, 0);
    while at < range.end && Instant::now() < until {
        // The next piece begins before the end of this one, as a breakpoint is recognized by what follows it.
        let overlap = size_of::<Code>();
        let left = usize::try_from(range.end - at).unwrap_or(usize::MAX);
        let bytes = read(at, left.min(PIECE + overlap));
        for (offset, original) in breakpoints(&bytes, code) {
            to.write_at(original, at + offset as u64)?;
            restored += 1;
        }
        if bytes.len() <= PIECE {
            break;
        }
        at += PIECE as u64;
    }
    Ok(restored)
}

/// Returns the offsets of breakpoints in a copy of this code, each with the original bytes of the breakpoint.
fn breakpoints<'a>(bytes: &'a [u8], code: &'a [Code]) -> impl Iterator<Item = (usize, &'a [u8])> {
    const BREAKPOINT: &[u8] = &instruction::BREAKPOINT;
    memchr::memmem::find_iter(bytes, BREAKPOINT).filter_map(|offset| {
        let copy = bytes.get(offset..offset + size_of::<Code>())?;
        // The instructions behind it can be probed as well.
        let is_probed = |from: &[u8]| code.iter().any(|other| other.starts_with(from));
        let is_of = |code: &&Code| {
            let mut at = BREAKPOINT.len();
            while at < code.len() {
                if copy[at..].starts_with(BREAKPOINT) && is_probed(&code[at..]) {
                    at += BREAKPOINT.len();
                } else if copy[at] == code[at] {
                    at += 1;
                } else {
                    return false;
                }
            }
            true
        };
        let code = code.iter().find(is_of)?;
        let original = &code[..BREAKPOINT.len()];
        (original != BREAKPOINT).then_some((offset, original))
    })
}

fn read_file(file: &File, at: u64, length: usize) -> Vec<u8> {
    let mut bytes = vec![0; length];
    let read = file.read_at(&mut bytes, at).unwrap_or(0);
    bytes.truncate(read);
    bytes
}

/// Whether a mapping is memory of no file on a disk, which the process can have copied code to.
fn is_memory(mapping: &Mapping) -> bool {
    let path = mapping.path.as_os_str().as_bytes();
    let of_kernel = [&b"[v"[..], b"[uprobes]"]
        .iter()
        .any(|name| path.starts_with(name));
    let no_disk = [&b"/memfd:"[..], b"/dev/", b"/anon_hugepage", b"/SYSV"];
    !of_kernel && (mapping.inode == 0 || no_disk.iter().any(|start| path.starts_with(start)))
}

/// Returns the paths of the open files of a process that are memory (memfd).
fn memory_files(pid: u32) -> Vec<PathBuf> {
    let is_memfd = |path: &Path| path.as_os_str().as_bytes().starts_with(b"/memfd:");
    proc::open_files(pid)
        .filter(|(_, target)| is_memfd(target))
        .map(|(number, _)| proc::file(pid, &format!("fd/{number}")))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::code::instruction::CODE_BYTES;

    #[test]
    fn breakpoints_are_recognized_by_what_follows_them() {
        const PLACES: [usize; 2] = [4, 8];
        let original: Vec<u8> = (0..=40).collect();
        let code =
            PLACES.map(|place| *original[place..].first_chunk::<CODE_BYTES>().expect("code"));
        let mut copy = original.clone();
        for place in PLACES {
            copy[place..][..instruction::BREAKPOINT.len()]
                .copy_from_slice(&instruction::BREAKPOINT);
        }
        // Padding.
        copy.extend(instruction::BREAKPOINT.repeat(20));
        let found: Vec<_> = breakpoints(&copy, &code).collect();
        let replaced = |place: usize| &original[place..][..instruction::BREAKPOINT.len()];
        assert_eq!(found, PLACES.map(|place| (place, replaced(place))));
    }

    #[test]
    fn memory_and_files_are_distinguished() {
        let parse = |line: &str| Mapping::parse(line.as_bytes()).expect("a mapping");
        for (line, memory) in [
            ("1000-2000 r-xp 00000000 00:00 0 ", true),
            ("1000-2000 rw-p 00000000 00:00 0    [heap]", true),
            (
                "1000-2000 r-xs 00000000 00:01 77   /memfd:text (deleted)",
                true,
            ),
            ("1000-2000 r-xp 00000000 fe:00 77   /usr/bin/php", false),
            ("1000-2000 r-xp 00000000 00:00 0    [vdso]", false),
        ] {
            assert_eq!(is_memory(&parse(line)), memory, "{line}");
        }
    }
}
