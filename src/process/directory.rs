//! Directories and files that are read by system calls alone, as a forked child of a process with threads has to: another
//! thread may have held a lock, of the allocator for example, which then stays locked in the child.

use std::ffi::CStr;
use std::os::fd::{AsRawFd, OwnedFd};

use nix::errno::Errno;
use nix::fcntl::{OFlag, open};
use nix::sys::stat::Mode;
use nix::unistd::read;

/// Bytes of a path, with its NUL.
const PATH: usize = 64;
/// Bytes of a directory's entries that are read at a time.
const ENTRIES: usize = 4096;

/// Path that is on the stack.
#[derive(Debug)]
pub(super) struct ShortPath([u8; PATH]);

impl ShortPath {
    /// Joins the parts of a path. A path that is too long is cut.
    pub(super) fn of(parts: &[&[u8]]) -> Self {
        let mut bytes = [0; PATH];
        let all = parts.iter().copied().flatten();
        for (to, from) in bytes[..PATH - 1].iter_mut().zip(all) {
            *to = *from;
        }
        Self(bytes)
    }

    pub(super) fn as_c_str(&self) -> &CStr {
        CStr::from_bytes_until_nul(&self.0).unwrap_or(c"")
    }
}

fn open_to_read(path: &CStr, flags: OFlag) -> Result<OwnedFd, Errno> {
    open(
        path,
        OFlag::O_RDONLY | OFlag::O_CLOEXEC | flags,
        Mode::empty(),
    )
}

/// Calls `each` with every name in a directory that is a number, as those of processes are.
pub(super) fn each_number(folder: &CStr, mut each: impl FnMut(&[u8])) -> Result<(), Errno> {
    /// Offsets of an entry's length and name in struct linux_dirent64.
    const LENGTH: usize = 16;
    const NAME: usize = 19;
    let folder = open_to_read(folder, OFlag::O_DIRECTORY)?;
    let mut entries = [0_u8; ENTRIES];
    loop {
        // SAFETY: the kernel writes entries of at most so many bytes.
        let length = unsafe {
            let to = entries.as_mut_ptr();
            libc::syscall(libc::SYS_getdents64, folder.as_raw_fd(), to, ENTRIES)
        };
        let mut left = match Errno::result(length)? {
            0 => return Ok(()),
            length => &entries[..length as usize],
        };
        while let Some(&[low, high]) = left.get(LENGTH..NAME - 1) {
            let length = usize::from(u16::from_ne_bytes([low, high]));
            let Some((entry, rest)) = left.split_at_checked(length.max(NAME)) else {
                break;
            };
            let name = entry[NAME..].split(|byte| *byte == 0).next();
            let name = name.unwrap_or_default();
            if !name.is_empty() && name.iter().all(u8::is_ascii_digit) {
                each(name);
            }
            left = rest;
        }
    }
}

/// Returns the first byte of a file; 0 if it is empty.
pub(super) fn first_byte(path: &CStr) -> Result<u8, Errno> {
    let file = open_to_read(path, OFlag::empty())?;
    let mut byte = [0];
    read(&file, &mut byte)?;
    Ok(byte[0])
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::process;

    use super::*;

    #[test]
    fn numbers_in_a_directory_are_those_that_it_has() {
        // More than fit into one read.
        let folder = tempfile::tempdir().expect("a folder");
        let names: BTreeSet<String> = (0..997).map(|name| (name * 7919).to_string()).collect();
        for name in names.iter().map(String::as_str).chain(["self", "12a"]) {
            std::fs::write(folder.path().join(name), "").expect("a file");
        }
        let path = std::ffi::CString::new(folder.path().to_str().expect("UTF-8"));
        let path = path.expect("no NUL");
        let mut found = BTreeSet::new();
        let listed = each_number(&path, |name| {
            found.insert(String::from_utf8_lossy(name).into_owned());
        });
        assert_eq!(listed, Ok(()));
        assert_eq!(found, names);
        assert_eq!(each_number(c"/proc/none", |_| {}), Err(Errno::ENOENT));
    }

    #[test]
    fn first_bytes_and_paths() {
        let pid = process::id().to_string();
        let stat = ShortPath::of(&[b"/proc/", pid.as_bytes(), b"/stat"]);
        assert_eq!(first_byte(stat.as_c_str()), Ok(pid.as_bytes()[0]));
        assert_eq!(first_byte(c"/dev/null"), Ok(0));
        let long = ShortPath::of(&[&[b'a'; 2 * PATH]]);
        assert_eq!(long.as_c_str().to_bytes().len(), PATH - 1);
    }
}
