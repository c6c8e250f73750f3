//! Perf maps, in which JIT compilers name their functions: `/tmp/perf-PID.map`, one `START SIZE NAME` a line.
//!
//! Everybody can write to `/tmp`. So a map is read only if it is a regular file of the process's own user and no
//! symbolic link: otherwise the user could make root read and print the files of others. Each read continues where the
//! last one ended, and memory is bounded.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;

use crate::print::text::{self, MAX_NAME};
use crate::process::mapped_file;
use crate::process::proc::Process;

/// Maximum size in bytes of all maps in memory.
const MAX_KEPT: usize = 64 << 20;
/// Overhead of a function beside its name, in bytes.
const OVERHEAD: usize = 48;
/// Maximum number of bytes of a file that one refresh reads; the next refresh reads on.
const MAX_READ: u64 = 64 << 20;
/// Maximum number of bytes of a file that are read at all.
const MAX_FILE: u64 = 256 << 20;
/// Bytes that are read at a time.
const CHUNK: usize = 256 << 10;
/// Number of bytes before the read position that show, at the next read, whether the file was rewritten.
const TAIL_BYTES: usize = 512;
/// Maximum length of a line in bytes: two numbers and a name. The rest of a longer one is skipped.
const MAX_LINE: usize = 40 + MAX_NAME;

/// A function, or what later functions have left of it. Its key in the map is the first address that is left.
#[derive(Clone, Debug, PartialEq)]
struct Function {
    start: u64,
    /// End of what is left.
    end: u64,
    name: Box<str>,
}

impl Function {
    /// Memory in use, in bytes.
    fn kept(&self) -> usize {
        OVERHEAD + self.name.len()
    }
}

/// Functions of generated code by address.
#[derive(Debug, Default)]
struct PerfMap {
    /// By address. A later line replaces what earlier lines say of its addresses: compilers use memory again.
    functions: BTreeMap<u64, Function>,
    /// Memory in use, in bytes.
    kept: usize,
    /// Device and inode of the file. `read` is the position up to which it was read: behind the last whole line.
    file: (u64, u64),
    read: u64,
    /// The last bytes before that position.
    tail: Vec<u8>,
    /// Whether the read position is in the middle of a line that is too long.
    skipping: bool,
    /// Whether functions were omitted for lack of memory.
    full: bool,
}

impl PerfMap {
    /// Reads what has been added to the file, or all of it if it was rewritten. Lines that do not parse are skipped:
    /// the compiler may be writing.
    fn read(&mut self, file: &File) -> io::Result<()> {
        let metadata = file.metadata()?;
        let identity = (metadata.dev(), metadata.ino());
        if self.file != identity || metadata.len() < self.read || !self.tail_unchanged(file) {
            *self = Self {
                file: identity,
                ..Self::default()
            };
        }
        let end = metadata.len().min(self.read + MAX_READ).min(MAX_FILE);
        let mut chunk = vec![0; CHUNK];
        while self.read < end && !self.full {
            let wanted = CHUNK.min((end - self.read) as usize);
            let length = file.read_at(&mut chunk[..wanted], self.read)?;
            let is_last = self.read + length as u64 >= end;
            let used = self.take(&chunk[..length], is_last);
            // The file was truncated, or nothing but the beginning of a line is left.
            if used == 0 {
                break;
            }
            self.read += used as u64;
            self.tail
                .extend_from_slice(&chunk[used.saturating_sub(TAIL_BYTES)..used]);
            self.tail
                .drain(..self.tail.len().saturating_sub(TAIL_BYTES));
        }
        Ok(())
    }

    /// Whether the file still has the bytes that were read last. Another file can have its inode, and the compiler can
    /// have rewritten all of it.
    fn tail_unchanged(&self, file: &File) -> bool {
        let mut there = vec![0; self.tail.len()];
        let from = self.read - there.len() as u64;
        file.read_exact_at(&mut there, from).is_ok() && there == self.tail
    }

