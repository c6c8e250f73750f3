//! Names and paths of files, as `bpf/include/file.bpf.h` writes them.

use crate::print::text;

/// Extent to which a path is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PathExtent {
    /// The whole path is known, up to the root of the process's files.
    Complete,
    /// The file is in no directory, such as a file of memfd_create(2).
    Unlinked,
    /// Folders at the beginning are missing, as the path is too long.
    Truncated,
}

/// Returns a file's name, escaped. `record` is the name, with its NUL and what may follow.
pub fn name(record: &[u8]) -> String {
    let end = record.iter().position(|&byte| byte == 0);
    text::escape_bytes(&record[..end.unwrap_or(record.len())])
}

/// Returns a file's path, escaped. `record` holds its names from the file upwards, each with its NUL. A file in no
/// directory is written as in /proc/PID/maps: `/dev/zero (deleted)` is shared anonymous memory.
pub fn path(record: &[u8], reach: PathExtent) -> String {
    let names = record.strip_suffix(b"\0").unwrap_or(record);
    let mut path = String::new();
    if reach == PathExtent::Truncated {
        path.push_str("...");
    }
    for name in names.split(|&byte| byte == 0).rev() {
        path.push('/');
        path.push_str(&text::escape_bytes(name));
    }
    if reach == PathExtent::Unlinked {
        path.push_str(" (deleted)");
    }
    path
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_ends_at_its_nul() {
        assert_eq!(name(b"libc.so.6\0rest"), "libc.so.6");
        assert_eq!(name(b"\x1b[m"), "\\x1b[m");
        assert_eq!(name(b""), "");
    }

    #[test]
    fn a_path_is_written_from_the_root() {
        assert_eq!(
            path(b"libc.so.6\0lib\0usr\0", PathExtent::Complete),
            "/usr/lib/libc.so.6"
        );
        assert_eq!(
            path(b"memfd:x\0", PathExtent::Unlinked),
            "/memfd:x (deleted)"
        );
        assert_eq!(
            path(b"file\0deep\0", PathExtent::Truncated),
            ".../deep/file"
        );
        assert_eq!(path(b"", PathExtent::Complete), "/");
    }
}
