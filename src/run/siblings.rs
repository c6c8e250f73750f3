//! Tools that are installed beside the one that runs.

use std::env;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

use crate::print::{message, text};

/// Returns the path of the tool that was installed with this one under this name, with the same suffix, such as
/// `memleak-mt` beside `memtriage-mt`.
///
/// # Errors
/// If the tool is missing.
pub fn path(tool: &str) -> Result<PathBuf> {
    let own = env::current_exe().context("failed to find the other tools")?;
    let name = own.file_name().and_then(|name| name.to_str());
    let suffix = name.and_then(|name| name.strip_prefix(message::tool()));
    let other = own.with_file_name(format!("{tool}{}", suffix.unwrap_or_default()));
    let folder = own.parent().unwrap_or(Path::new("/"));
    ensure!(
        other.is_file(),
        "there is no {tool} beside {}, in {}",
        message::tool(),
        text::escape_bytes(folder.as_os_str().as_encoded_bytes())
    );
    Ok(other)
}
