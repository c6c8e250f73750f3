//! What the search for CPython's thread states needs of arm64. Places are counted from the thread's `struct pthread`,
//! which is below the thread pointer.

/// Offset in glibc's `struct pthread` of the values of the first 32 pthread keys: `specific_1stblock[].data`.
pub(super) const FIRST_KEY: u64 = 0x118;

/// Returns the offset in `_PyRuntime` of the pthread key of the thread state (`int created; unsigned key`) in version
/// 3.`minor`, which is behind mutexes of the C library. None in versions that were not examined.
pub(super) fn key_offset(minor: u8) -> Option<u64> {
    match minor {
        11 => Some(608),
        13 => Some(2160),
        _ => None,
    }
}

/// Reason why no frames are shown of version 3.`minor`.
pub(super) fn unsupported(minor: u8) -> Option<&'static str> {
    key_offset(minor)
        .is_none()
        .then_some("whose layout on arm64 is not known (3.11 and 3.13 are)")
}

/// Reason why no frames are shown of processes with musl: the kernel does not know where the `struct pthread` of their
/// threads is.
pub(super) const MUSL_UNSUPPORTED: Option<&str> =
    Some("with musl, which is not supported on arm64");

/// Returns the offset of the first thread-local variable that code loads: unknown.
pub(super) fn first_thread_local(_code: &[u8]) -> Option<i64> {
    None
}
