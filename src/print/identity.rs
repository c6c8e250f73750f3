//! Fields that identify the tool, the machine and its boot in each line of JSON.

use std::fs;
use std::sync::OnceLock;

use nix::unistd;
use serde::Serialize;

use crate::print::{message, text};

/// Version of the tools' JSON objects and their fields, which the man pages list. A new type of object or a new field
/// leaves the number as it is. The number rises when a type or field is removed, is renamed or changes its meaning.
pub const SCHEMA: u32 = 1;

/// Fields that each line of JSON ends with.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Identity {
    tool: &'static str,
    host: &'static str,
    boot_id: &'static str,
    schema: u32,
}

impl Identity {
    /// Returns the fields of this tool.
    pub fn of_this_tool() -> Self {
        Self {
            tool: message::tool(),
            host: host_name(),
            boot_id: boot_id(),
            schema: SCHEMA,
        }
    }

    /// Returns the host's name, escaped.
    pub fn host(&self) -> &'static str {
        self.host
    }
}

/// Returns the host's name, escaped.
pub(crate) fn host_name() -> &'static str {
    static NAME: OnceLock<String> = OnceLock::new();
    NAME.get_or_init(|| {
        let name = unistd::gethostname().unwrap_or_default();
        text::escape_bytes(name.as_encoded_bytes())
    })
}

/// Returns the random id that the kernel has chosen when it was booted, as a UUID; empty if it cannot be read.
fn boot_id() -> &'static str {
    static ID: OnceLock<String> = OnceLock::new();
    ID.get_or_init(|| {
        let id = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        id.trim().to_owned()
    })
}
