//! The other tools, which are installed beside this one.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use memtools::print::text;

/// The tool of this name that was installed with memtriage, under a name with the same suffix.
///
/// # Errors
/// If there is none.
pub(crate) fn beside(tool: &str) -> Result<PathBuf> {
    let own = std::env::current_exe().context("failed to find the other tools")?;
    let name = own.file_name().and_then(|name| name.to_str());
    let suffix = name.and_then(|name| name.strip_prefix("memtriage"));
    let other = own.with_file_name(format!("{tool}{}", suffix.unwrap_or_default()));
    let folder = own.parent().unwrap_or(Path::new("/"));
    ensure!(
        other.is_file(),
        "there is no {tool} beside memtriage, in {}",
        text::escape_bytes(folder.as_os_str().as_encoded_bytes())
    );
    Ok(other)
}