    /// Parses the lines of a part of the file. Returns how many bytes are consumed: all whole lines. The last line may
    /// have no end yet, and is read again later.
    fn take(&mut self, bytes: &[u8], is_last: bool) -> usize {
        let mut used = 0;
        for line in bytes.split_inclusive(|&byte| byte == b'\n') {
            let is_whole = line.ends_with(b"\n");
            if !self.skipping && (is_whole || is_last || line.len() > MAX_LINE) {
                self.add(&line[..line.len().min(MAX_LINE)]);
            }
            // A line that is too long is consumed before its end is there.
            if is_whole || self.skipping || line.len() > MAX_LINE {
                used += line.len();
                self.skipping = !is_whole;
            }
        }
        used
    }

    fn add(&mut self, line: &[u8]) {
        let line = String::from_utf8_lossy(line);
        let Some((start, size, name)) = parse(line.trim_end_matches(['\n', '\r'])) else {
            return;
        };
        if size == 0 {
            return;
        }
        let function = Function {
            start,
            end: start.saturating_add(size),
            name: name.into(),
        };
        if self.kept + function.kept() > MAX_KEPT {
            self.full = true;
            return;
        }
        self.vacate(start, function.end);
        self.insert(start, function);
    }

    /// Adds a function, whose addresses no other has.
    fn insert(&mut self, from: u64, function: Function) {
        self.kept += function.kept();
        self.functions.insert(from, function);
    }

    /// Removes these addresses from the functions that have them.
    fn vacate(&mut self, start: u64, end: u64) {
        while let Some((&from, function)) = self.functions.range(..end).next_back()
            && function.end > start
            && let Some(function) = self.functions.remove(&from)
        {
            self.kept -= function.kept();
            if function.end > end {
                self.insert(end, function.clone());
            }
            if from < start {
                self.insert(
                    from,
                    Function {
                        end: start,
                        ..function
                    },
                );
            }
        }
    }

    /// Returns the function at an address, and the offset from the function's start.
    fn find(&self, address: u64) -> Option<(&str, u64)> {
        let (_, function) = self.functions.range(..=address).next_back()?;
        (address < function.end).then(|| (&*function.name, address - function.start))
    }
}

fn parse(line: &str) -> Option<(u64, u64, &str)> {
    let (start, rest) = line.split_once(' ')?;
    let (size, name) = rest.split_once(' ')?;
    let hex =
        |digits: &str| u64::from_str_radix(digits.strip_prefix("0x").unwrap_or(digits), 16).ok();
    Some((hex(start)?, hex(size)?, name))
}

/// Perf maps of processes.
#[derive(Debug, Default)]
pub struct PerfMaps {
    /// Maps by process, each with the number of its last read.
    maps: HashMap<u32, (u64, PerfMap)>,
    reads: u64,
    told: bool,
}

impl PerfMaps {
    /// Reads what a process has added to its map.
    pub fn refresh(&mut self, pid: u32) {
        let Ok(file) = open(pid) else { return };
        self.reads += 1;
        let (used, map) = self.maps.entry(pid).or_default();
        *used = self.reads;
        // Functions that were read before an error are kept.
        let _ = map.read(&file);
        if map.full && !self.told {
            self.told = true;
            crate::note!(
                "some names of generated code are skipped: process {pid} has more than {} MiB \
                 of them",
                MAX_KEPT >> 20
            );
        }
        self.evict();
    }

    /// Reads the map of a process from the start, after the process has rewritten all of it.
    pub fn reread(&mut self, pid: u32) {
        self.maps.remove(&pid);
        self.refresh(pid);
    }

    /// Whether the map of a process has functions.
    pub fn has(&self, pid: u32) -> bool {
        let of_process = self.maps.get(&pid);
        of_process.is_some_and(|(_, map)| !map.functions.is_empty())
    }

    /// Returns the escaped name of a process's function at an address, and the offset from the function's start.
    pub fn find(&self, pid: u32, address: u64) -> Option<(String, u64)> {
        let (_, map) = self.maps.get(&pid)?;
        let (name, offset) = map.find(address)?;
        Some((text::display_name(name), offset))
    }

