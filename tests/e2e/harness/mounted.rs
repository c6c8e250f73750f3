//! File systems that tests mount.

use std::path::Path;

use anyhow::Result;
use nix::mount::{MsFlags, mount, umount};

/// Mounted file system. Dropping the value unmounts it.
pub(crate) struct Mounted<'a>(&'a Path);

impl<'a> Mounted<'a> {
    /// Mounts a `tmpfs` with the size limit `room`, such as `64k`.
    pub(crate) fn tmpfs(at: &'a Path, room: &str) -> Result<Self> {
        Self::new("tmpfs", at, Some(&format!("size={room}")))
    }

    /// Mounts a `hugetlbfs`.
    pub(crate) fn hugetlbfs(at: &'a Path) -> Result<Self> {
        Self::new("hugetlbfs", at, None)
    }

    fn new(kind: &str, at: &'a Path, options: Option<&str>) -> Result<Self> {
        mount(Some("none"), at, Some(kind), MsFlags::empty(), options)?;
        Ok(Self(at))
    }
}

impl Drop for Mounted<'_> {
    fn drop(&mut self) {
        let _ = umount(self.0);
    }
}
