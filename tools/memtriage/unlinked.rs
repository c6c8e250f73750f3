//! Files in memory without a name: those of memfd_create(2), and files of /dev/shm that were removed while a process
//! has them open. The kernel counts their pages in Shmem. No process counts them unless they are mapped.

use std::collections::HashMap;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;

use memtools::print::text;
use memtools::process::proc;

/// File in memory without a name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct UnlinkedFile {
    /// Name in /proc, escaped, such as `memfd:cache` or `/dev/shm/x`.
    pub(crate) file: String,
    /// Pid of a process that has the file open, the lowest of all.
    pub(crate) pid: u32,
    /// Size of the file in memory and swap, in bytes.
    pub(crate) bytes: u64,
}

/// Returns the largest file without a name that a process has open. Files of other mounts are never looked at, as a
/// server that does not answer would block memtriage.
pub(crate) fn largest() -> Option<UnlinkedFile> {
    let mut found: HashMap<(u64, u64), UnlinkedFile> = HashMap::new();
    for pid in proc::all().unwrap_or_default() {
        for (number, target) in proc::open_files(pid) {
            let Some(file) = without_name(target.as_os_str().as_bytes()) else {
                continue;
            };
            let Ok(stat) = fs::metadata(proc::file(pid, &format!("fd/{number}"))) else {
                continue;
            };
            let nameless = found
                .entry((stat.dev(), stat.ino()))
                .or_insert_with(|| UnlinkedFile {
                    file,
                    pid,
                    bytes: stat.blocks() * 512,
                });
            nameless.pid = nameless.pid.min(pid);
        }
    }
    found.into_values().max_by_key(|nameless| nameless.bytes)
}

/// Returns the name in a link of /proc/PID/fd. None if the link does not lead to a file in memory without a name.
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
        // Another process may have a larger file.
        let largest = largest().expect("a file");
        assert!(largest.bytes >= 67 << 20, "{largest:?}");
        if largest.bytes == 67 << 20 {
            assert_eq!(largest.file, "memfd:memtools nameless");
            assert_eq!(largest.pid, std::process::id());
        }
        drop(file);
    }
}
