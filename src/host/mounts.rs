//! File systems that are mounted here, and where among them cgroups are.

use std::ffi::OsString;
use std::fs;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

/// A mounted file system, as a line of `/proc/self/mounts` has it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mount {
    /// The folder that it is mounted on.
    pub folder: PathBuf,
    /// The kind of file system, such as `tmpfs`.
    pub kind: String,
    options: String,
}

impl Mount {
    /// Whether it is mounted with this option: of cgroups of version 1, a controller.
    pub fn has_option(&self, option: &str) -> bool {
        self.options.split(',').any(|one| one == option)
    }
}

/// The file systems that this process sees, in the order in which they were mounted.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Mounts(Vec<Mount>);

impl Mounts {
    /// What is mounted now; nothing if /proc is not.
    pub fn now() -> Self {
        Self::parse(&fs::read("/proc/self/mounts").unwrap_or_default())
    }

    /// The lines of such a file: device, folder, kind, options. Others are left out.
    pub fn parse(lines: &[u8]) -> Self {
        let mount = |line: &[u8]| {
            let mut fields = line.split(|&byte| byte == b' ').skip(1);
            let folder = fields.next()?;
            let mut text = || Some(String::from_utf8_lossy(fields.next()?).into_owned());
            Some(Mount {
                kind: text()?,
                options: text()?,
                folder: OsString::from_vec(unescaped(folder)).into(),
            })
        };
        Self(
            lines
                .split(|&byte| byte == b'\n')
                .filter_map(mount)
                .collect(),
        )
    }

    /// All of them.
    pub fn iter(&self) -> impl Iterator<Item = &Mount> {
        self.0.iter()
    }

    /// Where cgroups of version 2 are: the first of the places.
    pub fn cgroup2(&self) -> Option<&Path> {
        let mut mounts = self.iter();
        mounts
            .find(|mount| mount.kind == "cgroup2")
            .map(|mount| &*mount.folder)
    }

    /// Where cgroups of version 1 are that have the memory controller: the first of the places. They can
    /// be mounted with it only if it is not bound to version 2.
    pub fn cgroup1_memory(&self) -> Option<&Path> {
        let mut mounts = self.iter();
        mounts
            .find(|mount| mount.kind == "cgroup" && mount.has_option("memory"))
            .map(|mount| &*mount.folder)
    }

    /// Where the cgroups with memory limits are: those of version 1 if they have the controller, which is
    /// bound to one hierarchy.
    pub fn memory_limits(&self) -> Option<&Path> {
        self.cgroup1_memory().or(self.cgroup2())
    }
}

/// The kernel writes spaces, tabs, newlines and backslashes in octal: `\040`.
fn unescaped(text: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut left = text;
    while let [first, rest @ ..] = left {
        let octal = rest.first_chunk().and_then(|digits: &[u8; 3]| {
            let digits = str::from_utf8(digits).ok()?;
            u8::from_str_radix(digits, 8).ok()
        });
        match octal.filter(|_| *first == b'\\') {
            Some(byte) => {
                bytes.push(byte);
                left = &rest[3..];
            }
            None => {
                bytes.push(*first);
                left = rest;
            }
        }
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cgroups_are_found_where_they_are_first() {
        let mounts = Mounts::parse(
            b"proc /proc proc rw 0 0\n\
              cgroup /sys/fs/cgroup/cpu cgroup rw,cpu,cpuacct 0 0\n\
              cgroup /sys/fs/cgroup/memory cgroup rw,memory 0 0\n\
              cgroup2 /sys/fs/cgroup/unified cgroup2 rw 0 0\n\
              cgroup2 /elsewhere cgroup2 rw 0 0\nx\n",
        );
        assert_eq!(mounts.iter().count(), 5);
        assert_eq!(mounts.cgroup2(), Some(Path::new("/sys/fs/cgroup/unified")));
        assert_eq!(
            mounts.cgroup1_memory(),
            Some(Path::new("/sys/fs/cgroup/memory"))
        );
        assert_eq!(mounts.memory_limits(), mounts.cgroup1_memory());
        let second = Mounts::parse(b"cgroup2 /sys/fs/cgroup cgroup2 rw 0 0\n");
        assert_eq!(second.memory_limits(), Some(Path::new("/sys/fs/cgroup")));
        let none = Mounts::parse(b"proc /proc proc rw 0 0\n");
        assert_eq!((none.cgroup2(), none.cgroup1_memory()), (None, None));
    }

    #[test]
    fn folders_with_spaces_are_named_as_they_are() {
        let mounts = Mounts::parse(b"none /a\\040b\\134c\\9 cgroup2 rw 0 0\n");
        assert_eq!(mounts.cgroup2(), Some(Path::new("/a b\\c\\9")));
    }

    #[test]
    fn proc_itself_is_mounted() {
        let mounts = Mounts::now();
        assert!(
            mounts
                .iter()
                .any(|mount| mount.folder == Path::new("/proc"))
        );
    }
}
