//! Files in memory that no folder has: those of memfd_create(2), and files of /dev/shm that were removed while a
//! process has them open. Their pages are in the kernel's Shmem, and in no process's numbers unless they are mapped.

use std::collections::HashMap;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;

use memtools::print::text;
use memtools::process::proc;

/// A file without a name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Nameless {
    /// What /proc calls it, escaped, such as `memfd:cache` or `/dev/shm/x`.
    pub(crate) file: String,
    /// A process that has it open, the one with the lowest number.
    pub(crate) pid: u32,
    /// Bytes that it has, in memory or swapped out.
    pub(crate) bytes: u64,
}

/// The largest of those that processes have open. Files of other mounts are never looked at, as a server that does
/// not answer would keep us.
pub(crate) fn largest() -> Option<Nameless> {
    let mut found: HashMap<(u64, u64), Nameless> = HashMap::new();
    for pid in proc::all().unwrap_or_default() {
        let open = fs::read_dir(format!("/proc/{pid}/fd"));
        // Who has gone, or is not ours to look at, has none.
        for entry in open.into_iter().flatten().flatten() {
            let path = entry.path();
            let target = fs::read_link(&path).unwrap_or_default();
            let Some(file) = without_name(target.as_os_str().as_bytes()) else {
                continue;
            };
            let Ok(stat) = fs::metadata(&path) else {
                continue;
            };
            let nameless = found
                .entry((stat.dev(), stat.ino()))
                .or_insert_with(|| Nameless {
                    file,
                    pid,
                    bytes: stat.blocks() * 512,
                });
            nameless.pid = nameless.pid.min(pid);
        }
    }
    found.into_values().max_by_key(|nameless| nameless.bytes)
}

/// The name in a link of /proc/PID/fd that leads to a file in memory without a name.
fn without_name(link: &[u8]) -> Option<String> {
    let file = link.strip_suffix(b" (deleted)")?;
    let is_in_memory = file.starts_with(b"/memfd:") || file.starts_with(b"/dev/shm/");
    let file = file
        .strip_prefix(b"/")
        .filter(|name| name.starts_with(b"memfd:"))
        .unwrap_or(file);
    is_in_memory.then(|| text::escape_bytes(file))
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use nix::sys::memfd::{MFdFlags, memfd_create};

    use super::*;

    #[test]
    fn links_to_files_without_a_name() {
        let name = |link: &str| without_name(link.as_bytes());
        assert_eq!(name("/memfd:a b (deleted)").as_deref(), Some("memfd:a b"));
        assert_eq!(
            name("/dev/shm/x\x1b (deleted)").as_deref(),
            Some("/dev/shm/x\\x1b")
        );
        for other in [
            "/dev/shm/x",
            "/tmp/memfd: (deleted)",
            "socket:[7]",
            "/net/file (deleted)",
            "",
        ] {
            assert_eq!(name(other), None, "{other}");
        }
    }

    #[test]
    fn a_file_of_memfd_create_is_found() {
        let file = memfd_create("memtools nameless", MFdFlags::MFD_CLOEXEC).expect("a file");
        let mut file = fs::File::from(file);
        file.write_all(&vec![1; 67 << 20]).expect("memory");
        // Unless another process has a larger one.
        let largest = largest().expect("a file");
        assert!(largest.bytes >= 67 << 20, "{largest:?}");
        if largest.bytes == 67 << 20 {
            assert_eq!(largest.file, "memfd:memtools nameless");
            assert_eq!(largest.pid, std::process::id());
        }
        drop(file);
    }
}
