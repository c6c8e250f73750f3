//! What tests know of x86-64.

/// Name of the architecture in messages.
pub(crate) const NAME: &str = "x86-64";

/// Folder of Debian's libraries.
pub(crate) const LIBRARIES: &str = "/usr/lib/x86_64-linux-gnu";

/// Path of the dynamic linker.
pub(crate) const LOADER: &str = "/lib64/ld-linux-x86-64.so.2";

/// System calls of poll(2).
pub(crate) const POLL_CALLS: &[i64] = &[libc::SYS_poll, libc::SYS_ppoll];

/// System calls of epoll_wait(2).
pub(crate) const EPOLL_CALLS: &[i64] = &[libc::SYS_epoll_wait, libc::SYS_epoll_pwait];

/// Register in which workloads hold an address (`hold_in_one_register()` in tests/workload/wipe.h).
pub(crate) const HOLDING_REGISTER: &str = "r12";

/// Names of the flags of mmap(2) that the workload `mmap locked` adds.
pub(crate) const LOCKED: &[&str] = &["LOCKED", "32BIT"];

/// Parts of the folded kernel stack of a fault in a read of /dev/zero.
pub(crate) const ZEROES: &[&str] = &["read_zero_[k]", "read_iter_zero_[k]"];

/// Beginnings of the names of tests that cannot run on this architecture, each with the reason.
pub(crate) const NOT_HERE: &[(&str, &str)] = &[];
