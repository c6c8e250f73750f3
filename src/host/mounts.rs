//! Mounted file systems, and the mount points of cgroups among them.

use std::ffi::OsString;
use std::fs;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

/// Mounted file system, from a line of `/proc/self/mounts`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mount {
    /// The mount point.
    pub folder: PathBuf,
    /// The type of the file system, such as `tmpfs`.
    pub kind: String,
    options: String,
}

impl Mount {
    /// Returns whether the file system is mounted with this option. For cgroups of version 1, a controller is an
    /// option.
    pub fn has_option(&self, option: &str) -> bool {
        self.options().any(|one| one == option)
    }

    /// Iterates over the options, such as `rw` and `hidepid=2`.
    pub(crate) fn options(&self) -> impl Iterator<Item = &str> {
        self.options.split(',')
    }

    /// Returns whether the file system is a hierarchy of cgroups, of version 1 or 2.
    pub(crate) fn is_of_cgroups(&self) -> bool {
        ["cgroup", "cgroup2"].contains(&&*self.kind)
    }
}

/// Mounted file systems that this process sees, in the order in which they were mounted.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Mounts(Vec<Mount>);

impl Mounts {
    /// Returns the present mounts; empty if /proc is not mounted.
    pub fn now() -> Self {
        Self::parse(&fs::read("/proc/self/mounts").unwrap_or_default())
    }

    /// Parses the lines of a mounts file: device, mount point, type, options. Other lines are ignored.
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

    /// Iterates over all mounts.
    pub fn iter(&self) -> impl Iterator<Item = &Mount> {
        self.0.iter()
    }

    /// Returns the mount point of cgroups of version 2, the first of several.
    pub fn cgroup2(&self) -> Option<&Path> {
        let mut mounts = self.iter();
        mounts
            .find(|mount| mount.kind == "cgroup2")
            .map(|mount| &*mount.folder)
    }

    /// Returns the mount point of cgroups of version 1 with the memory controller, the first of several. A mount with
    /// this controller is possible only if the controller is not bound to version 2.
    pub fn cgroup1_memory(&self) -> Option<&Path> {
        let mut mounts = self.iter();
        mounts
            .find(|mount| mount.kind == "cgroup" && mount.has_option("memory"))
            .map(|mount| &*mount.folder)
    }

    /// Returns the mount point of the cgroups with memory limits: of version 1 if it has the memory controller,
    /// otherwise of version 2. The controller is bound to only one hierarchy.
    pub(crate) fn memory_limits(&self) -> Option<&Path> {
        self.cgroup1_memory().or(self.cgroup2())
    }
}

/// Decodes spaces, tabs, newlines and backslashes, which the kernel writes in octal: `\040`.
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
