//! What the search for CPython's thread states needs of x86-64.

/// Offset from the thread pointer of the values of the first 32 pthread keys in glibc, whose `struct pthread` begins at
/// the thread pointer: `specific_1stblock[].data`.
pub(super) const FIRST_KEY: u64 = 0x318;

/// Returns the offset in `_PyRuntime` of the pthread key of the thread state (`int created; unsigned key`) in version
/// 3.`minor`, which is behind mutexes of the C library. None in versions without a key.
pub(super) fn key_offset(minor: u8) -> Option<u64> {
    match minor {
        10 => Some(584),
        11 => Some(592),
        12 => Some(1544),
        13 => Some(2160),
        14 => Some(2336),
        _ => None,
    }
}

/// Reason why no frames are shown of a supported version 3.`minor`: none.
pub(super) fn unsupported(_minor: u8) -> Option<&'static str> {
    None
}

/// Reason why no frames are shown of processes with musl: none.
pub(super) const MUSL_UNSUPPORTED: Option<&str> = None;

/// Returns the offset from the thread pointer of the first thread-local variable that code loads.
pub(super) fn first_thread_local(code: &[u8]) -> Option<i64> {
    const LOAD: &[u8] = b"\x64\x48\x8b\x04\x25"; // mov %fs:offset, %rax
    let load = memchr::memmem::find(code, LOAD)?;
    let offset = code.get(load + LOAD.len()..)?.first_chunk()?;
    Some(i32::from_le_bytes(*offset).into())
}
