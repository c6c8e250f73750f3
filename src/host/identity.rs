//! Names by which this machine, and the time since its boot, are told from others.

use std::fs;
use std::sync::OnceLock;

use nix::unistd;

use crate::print::text;

/// Returns the host's name, escaped.
pub fn host_name() -> &'static str {
    static NAME: OnceLock<String> = OnceLock::new();
    NAME.get_or_init(|| {
        let name = unistd::gethostname().unwrap_or_default();
        text::escape_bytes(name.as_encoded_bytes())
    })
}

/// Returns the random id that the kernel has chosen when it was booted, as a UUID; empty if it cannot be read.
pub fn boot_id() -> &'static str {
    static ID: OnceLock<String> = OnceLock::new();
    ID.get_or_init(|| {
        let id = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        id.trim().to_owned()
    })
}