    /// Evicts the least recently read maps while all maps together are too large.
    fn evict(&mut self) {
        while self.maps.values().map(|(_, map)| map.kept).sum::<usize>() > MAX_KEPT {
            let oldest = self.maps.iter().min_by_key(|(_, (used, _))| *used);
            let Some(pid) = oldest.map(|(&pid, _)| pid) else {
                return;
            };
            self.maps.remove(&pid);
        }
    }
}

/// Opens the perf map of a process, whose name has the PID in the process's own namespace.
fn open(pid: u32) -> io::Result<File> {
    let process = Process::open(pid).map_err(io::Error::other)?;
    let name = format!("tmp/perf-{}.map", process.pid_in_its_namespace());
    let file = mapped_file::open_own(mapped_file::root_of(pid)?, Path::new(&name))?;
    let owner = file.metadata()?.uid();
    match process.user() {
        Some(user) if user == owner => Ok(file),
        _ => Err(io::ErrorKind::PermissionDenied.into()),
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Seek, Write};

    use proptest::prelude::*;

    use super::*;

    fn map(text: &[u8]) -> PerfMap {
        let mut file = tempfile::tempfile().expect("a file");
        file.write_all(text).expect("room");
        let mut map = PerfMap::default();
        map.read(&file).expect("its text");
        map
    }

    #[test]
    fn names_end_where_the_function_ends() {
        let map = map(b"1000 20 LazyCompile:~f a.js:1\n0x2000 0x8 g\nbroken\n3000 zz h\n");
        assert_eq!(map.find(0x1000), Some(("LazyCompile:~f a.js:1", 0)));
        assert_eq!(map.find(0x101f), Some(("LazyCompile:~f a.js:1", 0x1f)));
        assert_eq!(map.find(0x1020), None);
        assert_eq!(map.find(0x2007), Some(("g", 7)));
        assert_eq!(map.find(0xfff), None);
        assert_eq!(map.find(0x3000), None);
    }

    #[test]
    fn code_compiled_again_at_the_same_place_has_its_new_name() {
        let map = map(b"1000 20 old\n1000 10 new\n");
        assert_eq!(map.find(0x1008), Some(("new", 8)));
        assert_eq!(map.find(0x1018), Some(("old", 0x18)));
    }

    #[test]
    fn a_part_of_a_function_is_replaced() {
        // Freed code of V8 is before, around and behind what is compiled into its place later.
        let map = map(
            b"1000 100 before\n1100 100 behind\n2000 300 around\n10f0 20 new\n2100 80 within\n",
        );
        let ends = [
            (0x10ef, ("before", 0xef)),
            (0x10f0, ("new", 0)),
            (0x110f, ("new", 0x1f)),
        ];
        for (address, expected) in ends {
            assert_eq!(map.find(address), Some(expected), "{address:#x}");
        }
        assert_eq!(map.find(0x1110), Some(("behind", 0x10)));
        assert_eq!(map.find(0x20ff), Some(("around", 0xff)));
        assert_eq!(map.find(0x2100), Some(("within", 0)));
        assert_eq!(map.find(0x2180), Some(("around", 0x180)));
        assert_eq!(map.find(0x2300), None);
    }

    proptest! {
        #[test]
        fn each_address_has_what_its_last_line_says(
            lines in proptest::collection::vec((0_u64..256, 0_u64..64), 0..40),
        ) {
            let mut map = PerfMap::default();
            for (at, &(start, size)) in lines.iter().enumerate() {
                map.add(format!("{start:x} {size:x} {at}").as_bytes());
            }
            for address in 0..320 {
                let mut latest = lines.iter().enumerate().rev();
                let last = latest.find(|(_, (start, size))| (*start..start + size).contains(&address));
                let expected = last.map(|(at, (start, _))| (at.to_string(), address - start));
                let found = map.find(address).map(|(name, offset)| (name.to_owned(), offset));
                prop_assert_eq!(found, expected);
            }
            let kept: usize = map.functions.values().map(Function::kept).sum();
            prop_assert_eq!(map.kept, kept);
        }
    }

    #[test]
    fn only_what_was_added_is_read_again() {
        let mut file = tempfile::tempfile().expect("a file");
        let mut map = PerfMap::default();
        let first = format!("1000 10 first\n{:1$}\n", "", TAIL_BYTES);
        file.write_all(format!("{first}2000 10 sec").as_bytes())
            .expect("room");
        map.read(&file).expect("its text");
        assert_eq!(map.find(0x2000), Some(("sec", 0)));
        assert_eq!(map.read, first.len() as u64);
        // The bytes that were read are not read again, except for the last ones.
        file.write_all_at(b"1000 10 FIRST", 0).expect("room");
        file.write_all(b"ond\n3000 10 third\n").expect("room");
        map.read(&file).expect("its text");
        assert_eq!(map.find(0x1000), Some(("first", 0)));
        assert_eq!(map.find(0x2000), Some(("second", 0)));
        assert_eq!(map.find(0x3000), Some(("third", 0)));
        // A file that is shorter than before is read anew.
        file.set_len(14).expect("a shorter file");
        map.read(&file).expect("its text");
        assert_eq!(map.find(0x1000), Some(("FIRST", 0)));
        assert_eq!(map.find(0x3000), None);
    }

    #[test]
    fn a_file_that_was_written_anew_is_read_anew() {
        let mut file = tempfile::tempfile().expect("a file");
        let mut map = PerfMap::default();
        for (text, name) in [
            ("1000 10 Frames\n2000 10 gone\n", "Frames"),
            ("1000 10 Renamed\n3000 10 a longer one\n", "Renamed"),
        ] {
            file.rewind().expect("its beginning");
            file.write_all(text.as_bytes()).expect("room");
            map.read(&file).expect("its text");
            assert_eq!(map.find(0x1000), Some((name, 0)));
        }
        assert_eq!(map.find(0x2000), None);
    }

    #[test]
    fn a_long_line_is_cut_and_a_hole_is_no_line() {
        let long = "n".repeat(3 * CHUNK);
        let text = map(format!("1000 10 {long}\n2000 10 next\n").as_bytes());
        let (name, _) = text.find(0x1000).expect("a name");
        assert!(name.len() <= MAX_LINE && name.starts_with("nnn"));
        assert_eq!(text.find(0x2000), Some(("next", 0)));

        let hole = tempfile::tempfile().expect("a file");
        hole.set_len(16 << 30).expect("a hole");
        let mut map = PerfMap::default();
        for _ in 0..9 {
            map.read(&hole).expect("zeros");
        }
        assert_eq!((map.read, map.kept), (MAX_FILE, 0));
    }

    proptest! {
        #[test]
        fn what_is_read_in_parts_is_what_is_read_at_once(
            text in proptest::collection::vec(
                prop_oneof![Just(b'\n'), Just(b' '), Just(b'1'), Just(b'f'), any::<u8>()], 0..400,
            ),
            ends in proptest::collection::vec(0_usize..400, 0..5),
        ) {
            let corpus = include_bytes!("../../tests/hostile/corpus/perf.map");
            let text = [&corpus[..], &text].concat();
            let whole = map(&text);
            let mut file = tempfile::tempfile().expect("a file");
            let mut parts = PerfMap::default();
            let mut written = 0;
            for end in ends.into_iter().chain([text.len()]) {
                let end = end.clamp(written, text.len());
                file.write_all(&text[written..end]).expect("room");
                parts.read(&file).expect("its text");
                written = end;
            }
            // A line that was not complete can have had another address: such functions in `parts` do not matter.
            for (start, function) in &whole.functions {
                prop_assert_eq!(parts.functions.get(start), Some(function));
            }
        }
    }

    #[test]
    fn memory_is_bounded() {
        let mut file = tempfile::tempfile().expect("a file");
        let mut map = PerfMap::default();
        let mut line = 0_u64;
        while !map.full {
            let lines = (line..line + 200_000).map(|line| format!("{line:x} 1 f{line:0200}\n"));
            file.write_all(lines.collect::<String>().as_bytes())
                .expect("room");
            line += 200_000;
            map.read(&file).expect("its text");
        }
        assert!(map.kept <= MAX_KEPT && map.kept > MAX_KEPT - MAX_LINE - OVERHEAD);
        let kept = map.functions.values().map(Function::kept);
        assert_eq!(kept.sum::<usize>(), map.kept);
    }
}
