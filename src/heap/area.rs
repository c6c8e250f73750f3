//! Mapping of a process with its permissions.

use std::ops::Range;
use std::os::unix::ffi::OsStrExt;

use crate::process::proc::Mapping;

/// One line of /proc/PID/maps.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Area {
    /// Address range, with the path, offset, device and inode of the file, or with a name such as `[heap]`.
    pub mapping: Mapping,
    /// Whether the process may read the memory.
    pub readable: bool,
    /// Whether the process may write to the memory.
    pub writable: bool,
    /// Whether writes to the memory are seen by other processes, too (MAP_SHARED).
    pub shared: bool,
}

impl Area {
    /// Parses the text of a `maps` file. Returns the areas in order of their addresses, without lines that cannot be
    /// parsed.
    pub fn parse_list(maps: &[u8]) -> Vec<Self> {
        let mut areas: Vec<_> = maps
            .split(|&byte| byte == b'\n')
            .filter_map(Self::parse)
            .filter(|area| area.mapping.range.start < area.mapping.range.end)
            .collect();
        areas.sort_by_key(|area| area.mapping.range.start);
        areas.dedup_by(|next, area| next.mapping.range.start < area.mapping.range.end);
        areas
    }

    fn parse(line: &[u8]) -> Option<Self> {
        let mapping = Mapping::parse(line)?;
        // 55d0c8a00000-55d0c8a21000 r-xp ...
        let permissions = line.split(|&byte| byte == b' ').nth(1)?;
        let has = |at: usize, letter: u8| permissions.get(at) == Some(&letter);
        Some(Self {
            mapping,
            readable: has(0, b'r'),
            writable: has(1, b'w'),
            shared: has(3, b's'),
        })
    }

    /// Size up to which the data of a file are searched for structures that take long to find, in bytes.
    pub(super) const SEARCHED: u64 = 64 << 20;

    /// Returns the writable private data of each mapped file, with the zeros (bss) that follow the data. The data of
    /// a file are extended by the next area up to a size of `most` bytes.
    pub(super) fn data_of_files(areas: &[Self], most: u64) -> Vec<(&[u8], Range<u64>)> {
        let mut found: Vec<(&[u8], Range<u64>)> = Vec::new();
        for area in areas.iter().filter(|area| area.writable && !area.shared) {
            let range = area.mapping.range.clone();
            let last = found.last_mut().filter(|(file, data)| {
                let continues = area.name().is_empty() || area.name() == *file;
                continues && data.end == range.start
            });
            if let Some((_, data)) = last {
                data.end = range.end.min(data.start.saturating_add(most)).max(data.end);
            } else if area.has_file() && area.name().starts_with(b"/") {
                found.push((area.name(), range));
            }
        }
        found
    }

    /// Returns the path of the file, a name such as `[heap]`, or nothing, as the kernel prints it.
    pub fn name(&self) -> &[u8] {
        self.mapping.path.as_os_str().as_bytes()
    }

    /// Whether the area maps a file, tmpfs included.
    pub fn has_file(&self) -> bool {
        self.mapping.inode != 0
    }

    /// Whether the area is shared memory that no file on a disk is behind, by its name.
    pub fn is_in_memory(&self) -> bool {
        const NAMES: [&[u8]; 4] = [b"/dev/zero", b"/dev/shm/", b"/SYSV", b"/memfd:"];
        NAMES.iter().any(|name| self.name().starts_with(name))
    }

    /// Whether the area is a device's or the kernel's memory. Reading the registers of a device can change them. The
    /// kernel refuses most such reads (VM_IO, VM_PFNMAP).
    pub(super) fn is_of_device(&self) -> bool {
        let starts = |prefix: &[u8]| self.name().starts_with(prefix);
        starts(b"/dev/") && !starts(b"/dev/shm/") && !starts(b"/dev/zero")
            || [&b"anon_inode:"[..], b"[vvar", b"[vsyscall"]
                .into_iter()
                .any(starts)
    }

    /// Whether the area is private memory without a file, which is what allocators map.
    pub fn is_private_anonymous(&self) -> bool {
        let name = self.name();
        let anonymous = name.is_empty() || name == b"[heap]" || name.starts_with(b"[anon:");
        anonymous && !self.shared && !self.has_file()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn areas_have_their_permissions() {
        let areas = Area::parse_list(
            b"7f0000-7f2000 rw-s 00000000 00:01 12 /dev/shm/x\n\
              1000-3000 r-xp 00000000 fe:00 7 /bin/cat\n\
              2000-4000 rw-p 00000000 00:00 0 \n\
              5000-6000 rw-p 00000000 00:00 0 [heap]\n\
              7000-7000 rw-p 00000000 00:00 0 \n\
              garbage\n",
        );
        let starts: Vec<_> = areas.iter().map(|area| area.mapping.range.start).collect();
        assert_eq!(starts, [0x1000, 0x5000, 0x7f0000]);
        let [code, heap, shared] = &areas[..] else {
            panic!("three areas: {areas:?}");
        };
        assert!(code.readable && !code.writable && code.mapping.executable && code.has_file());
        assert!(heap.is_private_anonymous() && heap.writable && !heap.has_file());
        assert!(shared.shared && shared.has_file() && !shared.is_private_anonymous());
    }

    #[test]
    fn data_are_extended_by_the_zeros_behind_them() {
        let areas = Area::parse_list(
            b"1000-2000 r--p 00000000 fe:00 7 /bin/cat\n\
              2000-3000 rw-p 00001000 fe:00 7 /bin/cat\n\
              3000-5000 rw-p 00000000 00:00 0 \n\
              6000-7000 rw-p 00000000 00:00 0 \n\
              10000000-10001000 rw-p 00000000 fe:00 9 /bin/large\n\
              10001000-20000000 rw-p 00000000 00:00 0 \n\
              20000000-20001000 rw-s 00000000 fe:00 8 /dev/shm/x\n",
        );
        let (small, large) = (0x2000..0x5000, 0x1000_0000..0x1400_0000);
        assert_eq!(
            Area::data_of_files(&areas, Area::SEARCHED),
            [(&b"/bin/cat"[..], small), (&b"/bin/large"[..], large)]
        );
        let whole = Area::data_of_files(&areas, u64::MAX);
        assert_eq!(whole[1].1, 0x1000_0000..0x2000_0000);
    }
}
