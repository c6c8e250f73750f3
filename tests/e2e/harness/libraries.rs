//! Names of libraries that differ between distributions. tests/placement.rs and tests/wrappers.rs use this file, too.

use std::path::Path;

/// Folder of libraries on Debian and Ubuntu.
pub(crate) const FOLDER: &str = super::arch::LIBRARIES;

/// Returns the name of mimalloc's library: Debian has version 2 up to 13, and then version 3.
pub(crate) fn mimalloc() -> &'static str {
    let new = "libmimalloc.so.3";
    if Path::new(FOLDER).join(new).exists() {
        new
    } else {
        "libmimalloc.so.2"
    }
}
